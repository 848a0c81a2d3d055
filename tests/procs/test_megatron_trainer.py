"""Real Megatron trainings on CPU, each rank a process: what each owns, finds, converts and restores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from awex_delta.detection.slices import Detection
from awex_delta.errors import ConfigError, UnsupportedError
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank, run_ranks
from awex_delta.testing.tiny_models import TinySpec, TinyTrainer, build_trainer, hf_config
from awex_delta.trainers.megatron import MegatronTrainer
from awex_delta.trainers.view import TrainerLayout, TrainerView, WeightInfo

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 3
DENSE = TinySpec(tp=2, vocab_size=130, vocab_multiple=16, init_std=0.2)
MOE = TinySpec(model="qwen3-moe", ep=2, expert_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank saw of one step. truth: changed elements of each whole local parameter."""

    truth: Mapping[str, torch.Tensor]
    found: Mapping[str, torch.Tensor]
    codes: Mapping[str, torch.Tensor]
    num_communications: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of a training."""

    layout: TrainerLayout
    weights: Sequence[WeightInfo]
    steps: Sequence[Step]
    first_losses: torch.Tensor
    first_tokens: torch.Tensor
    initial: Mapping[str, torch.Tensor]
    buffers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class CountCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on process groups: all of them pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func.namespace.startswith("c10d")
        return func(*args, **(kwargs or {}))


def start(
    me: Rank, spec: TinySpec, settings: DeltaSettings | None = None
) -> tuple[TinyTrainer, MegatronTrainer]:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(spec)
    return tiny, attach(tiny, settings or DeltaSettings())


def attach(tiny: TinyTrainer, settings: DeltaSettings | None = None) -> MegatronTrainer:
    return MegatronTrainer.attach(
        tiny.chunks, tiny.optimizer, tiny.hf_config, settings=settings or DeltaSettings()
    )


def bits(view: MegatronTrainer) -> dict[str, torch.Tensor]:
    sparse = [info.key for info in view.weights() if info.sparse]
    return {key: view.tensor(key).clone().view(torch.int16).view(-1) for key in sparse}


def by_key(view: TrainerView, detection: Detection) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Positions in each sparse parameter, and their codes."""
    found, begin = {}, 0
    pos, code = detection.changes.pos, detection.changes.code
    assert code is not None
    for info in (info for info in view.weights() if info.sparse):
        end = begin + torch.Size(info.shape).numel()
        here = (pos >= begin) & (pos < end)
        found[info.key] = (pos[here] - begin, code[here])
        begin = end
    return found


def train_and_watch(me: Rank, spec: TinySpec) -> Seen:
    tiny, view = start(me, spec)
    assert isinstance(view, TrainerView)
    scheduler = decaying(tiny)
    buffers = {
        info.key: view.tensor(info.key).clone() for info in view.weights() if "expert_bias" in info.key
    }
    first_tokens = torch.cat(list(islice(tiny._batches(), spec.pp)))
    initial = {
        name: tensor.clone()
        for info in view.weights()
        for name, tensor in view.convert(info.key, view.tensor(info.key))
    }
    view.committed()
    losses, steps = [], []
    for _ in range(NUM_STEPS):
        before = bits(view)
        tiny.train_step()
        losses.append(tiny.token_losses)
        scheduler.step(1)
        with CountCommunication() as counter:
            detection = view.detect()
        assert detection.reason is Reason.NONE, detection
        changes = by_key(view, detection)
        view.gather_params()
        after = bits(view)
        steps.append(
            Step(
                truth={key: (before[key] != after[key]).nonzero().view(-1) for key in after},
                found={key: index for key, (index, _) in changes.items()},
                codes={key: code for key, (_, code) in changes.items()},
                num_communications=counter.num_calls,
            )
        )
        view.committed()
    assert view.detect().num_changed == 0
    return Seen(
        layout=view.layout(),
        weights=view.weights(),
        steps=steps,
        first_losses=losses[0],
        first_tokens=first_tokens,
        initial=initial,
        buffers={key: (old, view.tensor(key).clone()) for key, old in buffers.items()},
    )


def decaying(tiny: TinyTrainer) -> OptimizerParamScheduler:
    """Megatron's scheduler: after every step it lowers the learning rate and raises the weight decay."""
    lr = tiny.spec.lr
    return OptimizerParamScheduler(
        tiny.optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=NUM_STEPS,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.3,
        wd_incr_steps=NUM_STEPS,
        wd_incr_style="linear",
    )


