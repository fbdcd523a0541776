"""A headless Chromium for tests, driven over a pipe by the DevTools protocol: nothing to install
but the browser itself."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium was found: apt-get install chromium, or another browser of that family"


def find_chromium() -> str | None:
    """The program of the first browser that is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab. Ask it with `send`, or evaluate a JavaScript expression with `js`."""

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self.process, self._read, self._write = process, read, write
        self._numbers, self._session, self._rest = itertools.count(1), "", b""
        (page,) = [
            one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page"
        ]
        given = {"targetId": page["targetId"], "flatten": True}
        self._session = self.send("Target.attachToTarget", **given)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    #: What pages complained about and asked the network for.
    complaints: list[str]
    requests: list[str]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise TimeoutError(method)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._read], [], [], max(0.0, deadline - time.monotonic())
            )
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("the browser has gone, or does not answer")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.complaints.append(str(details.get("exception", details)))
            case "Log.entryAdded":
                self.complaints.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of this size, and wait until it is loaded."""
        self.complaints, self.requests = [], []
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        self.send("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.03)

    def centre(self, selector: str, across: float = 0.5) -> tuple[float, float]:
        """Where an element is in the window, after scrolling to it."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        return box[0] + across * box[2], box[1] + 0.5 * box[3]

    def mouse(self, kind: str, x: float, y: float) -> None:
        """A mouseMoved, mousePressed or mouseReleased."""
        click = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **click)

    def click(self, selector: str) -> None:
        """Click into the middle of an element."""
        place = self.centre(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *place)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key and let it go."""
        given = {"key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Start a headless browser with an empty profile, and end it."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()

    def pipes() -> None:  # The protocol is spoken on descriptors 3 and 4.
        spare = [os.dup(one) for one in (theirs_in, theirs_out)]
        for place, one in enumerate(spare, start=3):
            os.dup2(one, place)

    process = subprocess.Popen(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", "--no-first-run", "--mute-audio"),
            *("--autoplay-policy=no-user-gesture-required", f"--user-data-dir={profile}"),
            "about:blank",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=pipes,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, ours_in, ours_out)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)
        os.close(ours_in)
        os.close(ours_out)
