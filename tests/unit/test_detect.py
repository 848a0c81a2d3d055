"""From owned slices to changes in the trainer's line: gates, pieces, compilation."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from awex_delta.detection import adamw, pieces
from awex_delta.detection import invert as detect
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.invert import StepOf, detect_changes
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.errors import UnsupportedError
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.protocol.verdict import Reason

STEP = AdamWStep(lr=1e-5, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, step=1)


STILL = replace(STEP, lr=0.0, step=3)


class Training:
    """One bf16 parameter with an fp32 master and torch's AdamW, and a snapshot of what was committed."""

    def __init__(self, numel: int = 4096, *, step: AdamWStep = STEP, num_steps: int = 1) -> None:
        self.used = replace(step, step=num_steps)
        self.main = (torch.randn(numel) * 0.02).bfloat16().float()
        self.optimizer = torch.optim.AdamW(
            [self.main],
            lr=step.lr,
            weight_decay=step.weight_decay,
            betas=(step.beta1, step.beta2),
            eps=step.eps,
        )
        for _ in range(num_steps):
            self.committed = self.main.bfloat16()
            self.main.grad = torch.randn(numel)
            self.optimizer.step()

    def slice(self, *, start: int = 0, param: str = "p", begin: int = 0) -> OwnedSlice:
        state = self.optimizer.state[self.main]
        return OwnedSlice(
            param=param,
            chunk=0,
            start=start,
            stop=start + self.main.numel(),
            begin=begin + start,
            main=self.main.detach(),
            weight=self.main.bfloat16(),
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            step=self.used.step,
        )

    def changed(self) -> torch.Tensor:
        return (self.committed.view(torch.int16) != self.main.bfloat16().view(torch.int16)).nonzero().view(-1)


def found(detection: Detection) -> torch.Tensor:
    assert detection.reason is Reason.NONE, detection
    pos = detection.changes.pos
    assert bool((pos.diff() > 0).all())
    return pos


def lined_up(trainings: Iterable[tuple[str, Training]]) -> list[OwnedSlice]:
    """Slices of whole parameters that follow each other in the trainer's line."""
    slices, begin = [], 0
    for param, training in trainings:
        slices.append(training.slice(param=param, begin=begin))
        begin += training.main.numel()
    return slices


def holds(indices: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.isin(wanted, indices).all())


@pytest.mark.parametrize("start", [0, 7])
def test_changes_are_found_at_their_place_in_the_line(start: int) -> None:
    training = Training()
    owned = training.slice(start=start, begin=1000)
    detection = detect_changes([owned], lambda _: training.used)
    pos = found(detection)
    assert holds(pos, training.changed() + 1000 + start)
    assert pos.numel() <= training.changed().numel() + 4
    assert detection.num_owned == 4096
    code, value = detection.changes.code, detection.changes.value
    assert code is not None
    assert code.dtype == torch.int8
    assert 0 not in code.tolist()
    assert value is not None
    assert torch.equal(value, owned.weight[pos - 1000 - start])


STEPS = {
    "a": STEP,
    "b": replace(STEP, lr=1e-4, weight_decay=0.0),
    "c": replace(STEP, lr=1e-6, eps=1e-6),
    "d": replace(STEP, weight_decay=0.3),
}


