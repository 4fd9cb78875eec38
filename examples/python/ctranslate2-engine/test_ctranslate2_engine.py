"""Tests the engine on a small random model: alone, and with the conformance kit.

    pip install -r requirements.txt
    PYTHONPATH=../../../python/src pytest        # genset in PATH, or named in GENSET_BIN
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ctranslate2_engine import CTranslate2Engine
from ctranslate2_model import sampling
from genset import GenerateRequest
from genset.exceptions import EngineShutdown, InvalidArgument
from genset.testing import StubContext, collect, conformance_tests
from make_model import make

HERE = Path(__file__).parent
# Made at collection, since the kit needs its path then.
MODEL = tempfile.mkdtemp(prefix="ctranslate2-model-")
atexit.register(shutil.rmtree, MODEL, ignore_errors=True)
make(MODEL)

test_conformance = conformance_tests(["python", str(HERE / "ctranslate2_engine.py"), "--model", MODEL])


def with_engine(test: Any, parallel: int = 2) -> None:
    async def run() -> None:
        engine = CTranslate2Engine(MODEL, context_length=256, parallel=parallel, device="cpu")
        await engine.start(worker_id=0)
        try:
            await test(engine)
        finally:
            await engine.cleanup()
            await engine.cleanup()

    asyncio.run(run())


def request(max_tokens: int, **sampling_options: Any) -> GenerateRequest:
    return {
        "token_ids": [5, 6, 7],
        "stop_conditions": {"max_tokens": max_tokens},
        "sampling_options": sampling_options,  # type: ignore[typeddict-item]
    }


def tokens(chunks: Any) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


def test_tokens_are_streamed_and_greedy_ones_repeat() -> None:
    async def test(engine: CTranslate2Engine) -> None:
        chunks = await collect(engine, request(12))
        assert (len(chunks), chunks[-1]["finish_reason"]) == (12, "length")
        assert tokens(await collect(engine, request(12))) == tokens(chunks)
        assert len(set(tokens(chunks))) > 3

    with_engine(test)


def test_sampling_chooses_among_several() -> None:
    async def test(engine: CTranslate2Engine) -> None:
        answers = [tuple(tokens(await collect(engine, request(8, temperature=1.0)))) for _ in range(5)]
        assert len(set(answers)) > 1

    with_engine(test)


def test_options_are_the_librarys() -> None:
    assert sampling({}, 100) == {"repetition_penalty": 1.0}
    asked = sampling({"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}, 100)
    assert asked == {
        "repetition_penalty": 1.2,
        "sampling_temperature": 0.5,
        "sampling_topk": 0,
        "sampling_topp": 0.9,
    }
    top_ks = [sampling({"temperature": 0.5, "top_k": top_k}, 100)["sampling_topk"] for top_k in (40, 100, 4294967295)]
    assert top_ks == [40, 0, 0]


def test_a_client_that_leaves_ends_the_thread_of_its_request() -> None:
    async def test(engine: CTranslate2Engine) -> None:
        chunks = await collect(engine, request(200), StubContext("one"), stop_after=2)
        assert chunks[-1]["finish_reason"] == "cancelled"
        # With one thread, the next request runs only when the first has released it.
        assert len(await collect(engine, request(3), StubContext("two"))) == 3
        assert engine._model is not None and not engine._model._running

    with_engine(test, parallel=1)


def test_a_request_of_a_stopped_engine_is_told_so() -> None:
    async def test() -> None:
        engine = CTranslate2Engine(MODEL, context_length=256, parallel=2, device="cpu")
        with pytest.raises(EngineShutdown):
            await collect(engine, request(3))
        await engine.cleanup()

    asyncio.run(test())


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    def start() -> Coroutine[Any, Any, Any]:
        return CTranslate2Engine(str(tmp_path), 256, 2, "cpu").start(worker_id=0)

    with pytest.raises(InvalidArgument, match="holds no CTranslate2 model"):
        asyncio.run(start())
