"""Errors that reach the client: one class for each kind of `docs/wire-protocol.md`. The kind decides the HTTP status, whether
a client may retry, and whether the request may go on elsewhere. Any other exception is reported as `internal`."""

from __future__ import annotations

from typing import Any, ClassVar


class EngineError(Exception):
    """An error with a kind. Raise a subclass.

    `message` is for the client: it says what is wrong and what to do. `field` names the request field at fault;
    `retry_after` is in seconds.
    """

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after

    def to_wire(self) -> dict[str, Any]:
        """The payload of an `Error` frame."""
        details: dict[str, Any] = {}
        if self.field is not None:
            details["field"] = self.field
        if self.retry_after is not None:
            secs = int(self.retry_after)
            details["retry_after"] = {"secs": secs, "nanos": int((self.retry_after - secs) * 1e9)}
        return {"kind": self.kind, "message": self.message, "details": details}


class InvalidArgument(EngineError):
    """A value in the request is malformed or out of its range."""

    kind = "invalid_argument"


class ContextLengthExceeded(EngineError):
    """Prompt and output together do not fit the model's context."""

    kind = "context_length_exceeded"


class Unsupported(EngineError):
    """The request asks for an ability the engine does not declare."""

    kind = "unsupported"


class NotFound(EngineError):
    """The model, adapter or endpoint does not exist."""

    kind = "not_found"


class Overloaded(EngineError):
    """A limit on running or queued requests is reached."""

    kind = "overloaded"


class Unavailable(EngineError):
    """The request cannot be served now."""

    kind = "unavailable"


class EngineShutdown(EngineError):
    """The engine is not started, is draining, or has stopped."""

    kind = "engine_shutdown"


class CannotConnect(EngineError):
    """Something the engine needs could not be reached; the request was not begun."""

    kind = "cannot_connect"


class Disconnected(EngineError):
    """Something the engine needs was lost while it worked."""

    kind = "disconnected"


class StreamIncomplete(EngineError):
    """An answer ended without saying how it finished."""

    kind = "stream_incomplete"


class DeadlineExceeded(EngineError):
    """The request's deadline passed."""

    kind = "deadline_exceeded"


class Cancelled(EngineError):
    """The client cancelled or left."""

    kind = "cancelled"


class Internal(EngineError):
    """A fault of the engine's."""

    kind = "internal"
