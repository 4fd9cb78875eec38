"""Calls the instances of an endpoint."""

from __future__ import annotations

import asyncio
import json
import operator
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from genset._bridge import Bridge
from genset._forms import NOTHING, AsItIs, Form, Reader, form_of
from genset._values import decode, encode
from genset.engine import Context
from genset.exceptions import EngineError, InvalidArgument

if TYPE_CHECKING:
    from genset._native import Asking, Caller


class ResponseStream(AsyncIterator[Any]):
    """The answer to one request: iterate over its items with `async for`, or `await` it if it has just one.

    The request is sent when this is made, or as soon as an instance is known. `aclose`, or dropping the stream, cancels it at the other end;
    unread items wait there. Errors are those of `genset.exceptions`.
    """

    def __init__(self, bridge: Bridge, number: int) -> None:
        self._bridge = bridge
        self._number = number
        self._asking: Asking | None = None
        self._read: Reader = decode
        self._items: deque[bytes] = deque()
        self._ungranted = 0
        self._is_over = False
        self._is_read = False
        """Whether its end was read, or it was closed."""
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Any:
        while True:
            while not self._items:
                if self._is_over:
                    self._is_read = True
                    error, self._error = self._error, None
                    if error is None:
                        raise StopAsyncIteration
                    try:
                        raise error
                    finally:
                        # The error holds this frame and its caller's. If this frame held the error, all that these hold, such as other
                        # streams, would stay until the next garbage collection.
                        del error
                self._grant()
                await self._wait()
            self._ungranted += 1
            value = self._read(self._items.popleft())
            if value is not NOTHING:
                return value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def aclose(self) -> None:
        """Cancels the request if it is in progress. Nothing can be read after that."""
        self._items.clear()
        self._is_over = self._is_read = True
        self._error = None
        if self._bridge.asked.pop(self._number, None) is not None and self._asking is not None:
            self._asking.cancel()
        self._wake()

    async def _only(self) -> Any:
        if self._is_read:
            # Not None, as if the handler had given nothing.
            raise RuntimeError("this answer was read to its end or closed already: send the request again")
        try:
            first = await self.__anext__()
        except StopAsyncIteration:
            return None
        async for _ in self:
            await self.aclose()
            raise InvalidArgument("the endpoint answers with several items: read them with `async for`, not with `await`")
        return first

    def begin(self, asking: Asking, read: Reader) -> None:
        """The request was sent. `read` decodes its items."""
        self._asking = asking
        self._read = read

    @property
    def is_over(self) -> bool:
        """Whether no item will follow."""
        return self._is_over

    def on_item(self, item: bytes) -> None:
        """Called by the bridge."""
        self._items.append(item)
        self._wake()

    def on_end(self, error: Exception | None) -> None:
        """Called by the bridge."""
        self._is_over = True
        self._error = error
        self._wake()

    def stop(self, reason: str) -> None:
        """Ends the request, and its answer with the error of `reason`."""
        if self._bridge.asked.pop(self._number, None) is not None:
            if self._asking is not None:
                self._asking.cancel()
            self.on_end(EngineError.of_reason(reason))

    async def _wait(self) -> None:
        if self._reader is not None:
            raise RuntimeError("two tasks read one answer: give each a request of its own")
        self._bridge.check_here()
        self._reader = self._bridge.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _grant(self) -> None:
        # Grants the credit of all items read since the last call.
        if self._ungranted and self._asking is not None:
            self._asking.grant(self._ungranted)
            self._ungranted = 0


