"""What an update takes beside weights, changes and what is staged: two buckets, whatever the encoding."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from awex_delta.lines.bits import UNSTATED, apply_code
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.staging import Staging
from awex_delta.wire.buckets import Bucket, cut, frame_bytes
from awex_delta.wire.classes import load_loops
from awex_delta.wire.codec import Codec, Context, RegionChange
from awex_delta.wire.frame import FrameIdentity, pack_frame
from awex_delta.wire.guard import guard_of, unstated_counts
from awex_delta.wire.registry import CODECS

BF16 = torch.bfloat16
BUCKET = 1 << 23
NUMEL = 1 << 22
IDENTITY = FrameIdentity(
    run_id="0" * 32, base_version=4, target_version=5, plan=7, sender=3, receiver=1, dtype=BF16
)


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


def example(share: float, stated: float) -> tuple[RegionChange, torch.Tensor]:
    """Changes of a region, and its weights before them. stated: share of changes that state a step."""
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(NUMEL, generator=generator) * 0.02).bfloat16()
    index = (torch.rand(NUMEL, generator=generator) < share).nonzero().view(-1)
    code = torch.randint(1, 20, index.shape, generator=generator).to(torch.int8)  # many of them wide
    new = old.clone()
    new[index] = apply_code(old[index], code)
    code[torch.rand(index.shape, generator=generator) >= stated] = UNSTATED
    return RegionChange(numel=NUMEL, index=index, value=new[index], code=code, context=context(new)), old


def context(weights: torch.Tensor) -> Context:
    return Context(owned=((0, NUMEL),), read=lambda start, stop: weights[start:stop])


def pack(change: RegionChange, codec: Codec, bucket: Bucket) -> torch.Tensor:
    here = bucket.changes([change])
    return pack_frame(IDENTITY, codec, here, bucket.span, guard_of(here) if bucket.guarded else None)


def staging(codec: Codec, old: torch.Tensor) -> Staging:
    """An engine rank's, of one region whose live weights are `old`."""
    session = SimpleNamespace(
        comm=SimpleNamespace(seat=1),
        plan=SimpleNamespace(between=lambda *_: [SimpleNamespace(numel=NUMEL)], full_bytes=2 * NUMEL),
        codecs=[codec],
        uses_context=codec.needs_context,
        frame_identity=lambda *_: IDENTITY,
    )
    receiver = cast(Receiver, SimpleNamespace(_target=lambda _: old))
    return Staging(
        cast(Any, session),
        cast(Any, None),
        partial(Receiver._settle, receiver),
        lambda _: context(old),
        lambda _, index: old[index],
    )


def staged_bytes(staged: Staging) -> int:
    parts = [part.change for part in staged._staged]
    tensors = [t for change in parts for t in (change.index, change.value, change.code) if t is not None]
    return sum(tensor.nbytes for tensor in tensors)


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
def test_two_frames_and_the_work_on_one_take_two_buckets(codec: Codec, share: float, stated: float) -> None:
    change, old = example(share, stated)
    buckets = cut([change], codec, BF16, BUCKET, unstated=unstated_counts(codec, [change]))
    pack(change, codec, buckets[-1])  # loads what it needs
    frames: list[torch.Tensor] = []
    receiver, received = staging(codec, old), 0
    for bucket in buckets:
        frame, packed = peak_bytes(partial(pack, change, codec, bucket))
        travels = max((other.untyped_storage().nbytes() for other in frames), default=0)
        assert travels + packed <= 2 * BUCKET
        frames.append(frame)
    arrives = max(frame.numel() for frame in frames)
    for frame in frames:
        _, peak = peak_bytes(partial(receiver.add, 3, BF16, frame))
        here = staged_bytes(receiver) - received
        received += here
        assert arrives + frame.numel() + peak - here <= 2 * BUCKET
    assert received == change.value.numel() * 10
    assert (len(buckets) > 1) is (share > 0.5)


def test_a_whole_region_is_copied_once() -> None:
    values = torch.randn(NUMEL * 2).bfloat16()
    region = RegionChange(numel=NUMEL * 2, value=values)
    bucket = cut([region], CODECS["indices"], BF16, BUCKET)[1]
    frame, packed = peak_bytes(partial(pack, region, CODECS["indices"], bucket))
    assert frame_bytes(BUCKET) - 2 <= frame.numel() <= frame_bytes(BUCKET)
    assert packed < 1.1 * BUCKET
