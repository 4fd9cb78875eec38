"""Logging: of a program of its own, and of a process whose standard error the worker reads, where each line begins with its level."""

from __future__ import annotations

import logging
import os
import sys

LEVEL_VARIABLE = "GENSET_ENGINE_LOG"


_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


class _OneLevelALine(logging.Formatter):
    """A record of several lines, a traceback say, has its level at the head of each."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "\n".join(f"{record.levelname} {line}" for line in text.splitlines())


def configure_program() -> None:
    """Sends the root logger to standard error, unless the program has set one up."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def configure() -> None:
    """Sends the root logger to standard error at the worker's level, and flushes what is printed line by line."""
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
