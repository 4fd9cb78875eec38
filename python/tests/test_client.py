"""Answers as their callers read them, without the native module."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from genset import Context
from genset._bridge import Bridge
from genset._client import Client, ResponseStream
from genset.exceptions import Cancelled, Unavailable


class FakeBridge:
    """A runtime whose operations fail, because nobody is there."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked: dict[int, Any] = {}

    def check(self) -> None:
        pass

    def number(self) -> int:
        return 1

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
