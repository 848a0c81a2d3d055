"""Descriptions on the wire: they come back as they went, and what is none is refused and costs no memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from awex_delta.errors import ConnectError
from awex_delta.plan import columns
from awex_delta.plan.announce import Announced, announced, dump_failure, dump_spec, load_layout
from awex_delta.plan.columns import pack, pack_shapes, unpack, unpack_shapes
from awex_delta.plan.describe import EngineColumns, Spec, TrainerColumns, TrainerSpec
from tests.unit.worlds import NORM, Model, engines, trainers

MODEL = Model(layers=1)
TRAINER = trainers(MODEL, dp=2, ep=2, whole=[NORM], uneven=True)[1].spec
assert isinstance(TRAINER, TrainerSpec)
ENGINE: Spec = engines(MODEL, tp=2)[1].spec
PLACED = replace(
    TRAINER,
    offsets=tuple((1,) * len(shape) for shape in TRAINER.layout.shapes),
    wholes=tuple(tuple(size + 2 for size in shape) for shape in TRAINER.layout.shapes),
)
BOTH = pytest.mark.parametrize("spec", [TRAINER, PLACED, ENGINE], ids=["trainer", "placed", "engine"])


def told(header: bytes) -> Announced:
    found = announced(3, header)
    assert isinstance(found, Announced)
    return found


def completed(spec: Spec) -> Spec:
    header, layout = dump_spec(spec)
    one = told(header)
    assert one.layout_bytes == len(layout)
    return one.complete({one.layout: load_layout(spec.role, layout, one.layout)})


@BOTH
def test_a_description_comes_back_as_it_went(spec: Spec) -> None:
    again = completed(spec)
    fields: list[tuple[Any, Any, str]] = [(spec, again, name) for name in spec.__slots__ if name != "layout"]
    fields += [(spec.layout, again.layout, name) for name in spec.layout.__slots__]
    for mine, other, name in fields:
        one, two = getattr(mine, name), getattr(other, name)
        assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, name
    assert dump_spec(again) == dump_spec(spec)


def test_replicas_have_one_layout_and_different_headers() -> None:
    replicas = [dump_spec(rank.spec) for rank in (*engines(MODEL), *engines(MODEL, first=1))]
    assert replicas[0][1] == replicas[1][1]
    assert replicas[0][0] != replicas[1][0]
    owners = [dump_spec(rank.spec) for rank in trainers(MODEL, dp=2)]
    assert owners[0][1] == owners[1][1]
    assert owners[0][0] != owners[1][0]


def test_an_engine_without_tensors_and_a_trainer_without_parameters_can_be_described() -> None:
    nothing = EngineColumns(names=(), dtypes=(), shapes=(), global_shapes=(), global_offsets=(), tied_to=())
    assert EngineColumns.load(nothing.dump()).names == ()
    none = np.zeros(0, np.int64)
    empty = TrainerColumns(
        keys=(),
        numels=none,
        params=none,
        names=(),
        shapes=(),
        dtypes=(),
        sparse=none.astype(bool),
        runs=none.reshape(4, 0),
    )
    assert TrainerColumns.load(empty.dump()).runs.shape == (4, 0)


def test_a_rank_that_cannot_describe_itself_says_why() -> None:
    assert announced(0, dump_failure("KeyError: 'w'")) == "KeyError: 'w'"


@BOTH
def test_a_truncated_description_is_refused(spec: Spec) -> None:
    header, layout = dump_spec(spec)
    for stop in range(len(header)):
        with pytest.raises(ConnectError, match="seat 3 sent a malformed description"):
            announced(3, header[:stop])
    load = TrainerColumns.load if spec is TRAINER else EngineColumns.load
    for stop in range(0, len(layout), 7):
        with pytest.raises(ConnectError, match="cannot be read"):
            load(layout[:stop])


@BOTH
def test_a_layout_that_is_not_the_announced_one_is_refused(spec: Spec) -> None:
    header, layout = dump_spec(spec)
    digest = told(header).layout
    for place in range(0, len(layout), 11):
        damaged = bytearray(layout)
        damaged[place] ^= 1
        with pytest.raises(ConnectError, match="damaged on the way"):
            load_layout(spec.role, bytes(damaged), digest)
    with pytest.raises(ConnectError, match="damaged on the way"):
        load_layout(spec.role, layout[:-1], digest)


def test_a_layout_of_the_other_side_is_refused() -> None:
    trainer, engine = told(dump_spec(TRAINER)[0]), told(dump_spec(ENGINE)[0])
    layouts = {
        trainer.layout: load_layout("engine", dump_spec(ENGINE)[1], engine.layout),
        engine.layout: load_layout("trainer", dump_spec(TRAINER)[1], trainer.layout),
    }
    for one in (trainer, engine):
        with pytest.raises(ConnectError, match=f"{one.header.role} rank 1 sent the layout of the other side"):
            one.complete(layouts)
    with pytest.raises(ConnectError, match="has the columns"):
        load_layout("engine", dump_spec(TRAINER)[1], trainer.layout)


def test_owners_of_other_parameters_than_the_layout_has_are_refused() -> None:
    one = told(dump_spec(TRAINER)[0])
    other = trainers(Model(layers=2), dp=2)[1].spec.layout
    with pytest.raises(ConnectError, match=r"trainer rank 1: owners of 11 of 27 parameters"):
        one.complete({one.layout: other})
    numbers = {name: column for name, column in one.numbers.items() if name != "owned"}
    with pytest.raises(ConnectError, match="has the columns"):
        replace(one, numbers=numbers).complete({one.layout: TRAINER.layout})
    for group in (-1, 5):
        numbers = {**one.numbers, "group": np.full_like(one.numbers["group"], group)}
        with pytest.raises(ConnectError, match="owners of"):
            replace(one, numbers=numbers).complete({one.layout: TRAINER.layout})


def reheaded(spec: Spec, **change: Any) -> bytes:
    header, numbers, _ = unpack(dump_spec(spec)[0])
    return pack({**header, **change}, numbers, {})


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        {"layout_bytes": 2**62},
        {"layout_bytes": 2**28 + 1},
        {"layout_bytes": -1},
        {"layout_bytes": 1.5},
        {"layout": "0" * 31},
        {"layout": "g" * 32},
        {"role": "other"},
        {"role": None},
        {"rank": "first"},
        {"agreed": []},
        {"context": "maybe"},
        {"surprise": 1},
    ],
)
def test_headers_of_another_kind_are_refused(spec: Spec, change: dict[str, Any]) -> None:
    with pytest.raises(ConnectError, match="seat 3 sent a malformed description"):
        announced(3, reheaded(spec, **change))


def test_owners_below_zero_are_refused() -> None:
    """The first of the owners checks a parameter: one that is no rank would leave it unchecked."""
    with pytest.raises(ConnectError, match="malformed"):
        announced(3, reheaded(TRAINER, groups=[[-1, 0, 1]]))


def raw(head: Any, rest: bytes = b"") -> bytes:
    return zstandard.compress(json.dumps(head).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (5, b""),
        ({}, b""),
        ({"header": {}, "numbers": {}}, b""),
        ({"header": 5, "numbers": {}, "names": {}}, b""),
        ({"header": {}, "numbers": [], "names": {}}, b""),
        ({"header": {}, "numbers": {"a": 2**60}, "names": {}}, b"\0" * 16),
        ({"header": {}, "numbers": {"a": 2**80}, "names": {}}, b"\0" * 16),
        ({"header": {}, "numbers": {"a": -1}, "names": {}}, b"\0" * 16),
        ({"header": {}, "numbers": {"a": True}, "names": {}}, b"\0" * 8),
        ({"header": {}, "numbers": {"a": 1.0}, "names": {}}, b"\0" * 8),
        ({"header": {}, "numbers": {"a": 1}, "names": {}}, b"\0" * 16),
        ({"header": {}, "numbers": {"a": 3}, "names": {}}, b"\0" * 16),
        ({"header": {}, "numbers": {}, "names": {"a": 100}}, b"[]"),
        ({"header": {}, "numbers": {}, "names": {"a": -1}}, b"[]]"),
        ({"header": {}, "numbers": {"a": 2}, "names": {"b": -6, "c": 2}}, b"[]0123456789"),
        ({"header": {}, "numbers": {}, "names": {"a": 2}}, b"{}"),
        ({"header": {}, "numbers": {}, "names": {"a": 3}}, b"[5]"),
        ({"header": {}, "numbers": {}, "names": {"a": 100_000}}, b"[" * 100_000),
        ({"header": {}, "numbers": {}, "names": {"a": 2}}, b"\xff\xfe"),
    ],
)
def test_columns_that_are_none_are_refused(head: Any, rest: bytes) -> None:
    with pytest.raises(ConnectError):
        unpack(raw(head, rest))


def test_a_description_that_claims_to_be_huge_costs_nothing() -> None:
    packer = zstandard.ZstdCompressor().compressobj(size=columns.MAX_BYTES + 1)
    bomb = packer.compress(b"x" * 1000) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 1000)
    tracemalloc.start()
    try:
        for blob in (bomb, unsized):
            with pytest.raises(ConnectError):
                unpack(blob)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("values", [[-1], [1], [2, 3], [1, -5], [0, 1], [9, *[1] * 9], [2, 2**32, 2**32]])
def test_shapes_that_are_none_are_refused(values: list[int]) -> None:
    with pytest.raises(ConnectError, match="shape"):
        unpack_shapes(np.array(values, np.int64))


@given(st.lists(st.lists(st.integers(0, 50), max_size=4).map(tuple), max_size=6).map(tuple))
def test_shapes_come_back_as_they_went(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert unpack_shapes(pack_shapes(shapes)) == shapes


def changed_at(name: str, place: int | tuple[int, int], value: int) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = fields[name].copy()
        fields[name][place] = value

    return change


def shorter(name: str) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = fields[name][:-1]

    return change


INT64 = 2**63 - 1


@pytest.mark.parametrize(
    "change",
    [
        *(
            shorter(name)
            for name in ("keys", "numels", "params", "names", "shapes", "dtypes", "sparse", "runs")
        ),
        changed_at("params", 0, -1),
        changed_at("params", 0, 11),
        changed_at("numels", 0, -1),
        changed_at("numels", 0, 71),  # its last run ends there
        changed_at("runs", (0, 0), -1),
        changed_at("runs", (0, 0), 15),
        changed_at("runs", (1, 0), -1),
        changed_at("runs", (1, 0), 1),
        changed_at("runs", (1, 0), INT64),
        changed_at("runs", (2, 0), -1),
        changed_at("runs", (2, 0), 1),
        changed_at("runs", (2, 0), INT64),
        changed_at("runs", (3, 0), 0),
        changed_at("runs", (3, 0), -5),
        changed_at("runs", (3, 0), 73),
        changed_at("runs", (3, 0), INT64),
    ],
)
def test_columns_of_a_trainer_that_do_not_fit_each_other_are_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    layout = TRAINER.layout
    assert isinstance(layout, TrainerColumns)
    fields = {name: getattr(layout, name) for name in TrainerColumns.__slots__}
    TrainerColumns.load(TrainerColumns(**fields).dump())
    change(fields)
    with pytest.raises(ConnectError):
        TrainerColumns.load(TrainerColumns(**fields).dump())


@pytest.mark.parametrize("name", ["names", "dtypes", "shapes", "global_shapes", "global_offsets", "tied_to"])
def test_columns_of_an_engine_that_do_not_fit_each_other_are_refused(name: str) -> None:
    fields = {field: getattr(ENGINE.layout, field) for field in EngineColumns.__slots__ if field != "places"}
    EngineColumns.load(EngineColumns(**fields).dump())
    fields[name] = fields[name][:-1]
    with pytest.raises(ConnectError, match="do not fit each other"):
        EngineColumns.load(EngineColumns(**fields).dump())


@given(st.data())
def test_damaged_contents_are_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever stands in a layout: it is refused as such, or it can be described again."""
    spec = data.draw(st.sampled_from([TRAINER, ENGINE]))
    content = bytearray(zstandard.decompress(dump_spec(spec)[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    kind = type(spec.layout)
    try:
        found = kind.load(zstandard.compress(bytes(content)))
    except ConnectError:
        return
    assert kind.load(found.dump()).dump() == found.dump()


@pytest.mark.parametrize("field", ["offsets", "wholes"])
def test_parts_that_do_not_lie_inside_their_tensors_are_refused(field: str) -> None:
    shapes = getattr(PLACED, field)
    size = 100 if field == "offsets" else 0
    wrong = [(), shapes[1:], [(*shapes[0], 1), *shapes[1:]], [(size,) * len(shapes[0]), *shapes[1:]]]
    for other in wrong:
        with pytest.raises(
            ConnectError, match="trainer rank 1: its parts of HF tensors do not lie inside them"
        ):
            completed(replace(PLACED, **{field: tuple(other)}))  # type: ignore[arg-type]
