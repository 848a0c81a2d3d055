"""Switches of the whole process or thread that a training sets for itself: updates do not follow them."""

from __future__ import annotations

import locale
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from awex_delta.protocol.verdict import Kind
from awex_delta.testing.ranks import results
from tests.pairing import Pairing
from tests.ranks.conftest import BIAS, train, wrong
from tests.ranks.disk import Engine, Trainers

Make = Callable[..., Pairing]
Default = Callable[[], AbstractContextManager[Any]]


@contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def anomalies() -> Iterator[None]:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        yield


def matmul_put(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


IN_THREAD: dict[str, Default] = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
}
IN_PROCESS: dict[str, Default] = {
    "default dtype float64": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default dtype float16": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "deterministic algorithms": lambda: changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly detection": anomalies,
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
    "locale": lambda: changed(
        lambda: locale.setlocale(locale.LC_ALL), lambda one: locale.setlocale(locale.LC_ALL, one), "C.UTF-8"
    ),
    "umask": lambda: changed(lambda: 0o022, os.umask, 0o777),
    "TF32": lambda: changed(lambda: torch.backends.cuda.matmul.allow_tf32, matmul_put, True),
}
ENCODINGS = ["indices", "gaps", "ulp", "ulp_zstd", "ulp_context"]
TELLING = ["default device", "inference mode", "default dtype float16"]
"""What all encodings and ways to find changes are tried under."""


def check(make: Make, name: str, **options: Any) -> None:
    """Connect under the default; deltas under it and without it; a full sync under it."""
    in_thread, in_process = IN_THREAD.get(name, nullcontext), IN_PROCESS.get(name, nullcontext)
    pairing = make(buffers={BIAS: (4,)}, verify="full", **options)
    for version, is_set in ((0, True), (1, False), (2, True), (3, True), (4, False), (7, True), (8, False)):
        train(pairing)

        def update(seat: int, version: int = version, is_set: bool = is_set) -> Any:
            with in_thread() if is_set else nullcontext():
                return pairing.ends[seat].update_weights(version)

        with in_process() if is_set else nullcontext():
            stats = results(pairing.threads.run(update))
        assert {one.verdict.kind for one in stats} == {Kind.FULL if version in (0, 7) else Kind.DELTA}
        assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("name", [*IN_THREAD, *IN_PROCESS])
def test_updates_do_not_follow_defaults_of_the_process(make: Make, name: str) -> None:
    check(make, name)


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
@pytest.mark.parametrize("name", TELLING)
def test_no_encoding_follows_defaults_of_the_process(make: Make, name: str, encoding: str) -> None:
    check(make, name, encoding=encoding)


@pytest.mark.parametrize("options", [{"accumulate": True}, {"method": "snapshot"}], ids=str)
@pytest.mark.parametrize("name", TELLING)
def test_what_is_kept_between_updates_does_not_follow_defaults(
    make: Make, name: str, options: dict[str, Any]
) -> None:
    check(make, name, **options)


def test_the_working_directory_may_change(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = make()
    for version in range(3):
        train(pairing)
        pairing.commit(version)
        monkeypatch.chdir(tmp_path)
    assert wrong(pairing) == [{}] * 3


@pytest.mark.parametrize("encoding", ["indices", "ulp_zstd"])
@pytest.mark.parametrize("name", TELLING)
def test_updates_through_a_folder_do_not_follow_defaults(
    build: Callable[..., Any], tmp_path: Path, name: str, encoding: str
) -> None:
    """Two trainers write, an engine of two ranks and one of a single rank read."""
    in_thread, in_process = IN_THREAD.get(name, nullcontext), IN_PROCESS.get(name, nullcontext)
    trainers = build(Trainers, str(tmp_path), encoding=encoding, verify="full")
    engines = [build(Engine, trainers, name="cut", num_ranks=2), build(Engine, trainers, name="whole")]

    def everywhere(run: Callable[..., Any], is_set: bool) -> Callable[..., Any]:
        def inside(function: Callable[[int], Any], **options: Any) -> Any:
            def call(rank: int) -> Any:
                with in_thread() if is_set else nullcontext():
                    return function(rank)

            with in_process() if is_set else nullcontext():
                return run(call, **options)

        return inside

    runs = {one: one.threads.run for one in (trainers, *engines)}
    for version, is_set in enumerate((True, False, True, True, False)):
        for one, run in runs.items():
            one.threads.run = everywhere(run, is_set)
        trainers.write(version)
        for engine in engines:
            assert engine.read() == version
            assert engine.holds(trainers.history[version])
    assert trainers.kinds == "FDDDF"
    for one, run in runs.items():
        one.threads.run = run
