"""FSDP2 trainings that publish to several targets, a moving average and a folder, and that meet failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from awex_delta.attach import attach_fsdp_disk, attach_transformers, attach_transformers_disk
from awex_delta.protocol.rendezvous import Rendezvous, host_store
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.targets import Targets
from awex_delta.protocol.verdict import Kind, Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.fleet import Actions, Answer, Fleet
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.trainers.ema import EmaShadow
from tests.docs.blocks import python_blocks
from tests.procs.fsdp_training import FsdpSpec, FsdpTraining, State, hf_config, start
from tests.procs.test_fsdp import wrong

pytestmark = pytest.mark.timeout(240)

SPEC = FsdpSpec(layers=1)
ALPHA = 0.25
NUM_VERSIONS = 4
SETTINGS = DeltaSettings(anchor_interval=0, verify="full", allow_any_world_size=True)
STUDENT, TEACHER = 0, 1
NUM_ENGINES = 2


def new_model() -> Any:
    create: Any = AutoModelForCausalLM
    return create.from_config(hf_config(SPEC), dtype=torch.bfloat16)


def weights_of(model: Any) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def stream(me: Rank, port: int, url: str) -> list[State]:
    """Engines: their weights after each version. Trainers: the policy, then its average, of each version."""
    counts: dict[str, Any] = {"num_trainer_ranks": SPEC.num_ranks, "port": port}
    places = [Rendezvous(num_engine_ranks=1, name=name, **counts) for name in ("student", "teacher")]
    if me.rank < NUM_ENGINES:
        model = new_model()
        receiver = attach_transformers(model, rendezvous=places[me.rank], engine_rank=0, settings=SETTINGS)
        held = []
        for version in range(NUM_VERSIONS):
            receiver.update_weights(version)
            held.append(weights_of(model))
        receiver.close()
        return held
    training, rank = start(me, SPEC, NUM_ENGINES), me.rank - NUM_ENGINES
    view = training.attach(SETTINGS)
    shadow = EmaShadow(view, alpha=ALPHA)
    alone = [Rendezvous(num_engine_ranks=0, name=name, **counts) for name in ("trainers", "folder")]
    targets = Targets(view, trainers=alone[0], trainer_rank=rank, settings=SETTINGS)
    targets.add("student", places[STUDENT])
    targets.add("teacher", places[TEACHER], view=shadow)
    writer = attach_fsdp_disk(
        training.model,
        training.optimizer,
        training.hf_config,
        rendezvous=alone[1],
        settings=replace(SETTINGS, transport="disk", disk_url=url),
    )
    average, told = whole_masters(training), list[State]()
    for version in range(NUM_VERSIONS):
        training.train_step()
        shadow.average(version)
        update = targets.update_weights({"student": version, "teacher": version})
        assert not update.failed, update.failed
        kinds = {stats.verdict.kind for stats in update.committed.values()}
        assert kinds == {Kind.DELTA if version else Kind.FULL}
        assert writer.update_weights(version).verdict.kind is (Kind.DELTA if version else Kind.FULL)
        policy = whole_masters(training)
        average = {n: policy[n] * ALPHA + average[n] * (1 - ALPHA) for n in policy}
        told += [rounded(policy), rounded(average)]
    writer.close()
    targets.close()
    return told


def whole_masters(training: FsdpTraining) -> State:
    """The whole fp32 parameters, by torch's own collective. Collective: over the trainer ranks."""
    found = {}
    for name, param in training.model.named_parameters():
        assert isinstance(param, DTensor)
        found[name] = param.full_tensor().detach().clone()
    return found


def rounded(state: State) -> State:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


def test_two_targets_an_average_and_a_folder_follow_one_training(tmp_path: Path) -> None:
    store, url = host_store(), str(tmp_path)
    ranks = run_ranks(stream, NUM_ENGINES + SPEC.num_ranks, store.port, url)
    told = ranks[NUM_ENGINES]
    model = new_model()
    reader = attach_transformers_disk(model, settings=replace(SETTINGS, transport="disk", disk_url=url))
    for version in range(NUM_VERSIONS):
        policy, average = told[2 * version : 2 * version + 2]
        assert wrong(policy, ranks[STUDENT][version]) == [], version
        assert wrong(average, ranks[TEACHER][version]) == [], version
        assert wrong(policy, average), "the average is another stream"
        assert reader.update_weights(version).verdict.kind is (Kind.DELTA if version else Kind.FULL)
        assert wrong(policy, weights_of(model)) == [], version
    reader.close()


def run_page(me: Rank, port: int) -> State:
    """The program of the page on two trainer ranks, or an engine beside it."""
    rendezvous = Rendezvous(num_engine_ranks=1, num_trainer_ranks=2, port=port)
    if not me.rank:
        model = new_model()
        receiver = attach_transformers(model, rendezvous=rendezvous, engine_rank=0, settings=SETTINGS)
        for version in range(1, NUM_VERSIONS + 1):
            receiver.update_weights(version)
        receiver.close()
        return weights_of(model)
    training = start(me, SPEC, 1)
    create: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    training.model = create.from_config(training.hf_config, dtype=torch.float32)

    def train_step() -> None:
        training.optimizer = names["optimizer"]
        training.train_step()

    names: dict[str, Any] = {"model": training.model, "mesh": init_device_mesh("cpu", (2,))}
    names |= {"rendezvous": rendezvous, "settings": SETTINGS, "num_steps": NUM_VERSIONS}
    names |= {"train_step": train_step}
    (program,) = python_blocks("docs/en/fsdp.md")
    program.run(names)
    return training.truth()