class Client:
    """A client of one endpoint. It follows the instances for as long as it exists.

    A request is sent to one instance. If that is unreachable, full or shutting down, the request is sent again, usually to another instance
    (except with `direct`), with at most three attempts in all. So is a request whose handler was cut by its process's shutdown before its
    first answer (`EngineShutdown`). A request to a lost instance (`Disconnected`) is not sent again, since it may have begun. If there is
    no instance, a request waits ten seconds for the first.

    If the endpoint serves a model, requests and items are those of its handler: a `genset.GenerateRequest` and
    `genset.GenerateChunk`s, or for `ModelType.Chat` and `ModelType.Completion` the body of a client's request and the API's objects.
    """

    def __init__(self, bridge: Bridge, caller: Caller, endpoint: str, read: Reader = decode) -> None:
        self._bridge = bridge
        self._caller = caller
        self._endpoint = endpoint
        self._read = read
        self._form: Form | None = None
        """Unknown until the first instance is known."""

    def instance_ids(self) -> list[int]:
        """The ids of the live instances, in ascending order."""
        return self._caller.instance_ids()

    def user_data(self) -> dict[int, Any]:
        """The `user_data` that a model's live instances publish, by instance id. Instances that publish none are left out."""
        return {instance: json.loads(data) for instance, data in self._caller.user_data()}

    async def wait_for_instances(self, timeout: float = 60.0) -> list[int]:
        """Waits up to `timeout` seconds for an instance, and returns all ids; raises `Unavailable` if none came."""
        await self._bridge.operation(lambda op: self._caller.wait_for_instances(op, timeout))
        return self.instance_ids()

    def generate(self, request: Any = None, **options: Any) -> ResponseStream:
        """Sends a request to the next instance in turn; same as `round_robin`."""
        return self._ask("round-robin", None, request, **options)

    def round_robin(self, request: Any = None, **options: Any) -> ResponseStream:
        """Sends a request to the next instance in turn.

        Options of this and the other methods: `context`, that of the request on whose behalf it is sent, with whose id, deadline, headers
        and cancellation it travels; `timeout` in seconds; `headers` with lower-case names.
        """
        return self._ask("round-robin", None, request, **options)

    def random(self, request: Any = None, **options: Any) -> ResponseStream:
        """Sends a request to a random instance, each with equal chance."""
        return self._ask("random", None, request, **options)

    def least_loaded(self, request: Any = None, **options: Any) -> ResponseStream:
        """Sends a request to the instance with the fewest requests of this client."""
        return self._ask("least-loaded", None, request, **options)

    def direct(self, request: Any, instance_id: int, **options: Any) -> ResponseStream:
        """Sends a request to one instance; raises `NotFound` if it is not live."""
        return self._ask("", operator.index(instance_id), request, **options)

    def _ask(
        self,
        mode: str,
        instance_id: int | None,
        request: Any,
        /,
        *,
        context: Context | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        annotated: bool | None = False,
        **unknown: Any,
    ) -> ResponseStream:
        """`annotated` is Dynamo's: whether items come in a wrapper, which there is none of."""
        if annotated:
            raise InvalidArgument("an item is what the handler yielded, without a wrapper: leave it out", field="annotated")
        if unknown:
            raise TypeError(
                f"a request takes the options context, timeout and headers, not {', '.join(unknown)}: its data are one value, the first argument"
            )
        self._bridge.check_here()
        number = self._bridge.number()
        payload = encode(request, f"a request to {self._endpoint}")
        parent = None if context is None else context.native
        given = None if headers is None else dict(headers)

        def send(left_s: float | None) -> tuple[Asking, Reader]:
            form = self._known_form() or AsItIs(self._read)
            asking = self._caller.ask(number, form.write(payload), mode, instance_id, parent, left_s, given)
            return asking, form.reader()

        stream = ResponseStream(self._bridge, number)
        self._bridge.asked[number] = stream
        if self._known_form() is not None:
            stream.begin(*send(timeout))
        else:
            # Dropping the stream cancels the request, also before it is sent.
            self._once_found(weakref.ref(stream), send, timeout)
        if context is not None:
            # The native runtime knows of no stop by the program itself.
            context.follow(stream)
        return stream

    def _known_form(self) -> Form | None:
        if self._form is None:
            found = self._caller.model()
            if found is not None:
                self._form = form_of(self._endpoint, *found, self._read)
        return self._form

    def _once_found(
        self,
        asked: weakref.ref[ResponseStream],
        send: Callable[[float | None], tuple[Asking, Reader]],
        timeout: float | None,
    ) -> None:
        """Sends a request when the first instance is known."""
        loop, most_s = self._bridge.loop, self._caller.INSTANCE_S
        limit_s = most_s if timeout is None else min(timeout, most_s)
        begun_s = loop.time()
        waiting = self._bridge.operation(lambda op: self._caller.wait_for_instances(op, limit_s))

        def begin(done: asyncio.Future[int | None]) -> None:
            # Retrieves the exception, so that asyncio does not warn of it.
            error = None if done.cancelled() else done.exception()
            stream = asked()
            if done.cancelled() or stream is None or stream.is_over:
                return
            # If the caller's own timeout was the limit, the request is sent all the same, and ends with that timeout.
            if isinstance(error, Exception) and limit_s == most_s:
                stream.on_end(error)
                return
            left_s = None if timeout is None else max(0.0, timeout - (loop.time() - begun_s))
            try:
                stream.begin(*send(left_s))
            except Exception as problem:
                stream.on_end(problem)

        waiting.add_done_callback(begin)
