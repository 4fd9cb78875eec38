"""What clients write to the endpoints of models, and what they read, without the native module."""

from __future__ import annotations

from typing import Any

import pytest

from genset._convert import Answer, request_from_wire
from genset._forms import NOTHING, form_of
from genset._frames import pack, unpack
from genset._values import decode
from genset.exceptions import InvalidArgument

GENERATING = form_of("a.b.c", "m", False, decode)
WHOLE = form_of("a.b.c", "m", True, decode)


@pytest.mark.parametrize(
    "wire",
    [
        {"model": "x", "input": {"tokens": [1, 2]}, "stop": {"max_tokens": 3}, "sampling": {"logit_bias": {5: 1.0}}, "guided": "json_object"},
        {"model": "x", "input": {"chat": {"messages": [{"role": "user"}], "tools": []}}, "guided": {"regex": "a"}, "priority": 2},
        {"model": "x", "input": {"tokens": [1]}, "transfer": {"source_worker_id": 0, "data": [1]}, "resumed_tokens": 1, "cache_salt": "s"},
        {"model": "x", "input": {"text": "t"}, "adapter": "a", "data_parallel_rank": 1, "annotations": {"k": 1}, "output": {"logprobs": 2}},
        {"model": "x", "input": {"score": [{"token_ids": [1, 2], "first_tokens": 1}]}},
        {"model": "x", "input": {"embed": [[1], [2]]}},
    ],
)
def test_a_request_that_a_handler_passes_on_is_the_one_it_got(wire: dict[str, Any]) -> None:
    request = request_from_wire(wire)
    assert request_from_wire(unpack(GENERATING.write(pack(request)))) == request


def test_a_field_of_none_is_absent_and_the_model_is_that_of_the_endpoint() -> None:
    assert unpack(GENERATING.write(pack({"token_ids": [1]})))["model"] == "m"
    absent = {"text": None, "stop_conditions": None, "model": None}
    assert unpack(GENERATING.write(pack({"token_ids": [1], **absent}))) == {"model": "m", "input": {"tokens": [1]}}
    assert unpack(WHOLE.write(pack({"messages": []}))) == {"model": "m", "input": {"text": '{"messages": []}'}}


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ([1], "request: a.b.c serves a model: give a map with one of token_ids, "),
        ({"tokens": [1]}, "request: a.b.c serves a model: "),
        ({"token_ids": [1], "text": "a"}, "request: a.b.c serves a model: "),
        ({"token_ids": [1], "max_tokens": 5}, "max_tokens: a GenerateRequest has no such field"),
    ],
)
def test_what_is_no_request_is_refused(request_: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GENERATING.write(pack(request_))
    assert str(error.value).startswith(problem)


def test_outputs_are_read_as_chunks() -> None:
    def read(*items: Any) -> list[Any]:
        reader = GENERATING.reader()
        return [value for value in map(reader, map(pack, items)) if value is not NOTHING]

    usage = {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": None}
    told = {**usage, "total_tokens": 3}
    logprobs = [{"logprob": -0.5, "top": []}]
    tokens = {"token_ids": [7], "logprobs": logprobs}
    transfer = {"source_worker_id": 1, "data": 2}
    finished = {"reason": "stop", "usage": usage, "last": {"token_ids": []}, "stop_token": 9}
    end = {"finish_reason": "stop", "completion_usage": told, "stop_token": 9}
    assert read({"tokens": tokens}, {"finished": finished}) == [tokens, {"token_ids": [], **end}]
    assert read({"text": {"text": "a", "token_count": 1}}, {"finished": finished}) == [
        {"text": "a", "token_count": 1},
        {"token_ids": [], **end},
    ]
    assert read({"embeddings": [[0.5]]}, {"finished": finished}) == [{"embeddings": [[0.5]], **end}]
    handed = {"reason": "length", "usage": usage, "last": tokens, "transfer": transfer}
    assert read({"finished": handed}) == [{**tokens, "finish_reason": "length", "completion_usage": told, "transfer": transfer}]


def test_the_usage_that_a_handler_passes_on_is_the_one_it_got() -> None:
    counts = {"predictions": {"accepted": 3, "rejected": 1}}
    usage = {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 1, **counts}
    last = GENERATING.reader()(pack({"finished": {"reason": "stop", "usage": usage}}))
    (item,) = Answer({"token_ids": [1, 2]}).items(last)
    assert unpack(item)["finished"]["usage"] == usage


def test_vectors_and_scores_that_come_in_parts_are_one_answer() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 0}
    answers: dict[str, list[Any]] = {"embeddings": [[[0.5], [0.25]], [[1.0]]], "scores": [[0.5, 0.25], [1.0]]}
    for kind, parts in answers.items():
        reader = GENERATING.reader()
        assert [reader(pack({kind: part})) for part in parts] == [NOTHING, NOTHING]
        last = reader(pack({"finished": {"reason": "stop", "usage": usage}}))
        assert last[kind] == [*parts[0], *parts[1]]


def test_the_objects_of_a_body_are_read_and_its_end_is_none() -> None:
    reader = WHOLE.reader()
    assert reader(pack({"text": {"text": '{"choices": [{"index": 0}]}', "token_count": 0}})).choices[0].index == 0
    assert reader(pack({"finished": {"reason": "stop", "usage": {}, "last": {}}})) is NOTHING
