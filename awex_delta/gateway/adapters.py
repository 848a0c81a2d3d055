"""From the objects that a user has to the side that a router serves, or a refusal that names their types."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from awex_delta.attach import attach_transformers
from awex_delta.engines.sglang.driver import EngineControl, SglangDriver
from awex_delta.engines.view import EngineView
from awex_delta.engines.vllm.async_control import AsyncControl
from awex_delta.engines.vllm.driver import OfflineControl, VllmDriver
from awex_delta.errors import ConfigError, UnsupportedError
from awex_delta.gateway.sides import End, Order, ReceiverEnd, SenderEnd, SglangEnd, Side, VllmEnd
from awex_delta.protocol.receiver import Receiver
from awex_delta.protocol.sender import Sender
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.trainers.torch_adamw import TorchAdamWTrainer
from awex_delta.trainers.view import SharedTrainerView, TrainerView

_TRAINERS = (
    "Megatron's model chunks, or a model under fully_shard, with its optimizer and an hf_config, a torch "
    "module or a mapping of tensors with a torch.optim.AdamW and masters, a TrainerView, a Sender, or a "
    "mapping of pair names to Senders"
)
_ENGINES = (
    "a transformers model, an EngineView, a vLLM LLM, AsyncLLM or VllmDriver, an SGLang Engine, or a Receiver"
)


def trainer_side(
    trained: Any,
    optimizer: Any = None,
    *,
    hf_config: Any = None,
    masters: Mapping[str, torch.Tensor] | None = None,
    router_dtype: str = "bf16",
) -> Side:
    """The side of one trainer rank; arguments and refusals are those of `trainer_router`."""
    if isinstance(trained, Sender):
        return _trainer("Sender", lambda _: SenderEnd(trained), brings_meeting=True, num_pairs=1)
    if isinstance(trained, Mapping) and trained and all(isinstance(v, Sender) for v in trained.values()):
        return _trainer("Senders", lambda order: _named_sender(trained, order), brings_meeting=True)
    if optimizer is None and isinstance(trained, SharedTrainerView):
        return _trainer(type(trained).__name__, lambda order: _forked_end(trained, order))
    if optimizer is None and isinstance(trained, TrainerView):
        return _trainer(type(trained).__name__, lambda order: _view_end(trained, order), num_pairs=1)
    if _is(trained, "torch", "FSDPModule"):
        if hf_config is None:
            raise UnsupportedError("a model under fully_shard needs hf_config, that of the served HF model")
        return _fsdp_trainer(trained, optimizer, hf_config)
    if isinstance(optimizer, torch.optim.AdamW):
        weights = _named_tensors(trained)
        if weights is not None and masters is not None:
            return _torch_trainer(weights, masters, optimizer)
        if weights is not None:
            raise UnsupportedError(
                "a torch.optim.AdamW needs masters: by name, the fp32 tensor that it steps for a bf16 weight"
            )
    if _is(optimizer, "megatron", "MegatronOptimizer"):
        chunks = trained if isinstance(trained, Sequence) else [trained]
        if hf_config is None:
            raise UnsupportedError(
                "Megatron's model and optimizer need hf_config, that of the served HF model"
            )
        return _megatron_trainer(chunks, optimizer, hf_config, router_dtype)
    raise UnsupportedError(
        f"no adapter for a trainer of {_name(trained)} with an optimizer of {_name(optimizer)}; "
        f"give {_TRAINERS}"
    )


def engine_side(engine: Any, *, num_ranks: int | None = None) -> Side:
    """The side of one engine; arguments and refusals are those of `engine_router`.

    Raises ConfigError, too, if `num_ranks` is given although it is known.
    """
    if isinstance(engine, VllmDriver):
        if num_ranks is None or num_ranks < 1:
            raise ConfigError(f"num_ranks={num_ranks}: say how many workers the VllmDriver's deployment has")
        return _engine("VllmDriver", lambda order: VllmEnd(engine, order.joining), num_ranks=num_ranks)
    if num_ranks is not None:
        raise ConfigError(f"num_ranks={num_ranks}: leave it out, it is known for {_name(engine)}")
    if isinstance(engine, Receiver):
        return _engine(
            "Receiver", lambda _: ReceiverEnd(engine), brings_meeting=True, view=lambda: engine.view
        )
    if _is(engine, "transformers", "PreTrainedModel"):
        return _engine(
            "transformers",
            lambda order: _transformers_end(engine, order),
            view=lambda: _transformers_view(engine),
        )
    if _is(engine, "vllm", "AsyncLLM"):
        ranks = _vllm_ranks(engine.vllm_config)
        # One driver for all pairs: it knows of requests that stand still since one of them failed.
        on_loop = cache(lambda loop: VllmDriver(AsyncControl(engine, loop)))
        return _engine("vLLM", lambda order: VllmEnd(on_loop(_loop(order)), order.joining), num_ranks=ranks)
    if _is(engine, "vllm", "LLM"):
        ranks = _vllm_ranks(engine.llm_engine.vllm_config)
        driver = VllmDriver(OfflineControl(engine))
        return _engine("vLLM", lambda order: VllmEnd(driver, order.joining), num_ranks=ranks)
    if _is(engine, "sglang", "Engine"):
        ranks = int(engine.server_args.tp_size)
        return _engine("SGLang", lambda order: _sglang_end(engine, order, ranks), num_ranks=ranks)
    if isinstance(engine, EngineView):
        return _engine(type(engine).__name__, lambda order: _engine_end(engine, order), view=lambda: engine)
    raise UnsupportedError(f"no adapter for an engine of {_name(engine)}; give {_ENGINES}")


def _is(value: Any, package: str, name: str) -> bool:
    """Whether a class of that name and package is among the bases, without importing the package."""
    return any(b.__name__ == name and b.__module__.partition(".")[0] == package for b in type(value).__mro__)


def _name(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return f"{type(value).__name__} of {_name(value[0])}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _trainer(
    kind: str, open_end: Callable[[Order], End], *, brings_meeting: bool = False, num_pairs: int | None = None
) -> Side:
    return Side(
        role="trainer",
        kind=kind,
        num_ranks=1,
        brings_meeting=brings_meeting,
        num_pairs=num_pairs,
        open=open_end,
    )


def _engine(
    kind: str,
    open_end: Callable[[Order], End],
    *,
    num_ranks: int = 1,
    brings_meeting: bool = False,
    view: Callable[[], EngineView] | None = None,
) -> Side:
    return Side(
        role="engine",
        kind=kind,
        num_ranks=num_ranks,
        brings_meeting=brings_meeting,
        num_pairs=1,  # it holds one version of one trainer's weights
        open=open_end,
        view=view,
    )


def _named_sender(senders: Mapping[str, Sender], order: Order) -> End:
    if order.pair not in senders:
        raise ConfigError(f"pair={order.pair!r}: this trainer has senders for {', '.join(sorted(senders))}")
    return SenderEnd(senders[order.pair])


def _view_end(view: TrainerView, order: Order, after_close: Callable[[], None] | None = None) -> SenderEnd:
    rank = int(view.layout().rank_info["global_rank"])
    device = next((view.tensor(info.key).device for info in view.weights()), None)
    sender = Sender(view, order.joining.rendezvous, rank, order.joining.settings, device=device)
    return SenderEnd(sender, after_close)


def _forked_end(view: SharedTrainerView, order: Order) -> End:
    """Each pair counts changes from its own commits."""
    fork = view.fork()
    return _view_end(fork, order, fork.detach)


def _named_tensors(trained: Any) -> Mapping[str, torch.Tensor] | None:
    if isinstance(trained, torch.nn.Module):
        return trained.state_dict(keep_vars=True)
    if isinstance(trained, Mapping) and all(isinstance(v, torch.Tensor) for v in trained.values()):
        return trained
    return None


def _torch_trainer(
    weights: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW
) -> Side:
    def make(settings: DeltaSettings) -> TorchAdamWTrainer:
        return TorchAdamWTrainer(weights=weights, masters=masters, optimizer=optimizer, settings=settings)

    make(DeltaSettings(enabled=False))  # what cannot work is refused now, not at the first connect

    def open_end(order: Order) -> End:
        view = make(order.joining.settings)
        return _view_end(view, order, view.detach)

    return _trainer("torch AdamW", open_end)


def _megatron_trainer(chunks: Sequence[Any], optimizer: Any, hf_config: Any, router_dtype: str) -> Side:
    def open_end(order: Order) -> End:
        from awex_delta.trainers.megatron import MegatronTrainer

        view = MegatronTrainer.attach(
            chunks, optimizer, hf_config, settings=order.joining.settings, router_dtype=router_dtype
        )
        return _view_end(view, order, view.detach)

    return _trainer("Megatron", open_end)


def _fsdp_trainer(model: torch.nn.Module, optimizer: Any, hf_config: Any) -> Side:
    def open_end(order: Order) -> End:
        from awex_delta.trainers.fsdp import FsdpTrainer

        view = FsdpTrainer.attach(model, optimizer, hf_config, settings=order.joining.settings)
        return _view_end(view, order, view.detach)

    return _trainer("FSDP2", open_end)


def _engine_end(view: EngineView, order: Order) -> End:
    device = next((entry.view.device for entry in view.tensors()), None)
    said = order.joining
    return ReceiverEnd(
        Receiver(view, said.rendezvous, said.first_engine_rank, said.engine, said.settings, device=device)
    )


def _transformers_end(model: Any, order: Order) -> End:
    return ReceiverEnd(
        attach_transformers(
            model,
            rendezvous=order.joining.rendezvous,
            engine_rank=order.joining.first_engine_rank,
            settings=order.joining.settings,
            engine=order.joining.engine,
        )
    )


def _transformers_view(model: Any) -> EngineView:
    from awex_delta.engines.transformers import TransformersEngine

    return TransformersEngine(model)


def _vllm_ranks(config: Any) -> int:
    return int(config.parallel_config.world_size * config.parallel_config.data_parallel_size)


def _loop(order: Order) -> asyncio.AbstractEventLoop:
    return order.loop or asyncio.get_running_loop()


def _sglang_end(engine: Any, order: Order, num_ranks: int) -> End:
    first, total = order.joining.first_engine_rank, order.joining.rendezvous.num_engine_ranks
    if first + num_ranks > total:
        raise ConfigError(f"first_rank={first}: {num_ranks} workers do not fit {total} engine ranks")
    return SglangEnd(SglangDriver(EngineControl(engine), order.joining))
