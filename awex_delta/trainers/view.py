"""What the sender needs from a training framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from awex_delta.detection.optimizers import Moments, flat
from awex_delta.detection.slices import Detection, OwnedSlice, param_key, unusable
from awex_delta.lines.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    """One local tensor of a trainer that inference must receive.

    dtype: in which the trainer holds it. What it is sent in is the dtype that it converts to.
    owners: ranks of the optimizer group that owns the parameter in parts, this rank included; they count
        from 0 among the trainers. Empty for a tensor that no optimizer owns (a buffer, a frozen weight) and
        for one that is always sent whole (such as an fp32 parameter of Megatron).
    owned_start, owned_stop: the half-open flat range that this rank owns; (0, 0) if it owns nothing of it.
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


def trainer_line(infos: Iterable[WeightInfo]) -> Space:
    """The line of all sparse weights of a rank by key, in the order of `TrainerView.weights`."""
    return Space.of((info.key, math.prod(info.shape)) for info in infos if info.sparse)


def live_slice(
    info: WeightInfo,
    begin: int,
    step: int,
    *,
    weight: torch.Tensor,
    main: torch.Tensor | None,
    moments: Moments,
    in_weight: slice | None,
    in_state: slice | None,
) -> OwnedSlice:
    """The range of a parameter that this rank owns, of tensors as the framework holds them.

    Args:
        info: the parameter.
        begin: where the range begins in the trainer's line.
        step: the optimizer's counter.
        weight, main, moments: live, contiguous, any shape.
        in_weight, in_state: where the range is in `weight`, and in the others; see `part_of`.

    Raises:
        UnsupportedError: names a tensor that is not contiguous, or whose storage ends before the range.
    """
    exp_avg, exp_avg_sq = moments.exp_avg, moments.exp_avg_sq
    try:
        return OwnedSlice(
            param=info.param,
            chunk=info.chunk,
            start=info.owned_start,
            stop=info.owned_stop,
            begin=begin,
            main=None if main is None else flat(main, in_state),
            weight=flat(weight, in_weight),
            exp_avg=None if exp_avg is None else flat(exp_avg, in_state),
            exp_avg_sq=None if exp_avg_sq is None else flat(exp_avg_sq, in_state),
            step=step,
            exp_avg_scale=moments.exp_avg_scale,
            exp_avg_sq_scale=moments.exp_avg_sq_scale,
        )
    except RuntimeError as error:
        raise unusable(info.key, weight=weight, main=main, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HfPart:
    """The part of an HF tensor that a rank holds: where it begins, and the shape of the whole tensor."""

    offset: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Where a trainer rank stands, for AWEX's planner.

    architecture: `hf_config.architectures[0]`.
    rank_info: the fields of AWEX's RankInfo as plain JSON values.
    vocab_size: rows of the HF embedding; Megatron may hold more (padding), which are never sent.
    tied_embeddings: lm_head is the embedding.
    parts: by HF name, which part of it this rank holds. None where AWEX's rules say so from `rank_info`, as
        they do for Megatron.
    """

    architecture: str
    rank_info: Mapping[str, int | str | bool]
    vocab_size: int
    tied_embeddings: bool
    parts: Mapping[str, HfPart] | None = None


@runtime_checkable
class TrainerView(Protocol):
    """What the sender needs from a training framework. Every method is rank-local unless it says so."""

    def layout(self) -> TrainerLayout:
        """This rank's place among the trainers."""

    def weights(self) -> Sequence[WeightInfo]:
        """All local tensors that inference receives, in a stable order."""

    def tensor(self, key: str) -> torch.Tensor:
        """The live local tensor of `key` in the shape of its `WeightInfo`."""

    def owned_slices(self) -> Sequence[OwnedSlice]:
        """The owned ranges with their live optimizer state, in the order of `weights()`.

        Not to be kept: a framework may replace the tensors.
        """

    def detect(self) -> Detection:
        """Find what changed since the last `committed()`, in the line of `trainer_line`. No collective.

        Called in each update but an anchor, even if that is going to be full.
        """

    def gather_params(self) -> None:
        """Make every local weight current (finish or force the parameter all-gather).

        Collective over the data-parallel groups. Called on all trainer ranks for a full sync, and for a delta
        if some parameter that several ranks own in parts travels whole.
        """

    def committed(self) -> None:
        """The engines have the current weights: forget recorded steps.

        Called just before all ranks agree to commit, so that no rank does if it raises here. If they do not,
        the next update is full, whatever was recorded.
        """

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """HF names and tensors for a tensor shaped like `tensor(key)`, by AWEX's converter.

        Accepts any dtype and the meta device. A tied lm_head is listed beside the embedding.

        Rank-local, or collective over a group of the training framework; then it calls the collective with
        meta tensors too, and is called with data on all trainer ranks, in the order of `weights()`, at one
        place of every update.
        """

    def transfer(self) -> AbstractContextManager[None]:
        """Held around sending: may release gradient buffers, and restores them whatever happens.

        It is left before all ranks agree to commit; if that raises, no rank commits.
        """


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