def assert_owned_once(ranks: Sequence[Seen]) -> None:
    """Each element of a sparse parameter is owned by one of the owners that the parameter names."""
    for rank, seen in enumerate(ranks):
        for info in seen.weights:
            if not info.sparse:
                continue
            assert rank in info.owners
            assert list(info.owners) == sorted(set(info.owners))
            parts = []
            for owner in info.owners:
                other = next(other for other in ranks[owner].weights if other.key == info.key)
                assert (other.shape, other.dtype, other.owners) == (info.shape, info.dtype, info.owners)
                parts.append(range(other.owned_start, other.owned_stop))
            covered = sorted(element for part in parts for element in part)
            assert covered == list(range(torch.Size(info.shape).numel())), info


def assert_changes_found(ranks: Sequence[Seen]) -> None:
    """Owners together find every element that a copy of the old weights shows, and few others."""
    num_true = num_found = 0
    for number in range(NUM_STEPS):
        for seen in ranks:
            step = seen.steps[number]
            assert step.num_communications == 0
            for info in seen.weights:
                if not info.sparse:
                    continue
                parts = [ranks[owner].steps[number].found.get(info.key) for owner in info.owners]
                union = torch.cat([part for part in parts if part is not None] or [torch.empty(0)])
                assert len(set(union.tolist())) == union.numel()
                missed = set(step.truth[info.key].tolist()) - set(union.tolist())
                assert not missed, (number, info.param, len(missed))
                num_true += step.truth[info.key].numel()
                num_found += union.numel()
    assert num_true > 1000
    assert num_found <= num_true * 1.01 + 5


def run(spec: TinySpec, num_ranks: int) -> list[Seen]:
    ranks: list[Seen] = run_ranks(train_and_watch, num_ranks, spec)
    assert_owned_once(ranks)
    assert_changes_found(ranks)
    return ranks


def whole_hf_weights(ranks: Sequence[Seen]) -> dict[str, torch.Tensor]:
    """Initial HF tensors, put together by hand from the tensor-parallel ranks of one replica."""
    whole: dict[str, torch.Tensor] = {}
    by_tp = sorted(
        (seen for seen in ranks if seen.layout.rank_info["dp_rank"] == 0),
        key=lambda seen: int(seen.layout.rank_info["tp_rank"]),
    )
    for name in dict.fromkeys(name for seen in by_tp for name in seen.initial):
        parts = [seen.initial[name] for seen in by_tp if name in seen.initial]
        if "norm" in name:
            whole[name] = parts[0]
        else:
            whole[name] = torch.cat(parts, dim=1 if "o_proj" in name or "down_proj" in name else 0)
    return whole


