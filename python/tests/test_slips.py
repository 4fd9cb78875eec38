"""How the package reports mistakes in engines."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset._frames import Kind, encode, pack
from genset._slips import made, started
from worker_stub import HELLO, WorkerStub

SLIPS = str(Path(__file__).parent / "slips_engine.py")


@pytest.fixture
def worker() -> Iterator[WorkerStub]:
    worker = WorkerStub(SLIPS)
    worker.start()
    yield worker
    worker.kill()


def answer(worker: WorkerStub, stream: int, what: str) -> Any:
    """The error that a request ends with, or the items of its answer."""
    worker.request(stream, "generate", {"model": what, "input": {"tokens": [1]}})
    items: list[Any] = []
    while True:
        kind, of, payload = worker.frame()
        if kind == Kind.ERROR:
            assert of == stream
            return msgpack.unpackb(payload)["message"]
        items += [item for _, item in msgpack.unpackb(payload)]
        if items[-1] is None:
            return items[:-1]


def test_an_exit_and_a_stray_exception_end_their_requests_alone(worker: WorkerStub) -> None:
    assert answer(worker, 2, "exit") == "SystemExit: 3"
    assert answer(worker, 6, "left") == "GeneratorExit: "
    assert answer(worker, 3, "stray") == "Stray: from afar"
    assert answer(worker, 5, "untold") == "Untold: <its text is not available>"
    assert answer(worker, 4, "nothing")[0]["finished"]["reason"] == "length"


def test_what_an_engine_awaits_may_be_cancelled_though_the_request_is_not(worker: WorkerStub) -> None:
    assert answer(worker, 2, "cancelled") == "the engine awaited something that was cancelled"


def test_what_an_engine_that_awaits_nothing_gives_is_sent_at_once(worker: WorkerStub) -> None:
    worker.request(2, "generate", {"model": "blocks", "input": {"tokens": [1]}})
    kind, _, payload = worker.frame()
    assert (kind, msgpack.unpackb(payload)) == (Kind.ITEM, [[2, {"tokens": {"token_ids": [1]}}]])
    worker.process.send_signal(signal.SIGUSR1)
    assert msgpack.unpackb(worker.frame()[2])[-1] == [2, None]


def test_an_item_that_no_frame_can_have_ends_its_request_alone(worker: WorkerStub) -> None:
    assert answer(worker, 2, f"large {16 << 20}") == "an item of 16777246 bytes is too large: the worker takes 16777205 at once"
    assert answer(worker, 3, "nothing")[0]["finished"]["reason"] == "length"


def test_an_item_that_fills_a_frame_has_it_for_itself(worker: WorkerStub) -> None:
    head = {"endpoint": "generate", "instance": 0, "credit": 64, "id": "r"}
    # The engine sees both in one turn of its loop.
    asked = {2: "nothing", 3: f"large {(16 << 20) - 41}"}
    bodies = {stream: {"model": what, "input": {"tokens": [1]}} for stream, what in asked.items()}
    worker.sock.sendall(b"".join(encode(Kind.REQUEST, stream, pack(head) + pack(body)) for stream, body in bodies.items()))
    came: dict[int, list[Any]] = {2: [], 3: []}
    while any(not items or items[-1] is not None for items in came.values()):
        kind, _, payload = worker.frame()
        assert kind == Kind.ITEM, payload
        for stream, item in msgpack.unpackb(payload):
            came[stream].append(item)
    assert [len(items) for items in came.values()] == [2, 3]


def test_an_interrupt_ends_its_request_and_the_process(worker: WorkerStub) -> None:
    assert answer(worker, 2, "interrupt") == "KeyboardInterrupt: "
    assert worker.process.wait(30) != 0


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("exit", "SystemExit: there is no device"),
        ("exit-again", "SystemExit: there is no device"),
        ("left", "GeneratorExit: "),
        ("cancelled", "the engine awaited something that was cancelled"),
    ],
)
def test_an_engine_whose_start_failed_is_cleaned_up_before_the_worker_is_told(how: str, problem: str) -> None:
    worker = WorkerStub(SLIPS, how)
    worker.send(Kind.HELLO, 0, HELLO)
    assert worker.frame()[0] == Kind.HELLO
    worker.request(1, "start", {"worker_id": 1, "role": "aggregated"})
    kind, _, payload = worker.frame()
    assert (kind, msgpack.unpackb(payload)["message"]) == (Kind.ERROR, problem)
    worker.request(2, "control", {"op": "order"})
    assert msgpack.unpackb(worker.frame()[2])[0][1]["location"] == "1 cleanups"
    worker.kill()


def test_an_engine_that_is_let_go_reports_no_failure() -> None:
    worker = WorkerStub(SLIPS, stderr=subprocess.PIPE)
    worker.start()
    worker.request(2, "events", None)
    assert answer(worker, 3, "nothing")
    worker.send(Kind.GO_AWAY, 0, {"code": "shutdown", "reason": ""})
    worker.sock.close()
    _, log = worker.process.communicate(timeout=30)
    assert worker.process.returncode == 0
    assert b"engine started" in log and b"failed" not in log


class Right(LLMEngine):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="right", context_length=8)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        yield {"token_ids": [1], "finish_reason": "length"}

    async def cleanup(self) -> None:
        pass


async def returns(self: Any, request: Any, context: Any) -> Any:
    return [{"token_ids": [1]}]


def plain(self: Any, request: Any, context: Any) -> Any:
    yield {"token_ids": [1]}


async def without_context(self: Any, request: Any) -> Any:
    yield {"token_ids": [1]}


async def gives_nothing(self: Any, worker_id: int) -> None:
    pass


def is_not_async(self: Any, worker_id: int) -> EngineConfig:
    return EngineConfig(model="m")


@pytest.mark.parametrize(
    ("method", "slip", "problem"),
    [
        ("generate", returns, "Slip.generate returns its answer: write `yield` for each chunk of it"),
        ("generate", plain, "Slip.generate is a generator without `async`: write `async def generate`"),
        ("generate", without_context, "write `async def generate(self, request, context)`"),
        ("start", gives_nothing, "Slip.start gave a NoneType: return an EngineConfig"),
        ("start", is_not_async, "is_not_async gave a EngineConfig that cannot be awaited: write `async def"),
    ],
)
def test_a_slip_is_told_in_a_sentence_when_the_engine_starts(method: str, slip: Any, problem: str) -> None:
    engine = type("Slip", (Right,), {method: slip})()
    with pytest.raises(TypeError) as error:
        asyncio.run(started(engine, 1))
    assert problem in str(error.value)
    assert asyncio.run(started(Right(), 1)).model == "right"


class Alike:
    """An engine by its methods, without subclassing."""

    start, generate, cleanup = Right.start, Right.generate, Right.cleanup


def test_what_has_the_methods_of_an_engine_is_one() -> None:
    assert asyncio.run(started(cast(Any, Alike()), 1)).model == "right"
    for no_engine in (Alike, object(), None):
        with pytest.raises(TypeError, match="is no engine: give an instance of a subclass of LLMEngine"):
            asyncio.run(started(cast(Any, no_engine), 1))


def test_from_args_gives_both() -> None:
    async def alone(cls: Any, argv: Any = None) -> Any:
        return cls()

    with pytest.raises(TypeError, match="Slip.from_args gave a Slip: return the engine and its WorkerConfig"):
        asyncio.run(made(type("Slip", (Right,), {"from_args": classmethod(alone)}), None))
    assert isinstance(asyncio.run(made(Right, None))[0], Right)


def test_what_generate_gives_is_looked_at_too(worker: WorkerStub) -> None:
    assert "SlipsEngine.generate gave a list and no async generator" in answer(worker, 2, "list")
    assert answer(worker, 4, "iterator")[0]["finished"]["last"] == {"token_ids": [7]}
    assert "SlipsEngine yields a int: yield dictionaries" in answer(worker, 3, "number")
