"""Answers of handlers, without the native module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from genset import Context, GenerateChunk, GenerateRequest
from genset._bridge import Bridge
from genset._frames import pack
from genset._handler import Answering
from genset.llm import Tokens


class FakeCall:
    """A request, and how its answer ended."""

    id, request_id, headers, trace, deadline_ms, credit = 1, "r", {"who": "me"}, ("", ""), None, 4

    def __init__(self, request: Any) -> None:
        self.request = pack(request)
        self.ended: list[bytes | None] = []

    def end(self) -> None:
        self.ended.append(None)

    def fail(self, error: bytes) -> None:
        self.ended.append(error)


class FakeBridge:
    """Lets go of an answer as soon as it has ended, as the native module does."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls: dict[int, Any] = {}
        self.written: list[bytes] = []

    def write(self, call: Any, item: bytes) -> None:
        self.written.append(item)

    def flush(self) -> None:
        pass

    def tell_stopped(self) -> None:
        for answering in list(self.calls.values()):
            answering.stop("client")


def test_an_answer_that_ended_is_not_stopped_while_its_handler_cleans_up() -> None:
    seen: list[Any] = []

    async def main() -> None:
        bridge = FakeBridge()

        async def generate(request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
            try:
                yield {"token_ids": [1], "finish_reason": "stop"}
            finally:
                bridge.tell_stopped()
                await asyncio.sleep(0)
                seen.append(context.stop_reason())

        answering = Answering(cast(Bridge, bridge), "e", generate, Tokens("e"), seen.append)
        call = FakeCall({"model": "m", "input": {"tokens": [1]}})
        answering.on_call(cast(Any, call))
        assert await answering.idle(60)
        assert call.ended[0] is None and len(bridge.written) == 1

    asyncio.run(main())
    assert seen == [None]
