"""A CPU as a platform of verl, through verl's own registry: verl has none, and this machine may have no GPU.

verl imports it with itself where `VERL_USE_EXTERNAL_MODULES` names it, and uses it where `VERL_PLATFORM` is
`cpu`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase

_CPU = torch.device("cpu")


def _nothing(*_: Any) -> None:
    """For memory that is not held on a device, and work that is done when a call returns."""


def _none_of_it(*_: Any) -> int:
    return 0


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc] # verl is not type-checked here
    """Everything that verl asks of a platform, on the CPU, with Gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: False,
        device_count=lambda: 1,
        empty_cache=_nothing,
        synchronize=_nothing,
        set_device=_nothing,
        current_device=lambda: _CPU,
        mem_get_info=lambda: (0, 0),
        memory_allocated=_none_of_it,
        memory_reserved=_none_of_it,
        max_memory_allocated=_none_of_it,
        max_memory_reserved=_none_of_it,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = get_collective_module = cudart = get_device_uuid = _nothing

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: ARG002 - as verl names it
        """Always."""
        return True

    def is_ipc_supported(self) -> bool:
        """So that verl's server adapter accepts deltas; it moves none itself."""
        return True

    def current_device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def device_count(self) -> int:
        """One."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Of the one generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Of the one generator."""
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:  # noqa: ARG002 - as verl names it
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """Gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Some name, which nothing here reads."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:  # noqa: ARG002 - as verl names it
        """Marks nothing."""
        return nullcontext()

    def ray_resource_name(self) -> str:
        """What Ray counts."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Cores in place of GPUs."""
        return {"num_cpus": num_gpus}
