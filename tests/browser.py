"""A headless Chromium for the tests, spoken to over two pipes in its own protocol: no driver, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
WAIT = 60.0
"""Seconds for an answer: the machine may be busy."""


class Browser:
    """One page. ``problems`` collects exceptions, console errors and every request that leaves the page."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        ours_out, theirs_in = os.pipe()
        theirs_out, ours_in = os.pipe()
        # the program reads commands from file descriptor 3 and answers on 4
        script = f'exec "$0" "$@" 3<&{ours_out} 4>&{ours_in}'
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *options, f"--user-data-dir={folder}"],
            pass_fds=(ours_out, ours_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours_out)
        os.close(ours_in)
        self.to, self.back = theirs_in, theirs_out
        self.buffer = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """One command and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self.back, 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError(f"{PROGRAM} does not answer")
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1200, height: int = 900, scheme: str = "light", scale: int = 1) -> None:
        """Loads a file at a window size, in light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 600)  # fmt: skip  # one call
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + WAIT
        while self.run("document.readyState") != "complete" or self.run("location.protocol") != "file:":
            if time.monotonic() > end:
                raise TimeoutError(f"{page} does not load")
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """One key, as a user presses it."""
        codes = {"Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39, " ": 32, "Tab": 9, "Enter": 13}
        common = {"key": key, "modifiers": 8 if shift else 0, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """What is to be seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def problems(self) -> list[str]:
        """Exceptions, errors in the log, and requests other than for the page itself, so far."""
        self.run("1")  # takes in what is still on the way
        found = []
        for event in self.events:
            kind, parameters = event.get("method"), event.get("params", {})
            url = parameters.get("request", {}).get("url", "")
            if kind == "Network.requestWillBeSent" and not url.startswith(("file:", "data:", "about:")):
                found.append(url)
            complaint = kind == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning")
            if complaint or kind in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(parameters))
        return found

    def close(self) -> None:
        """Ends the program."""
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, TimeoutError):
            self.process.terminate()
        self.process.wait(WAIT)
        os.close(self.to)
        os.close(self.back)
