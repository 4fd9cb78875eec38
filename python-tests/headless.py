"""A headless Chromium that acts like a person: it opens pages, clicks, types and takes pictures.

It speaks the DevTools protocol over a pipe, so it needs only Python's standard library and the browser.
"""

import base64
import fcntl
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from pathlib import Path

CHROMIUM = "chromium"
PATIENCE_S = 120


class Browser:
    """A browser with one page. Errors of the page's console and violations of its policy are in `complaints`.

    It starts at once, and is killed at the end of the `with` block unless it was closed before.
    """

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.requests = os.pipe()
        self.answers, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4, so ours are renumbered.
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 50) for each in (to_browser, from_browser)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
            "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank",
        ]
        self.process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in (to_browser, from_browser, *high):
            os.close(each)
        self.results: queue.Queue = queue.Queue()
        self.complaints: list[str] = []
        self.ids = 0
        threading.Thread(target=self._read, daemon=True).start()
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        rest = b""
        while piece := os.read(self.answers, 1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)
        self.results.put(None)

    def _take(self, message: dict) -> None:
        method, params = message.get("method"), message.get("params", {})
        if "id" in message:
            self.results.put(message)
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif method == "Page.javascriptDialogOpening":
            # Confirms dialogs, on another thread than the one that waits for answers.
            self._send("Page.handleJavaScriptDialog", {"accept": True, "promptText": "renamed"})

    def _send(self, method: str, params: dict) -> int:
        self.ids += 1
        request = {"id": self.ids, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.requests, json.dumps(request).encode() + b"\0")
        return request["id"]

    def call(self, method: str, **params: object) -> dict:
        wanted = self._send(method, params)
        while answer := self.results.get(timeout=PATIENCE_S):
            if answer["id"] == wanted:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise AssertionError("the browser has ended")

    def run(self, script: str) -> object:
        """Evaluates an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script: str) -> object:
        """Waits until an expression in the page is true, and returns its value."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}\n{self.run('document.body.innerText')}\n{self.complaints}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def click(self, selector: str, index: int = 0) -> None:
        """Clicks with the mouse in the middle of a visible element."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].at({index})"
        x, y = self.until(f"""(() => {{
            const found = {found};
            if (!found) return null;
            found.scrollIntoView({{block: "nearest"}});
            const box = found.getBoundingClientRect();
            const at = [box.x + box.width / 2, box.y + box.height / 2];
            return found.contains(document.elementFromPoint(...at)) ? at : null;
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        text = {"text": "\r"} if key == "Enter" and not modifiers else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers, **text)
            text = {}

    def look(self, width: int, height: int, is_dark: bool = False) -> None:
        """Sets the screen size and color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = "dark" if is_dark else "light"
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        os.close(self.requests)
        self.profile.cleanup()
