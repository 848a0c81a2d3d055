"""A trainer over plain tensors: bf16 weights, fp32 masters, `torch.optim.AdamW`, no model parallelism.

It serves small single-process trainings, and stands in for one data-parallel rank of a bigger trainer:
ranks built from the same seed take identical full steps, and each owns an even part of every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from awex_delta.detection.optimizers import SteppedParams, kept_master, moments, part_of, step_counts
from awex_delta.detection.slices import OwnedSlice, param_key
from awex_delta.errors import UnsupportedError
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.base import FollowedTrainer
from awex_delta.trainers.tensors import check_tensors, data_parallel_info
from awex_delta.trainers.view import TrainerLayout, WeightInfo, live_slice, trainer_line

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"

_Owned = tuple[WeightInfo, int, slice | None, torch.Tensor]
"""A parameter that is owned: where its owned part begins in the trainer's line, which part that is, and the
live weight."""


class TorchAdamWTrainer(FollowedTrainer):
    """A `TrainerView` over named tensors that already carry their HF names."""

    def __init__(
        self,
        *,
        weights: Mapping[str, torch.Tensor],
        masters: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        settings: DeltaSettings,
        dp_rank: int = 0,
        dp_size: int = 1,
        architecture: str = "Qwen3ForCausalLM",
        vocab_size: int | None = None,
        tied_embeddings: bool = False,
        seed: int = 0,
    ) -> None:
        """Watch an optimizer and the weights that it trains.

        Args:
            weights: HF name -> live tensor, parameters and buffers.
            masters: HF name -> fp32 tensor that `optimizer` steps for the bf16 weight of that name.
                fp32 parameters that it steps themselves, frozen weights and buffers are sent whole;
                a bf16 weight that it steps without a master makes every update a full sync.
            optimizer: steps the masters, and the fp32 parameters themselves; read at construction.
            settings: as agreed with the engines.
            dp_rank, dp_size: which even part of every parameter this rank owns.
            architecture: `hf_config.architectures[0]`.
            vocab_size: rows of the HF embedding; all rows when None.
            tied_embeddings: the model serves its embedding as lm_head.
            seed: seeds the random gradients of `train_step`.

        Raises:
            UnsupportedError: names a trainable weight that has no master and is not stepped itself, or what
                `check_tensors` refuses.
        """
        check_tensors(weights, masters)
        self._weights = {param_key(name, 0): tensor for name, tensor in weights.items()}
        self._with_master = {param_key(name, 0) for name in masters}
        self._optimizer = optimizer
        self._stepped = SteppedParams(optimizer, self._find_stepped(masters))
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._seed, self._num_train_steps = seed, 0
        if vocab_size is None:
            vocab_size = weights[_EMBEDDING].shape[0] if _EMBEDDING in weights else 0
        self._tied = tied_embeddings
        layout = TrainerLayout(
            architecture=architecture,
            rank_info=data_parallel_info(dp_rank, dp_size),
            vocab_size=vocab_size,
            tied_embeddings=tied_embeddings,
        )
        super().__init__(layout, settings)
        self._infos = tuple(self._info(name, tensor) for name, tensor in weights.items())
        self._owned = tuple(self._find_owned())
        self._follow([self._sparse()] if settings.enabled else ())

    @classmethod
    def create(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        dp_rank: int = 0,
        dp_size: int = 1,
        settings: DeltaSettings | None = None,
        buffers: Mapping[str, tuple[int, ...]] | None = None,
        fp32: Mapping[str, tuple[int, ...]] | None = None,
        vocab_size: int | None = None,
        tied_embeddings: bool = False,
    ) -> TorchAdamWTrainer:
        """Build weights drawn from N(0, 0.02), their masters and an AdamW.

        Args:
            shapes: HF name -> shape of a bf16 parameter.
            seed: of the weights and of the random gradients; equal seeds take equal steps.
            lr, weight_decay: of the AdamW.
            dp_rank, dp_size: which even part of every parameter this rank owns.
            settings: as agreed with the engines; defaults when None.
            buffers: HF name -> shape of an fp32 buffer that no optimizer steps.
            fp32: HF name -> shape of an fp32 parameter, stepped without a master.
            vocab_size, tied_embeddings: as in the constructor.
        """
        generator = torch.Generator().manual_seed(seed)

        def draw(named: Mapping[str, tuple[int, ...]] | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            named = named or {}
            return {
                n: (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 0.02).to(
                    dtype
                )
                for n, shape in named.items()
            }

        trained = draw(shapes, torch.bfloat16)
        native = {name: tensor.requires_grad_() for name, tensor in draw(fp32, torch.float32).items()}
        fixed = draw(buffers, torch.float32)
        masters = {name: tensor.float().requires_grad_() for name, tensor in trained.items()}
        optimizer = torch.optim.AdamW([*masters.values(), *native.values()], lr=lr, weight_decay=weight_decay)
        return cls(
            weights={**trained, **native, **fixed},
            masters=masters,
            optimizer=optimizer,
            settings=settings or DeltaSettings(),
            dp_rank=dp_rank,
            dp_size=dp_size,
            vocab_size=vocab_size,
            tied_embeddings=tied_embeddings,
            seed=seed,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, for schedulers and checkpoints."""
        return self._optimizer

    def train_step(self, grads: Mapping[str, torch.Tensor] | None = None) -> None:
        """One optimizer step, then the masters rounded into the bf16 weights.

        Args:
            grads: HF name -> gradient; parameters that are not named get none and sit the step out.
                None draws gradients from (seed, number of the step) for all of them.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._num_train_steps + 1)
        stepped = self._stepped.live()
        for key, param in stepped.items():
            if grads is None:
                param.grad = torch.randn(
                    param.shape, generator=generator, dtype=torch.float32, device="cpu"
                ).to(param)
            else:
                param.grad = grads.get(key.removeprefix("0/"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_train_steps += 1
        with torch.no_grad():
            for key in self._with_master:
                self._weights[key].copy_(stepped[key])

    def weights(self) -> Sequence[WeightInfo]:
        """All tensors, in the order in which they were given."""
        return self._infos

    def tensor(self, key: str) -> torch.Tensor:
        """The live weight of `key`."""
        return self._weights[key].detach()

    def owned_slices(self) -> list[OwnedSlice]:
        """This rank's part of every bf16 parameter."""
        optimizer, live = self._optimizer, self._stepped.live()
        owned = [live[info.key] for info, *_ in self._owned]
        counts = step_counts(optimizer, owned)
        return [
            live_slice(
                info,
                begin,
                step,
                weight=weight,
                main=stepped if info.key in self._with_master else kept_master(optimizer, stepped),
                moments=moments(optimizer, stepped),
                in_weight=part,
                in_state=part,
            )
            for (info, begin, part, weight), stepped, step in zip(self._owned, owned, counts, strict=True)
        ]

    def gather_params(self) -> None:
        """Nothing to gather: every rank steps whole parameters."""

    def gather_owned(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parts themselves, in their shapes, where this rank is the only one.

        Args:
            parts: key -> bf16 [n], this rank's owned ranges.

        Raises:
            UnsupportedError: there are other ranks, of which this class knows nothing.
        """
        if self._dp_size > 1:
            raise UnsupportedError(f"dp_size={self._dp_size}: ranks of a TorchAdamWTrainer never meet")
        return {info.key: parts[info.key].view(info.shape) for info in self._infos if info.key in parts}

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensor under its own name, and as lm_head for a tied embedding."""
        name = key.removeprefix("0/")
        if self._tied and name == _EMBEDDING:
            return [(name, tensor), (_LM_HEAD, tensor)]
        return [(name, tensor)]

    def transfer(self) -> AbstractContextManager[None]:
        """Gradients are freed after every step, so there is nothing to release."""
        return nullcontext()

    def _info(self, name: str, tensor: torch.Tensor) -> WeightInfo:
        trained = param_key(name, 0) in self._stepped
        sparse = trained and tensor.dtype == torch.bfloat16
        numel = math.prod(tensor.shape)
        start, stop = numel * self._dp_rank // self._dp_size, numel * (self._dp_rank + 1) // self._dp_size
        owns = sparse and stop > start
        return WeightInfo(
            param=name,
            chunk=0,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            owners=tuple(range(self._dp_size)) if sparse else (),
            owned_start=start if owns else 0,
            owned_stop=stop if owns else 0,
            trained=trained,
        )

    def _find_owned(self) -> Iterator[_Owned]:
        begins = trainer_line(self._infos).begins()
        for info in self._infos:
            start, stop, key = info.owned_start, info.owned_stop, info.key
            if stop > start:
                part, weight = part_of(math.prod(info.shape), start, stop), self._weights[key]
                yield info, begins[key] + start, part, weight

    def _sparse(self) -> SteppedParams:
        params = self._stepped.live()
        return SteppedParams(
            self._optimizer, {info.key: params[info.key] for info in self._infos if info.sparse}
        )

    def _find_stepped(self, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        in_optimizer = {param for group in self._optimizer.param_groups for param in group["params"]}
        found: dict[str, torch.Tensor] = {}
        names: dict[torch.Tensor, str] = {}
        for key, weight in self._weights.items():
            candidate = masters.get(key.removeprefix("0/"), weight)
            if candidate in in_optimizer:
                if candidate in names:
                    raise UnsupportedError(
                        f"{key.removeprefix('0/')} and {names[candidate].removeprefix('0/')} are trained by "
                        "one tensor of the optimizer: give each tensor once (tied_embeddings=True serves an "
                        "embedding as lm_head, too)"
                    )
                found[key] = candidate
                names[candidate] = key
            elif weight.requires_grad or key in self._with_master:
                raise UnsupportedError(
                    f"{key.removeprefix('0/')} is trained, but the optimizer steps neither it nor a master "
                    f"of it: hand its fp32 master to the optimizer and in `masters`, or freeze it"
                )
        return found
