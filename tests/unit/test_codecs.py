"""Encodings: lossless for every bit pattern and every gap, small, and refused when they make no sense."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awex_delta.errors import CorruptFrameError, StaleFrameError, WireError
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.lines.storages import gather_from, scatter_into
from awex_delta.wire.choice import cheapest, expected_bytes
from awex_delta.wire.codec import Codec, Context, RegionChange, settle, whole_is_smaller
from awex_delta.wire.frame import FrameIdentity, pack_frame, unpack_frame
from awex_delta.wire.gaps import GapCodec
from awex_delta.wire.registry import CODECS, codecs_for
from awex_delta.wire.streams import (
    StreamReader,
    StreamWriter,
    check_read,
    entropy_bytes,
    open_streams,
    streams_limit,
)

BF16 = torch.bfloat16
# Levels that small test data already overflows, as regions above 2^31 elements overflow the real ones.
TINY = ((torch.uint8, 2), (torch.uint16, 5), (torch.uint32, 11))
TINY_CODECS = [
    GapCodec(name=f"tiny {steps}", number=90 + steps, steps=steps, compress=False, levels=TINY)
    for steps in (False, True)
]
ALL = [*CODECS.values(), *TINY_CODECS]
GAP_CODECS = [codec for codec in ALL if isinstance(codec, GapCodec)]
IDENTITY = FrameIdentity(
    run_id="0123456789abcdef" * 2,
    base_version=41,
    target_version=42,
    plan=7,
    sender=3,
    receiver=1,
    dtype=BF16,
)


def named(codec: Codec) -> str:
    return codec.name


def bits(values: Sequence[int]) -> torch.Tensor:
    """bf16 values of the given 16-bit patterns."""
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(BF16)


def region(old: torch.Tensor, new: torch.Tensor, index: torch.Tensor, unstated: int = 0) -> RegionChange:
    """The change of `old` to `new` at `index`; the first `unstated` of them state no step."""
    code = step_code(old[index], new[index])
    code[:unstated] = UNSTATED
    after = old.clone()
    after[index] = new[index]
    return RegionChange(numel=old.numel(), index=index, value=new[index], code=code, context=context(after))


def context(weights: torch.Tensor) -> Context:
    """Of a region that its sender owns whole."""
    return Context(owned=((0, weights.numel()),), read=lambda start, stop: weights[start:stop])


def there_and_back(codec: Codec, changes: Sequence[RegionChange], olds: Sequence[torch.Tensor]) -> None:
    """Through a frame and onto the old values: every position and every bit is as it was."""
    numels = [change.numel for change in changes]
    frame = pack_frame(IDENTITY, codec, changes)
    contexts = [change.context and context(old) for change, old in zip(changes, olds, strict=True)]
    found = unpack_frame(frame, IDENTITY, [codec], numels, contexts)
    for want, got, old in zip(changes, found, olds, strict=True):
        if want.index is None or got.index is None:
            assert got.index is want.index
            final = got
        else:
            assert got.index.tolist() == want.index.tolist()
            final = settle(got, old[got.index])
        assert final.code is None
        assert final.value.view(torch.int16).tolist() == want.value.view(torch.int16).tolist()


PATTERNS = st.one_of(
    st.integers(0, 0xFFFF),
    # zeros, subnormals, the largest finite, infinities, quiet and signalling NaNs with payloads
    st.sampled_from(
        [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]
    ),
)


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[RegionChange], list[torch.Tensor]]:
    changes, olds = [], []
    for numel in draw(st.lists(st.integers(1, 80), max_size=5)):
        patterns = st.lists(PATTERNS, min_size=numel, max_size=numel)
        old = bits(draw(patterns))
        near = draw(st.booleans())  # a few units away, as a step moves it, or anything at all
        new = (
            bits([(p + 1) & 0xFFFF for p in old.view(torch.int16).tolist()]) if near else bits(draw(patterns))
        )
        index = torch.tensor(sorted(draw(st.sets(st.integers(0, numel - 1)))), dtype=torch.int64)
        change = region(old, new, index, unstated=draw(st.integers(0, 3)))
        changes.append(replace(change, code=None) if draw(st.booleans()) else change)
        if draw(st.integers(0, 4)) == 0:
            changes[-1] = RegionChange(numel=numel, value=new)
        olds.append(old)
    return changes, olds


@pytest.mark.parametrize("codec", ALL, ids=named)
@settings(max_examples=60)
@given(update=updates())
def test_any_update_comes_back_bit_for_bit(
    codec: Codec, update: tuple[list[RegionChange], list[torch.Tensor]]
) -> None:
    there_and_back(codec, *update)


@pytest.mark.parametrize("codec", ALL, ids=named)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(update=updates())
def test_the_size_of_the_pieces_changes_nothing(
    codec: Codec,
    monkeypatch: pytest.MonkeyPatch,
    update: tuple[list[RegionChange], list[torch.Tensor]],
) -> None:
    changes, olds = update
    monkeypatch.undo()
    frame = pack_frame(IDENTITY, codec, changes)
    for piece in (2, 6):
        monkeypatch.setattr("awex_delta.wire.pieces.PIECE", piece)
        assert torch.equal(pack_frame(IDENTITY, codec, changes), frame)
        there_and_back(codec, changes, olds)


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("step", [1, -1, 2, -126, 126, 127, 128, 0x7FFF, 0x4000])
def test_every_bit_pattern_as_old_value(codec: Codec, step: int) -> None:
    patterns = torch.arange(0x10000)
    old = bits(patterns.tolist())
    new = bits(((patterns + step) & 0xFFFF).tolist())
    there_and_back(codec, [region(old, new, patterns)], [old])


EDGES = [
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    10,
    11,
    12,
    253,
    254,
    255,
    256,
    65534,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 2,
]
EDGES += [2**32 - 1, 2**32, 2**40]


@pytest.mark.parametrize("codec", ALL, ids=named)
def test_gaps_around_every_limit_in_regions_of_any_size(codec: Codec) -> None:
    gaps = [*EDGES, *reversed(EDGES), 0, 0, 0]
    index = torch.tensor([gap + 1 for gap in gaps]).cumsum(0) - 1
    code = torch.tensor([1, UNSTATED, -1] * 20, dtype=torch.int8)[: len(gaps)]
    value = bits(list(range(len(gaps))))
    far = RegionChange(numel=int(index[-1]) + 1, index=index, value=value, code=code)
    near = RegionChange(numel=1, index=torch.tensor([0]), value=value[:1], code=code[:1])
    empty = RegionChange(numel=2**50, index=index[:0], value=value[:0], code=code[:0])
    changes = [near, empty, far, empty, far, near]
    counts, numels = [c.value.numel() for c in changes], [c.numel for c in changes]
    for want, got in zip(
        changes, codec.decode(codec.encode(changes, BF16), counts, numels, BF16), strict=True
    ):
        assert want.index is not None
        assert got.index is not None
        assert got.index.tolist() == want.index.tolist()
        if codec.needs_context:  # and has none here: every value is sent
            assert got.code is None
            assert got.value.view(torch.int16).tolist() == want.value.view(torch.int16).tolist()
        elif got.code is not None:
            assert want.code is not None
            assert got.code.tolist() == want.code.tolist()


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("numels", [[], [1], [1, 1, 1], [5, 1, 300]])
def test_nothing_everything_and_one_element(codec: Codec, numels: list[int]) -> None:
    olds = [torch.randn(numel).bfloat16() for numel in numels]
    for share in (0, 1):
        changes = [region(old, -old, torch.arange(old.numel() * share)) for old in olds]
        there_and_back(codec, changes, olds)


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_send_values_also_where_codes_are_stated(codec: Codec, dtype: torch.dtype) -> None:
    value = torch.randn(4).to(dtype)
    change = RegionChange(
        numel=900, index=torch.tensor([1, 2, 4, 800]), value=value, code=torch.ones(4, dtype=torch.int8)
    )
    identity = replace(IDENTITY, dtype=dtype)
    (got,) = unpack_frame(pack_frame(identity, codec, [change]), identity, [codec], [900])
    assert got.code is None
    assert torch.equal(got.value, value)


@pytest.mark.parametrize("strided", [False, True])
def test_reading_live_weights_is_the_inverse_of_writing_them(strided: bool) -> None:
    storage = torch.zeros(6, 10, dtype=BF16)
    view = storage[:, 2:7].t() if strided else storage
    index = torch.tensor([0, 3, 7, view.numel() - 1])
    value = bits([0x7FC1, 0x8000, 1, 0xFF80])
    scatter_into(view, index, value)
    assert gather_from(view, index).view(torch.int16).tolist() == value.view(torch.int16).tolist()


# --- size ---------------------------------------------------------------------------------------------------


def adamw_step(lr: float, numel: int = 400_000) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights before and after the third step."""
    weight = torch.randn(numel) * 0.02
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.01)
    for _ in range(3):
        old = weight.bfloat16()
        weight.grad = torch.randn(numel)
        optimizer.step()
    return old, weight.bfloat16()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("indices", 6.001), ("gaps", 3.05), ("ulp", 1.55), ("ulp_zstd", 1.20)],
)
@pytest.mark.parametrize("lr", [1e-6, 3e-6])
def test_bytes_a_change(name: str, limit: float, lr: float) -> None:
    old, new = adamw_step(lr)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    change = region(old, new, index)
    there_and_back(CODECS[name], [change], [old])
    body = CODECS[name].encode([change], BF16)
    assert body.numel() <= limit * index.numel()
    assert CODECS[name].size(change, BF16) == pytest.approx(body.numel(), rel=0.12)
    if name == "ulp_zstd":
        gap = torch.diff(index, prepend=torch.tensor([-1])) - 1
        assert change.code is not None
        symbols = gap.clamp(max=255), change.code.view(torch.uint8)
        ideal = sum(entropy_bytes(torch.bincount(symbol)) for symbol in symbols)
        assert body.numel() <= 1.10 * ideal


