"""What else than one recorded step happens to an optimizer, judged by a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from awex_delta.detection.sample import MasterSample
from awex_delta.lines.bits import UNSTATED
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from tests.kernels import FusedAdam
from tests.pairing import stepped_by

SHAPES = {"a": (64, 40), "b": (30, 30), "c": (7,)}
LR = 2e-4
EXACT = {Reason.NONE}
Harm = Callable[[TorchAdamWTrainer], object]


class Follower:
    """An engine that does what each detection says, and compares itself with the trainer afterwards."""

    def __init__(self, trainer: TorchAdamWTrainer) -> None:
        self.trainer = trainer
        self.num_changed = 0
        self.bits = self.trainers_bits()
        trainer.committed()

    def trainers_bits(self) -> torch.Tensor:
        weights = [self.trainer.tensor(info.key) for info in self.trainer.weights() if info.sparse]
        return torch.cat([weight.view(torch.int16).view(-1) for weight in weights]).clone()

    def update(self) -> Reason:
        found, now = self.trainer.detect(), self.trainers_bits()
        if found.reason is not Reason.NONE:
            self.bits = now
        else:
            pos, code = found.changes.pos, found.changes.code
            assert code is not None
            stated = code != UNSTATED
            moved = ordered(now[pos]) - ordered(self.bits[pos])
            assert torch.equal(moved[stated], code[stated].int()), "a step was stated that was not made"
            self.num_changed += int((now != self.bits).sum())
            self.bits[pos] = now[pos]
        assert torch.equal(self.bits, now), f"{int((self.bits != now).sum())} elements were missed"
        self.trainer.committed()
        return found.reason


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Where a bf16 pattern stands among all."""
    magnitude = (bits & 0x7FFF).int()
    return torch.where(bits < 0, -magnitude - 1, magnitude)


Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def adamw(params: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, **options)


def trainer_of(make: Make = adamw, *, accumulate: bool = False) -> TorchAdamWTrainer:
    return stepped_by(make, SHAPES, DeltaSettings(accumulate=accumulate))


def states(trainer: TorchAdamWTrainer) -> Sequence[dict[str, torch.Tensor]]:
    return list(trainer.optimizer.state.values())


def in_place(tensor: torch.Tensor) -> None:
    tensor.zero_()


def behind_torch(tensor: torch.Tensor) -> None:
    tensor.data.zero_()


def clear_state(trainer: TorchAdamWTrainer) -> None:
    trainer.optimizer.state.clear()


def load_state(trainer: TorchAdamWTrainer) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


def zero_counters(trainer: TorchAdamWTrainer, zero: Callable[[torch.Tensor], None] = in_place) -> None:
    for state in states(trainer):
        zero(state["step"])


def zero_counters_behind_torch(trainer: TorchAdamWTrainer) -> None:
    zero_counters(trainer, behind_torch)


def other_counters(trainer: TorchAdamWTrainer) -> None:
    for state in states(trainer):
        state["step"] = torch.zeros(())


def jump(trainer: TorchAdamWTrainer) -> None:
    for state in states(trainer):
        state["step"] += 5


def zero_moments(trainer: TorchAdamWTrainer, zero: Callable[[torch.Tensor], None] = in_place) -> None:
    for state in states(trainer):
        zero(state["exp_avg"])
        zero(state["exp_avg_sq"])


def zero_moments_behind_torch(trainer: TorchAdamWTrainer) -> None:
    zero_moments(trainer, behind_torch)


def move_moments(trainer: TorchAdamWTrainer) -> None:
    for state in states(trainer):
        state["exp_avg"] = state["exp_avg"].clone()


def reset_all(trainer: TorchAdamWTrainer) -> None:
    zero_counters(trainer)
    zero_moments(trainer)


def masters(trainer: TorchAdamWTrainer) -> list[torch.Tensor]:
    return [param for group in trainer.optimizer.param_groups for param in group["params"]]


def write_masters(trainer: TorchAdamWTrainer) -> None:
    with torch.no_grad():
        for main in masters(trainer):
            main.mul_(1.5)


def write_masters_behind_torch(trainer: TorchAdamWTrainer) -> None:
    for main in masters(trainer):
        main.data.mul_(1.5)


