"""A real browser for tests: Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
_FLAGS += (
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=800,1000",
)


class Page:
    """One tab; remembers every address that it asked for."""

    def __init__(self, address: str) -> None:
        websocket = pytest.importorskip("websocket", reason="websocket-client is not installed")
        self.socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self.numbers = itertools.count(1)
        self.requested: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            reply = json.loads(self.socket.recv())
            if reply.get("method") == "Network.requestWillBeSent":
                self.requested.append(reply["params"]["request"]["url"])
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(reply["params"]))
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """The same, as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, (
                f"{expression} never came true: {self.value('document.body.innerText')}"
            )
            time.sleep(0.1)
        return found

    def drop(self, file: Path, selector: str) -> None:
        """Drag a file from outside onto an element and let go, as a hand would."""
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        x, y = self.value(f"{box}.x + {box}.width / 2"), self.value(f"{box}.y + {box}.height / 2")
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A fresh Chromium with an empty page; skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no browser: Chromium is not installed")
    flags = (*_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-port=0", "--remote-allow-origins=*")
    process = subprocess.Popen(
        [program, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    page = None
    try:
        page = Page(_address(folder, process))
        yield page
    finally:
        if page is not None:
            page.socket.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the first tab listens."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            port = int((folder / "DevToolsActivePort").read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as reply:
                pages = [tab for tab in json.load(reply) if tab["type"] == "page"]
            return pages[0]["webSocketDebuggerUrl"]
        except (OSError, ValueError, IndexError):
            time.sleep(0.2)
    pytest.skip("no browser: Chromium is installed, but does not start here")
    raise AssertionError("not reached")
