"""Updates that succeed: bits, kinds, reasons and bytes, version by version."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.testing.dict_engine import DictEngine
from tests.pairing import EngineSeat, Pairing
from tests.ranks.conftest import BIAS, CUT, DOWN, EMBED, NORM, Q_PROJ, ROUTER, SHAPES, train, truth, wrong

Make = Callable[..., Pairing]


def test_eight_versions_stay_bit_identical_across_anchors(make: Make) -> None:
    pairing = make(anchor_interval=3, buffers={BIAS: (4,)}, fp32={ROUTER: (4, 8)})
    kinds = ""
    for version in range(8):
        before = {name: tensor.clone() for name, tensor in truth(pairing).items()}
        train(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}, {}, {}]
        assert {s.verdict.kind for s in stats} == {stats[0].verdict.kind}
        assert all(receiver.version == version and receiver.ready for receiver in pairing.receivers)
        kinds += "F" if stats[0].verdict.kind is Kind.FULL else "D"
        if stats[0].verdict.kind is Kind.DELTA:
            changed = sum(
                int((before[name].view(torch.int16) != new.view(torch.int16)).sum())
                for name, new in truth(pairing).items()
                if new.dtype is torch.bfloat16
            )
            assert changed <= stats[-1].total_changed <= changed * 1.01 + 2
    assert kinds == "FDDDFDDD"
    assert all(engine.published == list(range(8)) for engine in pairing.engines)


def test_only_owners_send_and_no_element_travels_twice(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    train(pairing)
    stats = pairing.commit(1)
    trainers, engines = stats[3:], stats[:3]
    assert sum(s.num_changed for s in trainers) == trainers[0].total_changed
    # engine `whole` receives each change once; the two ranks of `cut` share them, norms go to both
    assert engines[2].num_elements == trainers[0].total_changed
    norm = int((pairing.engines[2].tensors_by_name[NORM] != 0).sum())
    assert trainers[0].total_changed <= engines[0].num_elements + engines[1].num_elements
    assert engines[0].num_elements + engines[1].num_elements <= trainers[0].total_changed + norm


def test_a_buffer_alone_is_sent_in_an_update_without_a_step(make: Make) -> None:
    pairing = make(buffers={BIAS: (4,)})
    train(pairing)
    pairing.commit(0)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{BIAS}").add_(1.0)
    stats = pairing.commit(1)
    assert stats[0].verdict.kind is Kind.DELTA
    assert stats[-1].total_changed == 0
    assert wrong(pairing) == [{}, {}, {}]


def test_no_step_is_a_delta_of_zero_bytes_that_commits(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    stats = pairing.commit(1)
    assert (stats[0].verdict.kind, sum(s.wire_bytes for s in stats)) == (Kind.DELTA, 0)
    assert [receiver.version for receiver in pairing.receivers] == [1, 1, 1]
    train(pairing)
    assert pairing.commit(2)[-1].total_changed > 0
    assert wrong(pairing) == [{}, {}, {}]


def test_learning_rate_zero_is_a_delta_without_changes(make: Make) -> None:
    pairing = make(lr=0.0)
    train(pairing)
    pairing.commit(0)
    train(pairing)
    stats = pairing.commit(1)
    assert (stats[0].verdict.kind, stats[-1].total_changed) == (Kind.DELTA, 0)
    assert wrong(pairing) == [{}, {}, {}]


def test_a_rank_that_owns_nothing_takes_part(make: Make) -> None:
    one = {NORM: (1,)}
    seats = [EngineSeat(engine="whole", view=DictEngine(one)) for _ in range(1)]
    pairing = make(shapes=one, num_trainers=3, engines=seats)
    for version in range(3):
        train(pairing)
        pairing.commit(version)
        assert wrong(pairing) == [{}]


def test_a_parameter_that_changed_on_one_rank_only(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    grad = torch.zeros(SHAPES[EMBED])
    grad[:2] = 1.0  # rows that rank 0 owns
    for trainer in pairing.trainers:
        trainer.train_step({EMBED: grad})  # type: ignore[attr-defined]
    assert pairing.commit(1)[0].verdict.kind is Kind.DELTA
    assert wrong(pairing) == [{}, {}, {}]


def test_nan_and_signed_zero_arrive_as_they_are(make: Make) -> None:
    pairing = make()
    train(pairing)
    pairing.commit(0)
    payload = torch.tensor([0x7FC5, -0x8000, 0x7F80], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for trainer in pairing.trainers:
        trainer.tensor(f"0/{Q_PROJ}")[3, :3] = payload
    stats = pairing.commit(1)
    assert stats[0].verdict.reason is Reason.MASTER_MISMATCH
    assert wrong(pairing) == [{}, {}, {}]
    got = pairing.engines[2].tensors_by_name[Q_PROJ][3, :3]
    assert got.view(torch.int16).tolist() == payload.view(torch.int16).tolist()


def test_an_anchor_repairs_a_weight_that_no_delta_touches(make: Make) -> None:
    pairing = make(anchor_interval=1, lr=0.0)
    train(pairing)
    pairing.commit(0)
    pairing.engines[1].tensors_by_name[DOWN][3, 5] += 1.0
    train(pairing)
    pairing.commit(1)
    assert wrong(pairing) == [{}, {DOWN: 1}, {}]
    train(pairing)
    assert pairing.commit(2)[0].verdict.reason is Reason.ANCHOR_DUE
    assert wrong(pairing) == [{}, {}, {}]


@pytest.mark.parametrize("separate", [True, False])
def test_a_tied_head_follows_the_embedding(make: Make, separate: bool) -> None:
    head = "lm_head.weight"
    shapes = {**SHAPES, head: SHAPES[EMBED]}
    view = DictEngine(shapes) if separate else DictEngine(shapes, tied={head: EMBED})
    seats = [EngineSeat(engine="e", view=view)]
    pairing = make(engines=seats, tied_embeddings=True)
    for version in range(3):
        train(pairing)
        pairing.commit(version)
        want = truth(pairing)[EMBED]
        assert torch.equal(view.tensors_by_name[EMBED], want)
        if separate:
            assert torch.equal(view.tensors_by_name[head], want)


def test_padded_vocabulary_rows_are_never_sent(make: Make) -> None:
    view = DictEngine({**SHAPES, EMBED: (10, 8)})
    pairing = make(engines=[EngineSeat(engine="e", view=view)], vocab_size=10)
    for version in range(3):
        before = truth(pairing)[EMBED].clone()
        train(pairing)
        stats = pairing.commit(version)
        assert torch.equal(view.tensors_by_name[EMBED], truth(pairing)[EMBED][:10])
    changed = int((before[10:] != truth(pairing)[EMBED][10:]).sum())
    assert changed > 0
    assert stats[0].num_elements <= stats[-1].total_changed - changed


@pytest.mark.parametrize(("num_trainers", "num_replicas"), [(1, 3), (3, 1), (2, 6), (1, 1)])
def test_unequal_sides(make: Make, num_trainers: int, num_replicas: int) -> None:
    seats = [EngineSeat(engine=f"e{i}", view=DictEngine(SHAPES)) for i in range(num_replicas)]
    pairing = make(num_trainers=num_trainers, engines=seats)
    for version in range(3):
        train(pairing)
        pairing.commit(version)
        assert wrong(pairing) == [{}] * num_replicas


def test_the_collectives_are_the_same_on_every_rank(make: Make) -> None:
    pairing = make(anchor_interval=2, buffers={BIAS: (4,)})
    for version in range(4):
        train(pairing)
        pairing.commit(version)
    traces = [[phase for phase in end.comm.trace if not phase.startswith("send")] for end in pairing.ends]
    assert all(trace == traces[0] for trace in traces)
    assert any("frames of float32, version 1" in phase for phase in traces[0])


def test_statistics_add_up(make: Make) -> None:
    pairing = make()
    train(pairing)
    full = pairing.commit(0)
    assert sum(s.wire_bytes for s in full[3:]) == sum(s.wire_bytes for s in full[:3]) == full[0].full_bytes
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    norm = SHAPES[NORM][0]
    assert full[0].full_bytes == 2 * (2 * elements + norm)
    train(pairing)
    delta = pairing.commit(1)
    assert sum(s.wire_bytes for s in delta[3:]) == sum(s.wire_bytes for s in delta[:3])
    assert delta[0].total_wire_bytes == sum(s.wire_bytes for s in delta[3:])
    assert delta[-1].total_owned == elements
    phases = {"connect", "detect", "propose", "encode", "digest", "transfer", "stage", "apply", "verify"}
    assert set(delta[-1].seconds) == phases
    assert {s.verified for s in full} == {"full"}
    assert {s.verified for s in delta} == {"touched"}
    assert CUT.keys() <= SHAPES.keys()


def test_nothing_is_kept_between_updates(make: Make) -> None:
    pairing = make(anchor_interval=4)
    counts: dict[int, int] = {}
    for version in range(24):
        train(pairing)
        pairing.commit(version)
        if version in (3, 23):  # counting walks over all objects of the process
            gc.collect()
            counts[version] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    # A thread that has just ended an update may still hold its last rows; one tensor an update is growth.
    assert counts[23] - counts[3] < 20


ODD_SHAPES = {
    EMBED: (16, 8),
    "model.layers.0.\u043c\u043b\u043f \"'\\{}%s.weight": (6, 5),
    "model.\x07bell": (3,),
    "": (2,),
    "model.no_rows.weight": (0, 5),
    "model.one.weight": (1,),
}


def test_odd_names_and_tensors_with_fewer_elements_than_owners(make: Make) -> None:
    seats = [EngineSeat(engine=name, view=DictEngine(ODD_SHAPES)) for name in ('e/\u03b1 \n"', "sample {0}")]
    pairing = make(shapes=ODD_SHAPES, engines=seats, num_trainers=5)
    for version in range(3):
        train(pairing)
        stats = pairing.commit(version)
        assert wrong(pairing) == [{}] * 2
    assert stats[0].verdict.kind is Kind.DELTA
