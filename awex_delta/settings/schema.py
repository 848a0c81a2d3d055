"""The settings that a user writes: names, types, defaults and documentation.

`resolve` says what they mean together.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from awex_delta.errors import ConfigError
from awex_delta.settings.arguments import require

WorldSizePolicy = Literal["power_of_two", "any"]
NotFinite = Literal["warn", "refuse"]
DeltaVerify = Literal["off", "touched", "full"]
DeltaMethod = Literal["adamw", "capture", "snapshot"]
Transport = Literal["p2p", "disk"]
DiskKind = Literal["delta", "full"]
DeltaEncoding = Literal["indices", "gaps", "ulp", "ulp_zstd", "ulp_context", "auto"]

SECRET_SOURCE = r"^(file:.+|env:[A-Za-z_][A-Za-z0-9_]*)?$"  # noqa: S105 - a pattern, no secret
"""Where a secret may be. What has another form may be the secret itself, and is never shown."""

# Of a refused value: YAML makes one of a hundred bytes that takes days to write out.
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = 3
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 1000

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class SchedulingStrategy(BaseModel):
    """Where the engine's processes run."""

    model_config = _STRICT

    type: Literal["separation", "colocation"] = "separation"
    """`separation`: on devices of their own. `colocation`: on the devices of `target`."""

    target: str | None = None
    """Which role to share devices with, for `colocation`."""


class Section(BaseModel):
    """One section of a configuration. Built by keyword or by `load`, it refuses with a `ConfigError`.

    Programs derive their own sections from it, and then refuse in the same words as the package.
    """

    model_config = _STRICT

    if not TYPE_CHECKING:  # type checkers keep the signature that pydantic derives from the fields

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise ConfigError(_explain(type(self), error)) from None

    @classmethod
    def load(cls, data: Mapping[str, object]) -> Self:
        """Build from plain data, such as one section of a YAML file; a setting left out takes its default.

        Raises ConfigError if `data` is no mapping, or a setting is unknown, missing, or has a wrong value.
        """
        require(Mapping, f"the settings of {cls.__name__} by name", data=data)
        values: dict[str, Any] = {str(key): value for key, value in data.items()}
        return cls(**values)


class _SideConfig(Section):
    """What the two sides have in common."""

    backend: str = Field(examples=["megatron:d2p1t4 (trainer)", "sglang:d2t4 (engines)"])
    """Allocation string: which backend runs on how many ranks, such as `megatron:d2p1t4`, `fsdp:d8`
    or `torch:d1` on the trainer's side and `sglang:d2t4p1` or `vllm:d1t2` on the engines'."""

    version: str = "v2"
    """Generation of the weight-update control plane; `_version` is read as the same setting.
    Deltas need `v2`."""

    if not TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None:
            super().__init__(**_without_version_alias(data))


