"""Owned slices -> the elements that one optimizer step changed. Rank-local, without a snapshot.

A slice is read once, in pieces, by one fused expression that is compiled if that pays. The few elements
whose old weight is not certain are looked at again, exactly. Besides the returned indices and codes, and a
copy of those of one slice while they are joined, extra memory stays below 64 MiB if few elements changed
(20 MiB at 1 %), and below 128 MiB if all did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from awex_delta.detection import adamw
from awex_delta.detection.adamw import AdamWStep
from awex_delta.detection.gates import Refusal, refusals
from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces, take
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.detection.stored import REMAINDER, Storage, kept_in, needless, state_of
from awex_delta.errors import NumericsError, UnsupportedError
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes, joined
from awex_delta.lines.compiling import SHORTEST_COMPILED, WORTH_COMPILING, compiled_or_none
from awex_delta.protocol.verdict import Reason

StepOf = Callable[[OwnedSlice], AdamWStep | Reason | None]
"""Says which step to invert for a slice; None if no step moved it since the commit; or why it is unknown."""

_Codes = Callable[..., torch.Tensor]
"""`adamw.codes`, or what was compiled of it."""

# Elements at a time. Compiled, a piece costs one byte for each element and eight for each that changed;
# eager, some fp32 temporaries. What changed is then handled in blocks, at about sixty bytes for each.
_COMPILED_PIECE = 1 << 21
_EAGER_PIECE = 1 << 18
_BLOCK = 1 << 18

# Otherwise compilers might rearrange `main + (move - error)`, which is the one order of operations that the
# bound needs.
_COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "cpp.enable_unsafe_math_opt_flag": False,
}
# What is sent without need, relative to what changed; and to all elements, where it is little anyway.
_MOST_NEEDLESS, _FEW = 0.2, 0.001
_NO_BASE = frozenset({Reason.MASTER_MISMATCH, Reason.STATE_AWAY, Reason.DETECTION_FAILED})


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
    is_split: bool

    def __call__(self, part: adamw.State, coefficients: torch.Tensor) -> torch.Tensor:
        if part.weight.numel() >= SHORTEST_COMPILED and self.codes is not adamw.codes:
            return self.codes(part.main, part.exp_avg, part.exp_avg_sq, part.weight, coefficients)
        tensors = (part.main, part.exp_avg, part.exp_avg_sq, part.weight, coefficients, part.slack)
        return adamw.codes(*tensors, is_split=self.is_split)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One distinct step, and the slices that it moved, all with their state kept in the same way.

    coefficients: on the device of the slices.
    needless: of moments with a scale: how much of each block was needless, as far as that can be told.
    """

    inversion: adamw.Inversion
    storage: Storage
    coefficients: torch.Tensor
    slices: Sequence[OwnedSlice]
    needless: list[torch.Tensor] = field(default_factory=list)


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
    moved: dict[tuple[AdamWStep, Storage], list[OwnedSlice]] = {}
    unmoved: list[OwnedSlice] = []
    refused: list[Refusal] = []
    num_owned = 0
    for owned in slices:
        numel = owned.stop - owned.start
        if numel:
            num_owned += numel
            planned = step_of(owned)
            refused += refusals(owned, numel, planned)
            storage = kept_in(owned) if isinstance(planned, AdamWStep) else None
            if isinstance(planned, AdamWStep) and storage is not None:
                moved.setdefault((planned, storage), []).append(owned)
            else:
                unmoved.append(owned)
    inversions = [_inversion(*way, some[0].key, refused) for way, some in moved.items()]
    if refused:
        return _refuse(refused, num_owned)

    if compiled is None:
        compiled = num_owned >= WORTH_COMPILING
    with torch.no_grad():
        doubts = list(_doubts_of_unmoved(unmoved))
        steps = list(_steps([one for one in inversions if one is not None], moved))
        changes = _changes(steps, doubts, compiled=compiled)
        refused = _true_of(doubts) or list(_coarse(steps, changes, num_owned))
    if refused:
        return _refuse(refused, num_owned)
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


def _refuse(refusals: list[Refusal], num_owned: int) -> Detection:
    worst = max(refusals, key=lambda refusal: refusal.reason)
    return Detection(reason=worst.reason, detail=worst.detail, num_owned=num_owned)


def _inversion(step: AdamWStep, storage: Storage, key: str, refused: list[Refusal]) -> adamw.Inversion | None:
    """How to invert a step. If that is impossible: None, and one more refusal, which names `key`."""
    try:
        return storage.invert(step)
    except NumericsError as error:
        refused.append(Refusal(reason=Reason.HYPERPARAMETERS_INVALID, detail=f"{key}: {error}"))
        return None


def _doubts_of_unmoved(slices: Sequence[OwnedSlice]) -> Iterator[_Doubt]:
    """No step moved them, so their weights are their rounded masters, unless someone replaced them."""
    scratch = Scratch()
    apart = [owned for owned in slices if owned.main is not None and owned.main.dtype is not REMAINDER]
    for piece in pieces(apart, _EAGER_PIECE):
        main, weight = scratch.tensor(piece, "main"), scratch.tensor(piece, "weight")
        flag = adamw.differs_from_master(main, weight).any()
        yield _Doubt(reason=Reason.MASTER_MISMATCH, piece=piece, flag=flag)
    for name in ("exp_avg", "exp_avg_sq"):
        uncounted = [owned for owned in slices if owned.step < 1 and getattr(owned, name) is not None]
        for piece in pieces(uncounted, _EAGER_PIECE):
            flag = torch.cat([getattr(owned, name).float() for owned in piece.slices]).any()
            yield _Doubt(reason=Reason.HYPERPARAMETERS_INVALID, piece=piece, flag=flag)


