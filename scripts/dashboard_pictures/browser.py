"""A headless Chromium, driven over its DevTools pipe: no driver, no port, no package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
"""Path of the program; None: there is none."""
# Beyond the descriptors that the browser wants for itself.
_FIRST_DESCRIPTOR = 10


class Browser:
    """One page of a browser."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        page = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def open(
        self, url: str, *, width: int = 1280, height: int = 800, is_dark: bool = False
    ) -> None:
        """Load a page in a window of this many CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.command("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, f"{script}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def wait_for(self, script: str, limit_s: float = 20.0) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + limit_s
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < end, f"{script} does not hold; the page said {self.said}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What is to be read in an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def screenshot(self, file: Path) -> None:
        """Save the whole page as a picture."""
        wanted = {"format": "png", "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", **wanted)["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a DevTools command and return its result."""
        self._number += 1
        sent: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._commands, json.dumps(sent).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]
            if told.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.said.append(json.dumps(told["params"])[:500])

    def _next(self, limit_s: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._replies], [], [], limit_s)
            assert readable, "the browser does not reply"
            read = os.read(self._replies, 2**20)
            assert read, "the browser ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with an empty profile, until the block ends."""
    to_browser, commands = _pipe()
    replies, from_browser = _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        ]
        # Chromium reads commands from descriptor 3 and writes replies to 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", script, str(CHROMIUM), *flags],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            browser = Browser(commands, replies)
            yield browser
            browser.command("Browser.close")
            process.wait(timeout=30)
        finally:
            os.close(commands)
            os.close(replies)
            if process.poll() is None:
                process.kill()
                process.wait()


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
