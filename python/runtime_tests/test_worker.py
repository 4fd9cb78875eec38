"""Engines inside a program: `genset.backend.Worker`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from conftest import Program, run, until
from test_llm import MODEL, ask, frontend

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig, exceptions
from genset.backend import Worker
from genset.runtime import Runtime


class Engine(LLMEngine):
    """Repeats a token, and notes what it is asked."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.seen: list[str] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        self.seen.append("start")
        if self.problem is not None:
            raise self.problem
        return EngineConfig(model="mine", kv_events=True, kv_cache_block_size=16)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        seed = request["sampling_options"].get("seed")
        if seed is not None:
            self.seen.append(f"seed {seed}")
        for _ in range(request["stop_conditions"].get("max_tokens") or 3):
            if context.is_stopped():
                yield {"token_ids": [], "finish_reason": "cancelled"}
                return
            yield {"token_ids": [40]}
            await asyncio.sleep(0.01)
        yield {"token_ids": [], "finish_reason": "max_tokens"}

    async def abort(self, context: Context) -> None:
        self.seen.append("abort")

    async def drain(self) -> None:
        self.seen.append("drain")

    async def cleanup(self) -> None:
        self.seen.append("cleanup")


CONFIG = WorkerConfig(namespace="py", model_name="mine", model_path=str(MODEL), user_data={"team": "a"}, migration_limit=0)


def test_an_engine_serves_is_told_of_leavers_and_drains(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    engine = Engine()

    def leave() -> None:
        body = json.dumps({"model": "mine", "prompt": "a", "max_tokens": 2000, "stream": True}).encode()
        request = urllib.request.Request(address + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            response.readline()

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())

            def is_listed() -> bool:
                if running.done():
                    running.result()
                return "mine" in [each["id"] for each in ask(address, "/v1/models")["data"]]

            while not await asyncio.to_thread(is_listed):
                await asyncio.sleep(0.05)
            body = {"model": "mine", "prompt": "a", "max_tokens": 2, "seed": 7}
            answer = await asyncio.to_thread(ask, address, "/v1/completions", body)
            assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)
            assert engine.seen == ["start", "seed 7"]
            engine.worker.publish_kv_stored([11, 12])
            events = await other.endpoint("py.backend.kv_events").client()
            first = await anext(events.random(None))
            assert sorted(block["hash"] for block in first["snapshot"]["blocks"]) == [11, 12]
            await asyncio.to_thread(leave)
            await until(lambda: "abort" in engine.seen, "the engine is told")
            await runtime.shutdown()
            await running

    run(main())
    assert engine.seen == ["start", "seed 7", "abort", "drain", "cleanup"]


def test_an_engine_that_dies_or_does_not_start_is_cleaned_up() -> None:
    async def main() -> None:
        broken = Engine(exceptions.EngineShutdown("no weights"))
        async with await Runtime.connect() as runtime:
            with pytest.raises(exceptions.EngineShutdown, match="no weights"):
                await Worker(broken, CONFIG, runtime=runtime).run()
        assert broken.seen == ["start", "cleanup"]
        dying = Engine()
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            running = asyncio.ensure_future(Worker(dying, CONFIG, runtime=runtime).run())
            client = await other.endpoint("py.backend.generate").client()
            await client.wait_for_instances(120)
            dying.worker.report_dead("the device is lost")
            with pytest.raises(exceptions.EngineError, match="the device is lost"):
                await running
        assert dying.seen[-1] == "cleanup"

    run(main())


def test_what_needs_a_process_of_its_own_is_refused() -> None:
    with pytest.raises(exceptions.InvalidArgument, match="are for genset.backend.run"):
        Worker(Engine(), WorkerConfig(engine_restarts=1))


def test_the_sample_engine_passes_the_conformance_kit(start: Callable[..., Program], start_genset: Callable[..., Program]) -> None:
    worker = start("engine.py", str(MODEL))
    worker.wait_for("serves the model sample")
    kit = start_genset("conform", "run", "--endpoint", "dyn://py.backend.generate")
    assert kit.exit_code() == 0, "\n".join(kit.lines)
    assert worker.stop() == 0
    assert worker.lines[-1] == "left"
