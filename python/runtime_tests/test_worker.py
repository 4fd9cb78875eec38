"""Engines inside a program: `genset.backend.Worker`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from conftest import LONG_S, Program, run, until
from test_llm import MODEL, answered_apart, ask, frontend, leave, until_known

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig, exceptions
from genset.backend import Worker
from genset.runtime import Runtime


class Engine(LLMEngine):
    """Repeats a token, and records its calls."""

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

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())
            await until_known(address, "mine", running)
            body = {"model": "mine", "prompt": "a", "max_tokens": 2, "seed": 7}
            answer = await asyncio.to_thread(ask, address, "/v1/completions", body)
            assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)
            assert engine.seen == ["start", "seed 7"]
            engine.worker.publish_kv_stored([11, 12])
            # The worker knows this event: an unknown one raises.
            engine.worker.report_step()
            events = await other.endpoint("py.backend.kv_events").client()
            first = await anext(events.random(None))
            assert sorted(block["hash"] for block in first["snapshot"]["blocks"]) == [11, 12]
            await asyncio.to_thread(leave, address, "mine")
            await until(lambda: "abort" in engine.seen, "the engine is told")
            await runtime.shutdown()
            await running

    run(main())
    assert engine.seen == ["start", "seed 7", "abort", "drain", "cleanup"]


async def test_an_engine_that_dies_or_does_not_start_is_cleaned_up() -> None:
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
        assert client.user_data() == {runtime.worker_id: {"team": "a"}}
        dying.worker.report_dead("the device is lost")
        with pytest.raises(exceptions.EngineError, match="the device is lost"):
            await running
    assert dying.seen[-1] == "cleanup"


class Sloppy(Engine):
    """Cannot clean up what did not start."""

    async def cleanup(self) -> None:
        await super().cleanup()
        raise AttributeError("there is no device")


async def test_an_error_of_cleanup_does_not_replace_that_of_start(caplog: pytest.LogCaptureFixture) -> None:
    sloppy = Sloppy(exceptions.EngineShutdown("no weights"))
    async with await Runtime.connect() as runtime:
        with pytest.raises(exceptions.EngineShutdown, match="no weights"):
            await Worker(sloppy, CONFIG, runtime=runtime).run()
    assert sloppy.seen == ["start", "cleanup"]
    assert "there is no device" in caplog.text


class Mute(Engine):
    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        await asyncio.Event().wait()
        yield {"token_ids": [], "finish_reason": "stop"}


async def test_the_limits_of_a_config_are_the_worker_s() -> None:
    async with await Runtime.connect() as runtime:
        config = dataclasses.replace(CONFIG, canary_timeout=0.25)
        with pytest.raises(exceptions.DeadlineExceeded, match="the canary failed: .*within 0.25 s"):
            await Worker(Mute(), config, runtime=runtime).run()


class Stillborn(Engine):
    """Dies during its start, as a thread of its own notices, while `start` would continue."""

    async def start(self, worker_id: int) -> EngineConfig:
        self.seen.append("start")
        await asyncio.to_thread(self.worker.report_dead, "the device is lost")
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_a_death_before_the_worker_is_listed_ends_it_at_once() -> None:
    engine = Stillborn()

    async def main() -> None:
        async with await Runtime.connect() as runtime:
            serving = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())
            with pytest.raises(exceptions.Disconnected, match="reported itself dead: the device is lost"):
                await asyncio.wait_for(serving, LONG_S)

    run(main())
    assert engine.seen == ["start", "cleanup"]


class Eager(Engine):
    """Publishes before it is listed, and never again."""

    async def start(self, worker_id: int) -> EngineConfig:
        for blocks, parent in (([11, 12], None), ([13], 12)):
            self.worker.publish_kv_stored(blocks, parent)
        self.worker.publish_kv_removed([13])
        return await super().start(worker_id)


async def test_kv_events_that_an_engine_publishes_before_it_is_listed_arrive() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        running = asyncio.ensure_future(Worker(Eager(), CONFIG, runtime=runtime).run())
        events = await other.endpoint("py.backend.kv_events").client()
        await events.wait_for_instances(120)

        async def blocks() -> list[int]:
            first = await anext(events.random(None))
            return sorted(block["hash"] for block in first["snapshot"]["blocks"])

        # It may be listed a moment before.
        while not (stored := await blocks()):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.02)
        while (stored := await blocks()) == [11, 12, 13]:
            await asyncio.sleep(0.02)
        assert stored == [11, 12]
        await runtime.shutdown()
        await running


class Stubborn(Engine):
    """Answers until it is cancelled."""

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if request["stop_conditions"].get("max_tokens") == 1:
            yield {"token_ids": [40], "finish_reason": "length"}
            return
        try:
            yield {"token_ids": [40]}
            await asyncio.Event().wait()
        finally:
            self.seen.append("ended")


def test_cleanup_comes_after_the_last_request() -> None:
    engine = Stubborn()

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime, grace=0.0).run())
            client = await other.endpoint("py.backend.generate").client()
            await until(lambda: running.done() or client.instance_ids(), "its canary is answered")
            answer = client.generate({"token_ids": [1], "stop_conditions": {"max_tokens": 5}})
            await anext(answer)
            await runtime.shutdown()
            await running

    run(main())
    assert engine.seen == ["start", "drain", "abort", "ended", "cleanup"]


class Controlled(Engine):
    """Can sleep, and has one adapter."""

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        self.seen.append(f"{op} {arguments}")
        if op == "sleep":
            return None
        if op == "list_adapters":
            return {"adapters": [{"name": "legal", "source": "adapters/legal"}]}
        return await super().control(op, arguments)


def test_operators_reach_control() -> None:
    engine = Controlled()

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            running = asyncio.ensure_future(Worker(engine, CONFIG, runtime=runtime).run())
            operator = await other.endpoint("py.backend.control").client()
            await operator.wait_for_instances(120)
            assert await operator.random({"op": "sleep", "level": "weights"}) == {"result": "done"}
            listed = await operator.random({"op": "list_adapters"})
            assert listed == {"result": "adapters", "adapters": [{"name": "legal", "source": "adapters/legal"}]}
            with pytest.raises(exceptions.Unsupported, match="does not support wake"):
                await operator.random({"op": "wake"})
            await runtime.shutdown()
            await running

    run(main())
    asked = [each for each in engine.seen if each not in ("start", "drain", "cleanup")]
    assert asked == ["sleep {'level': 'weights'}", "list_adapters {}", "wake {}"]


class Scorer(Engine):
    """Scores a pair by its length, and sends the end in a separate chunk."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="mine", sampling=(), inputs=("score",))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        yield {"scores": [float(len(pair["token_ids"])) for pair in request["score"]]}
        yield {"finish_reason": "stop"}


