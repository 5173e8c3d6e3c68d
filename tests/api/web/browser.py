"""Drive a headless Chromium over its DevTools pipe: JSON messages, each ended by a null byte."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
    "about:blank",
)
WAIT_S = 60.0
COMMANDS_FD, EVENTS_FD = 3, 4
HIGH_FD = 10


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with a profile of its own in `folder`."""

    def __init__(self, path: str, folder: Path) -> None:
        theirs_in, self._commands = os.pipe()
        self._events, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for fd in (theirs_in, theirs_out)]

        def place_pipes() -> None:
            os.dup2(high[0], COMMANDS_FD)
            os.dup2(high[1], EVENTS_FD)

        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [path, f"--user-data-dir={folder}", *FLAGS],
                preexec_fn=place_pipes,
                close_fds=False,
                stdout=log,
                stderr=log,
            )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        until_s = time.monotonic() + WAIT_S
        while message["id"] not in self._answers:
            self.take(until_s - time.monotonic())
        answer = self._answers.pop(message["id"])
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def take(self, wait_s: float) -> None:
        """Take in what the browser says within `wait_s`; raise TimeoutError if that is nothing."""
        if not select.select([self._events], [], [], max(0.0, wait_s))[0]:
            raise TimeoutError("the browser says nothing")
        data = os.read(self._events, 1 << 20)
        if not data:
            raise RuntimeError("the browser has ended")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self.listeners:
                self.listeners[message["sessionId"]](message["method"], message["params"])

    def open(self, url: str, width: int = 1280, height: int = 800) -> Page:
        """Open a page in a profile of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        page.resize(width, height)
        page.go(url)
        return page

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for fd in (self._commands, self._events):
            os.close(fd)


class Page:
    """One page. `complaints` are errors of its console, `requests` the URLs that it asked for."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loads = 0
        browser.listeners[session] = self._take
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def _take(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:1000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:1000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    def go(self, url: str) -> None:
        """Load `url`, and wait until it is there."""
        loads = self._loads
        self.send("Page.navigate", url=url)
        self.until(lambda: self._loads > loads)

    def before_scripts(self, code: str) -> None:
        """Run `code` in each page that is loaded from now on, before its own scripts."""
        self.send("Page.addScriptToEvaluateOnNewDocument", source=code)

    def count_work(self) -> None:
        """Count from now on what scripts do; pages must be loaded afterwards."""
        self.send("Profiler.enable")
        self.send("Profiler.startPreciseCoverage", callCount=True, detailed=True)

    def work(self, code: str) -> int:
        """How many pieces of code without a branch the page's own scripts run for `code`: a time without a clock."""
        self.send("Profiler.takePreciseCoverage")
        self.run(code)
        scripts = self.send("Profiler.takePreciseCoverage")["result"]
        own = [script["functions"] for script in scripts if "/web/" in script["url"]]
        return sum(part["count"] for each in own for function in each for part in function["ranges"])

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Let the system prefer the theme `scheme`; nothing moves."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def until(self, condition: Callable[[], object]) -> None:
        """Take in events until `condition` holds."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            try:
                self._browser.take(min(0.05, until_s - time.monotonic()))
            except TimeoutError:
                if time.monotonic() > until_s:
                    raise

    def run(self, code: str) -> Any:
        """Evaluate an expression in the page, a promise to its end; return its value."""
        found = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression is true."""
        until_s = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({code})"):
            if time.monotonic() > until_s:
                raise TimeoutError(f"never true: {code}\n{self.run('document.body.innerText')[-2000:]}")
            self.pause()

    def pause(self) -> None:
        """Let the page go on before it is asked again: to ask at each frame would keep a processor busy."""
        self.run("new Promise(done => setTimeout(done, 50))")

    def click(self, code: str) -> None:
        """Click on the element that an expression finds, with the mouse, where it is."""
        self.wait(code)
        box = self.run(
            f"(() => {{ const e = {code}; e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect();"
            " return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, **box, button=button, clickCount=1)

    def button(self, label: str, within: str = "document") -> str:
        """An expression that finds the last button of this name."""
        name = json.dumps(label)
        return (
            f"[...{within}.querySelectorAll('button')].filter(b => b.checkVisibility() && "
            f"(b.ariaLabel ?? b.textContent.trim()) === {name}).at(-1)"
        )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, path: Path, quality: int = 80) -> None:
        """Write what is seen, as WebP or PNG."""
        form = {"format": "webp", "quality": quality} if path.suffix == ".webp" else {"format": "png"}
        data = self.send("Page.captureScreenshot", **form)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        del self._browser.listeners[self._session]
        self._browser.send("Target.closeTarget", targetId=self._target)
