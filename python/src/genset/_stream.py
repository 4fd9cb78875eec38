"""One request of the worker, and the credit it grants."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Callable
from typing import Any, cast

from genset._frames import pack
from genset.engine import Context
from genset.exceptions import EngineError, Internal, text_of

logger = logging.getLogger(__name__)


class Stream:
    """A stream that the worker opened. The event loop grants credit and stops it; the sender counts the items sent."""

    def __init__(self, stream_id: int, head: dict[str, Any]) -> None:
        self.prefix = b"\x92" + pack(stream_id)
        """The prefix of a batch's pair. An item follows, or nil for the end."""
        self.id = stream_id
        self.is_generate: bool = head["endpoint"] == "generate"
        self.granted: int = head.get("credit", 0)
        self.sent = 0
        self.is_stopped = False
        self.context = Context(
            head.get("id", ""),
            headers=head.get("headers"),
            traceparent=head.get("traceparent", ""),
            tracestate=head.get("tracestate", ""),
            deadline_ms=head.get("deadline_ms"),
        )
        self.task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self.wake: Callable[[], None] = self._more.set
        """Notifies the sender of more credit, or of the stop."""

    def grant(self, items: int) -> None:
        """The worker has room for more items."""
        self.granted += items
        self.wake()

    def stop(self, reason: str) -> None:
        """The worker wants no more items."""
        self.is_stopped = True
        self.context.stop(reason)
        self.wake()

    def is_cut(self) -> bool:
        """Whether a `CancelledError` in the answering task concerns the request itself, and not just something that it awaited."""
        # The count of cancellations does not exist before Python 3.11.
        return self.is_stopped or getattr(asyncio.current_task(), "cancelling", int)() > 0

    def take_credit_now(self) -> bool:
        """Takes the credit for one item, if there is any, and returns whether it did."""
        if self.sent >= self.granted or self.is_stopped:
            return False
        self.sent += 1
        return True

    async def take_credit(self) -> bool:
        """Waits for the credit for one item; False if no more items are wanted."""
        while not self.take_credit_now():
            if self.is_stopped:
                return False
            self._more.clear()
            await self._more.wait()
        return True


class Turns:
    """Counts turns of the event loop. A generator that awaits nothing must give the loop a turn after each output; others need not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_due = False
        self.count = 0
        """Differs from the result of `mark` once the event loop has had a turn since."""

    def mark(self) -> int:
        """Returns the current count, and counts the next turn."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._on_turn)
        return self.count

    def _on_turn(self) -> None:
        self._is_due = False
        self.count += 1


def check_size(item: bytes, limit: int) -> None:
    """Raises `Internal` for an item that fits in no frame: the worker would end the process that sends it."""
    if len(item) > limit:
        raise Internal(f"an item of {len(item)} bytes is too large: the worker takes {limit} at once")


def awaited_cancelled(stream: Stream, what: str) -> Internal:
    """The error of a request whose engine or handler, `what`, awaited something that was cancelled. Call it where that is handled."""
    problem = f"{what} awaited something that was cancelled"
    logger.warning("request %s failed: %s", stream.context.id(), problem, exc_info=True)
    return Internal(problem)


def is_left(error: BaseException, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the error closes a task whose event loop is gone. A `GeneratorExit` may also be what an engine or a handler raised."""
    return isinstance(error, GeneratorExit) and not loop.is_running()


def as_engine_error(error: BaseException) -> EngineError:
    """The error that a request ends with. Call it where `error` is handled: it logs errors that are not of genset."""
    first = _first(error)
    if isinstance(first, EngineError):
        return first
    logger.warning("a request failed with an exception that is no genset error", exc_info=True)
    return Internal(f"{type(error).__name__}: {text_of(error)}")


_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Does not exist before Python 3.11."""


def _first(error: BaseException) -> BaseException:
    """The first of a group of genset errors, such as `asyncio.TaskGroup` raises; any other error itself."""
    if not isinstance(error, _GROUP):
        return error
    inner = [_first(each) for each in cast(Any, error).exceptions]
    return inner[0] if all(isinstance(each, EngineError) for each in inner) else error
