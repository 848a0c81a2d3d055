"""Reading and writing live tensors at positions of a line, whatever their storages and strides are."""

from __future__ import annotations

import pytest
import torch

from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.lines.storages import Storages, bits


def tensors() -> list[torch.Tensor]:
    """Fused, sliced, transposed, broken into three strides, scalar, empty, fp32, and alone."""
    fused = torch.randn(4, 3, 5).bfloat16()
    wide = torch.randn(6, 8).bfloat16()
    cube = torch.randn(4, 5, 6).bfloat16()
    return [
        fused[1],
        fused[3],
        fused[0, :2],
        wide[:, 2:5],
        wide.t()[6:],
        torch.empty(0, 7).bfloat16(),
        cube[1:3, ::2, 1:4].transpose(0, 2),
        torch.randn(()).bfloat16(),
        torch.randn(7),
        torch.randn(9).bfloat16(),
    ]


def test_a_line_is_the_tensors_row_by_row() -> None:
    live = tensors()
    line = Storages(live)
    flat = torch.cat([bits(t.contiguous()).reshape(-1).long() for t in live])
    assert line.numel == flat.numel()
    sixteen = torch.tensor([t.dtype is torch.bfloat16 for t in live for _ in range(t.numel())])
    for keep in (torch.rand(flat.numel()) < 0.4, torch.ones(flat.numel(), dtype=torch.bool)):
        pos = (keep & sixteen).nonzero().view(-1)
        assert bits(line.gather(pos, torch.bfloat16)).long().equal(flat[pos])
        wide = (keep & ~sixteen).nonzero().view(-1)
        assert bits(line.gather(wide, torch.float32)).long().equal(flat[wide])


def test_bf16_elements_can_be_read_as_fp32() -> None:
    live = torch.tensor([1.5, -0.0, float("inf")]).bfloat16()
    assert Storages([live]).gather(torch.arange(3), torch.float32).equal(live.float())


def test_what_is_written_is_read_by_the_model() -> None:
    live = tensors()
    twins = [t.clone() for t in live]
    line = Storages(live)
    starts = [0]
    for t in live:
        starts.append(starts[-1] + t.numel())
    pos = torch.cat(
        [
            torch.arange(start, stop)[torch.rand(stop - start) < 0.5]
            for t, start, stop in zip(live, starts, starts[1:], strict=False)
            if t.dtype is torch.bfloat16
        ]
    )
    # NaN payloads and the sign of zero included.
    value = torch.randint(-(2**15), 2**15, (pos.numel(),)).short().view(torch.bfloat16)
    line.scatter(pos, value)
    for t, twin, start in zip(live, twins, starts, strict=False):
        expected = bits(twin.contiguous()).reshape(-1)
        inside = (pos >= start) & (pos < start + t.numel())
        if t.dtype is torch.bfloat16:
            expected[pos[inside] - start] = bits(value)[inside]
        assert bits(t.contiguous()).reshape(-1).equal(expected)


def test_a_line_may_come_back_to_a_storage() -> None:
    """As after a move, when tensors share storages in another way than when the line was agreed."""
    first, second = torch.arange(12).bfloat16().view(3, 4), torch.arange(12, 20).bfloat16()
    live = [first[0], second[:3], first[1:], second[3:]]
    line, flat = Storages(live), torch.cat([t.reshape(-1) for t in live])
    pos = torch.arange(flat.numel())
    assert line.gather(pos, torch.bfloat16).equal(flat)
    odd = pos[1::2].contiguous()
    line.scatter(odd, -flat[odd])
    assert first.reshape(-1).tolist() == [0, -1, 2, -3, -4, 5, -6, 7, -8, 9, -10, 11]
    assert second.tolist() == [12, -13, 14, -15, 16, -17, 18, -19]


def test_wrong_dtypes_counts_and_places_are_refused() -> None:
    line = Storages([torch.zeros(4), torch.zeros(2)])
    with pytest.raises(LayoutError, match="bfloat16"):
        line.scatter(torch.tensor([1]), torch.zeros(1).bfloat16())
    with pytest.raises(CorruptFrameError, match="1 values for 2 positions"):
        line.scatter(torch.tensor([1, 2]), torch.zeros(1))
    with pytest.raises(CorruptFrameError, match="beyond a line of 6"):
        line.gather(torch.tensor([1, 6]), torch.float32)
    with pytest.raises(LayoutError, match="devices"):
        Storages([torch.zeros(1), torch.zeros(1, device="meta")])
