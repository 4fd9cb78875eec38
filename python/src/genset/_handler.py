"""Runs a handler: any callable that takes a request, and optionally its context, and returns one value or many."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from genset._bridge import Bridge
from genset._frames import pack
from genset._places import Places
from genset._stream import Stream, Turns, as_engine_error, awaited_cancelled, is_left
from genset._values import decode, encode
from genset.engine import Context
from genset.exceptions import EngineError, InvalidArgument

if TYPE_CHECKING:
    from genset._native import Call

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""How long a stopped request may take to end by itself. After that it is cancelled at its `await`."""

PROBE_HEADER = "genset-probe"
"""Marks the worker's own requests, its canaries."""

Handler = Callable[..., Any]


class Encoder(Protocol):
    """Writes one answer."""

    is_finished: bool
    """Whether no item may follow."""

    def plain(self, value: Any) -> bytes | None:
        """The value's only item, if the value needs no more than one; else None."""

    def items(self, value: Any) -> list[bytes]:
        """The items of a value for which `plain` returned None."""

    def finish(self) -> list[bytes]:
        """The items after all values."""


class Codec(Protocol):
    """Decodes an endpoint's requests and encodes its answers."""

    def request(self, payload: bytes) -> tuple[Any, Encoder]:
        """Returns the request as its handler sees it, and the encoder of its answer."""


class Plain:
    """Plain data, unchanged."""

    def __init__(self, endpoint: str) -> None:
        self._what = f"an answer of {endpoint}"
        self.is_finished = False

    def request(self, payload: bytes) -> tuple[Any, Encoder]:
        return decode(payload), self

    def plain(self, value: Any) -> bytes | None:
        return encode(value, self._what)

    def items(self, value: Any) -> list[bytes]:
        raise AssertionError("plain writes every value")

    def finish(self) -> list[bytes]:
        return []


class Checked:
    """Another codec whose requests are converted to the type that a handler names."""

    def __init__(self, codec: Codec, check: Callable[[Any], Any], is_of_bodies: bool) -> None:
        self._codec = codec
        self._check = check
        self._is_of_bodies = is_of_bodies

    def request(self, payload: bytes) -> tuple[Any, Encoder]:
        value, encoder = self._codec.request(payload)
        try:
            return self._check(value), encoder
        except InvalidArgument as error:
            if not self._is_of_bodies:
                raise
            return Misfit(error), encoder


class Misfit:
    """A body that does not fit the type that a handler names."""

    def __init__(self, error: InvalidArgument) -> None:
        self.error = error


def checked(codec: Codec, check: Callable[[Any], Any] | None, is_of_bodies: bool = False) -> Codec:
    """Returns the codec, with its requests checked if there is a check."""
    return codec if check is None else Checked(codec, check, is_of_bodies)


def called_with_both(handler: Handler, endpoint: str) -> Callable[[Any, Context], Any]:
    """Returns a function of a request and its context that gives a handler what it takes of them. Raises TypeError if it can be called with
    neither one nor both."""
    if not callable(handler):
        raise TypeError(
            f"the handler of {endpoint} is a {type(handler).__name__}, which cannot be called: give a function, not its result"
        )
    try:
        parameters = inspect.signature(handler).parameters.values()
    except ValueError:  # A C callable with an unknown signature.
        return lambda request, context: handler(request)
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    has_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    needed = [each for each in positional if each.default is each.empty]
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    # A second argument without a default is the context already.
    needed_by_name = [each for each in by_name if each.default is each.empty and (each.name != "context" or len(needed) > 1)]
    if len(needed) > 2 or needed_by_name or not (positional or has_any):
        raise TypeError(
            f"the handler of {endpoint} takes {len(needed + needed_by_name)} arguments: "
            "it is given the request, and as a second argument, where there is one, its context"
        )
    if len(needed) == 2 or any(each.name == "context" for each in positional[1:2]):
        return handler
    if any(each.name == "context" for each in by_name):
        return lambda request, context: handler(request, context=context)
    return lambda request, context: handler(request)


