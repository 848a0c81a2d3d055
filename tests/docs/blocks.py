"""The fenced blocks of the README and of every page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block: the page it stands on, the line of its fence, its language, its text."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, namespace: dict[str, object], replaced: Mapping[str, str] | None = None) -> None:
        """Execute a Python block in `namespace`.

        Args:
            namespace: names that the page takes for granted; the block's own are added.
            replaced: texts of the page that this machine cannot serve, and what stands for them. Each must
                occur in the block.
        """
        code = self.code
        for text, other in (replaced or {}).items():
            assert text in code, f"{self} no longer says {text!r}"
            code = code.replace(text, other)
        # Blank lines before it, so that a traceback names the line of the page.
        exec(compile("\n" * self.line + code, self.page, "exec"), namespace)  # noqa: S102 - our own pages


def pages() -> list[Path]:
    """The README, the pages in English and Chinese, and the examples' own."""
    found = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*/*.md")]
    return [*found, *ROOT.glob("examples/**/README*.md")]


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            page=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, match.start()) + 1,
            language=match[1].strip(),
            code=match[2],
        )
        for match in FENCE.finditer(text)
    ]


def python_blocks(page: str) -> list[Block]:
    """The Python blocks of one page, named from the root of the repository."""
    return [block for block in blocks_of(ROOT / page) if block.language == "python"]