@pytest.mark.parametrize(("piece", "large", "block"), [(700, 300, 64), (10_000, 5000, 1 << 18), (64, 64, 1)])
def test_pieces_of_every_size_give_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, piece: int, large: int, block: int
) -> None:
    # Small and large slices with steps of their own, of which some sat out: joined, cut, and put in order.
    sizes = (1, 63, 64, 65, 699, 3000, 5, 299, 300, 301, 2, 17)
    trainings = {
        f"{number}{name}": Training(numel, step=replace(step, lr=1e-3), num_steps=1 + number % 2)
        for number, (numel, (name, step)) in enumerate(zip(sizes, 3 * list(STEPS.items()), strict=True))
    }
    slices = lined_up(trainings.items())

    def plan(owned: OwnedSlice) -> AdamWStep | None:
        return None if owned.param == "8a" else trainings[owned.param].used

    whole = detect_changes(slices, plan).changes
    monkeypatch.setattr(detect, "_EAGER_PIECE", piece)
    monkeypatch.setattr(detect, "_BLOCK", block)
    monkeypatch.setattr(pieces, "_LARGE", large)
    parts = detect_changes(slices, plan).changes
    assert whole.num_changed > 1000
    for name in ("pos", "code", "value"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    changed = [
        training.changed() + owned.begin
        for training, owned in zip(trainings.values(), slices, strict=True)
        if owned.param != "8a"
    ]
    assert holds(whole.pos, torch.cat(changed))


def test_a_device_that_is_not_waited_for_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(3000, step=replace(STEP, lr=1e-3), num_steps=2)
    training.main[5] = float("nan")
    waited = detect_changes([training.slice()], lambda _: training.used).changes
    monkeypatch.setattr(detect, "_unknown", lambda _: slice(None))
    monkeypatch.setattr(detect, "nonzero", lambda marks: marks.nonzero().view(-1))
    others = detect_changes([training.slice()], lambda _: training.used).changes
    assert waited.code is not None
    assert UNSTATED in waited.code.tolist()
    assert torch.equal(waited.pos, others.pos)
    assert torch.equal(waited.code, others.code)  # type: ignore[arg-type]


def test_every_slice_is_inverted_with_its_own_step() -> None:
    # lr and decay differ by group (biases, experts), and so does the step of what joined later.
    trainings = {name: Training(step=step, num_steps=1 + i) for i, (name, step) in enumerate(STEPS.items())}
    for order in (list(STEPS), list(STEPS)[::-1]):
        slices = lined_up((name, trainings[name]) for name in order)
        pos = found(detect_changes(slices, lambda owned: trainings[owned.param].used))
        for owned in slices:
            assert holds(pos, trainings[owned.param].changed() + owned.begin)


def test_the_answer_does_not_depend_on_a_scheduler_that_moved_on() -> None:
    training = Training(num_steps=3)
    before = found(detect_changes([training.slice()], lambda _: training.used))
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    assert torch.equal(found(detect_changes([training.slice()], lambda _: training.used)), before)


def test_a_step_without_gradients_is_an_ordinary_step() -> None:
    training = Training(num_steps=2)
    training.committed = training.main.bfloat16()
    training.main.grad = torch.zeros_like(training.main)
    training.optimizer.step()
    training.used = replace(training.used, step=3)
    assert training.changed().numel() > 0  # momentum and decay still move weights
    assert holds(found(detect_changes([training.slice()], lambda _: training.used)), training.changed())


def test_a_slice_that_no_step_moved_has_no_changes() -> None:
    training = Training()
    detection = detect_changes([training.slice()], lambda _: None)
    assert (detection.reason, detection.num_changed, detection.num_owned) == (Reason.NONE, 0, 4096)


def test_the_identity_step_has_no_changes() -> None:
    training = Training(step=replace(STEP, lr=0.0, weight_decay=0.0), num_steps=2)
    assert found(detect_changes([training.slice()], lambda _: training.used)).numel() == 0


def test_a_zero_that_stays_zero_is_sent_once() -> None:
    weights = torch.zeros(64)
    weights[:32] = 0.5
    counts = []
    training = Training(64, num_steps=0)
    training.main.copy_(weights)
    for number in (1, 2, 3):
        training.main.grad = torch.zeros(64)
        training.main.grad[:32] = 1.0
        training.optimizer.step()
        training.used = replace(training.used, step=number)
        index = found(detect_changes([training.slice()], lambda _: training.used))
        counts.append(int((index >= 32).sum()))
    assert counts == [32, 0, 0]


def test_nothing_owned_is_nothing_changed() -> None:
    empty = Training(0).slice()
    plans: list[StepOf] = [lambda _: STEP, lambda _: None]
    for slices, plan in itertools.product(([], [empty]), plans):
        detection = detect_changes(slices, plan)
        assert (detection.reason, detection.num_changed, detection.num_owned) == (Reason.NONE, 0, 0)


def with_element(tensor: torch.Tensor | None, value: float) -> torch.Tensor:
    assert tensor is not None
    changed = tensor.clone()
    changed[1234] = value
    return changed


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


Change = Callable[[OwnedSlice], OwnedSlice]

DAMAGE: dict[str, tuple[Change, Reason]] = {
    "no master": (lambda s: replace(s, main=None), Reason.NO_FP32_MASTER),
    "a bf16 master": (lambda s: replace(s, main=s.weight), Reason.NO_FP32_MASTER),
    "an fp16 master": (
        lambda s: replace(s, main=torch.zeros(4096, dtype=torch.float16)),
        Reason.NO_FP32_MASTER,
    ),
    "no exp_avg": (lambda s: replace(s, exp_avg=None), Reason.MOMENTS_MISSING),
    "no exp_avg_sq": (lambda s: replace(s, exp_avg_sq=None), Reason.MOMENTS_MISSING),
    "freed moments": (lambda s: replace(s, exp_avg=torch.empty(0)), Reason.MOMENTS_MISSING),
    "moments of another length": (
        lambda s: replace(s, exp_avg_sq=torch.zeros(4095)),
        Reason.MOMENTS_MISSING,
    ),
    "fp16 moments without a scale": (
        lambda s: replace(s, exp_avg=torch.zeros(4096, dtype=torch.float16)),
        Reason.MOMENTS_INVALID,
    ),
    "a scale that was freed": (
        lambda s: replace(s, exp_avg=torch.zeros(4096).half(), exp_avg_scale=freed(torch.ones(1))),
        Reason.STATE_AWAY,
    ),
    "fp8 moments of another kind": (
        lambda s: replace(s, exp_avg=torch.zeros(4096).to(torch.float8_e5m2), exp_avg_scale=torch.ones(1)),
        Reason.MOMENTS_INVALID,
    ),
    "8-bit moments": (
        lambda s: replace(s, exp_avg_sq=torch.zeros(4096, dtype=torch.uint8)),
        Reason.MOMENTS_INVALID,
    ),
    "NaN in exp_avg": (
        lambda s: replace(s, exp_avg=with_element(s.exp_avg, float("nan"))),
        Reason.MOMENTS_INVALID,
    ),
    "infinity in exp_avg": (
        lambda s: replace(s, exp_avg=with_element(s.exp_avg, float("inf"))),
        Reason.MOMENTS_INVALID,
    ),
    "infinity in exp_avg_sq": (
        lambda s: replace(s, exp_avg_sq=with_element(s.exp_avg_sq, float("inf"))),
        Reason.MOMENTS_INVALID,
    ),
    "a negative exp_avg_sq": (
        lambda s: replace(s, exp_avg_sq=with_element(s.exp_avg_sq, -1e-12)),
        Reason.MOMENTS_INVALID,
    ),
    "a replaced weight": (
        lambda s: replace(s, weight=with_element(s.weight, 0.5)),
        Reason.MASTER_MISMATCH,
    ),
    "all weights replaced": (
        lambda s: replace(s, weight=torch.randn(4096).bfloat16()),
        Reason.MASTER_MISMATCH,
    ),
    "a counter that stands elsewhere": (lambda s: replace(s, step=7), Reason.HYPERPARAMETERS_INVALID),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_gate_names_its_reason_and_parameter(damage: str) -> None:
    change, reason = DAMAGE[damage]
    training = Training()
    good = Training().slice(param="good")
    bad = change(training.slice(param="bad", begin=4096))
    detection = detect_changes([good, bad], lambda _: training.used)
    assert detection.reason is reason
    assert "0/bad" in detection.detail
    assert detection.num_changed == 0
    assert detection.num_owned == 8192


def test_a_replaced_weight_is_found_where_no_step_ran() -> None:
    for element in (0, 4095):
        owned = Training().slice()
        owned.weight[element] = 0.5
        detection = detect_changes([owned], lambda _: None)
        assert (detection.reason, detection.detail) == (Reason.MASTER_MISMATCH, "0/p")


def test_nan_weights_are_not_a_mismatch_and_are_sent() -> None:
    training = Training()
    training.main[3] = float("nan")
    assert detect_changes([training.slice()], lambda _: None).reason is Reason.NONE
    assert 3 in found(detect_changes([training.slice()], lambda _: training.used)).tolist()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(replace(STEP, step=0), id="step 0"),
        pytest.param(replace(STEP, lr=1.0, weight_decay=1.0), id="nothing left of the weight"),
        pytest.param(replace(STEP, lr=float("nan")), id="lr is NaN"),
        pytest.param(replace(STEP, beta2=1.0), id="beta2 is 1"),
        pytest.param(replace(STEP, eps=-1e-8), id="negative eps"),
    ],
)
def test_a_record_that_cannot_be_inverted_is_a_reason(step: AdamWStep) -> None:
    owned = replace(Training().slice(), step=step.step)
    detection = detect_changes([owned], lambda _: step)
    assert detection.reason is Reason.HYPERPARAMETERS_INVALID
    assert "0/p" in detection.detail


