"""Frozen records that cross module borders. Torch tensors in them are never copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from awex_delta.verdict import Reason, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """The plain floats that one AdamW step used for one parameter, taken inside that step.

    `step` is the bias-correction step t (the first step is 1).
    """

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSlice:
    """The range of one local parameter whose optimizer state this rank holds.

    All tensors are flat, of `stop - start` elements, on one device, and alias live storage.

    param: canonical Megatron name on this rank (unique together with `chunk`).
    chunk: index of the model chunk (virtual pipeline stage) that holds the parameter.
    start, stop: half-open flat element range in the local (tensor-parallel) parameter.
    main: fp32 master weight; None when the optimizer keeps none.
    weight: the model's own weight over the same range, in its storage dtype (bf16).
    exp_avg, exp_avg_sq: AdamW moments; None before the first step.
    step: the optimizer's own step counter for this parameter now, 0 before the first step.
    """

    param: str
    chunk: int
    start: int
    stop: int
    main: torch.Tensor | None
    weight: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    step: int

    @property
    def key(self) -> str:
        """Identity of the parameter on this rank."""
        return param_key(self.param, self.chunk)


def param_key(param: str, chunk: int) -> str:
    """Identity of a local parameter: its canonical Megatron name and its model chunk."""
    return f"{chunk}/{param}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSet:
    """The changed elements of one owned slice: a certified superset of the true changes.

    index: int64 [n], ascending flat positions in the *local parameter* (already offset by `start`).
    code: int8 [n], steps in units in the last place of bf16, or -128 where no step is stated
        (uncertain, too far, not finite). Never 0: an element that did not change is not listed.
    """

    key: str
    index: torch.Tensor
    code: torch.Tensor

    @property
    def num_changed(self) -> int:
        """Elements listed."""
        return self.index.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What detection found on one rank: change sets, or the reason why a full sync is needed."""

    changes: tuple[ChangeSet, ...] = ()
    reason: Reason = Reason.NONE
    detail: str = ""
    num_owned: int = 0

    @property
    def num_changed(self) -> int:
        """Elements in all change sets."""
        return sum(changes.num_changed for changes in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    """One local Megatron tensor that inference must receive.

    owners: transfer-independent trainer ranks (0-based among trainers) of the optimizer group that
        owns the parameter in parts, this rank included; empty for tensors no optimizer owns
        (buffers, frozen weights) and for those that are always sent whole (fp32 parameters).
    owned: the half-open flat range that this rank owns; (0, 0) when it owns nothing of it.
    trained: an optimizer steps it, whether it is sent sparsely or whole.
    """

    param: str
    chunk: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    owners: tuple[int, ...]
    owned_start: int
    owned_stop: int
    trained: bool = False

    @property
    def key(self) -> str:
        """Identity of the tensor on this rank."""
        return param_key(self.param, self.chunk)

    @property
    def sparse(self) -> bool:
        """True when owners send only what changed; False when the tensor travels whole."""
        return bool(self.owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """One HF tensor, or this rank's part of it, in an engine's live storage.

    name: HF name, as AWEX's converters emit it.
    view: alias of live storage with the part's shape; any strides.
    global_shape, global_offset: the whole HF tensor and where the part begins in it.
    tied_to: name of another entry that shares this storage (a tied lm_head); it needs no send.
    """

    name: str
    view: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What one update did. Returned by `update_weights` on every rank.

    wire_bytes, num_elements: payload bytes and elements that this rank sent (trainer) or received (engine).
    num_changed, num_owned: certified changes in the optimizer slices that this rank owns, and their
        size (trainers; 0 where nothing was detected, as in most full syncs).
    total_wire_bytes, total_changed, total_owned: the same, summed over all trainer ranks.
    full_bytes: payload of a full sync of this pairing, over all ranks.
    verified: what was compared before the commit: "off", "touched" or "full".
    seconds: wall time by phase.
    """

    version: int
    verdict: Verdict
    wire_bytes: int = 0
    num_elements: int = 0
    num_changed: int = 0
    num_owned: int = 0
    total_wire_bytes: int = 0
    total_changed: int = 0
    total_owned: int = 0
    full_bytes: int = 0
    verified: str = "off"
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCount:
    """Changed and owned elements of one kind of tensor in one layer.

    layer: index in the whole model, whatever pipeline stage holds it; None outside the layers.
    kind: the trainer's name of the parameter inside its layer; the experts of a layer count together.
    """

    layer: int | None
    kind: str
    changed: int
    owned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """What both sides of one pairing must agree on, and the timeouts. Made by `config`.

    enabled: False means every sync is a full one and no optimizer hook is installed.
    anchor_interval: committed deltas between two full syncs; 0 means never.
    encoding: name of the delta encoding (`wire.registry`), or "auto".
    verify: what a delta compares by digests before it commits: "off", "touched" or "full".
    verify_interval: versions that this divides compare everything; 0 means none does for that reason.
    bucket_bytes: the most bytes of a frame; longer ones are cut. Two of them are what packing, travelling
        and unpacking take together.
    allow_any_world_size: pad the schedule instead of refusing a world that is no power of two.
    method: how a trainer rank finds changes: "adamw" inverts optimizer steps, "snapshot" compares with a
        bf16 copy of the owned elements.
    accumulate: follow every optimizer step, so that a delta covers any number of them, for one byte an
        owned element.
    release_grad_buffers: free Megatron's gradient buffers for the transfer (restored whatever happens).
    timeout_seconds: longest wait for a peer inside an update.
    connect_timeout_seconds: longest wait for all ranks to meet in `connect`.
    transport: "p2p" between the ranks, or "disk" through a folder.
    disk_url: that folder, as an fsspec URL; empty with "p2p".
    disk_kind: "delta", or "full" for a whole checkpoint at every version.
    keep_anchors: full versions that stay in the folder, with every delta since the oldest of them.
    read_workers: files and parts of files that one engine rank reads at once.
    """

    enabled: bool = True
    anchor_interval: int = 20
    encoding: str = "indices"
    verify: str = "touched"
    verify_interval: int = 0
    bucket_bytes: int = 64 << 20
    allow_any_world_size: bool = False
    method: str = "adamw"
    accumulate: bool = False
    release_grad_buffers: bool = False
    timeout_seconds: float = 300.0
    connect_timeout_seconds: float = 300.0
    transport: str = "p2p"
    disk_url: str = ""
    disk_kind: str = "delta"
    keep_anchors: int = 2
    read_workers: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Where a trainer rank stands, for AWEX's planner.

    architecture: `hf_config.architectures[0]`.
    rank_info: the fields of AWEX's RankInfo as plain JSON values.
    vocab_size: rows of the HF embedding; Megatron may hold more (padding), which are never sent.
    tied_embeddings: lm_head is the embedding.
    """

    architecture: str
    rank_info: Mapping[str, int | str | bool]
    vocab_size: int
    tied_embeddings: bool


@runtime_checkable
class TrainerView(Protocol):
    """What the sender needs from a training framework. Every method is rank-local unless it says so."""

    def layout(self) -> TrainerLayout:
        """This rank's place among the trainers."""

    def weights(self) -> Sequence[WeightInfo]:
        """All local tensors that inference receives, in a stable order."""

    def tensor(self, key: str) -> torch.Tensor:
        """The live local tensor of `key` in the shape of its `WeightInfo`."""

    def owned_slices(self) -> Iterator[OwnedSlice]:
        """The owned ranges with their live optimizer state, in the order of `weights()`."""

    def detect(self) -> Detection:
        """Find what changed since the last `committed()`. No collective."""

    def gather_params(self) -> None:
        """Make every local weight current (finish or force the parameter all-gather).

        Collective over the data-parallel groups; called on all trainer ranks for a full sync only.
        """

    def committed(self) -> None:
        """The receivers now hold the current weights: forget recorded steps."""

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """HF names and tensors for a tensor shaped like `tensor(key)`, by AWEX's converter.

        Accepts any dtype and the meta device. A tied lm_head is listed beside the embedding.
        """

    def transfer(self) -> AbstractContextManager[None]:
        """Held around sending: may release gradient buffers, and restores them whatever happens."""


@runtime_checkable
class SharedTrainerView(TrainerView, Protocol):
    """A trainer that several groups of engines can follow, each at its own version."""

    def fork(self) -> SharedTrainerView:
        """The same trainer, with changes counted from commits of its own. Rank-local."""

    def detach(self) -> None:
        """Stop recording optimizer steps for this view. Rank-local."""


@runtime_checkable
class GatheringTrainerView(TrainerView, Protocol):
    """A trainer whose ranks can put together what each of them owns."""

    def gather_owned(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Whole local tensors from parts of them.

        Args:
            parts: key -> bf16 [owned_stop - owned_start], for each parameter that this rank owns a part of.

        Returns:
            Key -> bf16 in the shape of its `WeightInfo`, for each sparse parameter.

        Collective: over the owners of each parameter; called on all trainer ranks.
        """


@runtime_checkable
class EngineView(Protocol):
    """What the receiver needs from an inference engine. Every method is rank-local."""

    def tensors(self) -> Sequence[EngineTensor]:
        """This rank's live tensors, in a stable order. Storage never moves between calls."""

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device."""

    def committed(self, version: int) -> None:
        """A version was committed: publish it and flush caches, exactly once."""
