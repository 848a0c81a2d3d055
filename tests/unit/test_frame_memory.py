"""What packing and unpacking one bucket takes, in buckets: the numbers that docs/en/limits.md states."""

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

from awex_delta.numerics.ulp import UNSTATED, apply_code
from awex_delta.wire.buckets import Bucket, cut
from awex_delta.wire.codec import Codec, Context, RegionChange
from awex_delta.wire.context import load_loops
from awex_delta.wire.frame import FrameIdentity, pack_frame, unpack_bucket
from awex_delta.wire.registry import CODECS

BF16 = torch.bfloat16
BUCKET = 1 << 18
NUMEL = 1 << 20
IDENTITY = FrameIdentity(
    run_id="0" * 32, base_version=4, target_version=5, plan=7, sender=3, receiver=1, dtype=BF16
)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations made and that still exist. peak: the most at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key for key, _ in map(_storage, _tensors((args, kwargs)))}
        out = func(*args, **(kwargs or {}))
        for key, storage in map(_storage, _tensors(out)):
            if key not in given and key not in self._known:
                self._add(key, storage)
        return out

    def _add(self, key: int, storage: Any) -> None:
        num_bytes = storage.nbytes()

        def gone(_: object) -> None:
            self.now -= num_bytes
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> tuple[int, Any]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def peak_buckets(work: Callable[[], object]) -> tuple[Any, float]:
    """What `work` returns, and the most memory that it held: torch's, numpy's and Python's."""
    tracemalloc.start()
    try:
        with LiveBytes() as live:
            result = work()
        return result, (live.peak + tracemalloc.get_traced_memory()[1]) / BUCKET
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What torch and numba import when they are first used is not counted."""
    load_loops()
    with LiveBytes():
        torch.zeros(2, dtype=torch.uint8) + 1


def example(share: float, *, stated: bool) -> tuple[RegionChange, torch.Tensor]:
    """Changes of a region, and its weights before them."""
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(NUMEL, generator=generator) * 0.02).bfloat16()
    index = (torch.rand(NUMEL, generator=generator) < share).nonzero().view(-1)
    code = torch.randint(1, 3, index.shape, generator=generator).to(torch.int8)
    new = old.clone()
    new[index] = apply_code(old[index], code)
    code = code if stated else torch.full_like(code, UNSTATED)
    return RegionChange(numel=NUMEL, index=index, value=new[index], code=code, context=context(new)), old


def context(weights: torch.Tensor) -> Context:
    return Context(owned=((0, NUMEL),), read=lambda start, stop: weights[start:stop])


def pack(change: RegionChange, codec: Codec, bucket: Bucket) -> torch.Tensor:
    return pack_frame(IDENTITY, codec, bucket.changes([change]), bucket.span)


def test_live_bytes_are_counted() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(BUCKET, dtype=torch.uint8)
        second = first + 1
        del first
        third = second.view(4, -1).t().contiguous()
        del second
        return third

    result, peak = peak_buckets(work)
    assert result.numel() == BUCKET
    assert 2 <= peak < 2.5


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("share", [0.03, 0.9])
@pytest.mark.parametrize(
    ("encoding", "packing", "unpacking"),
    [
        ("indices", 4, 2),
        ("gaps", 9, 4),
        ("ulp", 9, 6),
        ("ulp_zstd", 9, 6),
        ("ulp_context", 15, 13),
    ],
)
def test_a_bucket_takes_no_more_than_is_said(
    encoding: str, packing: int, unpacking: int, share: float, stated: bool
) -> None:
    if encoding == "ulp_context" and stated:
        packing, unpacking = 5, 4
    codec, (change, old) = CODECS[encoding], example(share, stated=stated)
    buckets = cut([change], codec, BF16, BUCKET)
    pack(change, codec, buckets[-1])  # loads what it needs
    begin = 0
    for bucket in buckets[:3]:
        frame, packed = peak_buckets(partial(pack, change, codec, bucket))
        unpack = partial(unpack_bucket, frame, IDENTITY, [codec], [NUMEL], contexts=[context(old)])
        found, unpacked = peak_buckets(partial(unpack, begin=begin))
        begin = found.end
        assert packed <= packing
        assert unpacked <= unpacking


def test_a_whole_region_is_copied_once() -> None:
    values = torch.randn(NUMEL).bfloat16()
    region = RegionChange(numel=NUMEL, value=values)
    bucket = cut([region], CODECS["indices"], BF16, BUCKET)[1]
    frame, packed = peak_buckets(partial(pack, region, CODECS["indices"], bucket))
    assert BUCKET - 2 <= frame.numel() <= BUCKET
    assert packed < 1.1
