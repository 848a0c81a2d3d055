"""Configuration files of a whole run: read, overridden by dotted arguments, and the shape of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationInfo, field_validator

from awex_delta.errors import ConfigError
from awex_delta.settings.schema import Section


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `3e-6` is a number, though YAML 1.1 wants a point in it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


_LARGEST = 2**40  # of one size: products of a few still fit a float


_Section = TypeVar("_Section", bound=Section)
PRESETS = Path(__file__).parent
"""The folder of the presets that come with the package."""


class ModelShape(Section):
    """A Qwen3 or Qwen3-MoE model: its sizes, under the names of HF configurations, and its first weights."""

    path: str | None = None
    """Folder or hub name of an HF checkpoint to begin from; none: random weights and a word tokenizer."""

    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of random weights."""

    architecture: Literal["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
    """Class of the HF model; `Qwen3MoeForCausalLM` has experts in every layer."""

    vocab_size: int = Field(gt=0, le=_LARGEST)
    """Rows of the embedding, and of `lm_head`."""

    hidden_size: int = Field(gt=0, le=_LARGEST)
    """Width of the residual stream."""

    num_hidden_layers: int = Field(gt=0, le=_LARGEST)
    """Decoder layers."""

    num_attention_heads: int = Field(gt=0, le=_LARGEST)
    """Query heads."""

    num_key_value_heads: int = Field(gt=0, le=_LARGEST)
    """Heads of keys and of values."""

    head_dim: int = Field(gt=0, le=_LARGEST)
    """Width of one head."""

    intermediate_size: int = Field(gt=0, le=_LARGEST)
    """Width of the feed-forward layers; not used where all layers have experts."""

    num_experts: int = Field(default=0, ge=0, le=_LARGEST)
    """Experts a layer; 0 in a model without."""

    num_experts_per_tok: int = Field(default=0, ge=0, le=_LARGEST)
    """Experts that each token passes."""

    moe_intermediate_size: int = Field(default=0, ge=0, le=_LARGEST)
    """Width of one expert."""

    tie_word_embeddings: bool = False
    """`lm_head` is the embedding."""

    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary positions."""

    max_position_embeddings: int = Field(default=4096, gt=0, le=_LARGEST)
    """Longest sequence."""

    @field_validator("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    @classmethod
    def _with_experts(cls, value: int, info: ValidationInfo) -> int:
        if (value > 0) != (info.data.get("architecture") == "Qwen3MoeForCausalLM"):
            raise ValueError("above 0 in Qwen3MoeForCausalLM and 0 in Qwen3ForCausalLM")
        return value


def find_preset(preset: str) -> Path:
    """The file of a preset: the name of one that comes with the package, or a path.

    Raises ConfigError if there is neither; names those that there are.
    """
    known = {path.stem: path for path in PRESETS.glob("*.yaml")}
    if preset in known:
        return known[preset]
    if not Path(preset).exists():
        names = ", ".join(sorted(known))
        raise ConfigError(
            f"there is no file {preset!r}. Remedy: give a YAML file, or one of the presets {names}"
        )
    return Path(preset)


def read_preset(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file of sections, and change single settings. Each section checks its own data.

    overrides are such as `train.weight_update_anchor_interval=5`; the value is read as YAML. Raises
    ConfigError if the file cannot be read or holds no sections, or an override is not of that form.
    """
    try:
        data = _read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}. Remedy: name a YAML file such as a preset") from error
    if not isinstance(data, dict) or not all(
        isinstance(name, str) and isinstance(section, dict) for name, section in data.items()
    ):
        raise ConfigError(f"{path}: it holds no sections. Remedy: write them as in a preset")
    for override in overrides:
        _override(data, override)
    return data


def load_section(kind: type[_Section], data: Mapping[str, Any], name: str) -> _Section:
    """Build one section of what `read_preset` gave; one that is left out has its defaults.

    Raises ConfigError if it is refused, which names the section.
    """
    try:
        return kind.load(data.get(name, {}))
    except ConfigError as error:
        raise ConfigError(f"section {name}: {error}") from None


def _override(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, *inner = name.split(".")
    if not equals or not inner or section not in data:
        raise ConfigError(
            f"override {override!r} is not of the form section.setting=value. Remedy: begin with one of "
            f"{', '.join(data)}, such as train.weight_update_anchor_interval=5"
        )
    place = data[section]
    for step in inner[:-1]:
        place = place.setdefault(step, {})
        if not isinstance(place, dict):
            raise ConfigError(
                f"override {override!r}: {step} is one setting, not a group. Remedy: name it alone"
            )
    try:
        place[inner[-1]] = _read(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {error}. Remedy: write the value as in YAML") from error


def _read(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - derived from the safe loader
    except (ValueError, KeyError, AttributeError, RecursionError) as error:  # of a tag or a date that lies
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
