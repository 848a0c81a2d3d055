"""Run megatron-core on the CPU, for the tests and the demo only.

megatron-core trains correctly on CPU tensors, but names CUDA in many places. `install` gives those
names stand-ins that act on the CPU. Nothing here changes what is computed.

Two redirections would disturb other code in the process, so that they hold only inside `cpu_device`:
calls with `device="cuda"`, and the answer of `Tensor.type()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _NoStream:
    """Stands for `torch.cuda.Stream` and `Event`: all work is done when a call returns, which is itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self


class _CudaKeywordOnCpu(TorchFunctionMode):
    """Rewrites the keyword argument `device="cuda"` of every torch call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def install() -> None:
    """Give the CUDA names that megatron-core calls stand-ins on the CPU. May be called again.

    The stand-ins stay for the life of the process, which can use no GPU from then on:

    * `torch.cuda`: the current device is `cpu`; streams and events are empty; `synchronize` returns;
      random states are those of the CPU generator.
    * `Tensor.cuda` returns the tensor itself.
    * `megatron.core.tensor_parallel.random` keeps its states in the CPU generator.
    * the router multiplies with torch, not with Transformer Engine.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.current_stream = cuda.default_stream = lambda *_: _NoStream()
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = _no_stream_context
    cuda.synchronize = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None


@contextmanager
def cpu_device() -> Iterator[None]:
    """Hold this around building and training a Megatron model after `install`.

    Inside, torch calls with `device="cuda"` make CPU tensors, and `Tensor.type()` answers
    `torch.cuda.BFloat16Tensor`, a string by which Megatron's optimizers sort parameters.
    """
    plain_type: Callable[..., Any] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        # The function mode looks `type` up by its name, so that `plain_type` may come through here too.
        if args or kwargs or "cuda" in answer:
            return answer
        return answer.replace("torch.", "torch.cuda.")

    with patch.object(torch.Tensor, "type", cuda_type), _CudaKeywordOnCpu():
        yield


def _no_stream_context(_: _NoStream) -> AbstractContextManager[None]:
    return nullcontext()
