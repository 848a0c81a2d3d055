"""The Grafana dashboard asks for metrics and labels that the gateway has, and leaves none of them out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from awex_delta.gateway.metrics import Metrics
from awex_delta.gateway.models import EngineReadiness, UpdateAnswer

DASHBOARD: dict[str, Any] = json.loads(files("awex_delta.gateway").joinpath("grafana.json").read_text())


def metrics() -> dict[str, set[str]]:
    """Labels by the name of each sample, once everything has happened."""
    happened = Metrics()
    answer: dict[str, Any] = {"pair": "a", "version": 2, "kind": "delta", "reason": "NONE", "bytes": 15}
    happened.updated(UpdateAnswer.model_construct(**answer, changed_share=0.5, phases={"detect": 0.25}))
    happened.failed("a", "update")
    happened.refused("a", "update")
    happened.engines("a", [EngineReadiness.model_construct(url="http://e", ready=True)])
    samples = re.findall(r"^(awex_delta_\w+)\{([^}]*)\} ", happened.text().decode(), re.MULTILINE)
    found = {name: set(re.findall(r'(\w+)="', labels)) for name, labels in samples}
    return {name: labels for name, labels in found.items() if not name.endswith("_created")}


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("query", "legend"), [*queries()])
def test_a_query_names_metrics_and_labels_that_exist(query: str, legend: str) -> None:
    known = metrics()
    names = re.findall(r"awex_delta_\w+", query)
    assert names
    assert set(names) <= known.keys()
    kept = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")} or known[
        names[0]
    ]
    for name in names:
        filtered = set(re.findall(rf"{name}\{{(\w+)=~", query))
        assert filtered == {"pair"}
        assert kept <= known[name]
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept


def test_every_metric_is_shown() -> None:
    shown = {name for query, _ in queries() for name in re.findall(r"awex_delta_\w+", query)}
    assert metrics().keys() == shown


def test_panels_have_a_place_of_their_own_and_the_chosen_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        here = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not here & taken, panel["title"]
        assert max(x for x, _ in here) < 24  # columns of Grafana's grid
        taken |= here
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert set(re.findall(r'"uid": "(\$[^"]*)"', json.dumps(DASHBOARD))) == {"${datasource}"}
    names = [one["name"] for one in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "pair"]
    assert DASHBOARD["templating"]["list"][1]["query"] == "label_values(awex_delta_version, pair)"