async def test_scores_may_come_before_the_finish() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        running = asyncio.ensure_future(Worker(Scorer(), CONFIG, runtime=runtime).run())
        client = await other.endpoint("py.backend.generate").client()
        await until(lambda: running.done() or client.instance_ids(), "its canary is answered")
        assert not running.done(), running.exception()
        pairs = [{"token_ids": [1, 2, 3], "first_tokens": 2}, {"token_ids": [4, 5], "first_tokens": 1}]
        answer = await client.generate({"score": pairs})
        assert (answer.scores, answer.finish_reason) == ([3.0, 2.0], "stop")
        assert answer.completion_usage.prompt_tokens == 5
        await runtime.shutdown()
        await running


class Otherwise(Engine):
    """Names its second argument as it likes, and can be called without it."""

    async def generate(self, request: GenerateRequest, ctx: Context | None = None) -> AsyncGenerator[GenerateChunk, None]:
        assert ctx is not None
        yield {"token_ids": [40], "finish_reason": "length"}


async def test_an_engine_gets_its_context_whatever_it_calls_it() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        running = asyncio.ensure_future(Worker(Otherwise(), CONFIG, runtime=runtime).run())
        client = await other.endpoint("py.backend.generate").client()
        await until(lambda: running.done() or client.instance_ids(), "its canary is answered")
        assert not running.done(), running.exception()
        await runtime.shutdown()
        await running


async def test_the_engines_of_one_runtime_have_ids_of_their_own() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        # Of one component, whose other endpoints have fixed names.
        configs = [dataclasses.replace(CONFIG, endpoint=name, model_name=name) for name in ("first", "second")]
        running = [asyncio.ensure_future(Worker(Engine(), config, runtime=runtime).run()) for config in configs]
        ids: list[int] = []
        for config in configs:
            client = await other.endpoint(f"py.backend.{config.endpoint}").client()
            await until(lambda: client.instance_ids() or any(each.done() for each in running), "both are listed")
            assert not any(each.done() for each in running), [each.exception() for each in running if each.done()]
            ids += client.instance_ids()
        assert ids[0] == runtime.worker_id and len(set(ids)) == 2
        await runtime.shutdown()
        await asyncio.gather(*running)


class Part(Engine):
    """Computes a prompt under a name, or continues what another instance computed: its tokens are 40, 41, ..."""

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        self.seen.append(self.worker.role)
        return EngineConfig(model="mine", sampling=(), roles=("prefill", "decode"))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        wanted = request["stop_conditions"].get("max_tokens") or 3
        transfer = request.get("transfer")
        if self.worker.role == "prefill" and wanted > 1:
            params = {"source_worker_id": self.worker_id, "data": {"held": len(request["token_ids"])}}
            yield {"token_ids": [40], "finish_reason": "length", "transfer": params}  # type: ignore[typeddict-item]
            return
        if transfer is not None:
            self.seen.append(f"{transfer['source_worker_id']} {transfer['data']}")
        for place in range(wanted):
            yield {"token_ids": [40 + place]}
        yield {"token_ids": [], "finish_reason": "length"}


def test_prefill_and_decode_are_workers_of_their_own(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    prefill, decode = Part(), Part()

    async def main() -> None:
        async with await Runtime.connect() as first, await Runtime.connect() as second:
            parts = []
            for runtime, engine, role in ((first, prefill, "prefill"), (second, decode, "decode")):
                config = dataclasses.replace(CONFIG, role=role, component="")
                assert config.component == role
                parts.append(asyncio.ensure_future(Worker(engine, config, runtime=runtime).run()))
            found = lambda: next((each for each in decode.seen if "held" in each), None)
            held, answer = await answered_apart(address, "mine", parts, found)
            assert held == f"{prefill.worker_id} {{'held': {answer['usage']['prompt_tokens']}}}"
            for runtime in (first, second):
                await runtime.shutdown()
            await asyncio.gather(*parts)

    run(main())
    assert (prefill.seen[0], decode.seen[0]) == ("prefill", "decode")


async def test_a_role_that_is_none_or_not_the_engine_s_is_refused() -> None:
    with pytest.raises(exceptions.InvalidArgument, match="'prefil' is none of aggregated, prefill, decode"):
        WorkerConfig(role="prefil")

    async with await Runtime.connect() as runtime:
        with pytest.raises(exceptions.Unsupported, match="cannot be a prefill instance"):
            await Worker(Engine(), dataclasses.replace(CONFIG, role="prefill"), runtime=runtime).run()


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
