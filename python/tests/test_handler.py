"""Answers of handlers, without the native module."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import msgpack
import pytest

from genset import Context, GenerateChunk, GenerateRequest, _handler
from genset._bridge import Bridge
from genset._client import ResponseStream
from genset._frames import pack
from genset._handler import Answering, Plain
from genset.exceptions import Internal, NotFound
from genset.llm import Tokens


class FakeCall:
    """A request, with how its answer ended."""

    id, request_id, headers, trace, deadline_ms, credit = 1, "r", {"who": "me"}, ("", ""), None, 4

    def __init__(self, request: Any) -> None:
        self.request = pack(request)
        self.ended: list[bytes | None] = []

    def end(self) -> None:
        self.ended.append(None)

    def fail(self, error: bytes) -> None:
        self.ended.append(error)

    def error(self) -> dict[str, Any]:
        """The first error that ended its answer."""
        assert self.ended[0] is not None
        return cast("dict[str, Any]", msgpack.unpackb(self.ended[0]))


class FakeBridge:
    """Releases an answer as soon as it has ended, as the native module does."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls: dict[int, Any] = {}
        self.asked: dict[int, Any] = {}
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


def test_a_handler_of_embeddings_is_told_what_it_gives() -> None:
    _, encoder = Tokens("e").request(pack({"model": "m", "input": {"embed": [[1]]}}))
    # Without an answer, and with a wrong one.
    wrong: list[Callable[[], object]] = [encoder.finish, lambda: encoder.plain([0.5])]
    for answer in wrong:
        with pytest.raises(Internal, match=r"yield dictionaries such as \{'embeddings': "):
            answer()


