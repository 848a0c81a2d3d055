"""What reads bytes from outside, each as a function that a fuzzer can call. No fuzzer is imported here.

An input is a byte that chooses, then what is read. Where the product seals what it writes, with a checksum or
a compressor, the input holds what is inside, and the target seals it: so an input gets past the seal.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
import xxhash
import yaml
import zstandard
from fastapi.testclient import TestClient

from awex_delta.cli.plan import plan_preset
from awex_delta.errors import VerificationError
from awex_delta.folder.claim import Claim
from awex_delta.folder.content import PartSum, differing, dump_sums, load_sums
from awex_delta.folder.folder import INDEX, Folder, version_name
from awex_delta.folder.local import DamagedBaseError, load_checked, open_shard
from awex_delta.folder.manifest import checksum, parse_manifest
from awex_delta.folder.patch import JOURNAL
from awex_delta.folder.peers import Peers, Word
from awex_delta.folder.pull import LocalCheckpoint
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.survey import survey
from awex_delta.folder.writer import DiskWriter
from awex_delta.gateway import create_app
from awex_delta.gateway.router import side_router
from awex_delta.gateway.sides import Holding, Side
from awex_delta.observe.compare.checkpoints import Checkpoint
from awex_delta.observe.compare.engine_digests import DigestedState, digests_of
from awex_delta.observe.report.summary import summarize
from awex_delta.observe.runlog.reader import read_run
from awex_delta.observe.runlog.writer import RunHeader, UpdateLine
from awex_delta.plan.announce import announced, dump_spec, layout_digest, load_layout
from awex_delta.plan.pairs import engine_line
from awex_delta.plan.rank import plan_rank
from awex_delta.plan.world import World, make_world
from awex_delta.presets.files import PRESETS
from awex_delta.protocol.agreement import Proposal
from awex_delta.protocol.connecting import _compared, _raise_first, _Word, _words
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.replicas import warn_of_drift
from awex_delta.protocol.rows import _parse_json
from awex_delta.protocol.session import Session
from awex_delta.protocol.targets import Targets
from awex_delta.protocol.verdict import Reason
from awex_delta.protocol.verify import Verifier
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.environment import settings_from_environment, worker_environment
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.wire.buckets import HEADER_BYTES
from awex_delta.wire.codec import settle
from awex_delta.wire.frame import pack_frame, unpack_frame
from awex_delta.wire.registry import CODECS
from tests.unit.line_updates import IDENTITY, reader, update
from tests.unit.worlds import Model, engines, trainers, world_of

RAW = 0x80
"""In the first byte: what follows is read as it is, without a seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that reads. seeds: inputs that the product made; run: raises AwexDeltaError if it refuses."""

    seeds: Sequence[bytes]
    run: Callable[[bytes], object]


def frames() -> Target:
    """A frame, as an engine unpacks it."""
    base = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    pos, codecs = torch.arange(7, 4000, 40), list(CODECS.values())
    dtypes = (torch.bfloat16, torch.float32)
    seeds, heads = list[bytes](), list[bytes]()
    for number, dtype in enumerate(dtypes):
        identity, has_codes = replace(IDENTITY, dtype=dtype), dtype is torch.bfloat16
        there = update(base.to(dtype), (base * 1.001).to(dtype), pos, unstated=slice(0, 4), codes=has_codes)
        plain = there.bucket
        buckets = [(codec, plain) for codec in codecs if has_codes or codec.idempotent]
        buckets += [
            (codec, replace(plain, guarded=True)) for codec in codecs if has_codes and codec.idempotent
        ]
        for codec, bucket in (*buckets, (codecs[0], replace(plain, whole=True))):
            frame = pack_frame(identity, codec, bucket, there.changes, reader(there.after)).numpy().tobytes()
            seeds.append(bytes([number]) + frame)
        heads.append(frame[:_IDENTITY_BYTES])

    def run(data: bytes) -> None:
        choice, frame = _split(data)
        dtype = dtypes[choice & 1]
        old = base.to(dtype)
        if not choice & RAW and len(frame) >= HEADER_BYTES:
            frame = _sealed_frame(frame, heads[choice & 1])
        found = unpack_frame(
            torch.frombuffer(bytearray(frame) or bytearray(1), dtype=torch.uint8)[: len(frame)],
            replace(IDENTITY, dtype=dtype),
            codecs,
            begin=0,
            numel=old.numel(),
            read=reader(old),
        )
        if found.changes is not None:
            value = found.changes.value
            settle(replace(found.changes, value=None if value is None else value.clone()), lambda at: old[at])
            if found.guard is not None:
                found.guard.holds(found.changes.pos, lambda at: old[at], compiled=False)

    return Target(seeds=seeds, run=run)


_IDENTITY_BYTES = 64
"""Of the header: whose frame it is, with the number of the codec at byte 10."""


def _sealed_frame(frame: bytes, head: bytes) -> bytes:
    """With the right identity and checksum."""
    rest = frame[_IDENTITY_BYTES : HEADER_BYTES - 8], frame[HEADER_BYTES:]
    begin = head[:10] + frame[10:12] + head[12:] + rest[0]
    return begin + struct.pack("<Q", xxhash.xxh3_64_intdigest(begin + bytes(8) + rest[1])) + rest[1]


def _split(data: bytes) -> tuple[int, bytes]:
    return (data[0], data[1:]) if data else (0, b"")


def _inside(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed)


def _packed(choice: int, data: bytes) -> bytes:
    return data if choice & RAW else zstandard.ZstdCompressor(level=1).compress(data)


def descriptions() -> Target:
    """What ranks say of themselves when they connect, and what each makes of it: who sends what."""
    model = Model(layers=1, experts=2)
    world = world_of(engines(model), trainers(model, dp=2))
    specs: list[Any] = [*world.engines, *world.trainers]
    told = [dump_spec(spec) for spec in specs]
    # An even choice is what a rank alone has to say, an odd one its layout.
    seeds = [bytes([2 * seat + part]) + _inside(told[seat][part]) for seat in range(3) for part in range(2)]

    def run(data: bytes) -> None:
        choice, blob = _split(data)
        blob = _packed(choice, blob)
        seat, is_layout = (choice & 7) // 2 % 3, choice & 1
        role = specs[seat].role
        if is_layout:
            layout = load_layout(role, blob, layout_digest(blob))
            changed = replace(specs[seat], layout=layout)
        else:
            said = announced(seat, blob)
            if isinstance(said, str):
                return
            changed = said.complete({said.layout: specs[seat].layout})
        hostile = make_world([changed if at == seat else spec for at, spec in enumerate(specs)], 1)
        _plan(hostile)

    return Target(seeds=seeds, run=run)


def _plan(world: World) -> None:
    """As `connecting.meet` does, which tells all ranks of anything that a planner raises."""
    for seat in range(3):
        try:
            plan_rank(world, seat)
        except Exception:  # noqa: BLE001, S112
            continue


def manifests() -> Target:
    """The manifest of a version, and everything that is derived from it alone."""

    def run(data: bytes) -> None:
        choice, text = _split(data)
        version = choice & 1
        manifest = parse_manifest(text if choice & RAW else _sealed_manifest(text), version, "folder")
        _ = (manifest.size, manifest.extra_files, manifest.label, manifest.hf.line, manifest.hf.places)

    versions = _run_folder()
    return Target(
        seeds=[bytes([at]) + _body(versions[f"{version_name(at)}/{INDEX}"]) for at in range(2)], run=run
    )


def _body(manifest: bytes) -> bytes:
    """What a manifest says, without the checksum over it."""
    body = json.loads(manifest)["metadata"]["awex_delta"]
    del body["xxh3"]
    return json.dumps(body).encode()


def _sealed_manifest(text: bytes) -> bytes:
    """The manifest that says so."""
    try:
        body = dict(json.loads(text))
        stored = [*body.get("tensors", ())]
        for line in body.get("lines", ()):
            stored += [line["boxes"], *line["bodies"]]
        names = {one["key"]: one["file"] for one in stored}
        seal = checksum([json.dumps(body, sort_keys=True).encode()])
        return json.dumps({"metadata": {"awex_delta": {**body, "xxh3": seal}}, "weight_map": names}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text


_SHAPES = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,)}


def _trainer(settings: DeltaSettings) -> TorchAdamWTrainer:
    return TorchAdamWTrainer.create(_SHAPES, lr=1e-4, settings=settings, fp32={"model.layers.0.gate": (2, 2)})


def _engine() -> DictEngine:
    gate = "model.layers.0.gate"
    return DictEngine({**_SHAPES, gate: (2, 2)}, dtypes={gate: torch.float32})


def _disk(url: str) -> DeltaSettings:
    return DeltaSettings(
        transport="disk", disk_url=url, encoding="ulp_zstd", verify="full", timeout_seconds=5
    )


def _run_folder() -> dict[str, bytes]:
    """The files of a folder with a full version and a delta, as the product writes it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = _disk(f"{folder}/run")
        trainer = _trainer(settings)
        writer = DiskWriter(trainer, Rendezvous.alone(), 0, settings, extra_files={"config.json": b"{}"})
        for version in range(2):
            trainer.train_step()
            writer.update_weights(version)
        writer.close()
        return _files(Path(folder) / "run")


