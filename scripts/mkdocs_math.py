"""A hook of mkdocs: formulas become MathML as the site is built, so that a browser needs no script for them.

The pages hold them as `$…$` and `$$…$$`, which GitHub draws as well.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of a formula, within a line or as a block.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.+?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(text: str, **_: Any) -> str:
    """mkdocs calls it with the HTML of every page."""
    return _FORMULA.sub(_as_mathml, text)


def _as_mathml(formula: re.Match[str]) -> str:
    display = "block" if formula["tag"] == "div" else "inline"
    tex = html.unescape(formula["tex"]).strip().replace(r"\_", "_")  # names of code, in \texttt
    return convert(tex, display=display)
