"""Log probabilities and structured output through the official client, with an engine that declares them."""

import json
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from genset_server import GensetServer

MODEL = Path(__file__).parent.parent / "models" / "tiny-chat"
SCRIPT = """
guided = ["json_schema"]

[[reply]]
match.contains = "begin"
text = "The day is long."
logprobs = [{ logprob = -0.2, alternatives = { A = -1.9 } }]

[[reply]]
text = '{"city": "Oslo", "degrees": 8}'
"""


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "script.toml"
    script.write_text(SCRIPT)
    with GensetServer("--script", str(script), "--model-path", str(MODEL), out="scripted") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
            yield client
        assert server.stop() == 0, server.output


@pytest.fixture
def asked(scripted):
    def ask(content, **parameters):
        messages = [{"role": "user", "content": content}]
        model = scripted.models.list().data[0].id
        return scripted.chat.completions.create(model=model, messages=messages, **parameters)

    return ask


def test_the_bytes_of_the_rated_tokens_are_the_content(asked):
    choice = asked("begin", logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content == "The day is long."
    assert tokens[0].logprob == -0.2
    assert [(top.token, top.logprob) for top in tokens[0].top_logprobs] == [("The", -0.2), ("A", -1.9)]


def test_a_stream_rates_the_same_tokens_with_their_text(asked):
    whole = asked("begin", logprobs=True, top_logprobs=2, stop=" long").choices[0]
    streamed, text = [], ""
    for chunk in asked("begin", logprobs=True, top_logprobs=2, stop=" long", stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            streamed += choice.logprobs.content if choice.logprobs else []
            rated = b"".join(bytes(token.bytes) for token in streamed).decode()
            assert text.startswith(rated), "no token tells more than the text"
    assert text == whole.message.content == "The day is"
    assert streamed == whole.logprobs.content


def test_a_completion_has_its_own_shape(scripted):
    model = scripted.models.list().data[0].id
    choice = scripted.completions.create(model=model, prompt="begin", logprobs=2).choices[0]
    rated = choice.logprobs
    assert "".join(rated.tokens) == choice.text
    assert rated.token_logprobs[0] == -0.2 and rated.top_logprobs[0] == {"The": -0.2, "A": -1.9}
    ends = [offset + len(token) for offset, token in zip(rated.text_offset, rated.tokens)]
    assert rated.text_offset == [0, *ends[:-1]]


def test_the_client_parses_an_answer_of_its_own_type(scripted):
    model = scripted.models.list().data[0].id
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    answer = scripted.chat.completions.parse(model=model, messages=messages, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Oslo", degrees=8)


def test_extensions_bind_too_and_what_the_engine_lacks_is_refused(asked):
    schema = Weather.model_json_schema()
    bound = asked("Oslo?", extra_body={"guided_json": schema})
    assert json.loads(bound.choices[0].message.content)["city"] == "Oslo"
    with pytest.raises(openai.BadRequestError) as refused:
        asked("Oslo?", extra_body={"genset": {"guided_regex": "[a-z]+"}})
    assert (refused.value.param, refused.value.code) == ("genset.guided_regex", "unsupported_parameter")
