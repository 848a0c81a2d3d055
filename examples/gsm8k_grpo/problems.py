"""Problems with a checked answer: where they come from, how they become tokens, what earns a reward."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from awex_delta import ConfigError

_FINAL = re.compile(r"#### *(-?[\d,]*\.?\d+)")
_WORD = re.compile(r"\d|[A-Za-z]+|####|\n|[^\sA-Za-z\d]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question and its worked answer, which ends in `#### 42`."""

    question: str
    answer: str


def final_answer(text: str) -> str | None:
    """The number after the last `####`, without thousands separators; None where there is none."""
    found = _FINAL.findall(text)
    return found[-1].replace(",", "") if found else None


def reward(completion: str, problem: Problem) -> float:
    """1 where the completion's final answer is exactly the problem's, else 0."""
    return float(final_answer(completion) == final_answer(problem.answer))


def load_problems(source: str) -> list[Problem]:
    """Read problems from a JSONL file, beside this one or anywhere, or a data set of the Hugging Face hub.

    Args:
        source: a path, or a name such as `openai/gsm8k`, of which the training part is taken.

    Raises:
        ConfigError: neither can be read.
    """
    for path in (Path(source), Path(__file__).with_name(source)):
        if path.is_file():
            return [Problem(**json.loads(line)) for line in path.read_text().splitlines()]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"data.source = {source!r} is no file, and the package `datasets`, which reads data sets, is not "
            "installed. Remedy: pip install datasets, or name a JSONL file of questions and answers"
        ) from error
    rows = load_dataset(source, "main", split="train")
    return [Problem(question=row["question"], answer=row["answer"]) for row in rows]


class Tokenizer(Protocol):
    """Text to tokens and back. `end` closes a completion."""

    end: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with nothing added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; what follows `end` is left out."""


class WordTokenizer:
    """The words, digits and signs of some problems, one token each. For models without a tokenizer.

    Args:
        problems: whose words become tokens.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: more words than rows.
    """

    end = 0

    def __init__(self, problems: Sequence[Problem], vocab_size: int) -> None:
        words = {word for one in problems for word in _WORD.findall(f"{one.question}\n{one.answer}")}
        self._words = ["", *sorted(words)]
        if len(self._words) > vocab_size:
            raise ConfigError(
                f"model.vocab_size = {vocab_size}: the problems hold {len(self._words)} words. "
                "Remedy: raise it to at least that"
            )
        self._tokens = {word: token for token, word in enumerate(self._words)}

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [self._tokens[word] for word in _WORD.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`. Digits stand together; the model may say tokens that are no word."""
        kept = tokens[: tokens.index(self.end)] if self.end in tokens else tokens
        words = [self._words[token] if token < len(self._words) else "?" for token in kept]
        return re.sub(r"(?<=\d) (?=\d)", "", " ".join(words))


class HubTokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.end: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        kept = tokens[: tokens.index(self.end)] if self.end in tokens else tokens
        text: str = self._tokenizer.decode(kept)
        return text
