"""Turns an engine into a program: `run` uses one process for the engine and one for its worker, `Worker` runs both inside your own
program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genset.backend.run import (
    BINARY_VARIABLE,
    FD_VARIABLE,
    LEASH_VARIABLE,
    engine_command,
    find_binary,
    missing_binary,
    run,
    worker_command,
)

if TYPE_CHECKING:
    from genset.backend.worker import Worker

__all__ = [
    "BINARY_VARIABLE",
    "FD_VARIABLE",
    "LEASH_VARIABLE",
    "Worker",
    "engine_command",
    "find_binary",
    "missing_binary",
    "run",
    "worker_command",
]


def __getattr__(name: str) -> Any:
    # It needs the runtime, which an engine in its own process does not.
    if name == "Worker":
        from genset.backend.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
