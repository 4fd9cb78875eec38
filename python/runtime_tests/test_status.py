"""The status port of a program: `/live`, `/ready`, `/health`, `/metrics` and `/control`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from conftest import Program, run, until
from test_llm import MODEL, letters
from test_worker import CONFIG, Controlled, Engine

from genset import EngineConfig, exceptions
from genset.backend import Worker
from genset.llm import MetricsPublisher, ModelType, register_llm
from genset.metrics import Metrics
from genset.runtime import Runtime
from genset.types import Metric


def request(port: int, path: str, body: str | None = None) -> tuple[int, str]:
    """Status and body; a body makes it a POST."""
    data = None if body is None else body.encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def get(port: int, path: str, body: str | None = None) -> tuple[int, str]:
    """The same, without blocking this loop's servers."""
    return await asyncio.to_thread(request, port, path, body)


async def until_status(port: int, status: int, *serving: asyncio.Future[Any]) -> None:
    """Waits until `/ready` has this status."""
    while (await get(port, "/ready"))[0] != status:
        for each in serving:
            if each.done():
                each.result()
        await asyncio.sleep(0.02)


async def serve_model(runtime: Runtime, component: str, handler: Any = letters) -> asyncio.Task[None]:
    endpoint = runtime.endpoint(f"py.{component}.generate")
    await register_llm(ModelType.Backend, endpoint, str(MODEL), component)
    return asyncio.ensure_future(endpoint.serve_endpoint(handler))


async def cancelled(serving: asyncio.Future[None]) -> None:
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def echo(request: Any) -> Any:
    return request


async def test_a_program_is_ready_while_all_that_it_serves_is_listed() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def late(request: Any) -> AsyncIterator[Any]:
        asked.set()
        await may_answer.wait()
        yield {"token_ids": [40], "finish_reason": "stop"}

    async with await Runtime.connect(status_port=0) as runtime:
        port = await runtime.open_status()
        assert port and await runtime.open_status() == port
        assert await get(port, "/live") == (200, "live\n")
        assert await get(port, "/ready") == (503, "not ready\n")
        first = asyncio.ensure_future(runtime.endpoint("py.text.echo").serve_endpoint(echo))
        await until_status(port, 200, first)
        status, health = await get(port, "/health")
        assert (status, json.loads(health)) == (200, {"status": "ready"})
        # Its canary is not answered yet, so it is not listed.
        second = await serve_model(runtime, "late", late)
        await asked.wait()
        assert (await get(port, "/ready"))[0] == 503
        may_answer.set()
        await until_status(port, 200, first, second)
        await cancelled(first)
        assert (await get(port, "/ready"))[0] == 200
        await cancelled(second)
        await until_status(port, 503)
        assert (await get(port, "/live"))[0] == 200
    with pytest.raises(OSError):
        await get(port, "/live")


def test_the_model_that_is_served_is_shown_and_asked() -> None:
    engine = Controlled()

    async def main() -> None:
        async with await Runtime.connect(status_port=0) as runtime:
            port = await runtime.open_status()
            assert port
            status, refused = await get(port, "/control/wake", "")
            assert (status, json.loads(refused)["error"]["message"]) == (404, "this process serves no model")
            running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())
            await until_status(port, 200, running)
            health = json.loads((await get(port, "/health"))[1])
            shown = {name: health[name] for name in ("state", "instance_id", "endpoint", "model")}
            assert shown == {
                "state": "serving",
                "instance_id": f"{runtime.worker_id:014x}",
                "endpoint": "py.backend.generate",
                "model": "mine",
            }
            assert json.loads((await get(port, "/control"))[1])["operations"]
            status, reply = await get(port, "/control/sleep", '{"level": "weights"}')
            assert (status, json.loads(reply)) == (200, {"result": "done"})
            assert "does not support wake" in (await get(port, "/control/wake", ""))[1]
            # With two models, none is the process's own.
            second = await serve_model(runtime, "other")
            # Until the second is known, the process is as ready as the first.
            while json.loads((await get(port, "/health"))[1]) != {"status": "ready"}:
                assert not second.done()
                await asyncio.sleep(0.02)
            assert "several" in (await get(port, "/control/sleep", ""))[1]
            await runtime.shutdown()
            await asyncio.gather(running, second)

    run(main())
    assert [each for each in engine.seen if each.startswith("sleep")] == ["sleep {'level': 'weights'}"]


async def test_each_model_has_its_metrics_for_as_long_as_it_is_served() -> None:
    async with await Runtime.connect(status_port=0) as runtime:
        port = await runtime.open_status()
        assert port
        first, second = [await serve_model(runtime, component) for component in ("one", "two")]
        await until_status(port, 200, first, second)
        _, text = await get(port, "/metrics")
        for component in ("one", "two"):
            assert f'genset_worker_ready{{genset_endpoint="py.{component}.generate"}} 1' in text
        heads = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(heads) == len(set(heads)) and text.endswith("# EOF\n")
        await cancelled(second)

        async def shown() -> str:
            return (await get(port, "/metrics"))[1]

        while "py.two.generate" in await shown():
            await asyncio.sleep(0.02)
        assert "py.one.generate" in await shown()
        await runtime.shutdown()
        await first


