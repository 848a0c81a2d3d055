"""What the receiver needs from an inference engine, and how adapters describe live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from awex_delta.errors import LayoutError, UpdateError, listed
from awex_delta.garbage import uncollected
from awex_delta.lines.storages import unreadable
from awex_delta.settings.arguments import require

_Places = list[tuple[Any, ...]]  # of each tensor its name, where it lies, and how it looks


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
    """What the receiver needs from an inference engine. Every method is rank-local.

    `awex_delta.testing.contract.engines` tries an implementation.
    """

    def tensors(self) -> Sequence[EngineTensor]:
        """Views of the memory that this rank computes with now.

        Called as ranks connect, before each update, and after its writes, before it commits. Each call looks
        the tensors up in the live model: a view that was kept is dead once the model has moved. What lies
        elsewhere than at the call before has moved, and makes the update full. `LiveParts` does this at the
        cost of a pointer a tensor.

        Whatever this raises ends the update on all ranks; if it was asked before the writes, none was made.
        """

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


def publish(view: EngineView, version: int, me: str) -> None:
    """Let a view publish a version that was committed. Raises UpdateError if it raises."""
    try:
        view.committed(version)
    except Exception as error:
        raise UpdateError(
            f"version {version} was committed, but {me} could not publish it and is not ready; the next "
            f"update is a full sync: {type(error).__name__}: {error}"
        ) from error


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
        view: alias of the engine's storage, bf16, fp16 or fp32, any device, any strides. Kept as an ordinary
            tensor over the same memory, also of a parameter, or of what was made in inference mode.
        global_shape: shape of the whole HF tensor; the shape of `view` when not given.
        global_offset: where `view` begins in it; the origin when not given.
        tied_to: name of the entry that shares this storage.

    Raises:
        LayoutError: the dtype is another one (quantized weights), `view` is no plain memory or has been
            released, two elements of it share memory, or the part does not lie inside the whole.
    """
    foreign: Any = view
    if is_traceable_wrapper_subclass(foreign):
        raise LayoutError(f"{name} is a {type(view).__name__}, which has no memory of its own to write to.")
    shape = tuple(view.shape if global_shape is None else global_shape)
    offset = (0,) * len(shape) if global_offset is None else tuple(global_offset)
    if view.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise LayoutError(
            f"{name} is served as {view.dtype}; only bfloat16, float16 and float32 weights can be updated "
            "in place. Serve an unquantized model."
        )
    if why := unreadable(view):
        raise LayoutError(f"{name} has no memory: {why}. Load the engine's weights first.")
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise LayoutError(f"{name} is an expanded tensor: several of its elements share one memory cell.")
    inside = len(shape) == len(offset) == view.dim() and all(
        start >= 0 and start + size <= whole
        for start, size, whole in zip(offset, view.shape, shape, strict=True)
    )
    if not inside:
        raise LayoutError(f"{name}: a part of shape {tuple(view.shape)} at {offset} does not fit in {shape}.")
    return EngineTensor(
        name=name, view=_plain(view), global_shape=shape, global_offset=offset, tied_to=tied_to
    )


def _plain(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that can be written without autograd, inside inference mode and outside."""
    with torch.inference_mode(mode=False):
        plain = torch.empty(0, dtype=view.dtype, device=view.device)
        return plain.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())


def require_aliases(parts: Iterable[EngineTensor], live: Iterable[torch.Tensor]) -> None:
    """Check that every part is memory of a live tensor, so that a write to it reaches the model.

    Raises LayoutError if a part has a storage of its own.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in live}
    for entry in parts:
        if entry.view.untyped_storage().data_ptr() not in storages:
            raise LayoutError(f"{entry.name} is a copy: writing to it would not reach the engine's weights.")


