"""What an engine holds, as digests that its ranks write down: small enough to be compared anywhere."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from awex_delta.engines.view import EngineTensor, EngineView
from awex_delta.errors import ConfigError
from awex_delta.observe.compare.checkpoints import Entry
from awex_delta.wire.digest import MODULUS, as_unsigned, digest, salt_of, sum_at

Size = Annotated[int, Field(ge=0, lt=2**63)]

_PIECE = 1 << 20  # elements whose positions are in memory at a time


class Part(BaseModel):
    """The digest of a box of one tensor, at the box's place in the whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: tuple[Size, ...]
    shape: tuple[Size, ...]
    digest: str = Field(pattern="^[0-9a-f]{16}$")


class DigestedTensor(BaseModel):
    """One HF tensor: the parts of it that this rank holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[Size, ...]
    parts: tuple[Part, ...]


class DigestFile(BaseModel):
    """What one engine rank says of its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["awex-delta digests 1"]
    tensors: dict[str, DigestedTensor]


_DIGEST_FILE = TypeAdapter(DigestFile)


class DigestedState:
    """Digests that the ranks of one engine wrote down. entries: by HF name."""

    def __init__(self, texts: Mapping[str, str | bytes]) -> None:
        """Add up the ranks' parts: JSON texts by where each came from.

        Raises ConfigError if a text is no such JSON, ranks contradict each other, or parts are missing.
        """
        self.entries: dict[str, Entry] = {}
        self._digests: dict[str, int] = {}
        parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = defaultdict(dict)
        for source, text in texts.items():
            for name, tensor in _parse(source, text).items():
                entry = Entry(dtype=tensor.dtype, shape=tensor.shape)
                if self.entries.setdefault(name, entry) != entry:
                    raise ConfigError(
                        f"{name} is {entry} in {source}, and {self.entries[name]} in another file"
                    )
                for part in tensor.parts:
                    value = int(part.digest, 16)
                    if parts[name].setdefault((part.start, part.shape), value) != value:
                        raise ConfigError(
                            f"{name}: two ranks hold other bits in the part at {list(part.start)}"
                        )
        for name, entry in self.entries.items():
            found = parts[name]
            covered = sum(math.prod(shape) for _, shape in found)
            if covered != entry.numel or not found:
                raise ConfigError(
                    f"{name}: {covered} of {entry.numel} elements have digests; give the files "
                    "of all ranks of one engine"
                )
            self._digests[name] = sum(found.values()) % MODULUS

    def find(self, name: str) -> str | None:
        """`name` where the engine has it."""
        return name if name in self.entries else None

    def digest(self, name: str) -> int:
        """The digest of a tensor."""
        return self._digests[name]


def digests_of(view: EngineView) -> dict[str, Any]:
    """What `DigestedState` reads, of one engine rank's live weights: write it with `json.dump`.

    The view is only read, and must not be updated meanwhile.
    """
    tensors: dict[str, Any] = {}
    for tensor in view.tensors():
        if tensor.tied_to is not None:
            continue
        part = tensor.view.detach()
        total = digest_of_part(tensor, tensor.name)
        found = Part(start=tensor.global_offset, shape=tuple(part.shape), digest=f"{total:016x}")
        entry = {"dtype": str(part.dtype).removeprefix("torch."), "shape": list(tensor.global_shape)}
        tensors[tensor.name] = entry | {"parts": [found.model_dump(mode="json")]}
    return {"format": "awex-delta digests 1", "tensors": tensors}


def digest_of_part(tensor: EngineTensor, salted_as: str) -> int:
    """The digest of a part of a tensor, at its place in the whole, of which a piece is read at a time.

    salted_as: name that sets the tensor apart from others.
    """
    part = tensor.view.detach()
    if tuple(part.shape) == tensor.global_shape:
        return digest(part, salted_as)
    total, rows = 0, max(1, _PIECE * len(part) // max(part.numel(), 1))
    for start in range(0, len(part), rows):
        block = part[start : start + rows]
        box = (tensor.global_offset[0] + start, *tensor.global_offset[1:])
        index = _row_starts(box, tuple(block.shape), tensor.global_shape, block.device)
        total += as_unsigned(sum_at(index, block.reshape(-1, block.shape[-1]), salt_of(salted_as)))
    return total % MODULUS


def _row_starts(
    start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Flat positions, in the whole tensor, of the first element of each row of a box."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for begin, size, extent in zip(start, (*shape[:-1], 1), whole, strict=True):
        index = index.unsqueeze(-1) * extent + torch.arange(begin, begin + size, device=device)
    return index.reshape(-1)


def _parse(source: str, text: str | bytes) -> dict[str, DigestedTensor]:
    try:
        found = _DIGEST_FILE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{source} holds no digests of an engine: {'.'.join(map(str, first['loc']))} {first['msg']}; "
            "write digests_of(engine) there as JSON"
        ) from error
    return found.tensors
