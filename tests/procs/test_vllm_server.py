"""A real vLLM server, driven over its weight-transfer routes while requests run in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests

import awex_delta
from awex_delta.engines.vllm.driver import HttpControl, Running, VllmDriver
from tests.docs.blocks import python_blocks
from tests.procs.ports import hold_port, number_of
from tests.procs.vllm_members import PROMPTS, SETTINGS
from tests.procs.vllm_training import NUM_VERSIONS, Training, config_only, plan_of

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]

LONG = 2000
"""Tokens of a request that outlasts the way of a call to the server, on a busy machine, too."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with weights drawn at random."""
    checkpoint = config_only(plan_of("qwen3"), tmp_path / "config")
    with hold_port() as held:
        yield from serve(checkpoint, number_of(held), tmp_path / "server.log")


def serve(checkpoint: Path, port: int, log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--max-model-len", "2560", "--hf-overrides", json.dumps({"max_position_embeddings": 2560})]
    command += ["--kv-cache-memory-bytes", str(1 << 26), "--block-size", "32", "--max-num-seqs", "4"]
    command += ["--weight-transfer-config", json.dumps({"backend": "awex_delta"})]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": "awex_delta",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=Path(awex_delta.__file__).parents[1],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # vLLM's own processes end with it
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 200
    while True:
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):  # it may listen, and be too busy to answer
            pass
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


class Request:
    """One greedy request that streams its steps: tokens with their log-probabilities."""

    def __init__(self, url: str, num_tokens: int = LONG) -> None:
        self.steps: list[tuple[int, float]] = []
        self.reason = ""
        self._begun = threading.Event()
        body = {
            "prompt": PROMPTS[0],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        self._answer = requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=200)
        assert self._answer.ok, self._answer.text
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._answer.iter_lines():
            data = line.removeprefix(b"data: ")
            if data and data != b"[DONE]":
                choice = json.loads(data)["choices"][0]
                if choice["token_ids"]:
                    logprobs = choice["logprobs"]["token_logprobs"]
                    self.steps += zip(choice["token_ids"], logprobs, strict=True)
                self.reason = choice["finish_reason"] or self.reason
                self._begun.set()

    def begun(self) -> Request:
        """Wait for the first tokens."""
        assert self._begun.wait(200)
        return self

    def ended(self) -> Request:
        """Wait for the last ones."""
        self._thread.join(200)
        assert not self._thread.is_alive()
        return self


def mean_logprob(steps: list[tuple[int, float]]) -> float:
    return sum(logprob for _, logprob in steps) / len(steps)


def weight_version(url: str) -> Any:
    return requests.get(f"{url}/weight_info", timeout=30).json()["weight_version"]


def test_running_requests_are_paused_finished_or_aborted_as_chosen(server: str, tmp_path: Path) -> None:
    training = Training(plan_of("qwen3"), tmp_path, num_engine_ranks=1)
    # Version 1 is sent by the program on the page.
    program = python_blocks("docs/en/vllm.md")[1]
    names = {"rendezvous": training.rendezvous, "settings": SETTINGS}
    program.run(names, {"http://127.0.0.1:8000": server})
    assert weight_version(server) == "1"

    def update(version: int, running: Running) -> None:
        VllmDriver(HttpControl(server), running=running).update_weights(version)
        assert weight_version(server) == str(version)

    old = Request(server).ended().steps
    paused = Request(server).begun()
    before = len(paused.steps)
    update(2, "pause")
    assert paused.ended().reason == "length"
    new = Request(server).ended().steps
    assert 0 < before < LONG == len(paused.steps)
    assert paused.steps[:before] == old[:before] != new[:before]
    late, late_old, late_new = (mean_logprob(steps[-100:]) for steps in (paused.steps, old, new))
    assert abs(late - late_new) < abs(late - late_old)

    finished = Request(server).begun()
    update(3, "finish")
    assert finished.ended().steps == new
    assert finished.reason == "length"

    aborted = Request(server).begun()
    update(4, "abort")
    assert aborted.ended().reason == "abort"
    assert 0 < len(aborted.steps) < LONG
    for version in range(5, NUM_VERSIONS + 1):
        update(version, "abort")
    assert len(Request(server, 8).ended().steps) == 8
    assert all(len(stats) == NUM_VERSIONS for stats in training.outcome())