def _steps(
    inversions: list[adamw.Inversion], moved: Mapping[tuple[AdamWStep, Storage], Sequence[OwnedSlice]]
) -> Iterator[_Step]:
    """Bring the coefficients of all steps to the device at once."""
    if not inversions:
        return
    device = next(iter(moved.values()))[0].weight.device
    rows = torch.stack([inversion.coefficients(torch.device("cpu")) for inversion in inversions]).to(device)
    for inversion, row, ((_, storage), slices) in zip(inversions, rows, moved.items(), strict=True):
        yield _Step(inversion=inversion, storage=storage, coefficients=row, slices=slices)


def _coarse(steps: Sequence[_Step], changes: Changes, num_owned: int) -> Iterator[Refusal]:
    """That moments with a scale hide so much that a bound is of no use."""
    counts = [count for step in steps for count in step.needless]
    extra = int(torch.stack(counts).sum()) if counts else 0
    if extra > _MOST_NEEDLESS * (changes.num_changed - extra) and extra > _FEW * num_owned:
        step = max((step for step in steps if step.needless), key=lambda step: int(sum(step.needless)))
        kept, key = step.storage, step.slices[0].key
        detail = f"{key}: exp_avg is {kept.exp_avg}, exp_avg_sq is {kept.exp_avg_sq}"
        detail += f": about {extra} of {changes.num_changed} elements would be sent without need"
        yield Refusal(reason=Reason.MOMENTS_COARSE, detail=detail)


def _changes(steps: Iterable[_Step], doubts: list[_Doubt], *, compiled: bool) -> Changes:
    """What the steps changed; what may be wrong with the tensors is added to `doubts`."""
    scratch = Scratch()
    parts: list[tuple[Piece, Changes]] = []
    for step in steps:
        compiles = compiled and not step.storage.is_scaled
        how = _pass(step.coefficients.device.type, compiled=compiles, is_split=step.storage.is_split)
        cut = pieces(step.slices, how.piece)
        parts += [(piece, _invert(piece, step, how, scratch, doubts)) for piece in cut]
    changes = in_order(parts)
    # An element that certainly did not change is rare: a zero that stayed one.
    if changes.code is not None and not bool(changes.code.all()):
        return take(changes, nonzero(changes.code != 0))
    return changes


def _invert(piece: Piece, step: _Step, how: _Pass, scratch: Scratch, doubts: list[_Doubt]) -> Changes:
    """The changes of one piece, with code 0 for an element that certainly did not change after all."""
    state = state_of(piece, scratch, step.storage, step.inversion)
    zeros_stay = step.inversion.zeros_stay and step.storage.is_exact
    codes = how(state, step.coefficients)
    runs = Runs.of(piece.ranges()).to(codes.device)
    blocks = []
    for marked in torch.split(nonzero(codes), _BLOCK):
        code = codes.take(marked)
        unknown = _unknown(code)
        picked = state.pick(marked[unknown])
        seen = adamw.examine(picked, zeros_stay=zeros_stay, is_split=step.storage.is_split)
        if step.storage.is_scaled:
            step.needless.append(needless(picked, step.coefficients))
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


def _true_of(doubts: list[_Doubt]) -> list[Refusal]:
    """The worst of the doubts that are true, if any. Waits for the device once, whatever their number."""
    flags = torch.stack([doubt.flag for doubt in doubts]).tolist() if doubts else []
    true = [doubt for doubt, flag in zip(doubts, flags, strict=True) if flag]
    return [_named(max(true, key=lambda doubt: doubt.reason))] if true else []


def _named(doubt: _Doubt) -> Refusal:
    """Look at the slices of a piece one by one, to name the one that a true doubt is about."""
    owned = next(
        (owned for owned in doubt.piece.slices if _is_wrong(owned, doubt.reason)), doubt.piece.slices[0]
    )
    detail = owned.key
    if doubt.reason is Reason.HYPERPARAMETERS_INVALID:
        detail = f"{detail}: moments are not zero, but the optimizer counts step {owned.step}"
    return Refusal(reason=doubt.reason, detail=detail)


def _is_wrong(owned: OwnedSlice, reason: Reason) -> bool:
    moments = [moment.float() for moment in (owned.exp_avg, owned.exp_avg_sq) if moment is not None]
    if reason is Reason.HYPERPARAMETERS_INVALID:
        return any(bool(moment.any()) for moment in moments)
    if reason is Reason.MASTER_MISMATCH:
        weight = owned.weight.to(torch.bfloat16)
        return owned.main is not None and bool(adamw.differs_from_master(owned.main, weight).any())
    finite = all(bool(torch.isfinite(moment).all()) for moment in moments)
    return not finite or bool((moments[-1] < 0).any())


def _pass(device_type: str, *, compiled: bool, is_split: bool) -> _Pass:
    function = _compiled_codes(device_type, is_split=is_split) if compiled else None
    if function is None:
        return _Pass(codes=adamw.codes, piece=_EAGER_PIECE, is_split=is_split)
    return _Pass(codes=function, piece=_COMPILED_PIECE, is_split=is_split)


@functools.cache
def _compiled_codes(device_type: str, *, is_split: bool) -> _Codes | None:
    """Compiled once in a process; None if that fails."""
    main, exp_avg, exp_avg_sq = (
        torch.zeros(SHORTEST_COMPILED, device=device_type, dtype=torch.float32) for _ in range(3)
    )
    # What changes at every step comes in a tensor, so that one compilation serves all.
    coefficients = torch.zeros(9, device=device_type, dtype=torch.float32)
    return compiled_or_none(
        adamw.codes,
        [(main, exp_avg, exp_avg_sq, main.to(torch.bfloat16), coefficients)],
        what="change detection runs",
        options=_COMPILE_OPTIONS,
        is_split=is_split,
    )
