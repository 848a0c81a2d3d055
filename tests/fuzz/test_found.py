"""What the fuzzer found, each input by the name of what is wrong with it, and what has to come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from awex_delta.errors import AwexDeltaError, ConfigError, CorruptFrameError, LockstepError
from awex_delta.folder.claim import Claim
from awex_delta.folder.folder import Folder
from awex_delta.folder.local import parse_marker
from tests.fuzz.targets import TARGETS

FULL, DELTA = 0, 1
STATUS, VERIFY, PARTS, TARGETS_BEGIN, TRAINER, COPIES, WORD, PLAN = 1, 3, 4, 5, 6, 7, 8, 9


def edited(target: str, seed: int, edit: Callable[[Any], object]) -> None:
    """Give a target one of its seeds after a change to its JSON."""
    made = TARGETS[target]()
    text = made.seeds[seed]
    body = json.loads(text[1:])
    edit(body)
    made.run(text[:1] + json.dumps(body).encode())


def test_a_tensor_that_stands_twice_in_a_manifest() -> None:
    with pytest.raises(CorruptFrameError, match="stand twice"):
        edited("manifests", FULL, lambda body: body["tensors"].append(body["tensors"][0]))


@pytest.mark.parametrize("shape", [[2**62, 4], [2**47, 4], [10**30]])
def test_a_line_that_is_longer_than_positions_are(shape: list[int]) -> None:
    with pytest.raises(CorruptFrameError, match=r"2\^48|less than"):
        edited("manifests", DELTA, lambda body: body["space"]["shapes"].__setitem__(0, shape))


def test_a_version_beyond_int64() -> None:
    with pytest.raises(CorruptFrameError, match="less than"):
        edited("manifests", DELTA, lambda body: body.update(base_version=2**63))


def test_a_preset_of_a_model_too_large_to_count() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        edited("presets", 0, lambda preset: preset["model"].update(vocab_size=10**400))


NO_NUMBERS = ['{"oldest": Infinity, "until": 9e9}', '{"oldest": 0, "until": [1]}', "[" * 100_000, "7"]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=["infinity", "list", "deep", "number"])
def test_a_lease_or_a_claim_that_is_none(tmp_path: Any, text: str) -> None:
    folder = Folder(str(tmp_path))
    folder.put("leases/reader.json", [text.encode()])
    folder.put("writer.json", [text.encode()])
    assert folder.oldest_leased() is None
    assert Claim(folder, 1.0)._read() is None


@pytest.mark.parametrize(
    "marker",
    [
        {"version": float("inf")},
        {"version": -1},
        {"total_size": -1},
        {"more": 1},
        {"shards": {"../other": {}}},
        {"shards": {"a.safetensors": {"w": 7}}},
        {"shards": []},
    ],
    ids=str,
)
def test_an_index_that_is_of_no_version(marker: dict[str, Any]) -> None:
    good = {"id": "a", "run_id": "b", "version": 1, "shards": {"a.safetensors": {"w": "0" * 16}}}

    def index(section: dict[str, Any]) -> bytes:
        total = section.pop("total_size", 9)
        return json.dumps({"metadata": {"total_size": total, "awex_delta_pull": section}}).encode()

    assert parse_marker(index(good)) is not None
    assert parse_marker(index(good | marker)) is None
    assert parse_marker(b"[" * 100_000) is None


def test_an_index_to_come_that_lacks_a_shard_of_its_journal() -> None:
    target = TARGETS["journals"]()
    indices = [one for one in target.seeds if b"awex_delta_pull" in one]
    assert len(indices) == 2, "the index that is there, and the one to come"
    for one in indices:
        body = json.loads(one[1:])
        body["metadata"]["awex_delta_pull"]["shards"] = {}
        target.run(one[:1] + json.dumps(body).encode())  # the checkpoint is written anew


def test_a_journal_that_names_a_file_longer_than_names_can_be() -> None:
    target = TARGETS["journals"]()
    (commit,) = [one for one in target.seeds if b'"base"' in one]
    body = json.loads(commit[1:])
    body["index"]["name"] = "a" * 256
    target.run(commit[:1] + json.dumps(body).encode())  # the checkpoint is written anew


@pytest.mark.parametrize("name", ["a" * 201, "../other", ""])
def test_a_manifest_that_names_what_is_no_file(name: str) -> None:
    with pytest.raises(CorruptFrameError, match="files"):
        edited("manifests", FULL, lambda body: body["files"][0].update(name=name))


@pytest.mark.parametrize(
    ("seed", "edit"),
    [
        (TRAINER, lambda row: row.update(changed=10**400)),
        (TRAINER, lambda row: row.update(owned=10**400)),
        (TRAINER, lambda row: row.update(changed=-1)),
        (STATUS, lambda row: row["facts"].update(parity=2**63)),
        (STATUS, lambda row: row["facts"].update(parity=-1)),
        (VERIFY, lambda row: row.update({"0": ["one"] * len(row["0"])})),
        (VERIFY, lambda row: row.update({"0": None})),
        (PARTS, lambda row: row.update({key: [{"name": "a"}] for key in row})),
        (PARTS, lambda row: row.update(dict.fromkeys(row, 7))),
        (TARGETS_BEGIN, lambda row: row.pop("refused")),
        (TARGETS_BEGIN, lambda row: row.update(order=7)),
        (TARGETS_BEGIN, lambda row: row.update(absent=[])),
        (COPIES, lambda row: row.update(w=["x", 0, 7])),
        (COPIES, lambda row: row.update(w=7)),
        (WORD, lambda row: row.update(phase="apply")),
        (PLAN, lambda row: row.update(bytes=2**63)),
        (PLAN, lambda row: row.update(lines=[])),
        (PLAN, lambda row: row["lines"][0].__setitem__(1, "int7")),
    ],
)
def test_another_rank_that_says_something_else(seed: int, edit: Callable[[Any], object]) -> None:
    with pytest.raises(LockstepError):
        edited("rows", seed, edit)


@pytest.mark.parametrize("seed", [VERIFY, PARTS, TARGETS_BEGIN, COPIES, WORD, PLAN])
@pytest.mark.parametrize("text", [b"7", b"null", b"true", b"[[]]"])
def test_another_rank_that_sends_no_object(seed: int, text: bytes) -> None:
    with pytest.raises(AwexDeltaError):
        TARGETS["rows"]().run(bytes([seed]) + text)
