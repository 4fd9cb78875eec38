"""An engine's process, with a stub for the worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from genset._frames import Kind, encode, pack
from genset.backend.run import NAME_ONLY_VARIABLE
from worker_stub import HELLO, WorkerStub

SAMPLE = str(Path(__file__).parent.parent / "sample_engine.py")
STUB = str(Path(__file__).parent / "worker_stub.py")
LEAVING = str(Path(__file__).parent / "leaving_engine.py")
GRIP = str(Path(__file__).parent / "grip_engine.py")
EVENTS = str(Path(__file__).parent / "events_engine.py")
NAME = str(Path(__file__).parent / "name_engine.py")
ORPHAN = str(Path(__file__).parent / "orphan_engine.py")


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return not stat.rpartition(")")[2].lstrip().startswith("Z")


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def pids_of_killed_worker(*command: str, lines: int) -> dict[str, int]:
    """Starts a worker with an engine, reads the ids they print, and kills the worker with SIGKILL."""
    worker = subprocess.Popen(
        [sys.executable, STUB, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    printed = (worker.stdout.readline().split() for _ in range(lines))
    pids = {what: int(pid) for what, pid in printed}
    assert all(is_alive(pid) for pid in pids.values())
    worker.kill()
    worker.wait()
    return pids


def test_the_engine_ends_when_its_worker_is_killed() -> None:
    assert_ends(pids_of_killed_worker(SAMPLE, lines=1)["engine"])


def test_an_engine_whose_loop_is_blocked_ends_too_with_what_it_started() -> None:
    pids = pids_of_killed_worker(ORPHAN, lines=2)
    assert_ends(pids["engine"])
    assert_ends(pids["started"])


def test_an_engine_that_holds_the_gil_ends_too() -> None:
    pids = pids_of_killed_worker(GRIP, lines=2)
    assert_ends(pids["engine"])
    # The watchdog ends together with the group it killed.
    assert_ends(pids["watchdog"])


def test_requests_of_one_turn_share_a_frame_and_the_process_exits_with_0() -> None:
    worker = WorkerStub(SAMPLE)
    worker.start()
    body = {"model": "m", "input": {"tokens": [1]}, "stop": {"max_tokens": 5}}
    worker.requests(range(2, 10), "generate", body)
    ended: set[int] = set()
    frames = 0
    while len(ended) < 8:
        kind, stream, payload = worker.frame()
        assert (kind, stream) == (Kind.ITEM, 0)
        frames += 1
        ended |= {stream for stream, item in msgpack.unpackb(payload) if item is None}
    # 8 requests of 5 tokens each, and their ends.
    assert frames <= 10
    worker.request(20, "cleanup", None)
    assert worker.frame()[0] == Kind.ITEM
    worker.send(Kind.GO_AWAY, 0, {"code": "shutdown", "reason": "done"})
    worker.sock.close()
    assert worker.process.wait(30) == 0


def test_an_endpoint_nobody_knows_is_not_found() -> None:
    worker = WorkerStub(SAMPLE)
    worker.start()
    worker.request(2, "dance", None)
    kind, stream, payload = worker.frame()
    assert (kind, stream, msgpack.unpackb(payload)["kind"]) == (Kind.ERROR, 2, "not_found")
    worker.kill()


def test_a_worker_of_another_version_is_refused_in_words() -> None:
    worker = WorkerStub(SAMPLE)
    worker.send(Kind.HELLO, 0, {**HELLO, "version": 9, "min_version": 8})
    assert worker.frame()[0] == Kind.HELLO
    kind, _, payload = worker.frame()
    assert kind == Kind.GO_AWAY
    assert msgpack.unpackb(payload)["code"] == "version"
    assert worker.process.wait(30) != 0


def test_an_engine_that_has_only_a_name_needs_files_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "only-a-name is only a name, and the engine needs a tokenizer: give WorkerConfig a model_path"
    for has_files, kind, problem in [(False, "text", None), (True, "tokens", None), (False, "tokens", wanted)]:
        if has_files:
            monkeypatch.delenv(NAME_ONLY_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(NAME_ONLY_VARIABLE, "1")
        worker = WorkerStub(NAME, kind)
        if problem is None:
            worker.start()
        else:
            worker.send(Kind.HELLO, 0, HELLO)
            worker.request(1, "start", {"worker_id": 1, "role": "aggregated"})
            frames = [worker.frame(), worker.frame()]
            assert [frame[0] for frame in frames] == [Kind.HELLO, Kind.ERROR]
            error = msgpack.unpackb(frames[1][2])
            assert error["kind"] == "invalid_argument" and problem in error["message"], error
        worker.kill()


def events(count: int, **operation: Any) -> list[Any]:
    """The first `count` events that an engine published in a control operation."""
    worker = WorkerStub(EVENTS)
    worker.start()
    worker.request(2, "control", operation)
    worker.request(3, "events", None)
    came: list[Any] = []
    while len(came) < count:
        kind, _, payload = worker.frame()
        assert kind == Kind.ITEM, payload
        came += [item for stream, item in msgpack.unpackb(payload) if stream == 3]
    worker.kill()
    return came[:count]


def test_events_are_sent_as_they_were_published() -> None:
    assert events(1, op="store") == [{"kv": {"stored": {"parent": None, "blocks": [1, 2]}}}]


def test_a_death_is_told_however_far_behind_the_worker_is() -> None:
    cleared, dead, load = events(3, op="die", loads=5000)
    assert (cleared, dead) == ({"kv": "cleared"}, {"dead": {"reason": "the device is lost"}})
    assert load == {"load": {"kv_used_blocks": 4095}}


def test_a_request_that_is_cancelled_before_its_turn_does_not_reach_the_engine() -> None:
    worker = WorkerStub(LEAVING)
    worker.start()
    head = {"endpoint": "generate", "instance": 0, "credit": 64, "id": "r-2"}
    request = encode(Kind.REQUEST, 2, pack(head) + pack({"model": "m", "input": {"tokens": [1]}}))
    # The engine sees both in one turn of its loop, as after a turn that took long.
    worker.sock.sendall(request + encode(Kind.CANCEL, 2, pack({"reason": "client"})))
    kind, _, payload = worker.frame()
    assert (kind, msgpack.unpackb(payload)) == (Kind.ITEM, [[2, None]])
    worker.request(3, "control", {"op": "order"})
    assert msgpack.unpackb(worker.frame()[2])[0] == [3, {"result": "profile", "location": ""}]
    worker.kill()


def test_cleanup_comes_after_the_last_request() -> None:
    worker = WorkerStub(LEAVING)
    worker.start()
    came: dict[int, list[Any]] = {2: [], 3: [], 4: []}

    def read() -> None:
        kind, _, payload = worker.frame()
        assert kind == Kind.ITEM, payload
        for stream, item in msgpack.unpackb(payload):
            came[stream].append(item)

    worker.request(2, "generate", {"model": "m", "input": {"tokens": [1]}})
    while not came[2]:
        read()
    # The worker sends these in one go when a drain has taken too long.
    head = {"endpoint": "cleanup", "instance": 0, "credit": 64, "id": "r-3"}
    cleanup = encode(Kind.REQUEST, 3, pack(head) + pack(None))
    worker.sock.sendall(encode(Kind.CANCEL, 2, pack({"reason": "shutdown"})) + cleanup)
    while not came[3]:
        read()
    worker.request(4, "control", {"op": "order"})
    while not came[4]:
        read()
    assert came[4][0]["location"] == "ended cleanup"
    worker.kill()
