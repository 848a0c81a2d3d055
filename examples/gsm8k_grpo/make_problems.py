"""Write problems.jsonl: short arithmetic in words, in the format of GSM8K.

    python -m examples.gsm8k_grpo.make_problems

Names, things and numbers are drawn from the lists below by a seeded generator, so the file is always the
same. Every question is asked once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

PATH = Path(__file__).with_name("problems.jsonl")

_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana")
_THINGS = ("apples", "books", "coins", "shells", "stamps", "pens", "nuts", "cards")
_MORE = (
    "{name} has {a} {thing} and finds {b} more. How many {thing} now?",
    "{name} buys {a} {thing} and then {b} {thing}. How many in all?",
    "There are {a} {thing} here and {b} there. How many together?",
)
_LESS = (
    "{name} has {a} {thing} and loses {b}. How many {thing} are left?",
    "{name} gives away {b} of {a} {thing}. How many remain?",
)


def problems() -> list[dict[str, str]]:
    """Two questions for each sum and each difference of two digits, in a mixed order."""
    draw = random.Random(7)  # noqa: S311 - no secret
    lines = {}
    for a in range(10):
        for b in range(10):
            kinds = [(_MORE, "+", a + b)] + ([(_LESS, "-", a - b)] if a >= b else [])
            for templates, sign, result in kinds:
                for template in draw.sample(templates, 2):
                    question = template.format(name=draw.choice(_NAMES), thing=draw.choice(_THINGS), a=a, b=b)
                    lines[question] = f"{a} {sign} {b} = {result}\n#### {result}"
    mixed = list(lines.items())
    draw.shuffle(mixed)
    return [{"question": question, "answer": answer} for question, answer in mixed]


def main() -> None:
    """Write the file."""
    PATH.write_text("".join(json.dumps(line) + "\n" for line in problems()))


if __name__ == "__main__":
    main()
