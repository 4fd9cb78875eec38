"""Shared by the tests of the native runtime: a fleet per test, in a directory, and programs in it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
SEEDS = Path(os.environ.get("GENSET_SEEDS") or Path(__file__).parents[3] / "shared/seeds")
"""Documents of others, whose programs run here too if the documents are present."""
collect_ignore = [] if "GENSET_SEEDS" in os.environ or SEEDS.is_dir() else ["test_seeds.py"]
LONG_S = 120.0
"""A limit for events that are sure to come, on a busy machine."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports whether the documents were present."""
    found = "not there, and no part of this run" if collect_ignore else "run too"
    terminalreporter.write_line(f"test_seeds.py, programs of the documents in {SEEDS}: {found}")


# A process that a shell starts in the background ignores Ctrl-C, and so would every program that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives every test its own fleet."""
    folder = tmp_path / "fleet"
    monkeypatch.setenv("GENSET_DISCOVERY_PATH", str(folder))
    # A busy machine is silent for long.
    monkeypatch.setenv("GENSET_PEER_TIMEOUT", "60")
    return folder


@pytest.fixture
def in_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test in the folder of the example of services."""
    monkeypatch.chdir(Path(__file__).parents[2] / "examples/python/graph")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a test on its own event loop."""
    return asyncio.run(asyncio.wait_for(main, LONG_S * 2))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function as `run` does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


async def until(holds: Callable[[], Any], what: str) -> Any:
    """Waits until `holds` returns something true."""
    end = time.monotonic() + LONG_S
    while not (value := holds()):
        assert time.monotonic() < end, f"waited {LONG_S:g} s in vain: {what}"
        await asyncio.sleep(0.02)
    return value


class Program:
    """A program of `programs/` in its own process."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        env = os.environ.copy() if environment is None else environment
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def wait_for(self, text: str) -> str:
        """Waits for the next line with `text` in it."""
        end = time.monotonic() + LONG_S
        while True:
            line = self._queue.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, f"it ended without {text!r}:\n" + "\n".join(self.lines)
            if text in line:
                return line

    def wait_for_all(self, *texts: str) -> None:
        """Waits until each of `texts` appeared in a line of its own, in any order."""
        missing = list(texts)
        while missing:
            line = self.wait_for("")
            found = next((text for text in missing if text in line), None)
            if found is not None:
                missing.remove(found)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self) -> int:
        """Waits for the end."""
        code = self.process.wait(LONG_S)
        self._reader.join(LONG_S)
        return code


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., Program]]:
    """Starts programs, and ends those that are left running."""
    programs: list[Program] = []

    def begin(*command: str) -> Program:
        programs.append(Program(*command))
        return programs[-1]

    try:
        yield begin
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.process.kill()
                program.exit_code()


@pytest.fixture
def start_command() -> Iterator[Callable[..., Program]]:
    """Starts any command."""
    with starting() as begin:
        yield begin


@pytest.fixture
def start(start_command: Callable[..., Program]) -> Callable[..., Program]:
    """Starts a program of `programs/`."""
    return lambda name, *arguments: start_command(sys.executable, "-u", str(PROGRAMS / name), *arguments)


@pytest.fixture
def start_genset(start_command: Callable[..., Program]) -> Callable[..., Program]:
    """Starts the `genset` that was installed with the package."""
    from genset.backend import find_binary

    return lambda *arguments: start_command(find_binary(), *arguments)
