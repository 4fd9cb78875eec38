"""`genset serve MODULE:CLASS`: a class, and the services it depends on, each in processes of their own.

A process that dies is started again after a pause that doubles, five times in a row; then all end, and its last lines are shown.
What it started and left running is killed. SIGINT, SIGTERM or SIGHUP drains all, each service after those that depend on it; a SIGINT
or SIGTERM during the drain kills. What is left after 75 s is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from genset.runtime import GRACE_S, KILL_S
from genset.sdk import SERVICE_ARGS, ServiceSpec, parse_cpu, parse_gpus

CONFIG_VARIABLE = "GENSET_SERVICE_CONFIG"
"""A service's configuration as JSON, in its process."""
CORES_VARIABLE = "GENSET_SERVICE_CORES"
"""The cores that a service's process is bound to; empty for all."""
LEASH_VARIABLE = "GENSET_SERVICE_LEASH_FD"
"""The file descriptor, in a service's process, of a pipe that closes when `genset serve` ends."""
READY_VARIABLE = "GENSET_SERVICE_READY_FD"
"""The file descriptor, in a service's process, of a pipe to which it writes once the service has started."""
STATUS_VARIABLE = "GENSET_STATUS_PORT"
"""The status port of a service's process."""
WIRE_VARIABLE = "GENSET_WIRE_PORT"
"""The port at which a service's process listens for its callers."""
COMMON = "Common"
"""The part of a file that is no service's: settings for those whose `COMMON_CONFIGS` name them, as in Dynamo."""
COMMON_CONFIGS = "common-configs"
MAX_PORT = (1 << 16) - 1
MAX_DEATHS = 5
FIRST_PAUSE_S = 0.5
LONG_LIFE_S = 60.0
"""A process that lived this long after its start resets the count of deaths. Loading does not count as life."""
LAST_LINES = 20
MAX_LINE_BYTES = 1 << 20
LAST_WORDS_S = 0.5
"""How long to wait for the output of a process that died. A child that it left running may hold the pipe open."""


class UsageError(Exception):
    """The requested services cannot be served."""


@dataclasses.dataclass
class Process:
    """One process of a service."""

    spec: ServiceSpec
    title: str
    """The prefix of each line of its log."""
    environment: dict[str, str]
    gpus: str = ""
    """The process's devices, for people; empty if the machine has none."""


def load(target: str) -> ServiceSpec:
    """Loads the service of MODULE:CLASS from the current folder or the installed packages; raises `UsageError` if there is none."""
    module, _, name = target.partition(":")
    # A name that begins with a dot is one within a package, or a path.
    if not module or module.startswith(".") or not name:
        raise UsageError(f"{target!r} names no class: write MODULE:CLASS, such as graph:Frontend")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target}: {error}; is it in this folder, or installed?") from error
    except Exception:
        # The fault is in the module, at the last line of this.
        traceback.print_exc()
        raise UsageError(f"{target}: the module cannot be imported") from None
    if not isinstance(found, type):
        raise UsageError(f"{module} has no class {name}")
    try:
        return ServiceSpec.of(found)
    except TypeError as error:
        raise UsageError(str(error)) from error


