"""Drives one SGLang engine from version to version, through the loader that its workers call.

SGLang takes any return of a loader for success, so this driver never concludes that a version was
committed. The trainer knows; whoever coordinates both sides calls `publish` once the trainer has committed.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any, Protocol

import requests
import torch

from awex_delta.engines.sglang.loader import LOAD_FORMAT, Action, message
from awex_delta.errors import UpdateError
from awex_delta.protocol.rendezvous import Joining

_SETTLE_SECONDS = 10.0


class SglangControl(Protocol):
    """SGLang's own calls that an update needs. All block."""

    def flush(self, seconds: float) -> bool:
        """Drop the cache once no request runs, within `seconds`. False if one runs longer."""

    def load(self, named_tensors: list[tuple[str, torch.Tensor]], *, flush: bool) -> None:
        """Give tensors to our loader in every worker. Raises UpdateError if SGLang refuses."""

    def publish(self, version: str) -> None:
        """Let SGLang report `version` as its weight version."""


class EngineControl(SglangControl):
    """A `sglang.Engine` in this process. It runs a loop of its own, so nothing else may use it meanwhile.

    Make it with `custom_weight_loader=["awex_delta.engines.sglang.loader.load"]`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def flush(self, seconds: float) -> bool:
        answer = self._engine.tokenizer_manager.flush_cache(timeout_s=seconds)
        return self._engine.loop.run_until_complete(answer).success is True

    def load(self, named_tensors: list[tuple[str, torch.Tensor]], *, flush: bool) -> None:
        try:
            _require(self._engine.begin_weight_update("target"))
            answer = self._engine.update_weights_from_tensor(
                named_tensors, load_format=LOAD_FORMAT, flush_cache=flush
            )
            _require(answer)
        finally:  # also what an earlier failure left open, for which SGLang refuses to begin
            ended = self._engine.end_weight_update()
        _require(ended)

    def publish(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._engine.loop.run_until_complete(self._engine.tokenizer_manager.update_weight_version(request))


class HttpControl(SglangControl):
    """An SGLang server, started with `--custom-weight-loader awex_delta.engines.sglang.loader.load`.

    Args:
        url: such as `http://127.0.0.1:30000`.
        num_workers: tensor-parallel ranks of the server.
        timeout_seconds: longest wait for any answer; more than an update may take.
        api_key: the server's, None if it asks for none.
    """

    def __init__(
        self, url: str, num_workers: int, *, timeout_seconds: float = 3600.0, api_key: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def flush(self, seconds: float) -> bool:
        return self._post("flush_cache", params={"timeout": seconds}).ok  # a request that runs is an error

    def load(self, named_tensors: list[tuple[str, torch.Tensor]], *, flush: bool) -> None:
        payload = base64.b64encode(pickle.dumps(named_tensors)).decode()
        body = {
            "serialized_named_tensors": [payload] * self._num_workers,
            "load_format": LOAD_FORMAT,
            "flush_cache": flush,
            "selector": "target",
        }
        self.post("begin_weight_update", {"selector": "target"})
        try:
            answer = self.post("update_weights_from_tensor", body)
        finally:
            self.post("end_weight_update", {})
        _require((answer.get("success"), answer.get("message")))

    def publish(self, version: str) -> None:
        self.post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """The answer of a route, read as JSON. Raises UpdateError if SGLang does not answer, or refuses."""
        answer = self._post(route, json=body)
        if not answer.ok:
            raise UpdateError(
                f"SGLang at {self._url} refused {route}: {answer.status_code} {answer.text[:400]}"
            )
        return answer.json()

    def _post(self, route: str, **given: Any) -> requests.Response:
        url = f"{self._url}/{route}"
        try:
            # No proxy, no .netrc, no redirect: the key goes to the URL that was given, as it was given.
            with requests.Session() as session:
                session.trust_env = False
                return session.post(
                    url, headers=self._headers, timeout=self._timeout_seconds, allow_redirects=False, **given
                )
        except requests.RequestException as error:
            raise UpdateError(f"SGLang at {self._url} does not answer to {route}: {error}") from error


def _require(answer: Any) -> None:
    if answer[0] is not True:
        raise UpdateError(f"SGLang refused the update: {answer[1]}")


class SglangDriver:
    """Connects one SGLang engine to a trainer, and moves it from version to version.

    Attributes:
        version: the last published version; None before the first.
        in_doubt: True from the begin of an update until it is published: nobody said what the workers hold.

    Example:
        >>> driver = SglangDriver(EngineControl(engine), joining)  # doctest: +SKIP
        >>> driver.update_weights(version)  # while the trainer's ranks do the same  # doctest: +SKIP
        >>> driver.publish(version)  # once the trainer has committed it  # doctest: +SKIP
    """

    def __init__(self, control: SglangControl, joining: Joining) -> None:
        """Nothing is called yet. `joining` is the pairing, and the engine's place in it."""
        self._control = control
        self._joining = joining
        self.version: int | None = None
        self.in_doubt = False

    def connect(self) -> None:
        """Let the workers meet the trainer. Whether they did, the trainer's `connect` tells.

        Collective: over all trainer and engine ranks.
        """
        self._send("connect", flush=False)

    def update_weights(self, version: int) -> None:
        """Let the workers take part in one update. Whether it was committed, the trainer tells.

        Requests that run get 10 s to end; what runs longer has to be paused or retracted before. Raises
        UpdateError if SGLang refused, or did not drop its cache.

        Collective: over all trainer and engine ranks.
        """
        self.in_doubt = True
        # A request counts as running for a moment after its answer, and SGLang would refuse to drop what the
        # old weights cached. At once first: paused, with requests that wait, it can, and is never idle.
        # Whether one runs even longer, the update tells.
        if not self._control.flush(0.0):
            self._control.flush(_SETTLE_SECONDS)
        self._send("update", version=version, flush=True)

    def publish(self, version: int) -> None:
        """Let SGLang report a version that the trainer has committed."""
        self._control.publish(str(version))
        self.version, self.in_doubt = version, False

    def disconnect(self) -> None:
        """Leave the pairing; the weights stay as they are."""
        self._send("disconnect", flush=False)

    def _send(self, action: Action, *, flush: bool, version: int = -1) -> None:
        self._control.load(message(action, self._joining, version=version), flush=flush)
