"""A real worker process for a test: `sample-worker`, listed in its own directory and reached over TCP."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from genset_discovery import Instance, list_instances

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_FOLDER = REPOSITORY / "models" / "tiny-chat"
START_SECONDS = 60
STOP_SECONDS = 30


class WorkerProcess:
    """Runs during the `with` block. `flags` are further flags of `sample-worker`."""

    def __init__(self, *flags: str, secret: str | None = None):
        self.directory = Path(tempfile.mkdtemp(prefix="genset-wire-"))
        self.discovery = self.directory / "discovery"
        self._flags = list(flags)
        if secret is not None:
            secret_file = self.directory / "secret"
            secret_file.write_text(secret + "\n")
            self._flags += ["--wire-secret-file", str(secret_file)]

    def __enter__(self) -> Self:
        binary = os.environ.get("SAMPLE_WORKER_BIN")
        if not binary:
            raise RuntimeError("SAMPLE_WORKER_BIN names no worker binary; run: cargo xtask test wire-client")
        command = [binary, "--discovery-backend", "file", "--discovery-path", str(self.discovery)]
        command += ["--request-plane", "tcp", "--model-path", str(MODEL_FOLDER), *self._flags]
        self._log = open(self.directory / "log", "w+")
        environment = {**os.environ, "NO_COLOR": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, env=environment)
        try:
            self._wait_until_listed()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self.directory)

    def instances(self) -> dict[str, Instance]:
        """The worker's instances, by the last part of the endpoint's name."""
        return {instance.endpoint.rpartition(".")[2]: instance for instance in list_instances(self.discovery)}

    def terminate(self) -> None:
        """Asks the worker to shut down, as an operator does; it finishes its requests."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the worker without notice, like a crash."""
        self._process.kill()

    def wait(self) -> int:
        """Waits for the exit code."""
        return self._process.wait(STOP_SECONDS)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def _wait_until_listed(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        marker = self.discovery / "genset-discovery"
        while not (marker.exists() and "generate" in self.instances()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the worker was not listed:\n{self.log}")
            time.sleep(0.02)
