"""A second weight stream from one trainer: the exponential moving average of its policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from awex_delta.detection.pieces import Piece, Runs, Scratch, in_order, nonzero, pieces
from awex_delta.detection.slices import Detection, OwnedSlice
from awex_delta.errors import AwexDeltaError, ConfigError, UnsupportedError, listed
from awex_delta.lines.bits import add_codes, round_to_bf16, step_code
from awex_delta.lines.changes import Changes
from awex_delta.lines.storages import unreadable
from awex_delta.protocol.verdict import Reason
from awex_delta.settings.arguments import require
from awex_delta.trainers.view import GatheringTrainerView, TrainerLayout, TrainerView, WeightInfo

_PIECE = 1 << 20


class EmaShadow:
    """A `TrainerView` of `alpha * policy + (1 - alpha) * average`, elementwise in fp32.

    It keeps one fp32 value for each element that this rank owns, and for fp32 parameters, which every rank
    holds whole. Changes of the bf16 weights that it sends are exact: old and new are both known when the
    average moves. Buffers are copied as they are then; frozen weights are read where they are.

    Give it to a `Sender` or to `Targets.add` as any view, and publish it after the student:

    Example:
        >>> shadow = EmaShadow(view, alpha=0.01)                                 # doctest: +SKIP
        >>> teacher = Sender(shadow, teachers, trainer_rank=rank, settings=settings)  # doctest: +SKIP
        >>> for version in range(steps):                                         # doctest: +SKIP
        ...     train_step()
        ...     student.update_weights(version)
        ...     shadow.average(version)
        ...     teacher.update_weights(version)
    """

    @torch.inference_mode(mode=False)
    def __init__(self, view: GatheringTrainerView, *, alpha: float) -> None:
        """Begin with the policy as it is now.

        Args:
            view: the trainer, with masters in fp32.
            alpha: weight of the policy in each average, above 0; 1 means a plain copy.

        Raises:
            ConfigError: `alpha` is outside (0, 1].
            UnsupportedError: a trained weight has no fp32 master, or is not current on this rank.
        """
        require(GatheringTrainerView, "a trainer whose ranks gather, such as MegatronTrainer", view=view)
        require((int, float), "a number", alpha=alpha)
        if not (math.isfinite(alpha) and 0.0 < alpha <= 1.0):
            raise ConfigError(f"alpha={alpha}: give the weight of the policy in each average, in (0, 1]")
        known = view.detect()
        if known.reason is Reason.NO_FP32_MASTER:
            raise UnsupportedError(f"the policy cannot be averaged here: {known.detail}")
        self._view = view
        self._alpha = alpha
        self._infos = {info.key: info for info in view.weights()}
        self._averages: dict[str, torch.Tensor] = {}
        self._begin()
        for key, info in self._infos.items():
            if info.trained and not info.sparse:
                self._averages[key] = _trained(info, view.tensor(key)).reshape(-1).clone()
        self._copies: dict[str, torch.Tensor] = {}
        self._copy_buffers()
        self._version: int | None = None
        self._done: int | None = None  # pieces, while an average is under way
        self._found: list[tuple[Piece, Changes]] = []  # in those pieces
        self._changes = Changes.none()  # since the last commit
        self._based = False
        self._whole: Mapping[str, torch.Tensor] = {}

    def _begin(self) -> None:
        """Copy the masters: one flat tensor for all owned slices, in the order of their pieces."""
        slices = _with_masters(self._view)
        numel = sum(owned.stop - owned.start for owned in slices)
        device = slices[0].weight.device if slices else torch.device("cpu")
        self._flat = torch.empty(numel, dtype=torch.float32, device=device)
        place = 0
        for piece in pieces(slices, _PIECE):
            for owned in piece.slices if piece.first == 0 else ():
                numel = owned.stop - owned.start
                self._averages[owned.key] = self._flat[place : place + numel].copy_(_master(owned))
                place += numel

    @property
    def version(self) -> int | None:
        """The last `average` that is complete on this rank; None before the first."""
        return None if self._done is not None else self._version

    @torch.inference_mode(mode=False)
    def average(self, version: int) -> None:
        """Move the average one step toward the policy as it is now.

        A second call with the same version does nothing, so that an update that was aborted is retried with
        the same values. A call that failed is to be repeated: it goes on where it stopped, and until then
        nothing is published on any rank.

        Args:
            version: of the update that will publish it.

        Raises:
            ConfigError: the average of another version is not complete on this rank.

        Call it on every trainer rank.
        """
        if self._done is not None and version != self._version:
            raise ConfigError(
                f"version={version}: the average of version {self._version} failed on this rank. "
                f"Remedy: call average({self._version}) again first"
            )
        if self._done is None:
            if version == self._version:
                return
            self._version, self._done, self._found = version, 0, []
        with torch.no_grad():
            for number, (average, policy, piece) in enumerate(self._pieces()):
                if number >= self._done:
                    self._move(average, policy, piece)
                    self._done = number + 1
            self._copy_buffers()
        if self._based:
            self._changes = _merged(self._changes, in_order(self._found))
        self._done, self._found = None, []

    def layout(self) -> TrainerLayout:
        """That of the trainer."""
        return self._view.layout()

    def weights(self) -> Sequence[WeightInfo]:
        """Those of the trainer."""
        return tuple(self._infos.values())

    def tensor(self, key: str) -> torch.Tensor:
        """The averaged weight. Outside of a full sync, elements that this rank does not own are zero."""
        info = self._infos[key]
        if key in self._averages and info.dtype is torch.float32:
            return self._averages[key].view(info.shape)  # sent whole, or rounded by the converter
        if not info.sparse:
            return self._copies[key] if key in self._copies else self._view.tensor(key)
        if key in self._whole:
            return self._whole[key]
        tensor = torch.zeros(info.shape, dtype=info.dtype, device=self._view.tensor(key).device)
        if key in self._averages:
            tensor.view(-1)[info.owned_start : info.owned_stop] = round_to_bf16(self._averages[key])
        return tensor

    def owned_slices(self) -> list[OwnedSlice]:
        """The averages of what this rank owns, without moments."""
        weight = round_to_bf16(self._flat)
        slices = []
        for owned in _with_masters(self._view):
            main = self._averages[owned.key]
            first = main.storage_offset()
            part = weight[first : first + main.numel()]
            slices.append(replace(owned, main=main, weight=part, exp_avg=None, exp_avg_sq=None))
        return slices

    def detect(self) -> Detection:
        """What the averages since the last commit changed, exactly."""
        if not self._based:
            return Detection(reason=Reason.FIRST_SYNC)
        num_owned = sum(info.owned_stop - info.owned_start for info in self._infos.values() if info.sparse)
        return Detection(changes=self._changes, num_owned=num_owned)

    def gather_params(self) -> None:
        """Put the averages of all owners together, until the end of the transfer.

        Memory: one more copy of the local weights in bf16.

        Collective: over the owners of each parameter.
        """
        parts = {
            key: round_to_bf16(average)
            for key, average in self._averages.items()
            if self._infos[key].dtype is torch.bfloat16
        }
        self._whole = self._view.gather_owned(parts)

    def committed(self) -> None:
        """Every rank has published the average: later changes count from it."""
        self._changes = Changes.none()
        self._based = True

    def convert(self, key: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        """As the trainer does."""
        return self._view.convert(key, tensor)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Held around sending, which fails where an average is not complete.

        Raises:
            AwexDeltaError: `average` failed on this rank, and was not repeated.
        """
        if self._done is not None:
            raise AwexDeltaError(f"average({self._version}) failed on this rank: call it again")
        self._whole = {}  # of a transfer that never began
        with self._view.transfer():
            try:
                yield
            finally:
                self._whole = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages that this rank holds, live: fp32 [n] by key."""
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from the averages of a checkpoint. The next update is a full sync.

        Args:
            state: of `state_dict` on the same rank of a trainer of the same layout.

        Raises:
            ConfigError: a key or a length differs.
        """
        sizes = {key: tensor.numel() for key, tensor in state.items()}
        expected = {key: tensor.numel() for key, tensor in self._averages.items()}
        if sizes != expected:
            wrong = sorted(key for key in sizes | expected if sizes.get(key) != expected.get(key))
            raise ConfigError(f"averages of another layout: {listed(wrong)} differ")
        for key, tensor in state.items():
            self._averages[key].copy_(tensor)
        self._changes = Changes.none()
        self._based, self._version, self._done = False, None, None

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Piece | None]]:
        """What is averaged together: the average, the policy, and where it lies if changes are recorded."""
        scratch, place = Scratch(), 0
        for piece in pieces(_with_masters(self._view), _PIECE):
            yield self._flat[place : place + piece.numel], scratch.tensor(piece, "main"), piece
            place += piece.numel
        for key, info in self._infos.items():
            if info.trained and not info.sparse:
                policy = _trained(info, self._view.tensor(key)).reshape(-1)
                averages = torch.split(self._averages[key], _PIECE)
                for old, new in zip(averages, torch.split(policy, _PIECE), strict=True):
                    yield old, new, None

    def _move(self, old: torch.Tensor, new: torch.Tensor, piece: Piece | None) -> None:
        if self._alpha < 1.0:  # zero times infinity is no zero
            new = new * self._alpha + old * (1.0 - self._alpha)
        found = _changes(old, new, piece) if piece is not None and self._based else None
        old.copy_(new)
        if piece is not None and found is not None:
            self._found.append((piece, found))

    def _copy_buffers(self) -> None:
        for key, info in self._infos.items():
            if not info.trained and info.dtype != torch.bfloat16:
                self._copies[key] = _there(info, self._view.tensor(key)).detach().clone()


