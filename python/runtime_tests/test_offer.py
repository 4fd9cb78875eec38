"""`genset offer`: a running endpoint behind HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from conftest import Program, run
from test_llm import MODEL, ask, frontend

from genset.llm import ModelType, register_llm
from genset.runtime import Runtime


def test_a_running_endpoint_is_offered_and_taken_off_again(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    async def answer(body: Any) -> AsyncIterator[Any]:
        for word in ("you ", "said ", body["messages"][-1]["content"]):
            yield {"choices": [{"index": 0, "delta": {"content": word}}]}

    async def main() -> None:
        async with await Runtime.connect() as runtime:
            serving = asyncio.ensure_future(runtime.endpoint("py.plain.chat").serve_endpoint(answer))
            offering = start_genset("offer", "mine", "py.plain.chat")

            async def names() -> list[str]:
                return [each["id"] for each in (await asyncio.to_thread(ask, address, "/v1/models"))["data"]]

            while "mine" not in await names():
                assert offering.process.poll() is None, offering.lines
                await asyncio.sleep(0.05)
            body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}]}
            answered = await asyncio.to_thread(ask, address, "/v1/chat/completions", body)
            assert answered["choices"][0]["message"]["content"] == "you said hello"
            events = await asyncio.to_thread(ask, address, "/v1/chat/completions", {**body, "stream": True})
            assert len(events) == 4 and events[-1] == "[DONE]"
            assert await asyncio.to_thread(offering.stop) == 0
            while "mine" in await names():
                await asyncio.sleep(0.05)
            await runtime.shutdown()
            await serving

    run(main())


def test_what_cannot_be_offered_is_refused(start_genset: Callable[..., Program]) -> None:
    for words, problem in [
        (("mine", "nowhere"), "'nowhere' is no endpoint"),
        (("mine", "a.b.c", "--endpoint-types=images"), "'images' is none of"),
    ]:
        refused = start_genset("offer", *words)
        assert refused.exit_code() == 2
        assert problem in "\n".join(refused.lines)


async def test_a_model_of_tokens_is_refused_at_once(start_genset: Callable[..., Program]) -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield {"token_ids": [5], "finish_reason": "stop"}

    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.tokens.generate")
        await register_llm(ModelType.Backend, endpoint, str(MODEL), "tokens")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
        refused = start_genset("offer", "mine", endpoint.name)
        assert await asyncio.to_thread(refused.exit_code) == 2
        assert "error: py.tokens.generate serves a model, which takes no bodies" in "\n".join(refused.lines)
        await runtime.shutdown()
        await serving
