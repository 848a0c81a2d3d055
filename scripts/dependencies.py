"""Print what the package needs to run, one requirement a line, for `pip install --requirement`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main() -> None:
    """Print them."""
    print("\n".join(tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]))


if __name__ == "__main__":
    main()
