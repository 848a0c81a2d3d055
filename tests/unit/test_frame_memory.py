"""What an update takes beside weights, changes and what is staged: two buckets, whatever the encoding."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.lines.changes import Changes
from awex_delta.wire.buckets import Bucket, cut, frame_bytes
from awex_delta.wire.classes import load_loops
from awex_delta.wire.codec import Codec, settle
from awex_delta.wire.frame import pack_frame, unpack_frame
from awex_delta.wire.guard import num_unstated
from awex_delta.wire.registry import CODECS
from tests.unit.line_updates import BF16, IDENTITY, Update, reader

BUCKET = 1 << 23
NUMEL = 1 << 22


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that torch, numpy and Python hold.

    Attributes:
        now: bytes of the tensors that operations made and that still exist.
        peak: the most at any time, with what numpy and Python held then.
        over: it no longer counts, though some of its tensors may exist.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.over = False
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key for key, _ in map(_storage, _tensors((args, kwargs)))}
        out = func(*args, **(kwargs or {}))
        for key, storage in map(_storage, _tensors(out)):
            if key not in given and key not in self._known:
                self._add(key, storage)
        return out

    def note(self) -> None:
        """Take in what numpy and Python held at most since the last call, beside the tensors of that time."""
        self.peak = max(self.peak, self.now + tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    def _add(self, key: int, storage: Any) -> None:
        num_bytes = storage.nbytes()

        def gone(_: object) -> None:
            if not self.over:  # else another one may count now
                self.note()
            self.now -= num_bytes
            del self._known[key]

        self.note()
        self._known[key] = weakref.ref(storage, gone)
        self.now += num_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> tuple[int, Any]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def peak_bytes(work: Callable[[], object]) -> tuple[Any, int]:
    """What `work` returns, and the most memory that it held: torch's, numpy's and Python's."""
    tracemalloc.start()
    try:
        with LiveBytes() as live:
            result = work()
            live.note()
            live.over = True
        return result, live.peak
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What torch and numba import when they are first used is not counted."""
    load_loops()
    with LiveBytes():
        torch.zeros(2, dtype=torch.uint8) + 1


def example(share: float, stated: float) -> Update:
    """Changes of a line. stated: share of the changes that state a step."""
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(NUMEL, generator=generator) * 0.02).bfloat16()
    pos = (torch.rand(NUMEL, generator=generator) < share).nonzero().view(-1)
    code = torch.randint(1, 20, pos.shape, generator=generator).to(torch.int8)  # many of them wide
    after = old.clone()
    after[pos] = apply_code(old[pos], code)
    code[torch.rand(pos.shape, generator=generator) >= stated] = UNSTATED
    return Update(old=old, after=after, changes=Changes(pos=pos, code=code, value=after[pos]))


def pack(given: Update, codec: Codec, bucket: Bucket) -> torch.Tensor:
    return pack_frame(IDENTITY, codec, bucket, given.changes, reader(given.after))


def stage(given: Update, codec: Codec, bucket: Bucket, frame: torch.Tensor) -> list[torch.Tensor]:
    """What an engine does with a frame before it writes: what it keeps."""
    begin, read = bucket.span.begin, reader(given.old)
    found = unpack_frame(frame, IDENTITY, [codec], begin=begin, numel=NUMEL, read=read)
    if found.whole is not None:
        return [found.whole.clone()]
    assert found.changes is not None
    if found.guard is not None:
        assert found.guard.holds(found.changes.pos, given.old.__getitem__)
    settled = settle(found.changes, given.old.__getitem__)
    assert settled.value is not None
    aliases = settled.value.untyped_storage().data_ptr() == frame.untyped_storage().data_ptr()
    return [settled.pos, settled.value.clone() if aliases else settled.value]


def test_live_bytes_are_counted() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(BUCKET, dtype=torch.uint8)
        second = first + 1
        del first
        third = second.view(4, -1).t().contiguous()
        del second
        return third

    result, peak = peak_bytes(work)
    assert result.numel() == BUCKET
    assert 2 * BUCKET <= peak < 2.5 * BUCKET


@pytest.mark.parametrize(("share", "stated"), [(0.9, 1.0), (0.9, 0.5), (0.9, 0.0), (0.03, 1.0)])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_two_frames_and_the_work_on_one_take_two_buckets(
    codec: Codec, share: float, stated: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awex_delta.wire.buckets._Cutter._whole_is_smaller", lambda *_: False)
    given = example(share, stated)
    unstated = num_unstated(codec, given.changes)
    buckets = cut(given.changes, codec, BF16, NUMEL, BUCKET, unstated=unstated)
    pack(given, codec, buckets[-1])  # loads what it needs
    frames: list[torch.Tensor] = []
    for bucket in buckets:
        frame, packed = peak_bytes(partial(pack, given, codec, bucket))
        travels = max((other.untyped_storage().nbytes() for other in frames), default=0)
        assert travels + packed <= 2 * BUCKET
        frames.append(frame)
    arrives, num_kept = max(frame.numel() for frame in frames), 0
    for bucket, frame in zip(buckets, frames, strict=True):
        kept, peak = peak_bytes(partial(stage, given, codec, bucket, frame))
        here = sum(tensor.nbytes for tensor in kept)
        num_kept += here
        assert arrives + frame.numel() + peak - here <= 2 * BUCKET
    assert num_kept == given.changes.num_changed * 10
    assert (len(buckets) > 1) is (share > 0.5)


def test_whole_values_are_copied_once() -> None:
    values = torch.randn(NUMEL * 2).bfloat16()
    given = Update(old=values, after=values, changes=Changes.none())
    bucket = cut(given.changes, CODECS["indices"], BF16, NUMEL * 2, BUCKET, whole_prefix=NUMEL * 2)[1]
    frame, packed = peak_bytes(partial(pack, given, CODECS["indices"], bucket))
    assert bucket.whole
    assert frame_bytes(BUCKET) - 2 <= frame.numel() <= frame_bytes(BUCKET)
    assert packed < 1.1 * BUCKET
