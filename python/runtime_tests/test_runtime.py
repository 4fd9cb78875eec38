"""Endpoints and clients, over discovery in a directory and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, run, until

from genset import _handler, exceptions
from genset.runtime import Client, Context, Endpoint, Runtime, Service, get_runtime


@contextlib.asynccontextmanager
async def served(handler: Any, **options: Any) -> AsyncIterator[tuple[Runtime, Client]]:
    """Serves `demo.text.ask` in one process, with a client of it in another. Both are runtimes of this test."""
    async with await Runtime.connect() as worker, await Runtime.connect() as caller:
        serving = asyncio.ensure_future(worker.endpoint("demo.text.ask").serve_endpoint(handler, **options))
        client = await caller.endpoint("demo.text.ask").client()
        await client.wait_for_instances(60)
        yield worker, client
        await worker.shutdown()
        await serving


async def items(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def test_handlers_of_every_kind_answer() -> None:
    async def many(request: Any) -> AsyncIterator[Any]:
        for number in range(request["to"]):
            yield number

    async def one(request: Any) -> Any:
        return {"text": request["text"].upper()}

    def generator(request: Any) -> Any:
        yield from request

    def plain(request: Any, context: Context) -> Any:
        return [request, context.headers["who"], bool(context.id())]

    async def nothing(request: Any) -> None:
        pass

    async with served(many) as (_, client):
        # More than the credit.
        assert await items(client.generate({"to": 1000})) == list(range(1000))
    async with served(one) as (worker, client):
        assert (await client.random({"text": "hello"})).text == "HELLO"
        assert (await client.round_robin({"text": "a"}))["text"] == "A"
        assert (await client.direct({"text": "b"}, worker.worker_id)).text == "B"
        assert client.instance_ids() == [worker.worker_id]
    async with served(generator) as (_, client):
        assert await items(client.least_loaded([1, b"x", None, 2.5])) == [1, b"x", None, 2.5]
    async with served(plain) as (_, client):
        assert await client.random(7, headers={"who": "me"}) == [7, "me", True]
    async with served(nothing) as (_, client):
        assert await client.random() is None


async def test_dataclasses_and_models_travel_as_maps() -> None:
    pydantic = pytest.importorskip("pydantic")
    Asked = pydantic.create_model("Asked", text=(str, ...))

    @dataclasses.dataclass
    class Answered:
        text: str
        parts: list[int]

    async def handler(request: Any) -> Any:
        return Answered(request.text.upper(), [1])

    async with served(handler) as (_, client):
        answer = await client.generate(Asked(text="a"))
        assert (answer.text, answer.parts) == ("A", [1])
        with pytest.raises(AttributeError, match="no 'other', but text, parts"):
            answer.other  # noqa: B018


async def test_errors_keep_kind_field_and_retry() -> None:
    async def handler(request: Any) -> AsyncIterator[Any]:
        if request == "full":
            raise exceptions.Overloaded("come back", retry_after=1.5)
        yield 1
        if request == "field":
            raise exceptions.InvalidArgument("must be at least 1", field="max_tokens")
        raise KeyError("a secret")

    async with served(handler) as (worker, client):
        with pytest.raises(exceptions.Overloaded) as full:
            await client.direct("full", worker.worker_id)
        assert (full.value.message, full.value.retry_after) == ("come back", 1.5)
        stream = client.random("field")
        assert await anext(stream) == 1
        with pytest.raises(exceptions.InvalidArgument) as wrong:
            await anext(stream)
        assert str(wrong.value) == "max_tokens: must be at least 1"
        with pytest.raises(exceptions.Internal, match="KeyError"):
            await items(client.random("else"))
        with pytest.raises(exceptions.NotFound):
            await client.direct({}, 1)


async def test_errors_teach() -> None:
    async def unpackable(request: Any) -> Any:
        return object()

    async with served(unpackable) as (worker, client):
        with pytest.raises(exceptions.Internal, match="an answer of demo.text.ask: object cannot be sent: use a dict"):
            await client.random({})
        with pytest.raises(TypeError, match="a request to demo.text.ask: object cannot be sent"):
            client.random(object())
        endpoint = worker.endpoint("demo.text.ask")
        with pytest.raises(exceptions.InvalidArgument, match="is served by this process already"):
            await endpoint.serve_endpoint(unpackable)
        with pytest.raises(TypeError, match="give a function, not its result"):
            await worker.endpoint("demo.text.other").serve_endpoint({})
        with pytest.raises(TypeError, match="takes 3 arguments"):
            await worker.endpoint("demo.text.other").serve_endpoint(lambda a, b, c: a)
        with pytest.raises(ValueError, match="is no part of a name"):
            worker.namespace("a b")
        with pytest.raises(ValueError, match="write namespace.component.endpoint"):
            worker.endpoint("a.b")
    with pytest.raises(ValueError, match="--no-such-thing"):
        await Runtime.connect(no_such_thing=1)

    async def two(request: Any) -> AsyncIterator[int]:
        yield 1
        yield 2

    async with served(two) as (_, client):
        with pytest.raises(exceptions.InvalidArgument, match="read them with `async for`"):
            await client.random({})


async def test_letting_go_of_an_answer_stops_its_handler() -> None:
    seen: list[str] = []

    async def polite(request: Any, context: Context) -> AsyncIterator[int]:
        while not context.is_stopped():
            yield 1
            await asyncio.sleep(0.01)
        seen.append(f"polite {context.stop_reason()}")

    async def deaf(request: Any) -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cancelled")

    async with served(polite) as (_, client):
        stream = client.random({})
        await anext(stream)
        await stream.aclose()
        await until(lambda: seen == ["polite client"], "the handler notices")
    seen.clear()
    async with served(deaf) as (_, client):
        stream = client.random({})
        await anext(stream)
        del stream
        await until(lambda: seen == ["cancelled"], "the handler is cancelled after its grace")


async def test_a_handler_waits_while_nobody_reads() -> None:
    made = 0

    async def fast(request: Any) -> AsyncIterator[int]:
        nonlocal made
        for number in range(200_000):
            made += 1
            yield number

    async with served(fast) as (_, client):
        stream = client.random({})
        assert await anext(stream) == 0
        before = -1
        for _ in range(1000):
            if made == before:
                break
            before = made
            await asyncio.sleep(0.5)
        assert 1 <= made < 5000
        # No item is lost.
        assert [await anext(stream) for _ in range(2000)] == list(range(1, 2001))
        await stream.aclose()


async def test_what_a_handler_asks_for_belongs_to_its_request() -> None:
    seen: list[str] = []

    async def inner(request: Any, context: Context) -> AsyncIterator[str]:
        seen.append(context.id())
        yield context.id()
        await context.stopped()
        seen.append("inner stopped")

    async with served(inner) as (worker, client):

        async def outer(request: Any, context: Context) -> AsyncIterator[Any]:
            yield context.id()
            async for item in client.random({}, context=context):
                yield item

        serving = asyncio.ensure_future(worker.endpoint("demo.text.outer").serve_endpoint(outer))
        outside = await (await Runtime.connect()).endpoint("demo.text.outer").client()
        stream = outside.random({})
        assert await anext(stream) == await anext(stream) == seen[0]
        await stream.aclose()
        await until(lambda: seen[1:] == ["inner stopped"], "the inner request is cancelled with the outer one")
        await worker.shutdown()
        await serving


async def test_a_request_that_is_let_go_before_an_instance_is_known_is_not_sent() -> None:
    asked: list[Any] = []

    async def echo(request: Any) -> Any:
        asked.append(request)
        return request

    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        client = await other.endpoint("py.text.echo").client()
        left, closed, kept = (client.generate(name) for name in ("left", "closed", "kept"))
        del left
        await closed.aclose()
        serving = asyncio.ensure_future(runtime.endpoint("py.text.echo").serve_endpoint(echo))
        assert await kept == "kept"
        assert asked == ["kept"]
        await runtime.shutdown()
        await serving


async def test_a_deadline_ends_a_request_at_both_ends() -> None:
    begun: list[Any] = []
    seen: list[str | None] = []

    async def slow(request: Any, context: Context) -> AsyncIterator[int]:
        begun.append(request)
        yield 1
        await context.stopped()
        seen.append(context.stop_reason())

    async with served(slow) as (_, client):
        # On a busy machine the deadline may pass before the request is there.
        while not begun:
            with pytest.raises(exceptions.DeadlineExceeded):
                await items(client.random({}, timeout=0.5))
        await until(lambda: seen, "the handler is told")


async def test_a_timeout_that_is_too_long_for_the_clock_is_none() -> None:
    async def handler(request: Any, context: Context) -> Any:
        return {"deadline_ms": context.deadline_ms}

    async with served(handler) as (_, client):
        for timeout in (sys.maxsize, math.inf):
            assert len(await client.wait_for_instances(timeout)) == 1
            assert (await client.random({}, timeout=timeout)).deadline_ms is None
        assert (await client.random({}, timeout=3600)).deadline_ms > 0
        for timeout in (-1, math.nan):
            with pytest.raises(ValueError, match="^timeout: .* is no number of seconds from 0$"):
                await client.random({}, timeout=timeout)


async def test_too_many_requests_are_refused() -> None:
    go = asyncio.Event()
    begun = []

    async def waits(request: Any) -> int:
        begun.append(request)
        await go.wait()
        return 1

    async with served(waits, max_requests=2) as (worker, client):
        first = [asyncio.ensure_future(items(client.random({}))) for _ in range(2)]
        await until(lambda: len(begun) == 2, "both are asked")
        with pytest.raises(exceptions.Overloaded):
            await items(client.direct({}, worker.worker_id))
        go.set()
        assert await asyncio.gather(*first) == [[1], [1]]


async def test_a_request_that_may_have_been_begun_is_not_sent_again() -> None:
    begun = []

    async def fails(request: Any) -> None:
        begun.append(request)
        raise getattr(exceptions, request)("no")

    async with served(fails) as (_, client):
        for kind in ("Disconnected", "StreamIncomplete", "Unavailable", "Internal"):
            with pytest.raises(getattr(exceptions, kind)):
                await client.random(kind)
            assert begun.count(kind) == 1
        # This error says that the request had not begun.
        with pytest.raises(exceptions.Overloaded):
            await client.random("Overloaded")
        assert begun.count("Overloaded") == 3


async def test_a_shutdown_lets_requests_end_and_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    begun = asyncio.Event()
    go = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[int]:
        begun.set()
        yield 1
        await go.wait()
        yield 2

    worker, caller = await Runtime.connect(), await Runtime.connect()
    serving = asyncio.ensure_future(worker.endpoint("demo.text.ask").serve_endpoint(slow))
    client = await caller.endpoint("demo.text.ask").client()
    answer = asyncio.ensure_future(items(client.random({})))
    await begun.wait()
    ending = worker.begin_shutdown()
    await until(lambda: client.instance_ids() == [], "it leaves the list")
    assert not answer.done() and not ending.done()
    go.set()
    assert await answer == [1, 2]
    await ending
    await serving
    await caller.shutdown()
    with pytest.raises(exceptions.EngineShutdown):
        client.random({})
    left = asyncio.all_tasks() - before
    assert not left, left


async def cancel_while_it_begins(endpoint: Endpoint, handler: Any) -> None:
    """Cancels a `serve_endpoint` before it serves, and waits for its end."""
    serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving], timeout=LONG_S)
    assert serving.cancelled()


async def until_nobody_else_serves(client: Client, name: str) -> None:
    """Serves an endpoint in another process, and waits until `client` sees only that one."""

    async def echo(request: Any) -> Any:
        return request

    async with await Runtime.connect() as other:
        serving = asyncio.ensure_future(other.endpoint(name).serve_endpoint(echo))
        await until(lambda: other.worker_id in client.instance_ids(), "the other process is listed")
        await until(lambda: client.instance_ids() == [other.worker_id], "no other instance is listed")
        await other.shutdown()
        await serving


async def test_an_endpoint_that_is_cancelled_while_it_begins_is_not_listed() -> None:
    async def echo(request: Any) -> Any:
        return request

    async with await Runtime.connect() as worker, await Runtime.connect() as caller:
        endpoint = worker.endpoint("demo.text.ask")
        client = await caller.endpoint(endpoint.name).client()
        await cancel_while_it_begins(endpoint, echo)
        await until_nobody_else_serves(client, endpoint.name)
        # Nothing of it is left in its own process either.
        serving = asyncio.ensure_future(endpoint.serve_endpoint(echo))
        await until(lambda: client.instance_ids() == [worker.worker_id], "it is served after all")
        assert await client.direct({"x": 1}, worker.worker_id) == {"x": 1}
        await worker.shutdown()
        await serving


async def test_without_grace_requests_are_cut_short() -> None:
    begun = asyncio.Event()

    async def endless(request: Any) -> AsyncIterator[int]:
        yield 1
        begun.set()
        await asyncio.Event().wait()

    async with served(endless, graceful_shutdown=False, grace=1e6) as (worker, client):
        answer = asyncio.ensure_future(items(client.random({})))
        await begun.wait()
        await worker.shutdown()
        with pytest.raises(exceptions.EngineShutdown):
            await answer


async def test_a_hurried_shutdown_leaves_a_handler_that_survives_its_cancellation() -> None:
    begun, goes = asyncio.Event(), asyncio.Event()

    async def deaf(request: Any) -> AsyncIterator[int]:
        yield 1
        begun.set()
        while not goes.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await goes.wait()

    async with served(deaf, grace=1e6) as (worker, client):
        answer = asyncio.ensure_future(items(client.random({})))
        await begun.wait()
        ending = worker.begin_shutdown()
        await until(lambda: client.instance_ids() == [], "it leaves the list")
        worker.hurry()
        try:
            await asyncio.wait([ending], timeout=LONG_S)
            assert ending.done()
        finally:
            goes.set()
        with pytest.raises(exceptions.EngineShutdown):
            await answer


class Endless(Service):
    """Never ends."""

    async def stop(self) -> None:
        await asyncio.Event().wait()

    def hurry(self) -> None:
        pass


async def test_a_hurried_program_does_not_wait_for_a_service_that_does_not_stop() -> None:
    runtime = await Runtime.connect()
    runtime._services.append(Endless(runtime.endpoint("demo.text.ask")))
    hurried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    finishing = asyncio.ensure_future(runtime.finish(hurried))
    await asyncio.sleep(0)
    hurried.set_result(None)
    await asyncio.wait([finishing], timeout=LONG_S)
    assert finishing.done()
    # The rest of the shutdown, without the endless service.
    runtime._services.clear()
    runtime.begin_shutdown().cancel()
    runtime._ending = None
    await runtime.shutdown()


async def test_a_request_that_is_cut_short_before_it_begins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    on_call = _handler.Answering.on_call

    def on_call_and_cancel(self: _handler.Answering, call: Any) -> None:
        on_call(self, call)
        self.cancel()

    monkeypatch.setattr(_handler.Answering, "on_call", on_call_and_cancel)

    begun = []

    async def handler(request: Any) -> None:
        begun.append(request)

    async with served(handler) as (worker, client):
        with pytest.raises(exceptions.EngineShutdown):
            await asyncio.wait_for(items(client.direct({}, worker.worker_id)), LONG_S)
    assert not begun


async def test_a_loop_has_one_runtime_whoever_asks_first() -> None:
    first, second = await asyncio.gather(get_runtime(), get_runtime())
    assert first is second
    # Another runtime comes and goes beside it.
    async with await Runtime.connect() as other:
        assert other is not first
        assert await get_runtime() is first
    assert await get_runtime() is first
    async with await Runtime.connect() as other:
        await first.shutdown()
        assert await get_runtime() is other


def test_a_runtime_that_nobody_shut_down_goes_with_its_loop() -> None:
    def threads() -> int:
        names = []
        for task in Path("/proc/self/task").iterdir():
            # The thread may have ended.
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text())
        return sum(name.startswith("genset-") for name in names)

    async def ask() -> None:
        runtime = await get_runtime()
        await runtime.endpoint("demo.text.ask").client()

    before = threads()
    for _ in range(4):
        asyncio.run(ask())

    def are_gone() -> bool:
        gc.collect()
        return threads() <= before

    run(until(are_gone, "its threads end"))


async def test_a_static_runtime_meets_nobody_else() -> None:
    async def echo(request: Any) -> Any:
        return request

    async with await Runtime.connect(static=True) as alone:
        assert await get_runtime() is alone
        serving = asyncio.ensure_future(alone.endpoint("a.b.c").serve_endpoint(echo))
        client = await alone.endpoint("dyn://a.b.c").client()
        assert await client.generate({"x": [1]}) == {"x": [1]}
        await alone.shutdown()
        await serving