class Answering:
    """The answers of one endpoint."""

    def __init__(
        self,
        bridge: Bridge,
        endpoint: str,
        handler: Handler,
        codec: Codec,
        on_stop: Callable[[Context], None] | None = None,
        places: Places | None = None,
    ) -> None:
        """Without `places` the handler is given every request at once."""
        self._bridge = bridge
        self._endpoint = endpoint
        self._handle = called_with_both(handler, endpoint)
        self._on_stop = on_stop
        self._codec = codec
        self._places = places
        self._turns = Turns(bridge.loop)
        self._answers: set[Answer] = set()
        """The answers in progress."""
        self._idle = asyncio.Event()
        self._idle.set()

    def on_call(self, call: Call) -> None:
        """Starts the answer to a request."""
        traceparent, tracestate = call.trace
        head = {
            "endpoint": self._endpoint,
            "id": call.request_id,
            "headers": call.headers,
            "traceparent": traceparent,
            "tracestate": tracestate,
            "deadline_ms": call.deadline_ms,
            "credit": call.credit,
        }
        answer = Answer(self._bridge, call, Stream(call.id, head), self._turns, self._on_stop)
        self._bridge.calls[call.id] = answer
        task = self._bridge.loop.create_task(self._answer(answer))
        answer.task = task
        self._answers.add(answer)
        self._idle.clear()
        task.add_done_callback(lambda done: self._forget(done, answer))

    async def idle(self, grace_s: float) -> bool:
        """Waits until no request is in progress; after `grace_s` cancels the rest. Returns whether all ended by themselves."""
        if self._idle.is_set():
            # Also counts with a grace of 0.
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:
            self.cancel()
            await self._idle.wait()
            return False
        return True

    def cancel(self) -> None:
        """Cancels the requests in progress. Those that still run after `CANCEL_GRACE_S` are abandoned."""
        for answer in list(self._answers):
            answer.cancel()
        if self._answers:
            self._bridge.loop.call_later(CANCEL_GRACE_S, self._leave)

    def _leave(self) -> None:
        """Ends the answers that are still in progress, and stops counting them."""
        if self._answers:
            logger.warning("%s: %d requests go on though they were cancelled, and are left", self._endpoint, len(self._answers))
        for answer in self._answers:
            answer.stream.stop("shutdown")
            answer.cut()
            answer.forget()
        self._answers.clear()
        self._idle.set()

    def _forget(self, task: asyncio.Task[None], answer: Answer) -> None:
        if task.cancelled():
            # Cancelled before its first step, so its body never ran and has not ended the answer.
            answer.cut()
            answer.forget()
        self._answers.discard(answer)
        if self._places is not None:
            self._places.given_before += answer.stream.sent
        if not self._answers:
            self._idle.set()

    async def _answer(self, answer: Answer) -> None:
        try:
            request, encoder = self._codec.request(answer.call.request)
            if isinstance(request, Misfit):
                if not answer.is_probe:
                    raise request.error
                # The canary cannot know what a handler's type needs. It came this far, which is answer enough.
                await answer.write("", encoder)
            else:
                if self._places is not None:
                    await self._places.take(answer, self._answers)
                if answer.stream.is_stopped:
                    # Its client left while it waited for its turn. A busy handler must not compute for nobody.
                    answer.cut()
                    return
                await answer.write(self._handle(request, answer.stream.context), encoder)
        except asyncio.CancelledError:
            if answer.is_cancelled or answer.stream.is_cut():
                answer.cut()
            else:
                answer.end(awaited_cancelled(answer.stream, "the handler"))
        except BaseException as error:
            if is_left(error, self._bridge.loop):
                raise
            answer.end(as_engine_error(error))
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            answer.end(None)
        finally:
            answer.forget()


