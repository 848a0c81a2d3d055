"""An engine that is only its weights: named tensors, optionally cut along one dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from awex_delta.engines.view import EngineTensor, EngineView


class DictEngine(EngineView):
    """An `EngineView` over plain tensors. Serves nothing; counts commits and cache flushes.

    Attributes:
        tensors_by_name: live weights, or this rank's parts of them.
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
        self._parts: list[EngineTensor] = []
        tied = tied or {}
        for name, shape in shapes.items():
            if name in tied:
                continue
            offset, size = [0] * len(shape), list(shape)
            dim = (cut or {}).get(name)
            if dim is not None:
                size[dim] = shape[dim] // num_ranks
                offset[dim] = rank * size[dim]
            tensor = torch.zeros(size, dtype=(dtypes or {}).get(name, torch.bfloat16), device="cpu")
            self.tensors_by_name[name] = tensor
            self._parts.append(
                EngineTensor(name=name, view=tensor, global_shape=tuple(shape), global_offset=tuple(offset))
            )
        for alias, name in tied.items():
            tensor = self.tensors_by_name[name]
            whole = tuple(shapes[name])
            self._parts.append(
                EngineTensor(
                    name=alias, view=tensor, global_shape=whole, global_offset=(0,) * len(whole), tied_to=name
                )
            )

    def tensors(self) -> Sequence[EngineTensor]:
        return self._parts

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def committed(self, version: int) -> None:
        self.published.append(version)