def _files(root: Path) -> dict[str, bytes]:
    return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.rglob("*")) if one.is_file()}


def _resealed(files: Mapping[str, bytes], version: str) -> bytes:
    """The manifest of a version with the sizes and checksums of its files as they are."""
    body = json.loads(_body(files[f"{version}/{INDEX}"]))

    def seal(entry: dict[str, Any], content: bytes) -> None:
        entry["xxh3"] = checksum([content])

    for file in body["files"]:
        content = files[f"{version}/{file['name']}"]
        file["size"] = len(content)
        seal(file, content)
    for line in [{"boxes": one, "bodies": []} for one in body["tensors"]] + body["lines"]:
        for one in (line["boxes"], *line["bodies"]):
            content = files[f"{version}/{one['file']}"]
            seal(one, content[one["offset"] : one["offset"] + one["size"]])
    return _sealed_manifest(json.dumps(body).encode())


def folders() -> Target:
    """A folder of versions, one file of which is not what it was: read by an engine, and by `inspect`."""
    good = _run_folder()
    delta = f"{version_name(1)}/delta-00001-of-00001.safetensors"
    names = [
        f"{version_name(0)}/{INDEX}",
        f"{version_name(1)}/{INDEX}",
        f"{version_name(0)}/model-00001-of-00001.safetensors",
        delta,
        "leases/reader.json",
        "writer.json",
    ]
    room = Path(tempfile.mkdtemp())

    def content(at: int) -> bytes:
        if at < 2:
            return _body(good[names[at]])
        return good.get(names[at], b'{"oldest": 0, "until": 9e9, "run_id": "a", "beat": "b", "seconds": 1.0}')

    def run(data: bytes) -> None:
        choice, text = _split(data)
        at = (choice & 7) % len(names)
        files = dict(good)
        sealed = at < 2 and not choice & RAW
        files[names[at]] = _sealed_manifest(text) if sealed else text
        if at in (2, 3) and not choice & RAW:
            version = names[at].partition("/")[0]
            files[f"{version}/{INDEX}"] = _resealed(files, version)
        for name, value in files.items():
            (room / name).parent.mkdir(parents=True, exist_ok=True)
            (room / name).write_bytes(value)
        folder = Folder(str(room))
        survey(folder, workers=1)
        folder.oldest_leased()
        Claim(folder, 1.0)._read()  # to take it would wait for signs of life
        DiskReader(_engine(), _disk(str(room))).update_weights()

    return Target(seeds=[bytes([at]) + content(at) for at in range(len(names))], run=run)


