"""What a folder holds: every version, whether its bytes are whole, and how far the chain reaches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from awex_delta.errors import DiskError
from awex_delta.folder.apply import runs
from awex_delta.folder.chain import Catalogue, find_chain
from awex_delta.folder.folder import Folder, version_name
from awex_delta.folder.manifest import WHOLE, FileEntry, Manifest, checksum
from awex_delta.protocol.verdict import Reason

_PIECE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionState:
    """One version of a folder.

    state: "whole"; "unverified" where its bytes were not read; "unfinished" where it has no manifest;
        "damaged".
    changed, owned: elements that the trainers found changed, of those that they own; 0 of full versions.
    reachable: an engine that starts now can get there.
    problems: what is wrong, one sentence each.
    """

    version: int
    state: str
    kind: str = ""
    reason: str = ""
    run_id: str = ""
    base: int | None = None
    size: int = 0
    changed: int = 0
    owned: int = 0
    encodings: tuple[str, ...] = ()
    num_files: int = 0
    num_tensors: int = 0
    reachable: bool = False
    problems: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Share of the owned elements that changed."""
        return self.changed / self.owned if self.owned else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A folder at one moment. newest: of all versions with a manifest; reachable: of those one can get to."""

    url: str
    versions: tuple[VersionState, ...]
    newest: int | None
    reachable: int | None

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, in the order of versions."""
        return tuple(problem for version in self.versions for problem in version.problems)


def survey(folder: Folder, *, verify: bool = True, workers: int = 4) -> Survey:
    """Look at every version of a folder. Raises OSError if it cannot be read.

    verify reads every byte and compares checksums; otherwise only manifests are read.
    """
    catalogue = Catalogue(folder)
    manifests = {version: catalogue.get(version) for version in catalogue.versions}
    damage: dict[int, list[str]] = {version: [] for version in manifests}
    known = [manifest for manifest in manifests.values() if isinstance(manifest, Manifest)]
    if verify:
        jobs = [(manifest, file) for manifest in known for file in manifest.files]
        with ThreadPoolExecutor(max_workers=workers) as pool:
            results = pool.map(lambda job: _verify(folder, job[0], job[1]), jobs)
            for (manifest, _), found in zip(jobs, results, strict=True):
                damage[manifest.version] += found
    refused = {manifest.id for manifest in known if damage[manifest.version]}
    states = []
    for version, read in manifests.items():
        chain = find_chain(catalogue, None, target=version, refused=refused)
        gaps = () if read is None or damage[version] else chain.problems
        states.append(
            _state(version, read, (*damage[version], *gaps), verify=verify, reachable=chain.reachable)
        )
    return Survey(
        url=folder.url,
        versions=tuple(states),
        newest=max((state.version for state in states if state.state != "unfinished"), default=None),
        reachable=max((state.version for state in states if state.reachable), default=None),
    )


def _state(
    version: int, manifest: Manifest | str | None, problems: tuple[str, ...], *, verify: bool, reachable: bool
) -> VersionState:
    if manifest is None:
        return VersionState(version=version, state="unfinished")
    if isinstance(manifest, str):
        return VersionState(version=version, state="damaged", problems=(manifest,))
    whole = "whole" if verify else "unverified"
    damaged = any("damaged" in problem or "gone" in problem for problem in problems)
    return VersionState(
        version=version,
        state="damaged" if damaged else whole,
        kind=manifest.kind.value,
        reason=Reason[manifest.reason].text if manifest.reason in Reason.__members__ else manifest.reason,
        run_id=manifest.run_id,
        base=manifest.base_version,
        size=manifest.size,
        changed=manifest.changed,
        owned=manifest.owned,
        encodings=_encodings(manifest),
        num_files=len(manifest.files),
        num_tensors=len(manifest.hf.names),
        reachable=reachable,
        problems=problems,
    )


def _encodings(manifest: Manifest) -> tuple[str, ...]:
    found = {body.encoding for line in manifest.lines for body in line.bodies}
    return tuple(sorted(found | ({WHOLE} if manifest.tensors else set())))


def _verify(folder: Folder, manifest: Manifest, file: FileEntry) -> list[str]:
    """What is wrong with one file; of a damaged one, which of the things that it holds."""
    name = f"{version_name(manifest.version)}/{file.name}"
    try:
        pieces = range(0, file.size, _PIECE_BYTES)
        if checksum(folder.read(name, at, min(at + _PIECE_BYTES, file.size)) for at in pieces) == file.xxh3:
            return []
        return [f"{name} is damaged: {_damaged_parts(folder, manifest, file, name)}"]
    except FileNotFoundError:
        return [f"{name} is gone"]
    except DiskError as error:
        return [str(error)]


def _damaged_parts(folder: Folder, manifest: Manifest, file: FileEntry, name: str) -> str:
    entries = [one for one in manifest.stored if one.file == file.name]
    damaged = []
    for run in runs(entries):
        blob = folder.read(name, run[0].offset, run[-1].offset + run[-1].size)
        for entry in run:
            body = blob[entry.offset - run[0].offset :][: entry.size]
            damaged += [entry.key] if checksum([body]) != entry.xxh3 else []
    return ", ".join(damaged) or "outside of its tensors"
