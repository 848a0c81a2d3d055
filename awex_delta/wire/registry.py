"""Every encoding by name."""

from __future__ import annotations

from collections.abc import Mapping

from awex_delta.errors import ConfigError
from awex_delta.wire.choice import AUTO
from awex_delta.wire.classes import load_loops
from awex_delta.wire.codec import Codec
from awex_delta.wire.context import ContextCodec, numba_is_installed
from awex_delta.wire.gaps import GapCodec
from awex_delta.wire.indices import IndicesCodec

_ALL: tuple[Codec, ...] = (
    IndicesCodec(),
    GapCodec(name="gaps", number=2, steps=False, compress=False),
    GapCodec(name="ulp", number=3, steps=True, compress=False),
    GapCodec(name="ulp_zstd", number=4, steps=True, compress=True),
    ContextCodec(),
)

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in _ALL}


def codecs_for(encoding: str, *, context: bool = False) -> tuple[Codec, ...]:
    """The codecs that frames may have under one setting of `weight_update_delta_encoding`.

    Args:
        encoding: the setting.
        context: whether `auto` may choose encodings that read the weights: every rank of both sides has
            what they need, see `numba_is_installed`.

    Raises:
        ConfigError: there is no such encoding.
    """
    allowed = [name for name, codec in CODECS.items() if context or not codec.needs_context]
    codecs = tuple(codec_named(name) for name in (allowed if encoding == AUTO else [encoding]))
    if any(codec.needs_context for codec in codecs):
        load_loops()  # now, while no peer waits for it
    return codecs


def codec_named(name: str) -> Codec:
    """The codec called `name`.

    Raises:
        ConfigError: there is no such codec, or this machine lacks what it needs.
    """
    if name not in CODECS:
        known = ", ".join(sorted([AUTO, *CODECS]))
        raise ConfigError(f"weight_update_delta_encoding={name!r} is unknown: choose one of {known}")
    codec = CODECS[name]
    if codec.needs_context and not numba_is_installed():
        raise ConfigError(
            f"weight_update_delta_encoding={name!r} needs numba, which is not installed here: "
            "pip install 'awex-delta[context]' on trainers and engines, or choose ulp_zstd"
        )
    return codec
