"""The page about models says what is registered and what was run, and what AWEX and transformers do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from awex.models.qwen4_exp import register_qwen4_exp_awex
from awex.models.registry import ModelRegistry, get_train_weights_converter
from awex.sharding.rank_info import RankInfo

from awex_delta.trainers.converters import converted_as
from tests.docs.blocks import ROOT
from tests.procs import test_awex_converters as shapes
from tests.procs.test_models import MODELS as TRAINED
from tests.unit.worlds import Sizes, rank_info

PAGES = [(ROOT / "docs" / language / "models.md").read_text("utf-8") for language in ("en", "zh")]


def rows(page: str) -> list[list[str]]:
    found = re.findall(r"^\| (`.*) \|$", page, re.MULTILINE)
    return [[cell.strip("` ") for cell in row.split(" | ")] for row in found]


def runs(page: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in rows(page) if len(row) == 4}


REFUSED = [row for row in rows(PAGES[0]) if len(row) == 3]


def converter(architecture: str) -> Any:
    config = SimpleNamespace(
        hidden_size=shapes.HIDDEN, num_attention_heads=4, num_query_groups=2, kv_channels=8, num_layers=2
    )
    conf = {"infer_engine_config": {"tp_size": 1, "ep_size": 1}, "infer_atten_tp_size": 1}
    info = RankInfo(**rank_info(0, Sizes()))
    return get_train_weights_converter(
        "mcore", architecture, shapes.config_of(architecture), info, conf, tf_config=config
    )


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_table_lists_what_is_registered_and_what_was_trained(page: str) -> None:
    register_qwen4_exp_awex()
    table = runs(page)
    registered = set(ModelRegistry.get_registered_models())
    assert table.keys() == registered | TRAINED.keys()
    absent = {"no:", "否"}
    trained = {name for name, cells in table.items() if not any(word in cells[1] for word in absent)}
    assert trained == TRAINED.keys()
    assert {name for name in table if converted_as(name) != name} == table.keys() - registered
    assert [row for row in rows(page) if len(row) == 3] == REFUSED


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_transformers_lacks_the_class_or_the_names_where_the_table_says_so(page: str) -> None:
    register_qwen4_exp_awex()
    for architecture, (_, followed, _) in runs(page).items():
        if architecture in TRAINED:
            continue
        assert hasattr(transformers, architecture) == ("class" not in followed and "类" not in followed)


@pytest.mark.parametrize(("architecture", "param", "words"), REFUSED)
def test_awex_refuses_what_the_page_says_in_these_words(architecture: str, param: str, words: str) -> None:
    with pytest.raises((NotImplementedError, ValueError)) as refusal:
        converter(architecture).convert_param(param, torch.empty(32, 32, device="meta"))
    assert str(refusal.value) == words