def configuration(file: str | None, settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns each service's configuration: that of the file, overridden by `--Service.key=value`. In the file `Common` has settings for
    several services: those that each names in its `common-configs`."""
    told: dict[str, dict[str, Any]] = {}
    if file is not None:
        told = _read(Path(file))
        common = {} if COMMON in names else told.pop(COMMON, {})
        for name, own in told.items():
            told[name] = {**_shared(name, own.get(COMMON_CONFIGS) or [], common), **own}
            told[name].pop(COMMON_CONFIGS, None)
    for setting in settings:
        key, equals, text = setting.removeprefix("--").partition("=")
        name, dot, key = key.partition(".")
        if not (setting.startswith("--") and equals and dot and key):
            raise UsageError(f"{setting!r} is no setting: write --Service.key=value")
        path = key.split(".") if key.startswith(f"{SERVICE_ARGS}.") else [key]
        at = told.setdefault(name, {})
        for part in path[:-1]:
            inner = at.get(part) or {}
            if not isinstance(inner, dict):
                raise UsageError(f"{setting!r}: {part} of the file is no map")
            # A copy: other services may have the same map, from `Common` or by an alias of YAML.
            at[part] = {**inner}
            at = at[part]
        at[path[-1]] = _value(text)
    for name in told:
        if name not in names:
            raise UsageError(f"the configuration names {name}, which is none of the services {', '.join(names)}")
    return told


def _shared(name: str, wanted: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `Common` that a service wants."""
    if not isinstance(wanted, list) or not all(isinstance(each, str) and each in common for each in wanted):
        known = ", ".join(map(str, common)) or "none"
        raise UsageError(f"{name}: {COMMON_CONFIGS}: {wanted!r} is no list of keys of {COMMON}, which are {known}")
    return {each: common[each] for each in wanted}


def adjusted(specs: Iterable[ServiceSpec], told: Mapping[str, Mapping[str, Any]]) -> list[ServiceSpec]:
    """The services with the workers and resources that their configuration gives them; raises `UsageError` for invalid ones, and for a
    service without an endpoint."""
    made = []
    for each in specs:
        if not each.endpoints:
            raise UsageError(f"{each.name} has no endpoint: decorate a method with @endpoint()")
        try:
            made.append(each.adjusted(told.get(each.name, {})))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{each.name}: {error}") from error
    return made


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is no text: {error}") from error
    if path.suffix == ".json":
        try:
            read = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}: {error}") from error
    else:
        try:
            import yaml
        except ImportError:
            raise UsageError(f"{path}: YAML needs PyYAML (`pip install pyyaml`); a .json file needs nothing") from None
        try:
            read = yaml.safe_load(text) or {}
        except (yaml.YAMLError, ValueError) as error:
            # A ValueError is an impossible date, for example.
            mark = getattr(error, "problem_mark", None)
            at = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            raise UsageError(f"{path}: {at}{problem}") from error
    if isinstance(read, dict):
        # In YAML, a service whose settings are all commented out has none.
        read = {name: {} if value is None else value for name, value in read.items()}
    if not isinstance(read, dict) or not all(isinstance(value, dict) for value in read.values()):
        raise UsageError(f"{path}: must map names of services to their settings")
    try:
        # The configuration travels as JSON; YAML has values that JSON lacks, such as dates.
        json.dumps(read)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    return read


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def check_names(names: Sequence[tuple[ServiceSpec, str]], taken: Mapping[str, str]) -> None:
    """Raises `UsageError` if two services have the same name, or one has a name in `taken`, which maps names to their owners."""
    found = dict(taken)
    for spec, name in names:
        mine = f"the service {spec.cls.__name__}"
        other = found.setdefault(name, mine)
        if other is not mine:
            raise UsageError(f"{mine} and {other} are both called {name}: give one another name with @service(name=...)")


def plan(
    spec: ServiceSpec, told: Mapping[str, Mapping[str, Any]], target: str, status_port: int | None = None
) -> list[Process]:
    """Returns the processes, dependencies first, each with its devices and cores. Raises `UsageError` if there are too few devices or two
    services share a name. A service that names no `gpu` sees the same devices as this process. Too few cores are shared evenly. The first
    process has the status port `status_port`, the others have the ports after it; with 0 each has any free port. The port that
    `GENSET_WIRE_PORT` names is given out likewise."""
    specs = adjusted(spec.graph(), told)
    check_names([(each, each.name) for each in specs], {})
    devices = _devices()
    all_gpus = f"{','.join(devices)} (all, it names none)" if devices else ""
    wanted = sum(parse_gpus(each.resources.get("gpu", "0")) * each.workers for each in specs)
    if wanted > len(devices):
        raise UsageError(
            f"the services want {wanted} GPUs, and this machine offers {len(devices)}; "
            "lower their resources or workers, or set CUDA_VISIBLE_DEVICES"
        )
    count, wire_port = sum(each.workers for each in specs), os.environ.get(WIRE_VARIABLE, "")
    status_ports = _ports(STATUS_VARIABLE, "--status-port", status_port, count)
    # What is no number, the processes refuse.
    wire_ports = _ports(WIRE_VARIABLE, WIRE_VARIABLE, int(wire_port) if wire_port.isdecimal() else None, count)
    available = _cores()
    cores = itertools.cycle(available)
    processes = []
    for each in specs:
        gpus = parse_gpus(each.resources.get("gpu", "0"))
        cpu = each.resources.get("cpu")
        bound = 0 if cpu is None else min(max(1, math.ceil(parse_cpu(cpu))), len(available))
        for worker in range(each.workers):
            mine, devices = devices[:gpus], devices[gpus:]
            environment = {
                CONFIG_VARIABLE: json.dumps(told.get(each.name, {})),
                CORES_VARIABLE: ",".join(itertools.islice(cores, bound)),
                **next(status_ports),
                **next(wire_ports),
            }
            shown = all_gpus
            if "gpu" in each.resources:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
                shown = ",".join(mine) or "none"
            title = each.name if each.workers == 1 else f"{each.name}.{worker}"
            processes.append(Process(each, title, environment, shown))
    return processes


