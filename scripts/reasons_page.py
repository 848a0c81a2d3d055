"""docs/en/reasons.md: every reason for a full sync and every exception, with what to do about it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from awex_delta import errors
from awex_delta.protocol.verdict import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the code cannot say by itself: how it comes about, and what a person does."""

    cause: str
    remedy: str


REASONS: Mapping[Reason, Advice] = {
    Reason.NONE: Advice(
        cause="Every trainer rank is sure of what changed, and every engine holds the base version.",
        remedy="Nothing.",
    ),
    Reason.TOO_DENSE: Advice(
        cause="Of the bf16 elements so many changed that positions and values take more bytes than all "
        "weights (a third of them with `indices`): a high learning rate, or the first steps of Adam.",
        remedy="Nothing. Where it repeats, a smaller encoding (`ulp_zstd`), or no deltas at this rate.",
    ),
    Reason.ANCHOR_DUE: Advice(
        cause="`weight_update_anchor_interval` deltas were committed since the last full sync.",
        remedy="Nothing. A larger interval makes anchors rarer, 0 switches them off.",
    ),
    Reason.VERSION_GAP: Advice(
        cause="`update_weights(version)` was called with something else than the last committed version + 1.",
        remedy="Count versions up by one. After a jump that is meant (a checkpoint was loaded) do nothing.",
    ),
    Reason.STEP_GAP: Advice(
        cause="Two or more optimizer steps ran since the last commit; the step counter was reset, went "
        "back, or "
        "stood still although a hook saw a step; an optimizer state was loaded; or `weights_replaced()` was "
        "called.",
        remedy="Update after each step, or set `weight_update_delta_accumulate: true`. After a load or a "
        "reset "
        "do nothing, but see [the limits](limits.md) where it repeats at every update. A counter that is "
        "reset "
        "before each step makes every update full: reset the moments alone, or set "
        "`weight_update_delta_method: snapshot`.",
    ),
    Reason.LOSSY_RECORD: Advice(
        cause="A hook changed hyper-parameters between the beginning of a step and its end. Or `step()` ran "
        "several times with different ones, and an overflow skipped some of the calls. Or a capturable "
        "optimizer of Transformer Engine or Apex got a `grad_scaler`: its counter shows an overflow one step "
        "late.",
        remedy="Change hyper-parameters between steps, or in hooks registered before the trainer is "
        "attached. "
        "Update after each call of `step()`, skipped ones included. Unscale gradients before the step.",
    ),
    Reason.NO_STEP_RECORD: Advice(
        cause="The step counter moved by one, but no hook saw the step: it was replayed in a CUDA graph, or "
        "the hooks were removed.",
        remedy="Capture graphs without the optimizer; do not call `detach()` while updates go on.",
    ),
    Reason.STATE_REPLACED: Advice(
        cause="Something else than a recorded step wrote to a master, or to moments after their step: a "
        "parameter state was loaded, averaged weights were swapped in, another optimizer steps the same "
        "masters. Or a few masters were moved or replaced, none of which is in the sample that shows whether "
        "they are the same.",
        remedy="Nothing if it was meant: what is in the optimizer now is followed, and the next update is a "
        "delta. Attach again if the optimizer was replaced. If masters are written between all updates, set "
        "`weight_update_delta_method: capture`.",
    ),
    Reason.STEP_DISPROVED: Advice(
        cause="Some elements of the masters are kept at each commit, and the recorded step does not lead "
        "from them to what is there now. Masters were replaced without a trace (`reload_model_params()` with "
        "other weights, writes to `.data`), `step()` itself used other hyper-parameters than its groups say, "
        "or its kernel computes something else than AdamW.",
        remedy="Nothing if weights were replaced. If it comes with every update, set "
        "`weight_update_delta_method: capture`, and report the optimizer.",
    ),
    Reason.UNSEEN_CHANGE: Advice(
        cause="With the method `capture`: something else than a captured step wrote to the weights, such as "
        "a step without hooks (a replayed CUDA graph), a checkpoint, or a framework that rounds in its own "
        "way. The detail names a parameter, or one of several small ones that are looked at together.",
        remedy="Nothing after a load. If it repeats at every update, let the optimizer call its step hooks, "
        "or set `weight_update_delta_method: snapshot`.",
    ),
    Reason.MOMENTS_COARSE: Advice(
        cause="Moments are kept in fp16 or fp8, and gradients inside of a tensor differ so widely that some "
        "20 % of the changes or more would be sent without need. The detail says how many.",
        remedy="Set `weight_update_delta_method: capture`, which looks at no moments, or keep them in bf16.",
    ),
    Reason.NOT_ADAMW: Advice(
        cause="The optimizer class is not one of torch's, Transformer Engine's or Apex's AdamW, or a group "
        "of it uses L2 decay, amsgrad or no bias correction. Also CPU-offloading wrappers.",
        remedy="Train with decoupled AdamW, or set `weight_update_delta_method: capture`.",
    ),
    Reason.MOMENTS_MISSING: Advice(
        cause="A step was counted, but `exp_avg` or `exp_avg_sq` of a parameter is not there, or has another "
        "length: a checkpoint was loaded without optimizer state.",
        remedy="Load the optimizer state too. Otherwise it passes with the next step and update.",
    ),
    Reason.MOMENTS_INVALID: Advice(
        cause="A moment holds NaN, an infinity or a negative square, or is kept in 8 bits other than E4M3, "
        "or in fp16 or fp8 without a scale.",
        remedy="Keep moments as Transformer Engine does, or set `weight_update_delta_method: capture`. With "
        "the dtypes that are served, the training itself has diverged.",
    ),
    Reason.NO_FP32_MASTER: Advice(
        cause="A bf16 parameter is stepped without an fp32 master (a pure bf16 optimizer, the "
        "precision-aware optimizer with fp16 masters), or an fp32 parameter is trained under "
        "`overlap_param_gather` on several ranks.",
        remedy="Keep fp32 main parameters, or set `weight_update_delta_method: capture`; without overlap for "
        "models with fp32 parameters.",
    ),
    Reason.MASTER_MISMATCH: Advice(
        cause="A model weight has other bits than its master rounded to bf16: it was loaded, swapped or "
        "edited behind the optimizer.",
        remedy="Load weights through the optimizer as well (`reload_model_params`), and say so with "
        "`weights_replaced()`.",
    ),
    Reason.HYPERPARAMETERS_INVALID: Advice(
        cause="The recorded step cannot be undone: lr times weight decay is 1 or more, a value is not "
        "finite, or the recorded step, the moments and the optimizer's counter contradict each other.",
        remedy="Look at the detail in the verdict: it names the parameter and the value.",
    ),
    Reason.STATE_AWAY: Advice(
        cause="An fp32 master or a moment has a storage of size zero, or lies on another device than its "
        "weight: optimizer state is offloaded between steps, and was away in this update, or in the last.",
        remedy="Bring the state back before the update; then the next one, or the one after it, is a delta "
        "again. With `weight_update_delta_method: snapshot` the state is not looked at.",
    ),
    Reason.DETECTION_FAILED: Advice(
        cause="Detection raised an exception on a trainer rank; the verdict's detail carries it.",
        remedy="Report it: the update is exact all the same, but this is an error in the adapter.",
    ),
    Reason.ENGINE_STALE: Advice(
        cause="An engine rank holds no version, another version, or a version of another run: it was started "
        "again, or `invalidate()` was called after its weights were lost (sleep, reload).",
        remedy="Nothing.",
    ),
    Reason.ENGINE_DIRTY: Advice(
        cause="Writes of a failed update reached an engine rank, and no commit followed; or publishing a "
        "committed version failed there.",
        remedy="Nothing; do not serve from a receiver whose `ready` is False.",
    ),
    Reason.ENGINE_MOVED: Advice(
        cause="The parameters of an engine were moved, reloaded, replaced, cast and cast back, or tied in "
        "another way since its last update, so they may hold anything. The detail names them.",
        remedy="Nothing: they were bound anew. If it repeats, see what moves the model between updates.",
    ),
    Reason.PREVIOUS_ABORTED: Advice(
        cause="The update before raised an exception on a trainer rank, or was committed on some only.",
        remedy="Nothing. The exception of that update says what went wrong.",
    ),
    Reason.FIRST_SYNC: Advice(
        cause="This trainer has committed nothing yet: it was just started or restarted.",
        remedy="Nothing.",
    ),
    Reason.DELTA_DISABLED: Advice(
        cause="`enable_delta_weight_update` is off.",
        remedy="Switch it on, on the trainer's side.",
    ),
}

