"""The names of `dynamo.llm.exceptions`."""

from __future__ import annotations

from typing import Any

from genset.dynamo import absent
from genset.exceptions import (
    Cancelled,
    CannotConnect,
    ContextLengthExceeded,
    DeadlineExceeded,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    NotFound,
    Overloaded,
    StreamIncomplete,
    Unavailable,
    Unsupported,
)
from genset.exceptions import CannotConnect as ConnectionTimeout
from genset.exceptions import EngineError as DynamoException
from genset.exceptions import Internal as Unknown

__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "InvalidArgument",
    "NotFound",
    "Overloaded",
    "StreamIncomplete",
    "Unavailable",
    "Unknown",
    "Unsupported",
]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, {})
