"""Owned slices -> the elements that one optimizer step changed. Rank-local, without a snapshot.

A slice is read once, in pieces, by one fused expression that is compiled if that pays. The few elements
whose old weight is not certain are looked at again, exactly. Besides the returned indices and codes, and a
copy of those of one slice while they are joined, extra memory stays below 64 MiB if few elements changed
(20 MiB at 1 %), and below 128 MiB if all did.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces, take
from awex_delta.detection.slices import BF16_OR_ROUNDED, Detection, OwnedSlice
from awex_delta.errors import NumericsError, UnsupportedError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes, joined
from awex_delta.protocol.verdict import Reason

StepOf = Callable[[OwnedSlice], AdamWStep | Reason | None]
"""Says which step to invert for a slice; None if no step moved it since the commit; or why it is unknown."""

_Codes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Elements at a time. Compiled, a piece costs one byte for each element and eight for each that changed;
# eager, some fp32 temporaries. What changed is then handled in blocks, at about sixty bytes for each.
_COMPILED_PIECE = 1 << 21
_EAGER_PIECE = 1 << 18
_BLOCK = 1 << 18
# Compiling takes seconds, once in a process: fewer owned elements than this never earn them back.
_WORTH_COMPILING = 1 << 24
# Shorter pieces gain nothing, and torch would compile again for sizes 0 and 1.
_SHORTEST_COMPILED = 1 << 12

# Otherwise compilers might rearrange `main + (move - error)`, which is the one order of operations that the
# bound needs.
_COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "cpp.enable_unsafe_math_opt_flag": False,
}
_NO_BASE = frozenset({Reason.MASTER_MISMATCH, Reason.STATE_AWAY, Reason.DETECTION_FAILED})
_COMPILER_FAILURES = (RuntimeError, OSError, ImportError, subprocess.SubprocessError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why one slice cannot be inverted."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """A reason that some slice of a piece gives if `flag`, a bool scalar still on the device, is true."""

    reason: Reason
    piece: Piece
    flag: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """How to find codes, and on how many elements at a time."""

    codes: _Codes
    piece: int

    def __call__(self, part: adamw.State, coefficients: torch.Tensor) -> torch.Tensor:
        function = self.codes if part.weight.numel() >= _SHORTEST_COMPILED else adamw.codes
        return function(part.main, part.exp_avg, part.exp_avg_sq, part.weight, coefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One distinct step, and the slices that it moved. coefficients: on the device of the slices."""

    inversion: adamw.Inversion
    coefficients: torch.Tensor
    slices: Sequence[OwnedSlice]


def detect_changes(
    slices: Iterable[OwnedSlice], step_of: StepOf, *, compiled: bool | None = None
) -> Detection:
    """Find a certified superset of the bf16 weights that changed since the last commit.

    Args:
        slices: the owned ranges with their live optimizer state, in the order of the trainer's line. Read
            only; nothing is kept.
        step_of: asked once for each slice.
        compiled: True compiles (falling back to eager if no compiler works), False does not, None
            decides by the number of elements. The answer is certified either way.

    Returns:
        The changes in the trainer's line, with codes and values; or, when any slice cannot be inverted, the
        worst reason with the parameter that gave it, and no changes.

    Raises:
        UnsupportedError: a weight is not bf16, or a tensor does not have the length of its slice.
    """
    moved: dict[AdamWStep, list[OwnedSlice]] = {}
    unmoved: list[OwnedSlice] = []
    refusals: list[_Refusal] = []
    num_owned = 0
    for owned in slices:
        numel = owned.stop - owned.start
        if numel:
            num_owned += numel
            planned = step_of(owned)
            refusals += _refusals(owned, numel, planned)
            same = moved.setdefault(planned, []) if isinstance(planned, AdamWStep) else unmoved
            same.append(owned)
    inversions = [_inversion(step, some[0].key, refusals) for step, some in moved.items()]
    if refusals:
        return _refuse(refusals, num_owned)

    if compiled is None:
        compiled = num_owned >= _WORTH_COMPILING
    with torch.no_grad():
        doubts = list(_doubts_of_unmoved(unmoved))
        steps = _steps([one for one in inversions if one is not None], list(moved.values()))
        changes = _changes(steps, doubts, compiled=compiled)
        refusals = _true_of(doubts)
    if refusals:
        return _refuse(refusals, num_owned)
    return Detection(changes=changes, num_owned=num_owned)


def detect_or_doubt(slices: Sequence[OwnedSlice], step_of: StepOf) -> Detection:
    """As `detect_changes`, but an error becomes a doubt: training goes on, and the next update is full."""
    try:
        return detect_changes(slices, step_of)
    except (UnsupportedError, RuntimeError, MemoryError) as error:
        return failed(error)


