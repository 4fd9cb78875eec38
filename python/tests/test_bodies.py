"""Answers of handlers of bodies, without the native module."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from genset._bodies import Bodies
from genset._frames import pack, unpack
from genset.exceptions import Internal


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_answer_with_a_number_that_json_has_not_is_refused(number: float, is_stream: bool) -> None:
    body = {"messages": [], "stream": is_stream}
    _, answer = Bodies("demo.chat.answer", "m", lambda: None).request(pack({"input": {"text": json.dumps(body)}}))
    made: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"logprob": number}]}}]}
    with pytest.raises(Internal, match="an answer of demo.chat.answer is no JSON: Out of range float"):
        answer.items(made)
        answer.finish()


@pytest.mark.parametrize(("is_stream", "kept"), [(False, 2), (True, 0)])
def test_each_piece_that_is_kept_for_the_end_is_told(is_stream: bool, kept: int) -> None:
    told: list[None] = []
    body = {"messages": [], "stream": is_stream}
    _, answer = Bodies("demo.chat.answer", "m", lambda: told.append(None)).request(pack({"input": {"text": json.dumps(body)}}))
    answer.items("text")
    answer.items({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    assert len(told) == kept


class Model:
    """Has fields as a pydantic model has them."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, exclude_none: bool) -> dict[str, Any]:
        return self.fields


@pytest.mark.parametrize("part", ["delta", "message"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_parts_of_an_object_may_be_models(is_stream: bool, part: str) -> None:
    body = {"messages": [], "stream": is_stream}
    _, answer = Bodies("demo.chat.answer", "m", lambda: None).request(pack({"input": {"text": json.dumps(body)}}))
    call = Model(id="c", function={"name": "look", "arguments": "{}"})
    choice = Model(index=0, **{part: Model(content="a", tool_calls=[call])})
    items = answer.items({"choices": [choice], "usage": Model(completion_tokens=4, prompt_tokens_details=Model(cached_tokens=2))})
    items += answer.finish()
    made = json.loads(unpack(items[0])["text"]["text"])["choices"][0]["delta" if is_stream else "message"]
    assert (made["content"], made["tool_calls"][0]["function"]["name"]) == ("a", "look")
    usage = unpack(items[-1])["finished"]["usage"]
    assert (usage["completion_tokens"], usage["cached_tokens"]) == (4, 2)
