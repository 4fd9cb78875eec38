"""Every request field of the official client does what docs/guide/openai-api.md says, and every response field is present."""

import json
import re
import typing
import urllib.request
from pathlib import Path

import pytest
from openai.types import Completion, Model, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

from genset_server import post

GUIDE = Path(__file__).parent.parent / "docs" / "guide" / "openai-api.md"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

CHAT = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
COMPLETION = {"model": "tiny-chat", "prompt": "Hello there and you", "max_tokens": 4}
ROUTES = {
    "chat": ("/v1/chat/completions", CHAT, chat_create_params.CompletionCreateParamsStreaming),
    "completions": ("/v1/completions", COMPLETION, completion_create_params.CompletionCreateParamsStreaming),
}
SECTIONS = {
    "chat": ("Chat completions and completions", "Chat completions only"),
    "completions": ("Chat completions and completions", "Completions only"),
}

# For each field, a value that requests something; if the APIs differ, one for each.
ASKING = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "logprobs": {"chat": True, "completions": 1},
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Hi"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "tiny-chat",
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "Hi"},
    "presence_penalty": 0.5,
    "prompt": ["Hello", "Hi"],
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "a",
    "seed": 7,
    "service_tier": "flex",
    "stop": ["l"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "suffix": "x",
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "a",
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
}

# Further fields that a field requires.
WITH = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}

# Another field that a refusal may name: the one that it depends on, if that is refused first.
NAMED = {"top_logprobs": "logprobs"}


def text_of(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def chunks_of(body):
    """The chunks of a streamed answer."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def has_three_tokens(body, plain):
    return json.loads(body)["usage"]["completion_tokens"] == 3 < plain["usage"]["completion_tokens"]


def has_two_choices(body, plain):
    return len(json.loads(body)["choices"]) == 2 > len(plain["choices"])


def is_cut_before_the_stop(body, plain):
    text = text_of(json.loads(body))
    return text_of(plain).startswith(text + "l") and "l" not in text


def ends_with_usage(body, plain):
    last = chunks_of(body)[-1]
    return last["choices"] == [] and last["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


# The effect of each honoured field on an answer's body, compared with the answer without it.
EFFECTS = {
    "echo": lambda body, plain: text_of(json.loads(body)) == COMPLETION["prompt"] + text_of(plain),
    "max_completion_tokens": has_three_tokens,
    "max_tokens": has_three_tokens,
    "messages": lambda body, plain: text_of(json.loads(body)) != text_of(plain),
    "model": lambda body, plain: json.loads(body)["model"] == "tiny-chat",
    "n": has_two_choices,
    "prompt": has_two_choices,
    "stop": is_cut_before_the_stop,
    "stream": lambda body, plain: len(chunks_of(body)) > 1,
    "stream_options": ends_with_usage,
    "tools": lambda body, plain: json.loads(body)["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"],
}

# These have an effect only if a model calls tools, which an echo does not.
SEEN_IN_CALLS = {"parallel_tool_calls", "tool_choice"}


def fields_of(params):
    return sorted(typing.get_type_hints(params))


def documented(api):
    """The fields in an API's tables, each with what happens to it."""
    text = GUIDE.read_text()
    fates = {}
    for section in SECTIONS[api]:
        body = text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
        for row in re.findall(r"^\| (`.*?) \| (\w+) \|", body, re.MULTILINE):
            for name in re.findall(r"`([^`]+)`", row[0]):
                assert fates.setdefault(name, row[1]) == row[1], f"{name} is listed twice"
    assert set(fates.values()) - {"model"} == {"honoured", "refused", "ignored", "engine"}
    return fates


def ask(url, api, further):
    path, body, _ = ROUTES[api]
    return post(url + path, {**body, **further})


def answer(url, api, further):
    status, body = ask(url, api, further)
    assert status == 200, body
    return json.loads(body)


CASES = [(api, field) for api, (_, _, params) in ROUTES.items() for field in fields_of(params)]


@pytest.mark.parametrize(("api", "field"), CASES)
def test_a_field_of_the_client_has_the_fate_that_is_documented(url, api, field):
    fates = documented(api)
    assert field in fates, f"docs/guide/openai-api.md does not say what becomes of {field}"
    assert field in ASKING, f"there is no value to try {field} with"
    value = ASKING[field]
    if isinstance(value, dict) and api in value:
        value = value[api]
    status, body = ask(url, api, {**WITH.get(field, {}), field: value})
    fate = fates[field]
    if fate in ("honoured", "ignored"):
        assert status == 200, body
        if fate == "honoured" and field not in SEEN_IN_CALLS:
            assert EFFECTS[field](body, answer(url, api, {})), body
    elif fate == "refused" or status != 200:
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, NAMED.get(field, field)), error
        assert error["code"] == "unsupported_parameter", error
    if fate == "ignored":
        assert json.loads(body)["choices"] == answer(url, api, {})["choices"]


@pytest.mark.parametrize("api", ROUTES)
def test_a_field_of_nobody_is_unknown(url, api):
    error = json.loads(ask(url, api, {"temprature": 1})[1])["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


def test_every_stream_option_is_documented():
    fates = documented("chat")
    for option in fields_of(ChatCompletionStreamOptionsParam):
        assert f"stream_options.{option}" in fates


def test_every_value_tried_is_of_a_field_that_exists():
    known = {field for _, _, params in ROUTES.values() for field in fields_of(params)}
    assert set(ASKING) == known


def missing(model, value, path=""):
    """Names of the fields that `model` declares and `value` lacks, at any depth of what it has."""
    for name, field in model.model_fields.items():
        at = f"{path}{name}"
        if name not in value:
            yield at
        for part in value.get(name) if isinstance(value.get(name), list) else [value.get(name)]:
            for inner in models_in(field.annotation):
                if isinstance(part, dict):
                    yield from missing(inner, part, f"{at}.")


def models_in(annotation):
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def test_a_whole_chat_answer_has_every_field(url):
    assert list(missing(ChatCompletion, answer(url, "chat", {"n": 2}))) == []


def test_a_whole_completion_has_every_field(url):
    assert list(missing(Completion, answer(url, "completions", {"n": 2}))) == []


def test_a_model_has_every_field(url):
    with urllib.request.urlopen(f"{url}/v1/models/tiny-chat", timeout=30) as response:
        assert list(missing(Model, json.load(response))) == []


# A delta has only what is new; these fields are for later OpenAI features; usage is in a chunk only on request.
NOT_IN_CHUNKS = {"moderation", "obfuscation"}
NOT_IN_DELTAS = {f"choices.delta.{name}" for name in ("audio", "content", "function_call", "refusal", "role", "tool_calls")}


def test_every_chunk_has_every_field(url):
    status, body = ask(url, "chat", {"stream": True, "stream_options": {"include_usage": True}})
    assert status == 200, body
    chunks = chunks_of(body)
    for chunk in chunks:
        assert set(missing(ChatCompletionChunk, chunk)) <= NOT_IN_CHUNKS | NOT_IN_DELTAS, chunk
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] is not None and set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == [] and set(chunk["usage"] is None for chunk in chunks[:-1]) == {True}
