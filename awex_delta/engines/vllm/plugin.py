"""What vLLM's plugin loader calls in each of its processes, before a model is loaded."""

from __future__ import annotations

from awex_delta.engines.vllm.live import BACKEND, keep_weights_live


def register() -> None:
    """Offer `WeightTransferConfig(backend="awex_delta")`. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it can only be asked by failing
        WeightTransferEngineFactory.register_engine(
            BACKEND, "awex_delta.engines.vllm.backend", "VllmTransferEngine"
        )
    if current_platform.is_cpu():
        keep_weights_live()