def journals() -> Target:
    """A local checkpoint with the journal of a change that was cut short: the next pull goes on."""
    good = _run_folder()
    room = Path(tempfile.mkdtemp())
    run_folder, local = room / "run", room / "local"
    _write(run_folder, good)
    LocalCheckpoint(local, Folder(str(run_folder))).pull(0)

    def stop(step: str) -> None:
        if step == "withdraw the index":
            raise InterruptedError(step)

    with suppress(InterruptedError):
        LocalCheckpoint(local, Folder(str(run_folder)), on_step=stop).pull(1)
    left = {name: value for name, value in _files(local).items() if not name.endswith("lock")}
    names = sorted(left)
    commit = next(name for name in names if name.startswith(JOURNAL) and b'"base"' in left[name])

    def run(data: bytes) -> None:
        choice, text = _split(data)
        name = names[(choice & 15) % len(names)]
        files = {**left, name: text}
        if name.startswith(JOURNAL) and name != commit and not choice & RAW:
            files[commit] = left[commit].replace(checksum([left[name]]).encode(), checksum([text]).encode())
        shutil.rmtree(local)
        _write(local, files)
        LocalCheckpoint(local, Folder(str(run_folder))).pull()

    return Target(seeds=[bytes([at]) + left[name] for at, name in enumerate(names)], run=run)


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(value)


def checkpoints() -> Target:
    """A shard of a checkpoint: its header, read in every way."""
    good = _run_folder()[f"{version_name(0)}/model-00001-of-00001.safetensors"]
    room = Path(tempfile.mkdtemp())
    marker = SimpleNamespace(shards={"model.safetensors": dict.fromkeys(_SHAPES, "0" * 16)})

    def run(data: bytes) -> None:
        _, text = _split(data)
        file = room / "model.safetensors"
        file.write_bytes(text)
        for read in (
            lambda: open_shard(file),
            lambda: load_checked(file, marker.shards[file.name]),
        ):
            try:
                read()
            except DamagedBaseError:
                continue
        found = Checkpoint(file)
        for name in found.entries:
            found.digest(name)

    return Target(seeds=[b"\0" + good], run=run)


