"""`BatchEngine` in its process, with a stub for the worker, and its sample alone."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from batching_engine import BatchingEngine
from genset import (
    BatchEngine,
    Context,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    StepOutput,
    WorkerConfig,
    WorkerHandle,
    _stepper,
    engine,
)
from genset._frames import Decoder, Kind, encode, encode_batches, pack
from genset._stepper import Stepper
from genset._stream import Stream
from genset.engine import Event
from genset.exceptions import EngineShutdown, Overloaded
from genset.testing import collect
from worker_stub import WorkerStub

STEPS = str(Path(__file__).parent / "steps_engine.py")
BATCHING = str(Path(__file__).parent.parent / "batching_engine.py")


class Worker(WorkerStub):
    """Sorts received frames by stream: items, then None for the end or the kind of an error."""

    def __init__(self, *command: str) -> None:
        super().__init__(*command)
        self.came: dict[int, list[Any]] = {}
        self.frames = 0
        self.start()

    def ask(self, stream: int, what: str, max_tokens: int = 3) -> None:
        self.request(stream, "generate", body(what, max_tokens))

    def ask_at_gate(self, stream: int, max_tokens: int = 1) -> None:
        """Sends a request that blocks the step, and returns when it does."""
        self.ask(stream, "gate", max_tokens)
        self.request(998, "control", {"op": "sleep", "level": "keep_weights"})
        self.answer(998)

    def read(self) -> None:
        kind, stream, payload = self.frame()
        self.frames += 1
        if kind == Kind.ERROR:
            self.came.setdefault(stream, []).append(msgpack.unpackb(payload)["kind"])
        elif kind != Kind.PONG:
            assert (kind, stream) == (Kind.ITEM, 0)
            for of, item in msgpack.unpackb(payload):
                self.came.setdefault(of, []).append(item)

    def answer(self, stream: int) -> list[Any]:
        while not self.is_over(stream):
            self.read()
        return self.came.pop(stream)

    def is_over(self, stream: int) -> bool:
        came = self.came.get(stream, [])
        return bool(came) and not isinstance(came[-1], dict)

    def profile(self) -> tuple[int, list[str]]:
        """The most sequences in one step, and which sequences have ended."""
        self.request(999, "control", {"op": "stop_profile"})
        most, *ended = self.answer(999)[0]["location"].split()
        return int(most), ended


def body(what: str, max_tokens: int = 3) -> dict[str, Any]:
    return {"model": what, "input": {"tokens": [1, 2]}, "stop": {"max_tokens": max_tokens}}


def tokens(came: list[Any]) -> list[int]:
    return [token for item in came if item and "tokens" in item for token in item["tokens"]["token_ids"]]


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(STEPS)
    yield worker
    worker.kill()


def test_an_answer_is_tokens_usage_and_an_end(worker: Worker) -> None:
    worker.ask(2, "count")
    came = worker.answer(2)
    assert tokens(came) == [2, 1, 0]
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": None}
    assert came[3:] == [{"finished": {"reason": "length", "usage": usage, "last": {}}}, None]
    assert worker.profile() == (1, ["r-2"])


def test_a_step_is_one_frame_however_many_requests_it_serves(worker: Worker) -> None:
    worker.ask_at_gate(100)
    worker.requests(range(2, 10), "generate", body("count", 5))
    worker.request(50, "control", {"op": "wake"})
    for stream in range(2, 10):
        assert tokens(worker.answer(stream)) == [4, 3, 2, 1, 0]
    # The sequence at the gate takes a second step, in which it ends.
    assert worker.profile()[0] == 9
    # Three control replies; the step at the gate; the 5 steps of 8 requests of 5 tokens; and a step that ends them.
    assert worker.frames <= 3 + 7


def test_a_request_without_credit_waits_and_no_other(worker: Worker) -> None:
    # The stub grants 64.
    worker.ask(2, "count", 100)
    while len(worker.came.get(2, [])) < 64:
        worker.read()
    worker.ask(3, "count", 10)
    assert len(tokens(worker.answer(3))) == 10
    assert len(worker.came[2]) == 64
    worker.send(Kind.CREDIT, 2, {"items": 37})
    assert tokens(worker.answer(2)) == list(reversed(range(100)))


def test_a_chunk_of_more_items_than_credit_waits_for_the_rest(worker: Worker) -> None:
    worker.requests([2], "generate", body("text"), credit=1)
    while not worker.came:
        worker.read()
    assert worker.came == {2: [{"text": {"text": "hello", "token_count": 1}}]}
    # The ended request holds nothing, and others are served.
    assert worker.profile()[1] == ["r-2"]
    worker.ask(3, "count")
    assert len(worker.answer(3)) == 5
    worker.send(Kind.CREDIT, 2, {"items": 1})
    (text, finished, end) = worker.answer(2)
    assert (finished["finished"]["reason"], end) == ("stop", None)


def test_a_cancelled_request_ends_with_and_without_credit(worker: Worker) -> None:
    worker.requests([2, 3], "generate", body("count", 1 << 20))
    while not (len(worker.came.get(2, [])) == len(worker.came.get(3, [])) == 64):
        worker.read()
    worker.send(Kind.CREDIT, 3, {"items": 1 << 30})
    for stream in (2, 3):
        worker.send(Kind.CANCEL, stream, {"reason": "client"})
        assert worker.answer(stream)[-1] is None
    assert worker.profile()[1] == ["r-2", "r-3"]


def test_an_error_ends_its_request_and_no_other(worker: Worker) -> None:
    # All are in the next step.
    worker.ask_at_gate(100)
    cases = {2: "overloaded", 3: "word", 4: "refuse", 5: "count", 6: "token_below_0", 7: "odd_error"}
    for stream, what in cases.items():
        worker.ask(stream, what)
    worker.request(50, "control", {"op": "wake"})
    assert worker.answer(2) == ["overloaded"]
    assert worker.answer(3) == ["internal"]
    assert worker.answer(4) == ["invalid_argument"]
    assert tokens(worker.answer(5)) == [2, 1, 0]
    assert worker.answer(7) == ["overloaded"]
    # The worker refuses tokens outside the vocabulary: it knows the vocabulary.
    while 6 not in worker.came:
        worker.read()
    assert worker.came[6][0] == {"tokens": {"token_ids": [-1]}}
    worker.send(Kind.CANCEL, 6, {"reason": "client"})
    worker.answer(6)
    assert {"r-2", "r-3", "r-5", "r-6", "r-7"} <= set(worker.profile()[1])
    assert "r-4" not in worker.profile()[1]


@pytest.mark.parametrize("what", ["fault", "short"])
def test_a_step_that_fails_ends_its_batch_and_the_engine_goes_on(worker: Worker, what: str) -> None:
    worker.requests([2, 3], "generate", body(what))
    assert (worker.answer(2), worker.answer(3)) == (["internal"], ["internal"])
    assert worker.profile()[1] == ["r-2", "r-3"]
    worker.ask(4, "count")
    assert tokens(worker.answer(4)) == [2, 1, 0]


def test_a_step_that_ends_its_thread_is_a_dead_engine(worker: Worker) -> None:
    worker.request(90, "events", None)
    worker.ask(2, "exit")
    assert worker.answer(2) == ["internal"]
    while 90 not in worker.came:
        worker.read()
    assert "SystemExit" in worker.came[90][0]["dead"]["reason"]
    worker.ask(3, "count")
    assert worker.answer(3) == ["engine_shutdown"]


def test_the_worker_is_told_that_the_engine_steps(worker: Worker) -> None:
    worker.request(90, "events", None)
    worker.ask(2, "count")
    while 90 not in worker.came:
        worker.read()
    assert worker.came[90] == ["step"]


def test_pings_and_controls_are_answered_during_a_step(worker: Worker) -> None:
    worker.ask_at_gate(2)
    worker.sock.sendall(encode(Kind.PING, 0, b"beat-1-2"))
    assert worker.frame() == (Kind.PONG, 0, b"beat-1-2")
    worker.request(3, "control", {"op": "wake"})
    assert tokens(worker.answer(2)) == [0]


def test_cleanup_comes_after_the_last_step(worker: Worker) -> None:
    worker.ask_at_gate(2, 1 << 20)
    worker.request(3, "cleanup", None)
    worker.request(4, "control", {"op": "wake"})
    assert worker.answer(2)[-1] == "engine_shutdown"
    assert worker.answer(3) == [None]
    assert worker.profile()[1] == ["r-2"]
    worker.ask(5, "count")
    assert worker.answer(5) == ["engine_shutdown"]


def test_frames_are_of_bounded_size() -> None:
    pairs = [b"\x92" + pack(stream) + pack("x" * 100) for stream in range(20)]
    frames = Decoder().feed(encode_batches(pairs, 500))
    assert all(len(payload) <= 501 for _, _, payload in frames)
    assert [pair for _, _, payload in frames for pair in msgpack.unpackb(payload)] == [[n, "x" * 100] for n in range(20)]
    # A pair that is larger has a frame of its own.
    assert len(Decoder().feed(encode_batches(pairs, 10))) == 20


def request(max_tokens: int, **stop: Any) -> GenerateRequest:
    return {"token_ids": [3, 8], "stop_conditions": {"max_tokens": max_tokens, **stop}}  # type: ignore[typeddict-item]


class WaitsTwice(BatchEngine[list[None]]):
    """Has nothing to compute in its first two steps."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[WaitsTwice, WorkerConfig]:
        return cls(), WorkerConfig()

    async def cleanup(self) -> None:
        pass

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="waits", context_length=8)

    def begin(self, request: GenerateRequest, context: Context) -> list[None]:
        return [None, None]

    def step(self, batch: list[list[None]]) -> list[StepOutput]:
        return [waits.pop() if waits else GenerateChunk(token_ids=[7], finish_reason="length") for waits in batch]


