"""What the documentation says exists, compiles, and is what the code does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import awex_delta
from awex_delta import errors
from awex_delta.lines.bits import UNSTATED
from awex_delta.lines.changes import Changes
from awex_delta.protocol.verdict import Reason
from awex_delta.wire.buckets import Bucket
from awex_delta.wire.frame import FrameIdentity, pack_frame
from awex_delta.wire.registry import CODECS
from awex_delta.wire.spans import Span
from scripts import generated
from scripts.reasons_page import EXCEPTIONS, REASONS
from tests.contract.sources import PACKAGE, ROOT

PAGES = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(ROOT.glob("docs/*/*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code_spans(path: Path) -> Iterator[str]:
    """What a page writes in backquotes."""
    yield from re.findall(r"`([^`\n]+)`", prose(path))


def importable(name: str) -> bool:
    """True for a dotted name of a module, which is not imported, or of something in one."""
    module, _, attribute = name.rpartition(".")
    parent = importlib.util.find_spec(module)
    if parent is None:
        return False
    if parent.submodule_search_locations is not None and importlib.util.find_spec(name) is not None:
        return True
    return hasattr(importlib.import_module(module), attribute)


def anchors(path: Path) -> set[str]:
    """Fragments that a link to a page may have."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    named = {found[1] for heading in headings if (found := re.search(r"\{#([\w-]+)\}$", heading))}
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            linked = (path.parent / file).resolve() if file else path
            assert linked.exists(), f"{path.name} links to {target}"
            assert not fragment or fragment in anchors(linked), f"{path.name} links to {target}"


def test_python_blocks_compile_and_import_what_exists() -> None:
    for path in PAGES:
        for _, code in BLOCK.findall(path.read_text(encoding="utf-8")):
            compile(code, path.name, "exec")
            for module, names in re.findall(r"^from (awex_delta\S*) import ([\w, ]+)$", code, re.MULTILINE):
                loaded = importlib.import_module(module)
                for name in names.split(", "):
                    assert hasattr(loaded, name), f"{path.name}: {module} has no {name}"


def test_files_tests_and_modules_that_a_page_names_exist() -> None:
    for path in PAGES:
        for span in code_spans(path):
            if re.fullmatch(r"(awex_delta|tests|scripts|examples|benchmarks|docs|\.ci)/[\w./-]*", span):
                name, folder = span, ROOT
            elif re.fullmatch(r"tests/[\w/]+\.py::\w+", span):
                name, _, test = span.partition("::")
                folder = ROOT
                assert f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), f"{path.name}: {span}"
            elif re.fullmatch(r"awex_delta(\.\w+)+", span):
                assert importable(span), f"{path.name}: no {span}"
                continue
            elif re.fullmatch(r"[a-z_]+/([a-z_]+(\.py)?)?", span) and path.name in (
                "concepts.md",
                "protocol.md",
            ):
                name, folder = span, ROOT / PACKAGE
                name = name if name.endswith((".py", "/")) else f"{name}.py"
            else:
                continue
            assert (folder / name).exists(), f"{path.name} names {span}"


def test_every_make_target_is_explained_and_no_other() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    match = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert match is not None
    said = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", said, re.MULTILINE)) == set(match[1].split())


def test_the_readme_names_every_page() -> None:
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    for path in PAGES[2:]:
        named_in = chinese if path.parent.name == "zh" else README
        assert f"({path.relative_to(ROOT)})" in named_in, path.name


def test_the_readme_names_every_public_name_that_a_program_needs() -> None:
    for name in (
        "resolve",
        "host_store",
        "Rendezvous",
        "attach_megatron",
        "attach_transformers",
        "UpdateError",
    ):
        assert name in awex_delta.__all__
        assert name in README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 120


def test_the_length_of_the_example_is_what_the_readme_says() -> None:
    lines = len((ROOT / "examples" / "train_and_serve.py").read_text(encoding="utf-8").splitlines())
    assert f"{lines} lines" in README


def test_generated_pages_are_current() -> None:
    for path, text in generated.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is out of date: make docs"