def test_a_handler_is_not_called_for_a_request_that_was_stopped_before() -> None:
    begun: list[Any] = []

    async def main() -> None:
        bridge = FakeBridge()

        async def handler(request: Any) -> None:
            begun.append(request)

        answering = Answering(cast(Bridge, bridge), "e", handler, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        # In the same turn of the loop, as after a turn that took long.
        bridge.tell_stopped()
        assert await answering.idle(60)
        assert call.error()["kind"] == "cancelled"

    asyncio.run(main())
    assert not begun


def test_an_answer_that_nobody_wants_may_end_without_a_finish_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bridge = FakeBridge()

        async def generate(request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
            yield {"token_ids": [1]}
            await context.stopped()

        answering = Answering(cast(Bridge, bridge), "e", generate, Tokens("e", needs_reason=False))
        call = FakeCall({"model": "m", "input": {"tokens": [1]}})
        answering.on_call(cast(Any, call))
        await asyncio.sleep(0)
        bridge.tell_stopped()
        assert await answering.idle(60)
        assert call.ended[0] is None and len(bridge.written) == 1

    asyncio.run(main())
    assert not caplog.records


def test_what_a_handler_awaits_may_be_cancelled_though_the_request_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def handler(request: Any) -> Any:
            awaited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if request == "inside":
                awaited.cancel()
            return await awaited

        answering = Answering(cast(Bridge, FakeBridge()), "e", handler, Plain("e"))
        inside, outside = FakeCall("inside"), FakeCall("outside")
        for call in (inside, outside):
            answering.on_call(cast(Any, call))
        await asyncio.sleep(0)
        assert not await answering.idle(0)
        assert inside.error()["kind"] == "internal"
        assert "awaited something that was cancelled" in inside.error()["message"]
        assert outside.error()["kind"] == "engine_shutdown"

    asyncio.run(main())
    (warned,) = [record for record in caplog.records if record.exc_info]
    assert "request r failed" in warned.getMessage()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_a_group_of_errors_is_the_first_of_them(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def handler(request: str) -> None:
            group: Any = vars(builtins)["ExceptionGroup"]
            refused = [NotFound("none", field="adapter"), Internal("lost")]
            raise group("two", [group("one", refused), *([ValueError()] if request == "mixed" else [])])

        answering = Answering(cast(Bridge, FakeBridge()), "e", handler, Plain("e"))
        same, mixed = FakeCall("same"), FakeCall("mixed")
        answering.on_call(cast(Any, same))
        assert await answering.idle(60)
        assert (same.error()["kind"], same.error()["details"]) == ("not_found", {"field": "adapter"})
        assert not caplog.records
        answering.on_call(cast(Any, mixed))
        assert await answering.idle(60)
        assert mixed.error()["kind"] == "internal"

    asyncio.run(main())


def test_a_generator_that_awaits_nothing_lets_others_have_their_turns() -> None:
    async def main() -> None:
        had_turn = asyncio.Event()

        async def count(request: Any) -> AsyncGenerator[int, None]:
            for number in range(1000):
                if had_turn.is_set():
                    return
                yield number
            raise AssertionError("nobody else had a turn")

        answering = Answering(cast(Bridge, FakeBridge()), "e", count, Plain("e"))
        call = FakeCall("a")
        call.credit = 2000
        answering.on_call(cast(Any, call))
        asyncio.get_running_loop().call_soon(had_turn.set)
        assert await answering.idle(60)
        assert call.ended[0] is None

    asyncio.run(main())


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_handler_may_return_the_stream_of_a_client(is_coroutine: bool) -> None:
    async def main() -> None:
        bridge = FakeBridge()

        def forward(request: Any) -> ResponseStream:
            stream = ResponseStream(cast(Bridge, bridge), 7)
            for number in range(3):
                stream.on_item(pack(number))
            stream.on_end(None)
            return stream

        async def forward_later(request: Any) -> ResponseStream:
            return forward(request)

        answering = Answering(cast(Bridge, bridge), "e", forward_later if is_coroutine else forward, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        assert await answering.idle(60)
        assert (call.ended[0], bridge.written) == (None, [pack(0), pack(1), pack(2)])

    asyncio.run(main())


def test_a_handler_may_take_its_context_by_name_alone() -> None:
    async def named(request: Any, *, context: Context) -> Any:
        return [request, context.id()]

    async def other(request: Any, *, tokenizer: Any) -> None: ...

    async def both(request: Any, other: Any, *, context: Any) -> None: ...

    async def main() -> None:
        bridge = FakeBridge()
        answering = Answering(cast(Bridge, bridge), "e", named, Plain("e"))
        answering.on_call(cast(Any, FakeCall("a")))
        assert await answering.idle(60)
        assert bridge.written == [pack(["a", "r"])]
        for handler, count in ((other, 2), (both, 3)):
            with pytest.raises(TypeError, match=f"the handler of e takes {count} arguments"):
                Answering(cast(Bridge, bridge), "e", handler, Plain("e"))

    asyncio.run(main())


@pytest.mark.parametrize(("error", "message"), [(SystemExit(3), "SystemExit: 3"), (GeneratorExit(), "GeneratorExit: ")])
def test_a_handler_that_exits_ends_its_request_alone(error: BaseException, message: str) -> None:
    async def main() -> None:
        async def leave(request: Any) -> Any:
            raise error

        answering = Answering(cast(Bridge, FakeBridge()), "e", leave, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        assert await answering.idle(60)
        assert call.error()["message"] == message

    asyncio.run(main())


class Untold(Exception):
    """Has no text, as exceptions whose `__str__` returns a number."""

    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@pytest.mark.parametrize("error", [Untold(), Internal(cast(str, Untold()))])
def test_an_error_whose_text_cannot_be_had_ends_its_request(error: Exception) -> None:
    async def main() -> None:
        async def fail(request: Any) -> Any:
            raise error

        answering = Answering(cast(Bridge, FakeBridge()), "e", fail, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        assert await answering.idle(60)
        assert call.error()["message"].endswith("<its text is not available>")

    asyncio.run(main())


def test_an_error_of_a_program_s_own_class_ends_its_request() -> None:
    class NoSuchVoice(NotFound):
        def __init__(self, voice: str) -> None:
            self.voice = voice

    async def main() -> None:
        async def fail(request: Any) -> Any:
            raise NoSuchVoice("alto")

        answering = Answering(cast(Bridge, FakeBridge()), "e", fail, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        assert await answering.idle(60)
        assert (call.error()["kind"], call.error()["message"]) == ("not_found", "alto")

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not tell that it was cancelled")
def test_requests_that_a_program_s_end_cancels_end_as_at_a_shutdown() -> None:
    async def main() -> None:
        async def wait(request: Any) -> None:
            await asyncio.sleep(3600)

        answering = Answering(cast(Bridge, FakeBridge()), "e", wait, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        await asyncio.sleep(0)
        # As `asyncio.run` does with the remaining tasks.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        assert await answering.idle(60)
        assert call.error()["kind"] == "engine_shutdown"

    asyncio.run(main())


def test_without_grace_nothing_is_cut_short_where_nothing_is_under_way() -> None:
    async def main() -> None:
        bridge = FakeBridge()

        async def echo(request: Any) -> Any:
            return request

        answering = Answering(cast(Bridge, bridge), "e", echo, Plain("e"))
        assert await answering.idle(0)
        answering.on_call(cast(Any, FakeCall("a")))
        assert await answering.idle(60)
        assert await answering.idle(0)

    asyncio.run(main())


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_handler_that_survives_its_cancellation_is_left(
    grace_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_handler, "CANCEL_GRACE_S", 0.01)

    async def main() -> None:
        bridge = FakeBridge()
        goes = asyncio.Event()

        async def deaf(request: Any) -> AsyncGenerator[str, None]:
            while not goes.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await goes.wait()
            yield "too late"

        answering = Answering(cast(Bridge, bridge), "e", deaf, Plain("e"))
        call = FakeCall("a")
        answering.on_call(cast(Any, call))
        (answer,) = bridge.calls.values()
        idle = asyncio.ensure_future(answering.idle(grace_s))
        try:
            await asyncio.sleep(0)
            # As a grace of 0 does, and a second signal.
            answering.cancel()
            done, _ = await asyncio.wait([idle], timeout=30)
            assert done, "it waits for the handler"
            assert idle.result() is (grace_s > 0)
            assert call.error()["kind"] == "engine_shutdown"
        finally:
            goes.set()
            await asyncio.wait([answer.task])
        assert not bridge.written

    asyncio.run(main())
    assert "e: 1 requests go on though they were cancelled" in caplog.text
