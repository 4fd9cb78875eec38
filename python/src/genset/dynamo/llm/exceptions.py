"""The names of `dynamo.llm.exceptions`."""

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
from genset.exceptions import EngineError as DynamoException
from genset.exceptions import Internal as Unknown

__all__ = [
    "Cancelled",
    "CannotConnect",
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
