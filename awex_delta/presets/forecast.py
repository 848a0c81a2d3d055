"""What a run will need, worked out before any process starts: ranks, owners, bytes and memory.

Pure arithmetic over the shape of the model and the two allocations. Counts are exact for Qwen3 and
Qwen3-MoE; bytes of a delta are expected values for changes that are spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from awex_delta.errors import ConfigError
from awex_delta.presets.files import ModelShape
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.settings.allocation import Allocation, Parallelism
from awex_delta.settings.environment import worker_environment
from awex_delta.settings.resolve import ResolvedDelta, Topology, resolve
from awex_delta.settings.schema import RolloutConfig, TrainEngineConfig
from awex_delta.wire.choice import expected_bytes

SHARES = (0.005, 0.01, 0.03)
"""Shares of changed elements for which a plan says the bytes."""

ENCODINGS = ("indices", "gaps", "ulp", "ulp_zstd", "ulp_context")
"""The encodings that a plan compares."""

MAX_RANKS = 1 << 16
"""How many ranks a side of a plan may have: a plan names the owners of every parameter."""

_BF16, _FP32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameters of a model, by how parallelism splits them.

    split: attention, dense feed-forward: over tensor-parallel ranks.
    copied: norms and routers: whole on every tensor-parallel rank.
    experts: over expert-parallel ranks.
    embedding, head: over tensor-parallel ranks, on the first and the last pipeline stage. A tied head is 0.
    """

    split: int
    copied: int
    experts: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.split + self.copied + self.experts + self.embedding + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Which ranks own a kind of parameter together, each an equal part of it.

    groups: one entry for each set of ranks that share optimizer state.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank of a side, without activations and key-value caches."""

    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One delta, with one encoding.

    changed_share: of all elements.
    total_bytes: over all ranks and engines.
    of_full: the same, against a full sync.
    largest_sender_bytes: of the trainer rank that sends most.
    largest_receiver_bytes: of the engine rank that receives most.
    """

    encoding: str
    changed_share: float
    total_bytes: int
    of_full: float
    largest_sender_bytes: int
    largest_receiver_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run will need. Bytes unless it says otherwise.

    rounds: rounds of the transfer schedule.
    conversion_bytes: what a full sync takes on a trainer rank besides, for converted weights.
    detection_bytes: what a delta of the largest share takes on a trainer rank besides, without frames.
    kept_bytes: what a trainer rank keeps between updates: a byte an owned element with
        `weight_update_delta_accumulate` or the method `capture`, if much changed; the old weights with the
        method `snapshot`; else 0.
    environment: what a launcher must export to every worker.
    """

    trainer: str
    engine: str
    num_trainer_ranks: int
    num_engine_ranks: int
    num_replicas: int
    rounds: int
    parameters: Counts
    owners: tuple[Owners, ...]
    owned_elements: int
    trainer_memory: Memory
    engine_memory: Memory
    conversion_bytes: int
    detection_bytes: int
    kept_bytes: int
    full_bytes: int
    encoding: str
    traffic: tuple[Traffic, ...]
    environment: Mapping[str, str]


def count_parameters(shape: ModelShape) -> Counts:
    """Count what the model holds."""
    h, d, layers = shape.hidden_size, shape.head_dim, shape.num_hidden_layers
    queries, keys = shape.num_attention_heads * d, shape.num_key_value_heads * d
    attention = h * (queries + 2 * keys) + queries * h
    dense = 0 if shape.num_experts else 3 * h * shape.intermediate_size
    table = shape.vocab_size * h
    return Counts(
        split=layers * (attention + dense),
        copied=layers * (2 * h + 2 * d + shape.num_experts * h) + h,
        experts=layers * shape.num_experts * 3 * h * shape.moe_intermediate_size,
        embedding=table,
        head=0 if shape.tie_word_embeddings else table,
    )


def plan_run(
    train: TrainEngineConfig, rollout: RolloutConfig, shape: ModelShape, shares: Sequence[float] = SHARES
) -> RunPlan:
    """Work out what a run will need. Deltas must be on.

    shares: of changed elements, for which the bytes of a delta are said; each above 0 and below 1.

    Raises ConfigError if a share is none, a setting cannot work, deltas are off, a side has more than
    `MAX_RANKS` ranks, or the model does not divide over the ranks.
    """
    for share in shares:
        if not 0 < share < 1:
            raise ConfigError(
                f"changed = {share:g}: no share of elements. Remedy: write one between 0 and 1, such as 0.01"
            )
    resolved = resolve(train, rollout)
    if resolved.topology is None:
        raise ConfigError(
            "train.enable_delta_weight_update = False: there is no delta to plan. Remedy: set it to true"
        )
    _check_size("train.backend", train.backend, resolved.topology.trainer)
    _check_size("rollout.backend", rollout.backend, resolved.topology.engine)
    _check_division(resolved.topology, shape)
    return _plan(resolved, resolved.topology, shape, shares)


def _plan(resolved: ResolvedDelta, topology: Topology, shape: ModelShape, shares: Sequence[float]) -> RunPlan:
    counts = count_parameters(shape)
    dense, experts = topology.trainer.layout, topology.trainer.experts or topology.trainer.layout
    local_dense = _dense_on_a_rank(counts, dense)
    local_experts = counts.experts // (experts.pipeline * experts.tensor * experts.expert)
    owned = local_dense // (dense.data * dense.context) + local_experts // experts.data
    local = local_dense + local_experts
    engine = topology.engine.layout
    on_engine = _dense_on_a_rank(counts, engine) + counts.experts // (engine.pipeline * engine.tensor)
    copies = counts.total + (engine.tensor - 1) * counts.copied
    full_bytes = _BF16 * copies * engine.data
    return RunPlan(
        trainer=str(topology.trainer),
        engine=str(topology.engine),
        num_trainer_ranks=topology.trainer.world_size,
        num_engine_ranks=topology.engine.world_size,
        num_replicas=engine.data,
        rounds=math.ceil(math.log2(topology.world_size)),
        parameters=counts,
        owners=_owners(shape, dense, experts),
        owned_elements=owned,
        trainer_memory=Memory(weights=_BF16 * local, gradients=_FP32 * local, optimizer=3 * _FP32 * owned),
        engine_memory=Memory(weights=_BF16 * on_engine),
        conversion_bytes=_BF16 * local,
        # A position of 8 bytes, a code of 1 and a value of 2 for each change.
        detection_bytes=int(max(shares) * owned * 11),
        kept_bytes=owned * _kept_per_element(resolved.settings),
        full_bytes=full_bytes,
        encoding=resolved.settings.encoding,
        traffic=tuple(
            Traffic(
                encoding=encoding,
                changed_share=share,
                total_bytes=int(full_bytes / _BF16 * share * each),
                of_full=share * each / _BF16,
                largest_sender_bytes=int(owned * engine.data * share * each),
                largest_receiver_bytes=int(on_engine * share * each),
            )
            for encoding in ENCODINGS
            for share in shares
            for each in [expected_bytes(encoding, share)]
        ),
        environment=worker_environment(resolved),
    )


def _kept_per_element(settings: DeltaSettings) -> int:
    if settings.method == "snapshot":
        return _BF16
    return int(settings.accumulate or settings.method == "capture")


def _dense_on_a_rank(counts: Counts, layout: Parallelism) -> int:
    """Parameters that are no experts, on a rank of the fullest pipeline stage."""
    table = counts.embedding + counts.head if layout.pipeline == 1 else max(counts.embedding, counts.head)
    return math.ceil((counts.split / layout.pipeline + table) / layout.tensor) + math.ceil(
        counts.copied / layout.pipeline
    )


def _owners(shape: ModelShape, dense: Parallelism, experts: Parallelism) -> tuple[Owners, ...]:
    """Sets of ranks in Megatron's order: tensor, then context, expert, data, pipeline."""
    inner, outer = dense.tensor, dense.data * dense.context
    groups = tuple(
        tuple(stage * inner * outer + data * inner + tensor for data in range(outer))
        for stage in range(dense.pipeline)
        for tensor in range(inner)
    )
    found = [Owners(kind="attention, norms, embeddings" if shape.num_experts else "all", groups=groups)]
    if shape.num_experts:
        inner = experts.tensor * experts.expert
        groups = tuple(
            tuple(stage * inner * experts.data + data * inner + place for data in range(experts.data))
            for stage in range(experts.pipeline)
            for place in range(inner)
        )
        each = shape.num_experts // experts.expert
        found.append(Owners(kind=f"experts, {each} of each layer", groups=groups))
    return tuple(found)


