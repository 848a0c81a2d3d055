"""An engine that is only its weights: named tensors, optionally cut along one dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from awex_delta.engines.view import EngineTensor, EngineView


class DictEngine(EngineView):
    """An `EngineView` over plain tensors. Serves nothing; counts commits and cache flushes.

    Attributes:
        tensors_by_name: live weights, or this rank's parts of them; may be replaced. An alias that gets an
            entry of its own is tied no more.
        published: versions that were committed, in order.
        num_synchronized: calls of `synchronize`.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        cut: Mapping[str, int] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Allocate zeroed weights.

        Args:
            shapes: HF name -> global shape.
            dtypes: HF name -> dtype, bf16 where none is given.
            cut: HF name -> dimension along which the ranks of this engine share it; others are
                replicated on every rank.
            rank, num_ranks: this rank among those of this engine.
            tied: alias -> name of the tensor whose storage it shares.
        """
        self.tensors_by_name: dict[str, torch.Tensor] = {}
        self.published: list[int] = []
        self.num_synchronized = 0
        self._tied = dict(tied or {})
        self._wholes = {name: tuple(shape) for name, shape in shapes.items()}
        self._offsets: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            offset, size = [0] * len(shape), list(shape)
            dim = (cut or {}).get(name)
            if dim is not None:
                size[dim] = shape[dim] // num_ranks
                offset[dim] = rank * size[dim]
            self._offsets[name] = tuple(offset)
            if name not in self._tied:
                dtype = (dtypes or {}).get(name, torch.bfloat16)
                self.tensors_by_name[name] = torch.zeros(size, dtype=dtype, device="cpu")

    def tensors(self) -> Sequence[EngineTensor]:
        return [self._part(name) for name in self._wholes]

    def _part(self, name: str) -> EngineTensor:
        tied_to = None if name in self.tensors_by_name else self._tied[name]
        return EngineTensor(
            name=name,
            view=self.tensors_by_name[tied_to or name],
            global_shape=self._wholes[name],
            global_offset=self._offsets[name],
            tied_to=tied_to,
        )

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def committed(self, version: int) -> None:
        self.published.append(version)