def test_moments_of_steps_that_the_counter_does_not_know_are_a_reason() -> None:
    # An optimizer state loaded without its counter.
    owned = replace(Training().slice(), step=0)
    assert detect_changes([owned], lambda _: None).reason is Reason.HYPERPARAMETERS_INVALID
    zeros = replace(owned, exp_avg=torch.zeros(4096), exp_avg_sq=torch.zeros(4096))
    assert detect_changes([zeros], lambda _: None).reason is Reason.NONE
    fresh = replace(owned, exp_avg=None, exp_avg_sq=None)
    assert detect_changes([fresh], lambda _: None).reason is Reason.NONE


def test_the_worst_reason_wins() -> None:
    owned = Training().slice()
    plans = {"a": Reason.STEP_GAP, "b": Reason.NOT_ADAMW, "c": Reason.NO_STEP_RECORD}
    slices = [replace(owned, param=name) for name in plans]
    detection = detect_changes(slices, lambda each: plans[each.param])
    assert (detection.reason, detection.detail) == (Reason.NOT_ADAMW, "0/b")
    slices.append(replace(owned, param="a", main=None))
    assert detect_changes(slices, lambda each: plans[each.param]).reason is Reason.NO_FP32_MASTER


def test_a_view_that_does_not_fit_is_an_error() -> None:
    owned = Training().slice()
    with pytest.raises(UnsupportedError, match="0/p: detection needs 4096 bf16 weights"):
        detect_changes([replace(owned, weight=owned.weight.half())], lambda _: STEP)
    with pytest.raises(UnsupportedError, match="master of 4096 weights is 4095"):
        detect_changes([replace(owned, main=torch.zeros(4095))], lambda _: STEP)


