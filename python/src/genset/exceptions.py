"""Errors that reach the client: one class for each kind of `docs/wire-protocol.md`. The kind decides the HTTP status, whether
a client may retry, and whether the request may migrate. Any other exception is reported as `internal`."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar


class EngineError(Exception):
    """An error with a kind. Raise a subclass.

    `message` is for the client: it says what is wrong and what to do. `field` names the request field at fault, by our
    name for it; a message of `InvalidArgument` or `Unsupported` then follows that name ("must be at least 1").
    `retry_after` is in seconds.
    """

    kind: ClassVar[str] = "internal"
    # For subclasses whose `__init__` does not call this one.
    message: str = ""
    field: str | None = None
    retry_after: float | None = None

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after

    @staticmethod
    def of_reason(reason: str) -> EngineError:
        """The error of a request that was stopped for `reason`, as `Context.stop_reason` names it."""
        if reason == "deadline":
            return DeadlineExceeded("the request's deadline passed before it finished")
        if reason == "shutdown":
            return EngineShutdown("the server is shutting down and cut the request short; send it again")
        if reason == "engine_dead":
            return Disconnected("the engine died while it served the request; send it again")
        return Cancelled("the request was cancelled")

    def __str__(self) -> str:
        message = str(self._said())
        has_name = self.field is None or re.match(rf"{re.escape(str(self.field))}(?!\w)", message)
        return message if has_name else f"{self.field}: {message}"

    def to_wire(self) -> dict[str, Any]:
        """The payload of an `Error` frame. It can be packed and read, whatever the error was made of."""
        details: dict[str, Any] = {}
        if self.field is not None:
            details["field"] = _text(self.field)
        after = _seconds(self.retry_after)
        if after is not None:
            secs = int(after)
            details["retry_after"] = {"secs": secs, "nanos": int((after - secs) * 1e9)}
        return {"kind": self.kind, "message": _text(self._said()), "details": details}

    def _said(self) -> object:
        return self.args[0] if self.args and type(self.message) is str and not self.message else self.message


_MOST_CHARS = 8192
"""A longer text is cut, since one frame has to hold it: an exception may contain a whole tensor."""


def text_of(value: object) -> str:
    """The value as text, at most `_MOST_CHARS`, also if its `__str__` fails."""
    try:
        text = str(value)
    except Exception:
        return "<its text is not available>"
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _text(value: object) -> str:
    """Makes a text valid UTF-8: lone surrogates, as at the end of cut texts, are escaped."""
    return text_of(value).encode("utf-8", "backslashreplace").decode()


def _seconds(value: Any) -> float | None:
    """A time to wait, at least 0; None if the value is not a time."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    # The most seconds that fit the other side's 64 bits.
    return max(seconds, 0.0) if math.isfinite(seconds) and seconds < 2.0**63 else None


class InvalidArgument(EngineError):
    """A value in the request is malformed or out of its range."""

    kind = "invalid_argument"


class ContextLengthExceeded(EngineError):
    """Prompt and output together do not fit the model's context."""

    kind = "context_length_exceeded"


class Unsupported(EngineError):
    """The request asks for an ability that the engine does not declare."""

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
    """Something the engine needs could not be reached; the request has not begun."""

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
    """A fault of the engine."""

    kind = "internal"


_KINDS: dict[str, type[EngineError]] = {kind.kind: kind for kind in EngineError.__subclasses__()}


def from_wire(payload: dict[str, Any]) -> EngineError:
    """The error in the payload of an `Error` frame. An unknown kind becomes `Internal`."""
    details = payload.get("details") or {}
    field = details.get("field") or details.get("setting") or details.get("other")
    retry = details.get("retry_after")
    kind = _KINDS.get(payload.get("kind", ""), Internal)
    after = None if retry is None else retry["secs"] + retry["nanos"] / 1e9
    return kind(payload.get("message", ""), field=field, retry_after=after)
