"""What every `TrainerView` has to keep to: engines get the weights that its model computes with.

One rank trains, and publishes through a folder to an engine of plain tensors. Between updates its memory is
treated as frameworks treat it: freed, moved, swapped, tied. After each commit the bits of the engine are
compared with those of the model, which the suite is given beside the view.

Example:
    >>> @pytest.mark.parametrize("case", CASES)                                  # doctest: +SKIP
    ... def test_contract(case: str, tmp_path: Path) -> None:
    ...     check(case, Trained(view=view, step=train_step, live=named), tmp_path)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import swap_tensors

from awex_delta.errors import AwexDeltaError, UpdateError, WeightsAwayError
from awex_delta.folder.reader import DiskReader
from awex_delta.folder.writer import DiskWriter
from awex_delta.lines.storages import bits
from awex_delta.protocol.rendezvous import Rendezvous
from awex_delta.protocol.verdict import Kind, Verdict
from awex_delta.settings.agreed import DeltaSettings
from awex_delta.testing.contract import ContractBroken
from awex_delta.testing.dict_engine import DictEngine
from awex_delta.trainers.view import TrainerView

Live = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training on one rank, anew for each case.

    view: the view under test; nobody else uses it.
    step: takes one optimizer step, small enough for a delta, and rounds the masters into the weights.
    live: key -> the tensor that the model computes with, asked of the model itself each time.
    settings: those that the view was made with.
    """

    view: TrainerView
    step: Callable[[], object]
    live: Callable[[], Live]
    settings: DeltaSettings