@pytest.mark.parametrize("count", [1, 3])
def test_parameters_that_are_rounded_when_they_are_read_give_the_same_changes(count: int) -> None:
    training = Training()
    owned = training.slice()
    main, numel = owned.main, owned.stop - owned.start
    assert main is not None
    assert owned.weight.equal(main.to(torch.bfloat16))
    slices = [replace(owned, param=str(place), begin=place * numel) for place in range(count)]
    found, rounded = (
        detect_changes(some, lambda _: training.used)
        for some in (slices, [replace(one, weight=main) for one in slices])
    )
    assert found.num_changed > 0
    assert rounded.changes.pos.equal(found.changes.pos)
    for name in ("code", "value"):
        one, other = getattr(found.changes, name), getattr(rounded.changes, name)
        assert one.dtype is other.dtype
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


def test_slices_are_only_read() -> None:
    training = Training()
    owned = training.slice()
    everything = (owned.main, owned.weight, owned.exp_avg, owned.exp_avg_sq)
    tensors = [tensor for tensor in everything if tensor is not None]
    copies = [tensor.clone() for tensor in tensors]
    detect_changes([owned], lambda _: training.used)
    assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))


@pytest.fixture
def fresh_compilation() -> Iterator[None]:
    """Nothing compiled before is used, and nothing compiled here is kept."""
    detect._compiled_codes.cache_clear()
    torch._dynamo.reset()
    yield
    detect._compiled_codes.cache_clear()
    torch._dynamo.reset()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("fresh_compilation")
