"""Every collective, every send and receive, every timeout.

One `Comm` is one rank's seat in the transfer world: engine ranks first (0 .. I-1), then trainer ranks
(I .. I+T-1), as AWEX counts them. Its Gloo group lives for one *epoch*. A group in which a wait failed
is never used again: the rank closes it, opens the next epoch in the store, and every rank meets there
at its next update. A restarted process does the same, which is how it joins again.

Keys in the store, below the rendezvous name:

    epoch                   the current epoch, moved by compare-and-set only
    EPOCH/cause             what a rank gave up as it opened the epoch, such as "version 7"; then who
    EPOCH/seat/RANK         who sits there, see `Seal.ticket`; a second life of the rank opens a new epoch
    EPOCH/at/RANK           the phase that the rank entered last, so an error can name who is missing
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from awex.transfer.nccl_comm import batch_send_recv, nccl_build_recv_ops, nccl_build_send_ops
from awex.transfer.transfer_plan import TransferPlan
from awex.util.process_group import init_custom_process_group
from torch._C._distributed_c10d import PrefixStore

from awex_delta.errors import ConnectError, PeerError
from awex_delta.protocol.rendezvous import Rendezvous, first_line
from awex_delta.protocol.rows import Rows
from awex_delta.protocol.seal import Seal
from awex_delta.protocol.store import BoundedStore
from awex_delta.settings.agreed import DeltaSettings

logger = logging.getLogger(__name__)


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
        self._me = rendezvous.place(seat)
        self.epoch = -1
        self.purpose = "connect"
        self.trace: list[str] = []
        self.has_met = False
        self.seal = Seal(rendezvous, seat, settings.secret_source)
        self._device = device or torch.device("cpu")
        self._timeout = timedelta(seconds=settings.timeout_seconds)
        self._connect_timeout = timedelta(seconds=settings.connect_timeout_seconds)
        self._store: BoundedStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._weights_group: dist.ProcessGroup | None = None

    def begin(self, purpose: str) -> bool:
        """Begin a purpose, such as "version 7", in the current epoch; False if `connect` is due.

        The group of an earlier epoch is left.

        Raises:
            PeerError: another rank already gave up this same purpose, so nobody would answer. It is said
                once; the next call finds the way to the new epoch.
        """
        self.purpose = purpose
        current = self._read_epoch()
        if current == self.epoch:
            return self._group is not None
        seen, self.epoch = self.epoch, current
        self._leave()
        given_up, _, who = (self._open_store().find(f"{current}/cause") or "").partition("\n")
        if seen >= 0 and given_up == purpose:
            raise PeerError(f"{self._me}: {purpose} was given up by {who} before this rank began it")
        return False

    def absent_engines(self) -> tuple[int, ...]:
        """Engine ranks that are neither connected with this rank nor waiting to be. Raises PeerError,
        and ConnectError, where the store does not answer.
        """
        epoch = self._read_epoch()
        if self._group is not None and epoch == self.epoch:
            return ()
        store = self._open_store()
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
            self._group = self._new_group("gloo", self._connect_timeout)
            self.seal.meet(self.epoch, self.gather)
            # The wait for stragglers above is longer than any wait inside an update.
            c10d._set_pg_timeout(self._timeout, self._group)  # noqa: SLF001 - torch has no public name for it
            if self._device.type == "cuda":
                self._weights_group = self._new_group("nccl", self._timeout)
            self.has_met = True
        except ConnectError:
            self.abandon()
            raise
        except (RuntimeError, PeerError) as error:
            seats = range(self.rendezvous.world_size)
            missing = [seat for seat in seats if not self._sits(store, seat, self.epoch)]
            self._open_epoch_after(self.epoch, self.purpose)  # whoever comes late finds no half-open group
            self.abandon()
            waited = self._connect_timeout.total_seconds()
            raise ConnectError(
                f"{self._me}: {self.rendezvous.name_seats(missing)} did not arrive within {waited:g} s "
                f"(is enable_delta_weight_update on on both sides?): {first_line(error)}"
            ) from error

    def _take_seat(self, store: BoundedStore) -> int:
        """Sit down in the current epoch, or in a new one if this seat is taken. Returns the epoch."""
        deadline, stranger = time.monotonic() + self._connect_timeout.total_seconds(), ""
        while True:
            epoch = self._read_epoch()
            ticket = self.seal.new_ticket(epoch)
            found = store.swap(f"{epoch}/seat/{self.seat}", "", ticket)
            if found == ticket:
                return epoch
            if not stranger and not self.seal.is_ticket(self.seat, epoch, found):
                stranger = f"; in epoch {epoch} somebody without this secret sat there, as {found[:80]!r}"
                logger.warning("%s: this seat was taken%s", self._me, stranger)
            if time.monotonic() > deadline:
                raise ConnectError(f"{self._me}: this seat was taken again and again{stranger}")
            # Not in the name of this rank's purpose: the peers have not given anything up.
            self._open_epoch_after(epoch, f"a new life of seat {self.seat}")

    def _sits(self, store: BoundedStore, seat: int, epoch: int) -> bool:
        """Whether a rank of this pairing took a seat in an epoch."""
        return self.seal.is_ticket(seat, epoch, store.find(f"{epoch}/seat/{seat}"))

    def abandon(self) -> None:
        """Give this epoch up after a failed wait: close the group, let all ranks meet in the next one.

        Peers that wait in the group fail at once.
        """
        if self._store is not None and not self._store.broken and self._group is not None:
            with suppress(PeerError, ConnectError):  # a store that is gone cannot be told
                self._open_epoch_after(self.epoch, self.purpose)
        self.epoch = -1
        self._leave()

    def close(self) -> None:
        """Leave for good. Peers that still wait here fail at once."""
        self.abandon()
        self._store = None

    def gather(self, row: bytes, *, width: int, phase: str) -> list[bytes]:
        """Give one row to every rank and get all rows: see `Rows.gather`."""
        if len(row) > width - 4:
            raise ValueError(f"row of {len(row)} bytes does not fit {width}")
        row, width = self.seal.sealed(row), width + self.seal.num_bytes
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[:4] = torch.tensor(list(len(row).to_bytes(4, "little")), dtype=torch.uint8)
        if row:
            mine[4 : 4 + len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = [torch.empty(width, dtype=torch.uint8) for _ in range(self.rendezvous.world_size)]
        self._wait(lambda group: dist.all_gather(rows, mine, group=group, async_op=True), phase)
        blobs = [bytes(one.numpy()) for one in rows]
        told = [blob[4 : 4 + int.from_bytes(blob[:4], "little")] for blob in blobs]
        return self._opened(dict(enumerate(told)), phase)

    def broadcast(self, blob: bytes, num_bytes: int, source: int, *, phase: str) -> bytes:
        """Give the `num_bytes` of `blob`, which only the rank `source` has to have, to all. Raises PeerError.

        Collective: yes, over all transfer ranks.
        """
        mine = self.seal.sealed(blob)
        buffer = torch.empty(num_bytes + self.seal.num_bytes, dtype=torch.uint8)
        if source == self.seat and mine:
            buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._wait(lambda group: dist.broadcast(buffer, source, group=group, async_op=True), phase)
        return self._opened({source: bytes(buffer.numpy())}, phase)[0]

    def _opened(self, told: Mapping[int, bytes], phase: str) -> list[bytes]:
        """What ranks told, by seat, without their seals. Leaves the epoch if one is wrong."""
        rows = {seat: self.seal.opened(seat, blob) for seat, blob in told.items()}
        wrong = [seat for seat, row in rows.items() if row is None]
        if wrong:
            self.abandon()
            raise PeerError(
                f"{self._me}: what {self.rendezvous.name_seats(wrong)} told in phase {phase!r} does not bear "
                "the seal of this session: it was changed on the way"
            )
        return [row for row in rows.values() if row is not None]

    def send(self, payload: torch.Tensor, peer: int, *, phase: str) -> None:
        """Send a contiguous uint8 tensor to `peer`, which calls `receive`. Raises PeerError."""
        self._wait(lambda group: dist.isend(payload, peer, group=group), phase, peer)

    def receive(self, num_bytes: int, peer: int, *, phase: str) -> torch.Tensor:
        """Receive exactly `num_bytes` from `peer` into a new uint8 tensor. Raises PeerError.

        The size must be agreed before: Gloo takes a short message for a long one without a word.

        `peer` must call `send`.
        """
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._wait(lambda group: dist.irecv(buffer, peer, group=group), phase, peer)
        return buffer

    def send_weights(self, tensors: dict[str, torch.Tensor], plan: TransferPlan, *, phase: str) -> None:
        """AWEX's dense path to the engine ranks of `plan`, which call `receive_weights`. Raises PeerError."""
        self._dense(lambda group: nccl_build_send_ops(tensors, plan, group, copy_rank=None)[0], (), phase)

    def receive_weights(self, tensors: dict[str, torch.Tensor], plan: TransferPlan, *, phase: str) -> None:
        """AWEX's dense path, the receiving half: writes into `tensors` in place. Raises PeerError."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def build(group: dist.ProcessGroup) -> list[dist.P2POp]:
            ops, pairs, _ = nccl_build_recv_ops(tensors, plan, group)
            copies.extend(pairs)
            return list(ops)

        self._dense(build, copies, phase)

    def _dense(
        self,
        build: Callable[[dist.ProcessGroup], list[dist.P2POp]],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        phase: str,
    ) -> None:
        self._mark(phase)
        ops: list[dist.P2POp] = []
        try:
            ops = build(self._usable_group(weights=True))
            # AWEX itself would wait as long as the group was given to connect.
            for work in batch_send_recv(send_ops=ops, recv_ops=[], use_group=True, blocking=False):
                work.wait(self._timeout)
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
        except RuntimeError as error:
            work, ops = None, []  # they would keep the sockets open, for as long as somebody keeps the error
            raise self._peer_error(phase, None, error) from error
        for target, received in copies:
            target.copy_(received)

    def _wait(
        self, start: Callable[[dist.ProcessGroup], dist.Work | None], phase: str, peer: int | None = None
    ) -> None:
        self._mark(phase)
        try:
            work = start(self._usable_group())
            if work is not None:
                work.wait(self._connect_timeout if phase == "connect" else self._timeout)
        except RuntimeError as error:
            work = None  # it would keep the sockets open
            raise self._peer_error(phase, peer, error) from error

    def _usable_group(self, *, weights: bool = False) -> dist.ProcessGroup:
        group = self._weights_group or self._group if weights else self._group
        if group is None:
            raise RuntimeError("the group is closed")
        return group

    def _peer_error(self, phase: str, peer: int | None, error: Exception) -> PeerError:
        late = [rank for rank in range(self.rendezvous.world_size) if not self._reached(rank, phase)]
        if peer is not None and peer not in late:
            late = [peer]
        traceback.clear_frames(error.__traceback__)  # peers see sockets close once nothing holds the group
        self.abandon()
        who = self.rendezvous.name_seats(late) if late else "a peer"
        limit = self._timeout.total_seconds()
        return PeerError(
            f"{self._me} waited in phase {phase!r} for {who} (limit {limit:g} s): {first_line(error)}"
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

    def _read_epoch(self) -> int:
        found = self._open_store().swap("epoch", "", "0")
        if not re.fullmatch("[0-9]{1,18}", found):
            raise ConnectError(f"{self._me}: the store holds {found[:80]!r} as its epoch: start another one")
        return int(found)

    def _open_epoch_after(self, epoch: int, cause: str) -> None:
        store = self._open_store()
        phase = self.trace[-1] if self.trace else "connect"
        store.swap(f"{epoch + 1}/cause", "", f"{cause}\n{self._me} (last in phase {phase!r})")
        store.swap("epoch", str(epoch), str(epoch + 1))

    def _new_group(self, backend: str, timeout: timedelta) -> dist.ProcessGroup:
        group: dist.ProcessGroup = init_custom_process_group(
            backend=backend,
            store=PrefixStore(f"{self.epoch}/{backend}", self._open_store().raw),
            world_size=self.rendezvous.world_size,
            rank=self.seat,
            group_name=f"{self.rendezvous.name}/{self.epoch}/{backend}",
            timeout=timeout,
        )
        return group

    def _leave(self) -> None:
        for group in (self._group, self._weights_group):
            if group is not None:
                with suppress(RuntimeError):  # closing a broken group may complain; it is gone either way
                    dist.destroy_process_group(group)
        self._group = self._weights_group = None
