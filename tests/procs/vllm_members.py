"""Processes of the vLLM tests: Megatron ranks that publish versions, and a vLLM that follows them."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from awex_delta.demo.members import megatron_state, tiny_spec
from awex_delta.demo.scenario import DemoPlan
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.sender import Sender
from awex_delta.protocol.stats import UpdateStats
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.procs import Rank
from awex_delta.testing.tiny_models import build_trainer
from awex_delta.trainers.megatron import MegatronTrainer
from tests.docs.blocks import python_blocks

# Longer than a block of the key-value cache, so that what was computed for them is kept and found again.
PROMPTS = [[(7 * k * k + 5) % 128 for k in range(45)], [(11 * k + 64) % 128 for k in range(40)]]
NUM_TOKENS = 12
SETTINGS = DeltaSettings(
    anchor_interval=3, timeout_seconds=150, connect_timeout_seconds=240, allow_any_world_size=True
)

# For each prompt the greedy tokens and their log-probabilities.
Answers = list[tuple[list[int], list[float]]]


def train(
    me: Rank, plan: DemoPlan, rendezvous: Rendezvous, folder: Path, settings: DeltaSettings, aborted: int
) -> list[UpdateStats | str]:
    """Step, save and publish versions 1 to `plan.steps`; an `aborted` one is published a second time."""
    me.init_gloo(rank=me.rank, world_size=me.world_size, timeout_seconds=240)
    trainer = build_trainer(tiny_spec(plan))
    view = MegatronTrainer.attach(trainer.chunks, trainer.optimizer, trainer.hf_config, settings=settings)
    sender = Sender(view, rendezvous, me.rank, settings)
    sender.connect()
    outcome: list[UpdateStats | str] = []
    for version in range(1, plan.steps + 1):
        trainer.train_step()
        save_file(megatron_state(trainer), folder / f"{version}-{me.rank}.safetensors")
        if version == aborted:
            try:
                sender.update_weights(version)
            except Exception as error:  # noqa: BLE001 - the test compares what every rank saw
                outcome.append(type(error).__name__)
        outcome.append(sender.update_weights(version))
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How the vLLM of one process is started. backend: "" for a plain one without our backend."""

    tp: int = 1
    ep: bool = False
    backend: str = "awex_delta"


class VllmMember:
    """A process that serves one vLLM `LLM` at a time; every call waits for its answer."""

    def __init__(self, options: VllmOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: vLLM starts workers of its own.
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=False)
        self._process.start()
        theirs.close()

    def send(self, action: str, *args: Any) -> None:
        """Ask; `receive` takes the answer."""
        self._connection.send((action, args))

    def receive(self, timeout_seconds: float = 200.0) -> Any:
        """The answer; an error of the process is raised here, with its text."""
        if not self._connection.poll(timeout_seconds):
            raise TimeoutError("the vLLM process did not answer")
        worked, value = self._connection.recv()
        if not worked:
            raise RuntimeError(value)
        return value

    def ask(self, action: str, *args: Any) -> Any:
        """Send and receive."""
        self.send(action, *args)
        return self.receive()

    def close(self) -> None:
        """End the process, kindly at first, so that vLLM ends its workers."""
        self._connection.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()


class Members:
    """Members by how they are started: to import vLLM costs more than to load a tiny model."""

    def __init__(self) -> None:
        self._idle: list[tuple[VllmOptions, VllmMember]] = []
        self._taken: list[tuple[VllmOptions, VllmMember]] = []

    def take(self, options: VllmOptions) -> VllmMember:
        """One that nobody has, without an `LLM`."""
        found = next((one for one in self._idle if one[0] == options), None)
        if found is None:
            found = (options, VllmMember(options))
        else:
            self._idle.remove(found)
        self._taken.append(found)
        return found[1]

    def give_back(self) -> None:
        """All that were taken. One that cannot forget its `LLM` is ended."""
        while self._taken:
            options, member = self._taken.pop()
            try:
                member.ask("unload")
            except (EOFError, OSError, RuntimeError):
                member.close()
            else:
                self._idle.append((options, member))

    def close(self) -> None:
        """End all of them."""
        for _, member in self._idle:
            member.close()


def _serve(connection: Connection, options: VllmOptions) -> None:
    server = _Server(options)
    while True:
        try:
            action, args = connection.recv()
        except EOFError:
            server.unload()
            return
        try:
            connection.send((True, getattr(server, action)(*args)))
        except Exception:  # noqa: BLE001 - the test reads what went wrong
            connection.send((False, traceback.format_exc()))


