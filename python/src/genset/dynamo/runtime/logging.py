"""The names of `dynamo.runtime.logging`."""

from __future__ import annotations

from typing import Any

from genset import _logging

__all__ = ["configure_dynamo_logging"]


def configure_dynamo_logging(*_: Any, **__: Any) -> None:
    """Sets up Python's log where the program has none; its arguments have no effect. `dynamo_worker` and `run` do so by themselves."""
    _logging.configure_program()
