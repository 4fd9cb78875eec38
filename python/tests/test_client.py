"""Answers as their callers read them, without the native module."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from genset import Context, _bridge
from genset._bridge import Bridge
from genset._client import Client, ResponseStream
from genset._frames import pack
from genset.exceptions import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable


class FakeBridge:
    """A runtime whose operations fail, because nobody is there."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def check_here(self) -> None:
        pass

    def number(self) -> int:
        return next(self._numbers)

    def operation(self, begin: Callable[[int], None]) -> asyncio.Future[int | None]:
        begin(1)
        future: asyncio.Future[int | None] = self.loop.create_future()
        future.set_exception(Unavailable("nobody is there"))
        return future


class SilentBridge(FakeBridge):
    """A runtime whose operations take for ever."""

    def operation(self, begin: Callable[[int], None]) -> asyncio.Future[int | None]:
        begin(1)
        return self.loop.create_future()


class FakeCaller:
    """A client that knows no instance."""

    INSTANCE_S = 10.0

    def model(self) -> None:
        return None

    def wait_for_instances(self, op: int, timeout_s: float) -> None:
        pass


class FakeAsking:
    """A request at an instance."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def grant(self, items: int) -> None:
        pass


class ReadyCaller:
    """A client of an endpoint that has an instance."""

    def __init__(self) -> None:
        self.asked: list[FakeAsking] = []

    def model(self) -> tuple[None, bool]:
        return None, False

    def ask(self, *_: object) -> FakeAsking:
        self.asked.append(FakeAsking())
        return self.asked[-1]


class Kept:
    """What a caller holds while it reads, such as another stream."""


def test_an_error_does_not_outlive_its_handling_with_what_its_reader_held() -> None:
    held: list[weakref.ref[Kept]] = []

    async def read(stream: ResponseStream) -> None:
        kept = Kept()
        held.append(weakref.ref(kept))
        await stream

    async def main() -> None:
        bridge = cast(Bridge, FakeBridge())
        ended = ResponseStream(bridge, 1)
        ended.on_end(Unavailable("it is gone"))
        for stream in (ended, Client(bridge, cast(Any, FakeCaller()), "a.b.c").generate()):
            failed = False
            try:
                await read(stream)
            except Unavailable:
                failed = True
            assert failed and held.pop()() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_context_that_the_program_made_stops_its_requests() -> None:
    async def main() -> None:
        context, other = Context(), Context()
        client = Client(cast(Bridge, SilentBridge()), cast(Any, FakeCaller()), "a.b.c")
        asking, going_on = (asyncio.ensure_future(client.generate(context=each)._only()) for each in (context, other))
        await asyncio.sleep(0)
        context.stop()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(asking, 30)
        assert not going_on.done()
        going_on.cancel()

    asyncio.run(main())


def test_a_context_tells_of_its_stop_by_dynamo_s_names_too() -> None:
    async def main() -> None:
        context = Context()
        waiting, left = context.async_killed_or_stopped(), context.async_killed_or_stopped()
        left.cancel()
        await asyncio.wait([waiting], timeout=0)
        assert not (waiting.done() or context.is_killed())
        context.stop_generating()
        assert await waiting and await context.async_killed_or_stopped()
        assert context.is_killed() and context.stop_reason() == "client"
        await context.stopped()

    asyncio.run(main())


def test_a_stop_awaited_beside_each_token_keeps_nothing() -> None:
    async def main() -> None:
        context, seen = Context(), asyncio.Event()

        async def watch() -> None:
            await context.stopped()
            seen.set()

        for _ in range(3):
            token: asyncio.Future[Any] = asyncio.ensure_future(asyncio.sleep(0))
            await asyncio.wait([token, context.async_killed_or_stopped()], return_when=asyncio.FIRST_COMPLETED)
            assert not (context._waiting or context._awaited)
        # A task that waits for the stop alone stays: the event loop does not hold it.
        asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        gc.collect()
        context.stop()
        await asyncio.wait_for(seen.wait(), 30)

    asyncio.run(main())


@pytest.mark.parametrize("is_handler_s", [False, True])
def test_a_request_ends_with_the_context_that_it_is_made_for(is_handler_s: bool) -> None:
    async def main() -> None:
        caller = ReadyCaller()
        client = Client(cast(Bridge, FakeBridge()), cast(Any, caller), "a.b.c")
        context = Context("mine")
        context.native = object() if is_handler_s else None
        stream = client.generate({}, context=context)
        closed = client.generate({}, context=context)
        await closed.aclose()
        stream.on_item(pack("first"))
        context.stop("deadline")
        assert [asking.is_cancelled for asking in caller.asked] == [True, True]
        assert await stream.__anext__() == "first"
        with pytest.raises(DeadlineExceeded):
            await stream.__anext__()
        with pytest.raises(StopAsyncIteration):
            await closed.__anext__()
        with pytest.raises(DeadlineExceeded):
            await client.generate({}, context=context)
        assert caller.asked[-1].is_cancelled

    asyncio.run(main())


def test_a_request_that_is_over_leaves_nothing_in_its_context() -> None:
    async def main() -> None:
        bridge = FakeBridge()
        client = Client(cast(Bridge, bridge), cast(Any, ReadyCaller()), "a.b.c")
        context = Context()
        asked = weakref.ref(client.generate({}, context=context))
        # The bridge keeps none.
        bridge.asked.clear()
        assert asked() is None
        assert not (context._waiting or context._awaited or context._followers)

    asyncio.run(main())


def test_items_have_no_wrapper_to_ask_for() -> None:
    async def main() -> None:
        client = Client(cast(Bridge, FakeBridge()), cast(Any, ReadyCaller()), "a.b.c")
        stream = client.random({}, annotated=False)
        stream.on_item(pack("first"))
        assert await stream.__anext__() == "first"
        with pytest.raises(InvalidArgument, match="annotated: .* leave it out"):
            client.random({}, annotated=True)

    asyncio.run(main())


def test_a_request_on_the_loop_of_another_runtime_is_refused() -> None:
    async def main() -> tuple[Client, ResponseStream]:
        bridge = Bridge.__new__(Bridge)
        bridge.loop, bridge._pid, bridge._is_open = asyncio.get_running_loop(), _bridge._pid, True
        bridge._numbers, bridge.asked = itertools.count(1), weakref.WeakValueDictionary()
        bridge.check_here()
        client = Client(bridge, cast(Any, ReadyCaller()), "a.b.c")
        return client, client.generate()

    async def ask(client: Client, stream: ResponseStream) -> None:
        for use in (client.generate, client.wait_for_instances, stream.__anext__):
            with pytest.raises(RuntimeError, match="this runtime belongs to another event loop: connect one on this loop"):
                await use()

    asyncio.run(ask(*asyncio.run(main())))


def test_an_answer_is_awaited_once() -> None:
    async def main() -> None:
        bridge = cast(Bridge, FakeBridge())
        failed, given, closed, empty = (ResponseStream(bridge, number) for number in range(4))
        given.on_item(pack("only"))
        await closed.aclose()
        for stream in (failed, given, empty):
            stream.on_end(Unavailable("it is gone") if stream is failed else None)
        with pytest.raises(Unavailable):
            await failed
        assert await given == "only"
        assert await empty is None
        for stream in (failed, given, closed, empty):
            with pytest.raises(RuntimeError, match="was read to its end or closed already: send the request again"):
                await stream

    asyncio.run(main())


def test_a_request_to_one_instance_needs_its_id() -> None:
    async def main() -> None:
        client = Client(cast(Bridge, FakeBridge()), cast(Any, ReadyCaller()), "a.b.c")
        for none in (None, "7"):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                client.direct({}, cast(Any, none))

    asyncio.run(main())


def test_an_option_that_there_is_none_of_is_named() -> None:
    async def main() -> None:
        client = Client(cast(Bridge, FakeBridge()), cast(Any, ReadyCaller()), "a.b.c")
        with pytest.raises(TypeError, match="a request takes the options context, timeout and headers, not text, mode"):
            client.generate(text="hello", mode="fast")

    asyncio.run(main())