def test_entropy_of_known_distributions() -> None:
    assert entropy_bytes(torch.ones(256, dtype=torch.int64)) == 256
    assert entropy_bytes(torch.tensor([400, 400, 0])) == 100
    assert entropy_bytes(torch.tensor([0, 1000])) == 0
    assert entropy_bytes(torch.zeros(256, dtype=torch.int64)) == 0


@pytest.mark.parametrize(
    ("name", "unstated", "last_sparse"),
    [("indices", False, 333), ("gaps", False, 666), ("ulp", False, 1000), ("ulp", True, 444)],
)
def test_a_region_goes_whole_exactly_where_that_is_smaller(
    name: str, unstated: bool, last_sparse: int
) -> None:
    for count, whole in ((last_sparse, False), (last_sparse + 1, True)):
        if count <= 1000:
            code = torch.full((count,), UNSTATED if unstated else 1, dtype=torch.int8)
            change = RegionChange(numel=1000, index=torch.arange(count), value=code.bfloat16(), code=code)
            assert whole_is_smaller(CODECS[name], change, BF16) is whole


GIGABIT = 125e6


@pytest.mark.parametrize(
    ("bytes_per_second", "share", "want"),
    [
        (None, 0.02, "indices"),  # nothing measured yet
        (20e9, 0.02, "indices"),  # memory or a fast fabric: any encoding costs more than it saves
        (1e9, 0.02, "indices"),
        (GIGABIT, 0.02, "gaps"),
        (GIGABIT / 2.2, 0.02, "ulp"),
        (GIGABIT / 10, 0.02, "ulp_zstd"),
        (GIGABIT / 10, 1.0, "ulp_zstd"),
        (GIGABIT / 10, 0.0, "indices"),  # nothing to encode
    ],
)
def test_auto_weighs_work_against_bytes(bytes_per_second: float | None, share: float, want: str) -> None:
    assert cheapest(codecs_for("auto"), share, bytes_per_second).name == want
    assert cheapest(codecs_for("gaps"), share, bytes_per_second).name == "gaps"


