"""The lines of pairs: what one trainer rank owns and one engine rank stores, in the order of the sender.

Both ends compute the same line from their descriptions, and compare its digest. The lines of all senders to
one engine rank together hold each of its elements exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from awex_delta.lines.boxes import Boxes
from awex_delta.lines.space import Space
from awex_delta.plan.columns import Ints
from awex_delta.plan.describe import (
    WIRE_DTYPES,
    EngineColumns,
    EngineSpec,
    TrainerSpec,
    numels,
)
from awex_delta.plan.overlaps import Cut, clip, cut_overlaps, padded, ranges
from awex_delta.plan.shards import Copies, Shard, source_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """What one sender gives one receiver in one wire dtype: a line of elements.

    sender, receiver: transfer ranks.
    numel: elements of the line.
    whole: how many elements, at the begin of the line, travel whole in every delta.
    sent: boxes from the sender's line to this one.
    stored: boxes from this line to the engine's line.
    digest: 64 bits of a hash of names and boxes, the same at both ends.
    """

    sender: int
    receiver: int
    dtype: torch.dtype
    numel: int
    whole: int
    sent: Boxes
    stored: Boxes
    digest: int


def sender_line(trainer: TrainerSpec) -> Space:
    """The sender's line: the trainer's line, then the HF tensors that travel whole."""
    layout = trainer.layout
    sizes, whole = numels(layout.shapes), np.flatnonzero(~layout.sparse)
    return Space.of(
        [
            *((layout.keys[p], int(layout.numels[p])) for p in _owned_params(trainer).tolist()),
            *((layout.names[o], int(sizes[o])) for o in whole.tolist()),
        ]
    )


def engine_line(layout: EngineColumns) -> Space:
    """The engine's line: the tensors that it stores, in the order of its description."""
    sizes = numels(layout.shapes)
    return Space.of((layout.names[place], int(sizes[place])) for place in layout.stored())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SenderSide:
    """A trainer rank with what all its pairs need to know of its line.

    starts: int64 [P], where parameters begin in it; 0 for those outside of it.
    runs: int64 [4, R] as `TrainerColumns.runs`, ascending by HF tensor; one that travels whole is a
        single run from its place in the sender's line.
    begins: int64 [O + 1], the first run of each HF tensor.
    """

    trainer: TrainerSpec
    starts: Ints
    runs: Ints
    begins: Ints


def sender_side(trainer: TrainerSpec) -> SenderSide:
    """Make the tables of one trainer rank."""
    layout = trainer.layout
    owned, line = _owned_params(trainer), sender_line(trainer).starts.numpy()
    starts = np.zeros(len(layout.keys), np.int64)
    starts[owned] = line[: owned.size]
    whole = np.flatnonzero(~layout.sparse)
    sizes = numels(layout.shapes)[whole]
    beside = np.stack([whole, line[owned.size : -1], np.zeros_like(whole), sizes])
    runs = np.concatenate([layout.runs, beside], axis=1)
    runs = runs[:, np.argsort(runs[0], kind="stable")]
    begins = np.searchsorted(runs[0], np.arange(len(layout.names) + 1))
    return SenderSide(trainer=trainer, starts=starts, runs=runs, begins=begins)


def engine_starts(layout: EngineColumns) -> Ints:
    """Where each tensor begins in the engine's line, int64 [T]; 0 if it has no storage of its own."""
    starts = np.zeros(len(layout.names), np.int64)
    starts[layout.stored()] = engine_line(layout).starts.numpy()[:-1]
    return starts