class TrainEngineConfig(_SideConfig):
    """The trainer's side. With `enable_delta_weight_update` off, the other settings change nothing, but for
    `weight_update_secret_source`."""

    weight_update_mode: str = "awex"
    """How weights travel to the engines: `awex`, `disk`, `nccl`, `xccl`, or what else the trainer
    knows. Deltas need `awex`."""

    enable_delta_weight_update: bool = False
    """Send only the elements that the optimizer step changed. Off: every update is a full one,
    exactly as AWEX does it."""

    weight_update_delta_method: DeltaMethod = "adamw"
    """How changes are found. `adamw`: by inverting the optimizer's AdamW step, which keeps no copy.
    `capture`: by comparing old and new weights inside each optimizer step, for any optimizer that
    calls its step hooks and any number of steps between two updates; exact, and kept until the update.
    `snapshot`: by comparing with a copy of the weights, for any optimizer and any number of steps
    between two updates; 2 bytes of memory for each element whose optimizer state a rank holds."""

    weight_update_anchor_interval: int = Field(default=20, ge=0)
    """Committed deltas between two full syncs (anchors). 20: after 20 deltas the next update is full.
    1: every second update is full. 0: never, beyond the first sync and any doubt."""

    weight_update_delta_encoding: DeltaEncoding = "indices"
    """How a delta is packed; the bytes are those of a changed element in a typical step.
    `indices`: a flat position and the new value, 6 bytes. `gaps`: the distance to the previous change
    and the new value, 3 bytes. `ulp`: the distance and how far the value moved, 1.6 bytes. `ulp_zstd`:
    the same, compressed, 1.0 to 1.2 bytes. `ulp_context`: compressed with what both sides know of the
    weights, 0.7 to 0.9 bytes; needs the extra `context` on both sides. `auto`: whichever
    takes the least time at the measured speed of the link, `ulp_context` only if all ranks have its extra.
    See docs/en/wire.md."""

    weight_update_bucket_bytes: int = Field(default=64 << 20, ge=1 << 10, le=1 << 30)
    """The most bytes of one message of a delta; what is longer is cut. While one is sent the next is
    packed, and a rank needs twice this beside the delta itself. See docs/en/limits.md."""

    weight_update_delta_accumulate: bool = False
    """Follow every optimizer step, so that a delta covers any number of them between two updates
    (`ppo_n_minibatches` above 1). It takes one byte of memory for each element whose optimizer state a
    rank holds, and one pass of detection a step in place of one an update."""

    weight_update_verify: DeltaVerify = "touched"
    """What is compared before an update commits, by 64-bit digests of the trainer's weights and of the
    engines' live ones, read back after writing. `touched`: in a delta the elements that it wrote, in a full
    sync all. `full`: all elements, in every update. `off`: nothing. See docs/en/verify.md."""

    weight_update_verify_interval: int = Field(default=0, ge=0)
    """With `touched`: a delta whose version this number divides compares all elements, as `full` does.
    0: none does."""

    world_size_policy: WorldSizePolicy = "power_of_two"
    """`power_of_two`: trainer and engine ranks together must be a power of two, which the transfer
    schedule fits exactly. `any`: pad the schedule instead; some ranks then idle in some rounds."""

    weight_update_timeout_seconds: float = Field(default=300.0, gt=0, le=1e6, allow_inf_nan=False)
    """Longest wait for a peer inside one update, in seconds."""

    weight_update_connect_timeout_seconds: float = Field(default=300.0, gt=0, le=1e6, allow_inf_nan=False)
    """Longest wait for all ranks to meet when connecting, in seconds."""

    weight_update_release_grad_buffers: bool = False
    """Free Megatron's gradient buffers for the transfer; they are restored whatever happens."""

    weight_update_secret_source: str = Field(
        default="", pattern=SECRET_SOURCE, examples=["file:PATH", "env:NAME"]
    )
    """Where each rank finds the secret that all ranks of a pairing share: `file:PATH`, a file that only its
    owner can read, or `env:NAME`, a variable of each rank's environment. Each rank proves to every other that
    it holds the secret, and what they tell each other is sealed with it. Empty: whoever reaches the store can
    take a seat. It counts with `enable_delta_weight_update` off, too. See docs/en/security.md."""

    weight_update_not_finite: NotFinite = "warn"
    """What is done about weights that are NaN or infinite. `warn`: they are sent, counted, and told of once.
    `refuse`: the update fails on all ranks before any engine is written. A delta looks at what changed and at
    what travels whole, a full sync at everything that it sends."""

    weight_update_transport: Transport = "p2p"
    """How updates reach the engines. `p2p`: from rank to rank, all of them at once. `disk`: through a
    folder that both sides reach, each at its own pace. See docs/en/disk.md."""

    weight_update_disk_url: str = Field(default="", examples=["/shared/run", "s3://bucket/run"])
    """The folder of `weight_update_transport: disk`: a local or shared path, or any URL that fsspec
    knows, such as `s3://bucket/run`."""

    weight_update_disk_kind: DiskKind = "delta"
    """What the folder holds. `delta`: a whole checkpoint now and then (an anchor), and changes between.
    `full`: a whole checkpoint at every version, for engines that can only load one from disk."""

    weight_update_keep_anchors: int = Field(default=2, ge=1)
    """Whole checkpoints that stay in the folder, with every delta since the oldest of them. Older versions
    are removed once no engine reads them."""

    weight_update_read_workers: int = Field(default=4, ge=1, le=256)
    """Parts of files that one engine rank reads from the folder at once."""

    use_lora: bool = False
    """The trainer trains LoRA adapters. Deltas cover full weights only."""

    ppo_n_minibatches: int = 1
    """Optimizer steps that the trainer makes between two weight updates. Deltas need 1, or
    `weight_update_delta_accumulate`, or the method `capture` or `snapshot`."""


