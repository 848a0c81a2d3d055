"""Allocation strings: which backend runs on how many ranks, and how they are arranged.

    megatron:d2p1t4                       data 2, pipeline 1, tensor 4: 8 ranks
    megatron:(attn:d2p1t4|ffn:d1p1e8)     the same 8 ranks, with experts spread over all of them
    fsdp:d8    fsdp:d4t2                  FSDP2 over 8 ranks; over 4, each of 2 tensor-parallel ranks
    torch:d1                              a trainer whose ranks are data parallel alone
    sglang:d2t4p1    vllm:d1t2            an inference engine

Letters stand in any order, each at most once; a missing letter means 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from awex_delta.errors import ConfigError

TRAINER_BACKENDS = ("megatron", "fsdp", "torch")
ENGINE_BACKENDS = ("sglang", "vllm", "transformers")

_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor", "c": "context", "e": "expert"}
_TRAINER_LETTERS = "dptc"
_EXPERT_LETTERS = "dpte"
_FSDP_LETTERS = "dtcp"
_ENGINE_LETTERS = "dpt"
_LETTERS = {"megatron": _TRAINER_LETTERS, "fsdp": _FSDP_LETTERS}
_DATA_ALONE = {
    "torch": "a plain torch trainer, of which each rank holds whole parameters",
    "transformers": "a transformers model, which runs whole",
}

_HYBRID = re.compile(r"\(attn:(?P<attn>[^|()]*)\|ffn:(?P<ffn>[^|()]*)\)")
_TERM = re.compile(r"(?P<letter>[a-z])(?P<size>[1-9][0-9]{0,5})")
_TERM_LIKE = re.compile(r"[A-Za-z][^A-Za-z]*|.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many ways each kind of parallelism splits the ranks of one backend."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all dimensions."""
        return self.data * self.pipeline * self.tensor * self.context * self.expert

    def __str__(self) -> str:
        context = f"c{self.context}" if self.context > 1 else ""
        expert = f"e{self.expert}" if self.expert > 1 else ""
        return f"d{self.data}p{self.pipeline}t{self.tensor}{context}{expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One parsed allocation string; `str()` writes it back in canonical form.

    backend: name before the first colon.
    layout: arrangement of all ranks, for the attention layers where the experts have their own.
    experts: arrangement of the same ranks for the expert layers; None without an `ffn` part.
    """

    backend: str
    layout: Parallelism
    experts: Parallelism | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks that the backend runs on."""
        return self.layout.world_size

    def __str__(self) -> str:
        if self.experts is None:
            return f"{self.backend}:{self.layout}"
        return f"{self.backend}:(attn:{self.layout}|ffn:{self.experts})"


def parse_allocation(text: str, *, backends: Collection[str]) -> Allocation:
    """Parse an allocation string such as `megatron:d2p1t4`; its world size is at least 1.

    backends are the names that may stand before the colon, `TRAINER_BACKENDS` or `ENGINE_BACKENDS`. Raises
    ConfigError if the text does not parse, which quotes the part at fault and says where it stands.
    """
    backend, colon, body = text.partition(":")
    if backend not in backends:
        raise ConfigError(f"backend {backend!r} in {text!r} is not one of {', '.join(backends)}")
    if not colon or not body:
        raise ConfigError(f"{text!r} has no dimensions after {backend!r}; write for example '{backend}:d2'")
    offset = len(backend) + 1
    if backend == "megatron" and body.startswith("("):
        return _parse_hybrid(text, offset, backend)
    layout = _parse_layout(text, offset, body, _LETTERS.get(backend, _ENGINE_LETTERS))
    if backend == "fsdp" and layout.pipeline > 1:
        raise ConfigError(
            f"{text!r} has p{layout.pipeline}, but FSDP2 has no stages; write for example 'fsdp:d4'"
        )
    if backend in _DATA_ALONE and layout.world_size != layout.data:
        raise ConfigError(f"{text!r} splits {_DATA_ALONE[backend]}; write for example '{backend}:d2'")
    return Allocation(backend=backend, layout=layout)


def _parse_hybrid(text: str, offset: int, backend: str) -> Allocation:
    """Parse `(attn:...|ffn:...)`, which describes the same ranks twice."""
    match = _HYBRID.fullmatch(text, offset)
    if match is None:
        raise ConfigError(f"{text[offset:]!r} in {text!r} is not of the form '(attn:d2p1t4|ffn:d1p1e8)'")
    attention = _parse_layout(text, match.start("attn"), match["attn"], _TRAINER_LETTERS)
    experts = _parse_layout(text, match.start("ffn"), match["ffn"], _EXPERT_LETTERS)
    if attention.world_size != experts.world_size:
        raise ConfigError(
            f"the halves of {text!r} arrange the same ranks, but 'attn:{match['attn']}' covers "
            f"{attention.world_size} and 'ffn:{match['ffn']}' covers {experts.world_size}"
        )
    if attention.pipeline != experts.pipeline:
        raise ConfigError(
            f"the halves of {text!r} share the pipeline stages, but 'attn:{match['attn']}' has "
            f"p{attention.pipeline} and 'ffn:{match['ffn']}' has p{experts.pipeline}"
        )
    return Allocation(backend=backend, layout=attention, experts=experts)


def _parse_layout(text: str, offset: int, body: str, letters: str) -> Parallelism:
    """Parse dimensions such as `d2p1t4`, which begin at `offset` of the whole text."""
    sizes: dict[str, int] = {}
    for part in _TERM_LIKE.finditer(body):
        where = f"{part[0]!r} at character {offset + part.start() + 1} of {text!r}"
        term = _TERM.fullmatch(part[0])
        if term is None:
            raise ConfigError(f"{where} is not a letter followed by a positive whole number, such as 'd2'")
        if term["letter"] not in letters:
            raise ConfigError(
                f"{where} is not a dimension here; use {_describe(letters)}{_hint(term['letter'], letters)}"
            )
        name = _DIMENSIONS[term["letter"]]
        if name in sizes:
            raise ConfigError(f"{where} gives {name} parallelism a second time; give each dimension once")
        sizes[name] = int(term["size"])
    if not sizes:
        raise ConfigError(f"no dimensions at character {offset + 1} of {text!r}; write for example 'd2p1t4'")
    return Parallelism(**sizes)


def _describe(letters: str) -> str:
    return ", ".join(f"{letter} ({_DIMENSIONS[letter]})" for letter in letters)


def _hint(letter: str, letters: str) -> str:
    """Where expert parallelism goes instead, since each backend takes it elsewhere."""
    if letter != "e":
        return ""
    if letters == _FSDP_LETTERS:
        return "; FSDP2 shards experts as it does all parameters"
    if letters == _TRAINER_LETTERS:
        return "; expert parallelism goes into the ffn half: 'megatron:(attn:d2p1t4|ffn:d1p1e8)'"
    return "; an engine spreads experts over its tensor-parallel ranks, as its own arguments say"
