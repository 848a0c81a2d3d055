"""Every collective, every send and receive, every timeout.

One `Comm` is one rank's seat in the transfer world: engine ranks first (0 .. I-1), then trainer ranks
(I .. I+T-1), as AWEX counts them. Its Gloo group lives for one *epoch*. A group in which a wait failed
is never used again: the rank closes it, opens the next epoch in the store, and every rank meets there
at its next update. A restarted process does the same, which is how it joins again.

Groups stand in no registry of torch: `destroy_process_group()` of a framework leaves them alone, pairings of
one process may share a name, and `TORCH_DISTRIBUTED_DEBUG=DETAIL` does not count what each rank sends.

Keys in the store, below the rendezvous name:

    epoch                   the current epoch, moved by compare-and-set only
    EPOCH/cause             what was given up by who opened the epoch, such as "version 7"; seat; name
    EPOCH/seat/RANK         who sits there, see `Seal.ticket`; a second life of the rank opens a new epoch
    EPOCH/at/RANK           the phase that the rank entered last, so an error can name who is missing
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from awex.transfer.transfer_plan import TransferPlan
from torch._C._distributed_c10d import PrefixStore

from awex_delta.errors import ConnectError, PeerError
from awex_delta.plan.shards import dense_batches
from awex_delta.protocol.dense import Begin, Weights, receive_batch, send_batch
from awex_delta.protocol.rendezvous import Rendezvous, first_line
from awex_delta.protocol.rows import Rows
from awex_delta.protocol.seal import Seal
from awex_delta.protocol.store import BoundedStore
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)

MAX_OPERATIONS = 1024
"""Most sends or receives of whole weights that one rank has begun and not ended."""


class Comm(Rows):
    """One rank's seat in the transfer world. Not thread-safe."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        seat: int,
        settings: DeltaSettings,
        device: torch.device | None = None,
    ) -> None:
        """Take a seat; nothing is opened before `connect`.

        Args:
            rendezvous: where the ranks meet.
            seat: transfer rank.
            settings: name the longest waits: for a peer in one operation, and for all in `connect`.
            device: where weights live. On CUDA, weights travel over NCCL and frames and agreements
                over Gloo; on the CPU everything travels over Gloo.

        Raises:
            ConfigError: the secret that the settings name cannot be read.
        """
        self.rendezvous = rendezvous
        self.seat = seat
        self.me = rendezvous.place(seat)
        self.epoch = -1
        self.purpose = "connect"
        self.trace: list[str] = []
        self.has_met = False
        self.seal = Seal(rendezvous, seat, settings.secret_source)
        self._device = device or torch.device("cpu")
        self._bucket_bytes = settings.bucket_bytes
        self._timeout = timedelta(seconds=settings.timeout_seconds)
        self._connect_timeout = timedelta(seconds=settings.connect_timeout_seconds)
        self._store: BoundedStore | None = None
        self._group: Any = None  # a backend of torch.distributed, whose methods have no types
        self._weights_group: Any = None

    @property
    def is_connected(self) -> bool:
        """False once the epoch was left."""
        return self._group is not None

    def begin(self, purpose: str) -> bool:
        """Begin a purpose, such as "version 7", in the current epoch; False if `connect` is due.

        The group of an earlier epoch is left.

        Raises:
            PeerError: this rank was still connected, and another one gave up this same purpose and has not
                come back, so nobody would answer. The next call connects.
        """
        self.purpose = purpose
        store = self._open_store()
        current = store.epoch()
        if current == self.epoch:
            return self.is_connected
        was_connected, self.epoch = self.is_connected, current
        self._leave()
        given_up, _, rest = (store.find(f"{current}/cause") or "").partition("\n")
        seat, _, who = rest.partition("\n")
        # Only once: a rank that is told again each time, while another waits, would never meet it.
        if was_connected and given_up == purpose and store.find(f"{current}/seat/{seat}") is None:
            raise PeerError(f"{self.me}: {purpose} was given up by {who} before this rank began it")
        return False

    def absent_engines(self) -> tuple[int, ...]:
        """Engine ranks that neither are connected nor wait to be. Raises PeerError and ConnectError."""
        store = self._open_store()
        epoch = store.epoch()
        if self.is_connected and epoch == self.epoch:
            return ()
        engines = range(self.rendezvous.num_engine_ranks)
        return tuple(rank for rank in engines if not self._sits(store, rank, epoch))

    def connect(self) -> None:
        """Join the current epoch, or open a new one where this seat was taken before.

        Raises:
            ConnectError: not every rank arrived in time; names those that did not.

        Collective: yes, over all transfer ranks.
        """
        self._leave()
        store = self._open_store()
        self.epoch = self._take_seat(store)
        try:
            self._group = self._new_group("gloo")
            self.seal.meet(self.epoch, self.gather)
            # The wait for stragglers above is longer than any wait inside an update.
            self._group._set_default_timeout(self._timeout)  # noqa: SLF001 - torch has no public name for it
            if self._device.type == "cuda":
                self._weights_group = self._new_group("nccl")
                one = torch.zeros(1, dtype=torch.float32, device=self._device)
                # NCCL connects in the first operation of all ranks.
                self._weights_group.allreduce([one]).wait()
            self.has_met = True
        except ConnectError:
            self.abandon()
            raise
        except Exception as error:  # whatever torch raises: not all ranks are here
            seats = range(self.rendezvous.world_size)
            missing = [seat for seat in seats if not self._sits(store, seat, self.epoch)]
            self._open_epoch_after(self.epoch, self.purpose)  # whoever comes late finds no half-open group
            self.abandon()
            waited = self._connect_timeout.total_seconds()
            raise ConnectError(
                f"{self.me}: {self.rendezvous.name_seats(missing)} did not arrive within {waited:g} s "
                f"(its own log says why, unless enable_delta_weight_update is off there): {first_line(error)}"
            ) from error

    def _take_seat(self, store: BoundedStore) -> int:
        """Sit down in the current epoch, or in a new one if this seat is taken. Returns the epoch."""
        deadline, stranger = time.monotonic() + self._connect_timeout.total_seconds(), ""
        while True:
            epoch = store.epoch()
            ticket = self.seal.new_ticket(epoch)
            found = store.swap(f"{epoch}/seat/{self.seat}", "", ticket)
            if found == ticket:
                return epoch
            if not stranger and not self.seal.is_ticket(self.seat, epoch, found):
                stranger = f"; in epoch {epoch} somebody without this secret sat there, as {found[:80]!r}"
                logger.warning("%s: this seat was taken%s", self.me, stranger)
            if time.monotonic() > deadline:
                raise ConnectError(f"{self.me}: this seat was taken again and again{stranger}")
            # Not in the name of this rank's purpose: the peers have not given anything up.
            self._open_epoch_after(epoch, f"a new life of seat {self.seat}")

    def _sits(self, store: BoundedStore, seat: int, epoch: int) -> bool:
        """Whether a rank of this pairing took a seat in an epoch."""
        return self.seal.is_ticket(seat, epoch, store.find(f"{epoch}/seat/{seat}"))

    def abandon(self) -> None:
        """Give this epoch up and close its group: peers that wait there fail at once, and all meet anew."""
        if self._store is not None and not self._store.broken and self.is_connected:
            with suppress(PeerError, ConnectError):  # a store that is gone cannot be told
                self._open_epoch_after(self.epoch, self.purpose)
        self.epoch = -1
        self._leave()

    def leave(self) -> None:
        """Leave until the next `connect`. Peers that still wait here fail at once."""
        self.purpose = "leave"  # which gives up nothing that a peer may be about to begin
        self.abandon()
        self._store = None

    def gather(self, row: bytes, *, width: int, phase: str) -> list[bytes]:
        """Give one row to every rank and get all rows: see `Rows.gather`."""
        if len(row) > width - 4:
            raise ValueError(f"row of {len(row)} bytes does not fit {width}")
        row, width = self.seal.sealed(row), width + self.seal.num_bytes
        told = (len(row).to_bytes(4, "little") + row).ljust(width, b"\0")
        mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        rows = [
            torch.empty(width, dtype=torch.uint8, device="cpu") for _ in range(self.rendezvous.world_size)
        ]
        self._wait(lambda group: group.allgather([rows], [mine]), phase)
        blobs = [bytes(one.numpy()) for one in rows]
        sealed = [blob[4 : 4 + int.from_bytes(blob[:4], "little")] for blob in blobs]
        return self._opened(dict(enumerate(sealed)), phase)

    def broadcast(self, blob: bytes, num_bytes: int, source: int, *, phase: str) -> bytes:
        """Give the `num_bytes` of `blob`, which only the rank `source` has to have, to all. Raises PeerError.

        Collective: yes, over all transfer ranks.
        """
        mine = self.seal.sealed(blob)
        buffer = torch.empty(num_bytes + self.seal.num_bytes, dtype=torch.uint8, device="cpu")
        if source == self.seat and mine:
            buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._wait(lambda group: group.broadcast(buffer, source), phase)
        return self._opened({source: bytes(buffer.numpy())}, phase)[0]

    def _opened(self, told: Mapping[int, bytes], phase: str) -> list[bytes]:
        """What ranks told, by seat, without their seals. Leaves the epoch if one is wrong."""
        rows = {seat: self.seal.opened(seat, blob) for seat, blob in told.items()}
        wrong = [seat for seat, row in rows.items() if row is None]
        if wrong:
            self.abandon()
            raise PeerError(
                f"{self.me}: what {self.rendezvous.name_seats(wrong)} told in phase {phase!r} does not bear "
                "the seal of this session: it was changed on the way"
            )
        return [row for row in rows.values() if row is not None]

    def send(self, payload: torch.Tensor, peer: int, *, phase: str) -> None:
        """Send a contiguous uint8 tensor to `peer`, which calls `receive`. Raises PeerError."""
        self._wait(lambda group: group.send([payload], peer, 0), phase, peer)

    def receive(self, num_bytes: int, peer: int, *, phase: str) -> torch.Tensor:
        """Receive exactly `num_bytes` from `peer` into a new uint8 tensor. Raises PeerError.

        The size must be agreed before: Gloo takes a short message for a long one without a word.

        `peer` must call `send`.
        """
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._wait(lambda group: group.recv([buffer], peer, 0), phase, peer)
        return buffer

    def send_weights(self, tensors: Weights, plan: TransferPlan, *, phase: str) -> None:
        """Whole weights to the engine ranks of `plan`, which call `receive_weights`. Raises PeerError."""
        self._transfer(send_batch, tensors, plan, phase)

    def receive_weights(self, tensors: Weights, plan: TransferPlan, *, phase: str) -> None:
        """The receiving half of `send_weights`: writes into `tensors` in place. Raises PeerError."""
        self._transfer(receive_batch, tensors, plan, phase)

    def _transfer(self, begin: Begin, tensors: Weights, plan: TransferPlan, phase: str) -> None:
        self._mark(phase)
        widest = max(self.rendezvous.num_engine_ranks, self.rendezvous.num_trainer_ranks)
        group, works, end = None, list[Any](), None
        try:
            group = self._weights_group or self._usable_group()
            for batch in dense_batches(plan, max(1, MAX_OPERATIONS // widest), self._bucket_bytes):
                if group.supports_coalescing:  # NCCL: one launch for the whole batch
                    group._start_coalescing()  # noqa: SLF001 - its only name
                works, end = begin(group, tensors, batch)
                if group.supports_coalescing:
                    works = [group._end_coalescing()]  # noqa: SLF001
                for work in works:
                    work.wait(self._timeout)
                if self._device.type != "cpu":
                    torch.accelerator.synchronize(self._device)
                end()
        except Exception as error:
            group = work = end = None
            works = []  # they would keep the sockets open, for as long as somebody keeps the error
            raise self._peer_error(phase, None, error) from error

    def _wait(self, start: Callable[[Any], Any], phase: str, peer: int | None = None) -> None:
        self._mark(phase)
        try:
            work = start(self._usable_group())
            work.wait(self._connect_timeout if phase == "connect" else self._timeout)
        except Exception as error:  # whatever torch raises, this group is of no use any more
            work = None  # it would keep the sockets open
            raise self._peer_error(phase, peer, error) from error

    def _usable_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group

    def _peer_error(self, phase: str, peer: int | None, error: Exception) -> PeerError:
        late = [rank for rank in range(self.rendezvous.world_size) if not self._reached(rank, phase)]
        if peer is not None and peer not in late:
            late = [peer]
        traceback.clear_frames(error.__traceback__)  # peers see sockets close once nothing holds the group
        self.abandon()
        who = self.rendezvous.name_seats(late) if late else "a peer"
        limit = self._timeout.total_seconds()
        return PeerError(
            f"{self.me} waited in phase {phase!r} for {who} (limit {limit:g} s): "
            f"{type(error).__name__}: {first_line(error)}"
        )

    def _mark(self, phase: str) -> None:
        """Leave a trace of the phase, here and for the peers' error messages."""
        if not self.trace or self.trace[-1] != phase:
            self.trace.append(phase)
            del self.trace[:-64]
            if self._store is not None:
                with suppress(PeerError):
                    self._store.put(f"{self.epoch}/at/{self.seat}", phase)

    def _reached(self, rank: int, phase: str) -> bool:
        with suppress(PeerError):
            return self._store is not None and self._store.find(f"{self.epoch}/at/{rank}") == phase
        return False

    def _open_store(self) -> BoundedStore:
        if self._store is None or self._store.broken:
            self._store = BoundedStore(self.rendezvous, self._connect_timeout)
        return self._store

    def _open_epoch_after(self, epoch: int, cause: str) -> None:
        phase = self.trace[-1] if self.trace else "connect"
        who = f"{self.me} (last in phase {phase!r})"
        self._open_store().open_epoch(epoch + 1, f"{cause}\n{self.seat}\n{who}")

    def _new_group(self, kind: str) -> Any:
        seat, size = self.seat, self.rendezvous.world_size
        store = PrefixStore(f"{self.epoch}/{kind}", self._open_store().raw)
        group: Any
        if kind == "gloo":
            group = c10d.ProcessGroupGloo(store, seat, size, timeout=self._connect_timeout)
        else:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout  # noqa: SLF001 - its only name
            group = c10d.ProcessGroupNCCL(store, seat, size, options)
        group._set_sequence_number_for_group()  # noqa: SLF001 - as torch does for each group that it makes
        return group

    def _leave(self) -> None:
        for group in (self._group, self._weights_group):
            if group is not None:
                with suppress(Exception):  # closing a broken group may complain; it is gone either way
                    group.shutdown()
        self._group = self._weights_group = None
