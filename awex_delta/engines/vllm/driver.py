"""Drives one update of a vLLM deployment from outside its workers: requests, weights, then the cache.

vLLM's workers receive weights, but only the process that schedules requests can stop them and drop the
prefix cache that the old weights filled. A `VllmDriver` does this in the one order that is safe:

    stop requests -> start -> update -> finish -> drop the prefix cache, once -> let requests go on

After a failure nothing is dropped and requests stay stopped: the next update that succeeds lets them go
on, or `resume` does. The error says whether the weights are still those of the version before. Where a
framework stops requests and lets them go by itself, a `StoppedVllmDriver` does only what is between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, get_args

import requests

from awex_delta.errors import ConfigError, UpdateError
from awex_delta.protocol.rendezvous import Joining, Rendezvous
from awex_delta.settings.agreed import DeltaSettings

Running: TypeAlias = Literal["pause", "finish", "abort"]
"""What becomes of running requests: paused and continued with the new weights (their prefix is computed
again), finished with the old weights first, or aborted."""

_MODES: Mapping[Running, str] = {"pause": "keep", "finish": "wait", "abort": "abort"}


class VllmTransfer(Protocol):
    """vLLM's own calls that move weights, which deployments offer in different ways. All block."""

    def init(self, info: Mapping[str, Any]) -> None:
        """`init_weight_transfer_engine` in every worker."""

    def start(self) -> None:
        """`start_weight_update` in every worker."""

    def update(self, info: Mapping[str, Any]) -> None:
        """`update_weights` in every worker."""

    def finish(self, version: str) -> None:
        """`finish_weight_update` in every worker; vLLM then reports `version`."""

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Drop the prefix cache; with `running`, also what paused requests hold. False if it was not."""

    def leave(self) -> None:
        """`shutdown_weight_transfer_engine` in every worker, which closes its connection to the trainer."""


class VllmControl(VllmTransfer, Protocol):
    """The same, and the calls that stop requests and let them go on."""

    def pause(self, mode: str) -> None:
        """Schedule no request until `resume`; `mode` is vLLM's: keep, wait or abort."""

    def resume(self) -> None:
        """Schedule requests again."""

    def paused(self) -> bool:
        """True while vLLM schedules no request, whoever stopped it."""


