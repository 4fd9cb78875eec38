"""Whole programs: signals, deaths and forks."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, Program, run, until
from test_llm import MODEL, ask, frontend, wait_for_model

from genset import exceptions
from genset.runtime import Runtime

NAME_ENGINE = str(Path(__file__).parents[1] / "tests/name_engine.py")
WIRE_CLIENT = Path(__file__).parents[2] / "examples/python-wire-client"


@pytest.fixture
def counter(start: Callable[..., Program]) -> Program:
    program = start("counter.py")
    program.wait_for("ready")
    return program


@contextlib.asynccontextmanager
async def counting(to: int = 20) -> AsyncIterator[AsyncIterator[Any]]:
    """A request of the counter, whose first item has come."""
    async with await Runtime.connect() as runtime:
        client = await runtime.endpoint("demo.counter.count").client()
        stream = client.random({"to": to, "pause": 0.05})
        assert (await anext(stream)).number == 0
        yield stream


def assert_grace_left(program: Program) -> None:
    """Asserts that a drained program's requests did not use up the whole grace."""
    assert not any("were cut short after" in line for line in program.lines), program.lines


def test_sigterm_lets_the_request_under_way_end(counter: Program) -> None:
    async def main() -> None:
        async with counting() as stream:
            counter.process.send_signal(signal.SIGTERM)
            assert [item.number async for item in stream] == list(range(1, 20))

    run(main())
    assert counter.exit_code() == 0
    assert counter.lines[-1] == "left", counter.lines


def test_a_drain_without_discovery_lets_the_request_under_way_end(counter: Program, fleet: Path) -> None:
    async def main() -> None:
        async with counting() as stream:
            fleet.rename(fleet.with_name("away"))
            # A missing directory would be created again.
            fleet.touch()
            counter.process.send_signal(signal.SIGTERM)
            assert [item.number async for item in stream] == list(range(1, 20))

    run(main())
    assert counter.exit_code() == 0
    assert counter.lines[-1] == "left", counter.lines
    assert any("stays on the list until its lease is over" in line for line in counter.lines), counter.lines


@pytest.mark.parametrize("what", ["engine", "service", "function"])
def test_what_comes_after_a_drain_is_let_end(what: str, start: Callable[..., Program]) -> None:
    program = start("finisher.py", what, str(MODEL))
    program.wait_for("serves the model" if what == "engine" else "served by")
    assert program.stop() == 0
    assert "finished" in program.lines, program.lines


def test_a_worker_told_to_leave_tells_its_clients(counter: Program, fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This client reads discovery once. Later changes reach it only through the worker.
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(WIRE_CLIENT))
    discovery, wire = importlib.import_module("genset_discovery"), importlib.import_module("genset_wire")

    async def main() -> None:
        [instance] = discovery.list_instances(fleet)
        async with await wire.Connection.open(instance.host, instance.port, peer_timeout=60) as connection:
            async with await connection.call(instance.endpoint, instance.id, {"to": 20, "pause": 0.05}) as stream:
                assert (await anext(stream))["number"] == 0
                assert connection.leaving == set()
                counter.process.send_signal(signal.SIGTERM)
                assert [item["number"] async for item in stream] == list(range(1, 20))
                await until(lambda: connection.leaving == {instance.id}, "it says that it leaves")

    run(main())
    assert counter.exit_code() == 0


def test_a_second_signal_ends_at_once(counter: Program) -> None:
    async def main() -> None:
        async with counting(1_000_000) as stream:
            counter.process.send_signal(signal.SIGTERM)
            counter.wait_for("draining")
            counter.process.send_signal(signal.SIGINT)
            with pytest.raises(exceptions.EngineShutdown):
                async for _ in stream:
                    pass

    run(main())
    assert counter.exit_code() == 0
    assert_grace_left(counter)


async def test_a_worker_that_is_killed_ends_its_answers_with_an_error(counter: Program) -> None:
    async with counting(1_000_000) as stream:
        counter.process.kill()
        with pytest.raises((exceptions.Disconnected, exceptions.CannotConnect)):
            async for _ in stream:
                pass


def test_a_caller_that_is_killed_stops_the_handler(counter: Program, start: Callable[..., Program]) -> None:
    caller = start("caller.py")
    caller.wait_for("number 3")
    caller.stop(signal.SIGKILL)
    # Its request would keep the worker running for the whole grace.
    assert counter.stop() == 0
    assert_grace_left(counter)


def test_ctrl_c_ends_a_script_that_only_calls(counter: Program, start: Callable[..., Program]) -> None:
    caller = start("caller.py")
    caller.wait_for("number 3")
    assert caller.stop(signal.SIGINT) == -signal.SIGINT
    assert "KeyboardInterrupt" in caller.lines[-1]
    assert counter.stop() == 0
    assert_grace_left(counter)


def test_sigterm_cancels_a_worker_that_only_calls(counter: Program, start: Callable[..., Program]) -> None:
    caller = start("caller.py", "worker")
    caller.wait_for("number 3")
    assert caller.stop() == 0, caller.lines
    assert "cancelled" in caller.lines
    assert counter.stop() == 0
    assert_grace_left(counter)


def test_use_after_fork_says_what_to_do(start: Callable[..., Any]) -> None:
    forker = start("forker.py")
    forker.wait_for("connected before os.fork()")
    assert forker.exit_code() == 0


def test_an_engine_of_text_runs_with_a_name_alone_and_one_of_tokens_says_what_it_needs(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    worker = Program(sys.executable, NAME_ENGINE, "chat")
    try:
        wait_for_model(address, "only-a-name", worker)
        body = {"model": "only-a-name", "messages": [{"role": "user", "content": "hi"}]}
        assert ask(address, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "hello"
        assert worker.stop() == 0
    finally:
        if worker.process.poll() is None:
            worker.process.kill()
    refused = Program(sys.executable, NAME_ENGINE, "tokens")
    assert refused.exit_code() == 1
    assert any("only-a-name is only a name, and the engine needs a tokenizer" in line for line in refused.lines), refused.lines


def test_frontend_and_sample_run_as_modules() -> None:
    server = Program(sys.executable, "-m", "genset.frontend", "--http-port", "0")
    # A name that is neither a path nor a name of the Hub: the tokenizer is the built-in model's.
    sample = Program(sys.executable, "-m", "genset.sample_main", "--model-name", "test-model")
    try:
        line = server.wait_for("http://127.0.0.1:")
        address = line[line.index("http://") :].split()[0].rstrip("/,")
        sample.wait_for("the tokenizer is the built-in model's")
        wait_for_model(address, "test-model", sample)
        body = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert ask(address, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 3
        assert sample.stop() == 0 and server.stop() == 0
    finally:
        for program in (server, sample):
            if program.process.poll() is None:
                program.process.kill()


def test_the_wheel_brings_dynamo_run() -> None:
    words = [Path(sysconfig.get_path("scripts")) / "dynamo-run", "in=stdin", "out=echo_full"]
    ran = subprocess.run(words, input="hello there", capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ran.returncode == 0 and "hello there" in ran.stdout, ran.stderr
