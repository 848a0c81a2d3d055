"""A run log's numbers in TensorBoard and Weights & Biases, under the names of the gateway's metrics."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from awex_delta.errors import ConfigError

Write = Callable[[int, Mapping[str, float]], None]
"""Shows the numbers of one version."""

VERSION = "awex_delta_version"
_NEEDS = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}


def checked_trackers(trackers: str | Sequence[str]) -> tuple[str, ...]:
    """The names of trackers, each of which is known and installed.

    Raises:
        ConfigError: one is neither; names it, and what to give or install.
    """
    names = (trackers,) if isinstance(trackers, str) else tuple(trackers)
    for name in names:
        if name not in _NEEDS:
            raise ConfigError(
                f"trackers={trackers!r}: {name!r} is none of {', '.join(_NEEDS)}; give one of these"
            )
    for name in names:
        module, entry = _NEEDS[name]
        try:
            # A folder that the runs of Weights & Biases left here can be imported too, but is empty.
            getattr(importlib.import_module(module), entry)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"trackers={trackers!r}: {name} is not installed; pip install 'awex-delta[{name}]'"
            ) from error
    return names


class Trackers:
    """Writes what RunLog writes of an update to each of some trackers."""

    def __init__(self, names: Sequence[str], path: Path) -> None:
        """Open them: TensorBoard's folder beside the run log, and a run of Weights & Biases if none is open.

        Args:
            names: as `checked_trackers` returned them.
            path: of the run log.

        Raises:
            ConfigError: Weights & Biases refuses to begin a run.
        """
        self._totals: Counter[str] = Counter()
        self._write = [{"tensorboard": _tensorboard, "wandb": _wandb}[name](path) for name in names]

    def append(self, line: Any) -> None:
        """Show one attempt to update, an `UpdateLine`."""
        numbers = self._numbers(line)
        for write in self._write:
            write(line.version, numbers)

    def _numbers(self, line: Any) -> dict[str, float]:
        """Each by its metric's name and the values of its labels; counters as they stand by now."""
        found: dict[str, float] = {
            name: value for name, value in line.extra.items() if isinstance(value, int | float)
        }
        if line.kind == "aborted":
            self._totals["awex_delta_failures_total/update"] += 1
            return found | self._totals
        self._totals[f"awex_delta_updates_total/{line.kind}/{line.reason}"] += 1
        self._totals[f"awex_delta_wire_bytes_total/{line.kind}"] += line.total_wire_bytes
        found[VERSION] = line.version
        if line.total_owned:
            found["awex_delta_changed_share"] = line.total_changed / line.total_owned
        found |= {f"awex_delta_phase_seconds/{phase}": seconds for phase, seconds in line.seconds.items()}
        return found | self._totals


def _tensorboard(path: Path) -> Write:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(path.with_suffix(".tensorboard"))
    )

    def write(version: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, global_step=version)
        writer.flush()

    return write


def _wandb(path: Path) -> Write:
    wandb = importlib.import_module("wandb")
    ours = wandb.run is None
    try:
        run = wandb.init(project="awex-delta", name=path.stem, dir=str(path.parent)) if ours else wandb.run
    except wandb.Error as error:
        raise ConfigError(
            f"trackers='wandb': Weights & Biases begins no run ({error}); "
            "run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    run.define_metric("awex_delta_*", step_metric=VERSION)

    def write(_: int, numbers: Mapping[str, float]) -> None:
        # In the training's own run the numbers join its next step, which the training numbers.
        run.log(dict(numbers), commit=ours)

    return write
