"""The table of the README that says when a delta pays."""

from __future__ import annotations

import re
from pathlib import Path

from awex_delta.cli.plan import plan_preset
from awex_delta.presets.files import find_preset
from awex_delta.presets.seconds import LINKS, seconds_by_link

ROOT = Path(__file__).parents[1]
HEADS = {
    "README.md": "| link of each rank | full sync | delta, 1 % changed | a delta pays below |",
    "README.zh.md": "| 每个 rank 的链路 | 全量同步 | delta, 1 % 变化 | 变化低于此比例时划算 |",
}
_TABLE = re.compile(r"(?<=<!-- when it pays -->\n).*?(?=<!-- /when it pays -->)", re.DOTALL)


def page(name: str) -> str:
    """The page with its table made anew."""
    plan = plan_preset(find_preset("qwen3_30b_a3b"), shares=(0.01,))
    rows = [HEADS[name], "|---|---|---|---|"]
    for row in seconds_by_link(plan, LINKS):
        delta = f"{row.deltas[row.best]:.2g} s ({row.best})"
        link = row.link.replace("gbit", " Gbit/s")
        rows.append(
            f"| {link} | {row.full:.2g} s | {delta} | {row.break_even:.1%} |".replace("1.2e+02", "120")
        )
    text = (ROOT / name).read_text(encoding="utf-8")
    return _TABLE.sub(lambda _: "\n".join(rows) + "\n", text)