class _Pairing:
    """The training, and one engine that follows it through a folder."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self.trained = trained
        settings = replace(trained.settings, transport="disk", disk_url=str(folder), anchor_interval=0)
        self._writer = DiskWriter(trained.view, Rendezvous.alone(), 0, settings)
        tensors = self._expected()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._engine = DictEngine(shapes, dtypes=dtypes)
        self._reader = DiskReader(self._engine, settings)
        self._version = 0

    def commit(self, *, kind: Kind | None = None) -> None:
        """Update, and compare every bit. kind: what the update has to be; None for either."""
        try:
            stats = self._writer.update_weights(self._version + 1)
        except AwexDeltaError as error:
            raise ContractBroken(f"version {self._version + 1} has to commit: {error}") from error
        self._follow(stats.verdict)
        if kind is not None and stats.verdict.kind is not kind:
            raise ContractBroken(f"version {self._version}: {stats.verdict}, where it has to be {kind.value}")

    def commit_or_refuse(self) -> None:
        """Update: it commits the bits that the model has, or fails by an error that says what to do."""
        with suppress(UpdateError):
            stats = self._writer.update_weights(self._version + 1)
            self._follow(stats.verdict)

    def _follow(self, verdict: Verdict) -> None:
        self._version += 1
        try:
            self._writer.wait()
            self._reader.update_weights(self._version)
        except UpdateError as error:
            raise ContractBroken(f"version {self._version}, {verdict}: {error}") from error
        differ = self._differing()
        if differ:
            raise ContractBroken(
                f"version {self._version}, {verdict}: the engine differs from the model in {differ}"
            )

    def refuse(self, key: str) -> None:
        """Update, which has to be refused by the name of `key` before anything moves."""
        held = {name: tensor.clone() for name, tensor in self._engine.tensors_by_name.items()}
        try:
            self._writer.update_weights(self._version + 1)
        except WeightsAwayError as error:
            if key not in str(error):
                raise ContractBroken(f"{key} was to be named: {error}") from error
        else:
            raise ContractBroken(f"{key} cannot be read, and the update went on")
        same = all(bits(held[name]).equal(bits(now)) for name, now in self._engine.tensors_by_name.items())
        if not (same and self._reader.ready):
            raise ContractBroken("an update that was refused changed the engine")

    def close(self) -> None:
        """Leave the folder."""
        self._writer.close()
        self._reader.close()

    def _expected(self) -> dict[str, torch.Tensor]:
        view = self.trained.view
        return {
            name: tensor.detach()
            for key, live in self.trained.live().items()
            for name, tensor in view.convert(key, live.detach())
        }

    def _differing(self) -> list[str]:
        held = self._engine.tensors_by_name
        return [
            name
            for name, tensor in self._expected().items()
            if tensor.dtype is not held[name].dtype
            or not bits(tensor.contiguous()).equal(bits(held[name].contiguous()))
        ]


@contextmanager
def _storage_freed(tensor: torch.Tensor) -> Iterator[None]:
    """The storage behind a tensor given back for a while, then filled as it was."""
    storage = tensor.untyped_storage()
    cells = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    held = cells.clone()
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(held.numel())
        cells.copy_(held)


def _stepped(pairing: _Pairing) -> str:
    """A parameter that an optimizer steps and that changes travel of."""
    return next(info.key for info in pairing.trained.view.weights() if info.sparse)


def _plain(pairing: _Pairing) -> None:
    for _ in range(2):
        pairing.trained.step()
        pairing.commit(kind=Kind.DELTA)


def _freed(pairing: _Pairing) -> None:
    """A storage of size zero is named, and the same bits at the same place are a delta again."""
    pairing.trained.step()
    key = _stepped(pairing)
    with _storage_freed(pairing.trained.live()[key]):
        pairing.refuse(key)
    pairing.commit(kind=Kind.DELTA)
    _plain(pairing)


def _freed_state(pairing: _Pairing) -> None:
    """Masters or moments of size zero: full, or refused; exact once they are back."""
    for name in ("main", "exp_avg", "exp_avg_sq"):
        pairing.trained.step()
        tensor: torch.Tensor | None = getattr(next(iter(pairing.trained.view.owned_slices())), name)
        if tensor is None:
            continue
        with _storage_freed(tensor):
            pairing.commit_or_refuse()
        pairing.commit()
        pairing.trained.step()
        pairing.commit()
    _plain(pairing)


def _moved(pairing: _Pairing) -> None:
    """`param.data` swapped for a copy elsewhere: what the model computes with is sent."""
    for tensor in pairing.trained.live().values():
        tensor.data = tensor.data.clone()
    for _ in range(3):
        pairing.trained.step()
        pairing.commit_or_refuse()


def _edited(pairing: _Pairing) -> None:
    """`param.data` swapped for other values, as a checkpoint does it."""
    key = _stepped(pairing)
    tensor = pairing.trained.live()[key]
    tensor.data = tensor.data * 2
    pairing.commit_or_refuse()
    pairing.trained.step()
    pairing.commit_or_refuse()


def _cast(pairing: _Pairing) -> None:
    """A parameter of another dtype is refused by its name, until it is cast back."""
    key = _stepped(pairing)
    tensor = pairing.trained.live()[key]
    held = tensor.data
    tensor.data = tensor.data.double()
    pairing.refuse(key)
    tensor.data = held
    pairing.trained.step()
    pairing.commit(kind=Kind.DELTA)


def _elsewhere(pairing: _Pairing) -> None:
    """A parameter that lies on another device, one without elements, is refused by its name."""
    pairing.trained.step()
    key = _stepped(pairing)
    tensor = pairing.trained.live()[key]
    other = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
    swap: Callable[[torch.Tensor, torch.Tensor], None] = swap_tensors
    swap(tensor, other)
    pairing.refuse(key)
    swap(tensor, other)
    pairing.commit(kind=Kind.DELTA)  # no step follows: autograd refuses tensors that were swapped


def _tied(pairing: _Pairing) -> None:
    """Two parameters that share memory from now on."""
    sparse = [info for info in pairing.trained.view.weights() if info.sparse]
    alike = [(a.key, b.key) for a in sparse for b in sparse if a.key < b.key and a.shape == b.shape]
    live = pairing.trained.live()
    for first, second in alike[:1]:
        live[second].data = live[first].data
    for _ in range(2):
        pairing.trained.step()
        pairing.commit_or_refuse()


def _transposed(pairing: _Pairing) -> None:
    """`param.data` swapped for the same values in another order of memory."""
    sparse = [info for info in pairing.trained.view.weights() if info.sparse and len(info.shape) == 2]
    live = pairing.trained.live()
    for info in sparse[:1]:
        live[info.key].data = live[info.key].data.t().contiguous().t()
    pairing.commit_or_refuse()
    pairing.trained.step()
    pairing.commit_or_refuse()


_CASES: Mapping[str, Callable[[_Pairing], Any]] = {
    "steps": _plain,
    "weights freed": _freed,
    "state freed": _freed_state,
    "weights moved": _moved,
    "weights edited": _edited,
    "weights cast": _cast,
    "weights elsewhere": _elsewhere,
    "weights tied": _tied,
    "weights transposed": _transposed,
}

CASES = tuple(_CASES)
"""The names of the checks."""


def check(case: str, trained: Trained, folder: Path) -> None:
    """Run one of `CASES`.

    Args:
        case: its name.
        trained: a training on one rank that nothing was published of yet.
        folder: an empty folder for versions.

    Raises:
        ContractBroken: an engine was given other bits than the model has, or an update that had to be refused
            was not, or not by the name of the parameter.
    """
    with closing(_Pairing(trained, folder)) as pairing:
        trained.step()
        pairing.commit(kind=Kind.FULL)
        trained.step()
        pairing.commit(kind=Kind.DELTA)
        _CASES[case](pairing)
