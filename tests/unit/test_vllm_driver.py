"""In which order a vLLM deployment is stopped, updated, cleared and let go, without any vLLM."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from awex_delta.engines.vllm.async_control import AsyncControl
from awex_delta.engines.vllm.driver import HttpControl, OfflineControl, Running, VllmDriver, init_info
from awex_delta.errors import ConfigError, UpdateError
from awex_delta.protocol.rendezvous import Joining, Rendezvous
from awex_delta.settings.address import host_and_port
from awex_delta.settings.agreed import DeltaSettings
from tests.serving import needs_ipv6


class FakeControl:
    """Notes every call; raises in the one named `fails`; answers the reset with `dropped`.

    With `deaf` it is told to resume, raises nothing, and does not.
    """

    def __init__(self, fails: str = "", dropped: bool = True, deaf: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.dropped = dropped
        self.deaf = deaf
        self.stands_still = False

    def _call(self, name: str, *given: object) -> None:
        self.calls.append(" ".join([name, *map(str, given)]))
        if name == self.fails:
            raise UpdateError(f"injected in {name}")

    def pause(self, mode: str) -> None:
        self._call("pause", mode)
        self.stands_still = True

    def resume(self) -> None:
        self._call("resume")
        self.stands_still = self.deaf

    def paused(self) -> bool:
        return self.stands_still

    def leave(self) -> None:
        self._call("leave")

    def init(self, info: Mapping[str, Any]) -> None:
        self._call("init", info["engine"])

    def start(self) -> None:
        self._call("start")

    def update(self, info: Mapping[str, Any]) -> None:
        self._call("update", info["version"])

    def finish(self, version: str) -> None:
        self._call("finish", version)

    def reset_prefix_cache(self, *, running: bool) -> bool:
        self._call("reset", running)
        return self.dropped


@pytest.mark.parametrize(
    ("running", "mode", "preempts"),
    [("pause", "keep", True), ("finish", "wait", False), ("abort", "abort", False)],
)
def test_the_cache_is_dropped_once_after_the_commit(running: Running, mode: str, preempts: bool) -> None:
    control = FakeControl()
    VllmDriver(control, running=running).update_weights(7)
    assert control.calls == [
        f"pause {mode}",
        "start",
        "update 7",
        "finish 7",
        f"reset {preempts}",
        "resume",
    ]


@pytest.mark.parametrize("fails", ["start", "update", "finish"])
def test_after_a_failure_nothing_is_dropped_and_requests_stay_stopped(fails: str) -> None:
    control = FakeControl(fails)
    driver = VllmDriver(control)
    with pytest.raises(UpdateError, match=f"injected in {fails}"):
        driver.update_weights(1)
    assert not [call for call in control.calls if call.startswith(("reset", "resume"))]
    control.fails = ""
    driver.connect({"engine": "vllm"})
    assert "resume" not in control.calls, "connecting let requests go on with weights of a failed update"
    driver.update_weights(1)
    assert control.calls[-2:] == ["reset True", "resume"]
    driver.connect({"engine": "vllm"})
    assert control.calls[-3:] == ["pause keep", "init vllm", "resume"]


def test_a_new_driver_does_not_let_requests_go_on_that_an_earlier_one_stopped() -> None:
    control = FakeControl("update")
    with pytest.raises(UpdateError, match="injected in update"):
        VllmDriver(control).update_weights(1)
    control.fails, control.calls = "", []
    driver = VllmDriver(control)  # as after a restart of the process that drives
    driver.connect({"engine": "vllm"})
    assert control.calls == ["pause keep", "init vllm"], "requests went on with weights of a failed update"
    assert (driver.stopped, driver.version) == (True, None)
    driver.update_weights(2)
    assert control.calls[-1] == "resume"
    assert (driver.stopped, driver.version, control.stands_still) == (False, 2, False)
    driver.disconnect()
    assert control.calls[-1] == "leave"


def test_a_cache_that_was_not_dropped_is_an_error_and_requests_stay_stopped() -> None:
    control = FakeControl(dropped=False)
    driver = VllmDriver(control, running="finish")
    with pytest.raises(UpdateError, match="did not drop its prefix cache"):
        driver.update_weights(3)
    assert control.calls[-1] == "reset False"
    driver.resume()
    assert control.calls[-1] == "resume"


def test_a_failed_connect_lets_requests_go_on() -> None:
    control = FakeControl("init")
    with pytest.raises(UpdateError, match="injected in init"):
        VllmDriver(control).connect({"engine": "a"})
    assert control.calls == ["pause keep", "init a", "resume"]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [({"fails": "resume"}, "injected in resume"), ({"deaf": True}, "says that it does not")],
)
def test_requests_go_on_only_where_vllm_says_so(trouble: dict[str, Any], said: str) -> None:
    control = FakeControl(**trouble)
    driver = VllmDriver(control)
    with pytest.raises(UpdateError, match=said):
        driver.connect({"engine": "a"})
    assert driver.stopped, "nobody knows whether requests go on"
    with pytest.raises(UpdateError, match=said):
        driver.update_weights(1)
    assert (driver.stopped, driver.version) == (True, 1)
    with pytest.raises(UpdateError, match=said):
        driver.resume()
    assert driver.stopped
    control.fails, control.deaf = "", False
    driver.update_weights(2)
    assert (driver.stopped, driver.version, control.stands_still) == (False, 2, False)


def test_requests_that_could_not_be_stopped_to_connect_go_on_after_the_next_try() -> None:
    control = FakeControl("pause")
    driver = VllmDriver(control)
    with pytest.raises(UpdateError, match="injected in pause"):
        driver.connect({"engine": "a"})
    assert driver.stopped, "nobody knows whether requests go on"
    control.fails = ""
    driver.connect({"engine": "a"})
    assert (driver.stopped, control.calls[-1]) == (False, "resume")


def test_an_unknown_choice_for_running_requests_is_refused() -> None:
    choice: Any = "drop"
    with pytest.raises(ConfigError, match="running='drop': give one of pause, finish, abort"):
        VllmDriver(FakeControl(), running=choice)


def test_the_info_for_workers_is_plain_json() -> None:
    rendezvous = Rendezvous(num_engine_ranks=4, num_trainer_ranks=2, host="10.0.0.7", port=4711)
    info = init_info(rendezvous, DeltaSettings(anchor_interval=3), first_engine_rank=2, engine="b")
    assert json.loads(json.dumps(info)) == info
    assert info["rendezvous"] == {
        "num_engine_ranks": 4,
        "num_trainer_ranks": 2,
        "host": "10.0.0.7",
        "port": 4711,
        "name": "awex_delta",
    }
    assert (info["first_engine_rank"], info["engine"], info["settings"]["anchor_interval"]) == (2, "b", 3)
    assert Joining(**info).rendezvous == rendezvous


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"port": 1 << 16}, "port"),
        ({"port": "4711"}, "port"),
        ({"host": "a b"}, "host"),
        ({"num_engine_ranks": -1}, "num_engine_ranks"),
        ({"num_engine_ranks": 0, "num_trainer_ranks": 0}, "give the number of ranks"),
        ({"store": {}}, "store"),
        ({"ports": 1}, "ports"),
    ],
)
def test_a_meeting_point_that_cannot_be_is_refused_when_it_is_read(
    change: dict[str, object], said: str
) -> None:
    info = init_info(Rendezvous(num_engine_ranks=1, num_trainer_ranks=1, port=4711), DeltaSettings())
    with pytest.raises(ValidationError, match=said):
        Joining(**{**info, "rendezvous": {**info["rendezvous"], **change}})


class FakeLlm:
    """The calls of `vllm.LLM` that the driver makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.llm_engine = self
        self.sleeps = False

    def is_sleeping(self) -> bool:
        return self.sleeps

    def collective_rpc(self, method: str) -> None:
        self.calls.append(("rpc", method))

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", (level, mode)))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, request: Mapping[str, Any]) -> None:
        self.calls.append(("update", request))

    def finish_weight_update(self, weight_version: str) -> None:
        self.calls.append(("finish", weight_version))

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append(("reset", (reset_running_requests, reset_connector)))
        return True