EXCEPTIONS: Mapping[type[errors.AwexDeltaError], Advice] = {
    errors.AwexDeltaError: Advice(
        cause="Never raised itself: catch it to catch all of them.", remedy="See below."
    ),
    errors.ConfigError: Advice(
        cause="Raised by `resolve`, `Rendezvous`, `Sender`, `Receiver` and the demo before anything opens.",
        remedy="The message names the setting, its value and the remedy.",
    ),
    errors.ConnectError: Advice(
        cause="In `connect` or the connecting part of an update: a rank did not arrive, sits on a wrong "
        "seat, is set differently, or its description failed.",
        remedy="Start the missing rank, or correct the named setting; then call again.",
    ),
    errors.LayoutError: Advice(
        cause="As `ConnectError`, or while an engine adapter is built.",
        remedy="Load the engine with the model and dtype of the trainer, unquantised.",
    ),
    errors.OwnershipError: Advice(
        cause="As `ConnectError`: the ranges that trainer ranks say they own do not tile the named "
        "parameter.",
        remedy="Report it with the message: the adapter misreads this optimizer's layout.",
    ),
    errors.UnsupportedError: Advice(
        cause="While a trainer is attached: an optimizer or model class, or an attribute of it, is not "
        "known.",
        remedy="Use a class or release that the message names.",
    ),
    errors.DiskError: Advice(
        cause="A file system or an object store refused a call of a folder, `pull` or `inspect`. In an "
        "update it becomes the `UpdateAborted` or `ChainError` of all ranks.",
        remedy="The message names the path, what could not be done with it, and the remedy.",
    ),
    errors.NumericsError: Advice(
        cause="By `numerics` for a step that cannot be inverted. In an update it becomes the reason "
        "`HYPERPARAMETERS_INVALID`.",
        remedy="As there.",
    ),
    errors.WireError: Advice(
        cause="Never raised itself. On an engine rank it becomes the `UpdateAborted` of all ranks.",
        remedy="See below.",
    ),
    errors.CorruptFrameError: Advice(
        cause="A frame's checksum, length or positions are wrong.",
        remedy="Call again. If it repeats, memory or network damage data.",
    ),
    errors.StaleFrameError: Advice(
        cause="A frame's header names another run, version, plan, codec or pair of ranks.",
        remedy="Call again. If it repeats, report it with the message.",
    ),
    errors.FrameOrderError: Advice(
        cause="Never raised itself: one of the two below.",
        remedy="As below.",
    ),
    errors.RepeatedFrameError: Advice(
        cause="A frame that came already came again.",
        remedy="Call again. If it repeats, report it with the message.",
    ),
    errors.MissingFrameError: Advice(
        cause="A frame came before another that belongs in front of it, or the last ones never came.",
        remedy="Call again. If it repeats, report it with the message.",
    ),
    errors.UpdateError: Advice(
        cause="As itself by a rank whose own code raised something that it could not tell the others, "
        "who then get a `PeerError`; and by an engine rank that could not publish. Its `__cause__` is "
        "what was raised. Catch it around `update_weights`.",
        remedy="Call `update_weights` again on all ranks, with the same version or a later one.",
    ),
    errors.DriftError: Advice(
        cause="The bits that a frame would replace are not those that the trainer says were there: something "
        "wrote to an engine's live weights since its last commit, memory decayed, or the trainer did not "
        "step "
        "as it recorded. It becomes the `UpdateAborted` of all ranks.",
        remedy="The next update is full and repairs it. If it repeats on one engine, see what else writes "
        "its "
        "weights, and test the memory of its machine. If it repeats on all of them, look at the optimizer: "
        "set "
        "`weight_update_delta_method: snapshot`.",
    ),
    errors.UpdateAborted: Advice(
        cause="On every rank alike: the message names the phase, the ranks that failed and their errors.",
        remedy="Repair the cause, then as `UpdateError`.",
    ),
    errors.WeightsAwayError: Advice(
        cause="Before an update a rank looked at its live weights and found a storage of size zero, another "
        "shape, dtype or device, or another parameter than the optimizer steps. Nothing was read or sent; "
        "engines serve on.",
        remedy="Bring offloaded weights back, then update again: it is a delta if it would have been one. "
        "After replacing parameters make optimizer and view anew.",
    ),
    errors.VerificationError: Advice(
        cause="On every rank alike, after the writes of an update: the message names the engine ranks, the "
        "tensors and which part of them. A write went astray or was dropped, memory decayed, another "
        "hand wrote to the weights, or a delta left out what had changed; see [verification](verify.md).",
        remedy="As `UpdateError`: the next update repairs it. If it repeats, as `DriftError`.",
    ),
    errors.LockstepError: Advice(
        cause="On every rank alike: the caller asked for different versions, trainer ranks belong to "
        "different runs, or ranks planned or announced what does not fit.",
        remedy="Make all ranks call with the same version; restart a trainer as a whole.",
    ),
    errors.PeerError: Advice(
        cause="A wait ended: the message names the phase and the ranks that did not reach it.",
        remedy="Start the lost rank again, then as `UpdateError`: all ranks meet in a new group.",
    ),
    errors.ChainError: Advice(
        cause="By a reader of a folder (`weight_update_transport: disk`): the version is not there, or a "
        "link to it is missing, damaged or of another run.",
        remedy="Wait for the next anchor and call again; `awex-delta inspect` shows the chain.",
    ),
}