class LiveParts:
    """Answers `EngineView.tensors` from a live model: looks at all of its tensors at every call.

    Example:
        >>> class View(EngineView):
        ...     def __init__(self, model):
        ...         self._parts = LiveParts(model.named_parameters, lambda: my_parts(model))
        ...     def tensors(self):
        ...         return self._parts()
    """

    def __init__(
        self,
        live: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        parts: Callable[[], Iterable[EngineTensor]],
        *,
        captured: str = "",
    ) -> None:
        """Look at nothing yet.

        Args:
            live: the tensors that the model computes with at the time of the call, each with any name that
                stays. It is called for every update, so it should do no more than look them up.
            parts: makes the views of them; called when one of them moved.
            captured: the remedy, if the engine replays captured graphs, which read the addresses that tensors
                had then. What moved cannot be served then, and is an error.
        """
        self._live = live
        self._make = parts
        self._captured = captured
        self._places: _Places = []
        self._parts: tuple[EngineTensor, ...] | None = None

    def __call__(self) -> Sequence[EngineTensor]:
        """The views. They are the same objects as long as nothing moved.

        Raises LayoutError if a view is no memory of a live tensor, or one moved that captured graphs read;
        and what `live` and `parts` raise.
        """
        # The views keep their memory alive, so that nothing else can come to lie at the same address.
        places = [(name, *_place(tensor)) for name, tensor in self._live()]
        if self._parts is None or places != self._places:
            if self._parts is not None and self._captured:
                raise LayoutError(
                    f"{_differing(self._places, places)[0]} moved to other memory than captured graphs read: "
                    f"{self._captured}"
                )
            parts = tuple(self._make())
            require_aliases(parts, (tensor for _, tensor in self._live()))
            self._parts, self._places = parts, places
        return self._parts


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Called for each tensor at each update, so it reads only what takes no time.
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Bound:
    """An engine's tensors as updates read and write them: what it computed with when one looked last.

    Attributes:
        parts: as `EngineView.tensors` gave them; each view is an ordinary tensor over the live memory.
        moved: names of tensors that were bound anew, for messages. Empty it once they were updated.
    """

    def __init__(self, view: EngineView) -> None:
        """Bind nothing yet. Raises ConfigError if it is no view."""
        require(EngineView, "an EngineView, such as TransformersEngine(model)", view=view)
        self._view = view
        self._places: _Places | None = None
        self.parts: tuple[EngineTensor, ...] = ()
        self.moved = ""

    @uncollected()
    def look(self) -> bool:
        """Bind what the engine computes with now, if it is not what is bound. Returns whether it was not.

        Raises:
            LayoutError: names a tensor that cannot be written in place, is given under one name twice, shares
                memory with another one, is a copy, or lies on another device; and what `EngineView.tensors`
                raises.
        """
        live = self._view.tensors()
        moved = self._differing(live)
        if not moved and self._places is not None:
            return False
        if self._places is not None:
            self.moved = listed(moved)
        parts = tuple(
            part(one.name, one.view, one.global_shape, one.global_offset, one.tied_to) for one in live
        )
        _require_apart(parts)
        _require_one_device(parts, self.parts)
        places, again = _places(live), _places(self._view.tensors())
        if places != again:
            raise LayoutError(
                f"{_differing(places, again)[0]}: tensors() gives copies, which the engine would never read; "
                "give views of the live weights"
            )
        # Last, so that after whatever was raised above, the next look sees the move.
        self._places, self.parts = places, parts
        return True

    def require_unmoved(self) -> None:
        """Check that the engine still computes with what is bound. Raises LayoutError."""
        if moved := self._differing(self._view.tensors()):
            raise LayoutError(f"weights moved to other memory while they were updated: {listed(moved)}")

    def looks(self) -> dict[str, tuple[Any, ...]]:
        """All that an engine says of its tensors when ranks connect, by name."""
        return {
            one.name: (one.view.dtype, one.view.shape, one.global_shape, one.global_offset, one.tied_to)
            for one in self.parts
        }

    def _differing(self, live: Sequence[EngineTensor]) -> list[str]:
        """Names of the tensors that lie elsewhere than what is bound, look otherwise, came or went."""
        now = _places(live)
        if self._places is None or now == self._places:
            return []
        return _differing(self._places, now)


def _differing(before: _Places, after: _Places) -> list[str]:
    """Names of what is not the same before and after."""
    old, new = ({place[0]: place for place in places} for places in (before, after))
    return [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)] or ["the order"]


def _places(live: Sequence[EngineTensor]) -> _Places:
    return [(t.name, *_place(t.view), t.global_shape, t.global_offset, t.tied_to) for t in live]


def _require_apart(parts: Sequence[EngineTensor]) -> None:
    """Refuse what would be written twice, under two names, or not at all."""
    addresses: dict[str, int] = {}
    owners: dict[int, str] = {}
    for entry in parts:
        if entry.name in addresses:
            raise LayoutError(f"{entry.name} is published twice by one rank.")
        address = addresses[entry.name] = entry.view.data_ptr()
        if entry.tied_to is None and entry.view.numel():
            owner = owners.setdefault(address, entry.name)
            if owner != entry.name:
                raise LayoutError(f"{entry.name} shares the memory of {owner}: name that as its tied_to.")
    for entry in parts:
        if entry.tied_to is not None and addresses.get(entry.tied_to) != addresses[entry.name]:
            raise LayoutError(
                f"{entry.name} is given as tied to {entry.tied_to}, but has other memory, which nobody would "
                "write: leave its tied_to out."
            )


def _require_one_device(parts: Sequence[EngineTensor], before: Sequence[EngineTensor]) -> None:
    """Refuse a model that was moved in part, or to a device that it was not connected on."""
    for entry in parts:
        first = (before or parts)[0]
        if entry.view.device != first.view.device:
            raise LayoutError(
                f"{entry.name} lies on {entry.view.device}, {first.name} on {first.view.device}: move all "
                "weights back there, or attach the model anew."
            )
