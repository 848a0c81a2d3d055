"""A whole pairing in one process: trainer and engine ranks as threads, over real Gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import HashStore

from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.testing.faults import FaultPlan
from awex_delta.testing.ranks import ThreadRanks, results
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import TrainerView

Outcome = UpdateStats | BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeat:
    """One engine rank of a pairing: its weights and the name of its instance."""

    engine: str
    view: DictEngine


class Pairing:
    """Trainers and engines that meet in one HashStore.

    Attributes:
        trainers, engines: the views, by rank of their side.
        faults: one FaultPlan a transfer rank, engines first.
        senders, receivers: the product's objects under test.
    """

    def __init__(
        self,
        trainers: Sequence[TrainerView],
        engines: Sequence[EngineSeat],
        settings: DeltaSettings,
        engine_settings: DeltaSettings | None = None,
    ) -> None:
        """Build one Sender a trainer and one Receiver an engine rank; nothing connects yet."""
        self.trainers = list(trainers)
        self.engines = [seat.view for seat in engines]
        self.settings = settings
        self._engine_settings = engine_settings or settings
        self._seats = list(engines)
        self.rendezvous = Rendezvous(
            num_engine_ranks=len(engines), num_trainer_ranks=len(trainers), store=HashStore()
        )
        self.threads = ThreadRanks(self.rendezvous.world_size)
        self.faults = [FaultPlan() for _ in range(self.rendezvous.world_size)]
        self.receivers = [self._receiver(rank) for rank in range(len(engines))]
        self.senders = [self._sender(rank) for rank in range(len(trainers))]

    @property
    def ends(self) -> list[Receiver | Sender]:
        """Receivers and senders, by transfer rank."""
        return [*self.receivers, *self.senders]

    def restart_engine(self, rank: int, view: DictEngine | None = None) -> None:
        """A new life of one engine rank: its old connection dies, its weights are lost."""
        self._on_thread(rank, self.receivers[rank].close)
        if view is not None:
            self._seats[rank] = EngineSeat(engine=self._seats[rank].engine, view=view)
            self.engines[rank] = view
        self.receivers[rank] = self._receiver(rank)

    def restart_trainer(self, rank: int, view: TrainerView) -> None:
        """A new life of one trainer rank."""
        self._on_thread(self.rendezvous.trainer_seat(rank), self.senders[rank].close)
        self.trainers[rank] = view
        self.senders[rank] = self._sender(rank)

    def update(
        self,
        version: int | Sequence[int],
        *,
        timeout_seconds: float = 30.0,
        absent: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run one update on all ranks.

        Args:
            version: for all, or one a transfer rank.
            timeout_seconds: fails the test when a rank still runs after it.
            absent: transfer ranks that do not take part; their outcome is a TimeoutError.

        Returns:
            By transfer rank, the stats or the exception.
        """
        world_size = self.rendezvous.world_size
        versions = [version] * world_size if isinstance(version, int) else list(version)
        calls: list[Callable[[int], UpdateStats]] = [
            *(receiver.update_weights for receiver in self.receivers),
            *(sender.update_weights for sender in self.senders),
        ]

        def run(seat: int) -> UpdateStats:
            if seat in absent:
                raise TimeoutError("absent")
            return calls[seat](versions[seat])

        return list(self.threads.run(run, timeout_seconds=timeout_seconds))

    def commit(self, version: int) -> list[UpdateStats]:
        """Run one update that must succeed on every rank. Raises RanksFailed."""
        return results(self.update(version))

    def close(self) -> None:
        """Leave on every rank."""
        ends = self.ends
        self.threads.run(lambda seat: ends[seat].close())
        self.threads.close()

    def _on_thread(self, seat: int, job: Callable[[], None]) -> None:
        """Process groups belong to the thread that made them, so it also closes them."""
        results(self.threads.run(lambda other: job() if other == seat else None))

    def _receiver(self, rank: int) -> Receiver:
        return Receiver(
            self._seats[rank].view,
            self.rendezvous,
            rank,
            self._seats[rank].engine,
            self._engine_settings,
            on_phase=self.faults[rank].on_phase,
        )

    def _sender(self, rank: int) -> Sender:
        seat = self.rendezvous.trainer_seat(rank)
        return Sender(
            self.trainers[rank], self.rendezvous, rank, self.settings, on_phase=self.faults[seat].on_phase
        )


def differing(engine: DictEngine, weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Elements whose bits differ between an engine rank and the whole weights, by tensor name.

    Args:
        engine: one rank; its parts are compared with the same parts of the whole.
        weights: HF name -> whole tensor.
    """
    wrong: dict[str, int] = {}
    for entry in engine.tensors():
        cut = tuple(slice(o, o + n) for o, n in zip(entry.global_offset, entry.view.shape, strict=True))
        want, got = weights[entry.name][cut].contiguous(), entry.view.contiguous()
        bits = torch.int16 if want.element_size() == 2 else torch.int32
        count = int((want.view(bits) != got.view(bits)).sum()) if want.dtype is got.dtype else want.numel()
        if count:
            wrong[entry.name] = count
    return wrong


def torch_pairing(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    num_trainers: int = 2,
    engines: Sequence[EngineSeat],
    settings: DeltaSettings,
    **options: object,
) -> Pairing:
    """A pairing of data-parallel `TorchAdamWTrainer` ranks and the given engines."""
    trainers = [
        TorchAdamWTrainer.create(shapes, dp_rank=rank, dp_size=num_trainers, settings=settings, **options)  # type: ignore[arg-type]
        for rank in range(num_trainers)
    ]
    return Pairing(trainers, engines, settings)


def stepped_by(
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    shapes: Mapping[str, tuple[int, ...]],
    settings: DeltaSettings,
    *,
    seed: int = 5,
    masters: bool = True,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> TorchAdamWTrainer:
    """A trainer whose optimizer is of any class. Without masters it steps the bf16 weights themselves."""
    generator = torch.Generator().manual_seed(seed)
    weights = {n: (torch.randn(s, generator=generator) * 0.02).bfloat16() for n, s in shapes.items()}
    apart = {name: weight.float().requires_grad_() for name, weight in weights.items()} if masters else {}
    return TorchAdamWTrainer(
        weights=weights,
        masters=apart,
        optimizer=make_optimizer(
            list(apart.values()) or [weight.requires_grad_() for weight in weights.values()]
        ),
        settings=settings,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