def test_the_program_on_the_page() -> None:
    store = host_store()
    engine, trained, _ = run_ranks(run_page, 3, store.port)
    assert wrong(trained, engine) == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who a process of the fault test is, and where it meets the others."""

    rank: int
    port: int
    folder: Path


PATIENT = replace(SETTINGS, timeout_seconds=60, connect_timeout_seconds=60)
TRAINERS, ENGINES = ("trainer-0", "trainer-1"), ("engine-0", "engine-1")


def meeting(seat: Seat) -> Rendezvous:
    return Rendezvous(num_engine_ranks=len(ENGINES), num_trainer_ranks=len(TRAINERS), port=seat.port)


def build_trainer(seat: Seat) -> Actions:
    training = start(Rank(rank=seat.rank, world_size=2, folder=seat.folder), SPEC)
    faults = FaultPlan()
    view = training.attach(PATIENT)
    sender = Sender(view, meeting(seat), seat.rank, PATIENT, on_phase=faults.on_phase)
    return {
        "step": training.train_step,
        "update": sender.update_weights,
        "weights": training.truth,
        "fail": faults.fail,
    }


def build_engine(seat: Seat) -> Actions:
    model = new_model()
    receiver = attach_transformers(
        model,
        rendezvous=meeting(seat),
        engine_rank=seat.rank,
        settings=PATIENT,
        engine=f"copy {seat.rank}",
    )

    def break_apply() -> None:
        whole = receiver.view.synchronize
        view: Any = receiver.view

        def fail_once() -> None:
            view.synchronize = whole
            raise RuntimeError("the device failed after weights were written")

        view.synchronize = fail_once

    return {
        "update": receiver.update_weights,
        "weights": lambda: weights_of(model),
        "ready": lambda: receiver.ready,
        "fail": break_apply,
    }


class World:
    """Two trainer ranks and two engines, each a process."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self._folder, self._store = fleet, folder, host_store()
        self.start(TRAINERS, build_trainer)
        self.start(ENGINES, build_engine)

    def start(self, names: tuple[str, ...], build: Callable[..., Actions]) -> None:
        seats = {name: Seat(rank=int(name[-1]), port=self._store.port, folder=self._folder) for name in names}
        self.fleet.start(seats, build)

    def ask(self, names: tuple[str, ...], action: str, **arguments: Any) -> Mapping[str, Answer]:
        return self.fleet.ask(names, action, timeout_seconds=120, **arguments)

    def train(self) -> None:
        self.ask(TRAINERS, "step")

    def commit(self, version: int, reason: Reason) -> None:
        """An update that every rank commits, for that reason; all engines have the bits of the trainer."""
        answers = self.ask((*TRAINERS, *ENGINES), "update", version=version)
        assert [one.failure for one in answers.values()] == [""] * 4
        assert {one.value.verdict.reason for one in answers.values()} == {reason}
        truth = self.ask(TRAINERS, "weights")[TRAINERS[0]].value
        for engine in self.ask(ENGINES, "weights").values():
            assert wrong(truth, engine.value) == [], version

    def abort(self, version: int, said: str, *, ready: bool) -> None:
        """An update that no rank commits, and what they say."""
        answers = self.ask((*TRAINERS, *ENGINES), "update", version=version)
        for one in answers.values():
            assert one.failure.startswith("UpdateAborted"), one.failure
            assert said in one.failure
        assert [one.value for one in self.ask(ENGINES, "ready").values()] == [ready] * 2


def test_every_failure_leaves_the_engines_exact(tmp_path: Path) -> None:
    with Fleet() as fleet:
        world = World(fleet, tmp_path)
        world.train()
        world.commit(0, Reason.FIRST_SYNC)
        world.train()
        world.commit(1, Reason.NONE)

        world.train()
        world.ask(TRAINERS[1:], "fail", phase="detect")
        world.commit(2, Reason.DETECTION_FAILED)

        world.train()
        world.ask(TRAINERS[1:], "fail", phase="encode")
        world.abort(3, "trainer rank 1", ready=True)
        world.ask(TRAINERS[:1], "fail", phase="prepare")
        world.abort(3, "trainer rank 0", ready=True)
        world.commit(3, Reason.PREVIOUS_ABORTED)

        world.train()
        world.ask(ENGINES[1:], "fail")
        world.abort(4, "engine rank 1", ready=False)
        world.commit(4, Reason.PREVIOUS_ABORTED)
        world.train()
        world.commit(5, Reason.NONE)

        fleet.end(ENGINES[0])
        begin = time.monotonic()
        world.train()
        left = (*TRAINERS, ENGINES[1])
        answers = world.ask(left, "update", version=6)
        assert all(one.failure.startswith("PeerError") for one in answers.values()), answers
        assert any("engine rank 0" in one.failure for one in answers.values())
        assert time.monotonic() - begin < PATIENT.timeout_seconds, "nobody waits for who is gone"
        world.start(ENGINES[:1], build_engine)
        world.commit(6, Reason.PREVIOUS_ABORTED)
        world.train()
        world.commit(7, Reason.NONE)
