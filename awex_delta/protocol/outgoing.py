"""What a trainer rank sends: its own line, and from it the lines of its pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from awex_delta.conversion.routes import Conversion, Route
from awex_delta.lines.boxes import BoxMap
from awex_delta.lines.changes import Changes
from awex_delta.lines.ends import LineEnd
from awex_delta.lines.storages import Storages
from awex_delta.plan.rank import PairKey, Plan
from awex_delta.trainers.view import TrainerView, trainer_line


class Outgoing:
    """The lines of one sender. What it reads are the live weights, as they are during one update.

    The sender's line is the trainer's line, then the HF tensors that travel whole, converted when they are
    first read in an update.

    Attributes:
        conversion: of this rank's weights.
        pairs: the lines.
        ends: this rank's end of each of them.
    """

    def __init__(self, view: TrainerView, routes: Mapping[str, Route], plan: Plan) -> None:
        """Make the tables; nothing is read.

        Args:
            view: the trainer.
            routes: how each of its weights travels.
            plan: this rank's plan.
        """
        self._view = view
        self.conversion = Conversion(view, routes)
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

    def release(self) -> None:
        """Let go of the weights at the end of an update: the next one looks at them anew."""
        self._storages = None
        self.conversion.release()

    def changes(self, found: Changes) -> dict[PairKey, Changes]:
        """The changes of every line, with values; the same object for engines of one layout.

        Args:
            found: in the trainer's line.
        """
        if found.value is None and found.num_changed:
            found = replace(found, value=self._memory().gather(found.pos, torch.bfloat16))
        mapped: dict[int, Changes] = {}
        for key, pair in self.pairs.items():
            if pair.digest not in mapped:
                mapped[pair.digest] = _mapped(self._maps[key], found, pair.dtype)
        return {key: mapped[pair.digest] for key, pair in self.pairs.items()}

    def counts(self, found: Changes) -> dict[str, int]:
        """How many elements of each parameter changed, by key; those without changes are left out."""
        counts = zip(self._line.names, self._line.counts(found.pos).tolist(), strict=True)
        return {key: count for key, count in counts if count}

    def _memory(self) -> Storages:
        if self._storages is None:
            tensors = [self._view.tensor(key).detach() for key in self._line.names]
            for route in self.conversion.routes.values():
                if route.relocations is None:
                    tensors += [tensor.detach() for _, tensor in self.conversion.of(route)]
            self._storages = Storages(tensors)
        return self._storages


def _mapped(table: BoxMap, found: Changes, dtype: torch.dtype) -> Changes:
    pos, pick = table.map(found.pos)
    value = torch.empty(0) if found.value is None else found.value.index_select(0, pick)
    return Changes(
        pos=pos,
        code=None if found.code is None else found.code.index_select(0, pick),
        value=value.to(dtype),
    )
