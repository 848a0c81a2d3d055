"""What a job may leave behind in its process, so that the next job finds the process as if it were new."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# Engines that keep state in their modules for the life of a process.
_UNTIDY = ("vllm", "sglang")
# A progress bar leaves a thread that looks after the next one.
_HARMLESS_THREADS = ("tqdm_monitor",)


class Beginning:
    """How a process was before its first job. Made in that process, it also sets one torch thread.

    Ranks share the cores, so that more threads would only slow them.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._torch_state = torch.get_rng_state()
        self._numpy_state = np.random.get_state()
        self._dtype = torch.get_default_dtype()
        self._threads = set(threading.enumerate())
        gc.freeze()  # what was there before is never garbage, and most of what there is to look through

    def restore(self) -> str:
        """Drop process groups and what nobody holds any more, and reset seeds, threads and environment.

        Returns what is left that a further job might notice; empty if there is nothing.
        """
        _leave_groups()
        _forget_meshes()
        gc.collect()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        torch.set_num_threads(1)
        torch.set_rng_state(self._torch_state)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(True)
        np.random.set_state(self._numpy_state)
        return ", ".join([*self._left()])

    def _left(self) -> list[str]:
        new = [one.name for one in threading.enumerate() if one not in self._threads]
        threads = [name for name in new if name not in _HARMLESS_THREADS]
        children = [str(child.pid) for child in multiprocessing.active_children()]
        modules = [name for name in _UNTIDY if name in sys.modules]
        device = ["a CUDA context"] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        groups = [group.group_name for group in _groups()]
        return [*threads, *children, *modules, *device, *groups]


def _leave_groups() -> None:
    """End Megatron's groups, if Megatron was used, and then torch's own."""
    parallel = sys.modules.get("megatron.core.parallel_state")
    if parallel is not None:
        parallel.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in [*_groups()]:  # those that stand beside the default group
        with suppress(RuntimeError):  # a broken one may complain; it is gone either way
            dist.destroy_process_group(group)


def _forget_meshes() -> None:
    """Clear what DTensor caches by mesh: an equal mesh of the next job finds this process at another rank."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _groups() -> Collection[dist.ProcessGroup]:
    """All process groups of this process; torch has no public name for them."""
    return c10d._world.pg_map
