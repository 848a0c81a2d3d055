"""Runs targets under atheris, each in a process of its own.

    python -m tests.fuzz.run FOLDER SECONDS [TARGET ...]

Leaves in FOLDER for each target its output (`NAME.log`), how the process ended (`NAME.end`, 0 if it did not
crash), the inputs that are worth keeping (`NAME/`), and what broke it: `NAME.broken-N.txt`, a traceback and
the input in hexadecimal digits, for each place that raised, and what libFuzzer leaves: `NAME.crash-...`,
`NAME.oom-...` or `NAME.timeout-...`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["awex_delta"]):
    from awex_delta.errors import AwexDeltaError
    from tests.fuzz.targets import TARGETS, Target

MEMORY_MB = 3000
MAX_BYTES = 1 << 16
AT_ONCE = 2
ODD: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e308, float("inf"), float("nan"), None, True, "", "0",
    "\ud800", "../x", "a" * 3000, [], {}, [[]], {"": 0},
)  # fmt: skip


def changed(data: bytes, max_size: int, seed: int, seeds: Sequence[bytes]) -> bytes:
    """Another input: where its first line is JSON, mostly another value, key or item somewhere in it.

    Often of a seed itself: most of what was found later is refused early.
    """
    source = random.Random(seed)  # noqa: S311
    if source.random() < 0.4:
        data = source.choice(seeds)
    head, newline, rest = data[1:].partition(b"\n")
    if source.random() < 0.4:
        return bytes(atheris.Mutate(data, max_size))
    try:
        value = json.loads(head)
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            value = _elsewhere(value, source)
        text = json.dumps(value).encode()
    except (ValueError, RecursionError):
        return bytes(atheris.Mutate(data, max_size))
    return (data[:1] + text + newline + rest)[:max_size]


def _elsewhere(value: Any, source: random.Random) -> Any:
    """The same, but for one place in it."""
    if isinstance(value, dict | list) and value and source.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = source.choice(keys)
        fate = source.random()
        if fate < 0.06:
            del value[key]
        elif fate < 0.12:
            value[key] = deepcopy(value[source.choice(keys)])
        elif fate < 0.18 and isinstance(value, dict):
            value[source.choice(("", "x", "__proto__", str(key) + "s"))] = deepcopy(value[key])
        elif fate < 0.24 and isinstance(value, list):
            value.append(deepcopy(value[key]))
        else:
            value[key] = _elsewhere(value[key], source)
        return value
    if type(value) is int and source.random() < 0.5:
        return value + source.choice((-1, 1, -8, 8, 1 << 20, 1 << 40))
    return deepcopy(source.choice(ODD))


def fuzz(name: str, target: Target, folder: Path, seconds: int) -> None:
    """Call a target with one input after the other; ends the process."""
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.disable()
    corpus = folder / name
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    broken: set[str] = set()

    def one(data: bytes) -> None:
        try:
            target.run(data)
        except AwexDeltaError:
            pass  # refused, as it should be
        except Exception as error:  # noqa: BLE001 - what it is, is what is looked for
            frames = traceback.extract_tb(error.__traceback__)
            last = ([one for one in frames if "/awex_delta/" in one.filename] or frames)[-1]
            place = f"{type(error).__name__} {last.filename}:{last.lineno}"
            if place not in broken:
                broken.add(place)
                text = "".join(traceback.format_exception(error))
                (folder / f"{name}.broken-{len(broken)}.txt").write_text(f"{text}\ninput: {data.hex()}\n")

    options = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MAX_BYTES}",
        "-timeout=20",
        "-mutate_depth=2",
        "-keep_seed=1",
        f"-artifact_prefix={folder}/{name}.",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=partial(changed, seeds=target.seeds))
    atheris.Fuzz()


def main(folder: Path, seconds: int, names: list[str]) -> None:
    """Run some targets, or all, `AT_ONCE` beside each other."""
    folder.mkdir(parents=True, exist_ok=True)
    os.fsync = lambda fd: None  # what is written is read again at once, whatever a disk does
    memory, parent = Path("/dev/shm"), os.getpid()  # noqa: S108 - no disk, where there is one
    tempfile.tempdir = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    try:
        waiting = [(name, TARGETS[name]()) for name in names or TARGETS]
        running: dict[int, str] = {}
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, target = waiting.pop(0)
                child = os.fork()
                if not child:
                    fuzz(name, target, folder, seconds)
                running[child] = name
            child, status = os.wait()
            (folder / f"{running.pop(child)}.end").write_text(str(os.waitstatus_to_exitcode(status)))
    finally:
        if os.getpid() == parent:  # children leave by an exception, too
            shutil.rmtree(tempfile.tempdir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
