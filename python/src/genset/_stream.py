"""One request of the worker's, and the credit it grants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from genset._frames import pack
from genset.engine import Context
from genset.exceptions import EngineError, Internal

logger = logging.getLogger(__name__)


class Stream:
    """A stream that the worker opened. The event loop grants and stops; whoever answers counts what is sent."""

    def __init__(self, stream_id: int, head: dict[str, Any]) -> None:
        self.prefix = b"\x92" + pack(stream_id)
        """Begins a pair of a batch; an item or nil is its end."""
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
        """Tells whoever answers of more credit, or of the stop."""

    def grant(self, items: int) -> None:
        """The worker has room for more items."""
        self.granted += items
        self.wake()

    def stop(self, reason: str) -> None:
        """The worker wants no more."""
        self.is_stopped = True
        self.context.stop(reason)
        self.wake()

    def is_cut(self) -> bool:
        """Whether a `CancelledError` in the task that answers is for the request, and not just for what it awaited."""
        # The task's count of cancellations is absent before Python 3.11.
        return self.is_stopped or getattr(asyncio.current_task(), "cancelling", int)() > 0

    def take_credit_now(self) -> bool:
        """Whether an item may be sent; takes its credit."""
        if self.sent >= self.granted or self.is_stopped:
            return False
        self.sent += 1
        return True

    async def take_credit(self) -> bool:
        """Waits until an item may be sent; False when none is wanted any more."""
        while not self.take_credit_now():
            if self.is_stopped:
                return False
            self._more.clear()
            await self._more.wait()
        return True


class Turns:
    """Turns of the event loop, so that a generator which awaits nothing has one after each of its outputs, and others have none too many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_due = False
        self.count = 0
        """Differs from what `mark` gave once the event loop has had a turn since."""

    def mark(self) -> int:
        """The count as it is now; the next turn is counted."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._on_turn)
        return self.count

    def _on_turn(self) -> None:
        self._is_due = False
        self.count += 1


def awaited_cancelled(stream: Stream, what: str) -> Internal:
    """The error of a request where `what`, the engine or handler, awaited something that was cancelled. To be called where that is handled."""
    problem = f"{what} awaited something that was cancelled"
    logger.warning("request %s failed: %s", stream.context.id(), problem, exc_info=True)
    return Internal(problem)


def as_engine_error(error: BaseException) -> EngineError:
    """The error that a request ends with. To be called where `error` is handled: it logs one that is no genset error."""
    if isinstance(error, EngineError):
        return error
    logger.warning("a request failed with an exception that is no genset error", exc_info=True)
    return Internal(f"{type(error).__name__}: {error}")