@pytest.mark.parametrize("lr", [1e-6, 3e-6])
@pytest.mark.parametrize("name", [codec.name for codec in codecs_for("auto")])
def test_auto_expects_the_bytes_that_an_encoding_takes(name: str, lr: float) -> None:
    old, new = adamw_step(lr)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    body = CODECS[name].encode([region(old, new, index)], BF16)
    share = index.numel() / old.numel()
    assert expected_bytes(name, share) == pytest.approx(body.numel() / index.numel(), rel=0.05)


# --- refusals -----------------------------------------------------------------------------------------------


OLD = torch.randn(40_000, generator=torch.Generator().manual_seed(5)).bfloat16()


def example() -> list[RegionChange]:
    old = OLD
    index = torch.arange(0, 40_000, 400)
    first = region(old, (old.float() * 1.001).bfloat16(), index, unstated=4)
    return [first, RegionChange(numel=3, value=old[:3]), region(old, -old, index[:5])]


NUMELS = [40_000, 3, 40_000]


@pytest.mark.parametrize("codec", CODECS.values(), ids=named)
def test_every_flipped_byte_cut_and_tail_of_a_frame_is_found(codec: Codec) -> None:
    frame = pack_frame(IDENTITY, codec, example())
    damaged = [frame[:length].clone() for length in range(frame.numel())]
    for place in range(frame.numel()):
        damaged.append(frame.clone())
        damaged[-1][place] ^= 1 << place % 8
    damaged.append(torch.cat([frame, frame.new_zeros(8)]))
    for bad in damaged:
        with pytest.raises(CorruptFrameError):
            unpack_frame(bad, IDENTITY, [codec], NUMELS)


