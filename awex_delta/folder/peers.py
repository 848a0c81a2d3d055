"""How the ranks of one engine read the same version: what each says, and hears from all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from awex_delta.errors import ConfigError, LockstepError
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.session import in_step
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require

_TEXT_CHARS = 600
_WIDTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank says at the end of a phase.

    phase: which.
    version, id: what it means to read, or holds now.
    failure: why it cannot go on; empty where it can.
    refused: id of the version that is to blame, if one is.
    fatal: trying another version would not help.
    """

    phase: str
    version: int = -1
    id: str = ""
    failure: str = ""
    refused: str = ""
    fatal: bool = False


_WORD = TypeAdapter(Word)


class Peers:
    """The ranks of one engine, or one rank alone. Not thread-safe."""

    def __init__(self, rendezvous: Rendezvous | None, rank: int, settings: DeltaSettings) -> None:
        """Take a seat; nothing is opened.

        rendezvous is where the engine's ranks meet, with no trainer ranks; None for one rank alone. Raises
        ConfigError if an argument has a wrong type, the rank is outside, or there are trainer ranks in it.
        """
        require(DeltaSettings, "what resolve(...).settings is", settings=settings)
        require((Rendezvous, type(None)), "a Rendezvous, or None", rendezvous=rendezvous)
        require(int, "a whole number", engine_rank=rank)
        self.rank = rank
        self._comm: Comm | None = None
        if rendezvous is None:
            if rank:
                raise ConfigError(f"engine_rank={rank}: give the rendezvous where the engine's ranks meet")
            return
        if rendezvous.num_trainer_ranks:
            raise ConfigError(
                f"num_trainer_ranks={rendezvous.num_trainer_ranks}: readers of a folder meet without trainers"
            )
        self._comm = Comm(rendezvous, rendezvous.engine_seat(rank), settings)

    @contextmanager
    def in_step(self, purpose: str) -> Iterator[None]:
        """Meet, and leave when anything but an agreed failure ends the step, so that peers hear of it.

        Raises ConnectError if a rank is missing. Collective: yes, over the engine's ranks.
        """
        if self._comm is None:
            # What is kept could not be written outside of it.
            with torch.inference_mode(mode=False), torch.no_grad():
                yield
            return
        if not self._comm.begin(purpose):
            self._comm.connect()
        with in_step(self._comm):
            yield

    def tell(self, word: Word) -> list[Word]:
        """Say a word and hear all, by rank.

        Raises LockstepError if a rank is in another phase, PeerError if one did not answer.
        Collective: yes, over the engine's ranks.
        """
        if self._comm is None:
            return [word]
        text = asdict(word) | {"failure": word.failure.encode("ascii", "replace").decode()[:_TEXT_CHARS]}
        try:
            rows = self._comm.gather(_WORD.dump_json(Word(**text)), width=_WIDTH, phase=word.phase)
            words = [_WORD.validate_json(row) for row in rows]
        except ValidationError as error:
            raise LockstepError(f"a rank of this engine speaks another protocol: {error}") from error
        if {one.phase for one in words} != {word.phase}:
            raise LockstepError(f"ranks of this engine are in phases {[one.phase for one in words]}")
        return words

    def exchange(self, value: dict[str, Any], *, phase: str) -> list[dict[str, Any]]:
        """Give a JSON object to all ranks and get theirs, by rank.

        Raises LockstepError if a rank sent anything else, PeerError if one did not answer.
        Collective: yes, over the engine's ranks.
        """
        rows = [value] if self._comm is None else self._comm.gather_json(value, phase=phase)
        if not all(isinstance(row, dict) for row in rows):
            raise LockstepError(f"a rank of this engine sent no object in phase {phase!r}")
        return rows

    def close(self) -> None:
        """Leave."""
        if self._comm is not None:
            self._comm.close()