def base_doubt(slices: Sequence[OwnedSlice]) -> Detection | None:
    """Why weights that are committed now may not be their rounded masters; None if they certainly are.

    The next step writes its masters over weights that were not theirs, and inverting it would lead back to
    the masters, not to what the engines hold.
    """
    base = detect_or_doubt(slices, lambda _: None)
    return base if base.reason in _NO_BASE else None


def failed(error: Exception) -> Detection:
    """The detection of a rank on which detecting raised `error`."""
    return Detection(reason=Reason.DETECTION_FAILED, detail=f"{type(error).__name__}: {error}")


def _refuse(refusals: list[_Refusal], num_owned: int) -> Detection:
    worst = max(refusals, key=lambda refusal: refusal.reason)
    return Detection(reason=worst.reason, detail=worst.detail, num_owned=num_owned)


def _refusals(owned: OwnedSlice, numel: int, planned: AdamWStep | Reason | None) -> Iterator[_Refusal]:
    """Why a slice cannot be inverted, as far as that shows without reading its tensors."""
    main, weight = owned.main, owned.weight
    away = owned.unreadable("weight")
    if away:
        raise UnsupportedError(away)
    if weight.dtype not in BF16_OR_ROUNDED or weight.numel() != numel:
        raise UnsupportedError(f"{owned.key}: detection needs {numel} bf16 weights, not {_describe(weight)}")
    if main is not None and main.numel() != numel:
        raise UnsupportedError(f"{owned.key}: the master of {numel} weights is {_describe(main)}")
    if main is None or main.dtype is not torch.float32:
        yield _Refusal(reason=Reason.NO_FP32_MASTER, detail=f"{owned.key}: master is {_describe(main)}")
    elif away := owned.unreadable("main"):
        yield _Refusal(reason=Reason.STATE_AWAY, detail=away)
    if planned is None:
        # Before the first counted step the moments are looked at, too: they have to be zero.
        if owned.step < 1 and (away := owned.unreadable("exp_avg", "exp_avg_sq")):
            yield _Refusal(reason=Reason.STATE_AWAY, detail=away)
        return
    if isinstance(planned, Reason):
        yield _Refusal(reason=planned, detail=owned.key)
        return
    for name, moment in (("exp_avg", owned.exp_avg), ("exp_avg_sq", owned.exp_avg_sq)):
        if moment is None or moment.numel() != numel:
            detail = f"{owned.key}: {name} is {_describe(moment)}"
            yield _Refusal(reason=Reason.MOMENTS_MISSING, detail=detail)
        elif moment.dtype is not torch.float32:
            detail = f"{owned.key}: {name} is {_describe(moment)}"
            yield _Refusal(reason=Reason.MOMENTS_INVALID, detail=detail)
    if away := owned.unreadable("exp_avg", "exp_avg_sq"):
        yield _Refusal(reason=Reason.STATE_AWAY, detail=away)
    if planned.step != owned.step:
        detail = f"{owned.key}: step {planned.step} was recorded, the optimizer counts {owned.step}"
        yield _Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=detail)


def _inversion(step: AdamWStep, key: str, refusals: list[_Refusal]) -> adamw.Inversion | None:
    """How to invert a step. If that is impossible: None, and one more refusal, which names `key`."""
    try:
        return adamw.invert(step)
    except NumericsError as error:
        refusals.append(_Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=f"{key}: {error}"))
        return None


def _describe(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.numel()} elements of {tensor.dtype}"


def _doubts_of_unmoved(slices: Sequence[OwnedSlice]) -> Iterator[_Doubt]:
    """No step moved them, so their weights are their rounded masters, unless someone replaced them."""
    scratch = Scratch()
    for piece in pieces(slices, _EAGER_PIECE):
        main, weight = scratch.tensor(piece, "main"), scratch.tensor(piece, "weight")
        flag = adamw.differs_from_master(main, weight).any()
        yield _Doubt(reason=Reason.MASTER_MISMATCH, piece=piece, flag=flag)
    for name in ("exp_avg", "exp_avg_sq"):
        uncounted = [owned for owned in slices if owned.step < 1 and getattr(owned, name) is not None]
        for piece in pieces(uncounted, _EAGER_PIECE):
            flag = torch.cat([getattr(owned, name) for owned in piece.slices]).any()
            yield _Doubt(reason=Reason.HYPERPARAMETERS_INVALID, piece=piece, flag=flag)


def _steps(inversions: list[adamw.Inversion], slices: list[list[OwnedSlice]]) -> Iterator[_Step]:
    """Bring the coefficients of all steps to the device at once."""
    if not inversions:
        return
    device = slices[0][0].weight.device
    rows = torch.stack([inversion.coefficients(torch.device("cpu")) for inversion in inversions]).to(device)
    for inversion, row, moved in zip(inversions, rows, slices, strict=True):
        yield _Step(inversion=inversion, coefficients=row, slices=moved)


