"""Encodings: lossless for every bit pattern and every gap, small, and refused when they make no sense."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awex_delta.errors import CorruptFrameError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.wire.choice import cheapest, expected_bytes
from awex_delta.wire.codec import Codec, settle
from awex_delta.wire.gaps import GapCodec
from awex_delta.wire.registry import CODECS, codecs_for
from awex_delta.wire.spans import Span
from awex_delta.wire.streams import (
    StreamReader,
    StreamWriter,
    check_read,
    entropy_bytes,
    open_streams,
    streams_limit,
)
from tests.unit.line_updates import (
    BF16,
    Update,
    adamw_step,
    bits,
    patterns,
    reader,
    there_and_back,
    update,
)

# Levels that small test data already overflows, as spans above 2^16 elements overflow the real ones.
TINY = ((torch.uint8, 2), (torch.uint16, 5))
TINY_CODECS = [
    GapCodec(name=f"tiny {steps}", number=90 + steps, steps=steps, compress=False, levels=TINY)
    for steps in (False, True)
]
ALL = [*CODECS.values(), *TINY_CODECS]
GAP_CODECS = [codec for codec in ALL if isinstance(codec, GapCodec)]


def named(codec: Codec) -> str:
    return codec.name


PATTERNS = st.one_of(
    st.integers(0, 0xFFFF),
    # zeros, subnormals, the largest finite, infinities, quiet and signalling NaNs with payloads
    st.sampled_from(
        [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF]
    ),
)


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """A few or all of up to 80 elements, moved a few units as a step moves them, or anywhere."""
    many = st.lists(PATTERNS, min_size=1, max_size=80)
    old = draw(many)
    numel = len(old)
    near = draw(st.booleans())
    new = [p + 1 for p in old] if near else draw(st.lists(PATTERNS, min_size=numel, max_size=numel))
    pos = torch.tensor(sorted(draw(st.sets(st.integers(0, numel - 1)))), dtype=torch.int64)
    unstated = slice(0, draw(st.integers(0, 3)))
    return update(
        bits(old), bits([p & 0xFFFF for p in new]), pos, unstated=unstated, codes=draw(st.integers(0, 4)) > 0
    )


@pytest.mark.parametrize("codec", ALL, ids=named)
@settings(max_examples=40)
@given(given=updates(), begin=st.sampled_from([0, 7, 2**40]))
def test_any_update_comes_back_bit_for_bit_wherever_its_span_begins(
    codec: Codec, given: Update, begin: int
) -> None:
    span, count = Span(begin, begin + given.numel), given.changes.num_changed
    changes = replace(given.changes, pos=given.changes.pos + begin)
    body = codec.encode(changes, span, BF16, read=reader(given.after, begin))
    assert torch.equal(body, codec.encode(given.changes, given.span, BF16, read=reader(given.after)))
    got = codec.decode(body, count, span, BF16, read=reader(given.old, begin))
    assert got.pos.tolist() == changes.pos.tolist()
    settled = settle(got, lambda pos: given.old[pos - begin])
    assert settled.code is None
    assert patterns(settled.value) == patterns(given.changes.value)


@pytest.mark.parametrize("codec", ALL, ids=named)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(given=updates())
def test_the_size_of_the_pieces_changes_nothing(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, given: Update
) -> None:
    monkeypatch.undo()
    body = codec.encode(given.changes, given.span, BF16, read=reader(given.after))
    for piece in (2, 6):
        monkeypatch.setattr("awex_delta.wire.pieces.PIECE", piece)
        assert torch.equal(codec.encode(given.changes, given.span, BF16, read=reader(given.after)), body)
        there_and_back(codec, given)


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("step", [1, -1, 2, -126, 126, 127, 128, 0x7FFF, 0x4000])
def test_every_bit_pattern_as_old_value(codec: Codec, step: int) -> None:
    every = torch.arange(0x10000)
    there_and_back(codec, update(bits(every.tolist()), bits(((every + step) & 0xFFFF).tolist()), every))


EDGES = [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 253, 254, 255, 256, 65534, 65535, 65536]


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("longest", [0, 2**31 - 1, 2**31, 2**32 - 500_000])
def test_gaps_around_every_limit(codec: Codec, longest: int) -> None:
    gaps = [*EDGES, longest, *reversed(EDGES), 0, 0, 0]
    pos = torch.tensor([gap + 1 for gap in gaps]).cumsum(0) - 1
    code = torch.tensor([1, UNSTATED, -1] * 20, dtype=torch.int8)[: len(gaps)]
    code = torch.full_like(code, UNSTATED) if codec.needs_context else code  # so that nothing is walked
    span = Span(0, int(pos[-1]) + 1)
    there = Changes(pos=pos, code=code, value=bits(list(range(len(gaps)))))
    got = codec.decode(
        codec.encode(there, span, BF16, read=reader(bits([]))), len(gaps), span, BF16, read=reader(bits([]))
    )
    assert got.pos.tolist() == pos.tolist()
    if got.code is not None:
        assert got.code.tolist() == code.tolist()


@pytest.mark.parametrize("codec", ALL, ids=named)
def test_the_longest_gap_of_the_longest_span(codec: Codec) -> None:
    last = Changes(pos=torch.tensor([2**40 + 2**32 - 1]), value=bits([5]))
    span = Span(2**40, 2**40 + 2**32)
    body = codec.encode(last, span, BF16, read=reader(bits([])))
    got = codec.decode(body, 1, span, BF16)
    assert got.pos.tolist() == last.pos.tolist()
    assert patterns(got.value) == [5]


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("numel", [1, 2, 300])
def test_nothing_and_everything(codec: Codec, numel: int) -> None:
    old = torch.randn(numel).bfloat16()
    for share in (0, 1):
        there_and_back(codec, update(old, -old, torch.arange(numel * share)))


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_send_values_also_where_codes_are_stated(codec: Codec, dtype: torch.dtype) -> None:
    value, pos = torch.randn(4).to(dtype), torch.tensor([1, 2, 4, 800])
    changes = Changes(pos=pos, value=value, code=torch.ones(4, dtype=torch.int8))
    got = codec.decode(codec.encode(changes, Span(0, 900), dtype), 4, Span(0, 900), dtype)
    assert got.code is None
    assert got.pos.tolist() == pos.tolist()
    assert got.value is not None
    assert torch.equal(got.value, value)


# --- size ---------------------------------------------------------------------------------------------------


def body_of(codec: Codec, given: Update) -> torch.Tensor:
    return codec.encode(given.changes, given.span, BF16, read=reader(given.after))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("indices", 6.001), ("gaps", 3.05), ("ulp", 1.55), ("ulp_zstd", 1.20)],
)
@pytest.mark.parametrize("lr", [1e-6, 3e-6])
def test_bytes_a_change(name: str, limit: float, lr: float) -> None:
    given, codec = adamw_step(lr), CODECS[name]
    there_and_back(codec, given)
    body, count = body_of(codec, given), given.changes.num_changed
    assert body.numel() <= limit * count
    assert codec.size(given.changes, given.numel, BF16) == pytest.approx(body.numel(), rel=0.12)
    if name == "ulp_zstd":
        gap = torch.diff(given.changes.pos, prepend=torch.tensor([-1])) - 1
        assert given.changes.code is not None
        symbols = gap.clamp(max=255), given.changes.code.view(torch.uint8)
        ideal = sum(entropy_bytes(torch.bincount(symbol)) for symbol in symbols)
        assert body.numel() <= 1.10 * ideal


def test_entropy_of_known_distributions() -> None:
    assert entropy_bytes(torch.ones(256, dtype=torch.int64)) == 256
    assert entropy_bytes(torch.tensor([400, 400, 0])) == 100
    assert entropy_bytes(torch.tensor([0, 1000])) == 0
    assert entropy_bytes(torch.zeros(256, dtype=torch.int64)) == 0


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


@pytest.mark.parametrize(
    ("bytes_per_second", "share", "want"),
    [
        (None, 0.02, "indices"),
        (GIGABIT, 0.02, "gaps"),
        (GIGABIT / 10, 0.02, "ulp_zstd"),  # the walk over 50 weights a change takes longer than it saves
        (GIGABIT / 50, 0.02, "ulp_context"),
        (GIGABIT / 10, 0.2, "ulp_context"),
        (GIGABIT / 50, 0.0005, "ulp_zstd"),
    ],
)
def test_auto_reads_weights_only_where_the_walk_pays(
    bytes_per_second: float | None, share: float, want: str
) -> None:
    assert cheapest(codecs_for("auto", context=True), share, bytes_per_second).name == want


@pytest.mark.parametrize("lr", [1e-6, 3e-6])
@pytest.mark.parametrize("name", [codec.name for codec in codecs_for("auto")])
def test_auto_expects_the_bytes_that_an_encoding_takes(name: str, lr: float) -> None:
    given = adamw_step(lr)
    body, count = body_of(CODECS[name], given), given.changes.num_changed
    assert expected_bytes(name, count / given.numel) == pytest.approx(body.numel() / count, rel=0.05)


# --- refusals -----------------------------------------------------------------------------------------------


def example() -> Update:
    old = torch.randn(40_000, generator=torch.Generator().manual_seed(5)).bfloat16()
    pos = torch.arange(0, 40_000, 400)
    return update(old, (old.float() * 1.001).bfloat16(), pos, unstated=slice(0, 4))


@pytest.mark.parametrize("codec", GAP_CODECS, ids=named)
def test_bodies_that_make_no_sense_are_refused_or_stay_in_their_span(codec: GapCodec) -> None:
    """What no checksum guards: a peer that packs nonsense. Never another error, never out of range."""
    given = example()
    body, span = body_of(codec, given), Span(0, given.numel)
    random_bytes = random.Random(0)  # noqa: S311 - test data
    shortened = [body[:length].clone() for length in range(0, body.numel(), 3)]
    mutated = []
    for _ in range(2000):
        mutated.append(body.clone())
        for _ in range(random_bytes.choice((1, 1, 2, 8))):
            mutated[-1][random_bytes.randrange(body.numel())] = random_bytes.randrange(256)
    refused = 0
    for bad in [*shortened, *mutated]:
        try:
            got = codec.decode(bad, given.changes.num_changed, span, BF16)
        except CorruptFrameError:
            refused += 1
            continue
        assert int(got.pos[0]) >= 0
        assert int(got.pos[-1]) < given.numel
        assert bool((got.pos.diff() > 0).all())
    assert refused >= len(shortened)


@pytest.mark.parametrize("codec", GAP_CODECS, ids=named)
def test_a_gap_beyond_its_span_is_refused(codec: GapCodec) -> None:
    changes = Changes(pos=torch.tensor([6, 1205]), value=bits([1, 2]))
    body = codec.encode(changes, Span(5, 2005), BF16)
    assert codec.decode(body, 2, Span(5, 1206), BF16).pos.tolist() == [6, 1205]
    with pytest.raises(CorruptFrameError, match="position 1205 is beyond a span that ends at 1205"):
        codec.decode(body, 2, Span(5, 1205), BF16)
    with pytest.raises(CorruptFrameError, match="2 elements changed in a span of 1"):
        codec.decode(body, 2, Span(5, 6), BF16)
    for count in (1, 3):
        with pytest.raises(CorruptFrameError):
            codec.decode(body, count, Span(5, 2005), BF16)
    with pytest.raises(CorruptFrameError, match="for no changed element"):
        codec.decode(body, 0, Span(5, 2005), BF16)


@pytest.mark.parametrize(
    ("pos", "named"), [([0, 10], "position 10"), ([4, 4], "position 4"), ([5, 3], "position 3")]
)
def test_positions_out_of_place_are_refused(
    pos: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS["indices"]
    body = codec.encode(Changes(pos=torch.tensor(pos), value=bits([1, 2])), Span(0, 20), BF16)
    for piece in (1 << 16, 1):
        monkeypatch.setattr("awex_delta.wire.pieces.PIECE", piece)
        with pytest.raises(CorruptFrameError, match=f"{named} of a span of 10 elements is out of range, rep"):
            codec.decode(body, 2, Span(0, 10), BF16)


@pytest.mark.parametrize("codec", ALL, ids=named)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_counts_that_the_body_cannot_hold_are_refused_before_memory_is_allocated(
    codec: Codec, dtype: torch.dtype
) -> None:
    for span in (Span(0, 100), Span(0, 1 << 62)):
        with pytest.raises(CorruptFrameError):
            codec.decode(torch.zeros(256, dtype=torch.uint8), 1 << 60, span, dtype)


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
    content = torch.randint(0, 3, (1 << 20,), dtype=torch.uint8)
    wide = zstandard.ZstdCompressor(level=19).compress(content.numpy().data)
    assert zstandard.get_frame_parameters(wide).window_size > 1 << 19
    stream = StreamReader(torch.frombuffer(bytearray(wide), dtype=torch.uint8), content.numel())
    with pytest.raises(CorruptFrameError, match="cannot be unpacked"):
        stream.read(10, torch.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS.values(), ids=named)
def test_changes_on_a_gpu_give_the_same_bytes(codec: Codec) -> None:
    given = adamw_step(1e-6)
    changes = given.changes
    assert changes.code is not None
    assert changes.value is not None
    changes.code[:3] = UNSTATED
    there = Changes(pos=changes.pos.cuda(), code=changes.code.cuda(), value=changes.value.cuda())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body = codec.encode(there, given.span, BF16, read=reader(given.after))
    assert torch.equal(body, body_of(codec, given))
