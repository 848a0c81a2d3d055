"""One trainer, several groups of engines: each a pairing of its own, at its own version and pace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from awex_delta.errors import AwexDeltaError, ConfigError, LockstepError, UpdateAborted
from awex_delta.protocol.comm import Comm
from awex_delta.protocol.ledger import check_version
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.session import in_step
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.arguments import require
from awex_delta.trainers.view import SharedTrainerView, TrainerView


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsUpdate:
    """How the targets of one call ended. The names are the same on every trainer rank.

    committed: by target, what this rank did; all trainer ranks committed.
    failed: by target, why not, as each rank says. Its next update is a full sync, unless weights were away.
    """

    committed: Mapping[str, UpdateStats]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """What a trainer rank says first.

    order: targets and versions. absent: by target, why rank 0 passes it over, empty if it does not.
    refused: why this rank cannot begin.
    """

    order: list[tuple[str, int]]
    absent: dict[str, str]
    refused: str


_BEGIN = TypeAdapter(_Begin)


class Targets:
    """Several groups of engines that follow one trainer. One object a trainer rank.

    Each target has a rendezvous, a version and a watermark of its own. The trainer ranks serve them one after
    the other, in the order in which they were added, and meet after each, so that a target that fails on some
    ranks only is failed for all of them before the next one begins.

    Example:
        >>> targets = Targets(view, trainers=trainers, trainer_rank=rank, settings=settings)  # doctest: +SKIP
        >>> targets.add("students", students)                                                # doctest: +SKIP
        >>> targets.add("judges", judges)                                                    # doctest: +SKIP
        >>> for step in range(steps):                                                        # doctest: +SKIP
        ...     train_step()
        ...     update = targets.update_weights({"students": step})
    """

    def __init__(
        self,
        view: SharedTrainerView,
        *,
        trainers: Rendezvous,
        trainer_rank: int,
        settings: DeltaSettings,
        device: torch.device | None = None,
    ) -> None:
        """Check the arguments; nothing is opened.

        Args:
            view: the training framework's adapter. Every target follows a fork of it.
            trainers: where the trainer ranks meet by themselves: no engine ranks, and a name of its own.
            trainer_rank: this rank in the trainer's world, from 0.
            settings: of every target that is added without settings of its own; no target may wait longer.
            device: where the weights live, None for the CPU.

        Raises:
            ConfigError: there are engine ranks in `trainers`, or the rank is outside of it.
        """
        require(
            SharedTrainerView, "a trainer that several targets can follow, such as MegatronTrainer", view=view
        )
        require(Rendezvous, "a Rendezvous without engine ranks", trainers=trainers)
        require(DeltaSettings, "what resolve(...).settings is", settings=settings)
        if trainers.num_engine_ranks:
            raise ConfigError(
                f"num_engine_ranks={trainers.num_engine_ranks}: the trainer ranks meet by themselves in "
                "`trainers`; give the engines of each target to `add`"
            )
        self._view = view
        self._rank = trainer_rank
        self._settings = settings
        self._device = device
        # One rank may sit in a target that fails for as long as all its waits last; the others wait here.
        patience = settings.connect_timeout_seconds + 4 * settings.timeout_seconds
        seat = trainers.trainer_seat(trainer_rank)
        self._meeting = Comm(trainers, seat, replace(settings, timeout_seconds=patience))
        self._senders: dict[str, Sender] = {}
        self._forks: dict[str, SharedTrainerView] = {}

    def add(
        self,
        name: str,
        rendezvous: Rendezvous,
        *,
        settings: DeltaSettings | None = None,
        view: TrainerView | None = None,
    ) -> Sender:
        """Let one more group of engines follow. Nothing is connected yet.

        Args:
            name: of the target.
            rendezvous: where it meets the trainer. Its store has to outlive the engines: host it at the
                trainer's side.
            settings: where they differ from those of the other targets, such as another encoding.
            view: what to send in place of the trainer's weights, such as an `EmaShadow`.

        Returns:
            The sender of this target. Its `connect` and `update_weights` may be called directly, too, on all
            trainer ranks alike.

        Raises:
            ConfigError: this is closed, the name is taken, the trainer ranks are others, or a timeout is
                longer than that of the trainer's settings: engines of other targets would give up waiting.

        Call it on every trainer rank, in the same order.
        """
        self._meeting.require_open("Targets")
        require(str, "a name", name=name)
        require(Rendezvous, "a Rendezvous", rendezvous=rendezvous)
        settings = settings or self._settings
        ranks, expected = rendezvous.num_trainer_ranks, self._meeting.rendezvous.num_trainer_ranks
        if name in self._senders:
            raise ConfigError(f"target {name!r} exists already: remove it first, or choose another name")
        if ranks != expected:
            raise ConfigError(f"target {name!r}: num_trainer_ranks={ranks}, but the trainer has {expected}")
        for field in ("timeout_seconds", "connect_timeout_seconds"):
            mine, longest = getattr(settings, field), getattr(self._settings, field)
            if mine > longest:
                raise ConfigError(
                    f"target {name!r}: {field}={mine:g} s is longer than the {longest:g} s of all targets"
                )
        fork: SharedTrainerView | None = None
        if view is None:
            view = fork = self._view.fork()
        try:
            sender = Sender(view, rendezvous, self._rank, settings, device=self._device)
        except ConfigError:
            if fork is not None:
                fork.detach()  # nobody else would, and it records every step
            raise
        if fork is not None:
            self._forks[name] = fork
        self._senders[name] = sender
        return sender

    def remove(self, name: str) -> None:
        """Leave a group of engines, which keep what they hold. On every trainer rank."""
        self[name].close()
        del self._senders[name]
        fork = self._forks.pop(name, None)
        if fork is not None:
            fork.detach()

    def __getitem__(self, name: str) -> Sender:
        """The sender of one target. Raises ConfigError."""
        if name not in self._senders:
            known = ", ".join(self._senders) or "none"
            raise ConfigError(f"target {name!r} is not known; there are: {known}. Remedy: add it")
        return self._senders[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which targets are served."""
        return iter(self._senders)

    def update_weights(self, versions: Mapping[str, int]) -> TargetsUpdate:
        """Bring the engines of some targets to the trainer's current weights.

        A target whose engines were lost is passed over until all of them have come back and wait in their
        `connect` or `update_weights`; a target that was never connected is waited for.

        Args:
            versions: by target, as for `Sender.update_weights`; the same on every trainer rank. A
                target that is not named stays as it is.

        Returns:
            Which targets committed, and which failed. A target that failed did not stop the others.

        Raises:
            ConfigError: this is closed; or a target is not known, or a version is none, of which the other
                ranks hear at once.
            UpdateAborted: another rank could not begin; says which, and why. Nothing was sent.
            LockstepError: trainer ranks were given different targets or versions. Nothing was sent.
            ConnectError, PeerError: a trainer rank is missing.

        Collective: yes, over all trainer ranks, and with each target over its engine ranks.
        """
        self._meeting.require_open("Targets")
        order, refused = self._order(versions)
        try:
            with in_step(self._meeting):
                absent = self._begin(order, refused)
        except AwexDeltaError as error:
            if refused is not None:
                raise refused from error  # what is wrong here tells more than how the others took it
            raise
        committed: dict[str, UpdateStats] = {}
        failed: dict[str, str] = {}
        with in_step(self._meeting):
            for name, version in order:
                stats, why = (None, absent[name]) if name in absent else self._update(name, version)
                if why:
                    failed[name] = why
                elif stats is not None:
                    committed[name] = stats
        return TargetsUpdate(committed=committed, failed=failed)

    def close(self) -> None:
        """Leave all targets, whatever a view raises as it is detached."""
        with ExitStack() as left:
            left.callback(self._meeting.close)
            for name in self:
                left.callback(self.remove, name)

    def _order(self, versions: Mapping[str, int]) -> tuple[list[tuple[str, int]], Exception | None]:
        """Targets and versions in the order in which they are served, or why this rank cannot begin."""
        try:
            for name, version in versions.items():
                self[name]
                check_version(version)
            return [(name, versions[name]) for name in self if name in versions], None
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it was
            return [], error

    def _begin(self, order: list[tuple[str, int]], refused: Exception | None) -> Mapping[str, str]:
        """Agree on what to do. Returns the targets to pass over, and why, as rank 0 sees it."""
        if not self._meeting.begin(f"targets {order}"):
            self._meeting.connect()
        mine = _Begin(
            order=order,
            absent={name: self._absence(name) for name, _ in order} if self._rank == 0 else {},
            refused="" if refused is None else f"{type(refused).__name__}: {refused}",
        )
        try:
            said = self._meeting.gather_json(asdict(mine), phase="targets")
            rows = [_BEGIN.validate_python(row) for row in said]
        except ValidationError as error:
            raise LockstepError(f"trainer ranks do not all run the same release: {error}") from error
        refusals = _said(row.refused for row in rows)
        if refusals:
            raise UpdateAborted(f"no target was begun: {refusals}")
        orders = [row.order for row in rows]
        if any(order != orders[0] for order in orders):
            raise LockstepError(f"trainer ranks were given different targets or versions: {orders}")
        return {name: why for name, why in rows[0].absent.items() if why}

    def _absence(self, name: str) -> str:
        """Why a target cannot be served now; empty where it can, or was never tried."""
        comm = self[name].comm
        if not comm.has_met:
            return ""
        try:
            absent = comm.absent_engines()
        except AwexDeltaError as error:
            return f"{type(error).__name__}: {error}"
        if not absent:
            return ""
        return f"passed over: {comm.rendezvous.name_seats(absent)} left and did not come back yet"

    def _update(self, name: str, version: int) -> tuple[UpdateStats | None, str]:
        """Serve one target, and hear how it ended on every rank."""
        stats, failure = None, ""
        try:
            stats = self[name].update_weights(version)
        except Exception as error:  # noqa: BLE001 - the other targets and ranks go on, whatever it was
            failure = f"{type(error).__name__}: {error}"
        return stats, _said(self._meeting.gather_json(failure, phase=f"end of target {name!r}"))


def _said(texts: Iterable[Any]) -> str:
    """What the ranks said, one after the other; a rank without a text said nothing."""
    return "; ".join(f"trainer rank {rank}: {text}" for rank, text in enumerate(texts) if text)
