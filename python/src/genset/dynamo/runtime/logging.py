"""The names of `dynamo.runtime.logging`."""

from __future__ import annotations

from typing import Any

from genset import _logging
from genset.dynamo import absent

__all__ = ["configure_dynamo_logging"]


def configure_dynamo_logging(*_: Any, **__: Any) -> None:
    """Sets up Python's log unless the program has done so; ignores its arguments. `dynamo_worker` and `run` set it up by themselves."""
    _logging.configure_program()


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, {})