class _Server:
    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._llm: Any = None
        self._driver: Any = None
        self.calls: list[str] = []

    def load(self, checkpoint: Path, load_format: str = "auto") -> None:
        from vllm import LLM

        self.unload()
        backend = self._options.backend
        self._llm = LLM(
            model=str(checkpoint),
            load_format=load_format,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=96,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 24,
            block_size=32,
            tensor_parallel_size=self._options.tp,
            enable_expert_parallel=self._options.ep,
            enable_prefix_caching=True,
            weight_transfer_config={"backend": backend} if backend else None,
        )

    def reload(self, checkpoint: Path) -> None:
        """vLLM's own loading of another checkpoint into the model that is there."""
        self.rpc("reload_weights", None, str(checkpoint))
        if not self.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache")

    def unload(self) -> None:
        if self._llm is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._driver = None
            cleanup_dist_env_and_memory()

    def connect(self, info: Mapping[str, Any], running: Any = "pause") -> None:
        from awex_delta.engines.vllm.driver import OfflineControl, VllmDriver

        self._driver = VllmDriver(_Recorded(OfflineControl(self._llm), self.calls), running=running)
        self._driver.connect(info)

    def follow_page(self, rendezvous: Rendezvous, model: Path, num_versions: int) -> Answers:
        """Run the page's own program, and generate with what it leaves."""
        import vllm

        options = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": True,
            "block_size": 32,
        }
        whole = vllm.LLM
        vllm.LLM = partial(whole, **options, max_model_len=96, max_num_seqs=4, kv_cache_memory_bytes=1 << 24)
        names: dict[str, Any] = {"rendezvous": rendezvous, "settings": SETTINGS}
        names["prompts"] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        replaced = {"Qwen/Qwen3-8B": str(model), "range(1, 100)": f"range(1, {num_versions + 1})"}
        asked = {"llm.generate(prompts)": "llm.generate(prompts, sampling)"}  # there is no tokenizer here
        names["sampling"] = vllm.SamplingParams(max_tokens=2, detokenize=False)
        python_blocks("docs/en/vllm.md")[0].run(names, replaced | asked)
        vllm.LLM = whole
        self._llm = names["llm"]
        return self.generate()

    def update(self, version: int) -> list[str]:
        """The calls that the driver made."""
        self.calls.clear()
        self._driver.update_weights(version)
        return list(self.calls)

    def update_without_driver(self, version: int) -> None:
        """vLLM's three calls, and nothing about its cache."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version}})
        self._llm.finish_weight_update(str(version))

    def reset_prefix_cache(self) -> bool:
        done: bool = self._llm.reset_prefix_cache()
        return done

    def calls_made(self) -> list[str]:
        return list(self.calls)

    def version(self) -> str:
        version: str = self._llm.get_weight_version()
        return version

    def rpc(self, function: Any, *args: Any) -> list[Any]:
        """Call `function(worker, *args)`, or the worker's method of that name, in every worker."""
        answers: list[Any] = self._llm.collective_rpc(function, args=args)
        return answers

    def generate(self) -> Answers:
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, ignore_eos=True
        )
        found = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False
        )
        return [
            (
                list(one.outputs[0].token_ids),
                [next(iter(step.values())).logprob for step in one.outputs[0].logprobs],
            )
            for one in found
        ]


class _Recorded:
    """Passes a driver's calls on, and notes them in order."""

    def __init__(self, control: Any, calls: list[str]) -> None:
        self._control = control
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._control, name)

        def call(*args: Any, **options: Any) -> Any:
            self._calls.append(name)
            return method(*args, **options)

        return call


def state_of(worker: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """In a worker: its part of every HF tensor and where that begins, as raw bits, by new views."""
    from awex_delta.engines.vllm.adapter import VllmEngine

    return {
        entry.name: (entry.global_offset, entry.view.contiguous().view(torch.int16).numpy().copy())
        for entry in VllmEngine(worker.model_runner.get_model()).tensors()
    }


def addresses_of(worker: Any) -> dict[str, int]:
    """In a worker: where each parameter lives."""
    model = worker.model_runner.get_model()
    return {name: weight.data_ptr() for name, weight in model.named_parameters()}


def fail_next_apply(worker: Any) -> None:
    """In a worker: make the device fail once, after weights were written."""
    view = worker.weight_transfer_engine._receiver._view
    whole = view.synchronize

    def synchronize() -> None:
        view.synchronize = whole
        raise RuntimeError("injected: the device failed while weights were written")

    view.synchronize = synchronize


def lose_weights(worker: Any) -> None:
    """In a worker: what sleeping at level 2 does to weights on a GPU."""
    for weight in worker.model_runner.get_model().parameters():
        weight.data.zero_()


def move_weights(worker: Any, move: str) -> None:
    """In a worker: let parameters come to lie elsewhere."""
    from awex_delta.testing.contract.engines import MOVES

    MOVES[move](worker.model_runner.get_model())


def cast_norm(worker: Any, dtype: torch.dtype) -> None:
    """In a worker: hold the last norm in another dtype."""
    norm = worker.model_runner.get_model().model.norm.weight
    norm.data = norm.data.to(dtype)
