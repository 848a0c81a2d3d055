"""Frames between one sender and one receiver, bucket by bucket: one is packed while another travels, and one
is staged while the next arrives.

Before each frame goes its size, 8 bytes; a size of zero says that the sender could not pack it and that no
more will come from it. How many there will be, every rank knows from the round's agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from awex_delta.errors import LockstepError
from awex_delta.protocol.session import Session, Stopwatch

Pack = Callable[[], torch.Tensor]
"""Makes one frame, uint8 [n] on the CPU. Called on a thread of its own."""


def send_frames(
    session: Session, dtype: torch.dtype, outgoing: Mapping[int, Sequence[Pack]], watch: Stopwatch
) -> tuple[int, str]:
    """The sending half of one round. Holds at most two frames: one that is sent, one that is packed.

    Args:
        session: this rank's.
        dtype: wire dtype of the round.
        outgoing: what makes the frames, in order, by receiver.
        watch: waiting for a frame is booked as "encode", sending as "transfer".

    Returns:
        Bytes sent, and why a frame could not be packed (empty where all could).

    Raises:
        LockstepError, PeerError: the round cannot go on.

    Collective: yes, over all transfer ranks; then point to point.
    """
    session.exchange_counts(dtype, {receiver: len(frames) for receiver, frames in outgoing.items()})
    watch.lap("transfer")
    jobs = [
        (meeting.receiver, pack)
        for meeting in session.meetings
        if meeting.sender == session.comm.seat
        for pack in outgoing.get(meeting.receiver, ())
    ]
    num_bytes, failure, told = 0, "", set[int]()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="awex_delta-pack") as worker:
        for receiver, frame, problem in _packed_ahead(session, worker, jobs):
            failure = failure or problem
            watch.lap("encode")
            if receiver not in told:
                _send(session, frame, receiver, f"send {dtype}")
                num_bytes += 0 if frame is None else frame.numel()
            if frame is None:
                told.add(receiver)
            del frame
            watch.lap("transfer")
    return num_bytes, failure


def _packed_ahead(
    session: Session, worker: ThreadPoolExecutor, jobs: Sequence[tuple[int, Pack]]
) -> Iterator[tuple[int, torch.Tensor | None, str]]:
    """Receiver, frame and failure of each job, while the next is packed."""
    submitted = (worker.submit(session.attempt, None, pack) for _, pack in jobs)
    pending = next(submitted, None)
    for receiver, _ in jobs:
        frame, failure = pending.result() if pending is not None else (None, "")
        pending = next(submitted, None)
        yield receiver, frame, failure
        frame = None  # before the next one is waited for


def _send(session: Session, frame: torch.Tensor | None, receiver: int, phase: str) -> None:
    size = 0 if frame is None else frame.numel()
    session.comm.send(
        torch.tensor([size], dtype=torch.int64, device="cpu").view(torch.uint8), receiver, phase=phase
    )
    if frame is not None:
        session.comm.send(frame, receiver, phase=phase)


def receive_frames(
    session: Session, dtype: torch.dtype, stage: Callable[[int, torch.Tensor], None], watch: Stopwatch
) -> tuple[int, str]:
    """The receiving half of one round. Holds at most two frames: one that arrives, one that is staged;
    and what `stage` keeps of them.

    Args:
        session: this rank's.
        dtype: wire dtype of the round.
        stage: takes one frame of a sender, uint8 [n] on the CPU. Called in order, on a thread of its own.
            After it raised, the other frames are received and dropped.
        watch: receiving is booked as "transfer", waiting for `stage` as "stage".

    Returns:
        Bytes received, and why staging failed (empty where it did not).

    Raises:
        LockstepError, PeerError: the round cannot go on.

    Collective: yes, over all transfer ranks; then point to point.
    """
    matrix = session.exchange_counts(dtype, {})
    seat, num_bytes, failure = session.comm.seat, 0, ""
    pending: Future[tuple[None, str]] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="awex_delta-stage") as worker:
        for meeting in session.meetings:
            count = matrix[meeting.sender][seat] if meeting.receiver == seat else 0
            for _ in range(count):
                frame = _receive(session, meeting.sender, f"send {dtype}")
                watch.lap("transfer")
                failure = failure or (pending.result()[1] if pending is not None else "")
                watch.lap("stage")
                if frame is None:
                    break
                num_bytes += frame.numel()
                if not failure:
                    pending = worker.submit(session.attempt, None, _bind(stage, meeting.sender, frame))
                del frame
        failure = failure or (pending.result()[1] if pending is not None else "")
    watch.lap("stage")
    return num_bytes, failure


def _bind(stage: Callable[[int, torch.Tensor], None], sender: int, frame: torch.Tensor) -> Callable[[], None]:
    return lambda: stage(sender, frame)


def _receive(session: Session, sender: int, phase: str) -> torch.Tensor | None:
    """One frame; None where the sender gave up."""
    size = int(session.comm.receive(8, sender, phase=phase).view(torch.int64))
    limit = session.settings.bucket_bytes
    if not 0 <= size <= limit:  # it is on its way already, so only leaving helps
        session.comm.abandon()
        raise LockstepError(f"seat {sender} announces a frame of {size} bytes, but frames end at {limit}")
    return session.comm.receive(size, sender, phase=phase) if size else None
