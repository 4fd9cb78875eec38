"""Services as classes, in one process and as `genset serve` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import enum
import json
import urllib.error
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pydantic.dataclasses
import pytest
from conftest import Program, run
from pydantic import BaseModel, Field
from test_llm import ask, frontend, until_known

from genset import exceptions, sdk
from genset._checks import checker
from genset._values import decode, encode
from genset.dynamo.sdk import DYNAMO_IMAGE, async_on_start, dynamo_endpoint
from genset.dynamo.sdk import service as dynamo_service
from genset.llm import ModelType, register_llm
from genset.runtime import Runtime, get_runtime
from genset.sdk import ServiceSpec, depends, endpoint, endpoint_of, on_shutdown, on_start, service


class Text(BaseModel):
    text: str


@dataclasses.dataclass
class Count:
    number: int


events: list[str] = []


@service(namespace="demo", resources={"cpu": 2, "gpu": 0}, workers=3)
class Upper:
    @endpoint()
    async def generate(self, request: Text) -> AsyncIterator[Text]:
        for word in request.text.split():
            yield Text(text=word.upper())

    @endpoint(name="next")
    def count(self, request: Count) -> Count:
        return Count(request.number + 1)


@service(namespace="demo", name="front")
class Twice:
    upper = depends(Upper)

    @on_start
    async def begin(self) -> None:
        # From here on its dependencies can be called.
        events.append((await self.upper.next(Count(1))).number)

    @on_shutdown
    def end(self) -> None:
        events.append("end")

    @endpoint()
    async def generate(self, request: Text) -> AsyncIterator[Any]:
        async for answer in self.upper.generate(request):
            assert isinstance(answer, Text)
            yield answer
            yield answer


@dynamo_service(dynamo={"enabled": True, "namespace": "other"}, image=DYNAMO_IMAGE)
class Ported:
    @dynamo_endpoint()
    async def generate(self, req: Text) -> Text:
        return Text(text=f"ported {req.text}")


def test_a_graph_of_services_answers() -> None:
    events.clear()

    async def main() -> None:
        async with await Runtime.connect() as caller, await Runtime.connect() as runtime:
            serving = [asyncio.ensure_future(sdk.serve(cls, runtime)) for cls in (Upper, Twice, Ported)]
            client = await caller.endpoint("demo.front.generate").client()
            await client.wait_for_instances(60)
            assert [item.text async for item in client.random(Text(text="a b"))] == ["A", "A", "B", "B"]
            ported = await caller.endpoint("other/Ported/generate").client()
            assert (await ported.generate({"text": "x"})).text == "ported x"
            assert (await ported.generate(Text(text="y").model_dump_json())).text == "ported y"
            for words in ({"words": "x"}, '{"words": "x"}'):
                with pytest.raises(exceptions.InvalidArgument, match="text: Field required"):
                    await ported.generate(words)
            with pytest.raises(exceptions.InvalidArgument, match="request: Invalid JSON"):
                await ported.generate("{")
            count = await caller.endpoint("demo.Upper.next").client()
            assert (await count.generate(Count(7))).number == 8
            with pytest.raises(exceptions.InvalidArgument, match="other: Count has no such field"):
                await count.generate({"other": 1})
            with pytest.raises(exceptions.InvalidArgument, match="number: Field required"):
                await count.generate({})
            await runtime.shutdown()
            await asyncio.gather(*serving)

    run(main())
    assert events == [2, "end"]


@service(namespace="demo")
class Liar:
    @endpoint()
    async def generate(self, request: Any) -> Text:
        return {"words": 1}  # type: ignore[return-value]


@service(namespace="demo")
class Believer:
    liar = depends(Liar)

    @endpoint()
    async def generate(self, request: Any) -> Any:
        return await self.liar.generate(request)


async def test_a_wrong_answer_is_not_its_asker_s_fault() -> None:
    async with await Runtime.connect() as caller, await Runtime.connect() as runtime:
        serving = [asyncio.ensure_future(sdk.serve(cls, runtime)) for cls in (Liar, Believer)]
        client = await caller.endpoint("demo.Believer.generate").client()
        await client.wait_for_instances(60)
        with pytest.raises(exceptions.Internal, match="demo.Liar.generate answered .*: text: Field required"):
            await client.generate({})
        await runtime.shutdown()
        await asyncio.gather(*serving)


@dynamo_service(dynamo={"enabled": True, "namespace": "other"})
class Writer:
    @dynamo_endpoint()
    async def write(self, request: Text) -> AsyncIterator[Text]:
        yield Text(text=request.text)
        # As programs of Dynamo do, whatever the method says it gives.
        yield Text(text=request.text).model_dump_json()  # type: ignore[misc]


@service(namespace="other")
class Parser:
    writer = depends(Writer)

    @endpoint()
    async def parse(self, request: Text) -> AsyncIterator[str]:
        async for answer in self.writer.write(request):
            yield (answer if isinstance(answer, Text) else Text.model_validate_json(answer)).text


async def test_an_answer_of_json_text_reaches_its_asker_as_it_is() -> None:
    async with await Runtime.connect() as caller, await Runtime.connect() as runtime:
        serving = [asyncio.ensure_future(sdk.serve(cls, runtime)) for cls in (Writer, Parser)]
        client = await caller.endpoint("other.Parser.parse").client()
        await client.wait_for_instances(60)
        assert [item async for item in client.generate(Text(text="a"))] == ["a", "a"]
        await runtime.shutdown()
        await asyncio.gather(*serving)


@service(namespace="demo")
class Pair:
    @endpoint()
    async def first(self, request: Any) -> Any:
        return request

    @endpoint()
    async def second(self, request: Any) -> Any:
        return request

    @on_start
    async def begin(self) -> None:
        self.runtime = await get_runtime()

    @on_shutdown
    def end(self) -> None:
        events.append([each.name for each in self.runtime._services])


def test_on_shutdown_comes_when_the_other_endpoints_have_ended_too() -> None:
    events.clear()

    async def echo(request: Any) -> Any:
        return request

    async def main() -> None:
        async with await Runtime.connect() as runtime:
            taken = asyncio.ensure_future(runtime.endpoint("demo.Pair.second").serve_endpoint(echo))
            await asyncio.sleep(0)
            with pytest.raises(exceptions.InvalidArgument, match="demo.Pair.second is served by this process already"):
                await sdk.serve(Pair, runtime)
            await runtime.shutdown()
            await taken

    run(main())
    assert events == [["demo.Pair.second"]]


@service(namespace="demo")
class Patient:
    def __init__(self) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        patients.append(self)

    @endpoint()
    async def idle(self, request: Any) -> Any:
        return request

    @endpoint()
    async def busy(self, request: Any) -> Any:
        self.begun.set()
        await self.goes_on.wait()
        events.append("answered")
        return request

    @on_shutdown
    def end(self) -> None:
        events.append("end")


patients: list[Patient] = []


def test_requests_of_a_service_whose_task_is_cancelled_end_before_on_shutdown() -> None:
    events.clear()
    patients.clear()

    async def main() -> None:
        async with await Runtime.connect() as caller, await Runtime.connect() as runtime:
            serving = asyncio.ensure_future(sdk.serve(Patient, runtime))
            client = await caller.endpoint("demo.Patient.busy").client()
            await client.wait_for_instances(60)

            async def ask() -> Any:
                return await client.generate([7])

            asking = asyncio.ensure_future(ask())
            await patients[0].begun.wait()
            serving.cancel()
            # The idle endpoint ends, and a task that waits for it sees that.
            while len(runtime._services) > 1:
                await asyncio.sleep(0.01)
            for _ in range(10):
                await asyncio.sleep(0)
            patients[0].goes_on.set()
            assert await asking == [7]
            with pytest.raises(asyncio.CancelledError):
                await serving

    run(main())
    assert events == ["answered", "end"]


@pydantic.dataclasses.dataclass
class Size:
    number: int = pydantic.Field(gt=0)


@dataclasses.dataclass
class Box:
    sizes: list[Size]


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]


@service(namespace="demo")
class Chatter:
    @on_start
    async def register(self) -> None:
        await register_llm(ModelType.Chat, endpoint_of(self, "chat"), "chatter")

    @endpoint()
    async def chat(self, request: ChatRequest) -> AsyncIterator[str]:
        yield f"{request.model} heard {request.messages[-1].content}"


@contextlib.asynccontextmanager
async def offered(address: str, cls: type, name: str) -> AsyncIterator[None]:
    """Serves a class, and waits until the frontend knows its model."""
    async with await Runtime.connect() as runtime:
        serving = asyncio.ensure_future(sdk.serve(cls, runtime))
        await until_known(address, name, serving)
        yield
        await runtime.shutdown()
        await serving


@dynamo_service(dynamo={"enabled": True, "namespace": "other"})
class Offered:
    @async_on_start
    async def prepare(self) -> None:
        self.end = "!"

    @dynamo_endpoint(name="my_chat_completions_endpoint", model="offered", context_length=100)
    async def generate(self, request: ChatRequest) -> AsyncIterator[str]:
        yield f"{request.messages[-1].content}{self.end}"

    @dynamo_endpoint()
    async def plain(self, request: Any) -> Any:
        return request


async def test_a_method_is_offered_over_http_by_its_decorator(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    def asks() -> None:
        answer = ask(address, "/v1/chat/completions", {"model": "offered", "messages": [{"role": "user", "content": "hello"}]})
        assert answer["choices"][0]["message"]["content"] == "hello!"
        assert ask(address, "/v1/models/offered")["max_model_len"] == 100

    async with offered(address, Offered, "offered"), await Runtime.connect() as caller:
        await asyncio.to_thread(asks)
        assert await (await caller.endpoint("other.Offered.plain").client()).generate([7]) == [7]


@service(namespace="other")
class Asker:
    front = depends(Offered)

    @endpoint()
    async def ask(self, request: Any) -> AsyncIterator[str]:
        body = {"model": "offered", "messages": [{"role": "user", "content": request}]}
        answer = await self.front.my_chat_completions_endpoint(body)
        yield answer.choices[0].message.content
        async for chunk in self.front.my_chat_completions_endpoint(json.dumps({**body, "stream": True})):
            yield chunk.choices[0].delta.get("content", "")


async def test_a_service_asks_a_method_that_is_offered_with_a_body() -> None:
    async with await Runtime.connect() as runtime, await Runtime.connect() as caller:
        serving = [asyncio.ensure_future(sdk.serve(each, runtime)) for each in (Offered, Asker)]
        client = await caller.endpoint("other.Asker.ask").client()
        await (await caller.endpoint("other.Offered.my_chat_completions_endpoint").client()).wait_for_instances()
        whole, *pieces = [item async for item in client.generate("hello")]
        assert whole == "".join(pieces) == "hello!"
        await runtime.shutdown()
        await asyncio.gather(*serving)


def test_what_is_offered_is_checked_where_it_stands() -> None:
    (offer,) = ServiceSpec.of(Offered).models.values()
    assert (offer.name, offer.kind, offer.options) == ("offered", ModelType.Chat, {"context_length": 100, "migration_limit": 0})
    assert ServiceSpec.of(Chatter).models == {}
    with pytest.raises(TypeError, match=r"endpoint\(sampling=...\) is about a model: give its name"):
        endpoint(sampling=("seed",))
    with pytest.raises(TypeError, match="know no sampler"):
        endpoint(model="m", sampler=1)
    with pytest.raises(TypeError, match="give model_path too"):
        endpoint(model="m", model_type=ModelType.Backend)


def refused(address: str, body: Any) -> tuple[int, Any]:
    """The status and the error of a refused chat."""
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(address, "/v1/chat/completions", body)
    with error.value as response:
        return response.status, json.loads(response.read())["error"]


async def test_a_body_is_of_the_type_that_a_model_s_method_names(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    def asks() -> None:
        body: dict[str, Any] = {"model": "chatter", "messages": [{"role": "user", "content": "hello"}], "of_mine": 1}
        answer = ask(address, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "chatter heard hello"
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]
        status, error = refused(address, body)
        assert (status, error["param"]) == (400, "messages.0.content"), error
        assert "should be a valid string" in error["message"]

    async with offered(address, Chatter, "chatter"):
        await asyncio.to_thread(asks)


@dataclasses.dataclass
class Asked:
    messages: list[dict[str, Any]]
    mine: str


class Strict(BaseModel, extra="forbid"):
    messages: list[Message]


@service(namespace="demo")
class OfDataclass:
    @endpoint(model="of-dataclass")
    async def generate(self, request: Asked) -> AsyncIterator[str]:
        yield f"{request.messages[-1]['content']} {request.mine}"

    @endpoint(model="of-strict")
    async def strict(self, request: Strict) -> AsyncIterator[str]:
        yield request.messages[-1].content


async def test_a_type_that_the_canary_does_not_fit_is_served(start_genset: Callable[..., Program]) -> None:
    address = frontend(start_genset)

    def asks() -> None:
        body: dict[str, Any] = {"model": "of-dataclass", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        answer = ask(address, "/v1/chat/completions", {**body, "mine": "there"})
        assert answer["choices"][0]["message"]["content"] == "hello there"
        status, error = refused(address, body)
        assert (status, error["param"]) == (400, "mine"), error

    async with offered(address, OfDataclass, "of-dataclass"):
        await asyncio.to_thread(asks)
        while "of-strict" not in [each["id"] for each in (await asyncio.to_thread(ask, address, "/v1/models"))["data"]]:
            await asyncio.sleep(0.05)


def test_a_dataclass_of_pydantic_s_is_checked_by_pydantic() -> None:
    check = checker(Size)
    assert check is not None
    assert check({"number": "3"}) == Size(3)
    with pytest.raises(exceptions.InvalidArgument, match="number: .*greater than 0"):
        check({"number": 0})
    check = checker(Box)
    assert check is not None
    assert check({"sizes": [{"number": "4"}]}) == Box([Size(4)])
    with pytest.raises(exceptions.InvalidArgument, match=r"sizes\.0\.number: .*greater than 0"):
        check({"sizes": [{"number": 0}]})


class Aliased(BaseModel):
    sender: str = pydantic.Field(alias="from")
    inner: list[Aliased] = []


def test_a_model_whose_fields_have_aliases_arrives_as_it_was_sent() -> None:
    check = checker(Aliased, reads_json=True)
    assert check is not None
    whole = Aliased.model_validate({"from": "a", "inner": [{"from": "b"}]})
    assert check(decode(encode(whole, "an answer"))) == whole
    assert check({"from": "a", "inner": [{"from": "b"}]}) == check(whole.model_dump_json()) == whole
    with pytest.raises(exceptions.InvalidArgument, match="inner.0.from: Field required"):
        check({"sender": "a", "inner": [{}]})


class Job(BaseModel):
    number: uuid.UUID
    at: datetime.datetime
    took: datetime.timedelta


def test_a_model_of_dates_and_the_like_arrives_as_it_was_sent() -> None:
    job = Job(number=uuid.UUID(int=7), at=datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), took=datetime.timedelta(seconds=3))
    sent = decode(encode({"jobs": [job]}, "a request"))
    assert sent.jobs[0].number == str(job.number)
    check = checker(Job)
    assert check is not None
    assert check(sent.jobs[0]) == job


class Photo(BaseModel):
    pixels: bytes
    at: datetime.datetime


def test_a_model_of_bytes_and_dates_arrives_as_it_was_sent() -> None:
    photo = Photo(pixels=b"\xff\xd8", at=datetime.datetime(2026, 1, 2))
    check = checker(Photo)
    assert check is not None
    assert check(decode(encode(photo, "a request"))) == photo


def test_a_field_that_cannot_be_sent_is_named_also_by_its_alias() -> None:
    class Aliased(BaseModel):
        model_config = {"serialize_by_alias": True}
        pixels: bytes
        at: datetime.datetime = Field(alias="takenAt")

    with pytest.raises(TypeError, match="takenAt: datetime cannot be sent"):
        encode(Aliased(pixels=b"\xff\xd8", takenAt=datetime.datetime(2026, 1, 2)), "a request")


class Kind(enum.Enum):
    SMALL = "small"


class StrictJob(BaseModel, strict=True):
    at: datetime.datetime
    kind: Kind
    parts: set[int] = pydantic.Field(alias="of")
    size: tuple[int, int]


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True))
class StrictDay:
    day: datetime.date


def test_a_strict_model_arrives_as_it_was_sent() -> None:
    job = StrictJob(at=datetime.datetime(2026, 1, 2), kind=Kind.SMALL, of={7}, size=(1, 2))
    day = StrictDay(datetime.date(2026, 1, 2))
    check, check_day = checker(StrictJob), checker(StrictDay)
    assert check is not None and check_day is not None
    sent = decode(encode(job, "a request"))
    assert check(sent) == job
    assert check_day({"day": "2026-01-02"}) == day
    for wrong, problem in [({"parts": ["7"]}, "0: Input should be a valid integer"), ({"size": [1]}, "size.1: Field required")]:
        with pytest.raises(exceptions.InvalidArgument, match=problem):
            check({**sent, **wrong})
    with pytest.raises(exceptions.InvalidArgument, match="at: Input should be a valid datetime"):
        # JSON has no bytes.
        check({**sent, "kind": b"small"})


def test_a_spec_says_what_the_class_has() -> None:
    spec = ServiceSpec.of(Upper)
    assert (spec.name, spec.namespace, spec.workers, spec.resources) == ("Upper", "demo", 3, {"cpu": "2", "gpu": "0"})
    assert spec.endpoints == {"generate": "generate", "next": "count"}
    assert [each.cls for each in ServiceSpec.of(Twice).graph()] == [Upper, Twice]


def test_declarations_that_cannot_work_say_why() -> None:
    with pytest.raises(TypeError, match="knows cpu, memory and gpu, not tpu"):
        service(resources={"tpu": 1})
    for cpu in ("half", "1k", "-1", "nan", ""):
        with pytest.raises(ValueError, match=f"cpu: '{cpu}' is no number of cores, such as 2, 0.5 or 500m"):
            service(resources={"cpu": cpu})
    with pytest.raises(TypeError, match="not image_tag"):
        service(dynamo={"image_tag": "x"})
    with pytest.raises(TypeError, match="decorate the class with @service"):
        depends(int)
    with pytest.raises(TypeError, match="with brackets"):

        class Wrong:
            @endpoint  # type: ignore[arg-type]
            def generate(self, request: Any) -> Any: ...

    with pytest.raises(RuntimeError, match="not in __init__"):
        Twice().upper  # noqa: B018
    with pytest.raises(ImportError, match="genset.dynamo.llm has no HttpService: run `genset run in=http out=dyn`"):
        from genset.dynamo.llm import HttpService  # noqa: F401
    with pytest.raises(ImportError, match="genset.dynamo.llm has no ModelInput: register_llm takes ModelType.Backend for a handler of tokens"):
        from genset.dynamo.llm import ModelInput  # noqa: F401


async def test_a_script_gets_the_runtime_of_its_loop() -> None:
    runtime = await get_runtime()
    assert await get_runtime() is runtime
    await runtime.shutdown()
    again = await get_runtime()
    assert again is not runtime
    await again.shutdown()
