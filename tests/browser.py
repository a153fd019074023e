"""A real browser for the tests: headless Chromium, driven through a pipe.

    ours ── {"id": 1, "method": ..., "params": ...}\0 ──> descriptor 3 of chromium
    ours <── {"id": 1, "result": ...}\0  or an event  ── descriptor 4

Nothing but the standard library is needed. Every wait has a deadline.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

PATIENCE = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-breakpad"),
    *("--disable-crash-reporter", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a headless Chromium; `errors` and `requests` collect what it reports."""

    def __init__(self):
        self.errors, self.requests = [], []
        self._number, self._buffer = 0, b""
        self._profile = tempfile.mkdtemp(prefix="lockstep-chromium-")
        to_it, self._to = os.pipe()
        self._from, from_it = os.pipe()
        self._process = self._start(to_it, from_it)
        os.close(to_it)
        os.close(from_it)
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def _start(self, to_it, from_it):
        shell = f'exec 3<&{to_it} 4>&{from_it}; exec "$@"'
        self._session = None
        return subprocess.Popen(
            ["bash", "-c", shell, "-", find(), *FLAGS, f"--user-data-dir={self._profile}"],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"HOME": self._profile},
        )

    def open(self, path):
        """Load a file and wait until it is loaded."""
        self._ask("Page.navigate", {"url": path.resolve().as_uri()})
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression):
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"

    def move(self, selector, across, down=0.5):
        """Move the mouse to a place within an element, in shares of its size."""
        self._mouse("mouseMoved", *self._place(selector, across, down))

    def click(self, selector):
        """Click into the middle of an element."""
        place = self._place(selector, 0.5, 0.5)
        self._mouse("mousePressed", *place, button="left", clickCount=1)
        self._mouse("mouseReleased", *place, button="left", clickCount=1)

    def press(self, key):
        """Press a key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", {"type": kind, "key": key})

    def resize(self, width, height):
        """Give the page another size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", size)

    def darken(self, dark):
        """Tell the page whether the reader wants it dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self):
        """Return the page as PNG bytes."""
        return base64.b64decode(self._ask("Page.captureScreenshot")["data"])

    def close(self):
        """End the browser and everything that it started."""
        with contextlib.suppress(OSError):
            os.close(self._to)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _place(self, selector, across, down):
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{chosen}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"{chosen}.getBoundingClientRect().toJSON()")
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def _mouse(self, kind, x, y, **more):
        self._ask("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def _ask(self, method, params=None):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _receive(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._from], [], [], left)[0]:
                chunk = os.read(self._from, 1 << 20)
                assert chunk, "the browser is gone"
                self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
