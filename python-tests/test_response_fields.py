"""Every field of the official client's Responses requests does what docs/guide/other-apis.md says."""

import json
import re
import typing
from pathlib import Path

import pytest
from openai.types.responses import input_token_count_params, response_create_params
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params.reasoning import Reasoning

from genset_server import post

GUIDE = Path(__file__).parent.parent / "docs" / "guide" / "other-apis.md"
BODY = {"model": "tiny-chat", "input": "Hello", "max_output_tokens": 4}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}

# A request for each line of the guide's table. A previous response is created when it is needed.
ASKING = {
    "model": {"model": "tiny-chat"},
    "input": {"input": [{"role": "user", "content": "Hi"}]},
    "instructions": {"instructions": "Be brief."},
    "previous_response_id": {},
    "store": {"store": False},
    "stream": {"stream": True},
    "stream_options.include_obfuscation": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "max_output_tokens": {"max_output_tokens": 3},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_logprobs": {"top_logprobs": 2},
    'include: ["message.output_text.logprobs"]': {"include": ["message.output_text.logprobs"]},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "none"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "text.format": {"text": {"format": {"type": "json_object"}}},
    "text.verbosity": {"text": {"verbosity": "low"}},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "reasoning.context": {"reasoning": {"context": "all_turns"}},
    "reasoning.mode": {"reasoning": {"mode": "pro"}},
    "reasoning.summary": {"reasoning": {"summary": "auto"}},
    "reasoning.generate_summary": {"reasoning": {"generate_summary": "auto"}},
    'include: ["reasoning.encrypted_content"]': {"include": ["reasoning.encrypted_content"]},
    "metadata": {"metadata": {"a": "b"}},
    "service_tier": {"service_tier": "flex"},
    "truncation": {"truncation": "auto"},
    "background": {"background": True},
    "conversation": {"conversation": "conv_1"},
    "prompt": {"prompt": {"id": "pmpt_1"}},
    "context_management": {"context_management": [{"type": "compaction"}]},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "access_programs": {"access_programs": {"cyber": "daybreak_blue"}},
    "image": {"image": {"context_compression": "enabled"}},
    "max_tool_calls": {"max_tool_calls": 3},
    "user": {"user": "a"},
    "safety_identifier": {"safety_identifier": "a"},
    "client_metadata": {"client_metadata": {"x-codex-installation-id": "a"}},
    "prompt_cache_key": {"prompt_cache_key": "a"},
    "cache_salt": {"cache_salt": "a"},
    "prompt_cache_options": {"prompt_cache_options": {"mode": "explicit"}},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "genset": {"genset": {"ignore_eos": True}},
    "nvext": {"nvext": {"ignore_eos": True}},
}

# An engine's refusal does not tell which of two fields requires the missing ability.
NAMED = {'include: ["message.output_text.logprobs"]': "top_logprobs"}

# The same for the route that counts a prompt's tokens.
COUNT = "/v1/responses/input_tokens"
ASKING_TO_COUNT = {
    "model": {"model": "tiny-chat"},
    "input": {"input": [{"role": "user", "content": "Hi"}]},
    "instructions": {"instructions": "Be brief."},
    "previous_response_id": {},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "none"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "text": {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    "reasoning": {"reasoning": {"summary": "auto"}},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "conv_1"},
    "personality": {"personality": "friendly"},
}


def documented(heading="## `/v1/responses`"):
    """The lines of the guide's table under a heading, each with what happens to the field."""
    body = GUIDE.read_text().split(f"\n{heading}\n", 1)[1]
    body = re.split(r"\n###? ", body, maxsplit=1)[0]
    fates = {}
    for names, fate in re.findall(r"^\| (`.*?) \| (\w+) \|", body, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            assert fates.setdefault(name, fate) == fate, f"{name} is listed twice"
    assert set(fates.values()) <= {"honoured", "refused", "ignored", "engine"}
    return fates


def ask(url, further, path="/v1/responses", body=BODY):
    return post(url + path, {**body, **further})


def said(body):
    """The text of an answer, whole or streamed."""
    if body.startswith("event:"):
        events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]
        return [part["text"] for item in events[-1]["response"]["output"] for part in item["content"]]
    return [part["text"] for item in json.loads(body)["output"] for part in item["content"]]


@pytest.mark.parametrize("line", ASKING)
def test_a_field_has_the_fate_that_is_documented(url, line):
    fate = documented()[line]
    further = ASKING[line]
    if line == "previous_response_id":
        further = {line: json.loads(ask(url, {})[1])["id"]}
    status, body = ask(url, further)
    if fate in ("honoured", "ignored"):
        assert status == 200, body
    elif fate == "refused" or status != 200:
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "unsupported_parameter"), error
        assert error["param"] == NAMED.get(line, line), error
    if fate == "ignored":
        assert said(body) == said(ask(url, {})[1])


def test_every_field_of_the_client_is_documented_and_tried():
    fates = documented()
    assert fates.keys() == ASKING.keys()
    top = {re.split(r"[.:]", line)[0] for line in fates}
    assert set(typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming)) <= top
    nested = {"reasoning": Reasoning, "text": ResponseTextConfigParam, "stream_options": response_create_params.StreamOptions}
    for name, params in nested.items():
        assert {f"{name}.{field}" for field in typing.get_type_hints(params)} <= fates.keys()


def test_a_field_of_nobody_is_unknown(url):
    error = json.loads(ask(url, {"temprature": 1})[1])["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize("field", ASKING_TO_COUNT)
def test_a_field_of_a_count_has_the_fate_that_is_documented(url, field):
    fate = documented(f"### `{COUNT}`")[field]
    further = ASKING_TO_COUNT[field]
    if field == "previous_response_id":
        further = {field: json.loads(ask(url, {})[1])["id"]}
    status, body = ask(url, further, COUNT, {"model": "tiny-chat", "input": "Hello"})
    if fate == "honoured":
        assert status == 200, body
        assert json.loads(body)["input_tokens"] > 0
    else:
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", field), error


def test_every_field_of_a_count_is_documented_and_tried():
    fields = typing.get_type_hints(input_token_count_params.InputTokenCountParams).keys()
    assert fields == documented(f"### `{COUNT}`").keys() == ASKING_TO_COUNT.keys()
