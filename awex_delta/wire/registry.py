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


def codecs_for(encoding: str) -> tuple[Codec, ...]:
    """The codecs that frames may have under one setting of `weight_update_delta_encoding`.

    Raises:
        ConfigError: there is no such encoding.
    """
    if encoding != AUTO:
        codec = codec_named(encoding)
        if codec.needs_context:
            load_loops()  # now, while no peer waits for it
        return (codec,)
    return tuple(codec for codec in CODECS.values() if not codec.needs_context)


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
