"""Where in the model the changes were: counts by layer and kind of tensor, from what one rank detected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from awex_delta.conversion.routes import Route
from awex_delta.protocol.stats import PartCount

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.\d+(?=\.)|(?<=weight)\d+$")


def count_parts(routes: Mapping[str, Route], changed: Mapping[str, int]) -> tuple[PartCount, ...]:
    """Sum what changed over the parameters of each layer and kind, in the order of the model.

    A place counts where this rank owns something. A parameter key that `changed` does not list did not
    change.
    """
    found: Counter[tuple[int | None, str]] = Counter()
    owned: Counter[tuple[int | None, str]] = Counter()
    for key, route in routes.items():
        size = route.info.owned_stop - route.info.owned_start
        if route.info.sparse and size:
            place = place_of(route.info.param, [output.name for output in route.outputs])
            owned[place] += size
            found[place] += changed.get(key, 0)
    places = sorted(owned, key=lambda place: (place[0] is not None, place[0] or 0))
    return tuple(
        PartCount(layer=layer, kind=kind, changed=found[layer, kind], owned=owned[layer, kind])
        for layer, kind in places
    )


def place_of(param: str, outputs: list[str]) -> tuple[int | None, str]:
    """Layer and kind of a parameter, by its HF names, whose layer number counts over the whole model.

    The layer number in the trainer's name may count from its pipeline stage.
    """
    layers = [int(match[1]) for name in outputs if (match := _LAYER.search(name))]
    inner = _LAYER.search(param)
    kind = _EXPERT.sub("", inner[2] if inner else param).removesuffix(".weight")
    return (layers[0] if layers else None), kind
