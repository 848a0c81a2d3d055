"""`awex-delta verify`: bits, dtypes, shapes, ties and missing tensors, against checkpoints and digests."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from awex_delta.cli.main import app
from awex_delta.errors import ConfigError
from awex_delta.observe.compare import checkpoints
from awex_delta.observe.compare.checkpoints import Checkpoint
from awex_delta.observe.compare.engine_digests import DigestedState, digests_of
from awex_delta.observe.compare.tensors import Outcome, compare
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.wire.digest import digest

EMBED, HEAD, DOWN, NORM = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.down.weight",
    "model.norm.weight",
)


def weights() -> dict[str, torch.Tensor]:
    """Small weights, with values that compare badly: NaN and both zeros."""
    generator = torch.Generator().manual_seed(3)
    found = {name: torch.randn(shape, generator=generator).bfloat16()
             for name, shape in {EMBED: (10, 6), DOWN: (8, 12), NORM: (6,)}.items()}  # fmt: skip
    found[DOWN][2, 3], found[DOWN][4, 5], found[DOWN][4, 6] = float("nan"), 0.0, -0.0
    return found


def save(
    folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1, tied: bool | None = None
) -> Path:
    """A HF checkpoint, cut into files with an index where `shards` is more than one."""
    folder.mkdir()
    names = list(tensors)
    files = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
    for file, part in files.items():
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tied is not None:
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return folder


def outcomes(trainer: Path, engine: Path) -> dict[str, Outcome]:
    return {found.name: found.outcome for found in compare(Checkpoint(trainer), Checkpoint(engine))}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_equal_checkpoints_cut_differently_are_the_same(tmp_path: Path) -> None:
    whole, cut = save(tmp_path / "a", weights()), save(tmp_path / "b", weights(), shards=3)
    result = run(whole, cut)
    assert (result.exit_code, result.output) == (0, "3 tensors: 3 same\n")
    assert run(whole / "model-0.safetensors", cut).exit_code == 0


def test_every_difference_is_counted_and_placed_across_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PIECE_BYTES", 30)  # one row of the matrix, two of the norm's elements
    wrong = weights()
    wrong[DOWN][4, 5], wrong[DOWN][7, 1] = -0.0, 9.0
    a, b = save(tmp_path / "a", weights()), save(tmp_path / "b", wrong)
    (found,) = [one for one in compare(Checkpoint(a), Checkpoint(b)) if one.outcome is not Outcome.SAME]
    assert (found.name, found.num_different, found.first, found.numel) == (DOWN, 2, (4, 5), 96)
    result = run(a, b)
    assert result.exit_code == 1
    assert f"different: {DOWN}: 2 of 96 elements, first at [4, 5]" in result.output
    assert "3 tensors: 1 different, 2 same" in result.output


def test_missing_extra_other_dtype_and_other_shape(tmp_path: Path) -> None:
    theirs = weights()
    theirs["model.extra"] = theirs.pop(NORM)
    theirs[DOWN] = theirs[DOWN].float()
    theirs[EMBED] = theirs[EMBED][:9]
    a, b = save(tmp_path / "a", weights()), save(tmp_path / "b", theirs)
    assert outcomes(a, b) == {
        EMBED: Outcome.SHAPE,
        DOWN: Outcome.DTYPE,
        NORM: Outcome.MISSING,
        "model.extra": Outcome.EXTRA,
    }
    record = json.loads(run(a, b, "--json").stdout)
    assert (record["same"], record["counts"]["missing"]) == (False, 1)
    details = {tensor["name"]: tensor["detail"] for tensor in record["tensors"]}
    assert details[DOWN] == "trainer bfloat16 [8, 12], engine float32 [8, 12]"


@pytest.mark.parametrize("stored_by_trainer", [True, False])
def test_a_tied_head_that_one_side_stores(stored_by_trainer: bool, tmp_path: Path) -> None:
    with_head = weights() | {HEAD: weights()[EMBED]}
    sides = [save(tmp_path / "with", with_head), save(tmp_path / "without", weights(), tied=True)]
    first, second = sides if stored_by_trainer else sides[::-1]
    assert set(outcomes(first, second).values()) == {Outcome.SAME}
    other = save(tmp_path / "other", with_head | {HEAD: weights()[EMBED] + 1})
    first, second = (other, sides[1]) if stored_by_trainer else (sides[1], other)
    assert outcomes(first, second)[HEAD] is Outcome.DIFFERENT


def test_a_head_is_missing_where_the_config_says_that_it_is_not_tied(tmp_path: Path) -> None:
    with_head = save(tmp_path / "with", weights() | {HEAD: weights()[EMBED]})
    untied = save(tmp_path / "without", weights(), tied=False)
    assert outcomes(with_head, untied)[HEAD] is Outcome.MISSING


def engine_files(folder: Path, state: dict[str, torch.Tensor]) -> list[Path]:
    """Digests of a two-rank engine that cuts two tensors and replicates the norm."""
    paths = []
    for rank in range(2):
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        engine = DictEngine(shapes, cut={EMBED: 0, DOWN: 1}, rank=rank, num_ranks=2)
        for entry in engine.tensors():
            cut = tuple(slice(o, o + n) for o, n in zip(entry.global_offset, entry.view.shape, strict=True))
            entry.view.copy_(state[entry.name][cut])
        paths.append(folder / f"rank{rank}.json")
        paths[-1].write_text(json.dumps(digests_of(engine)))
    return paths


def test_a_sharded_engine_is_compared_by_the_digests_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PIECE_BYTES", 30)
    files = engine_files(tmp_path, weights())
    state = DigestedState({str(path): path.read_bytes() for path in files})
    for name, tensor in weights().items():  # an oracle that sees the whole tensor at once
        assert state.digest(name) == digest(tensor, name)
    assert run(save(tmp_path / "a", weights()), *files).exit_code == 0
    other = weights()
    other[DOWN][0, 0] = 5.0
    result = run(save(tmp_path / "b", other), *files)
    assert (result.exit_code, f"different: {DOWN}" in result.output) == (1, True)


def test_digests_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    files = engine_files(tmp_path, weights())
    checkpoint = save(tmp_path / "a", weights())
    result = run(checkpoint, files[0])
    assert (result.exit_code, "all ranks" in result.output) == (2, True)
    changed = weights()
    changed[NORM][0] = 7.0
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match="two ranks hold other bits"):
        DigestedState(
            {"a": files[0].read_text(), "b": engine_files(tmp_path / "again", changed)[1].read_text()}
        )
    for text in ("[]", "{", '{"format": "other", "tensors": {}}'):
        files[0].write_text(text)
        assert run(checkpoint, files[0]).exit_code == 2


@pytest.fixture
def served() -> Iterator[str]:
    """An address that answers with the digests of a whole engine."""
    engine = DictEngine({name: tuple(tensor.shape) for name, tensor in weights().items()})
    for entry in engine.tensors():
        entry.view.copy_(weights()[entry.name])
    body = json.dumps(digests_of(engine)).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/digests" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_engine_may_answer_over_http(served: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "a", weights())
    assert run(checkpoint, f"{served}/digests").exit_code == 0
    result = run(checkpoint, f"{served}/absent")
    assert (result.exit_code, "404" in result.output) == (2, True)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    good = save(tmp_path / "good", weights(), shards=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 64)
    for bad in ("absent", "empty", "bad.safetensors"):
        result = run(good, tmp_path / bad)
        assert (result.exit_code, str(tmp_path / bad) in result.output) == (2, True)
    for sides, named in (
        (("absent", good), "TRAINER: 'absent' does not exist; give the folder of a HF checkpoint"),
        ((good, "absent"), "ENGINE: 'absent' does not exist; give the folder of a HF checkpoint"),
        ((good, "absent.json"), "ENGINE: 'absent.json' cannot be read (No such file or directory); give a"),
    ):
        result = run(*sides)
        assert (result.exit_code, named in result.output) == (2, True)
    assert run(good, good, good).exit_code == 2
    (good / "model-1.safetensors").unlink()
    result = run(good, good)
    assert (result.exit_code, "copy model-1.safetensors again" in result.output) == (2, True)


@pytest.mark.parametrize(
    "index", ['{"weight_map": null}', '{"weight_map": ["x"]}', '{"weight_map": 3}', "[" * 100_000]
)
def test_a_hostile_index_is_refused_and_no_difference(index: str, tmp_path: Path) -> None:
    good = save(tmp_path / "good", weights())
    (good / "model.safetensors.index.json").write_text(index)
    result = run(good, good)
    assert (result.exit_code, "copy it again" in result.output) == (2, True)


def test_an_index_opens_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    outside = save(tmp_path / "outside", {"secret": torch.ones(2)})
    good = save(tmp_path / "good", weights())
    for target in ("../outside/model-0.safetensors", str(outside / "model-0.safetensors")):
        index = {"weight_map": {"secret": target}}
        (good / "model.safetensors.index.json").write_text(json.dumps(index))
        result = run(good, good)
        assert (result.exit_code, "secret among them" in result.output) == (2, True)


@pytest.mark.parametrize("shape", [[6], [], [0]], ids=str)
def test_digests_without_parts_are_refused_and_no_difference(shape: list[int], tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "a", {NORM: torch.zeros(shape, dtype=torch.bfloat16)})
    tensor = {"dtype": "bfloat16", "shape": shape, "parts": []}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"format": "awex-delta digests 1", "tensors": {NORM: tensor}}))
    result = run(checkpoint, path)
    assert (result.exit_code, "all ranks" in result.output) == (2, True)


def test_a_file_may_be_called_as_an_address_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = DictEngine({NORM: (6,)})
    Path("http.json").write_text(json.dumps(digests_of(engine)))
    checkpoint = save(tmp_path / "a", {NORM: torch.zeros(6, dtype=torch.bfloat16)})
    assert run(checkpoint, "http.json").exit_code == 0
