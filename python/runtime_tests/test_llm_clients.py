"""Clients of model endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import run
from test_llm import MODEL

from genset import exceptions
from genset.llm import ModelType, register_llm
from genset.runtime import Context, Runtime


def test_a_client_asks_what_a_handler_is_asked_and_gets_what_it_gives() -> None:
    asked: list[Any] = []
    chunks = [{"token_ids": [3]}, {"token_ids": [4, 5]}]

    async def backend(request: Any) -> AsyncIterator[Any]:
        asked.append(request)
        if request["stop_conditions"].get("max_tokens") != 1:
            for chunk in chunks:
                yield chunk
        yield {"token_ids": [6], "finish_reason": "length", "completion_usage": {"cached_tokens": 1}}

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            inner, outer = runtime.endpoint("py.inner.generate"), runtime.endpoint("py.outer.generate")
            await register_llm(ModelType.Backend, inner, str(MODEL), "inner")
            await register_llm(ModelType.Backend, outer, str(MODEL), "outer")
            client = await runtime.endpoint(inner.name).client()

            async def passes_on(request: Any, context: Context) -> AsyncIterator[Any]:
                async for chunk in client.generate(request, context=context):
                    yield chunk

            serving = [asyncio.ensure_future(inner.serve_endpoint(backend))]
            await client.wait_for_instances()
            serving.append(asyncio.ensure_future(outer.serve_endpoint(passes_on)))
            asking = await other.endpoint(outer.name).client()
            request = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 9}, "resumed_tokens": 1}
            *first, last = [item async for item in asking.generate(request)]
            assert first == chunks
            assert (last.token_ids, last.finish_reason) == ([6], "length")
            assert (last.completion_usage.completion_tokens, last.completion_usage.cached_tokens) == (4, 1)
            assert (asked[-1]["token_ids"], asked[-1]["resumed_tokens"]) == ([1, 2], 1)
            assert asked[-1]["stop_conditions"]["max_tokens"] == 9
            with pytest.raises(exceptions.InvalidArgument, match="stop_condition: a GenerateRequest has no such field"):
                await asking.generate({"token_ids": [1], "stop_condition": {}})
            with pytest.raises(exceptions.InvalidArgument, match="py.outer.generate serves a model: give a map with one of token_ids"):
                await asking.generate({"input": {"tokens": [1]}})
            await runtime.shutdown()
            await asyncio.gather(*serving)

    run(main())


def test_vectors_and_bodies_are_one_answer() -> None:
    async def embed(request: Any) -> Any:
        return {"embeddings": [[float(len(tokens))] for tokens in request["embed"]], "finish_reason": "stop"}

    async def chat(body: Any) -> AsyncIterator[Any]:
        yield body["messages"][0]["content"]
        yield "!"

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as other:
            vectors, chats = runtime.endpoint("py.vectors.embed"), runtime.endpoint("py.chats.chat")
            await register_llm(ModelType.Embedding, vectors, str(MODEL), "vectors")
            await register_llm(ModelType.Chat, chats, "chats")
            serving = [asyncio.ensure_future(each.serve_endpoint(handler)) for each, handler in ((vectors, embed), (chats, chat))]
            answer = await (await other.endpoint(vectors.name).client()).generate({"embed": [[1], [1, 2]]})
            assert (answer.embeddings, answer.finish_reason) == ([[1.0], [2.0]], "stop")
            client = await other.endpoint(chats.name).client()
            body = {"messages": [{"role": "user", "content": "hello"}]}
            answer = await client.generate(body)
            assert (answer.model, answer.choices[0].message.content) == ("chats", "hello!")
            deltas = [chunk.choices[0].delta async for chunk in client.generate({**body, "stream": True})]
            assert "".join(delta.get("content", "") for delta in deltas) == "hello!"
            with pytest.raises(exceptions.InvalidArgument, match="py.chats.chat serves a model: give the body of a request"):
                await client.generate(7)
            await runtime.shutdown()
            await asyncio.gather(*serving)

    run(main())
