"""What travels over HTTP: JSON of these shapes, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from awex_delta.gateway.states import PairState
from awex_delta.settings.schema import RolloutConfig, TrainEngineConfig

MAX_BODY_BYTES = 1 << 18
"""The longest body of a request; a pair of a thousand URLs needs less."""

MAX_SENTENCE_CHARS = 8192

STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _like(example: dict[str, Any]) -> ConfigDict:
    """The same, with an example for the OpenAPI document."""
    return ConfigDict(**STRICT, json_schema_extra={"examples": [example]})


_URL: TypeAdapter[HttpUrl] = TypeAdapter(HttpUrl)


def _whole_url(value: str) -> str:
    try:
        _URL.validate_python(value)
    except ValidationError:
        raise ValueError("not a URL such as http://10.0.0.7:8100/prefix") from None
    return value.rstrip("/")


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(urls)) != len(urls):
        raise ValueError("a URL is given twice")
    return urls


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Name of a pair or of an engine."""
Version = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
Index = Annotated[int, Field(ge=0, le=1 << 20, strict=True)]
Amount = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of bytes or elements, as a side counted them."""
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 _.-]{1,64}$")]
"""Text that a side may have shown as a label."""
Sentence = Annotated[str, StringConstraints(max_length=MAX_SENTENCE_CHARS)]
Life = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Identity of one connection of a pair."""
Url = Annotated[
    str,
    # No user, query or fragment: URLs are shown in answers and logs, where no secret belongs.
    StringConstraints(pattern=r"^https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?$", max_length=2048),
    AfterValidator(_whole_url),
]
Urls = Annotated[tuple[Url, ...], Field(min_length=1, max_length=1024), AfterValidator(_distinct)]


class PairConfig(BaseModel):
    """The settings of both sides, as `awex_delta.resolve` takes them."""

    model_config = STRICT

    train: TrainEngineConfig
    """The trainer's settings."""

    rollout: RolloutConfig
    """The engines' settings."""


class ConnectRequest(BaseModel):
    """Which trainer and engines form a pair."""

    model_config = _like(
        {
            "pair": "policy",
            "trainers": ["http://127.0.0.1:8101"],
            "engines": ["http://127.0.0.1:8102"],
            "config": {
                "train": {"backend": "megatron:d1", "enable_delta_weight_update": True},
                "rollout": {"backend": "vllm:d1"},
            },
        }
    )

    pair: Name
    """Name of the pair."""

    trainers: Urls
    """Where the routers of the trainer's ranks are mounted, one a process, in any order."""

    engines: Urls
    """Where the routers of the engines are mounted. Their order gives the engine ranks."""

    config: PairConfig
    """The settings of both sides."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if set(self.trainers) & set(self.engines):
            raise ValueError("a URL is given as a trainer's and as an engine's")
        return self


class UpdateRequest(BaseModel):
    """Bring the engines of a pair to the trainer's current weights."""

    model_config = _like({"pair": "policy", "version": 1})

    pair: Name
    """Name of the pair."""

    version: Version
    """The version that the weights get."""


class DisconnectRequest(BaseModel):
    """Let trainer and engines of a pair leave."""

    model_config = _like({"pair": "policy"})

    pair: Name
    """Name of the pair."""


class EngineReadiness(BaseModel):
    """Whether one engine may serve."""

    url: str
    ready: bool
    """Its weights are exactly the pair's committed version."""
    version: int | None
    """The version that it holds; None if it never had a full sync in this pair."""
    why: str
    """Why it is not ready; empty if it is ready."""


class UpdateAnswer(BaseModel):
    """What a committed update did."""

    pair: str
    version: int
    kind: Literal["full", "delta"]
    reason: str
    """Name of the reason for a full sync, NONE for a delta."""
    verdict: str
    """Kind and reason as a sentence."""
    bytes: int
    """Payload that all trainer ranks sent."""
    full_bytes: int
    """Payload of a full sync."""
    changed_share: float | None
    """Share of the owned elements that were sent as changed; None if nothing was detected."""
    not_finite: int = 0
    """NaN and infinite values among what was sent."""
    seconds: float
    """Seconds that the slowest trainer rank took."""
    phases: dict[str, float]
    """Seconds by phase, each as the slowest trainer rank in it took them."""


class PairAnswer(BaseModel):
    """Where a pair stands."""

    pair: str
    state: PairState
    version: int | None
    """The last version committed since it connected."""
    last_update: UpdateAnswer | None
    """The last one that committed; kept when the pair disconnects."""
    failure: str
    """Why the last request failed; empty if it did not."""
    trainers: tuple[str, ...]
    engines: tuple[EngineReadiness, ...]
    ready: bool
    """Every engine may serve the pair's version."""


class Health(BaseModel):
    """The gateway answers."""

    status: Literal["ok"]
    version: str
    pairs: dict[str, PairState]


class Problem(BaseModel):
    """Why a request was refused or failed."""

    error: str
    """Kind of the problem, in a word."""
    detail: str
    """What is wrong, where, and what to do."""
    state: PairState | None = None
    """The state of the pair, if there is one."""
    sides: dict[str, str] = Field(default_factory=dict)
    """What each side that failed said, by URL."""
