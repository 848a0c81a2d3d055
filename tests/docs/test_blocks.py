"""Every block of the pages is of a kind that a test reads, and says what the code understands."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from awex_delta.cli.main import app
from awex_delta.integrations.verl.checks import check
from awex_delta.settings.resolve import RolloutConfig, TrainEngineConfig, resolve
from tests.docs.blocks import ROOT, Block, blocks_of, pages

BLOCKS = [block for path in pages() for block in blocks_of(path)]
LANGUAGES = {
    "python": "runs: see tests/docs/test_programs.py",
    "sh": "its commands are parsed by the program that they call",
    "yaml": "is read by the models of the settings",
    "text": "is what a program prints, or a picture",
}


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_has_a_language_that_a_test_reads(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block}: one of {', '.join(LANGUAGES)}"
    if block.language == "text":  # no program hides in a picture
        assert not re.search(r"^(\$ |import |from \w+ import |make |\.venv/bin/)", block.code, re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in pages() if path.parent.name == "zh"], ids=lambda p: p.name)
def test_a_translated_page_has_the_same_blocks(path: Path) -> None:
    original = blocks_of(path.parents[1] / "en" / path.name)
    ours = blocks_of(path)
    assert [block.language for block in ours] == [block.language for block in original]
    for mine, theirs in zip(ours, original, strict=True):
        if mine.language != "text":
            assert without_comments(mine) == without_comments(theirs), str(mine)


def without_comments(block: Block) -> str:
    return re.sub(r"[ \t]*#.*$", "", block.code, flags=re.MULTILINE)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_what_the_settings_accept(block: Block) -> None:
    data = yaml.safe_load(block.code)
    if set(data) == {"train", "rollout"}:
        resolve(TrainEngineConfig.load(data["train"]), RolloutConfig.load(data["rollout"]))
    elif set(data) == {"actor_rollout_ref"}:
        check(data)
    else:
        known = set(TrainEngineConfig.model_fields) | {"_version"}
        assert set(data) <= known, f"{block}: unknown settings {set(data) - known}"
        TrainEngineConfig.load({"backend": "megatron:d1", **data})


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, words split as a shell does, without what is not ours to check."""
    text = block.code.replace("\\\n", " ")
    functions = re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE)  # the block's own; they call curl
    found = []
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ ").rstrip(" &"), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of that command alone
            words = words[1:]
        if words and words[0].removesuffix("()") not in functions:
            found.append(words)
    return found


SHELL = [
    pytest.param(words, id=f"{block}-{' '.join(words)[:40]}")
    for block in of("sh")
    for words in commands(block)
]
FOREIGN = {"cd", "curl", "docker", "export", "git", "kubectl", "pip", "ray", "sbatch", "scp", "ssh", "vllm"}
"""Programs that are not ours; a page may call them."""
SAVED = {"engine.py", "folder.py", "sides.py", "trainer.py"}
"""Programs that a page shows and has its reader save."""


@pytest.mark.parametrize("words", SHELL)
def test_commands_exist_and_take_these_options(words: list[str]) -> None:
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)  # noqa: S607
    elif program == "awex-delta":
        parse(words[1:])
    elif program in ("python", "torchrun"):
        ours = [word for word in words[1:] if re.match(r"(examples|scripts|benchmarks)/", word)]
        modules = [after for word, after in pairwise(words) if word == "-m"]
        assert all((ROOT / word).exists() for word in ours), words
        assert all(importlib.util.find_spec(module) for module in modules if module != "sglang.launch_server")
        assert ours or modules or words[1] in SAVED, words
    else:
        assert program in FOREIGN, words


def parse(words: list[str]) -> None:
    """Let the command line's own parser read the words; nothing is called."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("awex-delta", list(words), resilient_parsing=True)
    while hasattr(command, "resolve_command") and (rest := remaining(context)):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, name
        command = found
        context = command.make_context(name or "", rest, parent=context, resilient_parsing=True)
    assert not [word for word in context.args if word.startswith("-")], words


def remaining(context: Any) -> list[str]:
    """Words that a group leaves to its commands; where they are depends on click's version."""
    return [*vars(context).get("_protected_args", []), *context.args]
