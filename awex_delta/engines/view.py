"""What the receiver needs from an inference engine, and how adapters describe live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from awex_delta.errors import LayoutError

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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


@runtime_checkable
class EngineView(Protocol):
    """What the receiver needs from an inference engine. Every method is rank-local."""

    def tensors(self) -> Sequence[EngineTensor]:
        """This rank's live tensors, in a stable order. Storage never moves between calls."""

    def synchronize(self) -> None:
        """Block until writes to the weights are done on the device.

        Called before all ranks agree to commit, so whatever may fail and has to follow each write (dropping
        caches that the old weights filled) belongs here: if it raises, no rank commits.
        """

    def committed(self, version: int) -> None:
        """A version was committed on all ranks: publish it, exactly once.

        It should be an assignment. If it raises, this rank alone is not ready until the next update, which is
        a full sync; the others serve the version.
        """


def part(
    name: str,
    view: torch.Tensor,
    global_shape: Sequence[int] | None = None,
    global_offset: Sequence[int] | None = None,
    tied_to: str | None = None,
) -> EngineTensor:
    """Describe one live tensor, or a rectangular part of it, and refuse what cannot be written in place.

    Args:
        name: HF name of the whole tensor, as AWEX's converters emit it.
        view: alias of the engine's storage, bf16, fp16 or fp32, any device, any strides; kept detached.
        global_shape: shape of the whole HF tensor; the shape of `view` when not given.
        global_offset: where `view` begins in it; the origin when not given.
        tied_to: name of the entry that shares this storage.

    Raises:
        LayoutError: the dtype is another one (quantized weights), two elements of `view` share memory, or
            the part does not lie inside the whole.
    """
    shape = tuple(view.shape if global_shape is None else global_shape)
    offset = (0,) * len(shape) if global_offset is None else tuple(global_offset)
    if view.dtype not in _BITS:
        raise LayoutError(
            f"{name} is served as {view.dtype}; only bfloat16, float16 and float32 weights can be updated "
            "in place. Serve an unquantized model."
        )
    if view.device.type == "meta":
        raise LayoutError(
            f"{name} is on the meta device and has no storage. Load the engine's weights first."
        )
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise LayoutError(f"{name} is an expanded tensor: several of its elements share one memory cell.")
    inside = len(shape) == len(offset) == view.dim() and all(
        start >= 0 and start + size <= whole
        for start, size, whole in zip(offset, view.shape, shape, strict=True)
    )
    if not inside:
        raise LayoutError(f"{name}: a part of shape {tuple(view.shape)} at {offset} does not fit in {shape}.")
    return EngineTensor(
        name=name, view=view.detach(), global_shape=shape, global_offset=offset, tied_to=tied_to
    )


def require_aliases(parts: Iterable[EngineTensor], live: Iterable[torch.Tensor]) -> None:
    """Check that every part is memory of a live tensor, so that a write to it reaches the model.

    Raises LayoutError if a part has a storage of its own, or two parts have one name.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in live}
    seen: set[str] = set()
    for entry in parts:
        if entry.view.untyped_storage().data_ptr() not in storages:
            raise LayoutError(f"{entry.name} is a copy: writing to it would not reach the engine's weights.")
        if entry.name in seen:
            raise LayoutError(f"{entry.name} is published twice by one rank.")
        seen.add(entry.name)
