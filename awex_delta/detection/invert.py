"""Owned slices -> the elements that one optimizer step changed. Rank-local, without a snapshot.

A slice is read once, in pieces, by one fused expression that is compiled where that pays. The few elements
whose old weight is not certain are looked at again, exactly. Besides the returned indices and codes, and a
copy of those of one slice while they are joined, extra memory stays below 64 MiB where few elements changed
(20 MiB at 1 %), and below 128 MiB where all did.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.slices import ChangeSet, Detection, OwnedSlice
from awex_delta.errors import NumericsError, UnsupportedError
from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.protocol.verdict import Reason

Plan = Callable[[OwnedSlice], AdamWStep | Reason | None]
"""Which step to invert for a slice; None when no step moved it since the commit; or why neither is known."""

_OldWeights = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]

# Elements at a time. Compiled, a piece costs three bytes for each element and eight for each that changed;
# eager, some fp32 temporaries. What changed is then handled in blocks, at about sixty bytes for each.
_COMPILED_PIECE = 1 << 21
_EAGER_PIECE = 1 << 18
_BLOCK = 1 << 18
# Compiling takes seconds, once a process: fewer owned elements than this never earn them back.
_WORTH_COMPILING = 1 << 24
# Shorter pieces gain nothing, and torch would compile again for sizes 0 and 1.
_SHORTEST_COMPILED = 1 << 12

# Otherwise compilers keep a value that was cast to bf16 and back in fp32, unrounded; and the bound allows for
# every order of operations but one, so that sums are not to be rearranged.
_COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "emulate_precision_casts": True,
    "cpp.enable_unsafe_math_opt_flag": False,
}
_COMPILER_FAILURES = (RuntimeError, OSError, ImportError, subprocess.SubprocessError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why one slice cannot be inverted."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """A refusal that holds if `flag`, a bool scalar still on the device, is true."""

    refusal: _Refusal
    flag: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """How to find old weights, and on how many elements at a time."""

    old_weights: _OldWeights
    piece: int

    def __call__(self, part: adamw.State, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        function = self.old_weights if part.weight.numel() >= _SHORTEST_COMPILED else adamw.old_weights
        return function(part.main, part.exp_avg, part.exp_avg_sq, part.weight, coefficients)


def detect_changes(slices: Iterable[OwnedSlice], plan: Plan, *, compiled: bool | None = None) -> Detection:
    """Find a certified superset of the bf16 weights that changed since the last commit.

    Args:
        slices: the owned ranges with their live optimizer state. Read only; nothing is kept.
        plan: asked once for each slice.
        compiled: True compiles (falling back to eager where no compiler works), False does not, None
            decides by the number of elements. The answer is certified either way.

    Returns:
        One change set for each slice with changes; or, when any slice cannot be inverted, the worst
        reason with the parameter that gave it, and no changes.

    Raises:
        UnsupportedError: a weight is not bf16, or a tensor does not have the length of its slice.

    Collective: no.
    """
    planned = [(owned, plan(owned)) for owned in slices if owned.stop > owned.start]
    num_owned = sum(owned.stop - owned.start for owned, _ in planned)
    refusals = [refusal for owned, step in planned for refusal in _refusals(owned, step)]
    if refusals:
        return _refuse(refusals, num_owned)

    if compiled is None:
        compiled = num_owned >= _WORTH_COMPILING
    changes: list[ChangeSet] = []
    doubts: list[_Doubt] = []
    with torch.no_grad():
        for owned, step in planned:
            if isinstance(step, AdamWStep):
                found = _invert(owned, step, _pass(owned.weight.device.type, compiled=compiled), doubts)
                changes += [found] if found.num_changed else []
            else:
                doubts += _doubts_of_unmoved(owned)
        # One transfer for all flags: a device is not waited for once more at every slice.
        flags = torch.stack([doubt.flag for doubt in doubts]).tolist() if doubts else []
    refusals = [doubt.refusal for doubt, flag in zip(doubts, flags, strict=True) if flag]
    if refusals:
        return _refuse(refusals, num_owned)
    return Detection(changes=tuple(changes), num_owned=num_owned)


def _refuse(refusals: list[_Refusal], num_owned: int) -> Detection:
    worst = max(refusals, key=lambda refusal: refusal.reason)
    return Detection(reason=worst.reason, detail=worst.detail, num_owned=num_owned)


def _refusals(owned: OwnedSlice, planned: AdamWStep | Reason | None) -> Iterator[_Refusal]:
    """What forbids to invert a slice, as far as it shows without reading the tensors."""
    key, numel = owned.key, owned.stop - owned.start
    if owned.weight.dtype != torch.bfloat16 or owned.weight.numel() != numel:
        raise UnsupportedError(f"{key}: detection needs {numel} bf16 weights, not {_describe(owned.weight)}")
    if owned.main is not None and owned.main.numel() != numel:
        raise UnsupportedError(f"{key}: the master of {numel} weights is {_describe(owned.main)}")
    if owned.main is None or owned.main.dtype != torch.float32:
        yield _Refusal(reason=Reason.NO_FP32_MASTER, detail=f"{key}: master is {_describe(owned.main)}")
    if isinstance(planned, Reason):
        yield _Refusal(reason=planned, detail=key)
    if isinstance(planned, AdamWStep):
        yield from _step_refusals(owned, planned)


def _step_refusals(owned: OwnedSlice, step: AdamWStep) -> Iterator[_Refusal]:
    key = owned.key
    for name, moment in (("exp_avg", owned.exp_avg), ("exp_avg_sq", owned.exp_avg_sq)):
        detail = f"{key}: {name} is {_describe(moment)}"
        if moment is None or moment.numel() != owned.stop - owned.start:
            yield _Refusal(reason=Reason.MOMENTS_MISSING, detail=detail)
        elif moment.dtype != torch.float32:
            yield _Refusal(reason=Reason.MOMENTS_INVALID, detail=detail)
    if step.step != owned.step:
        detail = f"{key}: step {step.step} was recorded, the optimizer counts {owned.step}"
        yield _Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=detail)
    try:
        adamw.invert(step)
    except NumericsError as error:
        yield _Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=f"{key}: {error}")


def _describe(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.numel()} elements of {tensor.dtype}"


def _doubts_of_unmoved(owned: OwnedSlice) -> Iterator[_Doubt]:
    """No step moved the slice, so its weights are its rounded masters, unless someone replaced them."""
    mismatch = _Refusal(reason=Reason.MASTER_MISMATCH, detail=owned.key)
    mains = torch.split(_present(owned.main).detach(), _EAGER_PIECE)
    weights = torch.split(owned.weight.detach(), _EAGER_PIECE)
    for main, weight in zip(mains, weights, strict=True):
        yield _Doubt(refusal=mismatch, flag=adamw.differs_from_master(main, weight).any())
    if owned.step < 1:
        detail = f"{owned.key}: moments are not zero, but the optimizer counts step {owned.step}"
        uncounted = _Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=detail)
        for moment in (owned.exp_avg, owned.exp_avg_sq):
            if moment is not None:
                yield _Doubt(refusal=uncounted, flag=moment.any())


def _invert(owned: OwnedSlice, step: AdamWStep, how: _Pass, doubts: list[_Doubt]) -> ChangeSet:
    """The changes of one slice; what may be wrong with its tensors is added to `doubts`."""
    inversion = adamw.invert(step)
    coefficients = inversion.coefficients(owned.weight.device)
    state = adamw.State(
        main=_present(owned.main).detach(),
        exp_avg=_present(owned.exp_avg),
        exp_avg_sq=_present(owned.exp_avg_sq),
        weight=owned.weight.detach(),
    )
    index, code = [], []
    for start in range(0, state.weight.numel(), how.piece):
        part = state.part(start, start + how.piece)
        old, differs = how(part, coefficients)
        for marked in torch.split(differs.nonzero().view(-1), _BLOCK):
            before = old.take(marked)
            stated = step_code(before, part.weight.take(marked))
            uncertain = before.isnan().nonzero().view(-1)
            seen = adamw.examine(part.pick(marked.take(uncertain)), zeros_stay=inversion.zeros_stay)
            doubts += _doubts_of_examined(owned.key, seen)
            stated[uncertain] = torch.where(seen.still_zero, 0, UNSTATED).to(torch.int8)
            changed = marked
            if bool(seen.still_zero.any()):
                kept = stated.nonzero().view(-1)
                changed, stated = marked.take(kept), stated.take(kept)
            index.append(changed + (owned.start + start))
            code.append(stated)
    return ChangeSet(key=owned.key, index=torch.cat(index), code=torch.cat(code))


def _doubts_of_examined(key: str, seen: adamw.Examination) -> Iterator[_Doubt]:
    yield _Doubt(refusal=_Refusal(reason=Reason.MASTER_MISMATCH, detail=key), flag=seen.master_mismatch)
    yield _Doubt(refusal=_Refusal(reason=Reason.MOMENTS_INVALID, detail=key), flag=seen.moments_invalid)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise UnsupportedError("a tensor that was there when the slice was examined is gone")
    return tensor


def _pass(device_type: str, *, compiled: bool) -> _Pass:
    function = _compiled_old_weights(device_type) if compiled else None
    if function is None:
        return _Pass(old_weights=adamw.old_weights, piece=_EAGER_PIECE)
    return _Pass(old_weights=function, piece=_COMPILED_PIECE)


@functools.cache
def _compiled_old_weights(device_type: str) -> _OldWeights | None:
    """Compiled once a process; None where that fails."""
    try:
        # Sizes are dynamic, and what changes at every step comes in a tensor: one compilation serves all.
        function = torch.compile(adamw.old_weights, dynamic=True, options=_COMPILE_OPTIONS)
        # Distinct tensors, as later: one that stood for all would be compiled for.
        main, exp_avg, exp_avg_sq = (torch.zeros(_SHORTEST_COMPILED, device=device_type) for _ in range(3))
        function(main, exp_avg, exp_avg_sq, main.to(torch.bfloat16), torch.zeros(9, device=device_type))
    except _COMPILER_FAILURES as error:
        cause = str(error).partition("\n")[0]
        _log.warning("change detection runs uncompiled, several times slower: %s", cause)
        return None
    return function