def digests() -> Target:
    """What the ranks of an engine wrote down for `awex-delta verify`."""
    text = json.dumps(digests_of(_engine())).encode()

    def run(data: bytes) -> None:
        state = DigestedState({"file": _split(data)[1]})
        for name in state.entries:
            state.digest(name)

    return Target(seeds=[b"\0" + text], run=run)


def run_logs() -> Target:
    """RUN.jsonl, and what a report says of it."""
    room = Path(tempfile.mkdtemp())
    line: dict[str, Any] = {
        "time": 1.0,
        "version": 1,
        "kind": "delta",
        "reason": "NONE",
        "total_wire_bytes": 9,
    }
    updates = [
        UpdateLine.model_validate(
            line | {"changed_by": [{"layer": 0, "kind": "mlp", "changed": 1, "owned": 4}]}
        ),
        UpdateLine.model_validate(line | {"version": 2, "seconds": {"transfer": 0.5}, "full_bytes": 90}),
        UpdateLine.model_validate(line | {"kind": "aborted", "reason": "PeerError", "text": "gone"}),
    ]
    lines = [RunHeader(started=0.0), *updates]
    text = "\n".join(one.model_dump_json() for one in lines).encode()

    def run(data: bytes) -> None:
        file = room / "RUN.jsonl"
        file.write_bytes(_split(data)[1])
        summarize(read_run(file).updates)

    return Target(seeds=[b"\0" + text, b"\0" + text + b"\n"], run=run)


def presets() -> Target:
    """A preset, up to the plan of a run; an environment that a launcher left."""
    room = Path(tempfile.mkdtemp())
    train = TrainEngineConfig.load({"backend": "megatron:d2", "enable_delta_weight_update": True})
    environment = worker_environment(resolve(train, RolloutConfig.load({"backend": "vllm:d2"})))

    def run(data: bytes) -> None:
        choice, text = _split(data)
        if choice & 1:
            pairs = [line.partition("=") for line in text.decode(errors="replace").splitlines()]
            settings_from_environment({name: value for name, _, value in pairs})
            return
        file = room / "preset.yaml"
        file.write_bytes(text)
        plan_preset(file)

    seeds = [b"\0" + _plain_yaml(one) for one in sorted(PRESETS.glob("*.yaml"))]
    seeds.append(b"\1" + "\n".join(f"{name}={value}" for name, value in environment.items()).encode())
    return Target(seeds=seeds, run=run)


def _plain_yaml(path: Path) -> bytes:
    """Without comments and long values, so that changes hit settings. JSON is YAML."""
    return json.dumps(yaml.safe_load(path.read_text())).encode()


def rows() -> Target:
    """What another rank says in the agreements of an update."""
    proposal = Proposal(role="engine", version=7, run_id="a" * 32, held=6)
    mine = replace(proposal, role="trainer", reason=Reason.NONE, changed=5, owned=100)
    world = world_of(engines(Model(layers=1, experts=2)), trainers(Model(layers=1, experts=2)))
    line = engine_line(world.engines[0].layout)
    part = PartSum(name="a", offset=(0,), numel=1, whole=1, sum=5)
    lines = [(peer, "bfloat16", 4, 4, "0" * 16) for peer in range(2)]
    says: Sequence[tuple[Any, Callable[[Session], object]]] = (
        (asdict(proposal), lambda session: session.propose(mine)),
        (
            {"phase": "encode", "version": 7, "failure": "", "facts": {"bytes": 3, "parity": 2**62}},
            lambda session: session.agree("encode", "", bytes=1),
        ),
        (struct.pack("<2Q", 0, 0), lambda session: session.exchange_counts(torch.bfloat16, {0: 0})),
        ({"0": [1] * len(line.names)}, _name_tensors),
        ({"b" * 32: dump_sums([part])}, _compare_sums),
        ({"order": [["a", 1]], "absent": {"a": ""}, "refused": ""}, _begin_targets),
        (asdict(mine), lambda session: session.propose(mine)),  # of another trainer
        (
            {"w": [8, 0, 1]},
            lambda session: warn_of_drift(session, 7, [{"parity": 1}], {"w": (0, 1)}, {"w": 7}),
        ),
        ({"phase": "stage", "version": 7}, lambda session: _peers(session.comm).tell(Word(phase="stage"))),
        ({"lines": lines[1:], "bytes": 8}, lambda session: _compare_plans(session, _Word(lines=(lines[0],)))),
    )

    def run(data: bytes) -> None:
        choice, text = _split(data)
        session = object.__new__(Session)
        session.codecs = tuple(CODECS.values())
        session._version, session._causes = 7, {}
        session._meet = lambda: None  # type: ignore[method-assign]  # what ranks say there has its own target
        session.met = SimpleNamespace(limits={}, full_bytes=9, world=world)  # type: ignore[assignment]
        session.comm = SimpleNamespace(  # type: ignore[assignment]
            seat=1,
            begin=lambda purpose: True,
            gather=lambda own, **_: [text, own],
            gather_bytes=lambda own, **_: [text, own],
            gather_json=lambda own, **_: [_parse_json(0, text), own],
            rendezvous=SimpleNamespace(
                world_size=2, num_engine_ranks=0, place=lambda seat: f"seat {seat}", trainer_seat=lambda _: 1
            ),
        )
        says[choice % len(says)][1](session)

    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one, _ in says]
    return Target(seeds=[bytes([at]) + text for at, text in enumerate(texts)], run=run)


