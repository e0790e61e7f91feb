"""A headless Chromium for tests of pages, driven by chromedriver through WebDriver.

WebDriver: https://www.w3.org/TR/webdriver2/
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.running import TIMEOUT, wait_for


class Browser:
    """A page in the browser. `opened` makes one.

    Args:
        session: the URL of the WebDriver session.
    """

    def __init__(self, session: str) -> None:
        self._session = session

    def go(self, url: str) -> None:
        """Loads a page."""
        _command(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Runs the body of a JavaScript function in the page, and returns the function's result."""
        return _command(f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait_for(self, condition: str) -> None:
        """Waits until an expression in JavaScript is true."""
        wait_for(lambda: bool(self.run(f"return Boolean({condition})")), condition)

    def text(self, selector: str) -> str:
        """Returns the text of the first element that a CSS selector matches."""
        return str(self.run(f"return document.querySelector({json.dumps(selector)}).innerText"))


def _command(url: str, arguments: dict[str, object]) -> Any:
    request = urllib.request.Request(url, json.dumps(arguments).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """Opens a browser whose downloads and profile are in `folder`. Skips the test if no browser is installed."""
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("needs chromium and chromedriver")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = next(
                found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            options = {
                "binary": chromium,
                "args": ["--headless=new", "--no-sandbox", f"--user-data-dir={folder / 'profile'}"],
                "prefs": {"download.default_directory": str(folder)},
            }
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {}}}}
            base = f"http://127.0.0.1:{port}/session"
            session = f"{base}/{_command(base, wanted)['sessionId']}"
            try:
                yield Browser(session)
            finally:
                urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=TIMEOUT).close()
        finally:
            process.terminate()