class RolloutConfig(_SideConfig):
    """The inference engines' side. Whether deltas are sent is said once, on the trainer's side."""

    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()
    """Where the engine's processes run: `type` and, for colocation, `target`; the type alone is
    accepted as a plain string. Deltas need `separation`."""

    @field_validator("scheduling_strategy", mode="before")
    @classmethod
    def _type_alone(cls, value: object) -> object:
        return {"type": value} if isinstance(value, str) else value


def _without_version_alias(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `_version`, which pydantic would take for a private attribute, to `version`."""
    renamed = dict(data)
    if "_version" not in renamed:
        return renamed
    alias = renamed.pop("_version")
    version = renamed.setdefault("version", alias)
    if version != alias:
        raise ConfigError(
            f"version = {version!r} and _version = {alias!r} are one setting, given twice. Remedy: keep one"
        )
    return renamed


_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_BOUNDS = (("ge", "from"), ("gt", "above"), ("le", "up to"), ("lt", "below"))


def _to_write(field: FieldInfo) -> str:
    """What to write for a setting, by its type, its limits and its examples."""
    if get_origin(field.annotation) is Literal:
        return f"write {' or '.join(get_args(field.annotation))}"
    kinds = [kind for kind in get_args(field.annotation) or [field.annotation] if kind in _TYPES]
    limits = [
        f" {word} {getattr(rule, bound)}"
        for bound, word in _BOUNDS
        for rule in field.metadata
        if hasattr(rule, bound)
    ]
    what = " or ".join(_TYPES[kind] for kind in kinds) or "what docs/en/configuration.md says"
    default = "" if field.is_required() or isinstance(field.default, bool | BaseModel) else field.default
    examples = field.examples or [str(default)] * (default not in ("", None))
    return f"write {what}{''.join(limits)}" + (f", such as {' or '.join(examples)}" if examples else "")


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    """One line for each refused setting: its name, its value, what is wrong, and the remedy."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        field = ".".join(map(str, item["loc"]))
        remedy = _remedy(model, item["type"], item["loc"])
        if item["type"] == "missing":
            lines.append(f"{field} is missing. Remedy: {remedy}")
        else:
            # Where a secret is asked for, or nearly, the value may be one.
            shown = "(not shown)" if "secret" in field.lower() else _SHOWN.repr(item["input"])
            lines.append(f"{field} = {shown}: {item['msg']}. Remedy: {remedy}")
    return f"{model.__name__} is refused\n" + "\n".join(lines)


def _remedy(model: type[BaseModel], error_type: str, place: Sequence[int | str]) -> str:
    """What to do about an unknown setting, or what to write for one that has a wrong value."""
    known, (first, *inner) = model.model_fields, place
    field = str(first)
    if field in known:
        kind = known[field].annotation
        if inner and isinstance(kind, type) and issubclass(kind, BaseModel):
            return _remedy(kind, error_type, inner)
        if error_type != "extra_forbidden":
            return _to_write(known[field])
    close = difflib.get_close_matches(field, known, n=1)
    return f"did you mean {close[0]}?" if close else f"remove it; known settings: {', '.join(known)}"
