"""Chromium without a window, driven over a pipe: what a page says, shows, logs and asks the network for.

Speaks the DevTools protocol over two inherited pipes, so that neither a port nor a driver is needed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # the sandbox refuses to run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Path of a Chromium, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Use it as a context manager; the process ends with it.

    Attributes:
        complaints: texts of console errors and warnings, and of uncaught exceptions.
        requests: addresses that the page asked for, its own included.
    """

    def __init__(self, executable: str, profile: Path, *, timeout_seconds: float = 120.0) -> None:
        """Start the browser and open an empty tab.

        Args:
            executable: from `find_browser`.
            profile: an empty folder for its files.
            timeout_seconds: longest wait for any answer.
        """
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._timeout = timeout_seconds
        self._buffer, self._number, self._session = b"", 0, ""
        self._loaded: set[str] = set()  # loaders of the pages that are complete
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; the shell puts them there.
        command = f'exec "$0" "$@" 3<&{its_in} 4>&{its_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, executable, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(its_in, its_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        try:
            self._open_tab()
        except BaseException:
            self._end()
            raise

    def _open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and wait for its result. Raises RuntimeError or TimeoutError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, address: str) -> None:
        """Load a page and wait until it is complete."""
        # Not asked of the document: for a moment that is still the one before, which is complete.
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while loader not in self._loaded:
            self._read(f"Page.navigate to {address}")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page. Raises RuntimeError where it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels, as a phone's where it is narrow."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def media(self, *, scheme: str = "light", kind: str = "") -> None:
        """Prefer `light` or `dark`; kind `print` shows the page as it would be printed."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def _read(self, purpose: str) -> Any:
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError(f"the browser gave no answer to {purpose}")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
