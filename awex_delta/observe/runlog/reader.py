"""Reading RUN.jsonl: all lives of a training, the counts of all its ranks added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from awex_delta.errors import ConfigError
from awex_delta.observe.runlog.writer import Part, RunHeader, UpdateLine, rank_path
from awex_delta.settings.arguments import require

_LINE: TypeAdapter[RunHeader | UpdateLine] = TypeAdapter(
    Annotated[RunHeader | UpdateLine, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What a RUN.jsonl holds.

    headers: one for each life of the training; at least one.
    updates: in the order in which they were attempted.
    notes: what a reader should know, such as a last line that was cut short.
    file: name of the file; none where the run was not read from one.
    """

    headers: tuple[RunHeader, ...]
    updates: tuple[UpdateLine, ...]
    notes: tuple[str, ...] = ()
    file: str = ""


def read_run(path: str | Path) -> RunHistory:
    """Read a RUN.jsonl, rank 0's file, and the files of the other ranks beside it.

    A line that was cut short, because the training was killed while it wrote, is left out and noted. Raises
    ConfigError, which names file and line, if there is no such file, or a line is none of this format.
    """
    require((str, Path), "the path of a RUN.jsonl", path=path)
    path = Path(path)
    headers, updates, notes = _read_file(path)
    wanted, found = max(header.num_ranks for header in headers), [0]
    parts = {place: list(line.changed_by) for place, line in _places(updates)}
    for rank in range(1, wanted):
        other = rank_path(path, rank)
        if not other.is_file():
            continue
        found.append(rank)
        _, others, torn = _read_file(other)
        notes += torn
        for place, line in _places(others):
            parts.setdefault(place, []).extend(line.changed_by)
    merged = tuple(
        line.model_copy(update={"changed_by": _sum(parts[place])}) for place, line in _places(updates)
    )
    if len(found) < wanted and any(line.changed_by for line in merged):
        notes.append(
            f"Counts by layer and kind are those of {len(found)} of {wanted} trainer ranks: "
            f"put the other files ({rank_path(path, wanted - 1).name}, …) beside {path.name}."
        )
    return RunHistory(headers=tuple(headers), updates=merged, notes=tuple(notes), file=path.name)


def _places(
    lines: Sequence[tuple[int, UpdateLine]],
) -> Iterator[tuple[tuple[int, int, bool, int], UpdateLine]]:
    """Each update by life, version, whether it committed, and how often that was so before."""
    seen: Counter[tuple[int, int, bool]] = Counter()
    for life, line in lines:
        place = (life, line.version, line.kind == "aborted")
        yield (*place, seen[place]), line
        seen[place] += 1


def _sum(parts: Iterable[Part]) -> tuple[Part, ...]:
    changed: Counter[tuple[int | None, str]] = Counter()
    owned: Counter[tuple[int | None, str]] = Counter()
    for part in parts:
        changed[part.layer, part.kind] += part.changed
        owned[part.layer, part.kind] += part.owned
    return tuple(Part(layer=key[0], kind=key[1], changed=changed[key], owned=owned[key]) for key in owned)


def _read_file(path: Path) -> tuple[list[RunHeader], list[tuple[int, UpdateLine]], list[str]]:
    """Headers, updates with the number of their life, and notes."""
    lines = _parse(path)
    headers: list[RunHeader] = []
    updates: list[tuple[int, UpdateLine]] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, RunHeader):
            headers.append(line)
        elif isinstance(line, UpdateLine):
            updates.append((len(headers), line))
        elif number == len(lines) or isinstance(lines[number], RunHeader):
            notes.append(
                f"{path.name}, line {number}, was cut short and is left out: the training was killed."
            )
        else:
            raise ConfigError(f"{path}, line {number}: {line}; repair the line or drop it")
    if not headers or not isinstance(lines[0], RunHeader):
        raise ConfigError(f"{path}: it does not begin with a header; give a file that RunLog wrote")
    return headers, updates, notes


def _parse(path: Path) -> list[RunHeader | UpdateLine | str]:
    """The lines of a file; where one is not of this format, the reason."""
    try:
        # Not by splitlines(), which also cuts at characters that JSON leaves as they are.
        texts = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give a file that RunLog wrote"
        ) from error
    parsed: list[RunHeader | UpdateLine | str] = []
    for text in texts:
        try:
            parsed.append(_LINE.validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            parsed.append(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))
    return parsed
