"""Handlers that take whole bodies of chats and answer with OpenAI's objects, called through the installed `genset`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, Program, run
from test_llm import ask, frontend, model

from genset import exceptions
from genset.backend import find_binary
from genset.llm import ModelType, register_llm
from genset.runtime import Context, Runtime

CHAT = {"model": "bodies", "messages": [{"role": "user", "content": "hello"}], "x_of_mine": {"deep": [1]}}


def chat_object(body: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps(body["x_of_mine"])}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "mine": 1}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    return {"id": "mine", "object": "chat.completion", "created": 1, "model": "bodies", "choices": [choice], "usage": usage}


async def test_bodies_and_objects_pass_whole(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    chunks = [{"delta": {"role": "assistant"}}, {"delta": {"content": "a\nb"}}, {"delta": {}, "finish_reason": "length"}]

    async def handler(body: Any) -> AsyncIterator[Any]:
        if "prompt" in body:
            yield {"choices": [{"index": 0, "text": body["prompt"] + "!", "finish_reason": "stop"}]}
        elif "x_of_mine" in body:
            yield chat_object(body)
        elif body["messages"][0]["content"] == "text":
            for piece in ("plain ", "text"):
                yield piece
        else:
            for chunk in chunks:
                yield {"object": "chat.completion.chunk", "choices": [{"index": 0, **chunk}], "of_mine": True}
            yield {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}

    def says(content: str, **more: Any) -> Any:
        body = {"model": "bodies", "messages": [{"role": "user", "content": content}], **more}
        answer = ask(address, "/v1/chat/completions", body)
        return [json.loads(event) for event in answer[:-1]] if more.get("stream") else answer

    def asks() -> None:
        assert ask(address, "/v1/chat/completions", CHAT) == chat_object(CHAT)
        events = ask(address, "/v1/chat/completions", {**CHAT, "stream": True})
        assert events[-1] == "[DONE]"
        (event,) = (json.loads(event) for event in events[:-1])
        delta = event["choices"][0]["delta"]
        assert (event["object"], delta["tool_calls"][0]["index"], delta["mine"]) == ("chat.completion.chunk", 0, 1)

        streamed = says("chunks", stream=True)
        assert [event["choices"][0]["delta"] for event in streamed[:-1]] == [chunk["delta"] for chunk in chunks]
        assert all(event["of_mine"] for event in streamed[:-1]) and streamed[-1]["usage"]["completion_tokens"] == 2
        whole = says("chunks")
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "a\nb"}
        assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["total_tokens"] == 3

        assert says("text")["choices"][0]["message"]["content"] == "plain text"
        texts = [event["choices"][0]["delta"].get("content", "") for event in says("text", stream=True)]
        assert "".join(texts) == "plain text"

        completion = ask(address, "/v1/completions", {"model": "bodies", "prompt": "hi"})
        assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "hi!")

    kinds = ModelType.Chat | ModelType.Completion
    async with model(address, handler, "bodies", kinds):
        await asyncio.to_thread(asks)


async def test_a_chat_engine_without_files_serves_the_official_client(start_genset: Callable[..., Program]) -> None:
    openai = pytest.importorskip("openai")
    address = frontend(start_genset)

    async def handler(body: Any, context: Context) -> AsyncIterator[Any]:
        if body["messages"][0]["content"] == "refuse":
            raise exceptions.InvalidArgument("no such thing here", field="messages")
        yield f"you said {body['messages'][0]['content']}"

    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.chat.generate")
        await register_llm(ModelType.Chat, endpoint, "a-name-alone")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

        async def names() -> list[str]:
            return [each.id async for each in client.models.list()]

        while "a-name-alone" not in await names():
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.05)
        messages = [{"role": "user", "content": "hello"}]
        answer = await client.chat.completions.create(model="a-name-alone", messages=messages)
        assert answer.choices[0].message.content == "you said hello"
        stream = await client.chat.completions.create(model="a-name-alone", messages=messages, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "you said hello"
        with pytest.raises(openai.BadRequestError, match="no such thing here"):
            messages = [{"role": "user", "content": "refuse"}]
            await client.chat.completions.create(model="a-name-alone", messages=messages)
        response = await client.responses.create(model="a-name-alone", input="hello")
        assert response.output_text == "you said hello"
        asked = {"model": "a-name-alone", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        said = await asyncio.to_thread(ask, address, "/v1/messages", asked)
        assert said["content"][0]["text"] == "you said hello"
        with pytest.raises(openai.BadRequestError, match="does not offer completions"):
            await client.completions.create(model="a-name-alone", prompt="hello")
        await client.close()
        await runtime.shutdown()
        await serving


def test_terminals_and_prompts_of_a_batch_are_asked_with_bodies(tmp_path: Path) -> None:
    def genset(*words: str, question: str = "") -> str:
        command = [find_binary(), "run", *words, "out=dyn"]
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def chat(body: Any) -> AsyncIterator[Any]:
        yield f"{body.get('x_of_mine', 'you')} said "
        yield {"choices": [{"index": 0, "delta": {"content": body["messages"][-1]["content"]}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}

    async def completion(body: Any) -> AsyncIterator[Any]:
        yield {"choices": [{"index": 0, "text": body["prompt"] + "!", "finish_reason": "stop"}]}

    async def served(kind: ModelType, handler: Any, ask_it: Callable[[], None]) -> None:
        async with await Runtime.connect() as runtime:
            endpoint = runtime.endpoint("py.bodies.generate")
            await register_llm(kind, endpoint, "bodies")
            serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
            await asyncio.to_thread(ask_it)
            await runtime.shutdown()
            await serving

    def ask_chats() -> None:
        assert genset("in=stdin", question="hello") == "you said hello\n"
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"text": "hi", "x_of_mine": "she"}\n')
        genset(f"in=batch:{prompts}")
        answer = json.loads((tmp_path / "output.jsonl").read_text())
        assert (answer["response"], answer["tokens_in"], answer["tokens_out"]) == ("she said hi", 3, 4)

    def ask_completions() -> None:
        assert genset("in=stdin", question="hello") == "hello!\n"

    run(served(ModelType.Chat, chat, ask_chats))
    run(served(ModelType.Completion, completion, ask_completions))


def test_wrong_objects_are_named() -> None:
    from genset._bodies import BodyAnswer

    def answer(value: Any) -> None:
        made = BodyAnswer("a.b.c", "m", {"messages": []}, lambda: None)
        made.items(value)
        made.items(value)

    for value, problem in [
        (7, "a.b.c is a int; yield text, or the API's objects"),
        ({"text": "x"}, "a.b.c has no list of choices, but text"),
        ({"error": {}}, "raise an exception of genset.exceptions"),
        ({"choices": [{"message": {}}]}, "two whole answers"),
    ]:
        with pytest.raises(exceptions.Internal, match=problem):
            answer(value)