@pytest.mark.parametrize("codec", CODECS.values(), ids=named)
def test_a_frame_of_another_encoding_or_version_is_stale(codec: Codec) -> None:
    frame = pack_frame(IDENTITY, codec, example())
    for other in CODECS.values():
        if other is not codec:
            with pytest.raises(StaleFrameError, match=f"codec={codec.number} "):
                unpack_frame(frame, IDENTITY, [other], NUMELS)
    with pytest.raises(StaleFrameError, match=r"base_version=41 \(expected 40\)"):
        unpack_frame(frame, replace(IDENTITY, base_version=40), [codec], NUMELS)
    base = context(OLD)
    assert len(unpack_frame(frame, IDENTITY, list(CODECS.values()), NUMELS, [base] * 3)) == 3


@pytest.mark.parametrize("codec", GAP_CODECS, ids=named)
def test_bodies_that_make_no_sense_are_refused_or_stay_in_their_region(codec: GapCodec) -> None:
    """What no checksum guards: a peer that packs nonsense. Never another error, never out of range."""
    changes = [change for change in example() if change.index is not None]
    counts, numels = [c.value.numel() for c in changes], [c.numel for c in changes]
    body = codec.encode(changes, BF16)
    random_bytes = random.Random(0)  # noqa: S311 - test data
    cut = [body[:length].clone() for length in range(0, body.numel(), 3)]
    changed = []
    for _ in range(2000):
        changed.append(body.clone())
        for _ in range(random_bytes.choice((1, 1, 2, 8))):
            changed[-1][random_bytes.randrange(body.numel())] = random_bytes.randrange(256)
    refused = 0
    for bad in [*cut, *changed]:
        try:
            decoded = codec.decode(bad, counts, numels, BF16)
        except CorruptFrameError:
            refused += 1
            continue
        for got, numel in zip(decoded, numels, strict=True):
            assert got.index is not None
            assert int(got.index[0]) >= 0
            assert int(got.index[-1]) < numel
            assert bool((got.index.diff() > 0).all())
    assert refused >= len(cut)


@pytest.mark.parametrize("codec", GAP_CODECS, ids=named)
def test_a_gap_beyond_its_region_is_refused(codec: GapCodec) -> None:
    value = bits([1, 2])
    fits = RegionChange(numel=2000, index=torch.tensor([1, 1200]), value=value)
    body = codec.encode([fits, fits], BF16)
    codec.decode(body, [2, 2], [1201, 1201], BF16)
    with pytest.raises(CorruptFrameError, match="position 1200 is beyond a region of 1200 elements"):
        codec.decode(body, [2, 2], [1201, 1200], BF16)
    with pytest.raises(CorruptFrameError, match="more elements changed in a region than it has"):
        codec.decode(body, [2, 2], [2000, 1], BF16)
    with pytest.raises(CorruptFrameError):
        codec.decode(body, [2, 1], [2000, 2000], BF16)
    with pytest.raises(CorruptFrameError, match="for no changed element"):
        codec.decode(body, [0, 0], [2000, 2000], BF16)


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_more_changes_than_elements_are_refused_before_memory_is_allocated(
    codec: Codec, dtype: torch.dtype
) -> None:
    with pytest.raises(CorruptFrameError):
        codec.decode(torch.zeros(256, dtype=torch.uint8), [1 << 60], [100], dtype)