def write_all_behind_torch(trainer: TorchAdamWTrainer) -> None:
    write_masters_behind_torch(trainer)
    for main, name in zip(masters(trainer), SHAPES, strict=True):
        trainer.tensor(f"0/{name}").copy_(main.detach())


def move_masters(trainer: TorchAdamWTrainer) -> None:
    for main in masters(trainer):
        main.data = main.data.clone()


def replace_masters(trainer: TorchAdamWTrainer) -> None:
    """As recipes do that offload an optimizer and bring it back: the old storage is freed."""
    optimizer = trainer.optimizer
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = old.detach().clone().requires_grad_()
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
            group["params"][place] = new
            old.data.untyped_storage().resize_(0)


def replace_masters_by_others(trainer: TorchAdamWTrainer) -> None:
    replace_masters(trainer)
    write_all_behind_torch(trainer)


def move_one_master(trainer: TorchAdamWTrainer) -> None:
    main = masters(trainer)[1]
    main.data = main.data.clone()


def move_one_moment(trainer: TorchAdamWTrainer) -> None:
    state = states(trainer)[1]
    state["exp_avg_sq"] = state["exp_avg_sq"].clone()


def offload(trainer: TorchAdamWTrainer) -> None:
    """Everything that the optimizer holds goes away and comes back, its counters as well."""
    for tensor in masters(trainer):
        kept, storage = tensor.data.clone(), tensor.data.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        tensor.data.copy_(kept)
    for state in states(trainer):
        state.update({name: tensor.clone() for name, tensor in state.items()})


def nothing(_: TorchAdamWTrainer) -> None:
    pass


BEFORE: list[tuple[Harm, set[Reason]]] = [
    (nothing, EXACT),
    (clear_state, {Reason.STEP_GAP}),
    (load_state, {Reason.STEP_GAP}),
    (zero_counters, {Reason.STEP_GAP}),
    (zero_counters_behind_torch, {Reason.STEP_GAP}),
    (other_counters, {Reason.STEP_GAP}),
    (jump, {Reason.STEP_GAP}),
    (reset_all, {Reason.STEP_GAP}),
    # A step that begins with other moments is a step like any other: inverting it asks for those it left.
    (zero_moments, EXACT),
    (zero_moments_behind_torch, EXACT),
    (move_moments, EXACT),
    (write_masters, {Reason.STATE_REPLACED}),
    (write_masters_behind_torch, {Reason.STEP_DISPROVED, Reason.MASTER_MISMATCH}),
    (write_all_behind_torch, {Reason.STEP_DISPROVED}),
    # So is one that begins with the same masters in another place, as a sample of them shows.
    (move_masters, EXACT),
    (replace_masters, EXACT),
    (offload, EXACT),
    (move_one_master, EXACT),
    (replace_masters_by_others, {Reason.STEP_DISPROVED}),
]
AFTER: list[tuple[Harm, set[Reason]]] = [
    (clear_state, {Reason.STEP_GAP}),
    (load_state, {Reason.STEP_GAP}),
    (zero_counters, {Reason.STEP_GAP, Reason.HYPERPARAMETERS_INVALID}),
    (zero_moments, {Reason.STATE_REPLACED}),
    (zero_moments_behind_torch, {Reason.STEP_DISPROVED}),
    (move_moments, EXACT),
    (move_one_moment, EXACT),
    (write_all_behind_torch, {Reason.STEP_DISPROVED}),
    (move_masters, EXACT),
    (replace_masters, EXACT),
    (offload, EXACT),
    (move_one_master, EXACT),
    (replace_masters_by_others, {Reason.STEP_DISPROVED}),
]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("harm", "reasons", "after"),
    [(*case, False) for case in BEFORE] + [(*case, True) for case in AFTER],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_version_is_exact_whatever_happens_to_the_optimizer(
    harm: Harm, reasons: set[Reason], after: bool, accumulate: bool
) -> None:
    trainer = trainer_of(accumulate=accumulate)
    engine = Follower(trainer)
    trainer.train_step()
    assert engine.update() is Reason.NONE
    for _ in range(4):
        if not after:
            harm(trainer)
        trainer.train_step()
        if after:
            harm(trainer)
        assert engine.update() in reasons
    for _ in range(2):
        trainer.train_step()
        last = engine.update()
    assert last is Reason.NONE, "one full sync later it goes on"
    assert engine.num_changed > 200


