"""Tests the engine on the repository's own model: alone, and with the conformance kit.

    pip install -r requirements.txt ../../../python
    pytest        # genset in PATH, or named in GENSET_BIN
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from genset import GenerateRequest
from genset.testing import StubContext, collect, conformance_tests
from transformers_engine import CHUNK_TOKENS, TransformersEngine, choose

HERE = Path(__file__).parent
MODEL = HERE / "../../../models/tiny-chat"

COMMAND = ["python", str(HERE / "transformers_engine.py"), "--model", str(MODEL.resolve())]
# The kit starts more than a hundred processes, and each imports torch: half an hour on two busy cores.
test_conformance = conformance_tests(COMMAND, timeout=7200.0)


def with_engine(test: Callable[[TransformersEngine], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine = TransformersEngine(str(MODEL))
        await engine.start(worker_id=0)
        try:
            await test(engine)
        finally:
            await engine.cleanup()
            await engine.cleanup()

    asyncio.run(run())


# One prompt is read at once, the other in three chunks.
@pytest.mark.parametrize(("length", "reason"), [(20, "stop"), (2 * CHUNK_TOKENS + 40, "length")])
def test_greedy_tokens_are_those_of_the_library(length: int, reason: str) -> None:
    async def test(engine: TransformersEngine) -> None:
        prompt = list(range(40, 40 + length))
        eos = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
        request: GenerateRequest = {"token_ids": prompt, "stop_conditions": {"max_tokens": 12, "eos_token_ids": eos}}
        chunks = await collect(engine, request)
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        made = engine._model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        # The library also returns the token that ended the answer.
        assert tokens == [token for token in made[0, len(prompt) :].tolist() if token not in eos]
        assert chunks[-1]["finish_reason"] == reason and len(tokens) > 3

    with_engine(test)


def test_a_request_without_a_place_waits_for_one() -> None:
    async def test(engine: TransformersEngine) -> None:
        engine.max_num_seqs = 1
        one, two = (engine.begin({"token_ids": [5, 6]}, StubContext()) for _ in range(2))
        assert [output is None for output in engine.step([one, two])] == [False, True]
        # The first sequence has no reader for now. It keeps its place, and its keys and values.
        assert engine.step([two]) == [None]
        engine.end(one)
        assert engine.step([two]) != [None]

    with_engine(test)


def test_a_step_reads_about_one_chunk_of_prompts() -> None:
    async def test(engine: TransformersEngine) -> None:
        sequences = [engine.begin({"token_ids": [7] * length}, StubContext()) for length in (2, CHUNK_TOKENS + 9, 300, 3)]
        left = []
        for _ in range(4):
            engine.step(sequences)
            left.append([len(sequence.pending) for sequence in sequences])
        # One token is pending for each sequence that generates.
        assert left == [[1, 9, 300, 3], [1, 1, 44, 3], [1, 1, 1, 1], [1, 1, 1, 1]]

    with_engine(test)


def test_options_leave_what_they_say() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))

    def drawn(**options: Any) -> set[int]:
        random = torch.Generator().manual_seed(1)
        return {choose(logits, {"temperature": 1.0, **options}, random) for _ in range(200)}  # type: ignore[typeddict-item]

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=1) == drawn(top_p=0.1) == drawn(min_p=1.0) == drawn(temperature=0.0) == {1}
    assert drawn(top_k=2) == drawn(top_p=0.7) == drawn(min_p=0.5) == {1, 2}
