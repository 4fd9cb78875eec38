"""A real `genset` process for a test: started on a free port, and stopped as an operator would stop it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
MODEL = HERE.parent / "models" / "tiny-chat"
ADDRESS = re.compile(r"listening on (http://[^\s\x1b]+)")
METRIC = re.compile(r"^genset_http_requests_in_flight(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
START_SECONDS = 60
STOP_SECONDS = 30


class GensetServer:
    """Serves the engine `out`, by default the built-in model, during the `with` block. `options` are further command-line
    options.

    Both output streams are read into `output`, so a full pipe never blocks the server, and a failing test can show its
    output.
    """

    def __init__(self, *options, out="echo_core"):
        engine = [] if out is None else [f"out={out}"]
        self._options = [*engine, "--http-port", "0", *options]
        self.url = None
        self._lines = []
        self._started = threading.Event()
        self._process = None

    def __enter__(self):
        binary = os.environ.get("GENSET_BIN")
        if not binary:
            raise RuntimeError("GENSET_BIN names no genset binary; run: cargo xtask test openai-client")
        command = [binary, "run", "in=http", *self._options]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NO_COLOR": "1"},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(START_SECONDS) or self.url is None:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"{' '.join(command)} did not print its address:\n{self.output}")
        return self

    def __exit__(self, *_exception):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_SECONDS)

    def stop(self):
        """Sends SIGTERM and returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {STOP_SECONDS} s after SIGTERM:\n{self.output}") from None

    def kill(self):
        """Sends SIGKILL and waits for the end."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    @property
    def output(self):
        return "".join(self._lines)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def metrics(self):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return response.read().decode()

    def requests_in_flight(self):
        """The sum of the gauge over its labels, from `/metrics`."""
        text = self.metrics()
        values = [float(value) for value in METRIC.findall(text)]
        assert values, f"/metrics has no genset_http_requests_in_flight:\n{text}"
        return sum(values)

    def wait_until_idle(self, seconds=10):
        """Returns once no request is in flight, or fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while (in_flight := self.requests_in_flight()) != 0:
            assert time.monotonic() < deadline, f"{in_flight} requests in flight {seconds} s later:\n{self.output}"
            time.sleep(0.05)

    def _read(self):
        for line in self._process.stdout:
            self._lines.append(line)
            if self.url is None and (found := ADDRESS.search(line)):
                self.url = found.group(1).rstrip("/")
                self._started.set()
        self._started.set()  # The output has ended: no address will follow.


def post(url, body):
    """Sends a request without a client's own checks; returns status and body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def embedding_server(name, folder):
    """A server with one embedding model, `name`; `folder` is an empty folder for its files.

    They are tiny-chat's, with a config.json that allows truncated embeddings.
    """
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / file, folder / file)
    config = {**json.loads((MODEL / "config.json").read_text()), "is_matryoshka": True}
    (folder / "config.json").write_text(json.dumps(config))
    model = ["--model-name", name, "--model-path", str(folder)]
    package = f"PYTHONPATH={HERE.parent / 'python' / 'src'}"
    command = ["env", package, sys.executable, str(HERE / "embedding_engine.py"), *model]
    return GensetServer(*model, out=f"cmd:{shlex.join(command)}")