def test_an_llm_object_is_paused_at_level_zero_which_keeps_its_weights() -> None:
    llm = FakeLlm()
    VllmDriver(OfflineControl(llm)).update_weights(2)
    assert llm.calls == [
        ("sleep", (0, "keep")),
        ("start", None),
        ("update", {"update_info": {"version": 2}}),
        ("finish", "2"),
        ("reset", (True, True)),
        ("wake_up", ["scheduling"]),
    ]
    OfflineControl(llm).leave()
    assert llm.calls[-1] == ("rpc", "shutdown_weight_transfer_engine")
    assert not OfflineControl(llm).paused()
    llm.sleeps = True
    assert OfflineControl(llm).paused()


class FakeAsyncLlm:
    """The coroutines of `vllm.AsyncLLM` that the driver awaits."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stands_still = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", (mode, clear_cache)))
        self.stands_still = True

    async def resume_generation(self) -> None:
        self.calls.append(("resume", None))
        self.stands_still = False

    async def is_paused(self) -> bool:
        return self.stands_still

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(("init", request.init_info))

    async def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    async def update_weights(self, request: Any) -> None:
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version: str) -> None:
        self.calls.append(("finish", weight_version))

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append(("reset", (reset_running_requests, reset_connector)))
        return True

    async def shutdown_weight_transfer_engine(self) -> None:
        self.calls.append(("leave", None))


def test_an_async_llm_is_driven_from_another_thread_while_its_loop_runs() -> None:
    llm = FakeAsyncLlm()

    async def serve() -> None:
        driver = VllmDriver(AsyncControl(llm, asyncio.get_running_loop()), running="abort")
        await asyncio.to_thread(driver.connect, {"engine": "a"})
        await asyncio.to_thread(driver.update_weights, 3)
        await asyncio.to_thread(driver.disconnect)

    asyncio.run(serve())
    assert llm.calls == [
        *(("pause", ("keep", False)), ("init", {"engine": "a"}), ("resume", None)),
        *(("pause", ("abort", False)), ("start", None), ("update", {"version": 3}), ("finish", "3")),
        *(("reset", (False, True)), ("resume", None), ("leave", None)),
    ]


class Server:
    """Answers every POST with `answers` by route, and notes what was asked."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.asked: list[tuple[str, str | None, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "reset_prefix_cache": (200, {"success": True}),
            "is_paused": (200, {"is_paused": False}),
        }
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.asked.append((self.path, self.headers["Authorization"], json.loads(body or b"null")))
                route = self.path.partition("?")[0].strip("/")
                status, answer = server.answers.get(route, (200, {}))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        class Http(HTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self.http = Http((host, 0), Handler)
        self.url = f"http://{host_and_port(host, self.http.server_port)}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    one = Server(request.param)
    yield one
    one.http.shutdown()
    one.thread.join()
    one.http.server_close()


def test_a_server_is_driven_over_its_routes_with_its_key(server: Server) -> None:
    VllmDriver(HttpControl(server.url + "/", api_key="secret"), running="finish").update_weights(5)
    assert server.asked == [
        ("/pause?mode=wait&clear_cache=false", "Bearer secret", None),
        ("/start_weight_update", "Bearer secret", None),
        ("/update_weights", "Bearer secret", {"update_info": {"version": 5}}),
        ("/finish_weight_update", "Bearer secret", {"weight_version": "5"}),
        (
            "/reset_prefix_cache?reset_running_requests=false&reset_external=true",
            "Bearer secret",
            None,
        ),
        ("/resume", "Bearer secret", None),
        ("/is_paused", "Bearer secret", None),
    ]


@pytest.mark.parametrize("answer", [{"success": False}, {}, {"success": "true"}])
def test_any_answer_but_true_means_the_cache_was_not_dropped(server: Server, answer: object) -> None:
    server.answers["reset_prefix_cache"] = (200, answer)
    with pytest.raises(UpdateError, match="did not drop its prefix cache"):
        VllmDriver(HttpControl(server.url)).update_weights(5)
    assert "/resume" not in [path for path, _, _ in server.asked]


@pytest.mark.parametrize(
    ("answer", "stopped"),
    [({"is_paused": False}, False), ({"is_paused": True}, True), ({}, True), ({"is_paused": "false"}, True)],
)
def test_a_server_is_asked_whether_requests_stand_still(
    server: Server, answer: object, stopped: bool
) -> None:
    server.answers["is_paused"] = (200, answer)
    driver = VllmDriver(HttpControl(server.url))
    driver.connect({"engine": "a"})
    driver.disconnect()
    asked = [path.partition("?")[0] for path, _, _ in server.asked]
    resumed = [] if stopped else ["/resume", "/is_paused"]
    begin = ["/is_paused", "/pause", "/init_weight_transfer_engine"]
    assert asked == [*begin, *resumed, "/shutdown_weight_transfer_engine"]


def test_a_refusing_or_absent_server_is_an_error_with_the_remedy(server: Server) -> None:
    server.answers["pause"] = (404, {"detail": "Not Found"})
    with pytest.raises(UpdateError, match=r"refused pause: 404 .*VLLM_SERVER_DEV_MODE=1"):
        VllmDriver(HttpControl(server.url)).update_weights(5)
    with pytest.raises(UpdateError, match="does not answer to pause"):
        VllmDriver(HttpControl("http://127.0.0.1:1", timeout_seconds=2)).update_weights(5)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [(200, b"<html>", "no JSON"), (200, b"", "no JSON"), (302, {}, "refused start_weight_update: 302")],
)
def test_garbage_and_redirects_are_errors_and_requests_stay_stopped(
    server: Server, status: int, answer: object, says: str
) -> None:
    server.answers["start_weight_update"] = (status, answer)
    with pytest.raises(UpdateError, match=says):
        VllmDriver(HttpControl(server.url, api_key="secret")).update_weights(5)
    assert [path.partition("?")[0] for path, _, _ in server.asked] == ["/pause", "/start_weight_update"]


def test_a_list_where_an_object_belongs_is_no_success(server: Server) -> None:
    server.answers["reset_prefix_cache"] = (200, ["success"])
    with pytest.raises(UpdateError, match="did not drop its prefix cache"):
        VllmDriver(HttpControl(server.url)).update_weights(5)


def test_the_environment_does_not_turn_calls_aside(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    VllmDriver(HttpControl(server.url)).update_weights(5)
