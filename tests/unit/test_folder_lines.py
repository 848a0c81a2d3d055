"""The tables of a folder: where live tensors and writers' lines lie in its line, against a tensor of ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.engines.view import part
from awex_delta.errors import CorruptFrameError, LayoutError
from awex_delta.folder.live import Live
from awex_delta.folder.manifest import HfSpace, Manifest
from awex_delta.folder.pack import pack_boxes, unpack_boxes
from awex_delta.lines.boxes import Boxes
from awex_delta.protocol.verdict import Kind


def delta(shapes: Mapping[str, tuple[int, ...]], tied: dict[str, str] | None = None) -> Manifest:
    """A delta of bf16 tensors that says nothing."""
    columns = {"names": sorted(shapes), "dtypes": ["bfloat16"] * len(shapes)}
    space = HfSpace.model_validate(columns | {"shapes": [shapes[name] for name in sorted(shapes)]})
    return Manifest(
        id="b",
        run_id="r",
        version=1,
        kind=Kind.DELTA,
        base_version=0,
        base_id="a",
        files=(),
        space=space,
        tied=tied or {},
    )


def table(*rows: tuple[int, int, int, int]) -> Boxes:
    """Boxes that follow each other in the source line: target, pitch, rows and width of each."""
    target, pitch, num, width = torch.tensor(rows).T.contiguous()
    sizes = num * width
    return Boxes(
        source=sizes.cumsum(0) - sizes,
        source_pitch=width,
        target=target,
        target_pitch=pitch,
        rows=num,
        width=width,
    )


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Shapes of tensors, and a part of each."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        begins = [draw(st.integers(0, size - 1)) for size in shape]
        ends = [draw(st.integers(a, size)) for a, size in zip(begins, shape, strict=True)]
        found.append((shape, tuple(map(slice, begins, ends))))
    return found


@given(cuts(), st.integers(0, 2**16))
def test_live_parts_lie_where_slicing_finds_them(
    cut: list[tuple[tuple[int, ...], tuple[slice, ...]]], seed: int
) -> None:
    shapes = {f"t{number}": shape for number, (shape, _) in enumerate(cut)}
    ids = torch.arange(sum(math.prod(shape) for shape in shapes.values()))
    wholes = dict(zip(shapes, torch.split(ids, [math.prod(s) for s in shapes.values()]), strict=True))
    sliced = {f"t{n}": wholes[f"t{n}"].view(shape)[box] for n, (shape, box) in enumerate(cut)}
    parts = [
        part(
            name, torch.zeros(sliced[name].shape, dtype=torch.bfloat16), shapes[name], [s.start for s in box]
        )
        for name, (_, box) in zip(shapes, cut, strict=True)
    ]
    line = Live(delta(shapes), parts).lines[torch.bfloat16]
    expected = torch.cat([tensor.reshape(-1) for tensor in sliced.values()])
    pos = ids[torch.rand(ids.numel(), generator=torch.Generator().manual_seed(seed)) < 0.5]
    there, pick = line.map.map(pos)
    assert expected[there].tolist() == pos[pick].tolist()
    assert set(pos[pick].tolist()) == set(pos.tolist()) & set(expected.tolist())
    own = torch.arange(expected.numel())
    back, which = line.back.map(own)
    assert back.tolist() == expected[which].tolist()
    begin = torch.arange(ids.numel())
    for width in (1, 3):
        touched = line.touches(begin, begin + width)
        holds = [bool(((expected >= b) & (expected < b + width)).any()) for b in begin.tolist()]
        assert all(flag or not held for flag, held in zip(touched.tolist(), holds, strict=True))


def test_what_is_far_from_a_part_is_not_read_for_it() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (10,)}
    live = Live(delta(shapes), [part("b", torch.zeros(10, dtype=torch.bfloat16))])
    begin = torch.tensor([0, 5, 9, 20, 25])
    touched = live.lines[torch.bfloat16].touches(begin, begin + torch.tensor([10, 5, 2, 10, 5]))
    assert touched.tolist() == [False, False, True, False, False]


def test_two_tensors_may_be_one_in_the_folder() -> None:
    tensors = {name: torch.zeros(3, dtype=torch.bfloat16) for name in ("b", "head")}
    manifest = delta({"a": (2,), "b": (3,)}, tied={"head": "b"})
    line = Live(manifest, [part(name, tensor) for name, tensor in tensors.items()]).lines[torch.bfloat16]
    there, pick = line.map.map(torch.tensor([1, 2, 4]))
    assert there.tolist() == [0, 2, 3, 5]
    assert pick.tolist() == [1, 2, 1, 2]


def test_a_tensor_that_the_folder_does_not_hold_is_refused() -> None:
    manifest, held = delta({"a": (2,)}), torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"does not hold \['b'\]"):
        Live(manifest, [part("b", held)])


def test_a_table_comes_back() -> None:
    boxes = table((7, 7, 1, 7), (20, 10, 3, 4), (60, 2, 1, 2))
    found = unpack_boxes(pack_boxes(boxes).numpy().tobytes(), 21, 62)
    for name in Boxes.__slots__:
        assert torch.equal(getattr(found, name), getattr(boxes, name))


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param(table((-1, 7, 1, 7)), id="before the line"),
        pytest.param(table((58, 7, 1, 7)), id="beyond it"),
        pytest.param(table((50, 10, 2, 4)), id="its last row beyond it"),
        pytest.param(table((0, 0, 1, 0)), id="nothing"),
        pytest.param(table((0, 2, 2, 4)), id="rows over each other"),
        pytest.param(table((0, 4, 1, 4)), id="too few"),
        pytest.param(table((10, 4, 1, 4), (13, 3, 1, 3)), id="boxes over each other"),
        pytest.param(table((0, 0, 7, 1)), id="no pitch"),
        pytest.param(table((0, 2**62, 7, 1)), id="an end that overflows"),
        pytest.param(replace(table((0, 7, 1, 7)), rows=torch.tensor([1, 1])), id="columns of two lengths"),
    ],
)
def test_a_table_that_leads_elsewhere_is_refused(boxes: Boxes) -> None:
    with pytest.raises(CorruptFrameError, match="table of boxes"):
        unpack_boxes(pack_boxes(boxes).numpy().tobytes(), 7, 60)


def test_bytes_that_are_no_table_are_refused() -> None:
    with pytest.raises(CorruptFrameError, match="cannot be read"):
        unpack_boxes(b"no table", 7, 60)
