"""What `register_llm` declares beside the model: its role, media, priorities, sizes."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from conftest import Program, run, until
from test_llm import MODEL, answered_apart, ask, frontend, letters, model

from genset import exceptions
from genset._frames import pack, unpack
from genset.llm import ModelType, Tokens, register_llm
from genset.runtime import Runtime

GIF = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


def refusal(address: str, path: str, body: Any) -> str:
    """The message with which a request is refused as a client error."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, path, body)
    with refused.value as answer:
        assert answer.code == 400
        return str(json.loads(answer.read())["error"]["message"])


async def prefill(request: Any) -> AsyncIterator[Any]:
    """Answers with one token, and keeps the prompt for the decode handler. If the answer ends with that token, keeps nothing."""
    chunk: dict[str, Any] = {"token_ids": [40], "finish_reason": "length"}
    if request["stop_conditions"].get("max_tokens") != 1:
        chunk["transfer"] = {"data": {"held": len(request["token_ids"])}}
    yield chunk


async def test_two_handlers_of_one_program_are_prefill_and_decode(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    transfers: list[Any] = []

    async def decode(request: Any) -> AsyncIterator[Any]:
        transfers.append(request["transfer"])
        for place in range(request["stop_conditions"].get("max_tokens") or 3):
            yield {"token_ids": [40 + place]}
        yield {"token_ids": [], "finish_reason": "length"}

    async with await Runtime.connect() as runtime:
        serving = []
        for role, handler in (("prefill", prefill), ("decode", decode)):
            endpoint = runtime.namespace("py").component(role).endpoint("generate")
            await register_llm(ModelType.Backend, endpoint, str(MODEL), "py", role=role)
            serving.append(asyncio.ensure_future(endpoint.serve_endpoint(handler)))
        found = lambda: next((each for each in transfers if each["source_worker_id"] != 0), None)
        handed, answer = await answered_apart(address, "py", serving, found)
        assert handed == {"source_worker_id": runtime.worker_id, "data": {"held": answer["usage"]["prompt_tokens"]}}
        # Its canary came from no prefill instance.
        assert transfers[0] == {"source_worker_id": 0, "data": None}
        # Routers tell a model's instances apart by their ids.
        pool = await runtime.endpoint("py.decode.generate").client()
        await pool.wait_for_instances(120)
        assert runtime.worker_id not in pool.instance_ids()
        await runtime.shutdown()
        await asyncio.gather(*serving)


def test_a_transfer_is_whole_and_names_its_worker() -> None:
    ended = {"token_ids": [1], "finish_reason": "length"}

    def transfer(chunk: Any) -> Any:
        _, answer = Tokens("a.b.c", 7).request(pack({"model": "m", "input": {"tokens": [1]}}))
        (finished,) = answer.items(chunk)
        return unpack(finished)["finished"]["transfer"]

    assert transfer({**ended, "transfer": {"data": None}}) == {"source_worker_id": 7, "data": None}
    assert transfer({**ended, "transfer": {"source_worker_id": 8, "data": 1}}) == {"source_worker_id": 8, "data": 1}
    # An aggregated handler may return the transfer of its request.
    assert transfer({**ended, "transfer": None}) is None
    with pytest.raises(exceptions.Internal, match="a.b.c has transfer without finish_reason"):
        transfer({"token_ids": [1], "transfer": {"data": 1}})
    for wrong in ({"host": "a"}, 7):
        with pytest.raises(exceptions.Internal, match="transfer of an answer of a.b.c has no data"):
            transfer({**ended, "transfer": wrong})


def test_a_finish_reason_may_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    codec = Tokens("a.b.c", 7, needs_reason=False)

    def ends(limit: int | None, *chunks: Any) -> Any:
        _, answer = codec.request(pack({"model": "m", "input": {"tokens": [1, 2]}, "stop": {"max_tokens": limit}}))
        for chunk in chunks:
            answer.items(chunk)
        (finished,) = answer.finish()
        assert answer.is_finished
        return unpack(finished)["finished"]

    usage = {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": None}
    assert ends(3, {"token_ids": [5]}, {"token_ids": [6]}) == {"reason": "stop", "usage": usage, "last": {}}
    assert ends(2, {"token_ids": [5, 6]}) == {"reason": "length", "usage": usage, "last": {}}
    assert ends(None, {"token_ids": [5]})["reason"] == ends(9, {"token_ids": []})["reason"] == "stop"
    assert [record.getMessage() for record in caplog.records] == [
        "a.b.c: an answer ended without finish_reason; such count as length at max_tokens, else as stop"
    ]
    # Embeddings need no reason.
    _, answer = Tokens("a.b.c", 7, needs_reason=False).request(pack({"model": "m", "input": {"embed": [[1, 2]]}}))
    answer.items({"embeddings": [[0.5]]})
    assert len(answer.finish()) == len(caplog.records) == 1
    with pytest.raises(exceptions.Internal, match="gave nothing"):
        ends(3)
    # An engine must give a finish reason, and so must a prefill handler, whose transfer would be lost silently.
    _, answer = Tokens("a.b.c").request(pack({"model": "m", "input": {"tokens": [1]}}))
    answer.items({"token_ids": [5]})
    assert answer.finish() == []


def test_a_handler_that_says_no_finish_reason_serves(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    async def two(request: Any) -> AsyncIterator[Any]:
        for token in (40, 41)[: request["stop_conditions"]["max_tokens"]]:
            yield {"token_ids": [token]}

    async def whole(request: Any) -> Any:
        return {"embeddings": [[1.0] for _ in request["embed"]]}

    def ends(limit: int) -> tuple[str, int]:
        answer = ask(address, "/v1/completions", {"model": "py", "prompt": "one two", "max_tokens": limit})
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    async def main() -> None:
        async with model(address, two):
            assert await asyncio.to_thread(ends, 5) == ("stop", 2)
            assert await asyncio.to_thread(ends, 2) == ("length", 2)
        async with model(address, whole, "vectors", ModelType.Embedding):
            answer = await asyncio.to_thread(ask, address, "/v1/embeddings", {"model": "vectors", "input": ["a"]})
            assert answer["data"][0]["embedding"] == [1.0]

    run(main())


async def test_the_canary_is_not_given_beside_the_most_requests() -> None:
    async def held(request: Any) -> AsyncIterator[Any]:
        yield {"token_ids": [40]}
        if request["stop_conditions"]["max_tokens"] > 1:
            await let_go.wait()
        yield {"token_ids": [], "finish_reason": "length"}

    let_go = asyncio.Event()

    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        endpoint = runtime.endpoint("py.backend.generate")
        await register_llm(ModelType.Backend, endpoint, str(MODEL), "py", max_running_requests=1)
        serving = asyncio.ensure_future(endpoint.serve_endpoint(held))
        client = await other.endpoint(endpoint.name).client()
        await until(client.instance_ids, "its canary is answered")
        [instance] = client.instance_ids()

        def asked(limit: int, **options: Any) -> Any:
            return client.direct({"token_ids": [1], "stop_conditions": {"max_tokens": limit}}, instance, **options)

        answer = asked(2)
        await anext(answer)
        # As the worker sends it.
        canary = {"genset-probe": "canary"}
        with pytest.raises(exceptions.Overloaded, match="has the 1 requests that it is given at once"):
            await anext(asked(1, headers=canary))
        let_go.set()
        assert [item async for item in answer][-1]["finish_reason"] == "length"
        assert [item async for item in asked(1, headers=canary)][-1]["finish_reason"] == "length"
        await runtime.shutdown()
        await serving


async def test_an_image_reaches_a_handler_that_takes_images(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    seen: list[Any] = []

    async def look(request: Any) -> AsyncIterator[Any]:
        if "token_ids" in request:
            async for chunk in letters(request):
                yield chunk
            return
        seen.extend(message["content"] for message in request["messages"])
        yield {"token_ids": [40, 41], "finish_reason": "stop", "completion_usage": {"prompt_tokens": 9}}

    def chat(*content: Any) -> dict[str, Any]:
        return {"model": "py", "messages": [{"role": "user", "content": list(content)}], "max_tokens": 3}

    text = {"type": "text", "text": "What is it?"}
    image = {"type": "image_url", "image_url": {"url": GIF}}
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF\0\0\0\0WAVE").decode(), "format": "wav"}}

    def asks() -> None:
        usage = ask(address, "/v1/chat/completions", chat(text, image))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 2)
        assert seen == [[text, image]]
        # Text alone arrives as tokens.
        usage = ask(address, "/v1/chat/completions", chat(text))["usage"]
        assert (len(seen), usage["completion_tokens"]) == (1, 3)
        assert "takes no audio" in refusal(address, "/v1/chat/completions", chat(text, audio))

    async with model(address, look, media=["image"]):
        await asyncio.to_thread(asks)


def test_a_priority_reaches_a_handler_that_honours_it(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    seen: list[int] = []

    async def note(request: Any) -> AsyncIterator[Any]:
        seen.append(request["priority"])
        async for chunk in letters(request):
            yield chunk

    def body(name: str) -> dict[str, Any]:
        return {"model": name, "prompt": "one two", "max_tokens": 2, "priority": 5}

    async def main() -> None:
        async with model(address, note, priority=True):
            await asyncio.to_thread(ask, address, "/v1/completions", body("py"))
        async with model(address, note, "plain"):
            assert "does not support priorities" in await asyncio.to_thread(refusal, address, "/v1/completions", body("plain"))

    run(main())
    assert [each for each in seen if each != 0] == [5]


async def test_sizes_are_those_that_were_given(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    def body(token: int) -> dict[str, Any]:
        return {"model": "py", "prompt": [token], "max_tokens": 1}

    # The model's own vocabulary is larger.
    async with model(address, letters, vocab_size=1000, max_num_seqs=7) as endpoint:
        await asyncio.to_thread(ask, address, "/v1/completions", body(999))
        assert "vocabulary" in await asyncio.to_thread(refusal, address, "/v1/completions", body(1000))
        registered = endpoint.runtime._models[endpoint.name]
        assert registered._spec["engine"]["max_num_seqs"] == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model_type", "options", "problem"),
    [
        (ModelType.Backend, {"role": "prefil"}, "role: 'prefil' is none of aggregated, prefill, decode"),
        (ModelType.Backend, {"media": "image"}, "media: must be a list"),
        (ModelType.Backend, {"media": ["image", "video"]}, "media: 'video' is none of image, audio"),
        (ModelType.Backend, {"priority": 5}, "priority: must be true or false"),
        (ModelType.Backend, {"vocab_size": 0}, "vocab_size: 0 is no whole number from 1 to 4294967295"),
        (ModelType.Backend, {"max_num_seqs": True}, "max_num_seqs: must be a whole number"),
        (ModelType.Chat, {"role": "decode"}, "role: is for a ModelType.Backend"),
        (ModelType.Chat, {"media": ["image"]}, "media: is for a ModelType.Backend"),
        (ModelType.Embedding, {"priority": True}, "priority: is for a ModelType.Backend"),
        (ModelType.Completion, {"vocab_size": 10}, "vocab_size: is about token ids"),
    ],
)
async def test_what_is_no_value_or_not_for_the_handler_is_refused(model_type: ModelType, options: dict[str, Any], problem: str) -> None:
    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.backend.generate")
        with pytest.raises(exceptions.InvalidArgument, match=problem) as refused:
            await register_llm(model_type, endpoint, str(MODEL), **options)
        assert refused.value.field in options
        # Sizes that any handler may declare.
        await register_llm(model_type, endpoint, str(MODEL), max_num_seqs=1)
