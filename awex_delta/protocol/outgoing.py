"""What a trainer rank sends: its own line, and from it the lines of its pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from awex_delta.conversion.routes import Conversion, Route
from awex_delta.errors import UnsupportedError
from awex_delta.lines.boxes import BoxMap
from awex_delta.lines.changes import Changes
from awex_delta.lines.ends import LineEnd
from awex_delta.lines.finite import not_finite
from awex_delta.lines.storages import Storages, unreadable
from awex_delta.plan.rank import PairKey, Plan
from awex_delta.plan.shards import sent_names
from awex_delta.trainers.view import TrainerView, WeightInfo, trainer_line


class Outgoing:
    """The lines of one sender. What it reads are the live weights, as they are during one update.

    The sender's line is the trainer's line, then the HF tensors that travel whole, converted when they are
    first read in an update.

    Attributes:
        conversion: of this rank's weights.
        pairs: the lines.
        ends: this rank's end of each of them.
    """

    def __init__(
        self, view: TrainerView, routes: Mapping[str, Route], plan: Plan, device: torch.device | None = None
    ) -> None:
        """Make the tables; nothing is read.

        Args:
            view: the trainer.
            routes: how each of its weights travels.
            plan: this rank's plan.
            device: where its weights have to lie; None for where the first `look` finds them.
        """
        self._view = view
        self.conversion = Conversion(view, routes)
        self._device = device
        self._live: Mapping[str, torch.Tensor] = {}  # as of `look`
        self._whole: dict[str, torch.Tensor] = {}  # what travels whole, once it was converted
        self._sends = sent_names(plan.dense)
        self.pairs = plan.pairs
        self._line = trainer_line(route.info for route in routes.values())
        self._storages: Storages | None = None
        maps: dict[int, tuple[BoxMap, LineEnd]] = {}
        for pair in plan.pairs.values():  # engines of one layout share their tables
            if pair.digest not in maps:
                end = LineEnd(pair.sent.turned(), self._memory, pair.dtype)
                maps[pair.digest] = BoxMap(pair.sent), end
        self._maps = {key: maps[pair.digest][0] for key, pair in plan.pairs.items()}
        self.ends: Mapping[PairKey, LineEnd] = {key: maps[pair.digest][1] for key, pair in plan.pairs.items()}

    def look(self) -> None:
        """Find the live weights and see that they can be read. No element is read.

        Raises:
            UnsupportedError: names a weight whose storage was freed, or that has another shape, dtype or
                device than it had.
        """
        self.release()
        live = {key: self._view.tensor(key).detach() for key in self.conversion.routes}
        device = self._device or next((tensor.device for tensor in live.values()), torch.device("cpu"))
        for (key, tensor), route in zip(live.items(), self.conversion.routes.values(), strict=True):
            why = unreadable(tensor) or _changed(tensor, route.info)
            here = tensor.device
            if not why and (here.type != device.type or device.index not in (None, here.index)):
                why = f"it lies on {here}, the weights of this rank on {device}"
            if why:
                raise UnsupportedError(
                    f"{key}: {why}. Remedy: bring offloaded weights back before the update; after replacing "
                    "parameters make the trainer's view anew"
                )
        self._live, self._device = live, device

    def release(self) -> None:
        """Let go of the weights, at the end of an update or before they are gathered: look at them anew."""
        self._live, self._whole, self._storages = {}, {}, None
        self.conversion.release()

    def with_values(self, found: Changes) -> Changes:
        """Changes in the trainer's line with their values, which are read if detection did not."""
        if found.value is not None or not found.num_changed:
            return found
        return replace(found, value=self._memory().gather(found.pos, torch.bfloat16))

    def changes(self, found: Changes) -> dict[PairKey, Changes]:
        """The changes of every line, with values; the same object for engines of one layout.

        Args:
            found: in the trainer's line, with values.
        """
        mapped: dict[int, Changes] = {}
        for key, pair in self.pairs.items():
            if pair.digest not in mapped:
                mapped[pair.digest] = _mapped(self._maps[key], found, pair.dtype)
        return {key: mapped[pair.digest] for key, pair in self.pairs.items()}

    def not_finite(self, found: Changes) -> dict[str, int]:
        """How many values of a delta are NaN or infinite, by name of parameter or tensor that travels whole.

        Args:
            found: in the trainer's line, with values.
        """
        self._memory()  # which converts what travels whole
        whole = {name: tensor for name, tensor in self._whole.items() if name in self._sends}
        counts = not_finite(whole)
        if found.value is not None and not_finite({"": found.value}):
            counts |= self.counts(Changes(pos=found.pos[~found.value.isfinite()]))
        return counts

    def counts(self, found: Changes) -> dict[str, int]:
        """How many elements of each parameter changed, by key; those without changes are left out."""
        counts = zip(self._line.names, self._line.counts(found.pos).tolist(), strict=True)
        return {key: count for key, count in counts if count}

    def _memory(self) -> Storages:
        if self._storages is None:
            live = self._live or {key: self._view.tensor(key).detach() for key in self.conversion.routes}
            tensors = [live[key] for key in self._line.names]
            for route in self.conversion.routes.values():
                if route.relocations is None:
                    self._whole |= {name: tensor.detach() for name, tensor in self.conversion.of(route)}
            self._storages = Storages([*tensors, *self._whole.values()])
        return self._storages


def _changed(tensor: torch.Tensor, info: WeightInfo) -> str:
    """How a weight differs from what was announced of it; empty if it does not."""
    if tensor.dtype is info.dtype and tensor.shape == info.shape:
        return ""
    return f"it is {tensor.dtype} {tuple(tensor.shape)} now, and was {info.dtype} {info.shape}"


def _mapped(table: BoxMap, found: Changes, dtype: torch.dtype) -> Changes:
    pos, pick = table.map(found.pos)
    value = (
        torch.empty(0, dtype=torch.float32, device="cpu")
        if found.value is None
        else found.value.index_select(0, pick)
    )
    return Changes(
        pos=pos,
        code=None if found.code is None else found.code.index_select(0, pick),
        value=value.to(dtype),
    )