class Counting(Engine):
    """Publishes metrics, some before it is listed, and some invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics()
        self.steps = self.metrics.counter("my_steps_total", "Steps\nof the scheduler", rank=0)
        self.step_s = self.metrics.histogram("my_step_seconds", "Time of a step", [0.1])

    async def start(self, worker_id: int) -> EngineConfig:
        gauge: Metric = {"name": "my_slots", "kind": "gauge", "value": 1.0}
        self.worker.publish_metrics([gauge])
        gauge["value"] = 8.0
        self.worker.publish_metrics([gauge])
        gauge["value"] = 9.0
        # An invalid metric does not affect the others.
        self.worker.publish_metrics([{"name": "my_odd", "kind": "speed"}])
        return await super().start(worker_id)


async def test_metrics_that_an_engine_publishes_are_shown_and_bounded() -> None:
    engine = Counting()

    async with await Runtime.connect(status_port=0) as runtime:
        port = await runtime.open_status()
        assert port
        running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())
        await until_status(port, 200, running)
        own = 'genset_endpoint="py.backend.generate"'

        async def shown() -> str:
            return (await get(port, "/metrics"))[1]

        while "my_slots" not in (text := await shown()):
            await asyncio.sleep(0.02)
        assert f"my_slots{{{own}}} 8.0" in text and "my_odd" not in text
        engine.steps.add(3)
        engine.step_s.observe(0.05)
        await asyncio.to_thread(engine.worker.publish_metrics, engine.metrics.samples())
        text = await shown()
        assert f'my_steps_total{{{own},rank="0"}} 3.0' in text
        assert f"my_step_seconds_count{{{own}}} 1" in text
        assert "# HELP my_steps Steps\\nof the scheduler" in text
        hostile: list[Metric] = [
            {"name": "no name", "kind": "gauge", "value": 1.0},
            {"name": "forged", "kind": "gauge", "value": 1.0, "labels": {"genset_endpoint": "other"}},
            {"name": "said", "kind": "gauge", "value": 1.0, "labels": {"text": 'a"} 1\nforged 1\n# EOF\n'}},
            {"name": "long", "kind": "gauge", "value": 1.0, "help": "x" * 5000},
        ]
        engine.worker.publish_metrics(hostile)
        many: list[Metric] = [
            {"name": "many", "kind": "gauge", "value": 1.0, "labels": {"number": str(number)}} for number in range(5000)
        ]
        engine.worker.publish_metrics(many)
        lines = (await shown()).splitlines()
        starts = ("no name", "forged", "long")
        assert not [line for line in lines if line.startswith(starts)]
        assert lines.count("# EOF") == 1 and lines[-1] == "# EOF"
        assert 4000 < len([line for line in lines if line.startswith("many{")]) < 4096
        with pytest.raises(ValueError, match="name"):
            engine.worker.publish_metrics([{"kind": "gauge"}])
        await runtime.shutdown()
        await running
        # No engine is served any more.
        engine.worker.publish_metrics(engine.metrics.samples())


async def test_the_metrics_of_a_registered_model_are_shown() -> None:
    async with await Runtime.connect(status_port=0) as runtime:
        port = await runtime.open_status()
        assert port
        endpoint = runtime.endpoint("py.one.generate")
        with pytest.raises(exceptions.InvalidArgument, match="call register_llm first"):
            MetricsPublisher(endpoint).publish([])
        serving = await serve_model(runtime, "one")
        await until_status(port, 200, serving)
        metrics = Metrics()
        metrics.gauge("my_queue", "Requests that wait").set(2)
        MetricsPublisher(endpoint).publish(metrics.samples())
        assert 'my_queue{genset_endpoint="py.one.generate"} 2' in (await get(port, "/metrics"))[1]
        await runtime.shutdown()
        await serving


async def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(exceptions.InvalidArgument, match=f"cannot listen on 127.0.0.1:{port}"):
            await Runtime.connect(status_port=port)
        monkeypatch.setenv("GENSET_STATUS_PORT", str(port))
        async with await Runtime.connect() as runtime:
            # A process that only calls leaves the port to the one it is for.
            await runtime.endpoint("py.text.echo").client()
            with pytest.raises(exceptions.InvalidArgument, match=f"cannot listen on 127.0.0.1:{port}"):
                await runtime.endpoint("py.text.echo").serve_endpoint(echo)
            # The failure is not permanent.
            taken.close()
            assert await runtime.open_status() == port
    with pytest.raises(ValueError, match="status-port"):
        await Runtime.connect(status_port=70000)


async def test_the_second_runtime_of_a_process_is_told_to_share_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with await Runtime.connect(status_port=port):
        with pytest.raises(exceptions.InvalidArgument, match=f"cannot listen on 127.0.0.1:{port}: .*share it, as in Worker"):
            await Runtime.connect(status_port=port)


def test_a_program_opens_the_port_of_its_environment(
    start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENSET_STATUS_PORT", "0")
    counter = start("counter.py")
    port = int(counter.wait_for("status on http://127.0.0.1:").rsplit(":", 1)[1])
    counter.wait_for("ready")
    assert request(port, "/ready") == (200, "ready\n")
    assert "genset_wire_" in request(port, "/metrics")[1]

    async def main() -> None:
        async with await Runtime.connect() as runtime:
            client = await runtime.endpoint("demo.counter.count").client()
            stream = client.random({"to": 10_000, "pause": 0.05})
            await anext(stream)
            counter.process.send_signal(signal.SIGTERM)
            # While draining it answers, but is not ready.
            await until(lambda: request(port, "/ready")[0] == 503, "the program drains")
            assert request(port, "/live")[0] == 200
            await stream.aclose()

    monkeypatch.delenv("GENSET_STATUS_PORT")
    run(main())
    assert counter.exit_code() == 0