class OfflineControl(VllmControl):
    """An `LLM` object in this process, made with `weight_transfer_config={"backend": "awex_delta"}`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def pause(self, mode: str) -> None:
        self._llm.sleep(level=0, mode=mode)  # an engine core inside this process cannot wait

    def resume(self) -> None:
        self._llm.wake_up(tags=["scheduling"])

    def paused(self) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    def init(self, info: Mapping[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": dict(info)})

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, info: Mapping[str, Any]) -> None:
        self._llm.update_weights({"update_info": dict(info)})

    def finish(self, version: str) -> None:
        self._llm.finish_weight_update(weight_version=version)

    def reset_prefix_cache(self, *, running: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True))

    def leave(self) -> None:
        self._llm.collective_rpc("shutdown_weight_transfer_engine")


class HttpControl(VllmControl):
    """A server started with `VLLM_SERVER_DEV_MODE=1`, which opens vLLM's weight-transfer routes.

    Args:
        url: such as `http://127.0.0.1:8000`.
        timeout_seconds: longest wait for any answer; more than an update may take.
        api_key: the server's, None if it asks for none.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 600.0, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def pause(self, mode: str) -> None:
        # The caches stay: they are dropped after the commit.
        self._post("pause", params={"mode": mode, "clear_cache": "false"})

    def resume(self) -> None:
        self._post("resume")

    def paused(self) -> bool:
        # Anything but a clear no means yes: requests stay stopped then.
        return self._call("GET", "is_paused").get("is_paused") is not False

    def init(self, info: Mapping[str, Any]) -> None:
        self._post("init_weight_transfer_engine", json={"init_info": dict(info)})

    def start(self) -> None:
        self._post("start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        self._post("update_weights", json={"update_info": dict(info)})

    def finish(self, version: str) -> None:
        self._post("finish_weight_update", json={"weight_version": version})

    def reset_prefix_cache(self, *, running: bool) -> bool:
        flags = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        answer = self._post("reset_prefix_cache", params=flags)
        return answer.get("success") is True

    def leave(self) -> None:
        self._post("shutdown_weight_transfer_engine")

    def _post(self, route: str, **body: Any) -> dict[str, Any]:
        return self._call("POST", route, **body)

    def _call(self, method: str, route: str, **body: Any) -> dict[str, Any]:
        url = f"{self._url}/{route}"
        try:
            # No proxy, no .netrc, no redirect: the key goes to the URL that was given, as it was given.
            with requests.Session() as session:
                session.trust_env = False
                answer = session.request(
                    method,
                    url,
                    headers=self._headers,
                    timeout=self._timeout_seconds,
                    allow_redirects=False,
                    **body,
                )
        except requests.RequestException as error:
            raise UpdateError(f"vLLM at {self._url} does not answer to {route}: {error}") from error
        if answer.status_code != requests.codes.ok:
            raise UpdateError(
                f"vLLM at {self._url} refused {route}: {answer.status_code} {answer.text[:400]} "
                f"(404: start the server with VLLM_SERVER_DEV_MODE=1; 500: its log says why)"
            )
        try:
            parsed = answer.json()
        except requests.JSONDecodeError as error:
            raise UpdateError(f"vLLM at {self._url} answers to {route} with what is no JSON") from error
        return parsed if isinstance(parsed, dict) else {}


class StoppedVllmDriver:
    """Takes a vLLM deployment from version to version while somebody else holds its requests.

    Whoever calls stops requests before `connect` and `update_weights`, and lets them go on after these
    returned. After an error they have to stay stopped: the weights may be a mixture.

    Attributes:
        version: the last version that this driver brought the deployment to; None before the first.
    """

    def __init__(self, control: VllmTransfer) -> None:
        """Call nothing yet."""
        self._transfer = control
        self.version: int | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer. Returns once all ranks agreed on the plan; no weight is touched.

        `info` is from `init_info`.

        Collective: over all trainer and engine ranks: the trainer's `connect` must run meanwhile.
        """
        self._transfer.init(info)

    def update_weights(self, version: int) -> None:
        """Take the deployment to the version that the trainer sends meanwhile; drop its prefix cache, once.

        Raises UpdateError if the cache was not dropped: then `version` says that the version is committed all
        the same. Whatever vLLM raises when a worker fails passes through.

        Collective: over all trainer and engine ranks.
        """
        self._update(version, running=False)

    def disconnect(self) -> None:
        """Leave the pairing. Weights and requests stay as they are."""
        self._transfer.leave()

    def _update(self, version: int, *, running: bool) -> None:
        self._transfer.start()
        self._transfer.update({"version": version})
        self._transfer.finish(str(version))
        self.version = version
        if not self._transfer.reset_prefix_cache(running=running):
            raise UpdateError(
                f"version {version} is committed, but vLLM did not drop its prefix cache, which the old "
                f"weights filled (blocks are still held). Requests stay stopped: update again"
            )


class VllmDriver(StoppedVllmDriver):
    """Connects one vLLM deployment to a trainer, and moves it from version to version.

    Attributes:
        stopped: True from before requests are stopped until vLLM says that it schedules them again.

    Example:
        >>> driver = VllmDriver(OfflineControl(llm))  # doctest: +SKIP
        >>> driver.connect(init_info(rendezvous, settings))  # doctest: +SKIP
        >>> driver.update_weights(version)  # doctest: +SKIP
    """

    def __init__(self, control: VllmControl, *, running: Running = "pause") -> None:
        """Call nothing yet. `running` says what becomes of running requests during an update.

        Raises ConfigError if `running` is not known.
        """
        if running not in get_args(Running):
            raise ConfigError(f"running={running!r}: give one of {', '.join(get_args(Running))}")
        super().__init__(control)
        self._control = control
        self._running: Running = running
        self.stopped = False
        self._keep_stopped = False

    def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer; requests stand still meanwhile. Returns once all ranks agreed on the plan.

        Connecting touches no weight, so requests go on afterwards. Where they stood still before, they
        stay so: a failed update may have stopped them, through this driver or through one of a process
        that is gone, and the weights may be a mixture.

        `info` is from `init_info`. Raises UpdateError if vLLM does not let requests go on.

        Collective: over all trainer and engine ranks: the trainer's `connect` must run meanwhile.
        """
        self._keep_stopped = self._keep_stopped or self._control.paused()
        self.stopped = True
        self._control.pause("keep")
        try:
            self._control.init(info)
        finally:
            if not self._keep_stopped:
                self.resume()

    def update_weights(self, version: int) -> None:
        """Take the deployment to the version that the trainer sends meanwhile, and let requests go on.

        Its prefix cache is dropped once. Raises UpdateError if that fails, or if vLLM does not let requests
        go on. Whatever vLLM raises when a worker fails passes through. In all these cases requests stay
        stopped.

        Collective: over all trainer and engine ranks.
        """
        self.stopped = self._keep_stopped = True
        self._control.pause(_MODES[self._running])
        self._update(version, running=self._running == "pause")
        self.resume()

    def resume(self) -> None:
        """Let requests go on after a failed update, with the weights as they are.

        Raises UpdateError if vLLM says afterwards that it schedules none.
        """
        self._control.resume()
        if self._control.paused():
            raise UpdateError(
                "vLLM was told to schedule requests again, and says that it does not (is it asleep?): "
                "wake it up, then update again"
            )
        self.stopped = self._keep_stopped = False


def init_info(
    rendezvous: Rendezvous, settings: DeltaSettings, *, first_engine_rank: int = 0, engine: str = "vllm"
) -> dict[str, Any]:
    """What vLLM's workers need to meet the trainer: a `Joining` as JSON values.

    Args:
        rendezvous: with the host and port of a store that `host_store` opened.
        settings: the same as on the trainer's side.
        first_engine_rank: of this deployment's ranks among all engine ranks of the rendezvous.
        engine: name of this deployment, another one for each.
    """
    joining = Joining(
        rendezvous=rendezvous, settings=settings, first_engine_rank=first_engine_rank, engine=engine
    )
    return joining.model_dump(mode="json")