@pytest.fixture(params=["transformer_engine.pytorch.optimizers.fused_adam", "apex.optimizers.fused_adam"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[FusedAdam]:
    monkeypatch.setattr(FusedAdam, "__module__", request.param)
    return FusedAdam


def test_a_reset_between_all_steps_of_a_counter_by_group(fused: type[FusedAdam]) -> None:
    """The counter is 1 after each step, as if none had been made."""
    trainer = trainer_of(lambda params: fused(params, lr=LR))
    engine = Follower(trainer)
    reasons = []
    for _ in range(5):
        for group in trainer.optimizer.param_groups:
            group["step"] = 0
        for state in trainer.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        trainer.train_step()
        reasons.append(engine.update())
    assert reasons == [Reason.NONE] + [Reason.STEP_GAP] * 4
    trainer.train_step()
    assert engine.update() is Reason.NONE


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_group_counts_steps_that_a_parameter_sat_out(fused: type[FusedAdam], accumulate: bool) -> None:
    trainer = trainer_of(lambda params: fused(params, lr=LR), accumulate=accumulate)
    engine = Follower(trainer)
    for idle in ("", "a", "b", "a", "", "c"):
        busy = [name for name in SHAPES if name != idle]
        trainer.train_step({name: torch.randn(SHAPES[name]) for name in busy})
        assert engine.update() is Reason.NONE
    assert engine.num_changed > 500


def test_a_group_that_counts_two_calls_of_which_each_parameter_sat_one_out(fused: type[FusedAdam]) -> None:
    trainer = trainer_of(lambda params: fused(params, lr=LR))
    engine = Follower(trainer)
    for names, reason in (("ab", Reason.STEP_GAP), ("ba", Reason.STEP_GAP), ("b", Reason.NONE)):
        for name in names:
            trainer.train_step({name: torch.randn(SHAPES[name])})
        # A parameter that moved first was stepped with a lower number than the counter shows now.
        assert engine.update() is reason


def test_a_decoupled_gradient_is_the_one_that_counts(fused: type[FusedAdam]) -> None:
    trainer = trainer_of(lambda params: fused(params, lr=LR, use_decoupled_grad=True))
    engine = Follower(trainer)
    for _ in range(4):
        for place, main in enumerate(masters(trainer)):
            main.decoupled_grad = torch.randn(main.shape) if place else None  # type: ignore[attr-defined]
        trainer.train_step()  # `grad` is there for all, and is not read
        assert engine.update() is Reason.NONE
    assert engine.num_changed > 100


def test_an_overflow_that_a_counter_by_group_shows_a_step_late(fused: type[FusedAdam]) -> None:
    trainer = trainer_of(lambda params: fused(params, lr=LR, capturable=True))
    optimizer: Any = trainer.optimizer
    step = optimizer.step
    engine = Follower(trainer)
    for overflow in (0, 1, 0, 1, 1, 0):
        optimizer.step = lambda found=overflow: step(grad_scaler=SimpleNamespace(found_inf=found))
        trainer.train_step()
        assert engine.update() in {Reason.LOSSY_RECORD, Reason.STEP_GAP}
    optimizer.step = step
    for _ in range(2):
        trainer.train_step()
        assert engine.update() is Reason.NONE


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_skipped_step_is_a_delta_without_changes(accumulate: bool) -> None:
    trainer = trainer_of(lambda params: adamw(params, fused=True), accumulate=accumulate)
    optimizer: Any = trainer.optimizer
    engine = Follower(trainer)
    for overflow in (0, 1, 0, 1, 1, 0):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(float(overflow))
        for group in optimizer.param_groups:
            group["lr"] *= 1.5
        before = engine.num_changed
        trainer.train_step()
        assert engine.update() is Reason.NONE
        assert (engine.num_changed > before) == (not overflow)


def schedule(optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def set_lr(factor: float) -> Callable[..., None]:
    def change(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    return change


def borrow(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(set_lr(8.0))
    optimizer.register_step_post_hook(set_lr(0.125))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("register", [schedule, borrow])
@pytest.mark.parametrize("first", [True, False])
def test_the_step_is_undone_with_what_it_used_whoever_changes_it_in_hooks(
    register: Callable[[torch.optim.Optimizer], None], first: bool, accumulate: bool
) -> None:
    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = adamw(params)
        if first:
            register(optimizer)
        return optimizer

    trainer = trainer_of(make, accumulate=accumulate)
    if not first:
        register(trainer.optimizer)
    engine = Follower(trainer)
    for _ in range(5):
        before = engine.num_changed
        trainer.train_step()
        # What a later hook sets before the step is another value before it than after it.
        expected = Reason.LOSSY_RECORD if register is borrow and not first else Reason.NONE
        assert engine.update() is expected
        assert (engine.num_changed > before) == (expected is Reason.NONE), "down to the last step of a decay"


def test_values_that_change_inside_of_the_step_are_found_by_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner: Any = getattr(torch.optim.Adam.step, "__wrapped__", torch.optim.Adam.step)

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        set_lr(3.0)(self)
        with torch.no_grad():
            inner(self, closure)
        set_lr(1 / 3.0)(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", step, raising=False)
    trainer = trainer_of()
    engine = Follower(trainer)
    for _ in range(4):
        trainer.train_step()
        assert engine.update() is Reason.STEP_DISPROVED


@pytest.mark.parametrize("behind", [False, True])
def test_another_optimizer_over_the_same_masters(fused: type[FusedAdam], behind: bool) -> None:
    trainer = trainer_of()
    engine = Follower(trainer)
    trainer.train_step()
    assert engine.update() is Reason.NONE
    other = fused(masters(trainer), lr=LR) if behind else adamw(masters(trainer))
    first, trainer._optimizer = trainer.optimizer, other
    for _ in range(4):
        trainer.train_step()
        trainer._optimizer = first
        assert engine.update() is (Reason.STEP_DISPROVED if behind else Reason.STATE_REPLACED)
        trainer._optimizer = other


def test_many_masters_are_sampled_in_turn() -> None:
    shapes = {f"w{number}": (3, 5) for number in range(300)}
    trainer: Any = TorchAdamWTrainer.create(shapes, lr=LR)
    engine = Follower(trainer)
    for _ in range(4):
        trainer.train_step()
        assert engine.update() is Reason.NONE
    sampled = trainer._baseline._journal._sample.keys()
    moved = next(place for place, name in enumerate(shapes) if f"0/{name}" not in sampled)
    masters(trainer)[moved].data = masters(trainer)[moved].data.clone()
    trainer.train_step()
    assert engine.update() is Reason.STATE_REPLACED, "none of those that moved is in the sample"
    move_masters(trainer)
    trainer.train_step()
    assert engine.update() is Reason.NONE
    for main, name in zip(masters(trainer), shapes, strict=True):
        main.data.mul_(1.5)
        trainer.tensor(f"0/{name}").copy_(main.detach())
    assert engine.update() is Reason.STEP_DISPROVED
    trainer.train_step()
    assert engine.update() is Reason.NONE


def test_masters_that_are_away_at_a_commit_are_passed_over() -> None:
    sample = MasterSample()
    kept = {str(place): main for place, main in enumerate(masters(trainer_of()))}
    kept["transposed"] = torch.randn(4, 3).t()
    kept["bf16"] = torch.randn(4).bfloat16()
    kept["0"].data.untyped_storage().resize_(0)
    sample.take(torch.optim.SGD([torch.zeros(1)]), kept)
    assert sample.keys() == {"1", "2"}


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_step_that_failed_and_was_repeated(monkeypatch: pytest.MonkeyPatch, accumulate: bool) -> None:
    trainer = trainer_of(lambda params: adamw(params, foreach=True), accumulate=accumulate)
    engine = Follower(trainer)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "_foreach_addcdiv_", fail)  # its counters moved, its masters only by decay
            with pytest.raises(RuntimeError, match="no memory"):
                trainer.train_step()
        trainer.train_step()
        assert engine.update() is Reason.STEP_GAP
        trainer.train_step()
        assert engine.update() is Reason.NONE


def test_steps_in_inference_mode() -> None:
    """What torch makes there counts no writes at all."""
    trainer = trainer_of()
    engine = Follower(trainer)
    with torch.inference_mode():
        for _ in range(4):
            trainer.train_step()
            assert engine.update() is Reason.NONE
    assert engine.num_changed > 500
