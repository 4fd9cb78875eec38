"""examples/python/router: prompts go where their beginning is cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, run
from test_llm import MODEL

from genset.runtime import Runtime

ROUTER = Path(__file__).parents[2] / "examples/python/router"


def test_prompts_go_where_their_beginning_is(start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    workers = [start(str(ROUTER / "worker.py"), str(MODEL)) for _ in range(2)]
    for worker in workers:
        worker.wait_for("serves the model routed")
    start(str(ROUTER / "router.py")).wait_for("served by instance")

    async def main() -> None:
        async with await Runtime.connect() as runtime:
            router = await runtime.endpoint("routed.router.generate").client()
            state = await runtime.endpoint("routed.router.state").client()

            async def until_blocks(*expected: int) -> None:
                # What is followed takes a moment to arrive: events and load, each by itself.
                def known(each: Any) -> tuple[int, int]:
                    return each["blocks"], each["load"].get("kv_used_blocks", 0)

                while sorted(map(known, (await state.random()).values())) != sorted((count, count) for count in expected):
                    await asyncio.sleep(0.05)

            async def ask(tokens: list[int]) -> tuple[int, int]:
                request = {"model": "routed", "input": {"tokens": tokens}, "stop": {"max_tokens": 1}}
                items = [item async for item in router.generate(request)]
                cached = items[-1]["output"]["finished"]["usage"]["cached_tokens"]
                return items[-1]["instance"], cached

            await until_blocks(0, 0)
            first, cached = await ask(list(range(64)))
            assert cached == 0
            await until_blocks(0, 4)
            assert [await ask([*range(64), 7]) for _ in range(3)] == [(first, 64)] * 3
            # Where nothing is cached, the emptier one is chosen.
            second, cached = await ask(list(range(500, 564)))
            assert second != first and cached == 0
            await until_blocks(4, 4)
            assert await ask([*range(500, 564), 7]) == (second, 64)
            assert await ask([*range(64), 7]) == (first, 64)

    run(main())
