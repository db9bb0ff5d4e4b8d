"""A browser to look at pages with, where a Chromium is installed: its own protocol over two pipes, so that nothing more
is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_S, wait_for

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium, with which pages are looked at: "
                                                           "apt-get install chromium")


class Browser:
    """One page.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # It reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
        with (folder / "browser.log").open("w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", shell, PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu",
                 "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile",
                 "about:blank"], pass_fds=(command_read, answer_write), stdout=log, stderr=log)
        os.close(command_read)
        os.close(answer_write)
        self._held, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        [page] = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command of the DevTools protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + HANG_S
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser has ended, or answers no more"
            self._held += part
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str, ready: str) -> None:
        """Go to a page, until an expression on it is true."""
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && ({ready})")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        wait_for(lambda: self.run(script))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
