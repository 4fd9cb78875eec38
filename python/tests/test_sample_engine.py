"""The sample engine alone: a model for an engine's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from genset import GenerateRequest, StopConditions
from genset.exceptions import EngineShutdown, InvalidArgument
from genset.testing import collect
from sample_engine import SampleEngine

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(test)


def request(max_tokens: int = 4, **stop: Any) -> GenerateRequest:
    conditions = StopConditions(max_tokens=max_tokens)
    conditions.update(stop)  # type: ignore[typeddict-item]
    return {"token_ids": [3, 8], "stop_conditions": conditions}


async def started(vocab_size: int = 10) -> SampleEngine:
    engine = SampleEngine(vocab_size=vocab_size)
    await engine.start(worker_id=0)
    return engine


def test_tokens_rotate_from_the_prompts_last() -> None:
    async def test() -> None:
        chunks = await collect(await started(), request())
        assert [token for chunk in chunks for token in chunk["token_ids"]] == [9, 0, 1, 2]
        assert [chunk.get("finish_reason") for chunk in chunks] == [None, None, None, "length"]

    run(test())


def test_stop_tokens_end_the_answer_and_are_not_part_of_it() -> None:
    async def test() -> None:
        engine = await started()
        chunks = await collect(engine, request(8, eos_token_ids=[1]))
        assert [token for chunk in chunks for token in chunk["token_ids"]] == [9, 0]
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_token"]) == ("stop", 1)
        assert len(await collect(engine, request(8, eos_token_ids=[1], ignore_eos=True))) == 8
        assert len(await collect(engine, request(8, eos_token_ids=[1], min_tokens=5))) == 8

    run(test())


def test_a_client_that_leaves_ends_the_answer() -> None:
    async def test() -> None:
        chunks = await collect(await started(), request(1000), stop_after=2)
        assert (len(chunks), chunks[-1]["finish_reason"]) == (3, "cancelled")

    run(test())


def test_an_engine_that_does_not_run_refuses() -> None:
    async def test() -> None:
        engine = SampleEngine()
        await engine.cleanup()
        with pytest.raises(EngineShutdown):
            await collect(engine, request())
        await engine.start(worker_id=0)
        await engine.cleanup()
        await engine.cleanup()
        with pytest.raises(EngineShutdown):
            await collect(engine, request())

    run(test())


def test_an_empty_vocabulary_is_refused_at_start() -> None:
    with pytest.raises(InvalidArgument) as refused:
        run(started(vocab_size=0))
    assert refused.value.field == "vocab_size"


def test_arguments_become_engine_and_worker_config() -> None:
    engine, config = run(SampleEngine.from_args(["--model-path", "m", "--token-delay-ms", "5"]))
    assert (engine.token_delay, config.model_path, config.namespace) == (0.005, "m", "genset")