class Answer:
    """One answer in progress."""

    def __init__(
        self, bridge: Bridge, call: Call, stream: Stream, turns: Turns, on_stop: Callable[[Context], None] | None = None
    ) -> None:
        self._bridge = bridge
        self._turns = turns
        self._on_stop = on_stop
        self.call = call
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        """Whether the answer itself was cancelled, not just something that its handler awaits."""
        self.is_probe = PROBE_HEADER in stream.context.headers
        left_ms = stream.context.deadline_ms
        self.deadline_s = math.inf if left_ms is None else bridge.loop.time() + left_ms / 1000
        """In the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        stream.context.native = call

    def grant(self, items: int) -> None:
        """The reader has room for more items."""
        self.stream.grant(items)

    def stop(self, reason: str) -> None:
        """Stops the request: the handler's context shows it, and the handler is cancelled if it does not end within `CANCEL_GRACE_S`."""
        is_first = not self.stream.is_stopped
        self.stream.stop(reason)
        if is_first:
            logger.debug("request %s was stopped: %s", self.stream.context.id(), reason)
            if self._on_stop is not None:
                self._on_stop(self.stream.context)
        if self.task is not None and self._timer is None:
            self._timer = self._bridge.loop.call_later(CANCEL_GRACE_S, self.cancel)

    def cancel(self) -> None:
        """Cancels the handler at its `await`."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def end(self, error: EngineError | None) -> None:
        """Ends the answer, after the items written so far."""
        self._bridge.flush()
        # Its reader releases it now. A handler that still cleans up must not see that as a stop.
        self._bridge.calls.pop(self.stream.id, None)
        if error is None:
            self.call.end()
        else:
            self.call.fail(pack(error.to_wire()))

    def cut(self) -> None:
        """Ends the answer of a request that was cancelled."""
        self.end(EngineError.of_reason(self.stream.context.stop_reason() or "shutdown"))

    def forget(self) -> None:
        """Removes it from the bridge, so that no more events reach it, and stops its timer."""
        self._bridge.calls.pop(self.stream.id, None)
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, result: Any, encoder: Encoder) -> None:
        """Writes a handler's result: one value, or those of a generator or an async iterator."""
        # A client's stream is both: awaited, it gives its only item, and fails if there are more.
        if inspect.isawaitable(result) and not hasattr(result, "__aiter__"):
            result = await result
        if hasattr(result, "__aiter__"):
            await self._write_all(result, encoder)
        elif isinstance(result, types.GeneratorType):
            await self._write_all(_each(result), encoder)
        elif result is not None:
            await self._write_one(result, encoder)
        # A stopped answer may end without a last item.
        if not (encoder.is_finished or self.stream.is_stopped):
            await self._write_items(encoder.finish())

    async def _write_all(self, values: AsyncIterator[Any], encoder: Encoder) -> None:
        stream, call, write, turns = self.stream, self.call, self._bridge.write, self._turns
        turn = turns.mark()
        try:
            async for value in values:
                # Usually there is credit, and no need to wait for it.
                plain = encoder.plain(value)
                if plain is not None and stream.take_credit_now():
                    write(call, plain)
                elif not await self._write_items([plain] if plain is not None else encoder.items(value)):
                    return
                elif encoder.is_finished:
                    self.end(None)
                    return
                if turn == turns.count:
                    # The handler awaited nothing. Yield to the loop: it sends the output and runs other tasks.
                    await asyncio.sleep(0)
                turn = turns.mark()
        finally:
            close = getattr(values, "aclose", None)
            if close is not None:
                await close()

    async def _write_one(self, value: Any, encoder: Encoder) -> None:
        plain = encoder.plain(value)
        await self._write_items([plain] if plain is not None else encoder.items(value))

    async def _write_items(self, items: list[bytes]) -> bool:
        for item in items:
            if not await self.stream.take_credit():
                return False
            self._bridge.write(self.call, item)
        return True


async def _each(values: Iterator[Any]) -> AsyncIterator[Any]:
    """Iterates a synchronous generator asynchronously."""
    for value in values:
        yield value
