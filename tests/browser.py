"""Debian's Chromium, driven by its DevTools protocol over a pipe: no driver, no port and no other package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

TIMEOUT = 60.0
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowDown": (40, ""), "ArrowUp": (38, ""),
        "ArrowRight": (39, ""), "ArrowLeft": (37, ""), "Home": (36, ""), "End": (35, ""), " ": (32, " ")}  # fmt: skip


class Failed(Exception):
    """The page raised an error, or Chromium refused a command."""


class Browser:
    """One page in a Chromium without a window. `events` are what it reported: errors of the page among them."""

    def __init__(self, process: subprocess.Popen[bytes], out: int, into: int) -> None:
        self._process, self._out, self._into = process, out, into
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._out, 1 << 20)
            if not part:
                raise Failed("Chromium ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if problem := found.get("exceptionDetails"):
            raise Failed(problem.get("exception", {}).get("description", problem["text"]))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = TIMEOUT) -> Any:
        """The first value of the expression that is true. Raises `Failed` after that time."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise Failed(f"never true: {script}; the page says: {self.text()[:2000]}")
            time.sleep(0.1)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def show_as(self, width: int, height: int, theme: str = "light") -> None:
        """Make the window so large, in CSS pixels, and have the system prefer a theme, and no motion."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": theme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, form: str = "png", quality: int = 80) -> bytes:
        """What the window shows, as png, jpeg or webp; `quality` is of the latter two."""
        more = {} if form == "png" else {"quality": quality}
        return base64.b64decode(self.call("Page.captureScreenshot", format=form, **more)["data"])

    def complaints(self) -> list[str]:
        """Errors of the page's scripts, and what Chromium logged as one: violations of the policy, failed requests."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found


@contextlib.contextmanager
def browser(*before: str) -> Iterator[Browser]:
    """A new Chromium with a profile of its own; ends with the block. `before` are the words of a command that starts
    it, such as nsenter."""
    with tempfile.TemporaryDirectory(prefix="mv-chromium-", ignore_cleanup_errors=True) as profile:
        to_read, to_write = os.pipe(), os.pipe()  # Chromium reads commands from 3, and writes answers to 4

        def arrange() -> None:
            os.dup2(to_read[0], 30), os.dup2(to_write[1], 31)
            os.dup2(30, 3), os.dup2(31, 4)
            os.closerange(5, 64)

        words = [*before, "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
                 "--disable-background-networking", "--disable-extensions", "--lang=en"]  # fmt: skip
        process = subprocess.Popen(
            words, preexec_fn=arrange, pass_fds=(3, 4), start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile, "TMPDIR": profile},
        )  # fmt: skip
        os.close(to_read[0])
        os.close(to_write[1])
        try:
            yield Browser(process, to_write[0], to_read[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to_write[0])
            os.close(to_read[1])