# Every step takes less than the first `idle_s`, even on the slowest machine, and no step less than the second.
@pytest.mark.parametrize(("idle_s", "paused", "reported"), [(60.0, 2, 1), (0.0, 0, 3)])
def test_steps_that_make_nothing_at_once_leave_the_processor_to_others_and_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, paused: int, reported: int
) -> None:
    pauses: list[float] = []
    events: list[Event] = []

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return super().wait()
            pauses.append(timeout)
            return False

    monkeypatch.setattr("genset._stepper.threading.Event", Wake)
    monkeypatch.setattr(_stepper, "_IDLE_S", idle_s)
    monkeypatch.setattr(engine, "STEP_INTERVAL_S", 0.0)
    written = queue.SimpleQueue[bytes]()
    streams = {1: Stream(1, {"endpoint": "generate", "credit": 8})}
    waits = WaitsTwice()
    waits.worker = WorkerHandle(events.append)
    stepper = Stepper(waits, streams, written.put, 1 << 16, 1 << 16)
    stepper.submit(streams[1], body("m", 1))
    assert written.get(timeout=60)
    stepper.close()
    assert pauses == [idle_s] * paused
    assert events == ["step"] * reported


class Kept:
    """What a step holds, such as the device's memory."""


class Full(WaitsTwice):
    """Has no memory for any step."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Kept]] = []

    def step(self, batch: list[list[None]]) -> list[StepOutput]:
        kept = Kept()
        self.held.append(weakref.ref(kept))
        raise Overloaded("there is no memory")


def test_a_step_that_failed_holds_nothing() -> None:
    written = queue.SimpleQueue[bytes]()
    streams = {1: Stream(1, {"endpoint": "generate", "credit": 8})}
    full = Full()
    stepper = Stepper(full, streams, written.put, 1 << 16, 1 << 16)
    gc.disable()
    try:
        stepper.submit(streams[1], body("m", 1))
        assert written.get(timeout=60)
        assert [kept() for kept in full.held] == [None]
    finally:
        gc.enable()
        stepper.close()


def test_many_steps_are_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    now_s = 7.0
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now_s))
    worker = WorkerHandle(events.append)
    for now_s in (7.0, 7.1, 7.2, 8.0, 8.001):
        worker.report_step()
    assert events == ["step", "step"]


def test_the_sample_answers_by_itself() -> None:
    async def test() -> None:
        engine = BatchingEngine()
        with pytest.raises(EngineShutdown):
            await collect(engine, request(1))
        await engine.start(worker_id=0)
        chunks = await collect(engine, request(4))
        assert [token for chunk in chunks for token in chunk["token_ids"]] == [9, 10, 11, 12]
        assert [chunk.get("finish_reason") for chunk in chunks] == [None, None, None, "length"]
        chunks = await collect(engine, request(8, eos_token_ids=[11]))
        assert (len(chunks), chunks[-1]["finish_reason"], chunks[-1]["stop_token"]) == (3, "stop", 11)
        assert len(await collect(engine, request(8, eos_token_ids=[11], min_tokens=5))) == 8
        chunks = await collect(engine, request(1000), stop_after=2)
        assert (len(chunks), chunks[-1]["finish_reason"]) == (3, "cancelled")
        await engine.cleanup()

    asyncio.run(test())


def test_the_sample_runs_as_many_as_it_says_and_the_others_wait() -> None:
    worker = Worker(BATCHING, "--max-num-seqs", "2")
    worker.requests(range(2, 7), "generate", {"model": "m", "input": {"tokens": [7]}, "stop": {"max_tokens": 20}})
    # The 20th token is in the terminal item.
    for stream in range(2, 7):
        assert tokens(worker.answer(stream)) == list(range(8, 27))
    worker.kill()
