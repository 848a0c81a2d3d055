"""How ranks that have met learn of each other: descriptions, then plans, compared at both ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from awex_delta.errors import ConnectError, LayoutError, LockstepError, OwnershipError
from awex_delta.plan.announce import Announced, announced, dump_failure, dump_spec, load_layout
from awex_delta.plan.describe import WIRE_DTYPES, Spec, dtype_name
from awex_delta.plan.pairs import Pair
from awex_delta.plan.rank import Plan
from awex_delta.plan.world import World, make_world
from awex_delta.protocol.comm import Comm

_Name = Annotated[str, Field(pattern=f"^({'|'.join(WIRE_DTYPES)})$")]
_Line = tuple[NonNegativeInt, _Name, NonNegativeInt, NonNegativeInt, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """What one rank says of its plan: its lines, and bytes of a full sync; or why it has none."""

    lines: tuple[_Line, ...] = ()
    bytes: int = 0
    error: str = ""
    text: str = ""


_WORD = TypeAdapter(_Word)
_CONNECT_ERRORS = {kind.__name__: kind for kind in (ConnectError, LayoutError, OwnershipError)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Met:
    """What all ranks agreed on.

    world: all descriptions.
    plan: this rank's own transfers.
    context: whether every rank has what it takes to use an encoding that reads the weights.
    dtypes: the wire dtypes of all lines, sorted by name. An update has one round for each.
    full_bytes: payload of a full sync over all ranks.
    limits: elements of each line, by sender, receiver and dtype. No line needs more frames than that.
    """

    world: World
    plan: Plan
    context: bool
    dtypes: tuple[torch.dtype, ...]
    full_bytes: int
    limits: Mapping[tuple[int, int, torch.dtype], int]


def meet(
    comm: Comm, describe: Callable[[], Spec], make_plan: Callable[[World], Plan], *, paired: bool
) -> Met:
    """Exchange descriptions, plan this rank's transfers, and compare each line at both of its ends.

    Args:
        comm: connected.
        describe: gives this rank's description.
        make_plan: plans this rank's transfers.
        paired: whether the lines lead to other ranks of the world, which compute them, too.

    Raises:
        ConnectError: a rank cannot describe itself, or ranks do not fit together. The same on all ranks.
        LockstepError: ranks computed different lines.
        PeerError: a rank did not answer.

    Collective: yes, over all transfer ranks.
    """
    specs = _exchange(comm, describe)
    num_engines = comm.rendezvous.num_engine_ranks
    plan, cause = None, None
    try:
        world = make_world(specs, num_engines)
        plan = make_plan(world)
        lines = tuple(_told(peer, pair) for (peer, _), pair in plan.pairs.items()) if paired else ()
        counts = comm.seat < num_engines or not paired
        word = _Word(lines=lines, bytes=plan.dense_bytes if counts else 0)
    except Exception as error:  # noqa: BLE001 - all ranks must hear of it, and raise the same
        word, cause = _Word(error=type(error).__name__, text=str(error)), error
    words = _words(comm, word)
    _raise_first(comm, words, cause)
    if plan is None:
        raise LockstepError("this rank has no plan, and nobody was told why")
    return Met(
        world=world,
        plan=plan,
        context=all(spec.context for spec in specs),
        dtypes=tuple(WIRE_DTYPES[name] for name in sorted({line[1] for one in words for line in one.lines})),
        full_bytes=sum(one.bytes for one in words),
        limits=_compared(words, num_engines),
    )


def _exchange(comm: Comm, describe: Callable[[], Spec]) -> list[Spec]:
    """The descriptions of all ranks; each layout is sent by the first rank that has it."""
    cause = None
    try:
        mine, layout = dump_spec(describe())
    except Exception as error:  # noqa: BLE001 - all ranks must hear of it, whatever an adapter raises
        cause = error
        mine, layout = dump_failure(f"{type(error).__name__}: {error}"), b""
    told = [announced(seat, blob) for seat, blob in enumerate(comm.gather_bytes(mine, phase="describe"))]
    place = comm.rendezvous.place
    failed = [f"{place(seat)}: {one}" for seat, one in enumerate(told) if isinstance(one, str)]
    if failed:
        raise ConnectError("; ".join(failed)) from cause
    ranks = [one for one in told if isinstance(one, Announced)]
    layouts = {}
    for seat, one in enumerate(ranks):
        if one.layout not in layouts:
            blob = comm.broadcast(layout, one.layout_bytes, seat, phase="layouts")
            layouts[one.layout] = load_layout(one.header.role, blob, one.layout)
    return [one.complete(layouts) for one in ranks]


def _words(comm: Comm, mine: _Word) -> list[_Word]:
    """What all ranks say of their plans. Raises LockstepError if one of them says anything else."""
    found = []
    for seat, blob in enumerate(comm.gather_bytes(_WORD.dump_json(mine), phase="plan")):
        try:
            found.append(_WORD.validate_json(blob))
        except ValidationError as error:
            cause = error.errors(include_url=False)[0]["msg"]
            place = comm.rendezvous.place(seat)
            raise LockstepError(
                f"{place} sent no readable plan (do all run the same release?): {cause}"
            ) from error
    return found


def _raise_first(comm: Comm, words: Sequence[_Word], cause: Exception | None) -> None:
    """Raise the error of the first rank that could not plan, the same on all ranks.

    Trainer ranks come first: of a fault in what they own, engine ranks see only that elements are missing.
    """
    num_engines = comm.rendezvous.num_engine_ranks
    for seat in (*range(num_engines, len(words)), *range(num_engines)):
        word = words[seat]
        if word.error:
            kind = _CONNECT_ERRORS.get(word.error)
            place = comm.rendezvous.place(seat)
            text = word.text if kind else f"{place}: {word.error}: {word.text}"
            raise (kind or ConnectError)(text) from cause


def _compared(words: Sequence[_Word], num_engines: int) -> Mapping[tuple[int, int, torch.dtype], int]:
    """Elements of each line, which both ends computed alike. Raises LockstepError if they did not."""
    ends: list[dict[tuple[int, str], list[Any]]] = [
        {(peer, name): rest for peer, name, *rest in word.lines} for word in words
    ]
    for seat, lines in enumerate(ends):
        for (peer, name), line in lines.items():
            if peer >= len(ends) or ends[peer].get((seat, name)) != line:
                raise LockstepError("ranks computed different lines: do all run the same versions?")
    return {
        (seat, peer, WIRE_DTYPES[name]): line[0]
        for seat, lines in enumerate(ends[num_engines:], start=num_engines)
        for (peer, name), line in lines.items()
    }


def _told(peer: int, pair: Pair) -> tuple[int, str, int, int, str]:
    """What both ends of a line compare."""
    return peer, dtype_name(pair.dtype), pair.numel, pair.whole, f"{pair.digest:016x}"