def test_streams_over_their_limit_are_refused_before_memory_is_allocated() -> None:
    writer = StreamWriter(torch.empty(streams_limit([2**20]), dtype=torch.uint8), [2**20], compress=True)
    writer.put(0, torch.zeros(2**20), torch.uint8)
    body = writer.finish()
    assert body.numel() < 200
    assert torch.equal(
        open_streams(body, [2**20])[0].read_all(torch.uint8), torch.zeros(2**20, dtype=torch.uint8)
    )
    with pytest.raises(CorruptFrameError, match="over their limits"):
        open_streams(body, [2**20 - 1])
    lying = body.clone()
    lying[:8].view(torch.int64)[0] = 2**19
    with pytest.raises(CorruptFrameError, match="unpacks to 1048576 bytes, its directory says 524288"):
        open_streams(lying, [2**20])


def test_a_stream_is_read_in_pieces_and_not_beyond_its_end() -> None:
    content = torch.randint(0, 3, (300_000,), dtype=torch.uint8)
    for compress in (False, True):
        writer = StreamWriter(torch.empty(700_000, dtype=torch.uint8), [5, 600_000], compress=compress)
        for piece in torch.split(content, 4096):
            writer.put(1, piece, torch.uint8)
        empty, stream = open_streams(writer.finish(), [5, 600_000])
        assert empty.left == 0
        assert torch.equal(
            torch.cat([stream.read(n, torch.uint8) for n in (1, 0, 99_999)]), content[:100_000]
        )
        into = torch.empty(100_000, dtype=torch.uint8)
        assert torch.equal(stream.read_into(into), content[100_000:200_000])
        with pytest.raises(CorruptFrameError, match="ends 2 bytes before its last entry"):
            stream.read(50_001, torch.int16)
        with pytest.raises(CorruptFrameError, match=r"streams have \[100000\] bytes more than their entries"):
            check_read([stream])


def test_a_stream_that_needs_more_memory_than_a_level_1_window_is_refused() -> None:
    content = torch.randint(0, 3, (1 << 22,), dtype=torch.uint8)
    wide = zstandard.ZstdCompressor(level=19).compress(content.numpy().data)
    assert zstandard.get_frame_parameters(wide).window_size > 1 << 19
    stream = StreamReader(torch.frombuffer(bytearray(wide), dtype=torch.uint8), content.numel())
    with pytest.raises(CorruptFrameError, match="cannot be unpacked"):
        stream.read(10, torch.uint8)


def test_a_count_that_the_region_table_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awex_delta.wire.frame.WHOLE", 100)
    with pytest.raises(WireError, match="changed in 100 elements or more"):
        pack_frame(IDENTITY, CODECS["ulp"], example())


@pytest.mark.parametrize("codec", CODECS.values(), ids=named)
def test_wide_positions_of_a_large_region(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """`indices` changes to int64 above its limit; every encoding gives the same positions on both sides."""
    monkeypatch.setattr("awex_delta.wire.indices.INT32_LIMIT", 1000)
    old = torch.randn(1001).bfloat16()
    there_and_back(codec, [region(old, -old, torch.tensor([0, 1000]))], [old])
    if codec.name == "indices":
        assert codec.encode([region(old, -old, torch.tensor([0, 1000]))], BF16).numel() == 16 + 8


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS.values(), ids=named)
def test_changes_on_a_gpu_give_the_same_bytes(codec: Codec) -> None:
    old, new = adamw_step(1e-6)
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    here = region(old, new, index, unstated=3)
    assert here.index is not None
    assert here.code is not None
    there = replace(here, index=here.index.cuda(), value=here.value.cuda(), code=here.code.cuda())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(codec.encode([there], BF16), codec.encode([here], BF16))
