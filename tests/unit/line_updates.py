"""Updates of one pair's line for the tests of the wire: made, sent through frames, and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from awex_delta.lines.bits import UNSTATED, step_code
from awex_delta.lines.changes import Changes
from awex_delta.wire.buckets import Bucket, cut
from awex_delta.wire.codec import Codec, settle
from awex_delta.wire.frame import FrameIdentity, check_complete, pack_frame, unpack_frame
from awex_delta.wire.guard import num_unstated
from awex_delta.wire.spans import Read, Span

BF16 = torch.bfloat16
BUCKET = 1 << 26
IDENTITY = FrameIdentity(
    run_id="0123456789abcdef" * 2,
    base_version=41,
    target_version=42,
    pair=2**64 - 3,
    sender=3,
    receiver=1,
    dtype=BF16,
)


def bits(values: Sequence[int]) -> torch.Tensor:
    """bf16 values of the given 16-bit patterns."""
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(BF16)


def patterns(value: torch.Tensor | None) -> list[int]:
    """The 16-bit patterns of bf16 values."""
    assert value is not None
    found: list[int] = value.view(torch.int16).tolist()
    return found


def reader(weights: torch.Tensor, begin: int = 0) -> Read:
    """Reads a line of which `weights` are the part from `begin` on."""
    return lambda start, stop: weights[start - begin : stop - begin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A line of weights before and after some changes."""

    old: torch.Tensor
    after: torch.Tensor
    changes: Changes

    @property
    def numel(self) -> int:
        """Elements of the line."""
        return self.old.numel()

    @property
    def span(self) -> Span:
        """The whole line."""
        return Span(0, self.numel)

    @property
    def bucket(self) -> Bucket:
        """All changes in one frame, without a guard."""
        return Bucket(span=self.span, first=0, last=self.changes.num_changed)


def update(
    old: torch.Tensor,
    new: torch.Tensor,
    pos: torch.Tensor,
    *,
    unstated: slice | None = None,
    codes: bool = True,
) -> Update:
    """`old` becomes `new` at `pos`.

    Args:
        old, new: [n].
        pos: int64 [k], ascending.
        unstated: changes that state no step.
        codes: False for changes without codes.
    """
    after = old.clone()
    after[pos] = new[pos]
    code = None
    if codes:
        code = step_code(old[pos], new[pos])
        code[unstated or slice(0, 0)] = UNSTATED
    return Update(old=old, after=after, changes=Changes(pos=pos, code=code, value=new[pos]))


def changed(old: torch.Tensor, new: torch.Tensor, *, unstated: slice | None = None) -> Update:
    """`old` becomes `new`, wherever they differ."""
    pos = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
    return update(old, new, pos, unstated=unstated)


def adamw_step(lr: float, numel: int = 400_000) -> Update:
    """bf16 weights before and after the third step."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(numel, generator=generator) * 0.02
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.01)
    for _ in range(3):
        old = weight.bfloat16()
        weight.grad = torch.randn(numel, generator=generator)
        optimizer.step()
    return changed(old, weight.bfloat16())


def buckets_of(
    codec: Codec, given: Update, bucket_bytes: int = BUCKET, *, whole_prefix: int = 0, guards: bool = True
) -> tuple[Bucket, ...]:
    """Where the update is cut."""
    unstated = num_unstated(codec, given.changes) if guards else None
    return cut(
        given.changes, codec, BF16, given.numel, bucket_bytes, whole_prefix=whole_prefix, unstated=unstated
    )


def frames_of(
    codec: Codec, given: Update, bucket_bytes: int = BUCKET, *, whole_prefix: int = 0, guards: bool = True
) -> list[torch.Tensor]:
    """The update in frames."""
    buckets = buckets_of(codec, given, bucket_bytes, whole_prefix=whole_prefix, guards=guards)
    return [pack_frame(IDENTITY, codec, b, given.changes, reader(given.after)) for b in buckets]


def written(codec: Codec, frames: Sequence[torch.Tensor], old: torch.Tensor) -> torch.Tensor:
    """The weights after all frames. Guards must hold."""
    new, end = old.clone(), 0
    look = old.__getitem__
    for frame in frames:
        found = unpack_frame(frame, IDENTITY, [codec], begin=end, numel=old.numel(), read=reader(old))
        end = found.span.end
        if found.whole is not None:
            new[found.span.begin : end] = found.whole
            continue
        assert found.changes is not None
        if found.guard is not None:
            assert found.guard.holds(found.changes.pos, look)
        settled = settle(found.changes, look)
        assert settled.code is None
        assert settled.value is not None
        new[settled.pos] = settled.value
    check_complete(end, old.numel())
    return new


def there_and_back(codec: Codec, given: Update) -> None:
    """Through one frame and onto the old values: every position and every bit is as it was."""
    frame = pack_frame(IDENTITY, codec, given.bucket, given.changes, reader(given.after))
    found = unpack_frame(frame, IDENTITY, [codec], begin=0, numel=given.numel, read=reader(given.old))
    assert found.changes is not None
    assert found.changes.pos.tolist() == given.changes.pos.tolist()
    settled = settle(found.changes, lambda pos: given.old[pos])
    assert settled.code is None
    assert patterns(settled.value) == patterns(given.changes.value)
