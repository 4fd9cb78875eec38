"""Logging of standalone programs, and of processes whose standard error the worker reads: there each line begins with its level."""

from __future__ import annotations

import logging
import os
import sys

LEVEL_VARIABLE = "GENSET_ENGINE_LOG"
FILTER_VARIABLES = ("GENSET_LOG", "DYN_LOG")
"""The filter of a program's log, in the syntax of `RUST_LOG`. The first one set and not empty counts, as in the native module."""

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_FILTER_LEVELS = {**_LEVELS, "off": logging.CRITICAL + 1, "warn": logging.WARNING, "trace": 1}


class _OneLevelALine(logging.Formatter):
    """Begins each line of a multi-line record, such as a traceback, with its level, and leaves out empty lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "\n".join(f"{record.levelname} {line}" for line in text.splitlines() if line)


def levels_of(text: str) -> dict[str, int]:
    """The levels in a filter: by logger, and by the empty name for all others. Directives about spans concern only the native module."""
    levels = {}
    for directive in text.split(","):
        target, has_target, name = directive.strip().rpartition("=")
        level = _FILTER_LEVELS.get(name.strip().lower())
        if level is not None and "[" not in target and bool(target) == bool(has_target):
            levels[target.strip().replace("::", ".")] = level
    return levels


def configure_program() -> None:
    """Sends the root logger to standard error, unless the program has set one up. Reads levels from `FILTER_VARIABLES`."""
    if logging.getLogger().handlers:
        return
    given = next((os.environ[name] for name in FILTER_VARIABLES if os.environ.get(name)), "")
    levels = levels_of(given)
    logging.basicConfig(level=levels.pop("", logging.INFO), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def configure() -> None:
    """Sends the root logger to standard error at the worker's level, and flushes printed output line by line."""
    level = _LEVELS.get(os.environ.get(LEVEL_VARIABLE, "info").lower(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLevelALine("%(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