def pairs_between(
    side: SenderSide,
    shards: Sequence[Mapping[str, Shard]],
    engine: EngineSpec,
    starts: Ints,
    copies: Copies,
    num_engines: int,
) -> list[Pair]:
    """The lines between one trainer rank and one engine rank, one for each wire dtype.

    Args:
        side, engine: the two ranks.
        starts: of the engine, see `engine_starts`.
        shards: what each trainer rank holds, at least for the tensors that both hold.
        copies: see `copies_of`; for the same tensors.
        num_engines: engine ranks in the world.
    """
    trainer = side.trainer
    layout, held = trainer.layout, engine.layout
    outputs = np.array(_served(trainer, shards, engine, copies), np.int64)
    if not outputs.size:
        return []
    tensors = np.array([held.places[layout.names[o]] for o in outputs.tolist()], np.int64)
    mine = shards[trainer.rank]
    num_dims = max(len(layout.shapes[o]) for o in outputs.tolist())
    sent = (
        [mine[layout.names[o]].offset for o in outputs.tolist()],
        [layout.shapes[o] for o in outputs.tolist()],
    )
    stored = [held.global_offsets[t] for t in tensors.tolist()], [held.shapes[t] for t in tensors.tolist()]
    cut = cut_overlaps(
        (padded(tuple(sent[0]), num_dims, 0), padded(tuple(sent[1]), num_dims, 1)),
        (padded(tuple(stored[0]), num_dims, 0), padded(tuple(stored[1]), num_dims, 1)),
    )
    cut = _in_lines(cut, side, outputs)
    cut = replace(cut, stored=cut.stored + starts[tensors[cut.overlap]])
    dtypes = np.array([held.dtypes[t] for t in tensors.tolist()])
    whole = ~layout.sparse[outputs]
    return [
        _pair(cut.take(dtypes[cut.overlap] == name), whole, WIRE_DTYPES[name], trainer, engine, num_engines)
        for name in sorted(set(dtypes[cut.overlap].tolist()))
    ]


def _served(
    trainer: TrainerSpec, shards: Sequence[Mapping[str, Shard]], engine: EngineSpec, copies: Copies
) -> list[int]:
    """HF tensors that the engine rank gets from this rank: it is their source, or owns part of the source."""
    layout, found = trainer.layout, list[int]()
    for output, (name, param) in enumerate(zip(layout.names, layout.params.tolist(), strict=True)):
        if engine.rank not in copies.get(name, {}):
            continue
        group = trainer.owners[param] if layout.sparse[output] else ()
        for rank in group or (trainer.rank,):
            shard = shards[rank][name]
            if shard.replica == source_of(name, shard.num_replicas):
                found.append(output)
                break
    return found


def _in_lines(cut: Cut, side: SenderSide, outputs: Ints) -> Cut:
    """Turn boxes of HF tensors into boxes of the sender's line, cut by runs and to what the rank owns."""
    layout, begins = side.trainer.layout, side.begins
    _, source, target, length = side.runs
    of_box = outputs[cut.overlap]
    count = (begins[1:] - begins[:-1])[of_box]
    run = ranges(begins[of_box], count)
    cut = cut.take(np.repeat(np.arange(len(of_box)), count))
    of_box = np.repeat(of_box, count)
    param = layout.params[of_box]
    sparse = layout.sparse[of_box]
    start = np.where(sparse, side.starts[param], 0)
    low, high = start + source[run], start + source[run] + length[run]
    owned = side.trainer.owned[:, param] + start
    low = np.where(sparse, np.maximum(low, owned[0]), low)
    high = np.where(sparse, np.minimum(high, owned[1]), high)
    return clip(replace(cut, sent=cut.sent + start + source[run] - target[run]), low, high)


def _pair(
    cut: Cut,
    whole: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    dtype: torch.dtype,
    trainer: TrainerSpec,
    engine: EngineSpec,
    num_engines: int,
) -> Pair:
    order = np.lexsort((cut.sent, ~whole[cut.overlap]))
    cut = cut.take(order)
    sizes = cut.rows * cut.width
    line = np.cumsum(sizes) - sizes
    columns = (cut.sent, cut.sent_pitch, cut.stored, cut.stored_pitch, cut.rows, cut.width)
    sent, sent_pitch, stored, stored_pitch, rows, width = (
        torch.from_numpy(np.ascontiguousarray(column)) for column in columns
    )
    compact = torch.from_numpy(line)
    names = "\n".join((str(dtype), *trainer.layout.names, *engine.layout.names)).encode()
    digest = xxhash.xxh3_64(names)
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return Pair(
        sender=num_engines + trainer.rank,
        receiver=engine.rank,
        dtype=dtype,
        numel=int(sizes.sum()),
        whole=int(sizes[whole[cut.overlap]].sum()),
        sent=Boxes(
            source=sent, source_pitch=sent_pitch, target=compact, target_pitch=width, rows=rows, width=width
        ),
        stored=Boxes(
            source=compact,
            source_pitch=width,
            target=stored,
            target_pitch=stored_pitch,
            rows=rows,
            width=width,
        ),
        digest=digest.intdigest(),
    )


def _owned_params(trainer: TrainerSpec) -> Ints:
    """Parameters that make the trainer's line, ascending."""
    return np.array([param for param, group in enumerate(trainer.owners) if group], np.int64)