def _changes(steps: Iterable[_Step], doubts: list[_Doubt], *, compiled: bool) -> Changes:
    """What the steps changed; what may be wrong with the tensors is added to `doubts`."""
    scratch = Scratch()
    parts: list[tuple[Piece, Changes]] = []
    for step in steps:
        how = _pass(step.coefficients.device.type, compiled=compiled)
        cut = pieces(step.slices, how.piece)
        parts += [(piece, _invert(piece, step, how, scratch, doubts)) for piece in cut]
    changes = in_order(parts)
    # An element that certainly did not change is rare: a zero that stayed one.
    if changes.code is not None and not bool(changes.code.all()):
        return take(changes, nonzero(changes.code != 0))
    return changes


def _invert(piece: Piece, step: _Step, how: _Pass, scratch: Scratch, doubts: list[_Doubt]) -> Changes:
    """The changes of one piece, with code 0 for an element that certainly did not change after all."""
    state = adamw.State(
        main=scratch.tensor(piece, "main"),
        exp_avg=scratch.tensor(piece, "exp_avg"),
        exp_avg_sq=scratch.tensor(piece, "exp_avg_sq"),
        weight=scratch.tensor(piece, "weight"),
    )
    codes = how(state, step.coefficients)
    runs = Runs.of(piece.ranges()).to(codes.device)
    blocks = []
    for marked in torch.split(nonzero(codes), _BLOCK):
        code = codes.take(marked)
        unknown = _unknown(code)
        seen = adamw.examine(state.pick(marked[unknown]), zeros_stay=step.inversion.zeros_stay)
        code[unknown] = code[unknown].masked_fill(seen.still_zero, 0)
        doubts += [
            _Doubt(reason=Reason.MASTER_MISMATCH, piece=piece, flag=seen.master_mismatch),
            _Doubt(reason=Reason.MOMENTS_INVALID, piece=piece, flag=seen.moments_invalid),
        ]
        blocks.append(Changes(pos=runs.in_line(marked), code=code, value=state.weight.take(marked)))
    return joined(blocks)


def _unknown(code: torch.Tensor) -> torch.Tensor | slice:
    """An index of codes that state nothing. On a device it is all, which is quicker than waiting."""
    return nonzero(code == UNSTATED) if code.device.type == "cpu" else slice(None)


def _true_of(doubts: list[_Doubt]) -> list[_Refusal]:
    """The worst of the doubts that are true, if any. Waits for the device once, whatever their number."""
    flags = torch.stack([doubt.flag for doubt in doubts]).tolist() if doubts else []
    true = [doubt for doubt, flag in zip(doubts, flags, strict=True) if flag]
    return [_named(max(true, key=lambda doubt: doubt.reason))] if true else []


def _named(doubt: _Doubt) -> _Refusal:
    """Look at the slices of a piece one by one, to name the one that a true doubt is about."""
    owned = next(
        (owned for owned in doubt.piece.slices if _is_wrong(owned, doubt.reason)), doubt.piece.slices[0]
    )
    detail = owned.key
    if doubt.reason is Reason.HYPERPARAMETERS_INVALID:
        detail = f"{detail}: moments are not zero, but the optimizer counts step {owned.step}"
    return _Refusal(reason=doubt.reason, detail=detail)


def _is_wrong(owned: OwnedSlice, reason: Reason) -> bool:
    moments = [moment for moment in (owned.exp_avg, owned.exp_avg_sq) if moment is not None]
    if reason is Reason.HYPERPARAMETERS_INVALID:
        return any(bool(moment.any()) for moment in moments)
    if reason is Reason.MASTER_MISMATCH:
        weight = owned.weight.to(torch.bfloat16)
        return owned.main is not None and bool(adamw.differs_from_master(owned.main, weight).any())
    finite = all(bool(torch.isfinite(moment).all()) for moment in moments)
    return not finite or bool((moments[-1] < 0).any())


def _pass(device_type: str, *, compiled: bool) -> _Pass:
    function = _compiled_codes(device_type) if compiled else None
    if function is None:
        return _Pass(codes=adamw.codes, piece=_EAGER_PIECE)
    return _Pass(codes=function, piece=_COMPILED_PIECE)


@functools.cache
def _compiled_codes(device_type: str) -> _Codes | None:
    """Compiled once in a process; None if that fails."""
    try:
        # Sizes are dynamic, and what changes at every step comes in a tensor: one compilation serves all.
        function = torch.compile(adamw.codes, dynamic=True, options=_COMPILE_OPTIONS)
        # Distinct tensors, as later: if one stood for all, torch would compile for just that.
        main, exp_avg, exp_avg_sq = (
            torch.zeros(_SHORTEST_COMPILED, device=device_type, dtype=torch.float32) for _ in range(3)
        )
        function(
            main,
            exp_avg,
            exp_avg_sq,
            main.to(torch.bfloat16),
            torch.zeros(9, device=device_type, dtype=torch.float32),
        )
    except _COMPILER_FAILURES as error:
        cause = str(error).partition("\n")[0]
        _log.warning("change detection runs uncompiled, several times slower: %s", cause)
        return None
    return function