_INTRODUCTION = """\
# Reasons and exceptions

Generated by `make docs` from `awex_delta/protocol/verdict.py`, `awex_delta/errors.py` and
`scripts/reasons_page.py`; edit those instead of this page.

## Reasons

Every update has a verdict (`UpdateStats.verdict`, the same on all ranks): `delta`, or `full` with one of
these reasons, the transfer ranks that gave it (engines count from 0, trainers after them) and a detail. Where
ranks give different reasons the largest number wins. A full sync is never an error: the engines end with the
same bits either way.
"""

_EXCEPTIONS = """\
## Exceptions

All derive from `AwexDeltaError`. What an update raises leaves versions where they stood;
[the protocol](protocol.md) says what each failure leaves behind. Whatever one rank's own work raises inside a
phase arrives on all ranks as `UpdateAborted`.
"""


def page() -> str:
    """The whole page as Markdown."""
    reasons = [
        f"| {reason.value} | `{reason.name}` | {reason.text} | {advice.cause} | {advice.remedy} |"
        for reason, advice in REASONS.items()
    ]
    exceptions = [
        f"| `{error.__name__}` | {_bases(error)} | {_first_line(error)} | {advice.cause} | {advice.remedy} |"
        for error, advice in EXCEPTIONS.items()
    ]
    return "\n".join(
        [
            _INTRODUCTION,
            "| number | reason | text in the verdict | cause | what to do |",
            "|---|---|---|---|---|",
            *reasons,
            "",
            _EXCEPTIONS,
            "| exception | is a | meaning | when | what to do |",
            "|---|---|---|---|---|",
            *exceptions,
            "",
        ]
    )


def _bases(error: type[Exception]) -> str:
    return ", ".join(f"`{base.__name__}`" for base in error.__bases__)


def _first_line(error: type[Exception]) -> str:
    return (inspect.getdoc(error) or "").partition("\n")[0]