def _check_size(field: str, value: str, allocation: Allocation) -> None:
    if allocation.world_size > MAX_RANKS:
        raise ConfigError(
            f"{field} = {value!r}: {allocation.world_size} ranks, more than the {MAX_RANKS} that a plan is "
            "made for. Remedy: make its numbers smaller"
        )


def _check_division(topology: Topology, shape: ModelShape) -> None:
    trainer, experts, engine = topology.trainer.layout, topology.trainer.experts, topology.engine.layout
    wanted = [
        ("num_attention_heads", shape.num_attention_heads, "train.backend", "t", trainer.tensor),
        ("num_key_value_heads", shape.num_key_value_heads, "train.backend", "t", trainer.tensor),
        ("num_hidden_layers", shape.num_hidden_layers, "train.backend", "p", trainer.pipeline),
        ("num_experts", shape.num_experts, "train.backend", "e", experts.expert if experts else 1),
        ("num_attention_heads", shape.num_attention_heads, "rollout.backend", "t", engine.tensor),
        ("num_hidden_layers", shape.num_hidden_layers, "rollout.backend", "p", engine.pipeline),
    ]
    problems = [
        f"model.{name} = {value} does not divide by {letter}{size} of {field}. Remedy: change {letter}"
        for name, value, field, letter, size in wanted
        if value % size
    ]
    if problems:
        raise ConfigError("the model does not fit the allocations\n" + "\n".join(problems))
