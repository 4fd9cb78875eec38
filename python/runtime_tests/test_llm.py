"""Models served by handlers, called through the installed `genset`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, run, until
from test_runtime import cancel_while_it_begins, until_nobody_else_serves

from genset import exceptions
from genset.llm import KvEventPublisher, LoadPublisher, ModelType, StepPublisher, register_llm
from genset.runtime import Context, Endpoint, Runtime

MODEL = Path(__file__).parents[2] / "models" / "tiny-chat"


async def letters(request: Any) -> AsyncIterator[Any]:
    """Answers with the prompt's last tokens, one at a time."""
    wanted = request["stop_conditions"].get("max_tokens") or 3
    for token in request["token_ids"][-wanted:]:
        yield {"token_ids": [token]}
    yield {"token_ids": [], "finish_reason": "stop"}


def frontend(start_genset: Callable[..., Program], *arguments: str) -> str:
    """Starts a frontend; returns its address."""
    program = start_genset("run", "in=http", "out=dyn", "--http-port", "0", *arguments)
    line = program.wait_for("http://127.0.0.1:")
    return line[line.index("http://") :].split()[0].rstrip("/,")


def ask(address: str, path: str, body: Any = None) -> Any:
    """Sends one request; returns the parsed answer, or the events of a stream."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if response.headers["content-type"].startswith("text/event-stream"):
        return [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return json.loads(text)


def wait_for_model(address: str, name: str, *programs: Program) -> None:
    """Waits until the frontend knows the model of these programs; fails if one of them ends."""

    def is_known() -> bool:
        for program in programs:
            assert program.process.poll() is None, "\n".join(program.lines)
        return name in [each["id"] for each in ask(address, "/v1/models")["data"]]

    run(until(is_known, f"the frontend knows {name}"))


async def until_known(address: str, name: str, serving: asyncio.Future[Any]) -> None:
    """Waits until the frontend knows a model; fails if what serves it has."""

    def is_known() -> bool:
        if serving.done():
            serving.result()
        return name in [each["id"] for each in ask(address, "/v1/models")["data"]]

    while not await asyncio.to_thread(is_known):
        await asyncio.sleep(0.05)


def leave(address: str, name: str, **options: Any) -> None:
    """Leaves a long streamed completion after its first line."""
    body = json.dumps({"model": name, "prompt": "a", "max_tokens": 2000, "stream": True, **options}).encode()
    request = urllib.request.Request(address + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        response.readline()


async def answered_apart(address: str, name: str, parts: list[asyncio.Future[Any]], handed: Callable[[], Any]) -> tuple[Any, Any]:
    """Asks for completions of `name` until `handed` returns what a prefill worker handed to a decode worker: that, and the last answer.

    Until the frontend has seen both, one worker may serve the whole request. `parts` are the workers, which must not end.
    """
    body = {"model": name, "prompt": "one two", "max_tokens": 4}
    while True:
        for part in parts:
            if part.done():
                part.result()
        try:
            answer = await asyncio.to_thread(ask, address, "/v1/completions", body)
        except urllib.error.HTTPError as error:
            assert error.code in (404, 503), error
            await asyncio.sleep(0.05)
            continue
        assert answer["usage"]["completion_tokens"] == 4
        if found := handed():
            return found, answer


@contextlib.asynccontextmanager
async def model(
    address: str, handler: Any, name: str = "py", model_type: ModelType = ModelType.Backend, **options: Any
) -> AsyncIterator[Endpoint]:
    """Serves a model, and waits until the frontend knows it."""
    async with await Runtime.connect() as runtime:
        endpoint = runtime.namespace("py").component("backend").endpoint("generate")
        await register_llm(model_type, endpoint, str(options.pop("model_path", MODEL)), name, **options)
        serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        await until_known(address, name, serving)
        yield endpoint
        await runtime.shutdown()
        await serving


async def test_a_backend_answers_chats_and_completions(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    async with model(address, letters):
        body = {"model": "py", "prompt": "The capital of France is Paris", "max_tokens": 2}
        answer = await asyncio.to_thread(ask, address, "/v1/completions", body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 2
        assert "Paris".endswith(answer["choices"][0]["text"].strip()[-2:])
        chat = {"model": "py", "messages": [{"role": "user", "content": "hello"}], "stream": True, "temperature": 0.5}
        events = await asyncio.to_thread(ask, address, "/v1/chat/completions", chat)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


def test_a_gguf_file_brings_tokenizer_template_and_context(start_genset: Callable[..., Program], tmp_path: Path) -> None:
    address = frontend(start_genset)
    body = {"model": "py", "messages": [{"role": "user", "content": "The capital of France is Paris"}], "max_tokens": 40}
    contents = []
    known = MODEL / "tiny-chat-q8_0.gguf"
    # An architecture that `genset run` does not compute: its name, and the keys with that prefix.
    other = tmp_path / "other.gguf"
    content = known.read_bytes()
    other.write_bytes(content[:1000].replace(b"llama", b"other") + content[1000:])

    async def main() -> None:
        for path in (MODEL, known, other):
            async with model(address, letters, model_path=path):
                answer = await asyncio.to_thread(ask, address, "/v1/chat/completions", body)
                told = await asyncio.to_thread(ask, address, "/v1/models/py")
                contents.append((answer["choices"][0]["message"]["content"], answer["usage"], told["max_model_len"]))
            gone = False
            while not gone:
                listed = await asyncio.to_thread(ask, address, "/v1/models")
                gone = listed["data"] == []
                await asyncio.sleep(0.05)

    run(main())
    # The handler answers with the prompt, which shows the template too.
    assert contents[0] == contents[1] == contents[2] and "capital of France is Paris" in contents[0][0], contents


async def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.GGUF"
    file.write_bytes(b"GGUF and then nothing")

    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.backend.generate")
        await register_llm(ModelType.Backend, endpoint, str(file))
        with pytest.raises(exceptions.EngineError, match="broken.GGUF") as refused:
            await endpoint.serve_endpoint(letters)
        assert refused.value.field == "model_path"


async def test_wrong_answers_are_named() -> None:
    answers: dict[str, Any] = {"now": {"token_ids": [1], "finish_reason": "length"}}

    async def handler(request: Any) -> AsyncIterator[Any]:
        if isinstance(answers["now"], Exception):
            raise answers["now"]
        if answers["now"] is not None:
            yield answers["now"]

    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        endpoint = runtime.endpoint("py.backend.generate")
        await register_llm(ModelType.Backend, endpoint, str(MODEL), "py")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        client = await other.endpoint("py.backend.generate").client()
        await until(client.instance_ids, "the canary is answered and the model listed")

        async def ends(answer: Any) -> Any:
            answers["now"] = answer
            request = {"token_ids": [1], "stop_conditions": {"max_tokens": 5}}
            return [item async for item in client.generate(request)]

        with pytest.raises(exceptions.Internal, match="answer of py.backend.generate has tokens, and none of token_ids"):
            await ends({"tokens": [1]})
        with pytest.raises(exceptions.Internal, match="py.backend.generate is a list; yield dictionaries such as"):
            await ends([1])
        with pytest.raises(exceptions.Internal, match="is no output of an engine: .*integer `-1`, expected u32"):
            await ends({"token_ids": [-1]})
        with pytest.raises(exceptions.InvalidArgument, match="prompt: must be a poem"):
            await ends(exceptions.InvalidArgument("must be a poem", field="prompt"))
        with pytest.raises(exceptions.Internal, match="handler of py.backend.generate gave nothing; yield dictionaries"):
            await ends(None)
        (finished,) = await ends({"token_ids": [1], "finish_reason": "because"})
        assert finished["finish_reason"] == "stop"
        await runtime.shutdown()
        await serving


async def test_a_model_that_cannot_be_served_says_why() -> None:
    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.backend.generate")
        with pytest.raises(exceptions.InvalidArgument, match="neither a folder, a GGUF file nor a name"):
            await register_llm(ModelType.Backend, endpoint, "/no/such/folder")
        with pytest.raises(exceptions.InvalidArgument, match="resume: only answers of tokens"):
            await register_llm(ModelType.Chat, endpoint, "py", resume=True)
        with pytest.raises(exceptions.InvalidArgument, match="is no ModelType"):
            await register_llm("backend", endpoint, str(MODEL))  # type: ignore[arg-type]
        both = [register_llm(ModelType.Backend, endpoint, str(MODEL)) for _ in range(2)]
        refused = [error for error in await asyncio.gather(*both, return_exceptions=True) if error is not None]
        with pytest.raises(exceptions.InvalidArgument, match="has a model already"):
            await register_llm(ModelType.Backend, endpoint, str(MODEL))
        assert len(refused) == 1 and "has a model already" in str(refused[0]), refused

        async def mute(request: Any) -> AsyncIterator[Any]:
            raise KeyError("no weights")
            yield

        # The handler's first request is the canary.
        with pytest.raises(exceptions.EngineError, match="canary failed.*no weights"):
            await endpoint.serve_endpoint(mute)


async def test_silence_ends_answers_of_tokens_alone() -> None:
    async with await Runtime.connect() as runtime:

        async def limit(model_type: ModelType, **options: Any) -> float:
            endpoint = runtime.endpoint(f"py.backend.generate{len(runtime._models)}")
            await register_llm(model_type, endpoint, str(MODEL), **options)
            registered = runtime._models[endpoint.name]
            return float(registered._spec["idle_timeout_s"])  # type: ignore[attr-defined]

        assert await limit(ModelType.Backend) == 120
        # An answer that is not streamed is silent until its end.
        assert await limit(ModelType.Chat | ModelType.Completion) == await limit(ModelType.Embedding) == 0
        assert await limit(ModelType.Chat, idle_timeout=5) == 5
        assert await limit(ModelType.Backend, idle_timeout=0) == 0


async def test_a_worker_waits_and_asks_as_its_limits_say() -> None:
    canaries: list[Any] = []

    async def slow(request: Any) -> AsyncIterator[Any]:
        if request["stop_conditions"].get("max_tokens") != 1:
            await asyncio.Event().wait()
        canaries.append(request)
        yield {"token_ids": [1], "finish_reason": "length"}

    async def stuck(request: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield {"token_ids": [1], "finish_reason": "length"}

    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        first, second = runtime.endpoint("py.slow.generate"), runtime.endpoint("py.stuck.generate")
        await register_llm(ModelType.Backend, second, str(MODEL), "stuck", canary_timeout=0.25)
        with pytest.raises(exceptions.DeadlineExceeded, match="the canary failed: .*within 0.25 s"):
            await second.serve_endpoint(stuck)
        limits = {"request_timeout": 0.25, "idle_timeout": 0, "canary_interval": 0.05}
        await register_llm(ModelType.Backend, first, str(MODEL), "slow", **limits)
        serving = asyncio.ensure_future(first.serve_endpoint(slow))
        client = await other.endpoint(first.name).client()
        # By default one is sent every 30 s.
        await until(lambda: len(canaries) > 9, "canaries come")
        with pytest.raises(exceptions.DeadlineExceeded):
            await client.generate({"token_ids": [1], "stop_conditions": {"max_tokens": 5}})
        await runtime.shutdown()
        await serving


async def test_a_model_that_the_hub_has_not_is_told_in_the_words_of_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.backend.generate")
        for name in ("Some/Model", "hf://Some/Model@v1", "hf://Some/Model/m.gguf"):
            with pytest.raises(exceptions.InvalidArgument, match="HF_HUB_OFFLINE") as refused:
                await register_llm(ModelType.Backend, endpoint, name)
            assert refused.value.field == "model_path"
        # Bodies need no files, so none are looked for.
        await register_llm(ModelType.Chat, endpoint, "Some/Model")


async def test_a_model_that_is_cancelled_while_it_begins_is_not_listed() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as other:
        endpoint = runtime.endpoint("py.backend.generate")
        await register_llm(ModelType.Backend, endpoint, str(MODEL), "py")
        client = await other.endpoint(endpoint.name).client()
        await cancel_while_it_begins(endpoint, letters)
        await until_nobody_else_serves(client, endpoint.name)
        # Nothing of it is left in its own process either.
        serving = asyncio.ensure_future(endpoint.serve_endpoint(letters))
        await until(lambda: client.instance_ids() == [runtime.worker_id], "it is served after all")
        await runtime.shutdown()
        await serving


async def test_a_model_whose_files_are_broken_ends_when_cancelled(tmp_path: Path) -> None:
    file = tmp_path / "broken.GGUF"
    file.write_bytes(b"GGUF and then nothing")

    async with await Runtime.connect() as runtime:
        endpoint = runtime.endpoint("py.backend.generate")
        await register_llm(ModelType.Backend, endpoint, str(file))
        await cancel_while_it_begins(endpoint, letters)


@pytest.mark.parametrize("resume", [False, True])
async def test_an_answer_that_has_begun_goes_on_as_the_handler_can(resume: bool, start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    asked: list[Any] = []

    async def lost_after_two(request: Any) -> AsyncIterator[Any]:
        wanted = request["stop_conditions"].get("max_tokens") or 1
        if wanted > 1:
            asked.append(request)
        for place in range(1, wanted + 1):
            if (wanted, place) == (6, 3):
                raise exceptions.StreamIncomplete("its device is lost")
            yield {"token_ids": [40 + place]}
        yield {"token_ids": [], "finish_reason": "length"}

    def goes_on(**options: Any) -> None:
        asked.clear()
        body = {"model": "py", "prompt": "one two", "max_tokens": 6, **options}
        usage = ask(address, "/v1/completions", body)["usage"]
        first, second = asked
        assert second["token_ids"] == [*first["token_ids"], 41, 42]
        assert (second["stop_conditions"]["max_tokens"], second["resumed_tokens"]) == (4, 2)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(first["token_ids"]), 6)

    async with model(address, lost_after_two, resume=resume):
        await asyncio.to_thread(goes_on)
        if resume:
            await asyncio.to_thread(goes_on, seed=7)
        else:
            # A longer prompt does not contain the state of a seed.
            with pytest.raises(urllib.error.HTTPError):
                await asyncio.to_thread(goes_on, seed=7)
            assert len(asked) == 1


async def test_leaving_a_stream_stops_the_handler(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)
    seen: list[Any] = []

    async def endless(request: Any, context: Context) -> AsyncIterator[Any]:
        if request["stop_conditions"].get("max_tokens") == 1:
            yield {"token_ids": [1], "finish_reason": "length"}
            return
        while not context.is_stopped():
            yield {"token_ids": [1]}
            await asyncio.sleep(0.01)
        seen.append(context.stop_reason())

    async with model(address, endless):
        await asyncio.to_thread(leave, address, "py", ignore_eos=True)
        await until(lambda: seen == ["client"], "the handler is told")


async def test_events_and_load_reach_the_routers(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    async with model(address, letters, kv_events=True) as endpoint, await Runtime.connect() as other:
        KvEventPublisher(endpoint).publish_stored([11, 12])
        # The worker knows this event: an unknown one raises.
        StepPublisher(endpoint).publish()
        LoadPublisher(endpoint).publish({"kv_used_blocks": 2, "kv_total_blocks": 10})
        events = await other.endpoint("py.backend.kv_events").client()
        first = await anext(events.random(None))
        assert sorted(block["hash"] for block in first["snapshot"]["blocks"]) == [11, 12]
        loads = (await other.endpoint("py.backend.load").client()).random(None)
        assert (await anext(loads))["kv_total_blocks"] == 10


async def test_events_of_ranks_reach_the_routers(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    ranks = {"data_parallel_size": 2, "kv_events": True, "kv_ranks": True}
    async with model(address, letters, **ranks) as endpoint, await Runtime.connect() as other:
        KvEventPublisher(endpoint).publish_stored([11, 12], rank=0)
        KvEventPublisher(endpoint).publish_stored([11], rank=1)
        whole = await other.endpoint("py.backend.kv_events").client()
        of_rank = await other.endpoint("py.backend.kv_rank_events").client()
        for events, expected in [(whole.random(None), [11, 12]), (of_rank.random(0), [11, 12]), (of_rank.random(1), [11])]:
            first = await anext(events)
            assert sorted(block["hash"] for block in first["snapshot"]["blocks"]) == expected


def test_a_backend_passes_the_conformance_kit(start: Callable[..., Program], start_genset: Callable[..., Program]) -> None:
    worker = start("backend.py", str(MODEL))
    worker.wait_for("serves the model")
    kit = start_genset("conform", "run", "--endpoint", "dyn://py.backend.generate")
    assert kit.exit_code() == 0, "\n".join(kit.lines)
    assert worker.stop() == 0


async def test_an_embedding_model_answers(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    async def embed(request: Any) -> Any:
        return {"embeddings": [[float(len(tokens)), 1.0] for tokens in request["embed"]], "finish_reason": "stop"}

    async with model(address, embed, "vectors", ModelType.Embedding):
        body = {"model": "vectors", "input": ["a", "a longer text"]}
        answer = await asyncio.to_thread(ask, address, "/v1/embeddings", body)
        first, second = (each["embedding"] for each in answer["data"])
        assert first[0] < second[0]