def test_one_compilation_serves_all_sizes_and_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ((4095, 1e-5, 1), (4096, 1e-5, 2), (9999, 1e-3, 3), (70_001, 1e-4, 2), (1, 1e-3, 1))
    trainings = {
        str(numel): Training(numel, step=replace(STEP, lr=lr), num_steps=num_steps)
        for numel, lr, num_steps in kinds
    }
    slices = lined_up(trainings.items())
    # Views that begin anywhere, as those into the buffers of a distributed optimizer do.
    longest = slices[3]
    begin = slices[-1].begin + 1
    for first in (1, 3, 8):
        cut = {name: getattr(longest, name)[first:] for name in ("main", "weight", "exp_avg", "exp_avg_sq")}
        slices.append(replace(longest, chunk=first, start=first, begin=begin + first, **cut))
        begin += longest.stop

    # Each of them alone: a slice that is joined with others would hide its alignment and its size.
    monkeypatch.setattr(pieces, "_LARGE", 1)
    torch._dynamo.utils.counters.clear()
    pos = found(detect_changes(slices, lambda owned: trainings[owned.param].used, compiled=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not [record for record in caplog.records if record.name.startswith("awex_delta")]

    eager = found(detect_changes(slices, lambda owned: trainings[owned.param].used, compiled=False))
    for owned in slices:
        changed = trainings[owned.param].changed()
        assert holds(pos, changed[changed >= owned.start] - owned.start + owned.begin)
    # Compiled arithmetic may round differently, and so be certain of others.
    assert pos.numel() <= eager.numel() + 32


def codes_by_casts(state: adamw.State, inversion: adamw.Inversion) -> torch.Tensor:
    """What `adamw.codes` says, by casts and comparisons of floating-point numbers."""
    move = inversion.update_scale * (
        state.exp_avg / (state.exp_avg_sq.sqrt() * inversion.root_scale + inversion.eps)
    )
    error = inversion.err_weight * state.main.abs() + inversion.err_update * move.abs() + inversion.err_floor
    move = move + inversion.decay_scale * state.main
    low, high = ((state.main + (move + end)).bfloat16().float() for end in (-error, error))
    certain = (low == high) & (low.abs() <= 2.0**126) & (state.main.bfloat16() == state.weight)
    certain &= (state.exp_avg_sq >= inversion.min_sq) & (state.exp_avg_sq <= inversion.max_sq)
    return torch.where(certain, step_code(low.bfloat16(), state.weight), UNSTATED)


def special_states() -> adamw.State:
    """All combinations of special masters, moments, squares and weights, three of each beside each other."""
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    numbers = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), 1e-40, 2.0**-126, 2.0**126, 3e38, 1.0, 1 + 2.0**-8, -3.0]
    )
    masters = torch.cat([numbers, nans]).repeat_interleave(3)
    moments = torch.cat([torch.tensor([0.0, -0.0, 1e-3, -1e-3, 7.0, float("inf")]), nans])
    squares = torch.cat([torch.tensor([0.0, -0.0, 1e-40, 1e-6, -1e-6, -1e-40, float("inf"), 3e38]), nans])
    # The rounded master, its neighbours, and itself with the other sign.
    change = torch.tensor([0, 1, -1, -0x8000])
    places = torch.cartesian_prod(*(torch.arange(one.numel()) for one in (masters, moments, squares, change)))
    main = masters[places[:, 0]]
    weight = (main.bfloat16().view(torch.int16) + change[places[:, 3]].to(torch.int16)).view(torch.bfloat16)
    return adamw.State(
        main=main, exp_avg=moments[places[:, 1]], exp_avg_sq=squares[places[:, 2]], weight=weight
    )


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("fresh_compilation")
def test_the_compiled_pass_and_the_eager_one_say_of_special_values_what_casts_say() -> None:
    state = special_states()
    state = state.pick(torch.arange(state.main.numel() - 1))
    compiled = detect._compiled_codes("cpu", is_split=False)
    assert compiled is not None
    assert state.main.numel() % 16 != 0  # the last vector is not full
    for step in (replace(STEP, step=3), replace(STEP, step=1, lr=0.5), replace(STEP, eps=0.0), STILL):
        inversion = adamw.invert(step)
        wanted = codes_by_casts(state, inversion)
        coefficients = inversion.coefficients(torch.device("cpu"))
        for codes in (compiled, adamw.codes):
            said = codes(state.main, state.exp_avg, state.exp_avg_sq, state.weight, coefficients)
            # Only an exp_avg_sq of -0.0 may be in range for comparisons and not for bit patterns.
            other = said != wanted
            assert bool((said[other] == UNSTATED).all())
            assert bool((state.exp_avg_sq[other].view(torch.int32) == -(1 << 31)).all())


@pytest.mark.usefixtures("fresh_compilation")
def test_without_a_compiler_detection_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(8192)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        torch._functorch.config.patch({"enable_autograd_cache": False}),
        caplog.at_level(logging.WARNING, logger="awex_delta.lines.compiling"),
    ):
        detections = [
            detect_changes([training.slice()], lambda _: training.used, compiled=True) for _ in range(2)
        ]
    for detection in detections:
        assert holds(found(detection), training.changed())
    # Once, not at every update.
    (record,) = caplog.records
    assert record.getMessage().startswith("change detection runs uncompiled, several times slower: ")