def hf_losses(spec: TinySpec, weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each token by transformers. Megatron's softmax has the rows that pad the vocabulary too."""
    config = hf_config(replace(spec, vocab_size=spec.padded_vocab_size))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(dict(weights), strict=True)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def assert_transformers_agrees(spec: TinySpec, weights: Mapping[str, torch.Tensor], seen: Seen) -> None:
    """The converted weights make the same model, and a mistake in them would show."""

    def distance(weights: Mapping[str, torch.Tensor]) -> float:
        return float((hf_losses(spec, weights, seen.first_tokens) - seen.first_losses).abs().mean())

    assert distance(weights) < 0.03
    for one, other in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
        wrong = dict(weights)
        for name in weights:
            if one in name:
                a, b = weights[name], weights[name.replace(one, other)]
                rows = min(len(a), len(b))
                wrong[name] = torch.cat((b[:rows], a[rows:]))
                wrong[name.replace(one, other)] = torch.cat((a[:rows], b[rows:]))
        assert distance(wrong) > 0.1, (one, other)


def test_dense_with_tensor_and_data_parallelism_and_padded_vocabulary() -> None:
    ranks = run(DENSE, 4)
    assert [seen.layout.rank_info["tp_rank"] for seen in ranks] == [0, 1, 0, 1]
    assert {info.owners for seen in ranks for info in seen.weights} == {(0, 2), (1, 3)}
    embedding = next(info for info in ranks[0].weights if "word_embeddings" in info.param)
    assert (embedding.shape[0] * 2, ranks[0].layout.vocab_size) == (160, 130)
    weights = whole_hf_weights(ranks)
    assert_transformers_agrees(DENSE, weights, ranks[0])
    single = run(replace(DENSE, tp=1, vocab_multiple=32), 1)
    for name, tensor in whole_hf_weights(single).items():
        assert tensor.equal(weights[name]), name


def test_experts_and_their_router_bias() -> None:
    ranks = run(MOE, 2)
    owners = {info.param: info.owners for info in ranks[1].weights}
    assert owners["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"] == (1,)
    assert owners["decoder.layers.0.mlp.router.weight"] == (0, 1)
    assert owners["decoder.layers.0.mlp.router.expert_bias"] == ()
    for seen in ranks:
        experts = {name.split(".")[5] for name in seen.initial if ".experts." in name}
        assert experts == ({"0", "1"} if seen is ranks[0] else {"2", "3"})
        assert len(seen.buffers) == MOE.layers
        for old, new in seen.buffers.values():
            assert new.dtype == torch.float32
            assert not old.equal(new)


def test_experts_that_are_replicated_are_owned_in_parts() -> None:
    ranks = run(TinySpec(model="qwen3-moe", ep=2, layers=1), 4)
    owners = {info.owners for seen in ranks for info in seen.weights}
    assert owners == {(0, 1, 2, 3), (0, 2), (1, 3)}


def test_tied_embeddings_on_one_stage() -> None:
    spec = TinySpec(tied=True, init_std=0.2)
    ranks = run(spec, 2)
    initial = ranks[0].initial
    assert initial["lm_head.weight"].equal(initial["model.embed_tokens.weight"])
    assert_transformers_agrees(spec, initial, ranks[0])


@pytest.mark.parametrize(
    ("virtual_pp", "layers_of"),
    [(1, [{0, 1}, {2, 3}]), (2, [{0, 2}, {1, 3}])],
    ids=["pipeline", "virtual pipeline"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_have_global_layers(virtual_pp: int, layers_of: list[set[int]], tied: bool) -> None:
    spec = TinySpec(pp=2, virtual_pp=virtual_pp, layers=4, hidden=32, tied=tied, init_std=0.2)
    ranks = run(spec, 2)
    for seen, expected in zip(ranks, layers_of, strict=True):
        assert {int(name.split(".")[2]) for name in seen.initial if ".layers." in name} == expected
        assert {info.chunk for info in seen.weights} == set(range(virtual_pp))
    assert "lm_head.weight" in ranks[1].initial
    assert not set(ranks[0].initial) & set(ranks[1].initial)
    assert_transformers_agrees(spec, {**ranks[0].initial, **ranks[1].initial}, ranks[1])


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(TinySpec(distributed_optimizer=False), id="replicated optimizer"),
        pytest.param(TinySpec(bucket_size=3000), id="many buckets"),
        pytest.param(TinySpec(model="qwen3-moe", layers=1, fp32_router=True), id="fp32 router"),
    ],
)
def test_other_optimizer_layouts(spec: TinySpec) -> None:
    ranks = run(spec, 2)
    for rank, seen in enumerate(ranks):
        expected = {(0, 1)} if spec.distributed_optimizer else {(rank,)}
        whole = {info.param for info in seen.weights if not info.sparse}
        assert {info.owners for info in seen.weights if info.sparse} == expected
        assert whole == ({"decoder.layers.0.mlp.router.weight"} if spec.fp32_router else set())


def check_late_gather(me: Rank, spec: TinySpec) -> None:
    tiny, view = start(me, spec)
    for _ in range(NUM_STEPS):
        view.committed()
        before = bits(view)
        tiny.train_step()
        late = bits(view)
        detection = view.detect()
        if spec.fp32_router:
            assert detection.reason is Reason.NO_FP32_MASTER
            assert "router" in detection.detail
            continue
        with CountCommunication() as counter:
            view.gather_params()
        assert counter.num_calls > 0
        current = bits(view)
        assert any(not late[key].equal(current[key]) for key in current), "nothing was late"
        found = by_key(view, detection)
        for info in view.weights():
            owned = slice(info.owned_start, info.owned_stop)
            assert late[info.key][owned].equal(current[info.key][owned]), "owners hold what they stepped"
            truth = (before[info.key][owned] != current[info.key][owned]).nonzero().view(
                -1
            ) + info.owned_start
            assert not set(truth.tolist()) - set(found[info.key][0].tolist())


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_owners_are_current_where_the_gather_is_late(model: Any) -> None:
    moe = model == "qwen3-moe"
    run_ranks(
        check_late_gather, 2, TinySpec(model=model, overlap_param_gather=True, fp32_router=moe, layers=1)
    )


def check_grad_buffers(me: Rank, spec: TinySpec) -> None:
    tiny, view = start(me, spec, DeltaSettings(release_grad_buffers=True))
    tiny.train_step()
    view.committed()
    buffers = [buffer for chunk in tiny.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    sizes = [buffer.grad_data.untyped_storage().size() for buffer in buffers]
    assert all(sizes)
    with pytest.raises(KeyError, match="fault"), view.transfer():  # noqa: PT012
        assert [buffer.grad_data.untyped_storage().size() for buffer in buffers] == [0] * len(sizes)
        raise KeyError("fault")
    assert [buffer.grad_data.untyped_storage().size() for buffer in buffers] == sizes
    assert not any(buffer.grad_data.any() for buffer in buffers)
    before = bits(view)
    tiny.train_step()
    assert any(buffer.grad_data.any() for buffer in buffers)
    assert any(not before[key].equal(now) for key, now in bits(view).items())
    assert view.detect().reason is Reason.NONE
    with attach(tiny).transfer():
        assert [buffer.grad_data.untyped_storage().size() for buffer in buffers] == sizes


def test_gradient_buffers_come_back_whatever_happens() -> None:
    run_ranks(check_grad_buffers, 1, replace(MOE, ep=1, layers=1, expert_bias=False))


def check_doubts(me: Rank) -> None:
    tiny, view = start(me, TinySpec(layers=1))
    assert view.detect().reason is Reason.FIRST_SYNC
    view.committed()
    tiny.train_step()
    assert view.detect().reason is Reason.NONE
    tiny.train_step()
    assert view.detect().reason is Reason.STEP_GAP
    view.committed()

    model = tiny.chunks[0].module
    model.load_state_dict(
        {n: t + 1 if t is not None and "weight" in n else t for n, t in model.state_dict().items()}
    )
    detection = view.detect()
    assert detection.reason is Reason.MASTER_MISMATCH
    assert "weight" in detection.detail
    tiny.optimizer.reload_model_params()
    assert view.detect().reason is Reason.STEP_DISPROVED, "a sample shows what leaves no trace"
    view.weights_replaced()
    assert view.detect().reason is Reason.STEP_GAP
    view.committed()

    tiny.train_step()
    assert view.detect().reason is Reason.NONE
    tiny.optimizer.load_state_dict(tiny.optimizer.state_dict())
    assert view.detect().reason is Reason.STEP_GAP
    view.committed()
    assert view.detect().reason is Reason.NONE


def check_detached(me: Rank) -> None:
    tiny, view = start(me, TinySpec(layers=1))
    view.committed()
    view.detach()
    tiny.train_step()
    assert view.detect().reason is Reason.NO_STEP_RECORD


def test_every_doubt_has_its_reason() -> None:
    run_ranks(check_doubts, 2)
    run_ranks(check_detached, 1)


def check_refusals(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny, other = build_trainer(TinySpec(layers=1)), build_trainer(TinySpec(layers=1))
    norm = tiny.chunks[0].module.decoder.final_layernorm
    extra = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for optimizer, kind, message in (
        (other.optimizer, UnsupportedError, "no optimizer steps it"),
        # As of a release whose class lacks what is read.
        (DistributedOptimizer.__new__(DistributedOptimizer), UnsupportedError, "Optimizer has no attribute"),
        (torch.optim.AdamW([extra]), ConfigError, "optimizer is a AdamW, none of Megatron's. Remedy: give"),
    ):
        with pytest.raises(kind, match=message):
            MegatronTrainer.attach(tiny.chunks, optimizer, tiny.hf_config, settings=DeltaSettings())

    norm.register_parameter("extra", extra)
    with pytest.raises(UnsupportedError, match=r"decoder.final_layernorm.extra .* trainable"):
        attach(tiny)
    extra.requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"cannot convert decoder.final_layernorm.extra"):
        attach(tiny)
    norm.extra = None

    view = attach(tiny, DeltaSettings(enabled=False))
    assert not any(info.sparse for info in view.weights())
    assert view.detect().reason is Reason.DELTA_DISABLED
    inner = tiny.optimizer.chained_optimizers[0].optimizer
    assert not inner._optimizer_step_post_hooks

    tiny.chunks[0].module.half()
    with pytest.raises(UnsupportedError, match=r"torch\.float16"):
        attach(tiny)


def test_what_cannot_be_read_is_refused_by_name() -> None:
    run_ranks(check_refusals, 1)


def check_untied(me: Rank) -> None:
    me.init_gloo(rank=me.rank, world_size=me.world_size)
    tiny = build_trainer(TinySpec(layers=2, pp=2, tied=False))
    tiny.hf_config.tie_word_embeddings = True
    with pytest.raises(UnsupportedError, match="engines would never receive its lm_head"):
        attach(tiny)
    tiny.hf_config.tie_word_embeddings = False
    attach(tiny)


def test_a_head_that_only_the_configuration_ties_is_refused() -> None:
    run_ranks(check_untied, 2)


def check_frozen(me: Rank) -> None:
    _, view = start(me, TinySpec(layers=1, frozen="embedding"))
    assert [info.param for info in view.weights() if not info.sparse] == ["embedding.word_embeddings.weight"]


def test_a_frozen_parameter_is_sent_whole() -> None:
    run_ranks(check_frozen, 1)
