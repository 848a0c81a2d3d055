"""Which versions bring a holder to which other one, and which may be removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from awex_delta.errors import DiskError, WireError
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.local import Marker
from awex_delta.folder.manifest import ForeignFormatError, Manifest, parse_manifest
from awex_delta.protocol.verdict import Kind

Held: TypeAlias = Manifest | Marker
"""What somebody holds exactly: a manifest, or what was kept of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A way to a version.

    links: versions to apply, in order; the first is a full one, or builds on what is held.
    problems: what is wrong with newer versions that cannot be reached.
    reachable: False where no version that was asked for can be reached.
    """

    links: tuple[Manifest, ...] = ()
    problems: tuple[str, ...] = ()
    reachable: bool = True


class Catalogue:
    """The manifests of a folder as they are now, each read when it is first asked for.

    Attributes:
        url: of the folder.
        foreign: what is wrong with one of another release, of those that were read; empty if there is none.
    """

    def __init__(self, folder: Folder) -> None:
        """List the versions."""
        self._folder = folder
        self.url = folder.url
        self._read: dict[int, Manifest | str] = {}
        self.versions = tuple(folder.versions())
        self.foreign = ""

    def get(self, version: int) -> Manifest | str | None:
        """The manifest, why it cannot be read, or None where the version does not exist."""
        if version not in self._read:
            try:
                name = version_name(version)
                text = self._folder.read(f"{name}/{INDEX}")
                self._read[version] = parse_manifest(text, version, f"{self._folder.url}/{name}")
            except FileNotFoundError:
                return None
            except (WireError, DiskError) as error:
                self._read[version] = str(error)
                self.foreign = str(error) if isinstance(error, ForeignFormatError) else self.foreign
        return self._read[version]


def find_chain(
    catalogue: Catalogue, held: Held | None, *, target: int | None = None, refused: Collection[str] = ()
) -> Chain:
    """The way to a version from what is held, through the newest full version where that is nearer.

    Raises OSError if the folder cannot be read.

    Args:
        held: the version that is held exactly; None for nothing.
        target: the version to reach; None for the newest that can be reached.
        refused: ids of versions that turned out to be unusable.
    """
    problems = [] if catalogue.versions else [f"there is no version in {catalogue.url}"]
    candidates = [target] if target is not None else sorted(catalogue.versions, reverse=True)
    for version in candidates:
        tip = catalogue.get(version)
        if tip is None:
            problems += [] if target is None else [f"{catalogue.url} holds no version {version}"]
            continue
        if target is None and held and _is_older(tip, held):
            break  # later versions were withdrawn, and their successors are not there yet
        links = _walk(catalogue.get, tip, held, refused)
        if isinstance(links, str):
            problems += [links] if links not in problems else []
            continue
        return Chain(links=links, problems=tuple(problems))
    return Chain(problems=tuple(problems), reachable=target is None and held is not None)


def _is_older(tip: Manifest | str, held: Held) -> bool:
    return isinstance(tip, Manifest) and tip.run_id == held.run_id and tip.version < held.version


def _walk(
    get: Callable[[int], Manifest | str | None],
    tip: Manifest | str,
    held: Held | None,
    refused: Collection[str],
) -> tuple[Manifest, ...] | str:
    """Back from `tip` to a full version or to what is held; or the broken link on that way."""
    links: list[Manifest] = []
    link: Manifest | str | None = tip
    while isinstance(link, Manifest):
        if held is not None and link.id == held.id:
            return tuple(reversed(links))
        if link.id in refused:
            return f"{link.label} is unusable"
        links.append(link)
        if link.kind is Kind.FULL:
            return tuple(reversed(links))
        link = _base(get, link)
    return str(link)


def _base(get: Callable[[int], Manifest | str | None], delta: Manifest) -> Manifest | str:
    base = get(delta.base_version) if delta.base_version is not None else None
    if base is None:
        return f"{delta.label} builds on version {delta.base_version}, which does not exist"
    if isinstance(base, str):
        return base
    if base.version >= delta.version or base.run_id != delta.run_id or base.id != delta.base_id:
        return f"{delta.label} builds on another version {delta.base_version} than the one that is there"
    return base


def foreign_version(folder: Folder) -> str:
    """Why nothing may be written to a folder: another release has written there; empty if none has."""
    catalogue = Catalogue(folder)
    for version in catalogue.versions:
        catalogue.get(version)
    return catalogue.foreign


def expired(
    versions: Sequence[int], anchors: Sequence[int], keep_anchors: int, oldest_leased: int | None
) -> Sequence[int]:
    """Versions that may be removed: older than the kept anchors, and read by nobody.

    Args:
        versions: those that have a folder; `anchors` are those of them that are full.
        keep_anchors: full versions to keep, with every delta since the oldest of them.
        oldest_leased: a version from which on somebody may be reading; None when nobody is.
    """
    newest = sorted(anchors, reverse=True)[:keep_anchors]
    if len(newest) < keep_anchors:
        return ()
    first_kept = newest[-1] if oldest_leased is None else min(newest[-1], oldest_leased)
    return [version for version in versions if version < first_kept]
