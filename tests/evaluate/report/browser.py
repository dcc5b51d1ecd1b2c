"""A headless Chromium over its debugging pipe: what the report's page looks like, and what it does while it loads."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")

# The browser reads from descriptor 3 and writes to 4.
_HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 200), os.dup2(int(sys.argv[2]), 201), os.dup2(200, 3), os.dup2(201, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Path of a Chromium: KVFOLD_CHROMIUM, or the first of its usual names on PATH."""
    named = os.environ.get("KVFOLD_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Console messages, exceptions and requests are kept as they come."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._read_so_far = to_browser, from_browser, b""
        self._next, self._session = 0, ""
        self._arrived: set[str] = set()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Load a file at a width, on a screen whose owner prefers a scheme, and wait until it is there."""
        self.complaints, self.requests = [], []
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self._call("Emulation.setEmulatedMedia", media="", features=features)
        self._arrived.discard("Page.loadEventFired")
        self._call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._arrived:
            self._read()

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """PNG of the page, beyond what the window shows too."""
        data = base64.b64decode(
            self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        )
        path.write_bytes(data)
        return data

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._read_so_far:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser is gone"
            self._read_so_far += piece
        data, _, self._read_so_far = self._read_so_far.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        event, about = message.get("method", ""), message.get("params", {})
        self._arrived.add(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        return message


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Page]:
    """Start the browser for some work, with nothing of the user's in it."""
    child_in, to_browser = os.pipe()
    from_browser, child_out = os.pipe()

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
    process = subprocess.Popen(
        [sys.executable, "-c", _HAND_OVER, str(child_in), str(child_out), program, *flags],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()
