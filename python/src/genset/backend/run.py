"""`run`: the main function of a backend whose engine and worker are separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from genset import _logging
from genset._channel import ORPHAN_GRACE_S
from genset._checks import LIMITS
from genset._child import Child
from genset._model_files import is_only_a_name
from genset._slips import made
from genset.engine import LLMEngine, WorkerConfig

FD_VARIABLE = "GENSET_ENGINE_FD"
"""The file descriptor of the socket, in a process that a worker started."""
LEASH_VARIABLE = "GENSET_ENGINE_LEASH_FD"
"""The file descriptor of a socket that closes when the worker ends, in a process that a worker started."""
NAME_ONLY_VARIABLE = "GENSET_ENGINE_NAME_ONLY"
"""Set if `run` started the worker for a model that is only a name, without files."""
BINARY_VARIABLE = "GENSET_BIN"
"""The `genset` binary, if it is not in PATH."""


def run(engine_class: type[LLMEngine], argv: list[str] | None = None) -> None:
    """Serves the engine.

    If a worker started the process, it serves the engine over the inherited socket. If a person started it, it becomes the worker: it
    replaces itself with `genset`, which starts the same command again for the engine. Signals, exit code and logs are then
    those of one program.
    """
    if FD_VARIABLE in os.environ:
        fd = int(os.environ.pop(FD_VARIABLE))
        watch_leash()
        _logging.configure()
        asyncio.run(_serve(engine_class, argv, fd))
        return
    _, config = asyncio.run(made(engine_class, argv))
    command = worker_command(config, engine_command(argv))
    if is_name_only(config):
        os.environ[NAME_ONLY_VARIABLE] = "1"
    os.execv(command[0], command)


def watch_leash(variable: str = LEASH_VARIABLE, at_end: str = "", grace_s: float = ORPHAN_GRACE_S * 2) -> None:
    """Starts a process that kills this one's group if the worker is gone and this process did not end by itself.

    The process that started this one holds the other end of what `variable` names. When that end closes, the command `at_end` runs, and the
    group is killed `grace_s` later, which is longer than the engine's own time to clean up.

    The package's reader thread does that too, but no Python thread runs while a C extension holds the GIL.
    """
    leash = os.environ.pop(variable, None)
    if leash is None or os.getpgrp() != os.getpid():
        return
    fd = int(leash)
    script = f"read -r _; {at_end or ':'}; sleep {grace_s:g}; kill -s KILL -- -{os.getpgrp()}"
    with contextlib.suppress(OSError):  # Without a shell, only the thread does it.
        subprocess.Popen(["/bin/sh", "-c", script], stdin=fd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(fd)


async def _serve(engine_class: type[LLMEngine], argv: list[str] | None, fd: int) -> None:
    sock = socket.socket(fileno=fd)
    # Processes that the engine starts must not hold the socket open.
    sock.set_inheritable(False)
    has_files = os.environ.pop(NAME_ONLY_VARIABLE, None) is None
    engine, config = await made(engine_class, argv)
    path = config.model_path or config.model_name
    await Child(engine, sock, path, config.migration_limit, has_files=has_files).serve()


def engine_command(argv: list[str] | None = None) -> list[str]:
    """The command that starts this program again, as the engine."""
    arguments = sys.argv[1:] if argv is None else argv
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    # The spec of a folder or an archive with a `__main__.py` has no module's name.
    if spec is not None and spec.name not in ("", "__main__"):
        module = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", module, *arguments]
    return [sys.executable, str(Path(sys.argv[0]).resolve()), *arguments]


def worker_command(config: WorkerConfig, engine: list[str]) -> list[str]:
    """The command of a worker that serves `engine`, a command itself, as `config` says."""
    endpoint = f"{config.namespace}.{config.component}.{config.endpoint}"
    command = [find_binary(), "run", f"in=dyn://{endpoint}", f"out=cmd:{shlex.join(engine)}"]
    model = _model(config)
    if model is not None:
        command.append(model)
    options = {
        "--model-name": config.served_model_name or config.model_name or None,
        "--role": None if config.role == "aggregated" else config.role,
        "--discovery-backend": config.discovery_backend,
        "--request-plane": config.request_plane,
        "--endpoint-types": config.endpoint_types,
        "--chat-template": config.custom_jinja_template,
        **{f"--{name.replace('_', '-')}": getattr(config, name) for name in LIMITS},
        "--engine-restarts": config.engine_restarts or None,
        "--context-length": config.context_length,
        "--migration-limit": config.migration_limit,
        "--tool-parser": config.tool_call_parser,
        "--reasoning-parser": config.reasoning_parser,
        "--user-data": None if config.user_data is None else json.dumps(dict(config.user_data)),
    }
    for flag, value in options.items():
        if value is not None:
            command += [flag, str(value)]
    return [*command, *config.extra_args]


def _model(config: WorkerConfig) -> str | None:
    """The path of the model's files for the worker. A `model_name` that is a word, and no path here, is only a name."""
    if config.model_path:
        return config.model_path
    return None if is_only_a_name(config.model_name) else config.model_name


def is_name_only(config: WorkerConfig) -> bool:
    """Whether the worker gets a name and no files. Its environment, a config file or `extra_args` may name files too."""
    if not config.model_name or _model(config) is not None:
        return False
    is_set = any(name in os.environ for name in ("GENSET_MODEL_PATH", "GENSET_CONFIG"))
    return not is_set and not any(word.startswith(("--model-path", "--config")) for word in config.extra_args)


def find_binary() -> str:
    """The `genset` binary: from `GENSET_BIN`, else the one installed with this package, else the one in PATH."""
    found = located_binary(os.environ)
    if found is None:
        raise SystemExit(missing_binary(os.environ.get(BINARY_VARIABLE)))
    return found


def located_binary(environment: Mapping[str, str]) -> str | None:
    """The binary of `find_binary` in an environment; None if there is none."""
    installed = Path(sysconfig.get_path("scripts")) / "genset"
    name = environment.get(BINARY_VARIABLE) or (str(installed) if installed.is_file() else "genset")
    return shutil.which(name, path=environment.get("PATH"))


def missing_binary(named: str | None) -> str:
    """The advice for when there is no binary of this name, or none in PATH."""
    where = f"{BINARY_VARIABLE}={named} is no program" if named else "there is no `genset` in PATH"
    return f"{where}. Build it with `cargo build --release -p genset` and put it into PATH, or name it in {BINARY_VARIABLE}."