def _ports(variable: str, setting: str, first: int | None, count: int) -> Iterator[dict[str, str]]:
    """Returns the ports of `count` processes, as `variable` names them. They differ, since only one process can open each."""
    if first is None:
        return itertools.repeat({}, count)
    last = first + count - 1 if first else 0
    if not 0 <= first <= last <= MAX_PORT:
        raise UsageError(f"{setting} {first}: each of the {count} processes needs one from there on, and the last there is is {MAX_PORT}")
    return ({variable: str(first + place if first else 0)} for place in range(count))


def _cores() -> list[str]:
    """The cores that this process may use; none if the system cannot bind processes."""
    return [str(core) for core in sorted(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []


def _devices() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As in CUDA, -1 hides what follows.
        return list(itertools.takewhile(lambda device: device != "-1", filter(None, map(str.strip, visible.split(",")))))
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    # The lines of its instances (MIG) follow a GPU's own.
    count = sum(line.startswith("GPU") for line in listed.stdout.splitlines())
    return [str(index) for index in range(count)]


class _Output(asyncio.SubprocessProtocol):
    """What a process and its children print, line by line, and when the process itself died."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = b""
        self.lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        """The last lines."""
        self.died = asyncio.Event()
        self.closed = asyncio.Event()
        """Set when no process can write to it any more."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self._begun) > MAX_LINE_BYTES:
            # The rest is the next line.
            self._begun = b""
            self._show(b"(a very long line)")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._begun:
            self._show(self._begun)
        self.closed.set()

    def process_exited(self) -> None:
        self.died.set()

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self.lines.append(text)
        _print(f"[{self._title}] {text}")


class _Readiness:
    """When a process reported that it has started."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._begin, self.end = os.pipe()

    def __enter__(self) -> _Readiness:
        asyncio.get_running_loop().add_reader(self._begin, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._begin)
        os.close(self._begin)
        os.close(self.end)

    def _note(self) -> None:
        os.read(self._begin, 1)
        self.since = time.monotonic()


class Supervisor:
    """Keeps processes alive until it is told to stop, or until one of them dies too often."""

    def __init__(self, target: str, processes: Sequence[Process]) -> None:
        self._target = target
        self._processes = processes
        self._running: dict[str, tuple[Process, asyncio.SubprocessTransport]] = {}
        self._told: set[str] = set()
        """The titles of the processes that were told to drain. Told twice, they stop at once."""
        self._stopping = asyncio.Event()
        self._failed = False

    async def run(self) -> int:
        """Returns the exit code: 0 if it was told to stop, 1 if it gave up on a service."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A process started by `nohup` ignores the end of its terminal.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number.name)
        leash, held = os.pipe()
        try:
            await asyncio.gather(*(self._keep(process, leash) for process in self._processes))
        finally:
            os.close(leash)
            os.close(held)
        return 1 if self._failed else 0

    def _on_signal(self, name: str) -> None:
        # Stop first: the reader of the message may be gone.
        if not self._stopping.is_set():
            self._stop()
            _say(f"{name}: draining all; SIGINT or SIGTERM from now on kills")
        elif name != signal.SIGHUP.name:
            # A terminal that closes sends SIGHUP more than once.
            self._kill(name)

    def _stop(self) -> None:
        self._stopping.set()
        self._drain_unneeded()
        loop = asyncio.get_running_loop()
        # The requests of those that were told first are over by now.
        loop.call_later(GRACE_S, self._drain, self._processes)
        # After its drain a process may still wait for a thread or a child.
        loop.call_later(KILL_S, self._kill, f"not over after {KILL_S:g} s")

    def _drain_unneeded(self) -> None:
        """Drains the processes on which no running one depends: requests in progress may call the others."""
        needed = {other for process, _ in self._running.values() for other in process.spec.dependencies.values()}
        self._drain(process for process, _ in self._running.values() if process.spec.cls not in needed)

    def _drain(self, processes: Iterable[Process]) -> None:
        for title in [process.title for process in processes if process.title in self._running]:
            if title not in self._told:
                self._told.add(title)
                _terminate(self._running[title][1])

    def _kill(self, why: str) -> None:
        for _, running in self._running.values():
            _kill_group(running)
        _say(f"{why}: killing all")

    async def _keep(self, process: Process, leash: int) -> None:
        deaths, pause = 0, FIRST_PAUSE_S
        while not self._stopping.is_set():
            code, lines, started = await self._once(process, leash)
            if self._stopping.is_set():
                return
            if started is not None and time.monotonic() - started > LONG_LIFE_S:
                deaths, pause = 0, FIRST_PAUSE_S
            deaths += 1
            if deaths >= MAX_DEATHS:
                _say(f"{process.title} ended {deaths} times in a row, the last time with {code}; giving up. Its last lines:")
                for line in lines:
                    _say(f"  {line}")
                self._failed = True
                self._stop()
                return
            _say(f"{process.title} ended with {code}; starting it again in {pause:g} s")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause *= 2

    async def _once(self, process: Process, leash: int) -> tuple[int, collections.deque[str], float | None]:
        """Runs a process to its end. Returns its exit code, its last lines, and when it had started, if it had."""
        with _Readiness() as ready:
            code, lines = await self._run(process, leash, ready)
            return code, lines, ready.since

    async def _run(self, process: Process, leash: int, ready: _Readiness) -> tuple[int, collections.deque[str]]:
        running, output = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Output(process.title),
            sys.executable,
            "-u",
            "-m",
            "genset._service",
            self._target,
            process.spec.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **process.environment, LEASH_VARIABLE: str(leash), READY_VARIABLE: str(ready.end)},
            pass_fds=[leash, ready.end],
            # This process passes Ctrl-C on itself. And it can kill what a service leaves behind as a group.
            start_new_session=True,
        )
        self._running[process.title] = process, running
        if self._stopping.is_set():
            self._drain_unneeded()
        await output.died.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(output.closed.wait(), LAST_WORDS_S)
        _kill_group(running)
        running.close()
        del self._running[process.title]
        if self._stopping.is_set():
            self._drain_unneeded()
        code = running.get_returncode()
        assert code is not None
        return code, output.lines


