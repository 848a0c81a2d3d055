"""What verl does in `test_verl.py`, in a process of its own: verl changes logging, warnings and variables.

    python -m tests.procs.verl_scenario OUT fsdp2 NUM_ACTORS
    python -m tests.procs.verl_scenario OUT megatron

Each synchronization leaves a record: what the trainer held before it, what every server holds after it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from awex_delta.demo.members import tiny_spec
from awex_delta.demo.oracle import trainer_hf_state
from awex_delta.testing.tiny_models import hf_config
from examples.verl_gsm8k.tiny import TinyRun, start


class Scenario:
    """A running verl, and what its synchronizations did."""

    def __init__(self, run: TinyRun, whole: Callable[[list[Any]], list[dict[str, torch.Tensor]]]) -> None:
        """`whole` makes the weights of the model of what each trainer rank says that it holds."""
        self.run = run
        self.whole = whole
        self.records: dict[str, list[dict[str, Any]]] = {}

    def synchronize(self, name: str, *, num_steps: int = 2, **asked: int) -> None:
        """Train, synchronize as verl's trainers do, and look at everything."""
        self.run.actors.train(num_steps)
        held = self.whole(self.run.actors.weights())
        metrics, error = {}, ""
        try:
            metrics = self.run.manager.update_weights(**asked)
        except Exception as raised:  # noqa: BLE001 - whatever verl lets through is what the test reads
            error = str(raised)
        states = ray.get([replica.servers[0].state.remote() for replica in self.run.manager.replicas])
        self.records.setdefault(name, []).append(
            {"held": held, "metrics": metrics, "error": error, "states": states}
        )

    def server(self, number: int) -> Any:
        """The server of a replica."""
        return self.run.manager.replicas[number].servers[0]


def play(scenario: Scenario) -> None:
    """Everything in order: each part begins with equal replicas."""
    run = scenario.run
    for asked in ({"global_steps": 1}, {"global_steps": 2}, {"global_steps": 2}, {}, {"global_steps": 7}):
        scenario.synchronize("versions", **asked)

    ray.get(scenario.server(1).fail.remote("stage"))
    scenario.synchronize("one failure")

    ray.get([scenario.server(1).fail.remote(phase) for phase in ("stage", "prepare")])
    scenario.synchronize("two failures")
    scenario.synchronize("two failures")

    ray.kill(scenario.server(0))
    run.restart_server(run.manager.replicas[0])
    scenario.synchronize("server back")
    scenario.synchronize("server back")

    gone = run.manager.replicas[1]
    run.manager.remove_replicas([gone])
    scenario.synchronize("another set")
    run.manager.add_replicas([gone])
    scenario.synchronize("another set")
    scenario.synchronize("another set")


@contextmanager
def running(folder: Path, kind: str, *options: str) -> Iterator[Scenario]:
    """verl with one of its engines."""
    if kind == "fsdp2":
        with start(folder, num_actors=int(options[0])) as run:
            yield Scenario(run, lambda ranks: ranks)
        return
    from tests.procs.verl_megatron import PLAN, MegatronActor

    file, model = Path(__file__).with_name("verl_megatron.yaml"), hf_config(tiny_spec(PLAN))
    with start(folder, num_actors=2, qwen3=model, actor=MegatronActor, engine="megatron", file=file) as run:
        yield Scenario(run, lambda ranks: [trainer_hf_state(PLAN, ranks)])


def main() -> None:
    """Play, and save the records, and how many seconds of processors all of it took."""
    out, *kind = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), *kind) as scenario:
        play(scenario)
        spent = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
        seconds = sum(one.user + one.system for one in [*spent, psutil.Process().cpu_times()])
    torch.save({"records": scenario.records, "cpu_seconds": seconds}, out)


if __name__ == "__main__":
    main()
