"""SGLang's real model classes on a CPU over Gloo, and its whole engine over plain torch. Tests only.

SGLang imports CUDA kernels (`sgl_kernel`) and `torchvision` on its way to a model. Stand-ins take their
place: modules whose every name is a mock. No stand-in takes part in building a model, in `load_weights` or
in `update_weights_from_tensor`, which is what is tested. A dense model can also be computed without them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from transformers import PretrainedConfig

from awex_delta.testing.procs import Rank

_MODELS = {
    "Qwen2MoeForCausalLM": "sglang.srt.models.qwen2_moe",
    "Qwen3ForCausalLM": "sglang.srt.models.qwen3",
    "Qwen3MoeForCausalLM": "sglang.srt.models.qwen3_moe",
}
_STAND_INS = ("sgl_kernel", "torchvision", "triton")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that have no CPU build, and fills them with mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name.partition(".")[0] not in _STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> None:  # noqa: ARG002
        return None

    def exec_module(self, module: ModuleType) -> None:
        def invent(name: str) -> MagicMock:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        vars(module).update(__version__="0.29.1", __getattr__=invent)


def sglang_found() -> bool:
    """True when SGLang is installed. Imports nothing."""
    return importlib.util.find_spec("sglang") is not None


@cache
def install() -> None:
    """Make `import sglang` work without a GPU, in this process, once it was called before any such import."""
    importlib.import_module("transformers.image_utils")  # it looks for torchvision, and must find none
    sys.meta_path.insert(0, _StandIns())
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


@cache
def install_engine() -> None:
    """Make a whole SGLang engine start without a GPU, over its kernels in plain torch.

    Call it at the top of the program's main module: the processes that SGLang starts import that again.
    Run the engine with `attention_backend="torch_native"` and `sampling_backend="pytorch"`.
    """
    # torch looks for a Triton of its own when these are imported, and must not find the stand-in.
    for name in (
        "torch.utils.flop_counter",
        "torch._inductor.compile_fx",
        "torch._inductor.select_algorithm",
    ):
        importlib.import_module(name)
    install()
    runtime = importlib.import_module("triton.runtime")
    vars(runtime)["driver"] = MagicMock(name="driver")
    runtime.driver.active.get_current_target.return_value.backend = "cpu"


def start(
    me: Rank, config: PretrainedConfig, *, tp: int = 1, ep: int = 1, rank: int = 0, **options: Any
) -> None:
    """Begin the life of one SGLang rank in this process, as its scheduler would.

    Args:
        me: the process; its folder holds the group's rendezvous and the HF configuration.
        config: of the model.
        tp, ep: tensor and expert parallel sizes of the engine.
        rank: of this process in the engine.
        options: further fields of SGLang's ServerArgs, such as `dp_size` and `enable_dp_attention`.

    Collective: over the ranks of the engine.
    """
    install()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    path = me.folder / f"hf-{rank}"
    config.save_pretrained(path)
    args = ServerArgs(
        model_path=str(path), device="cpu", tp_size=tp, ep_size=ep, custom_weight_loader=[LOADER], **options
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    set_global_server_args_for_scheduler(args)
    pynccl.PyNcclCommunicator = MagicMock(name="PyNcclCommunicator")
    parallel_state.init_distributed_environment(
        world_size=tp,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{me.folder}/sglang",
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(args)


LOADER = "awex_delta.engines.sglang.loader.load"
"""What a server names in `--custom-weight-loader`, and a request in `load_format`."""


def build(config: PretrainedConfig, *, fp32_router: bool = False) -> nn.Module:
    """SGLang's own model of `config`, bf16, its weights undefined until something loads them.

    Args:
        config: with one of the supported architectures.
        fp32_router: hold router weights in fp32, as SGLang does for some models.

    `start` comes before it on every rank.
    """
    architecture = (config.architectures or [""])[0]
    model_class = vars(importlib.import_module(_MODELS[architecture]))[architecture]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = model_class(config, quant_config=None)
    finally:
        torch.set_default_dtype(before)
    for name, param in model.named_parameters():
        param.data.zero_()
        if fp32_router and name.endswith(".mlp.gate.weight"):
            param.data = param.data.float()
    return model


class Scheduler:
    """The part of SGLang's scheduler that updates weights: its own session, updater and serializer.

    Attributes:
        flushes: the version that the model held at each flush of the cache.
        weight_versions: what requests called the weights, in order.
    """

    def __init__(self, model: nn.Module, held_version: Callable[[], object], rank: int = 0) -> None:
        """Around the live model of one rank; `held_version` is asked at each flush."""
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.utils import MultiprocessingSerializer

        self.flushes: list[object] = []
        self.weight_versions: list[str | None] = []
        updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=MagicMock(name="model_config"),
            custom_weight_loaders=[LOADER],
            get_model=lambda: model,
            update_model_fields=MagicMock(name="update_model_fields"),
            recapture_cuda_graph=MagicMock(name="recapture_cuda_graph"),
            get_model_runner=MagicMock(name="get_model_runner"),
        )
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))],
            deserialize_own_rank=lambda payloads: MultiprocessingSerializer.deserialize(payloads[rank]),
        )
        self._manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self._flush,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=self._record),
        )
        self._held_version = held_version

    def update_weights_from_tensor(self, named_tensors: Any, tp: int = 1) -> Any:
        """What SGLang's engine does between `begin_weight_update` and `end_weight_update`, them included.

        Collective: over the ranks of the engine.
        """
        from sglang.srt.managers import io_struct

        self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="target"))
        answer = self._manager.update_weights_from_tensor(
            io_struct.UpdateWeightsFromTensorReqInput(
                # By value, as a client on another host has to.
                serialized_named_tensors=[pickle.dumps(named_tensors)] * tp,
                load_format=LOADER,
                selector="target",
            )
        )
        self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        return answer

    def _flush(self, **_: object) -> bool:
        self.flushes.append(self._held_version())
        return True

    def _record(self, new_version: str | None) -> None:
        self.weight_versions.append(new_version)


def differing(left: nn.Module, right: nn.Module) -> Sequence[str]:
    """Names of the parameters whose bits differ between two models of one rank."""
    theirs = dict(right.named_parameters())
    ours = dict(left.named_parameters())
    if ours.keys() != theirs.keys():
        raise ValueError(f"other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    return [name for name, param in ours.items() if not _same_bits(param.data, theirs[name].data)]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
