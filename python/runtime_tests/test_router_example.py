"""examples/python/router: prompts go to the worker that has their prefix cached, also over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Program
from test_llm import MODEL, ask, frontend

from genset.runtime import Runtime

ROUTER = Path(__file__).parents[2] / "examples/python/router"


async def test_prompts_go_where_their_beginning_is(
    start: Callable[..., Program], start_genset: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    workers = [start(str(ROUTER / "worker.py"), str(MODEL)) for _ in range(2)]
    for worker in workers:
        worker.wait_for("serves the model routed-worker")
    start(str(ROUTER / "router.py"), str(MODEL)).wait_for_all("serves the model routed", "served by instance")
    address = frontend(start_genset)

    async with await Runtime.connect() as runtime:
        router = await runtime.endpoint("routed.router.generate").client()
        state = await runtime.endpoint("routed.router.state").client()

        async def until_blocks(*expected: int) -> None:
            # Events and load arrive a moment later, independently.
            def known(each: Any) -> tuple[int, int]:
                return each["blocks"], each["load"].get("kv_used_blocks", 0)

            while sorted(map(known, (await state.random()).values())) != sorted((count, count) for count in expected):
                await asyncio.sleep(0.05)

        async def cached_of(tokens: list[int]) -> Any:
            chunk = await router.generate({"token_ids": tokens, "stop_conditions": {"max_tokens": 1}})
            return chunk.completion_usage.cached_tokens

        def cached_over_http(tokens: list[int]) -> Any:
            answer = ask(address, "/v1/completions", {"model": "routed", "prompt": tokens, "max_tokens": 1})
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        await until_blocks(0, 0)
        assert await cached_of(list(range(64))) == 0
        await until_blocks(0, 4)
        assert [await cached_of([*range(64), 7]) for _ in range(3)] == [64] * 3
        # If nothing is cached, the less loaded worker is chosen.
        assert await cached_of(list(range(500, 564))) == 0
        await until_blocks(4, 4)
        assert await cached_of([*range(500, 564), 7]) == await cached_of([*range(64), 7]) == 64
        while "routed" not in [each["id"] for each in (await asyncio.to_thread(ask, address, "/v1/models"))["data"]]:
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(cached_over_http, [*range(500, 564), 7]) == 64


def test_a_router_that_cannot_follow_its_workers_ends(
    tmp_path: Path, start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROUTER))
    program = tmp_path / "failing.py"
    program.write_text("""
import asyncio

import router


async def follow(self):
    raise ValueError("nothing to follow")


router.Router.follow = follow
asyncio.run(router.main())
""")
    failing = start(str(program), str(MODEL))
    assert failing.exit_code() == 1
    assert "ValueError: nothing to follow" in failing.lines
