"""The documentation as a site: it builds without a warning, with its formulas, and asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


def test_the_menu_of_the_site_is_the_table_of_the_readme() -> None:
    said = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nplugins:")[0].split("\nnav:\n")[1]
    menu = {part.lower(): pages for part, pages in re.findall(r"- ([\w ]+): \[(.*)\]", said)}
    rows = re.findall(r"^\| ([a-z ]+) \| (\[.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    table = {part: ", ".join(re.findall(r"docs/en/([a-z]+\.md)", links)) for part, links in rows}
    assert menu == {part: pages for part, pages in table.items() if pages}


@pytest.mark.timeout(120)
def test_the_site_builds_and_is_self_contained(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    built = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    for folder, prefix in (("en", ""), ("zh", "zh/")):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            assert f"{prefix}{page.stem}.html" in built
        written = (ROOT / "docs" / folder / "numerics.md").read_text(encoding="utf-8").replace("$$", "$")
        shown = (tmp_path / f"{prefix}numerics.html").read_text(encoding="utf-8")
        assert shown.count("<math ") == written.count("$") / 2 > 100
        assert re.search(r"\$|\\[a-z_]", re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)) is None
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:'
    )
    assert [name for name in built if fetched.search((tmp_path / name).read_text(encoding="utf-8"))] == []