def _with_masters(view: TrainerView) -> list[OwnedSlice]:
    slices = [owned for owned in view.owned_slices() if owned.stop > owned.start]
    for owned in slices:
        _master(owned)
    return slices


def _master(owned: OwnedSlice) -> torch.Tensor:
    if owned.main is None or owned.main.dtype != torch.float32:
        raise UnsupportedError(f"{owned.key} has no fp32 master, which an average is made of")
    away = owned.unreadable("main")
    if away:
        raise UnsupportedError(f"{away}. Remedy: bring it back, then average")
    return owned.main.detach()


def _trained(info: WeightInfo, tensor: torch.Tensor) -> torch.Tensor:
    tensor = _there(info, tensor)
    if tensor.dtype != torch.float32:
        raise UnsupportedError(f"{info.key} is trained in {tensor.dtype}, without an fp32 master")
    return tensor.detach()


def _there(info: WeightInfo, tensor: torch.Tensor) -> torch.Tensor:
    away = unreadable(tensor)
    if away:
        raise UnsupportedError(f"{info.key}: {away}. Remedy: bring it back, then average")
    return tensor


def _changes(old: torch.Tensor, new: torch.Tensor, piece: Piece) -> Changes:
    value = round_to_bf16(new)
    code = step_code(round_to_bf16(old), value)
    place = nonzero(code != 0)
    # The values travel along: to read them later would take a whole tensor of each parameter.
    pos = Runs.of(piece.ranges()).to(old.device).in_line(place)
    return Changes(pos=pos, code=code[place], value=value[place])


def _merged(first: Changes, second: Changes) -> Changes:
    """The changes of two averages, one after the other."""
    if first.code is None or second.code is None or first.value is None or second.value is None:
        return second  # nothing changed before
    pos, inverse = torch.unique(torch.cat([first.pos, second.pos]), return_inverse=True)
    code = torch.zeros(pos.numel(), dtype=torch.int8, device=pos.device)
    code[inverse[: first.num_changed]] = first.code
    value = torch.empty(pos.numel(), dtype=torch.bfloat16, device=pos.device)
    value[inverse[: first.num_changed]] = first.value
    moved = inverse[first.num_changed :]
    code[moved] = add_codes(code[moved], second.code)
    value[moved] = second.value
    kept = nonzero(code != 0)
    return Changes(pos=pos[kept], code=code[kept], value=value[kept])
