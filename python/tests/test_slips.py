"""What becomes of the mistakes of engines in their processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from genset._frames import Kind
from worker_stub import WorkerStub

SLIPS = str(Path(__file__).parent / "slips_engine.py")


@pytest.fixture
def worker() -> Iterator[WorkerStub]:
    worker = WorkerStub(SLIPS)
    worker.start()
    yield worker
    worker.process.kill()
    worker.process.wait(30)


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
    assert answer(worker, 3, "stray") == "Stray: from afar"
    assert answer(worker, 4, "nothing")[0]["finished"]["reason"] == "length"


def test_what_an_engine_awaits_may_be_cancelled_though_the_request_is_not(worker: WorkerStub) -> None:
    assert answer(worker, 2, "cancelled") == "the engine awaited something that was cancelled"


def test_what_an_engine_that_awaits_nothing_gives_is_sent_at_once(worker: WorkerStub) -> None:
    worker.request(2, "generate", {"model": "blocks", "input": {"tokens": [1]}})
    kind, _, payload = worker.frame()
    assert (kind, msgpack.unpackb(payload)) == (Kind.ITEM, [[2, {"tokens": {"token_ids": [1]}}]])
    worker.process.send_signal(signal.SIGUSR1)
    assert msgpack.unpackb(worker.frame()[2])[-1] == [2, None]


def test_an_interrupt_ends_its_request_and_the_process(worker: WorkerStub) -> None:
    assert answer(worker, 2, "interrupt") == "KeyboardInterrupt: "
    assert worker.process.wait(30) != 0
