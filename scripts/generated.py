"""Write the pages that are made from the code, in both languages: python -m scripts.generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import api_page, cli_page, configuration_page, pays_table, reasons_page

ROOT = Path(__file__).parents[1]
_NOTE = "本页由代码生成 (`make docs`); 说明取自代码中的英文 docstring。"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A page in English, and its title in Chinese."""

    make: Callable[[], str]
    title: str


PAGES: Mapping[str, Generated] = {
    "api": Generated(make=api_page.page, title="API"),
    "cli": Generated(make=cli_page.page, title="命令行"),
    "configuration": Generated(make=configuration_page.page, title="配置"),
    "reasons": Generated(make=reasons_page.page, title="原因与异常"),
}


def files() -> dict[Path, str]:
    """What each file has to hold."""
    found = {ROOT / name: pays_table.page(name) for name in pays_table.HEADS}
    for name, page in PAGES.items():
        english = page.make()
        found[ROOT / "docs" / "en" / f"{name}.md"] = english
        _, _, body = english.partition("\n")
        found[ROOT / "docs" / "zh" / f"{name}.md"] = f"# {page.title}\n\n{_NOTE}\n{body}"
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