def _terminate(running: asyncio.SubprocessTransport) -> None:
    """Terminates a process, unless it is dead."""
    if running.get_returncode() is None:
        running.terminate()


def _kill_group(running: asyncio.SubprocessTransport) -> None:
    """Kills a process, dead or not, and its group. Group members outlive it, and may hold devices."""
    # The group may be empty, or run as another user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(running.get_pid(), signal.SIGKILL)


def _say(text: str) -> None:
    _print(f"[serve] {text}")


def _print(text: str) -> None:
    # The terminal may be closed, or the reader may be gone. Services are kept and drained all the same.
    with contextlib.suppress(OSError):
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 if the services cannot be served."""
    parser = argparse.ArgumentParser(prog="genset serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", metavar="MODULE:CLASS")
    parser.add_argument("-f", "--file", metavar="FILE", help="YAML or JSON: names of services to their settings")
    parser.add_argument(
        "--status-port",
        metavar="PORT",
        type=int,
        default=os.environ.get(STATUS_VARIABLE) or None,
        help="of the first process, for probes and metrics; the others get those after it, and 0 stands for any free ones\n"
        "(default: GENSET_STATUS_PORT; none without it)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be started, and end")
    parsed, settings = parser.parse_known_args(arguments)
    try:
        spec = load(parsed.target)
        told = configuration(parsed.file, settings, [each.name for each in spec.graph()])
        processes = plan(spec, told, parsed.target, parsed.status_port)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for process in processes:
        cores = process.environment[CORES_VARIABLE]
        at = f"{process.spec.namespace}.{process.spec.name}.{{{','.join(process.spec.endpoints)}}}"
        port, wire_port = (process.environment.get(variable) for variable in (STATUS_VARIABLE, WIRE_VARIABLE))
        shown = {"GPUs": process.gpus, "cores": cores, "status port": port, "wire port": wire_port}
        _say(", ".join([f"{process.title}: {at}", *(f"{what} {value}" for what, value in shown.items() if value)]))
    if parsed.dry_run:
        return 0
    return asyncio.run(Supervisor(parsed.target, processes).run())


if __name__ == "__main__":
    sys.exit(main())