def test_every_reason_and_exception_has_advice() -> None:
    assert list(REASONS) == list(Reason)
    found = vars(errors).values()
    tree = {one for one in found if isinstance(one, type) and issubclass(one, Exception)}
    assert set(EXCEPTIONS) == tree
    for advice in (*REASONS.values(), *EXCEPTIONS.values()):
        assert advice.cause.endswith(".")
        assert advice.remedy.endswith(".")


def header_rows() -> list[tuple[int, int, str]]:
    """Offset, bytes and field of the header, as docs/en/protocol.md lists them."""
    text = (ROOT / "docs" / "en" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return [(int(offset), int(size), field) for offset, size, field in rows]


def test_the_frame_header_is_what_the_protocol_page_says() -> None:
    identity = FrameIdentity(
        run_id="0123456789abcdef" * 2,
        base_version=-1,
        target_version=7,
        pair=2**63 + 5,
        sender=3,
        receiver=2,
        dtype=torch.bfloat16,
    )
    changes = Changes(
        pos=torch.tensor([101, 105]),
        code=torch.tensor([1, UNSTATED], dtype=torch.int8),
        value=torch.ones(2, dtype=torch.bfloat16),
    )
    bucket = Bucket(span=Span(100, 109), first=0, last=2)
    frame = bytes(pack_frame(identity, CODECS["indices"], bucket, changes).numpy())
    rows = header_rows()
    assert [offset for offset, _, _ in rows] == [0, *(offset + size for offset, size, _ in rows)][:-1]
    fields = {field: (offset, size) for offset, size, field in rows}

    def number(begin: str, *, signed: bool = False, of: bytes = frame) -> int:
        (place,) = [place for field, place in fields.items() if field.startswith(begin)]
        return int.from_bytes(of[place[0] : sum(place)], "little", signed=signed)

    assert frame[:8] == b"AWEXDLTA"
    assert number("run id") == int.from_bytes(bytes.fromhex(identity.run_id), "little")
    assert number("protocol version") == 4
    assert number("codec") == CODECS["indices"].number
    assert number("wire dtype") == 1
    assert number("base version", signed=True) == -1
    assert number("target version", signed=True) == 7
    assert number("digest of the pair's line") == identity.pair
    assert (number("sender's seat"), number("receiver's seat")) == (3, 2)
    assert (number("begin of the span"), number("end of the span")) == (100, 109)
    assert (number("changed elements"), number("bytes of the body")) == (2, 16)
    assert (number("0 for a frame without a guard"), number("digest of the guard")) == (0, 0)
    header_bytes = rows[-1][0] + rows[-1][1]
    assert frame[header_bytes:] == b"".join(
        n.to_bytes(4, "little") for n in (1, 5)
    ) + b"\x80\x3f" * 2 + bytes(4)

    guarded = bytes(pack_frame(identity, CODECS["indices"], replace(bucket, guarded=True), changes).numpy())
    assert number("0 for a frame without a guard", of=guarded) == 1 + 1
    assert number("digest of the guard", of=guarded) != 0
    assert guarded[header_bytes:] == frame[header_bytes:] + (1).to_bytes(4, "little")

    values = torch.arange(9, dtype=torch.bfloat16)
    whole = bytes(
        pack_frame(
            identity,
            CODECS["indices"],
            replace(bucket, whole=True),
            changes,
            lambda start, stop: values[start - 100 : stop - 100],
        ).numpy()
    )
    assert (number("codec", of=whole), number("changed elements", of=whole)) == (0, 9)
    assert whole[header_bytes:] == values.view(torch.uint8).numpy().tobytes()


def test_the_protocol_page_names_the_settings_that_must_be_equal() -> None:
    text = (ROOT / "docs" / "en" / "protocol.md").read_text(encoding="utf-8")
    sentence = re.search(r"settings that must be equal:(.*?)\.", text, re.DOTALL)
    assert sentence is not None
    local = {
        *("accumulate", "method", "release_grad_buffers"),
        *("timeout_seconds", "connect_timeout_seconds", "read_workers", "secret_source", "not_finite"),
    }
    shared = set(awex_delta.DeltaSettings.__slots__) - local
    assert set(re.findall(r"`(\w+)`", sentence[1])) == shared


def test_the_changelog_has_an_entry_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## {re.escape(awex_delta.__version__)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert section is not None
    assert section[1].strip().startswith("- ")