def _name_tensors(session: Session) -> None:
    verifier = object.__new__(Verifier)
    verifier._session, verifier._version, verifier._contents = session, 7, []
    verifier._is_engine = False
    with suppress(VerificationError):  # which it ends with, however it reads
        verifier._name_tensors([0], "tensors in verify")


def _compare_sums(session: Session) -> None:
    link = SimpleNamespace(id="b" * 32, label="version 1", scope="full", digest={"a": "0" * 16}, tied={})
    for row in _peers(session.comm).exchange({}, phase="verify"):
        differing(link, [load_sums(row["b" * 32])] if "b" * 32 in row else [])  # type: ignore[arg-type]


def _begin_targets(session: Session) -> None:
    targets = object.__new__(Targets)
    targets._meeting, targets._rank = session.comm, 1
    targets._begin([("a", 1)], None)


def _compare_plans(session: Session, mine: _Word) -> None:
    words = _words(session.comm, mine)
    _raise_first(session.comm, words, None)
    _compared(words, 1)


def _peers(comm: Any) -> Peers:
    peers = object.__new__(Peers)
    peers._comm = comm
    return peers


class _End:
    """An end of a pair that does what it is told."""

    def connect(self) -> None:
        pass

    def update_weights(self, version: int) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def holding(self) -> Holding:
        return Holding(version=None, why="nothing yet")

    def close(self) -> None:
        pass


def _gateway() -> TestClient:
    """A gateway whose sides do not answer, and below /side an engine that a gateway would call."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    app = create_app(token=None, transport=httpx.MockTransport(refuse))
    side = Side(
        role="engine", kind="fake", num_ranks=1, brings_meeting=False, num_pairs=None, open=lambda _: _End()
    )
    app.include_router(side_router(side, token=None, prefix="/side"))
    return TestClient(app)


def bodies() -> Target:
    """Bodies of requests to the gateway, and to a side that is hosted over HTTP."""
    clients: list[TestClient] = []
    config = {
        "train": {"backend": "megatron:d1", "enable_delta_weight_update": True},
        "rollout": {"backend": "vllm:d1"},
    }
    attempt = {"pair": "a", "connection": "c" * 32}
    meeting = {"num_engine_ranks": 1, "num_trainer_ranks": 1, "host": "127.0.0.1", "port": 1, "name": "a"}
    requests: Mapping[str, Mapping[str, Any]] = {
        "/connect": {"pair": "a", "trainers": ["http://t:1"], "engines": ["http://e:1"], "config": config},
        "/update_weights": {"pair": "a", "version": 1},
        "/disconnect": {"pair": "a"},
        "/side/connect": {**attempt, "config": config, "meeting": meeting, "first_rank": 0, "engine": "e"},
        "/side/update_weights": {**attempt, "version": 1, "attempt": 1},
        "/side/publish": {**attempt, "version": 1},
        "/side/disconnect": attempt,
    }
    paths = list(requests)

    def run(data: bytes) -> None:
        if not clients:  # with threads of its own, which no fork may find
            clients.append(_gateway())
        choice, body = _split(data)
        answer = clients[0].post(paths[choice % len(paths)], content=body)
        assert answer.status_code != 500, answer.text

    seeds = [bytes([at]) + json.dumps(requests[path]).encode() for at, path in enumerate(paths)]
    return Target(seeds=seeds, run=run)


TARGETS: Mapping[str, Callable[[], Target]] = {
    one.__name__: one
    for one in (
        frames,
        descriptions,
        manifests,
        folders,
        journals,
        checkpoints,
        digests,
        run_logs,
        presets,
        rows,
        bodies,
    )
}
