"""Plain data as handlers and callers see it."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from typing import Any

import pytest

from genset._checks import checker
from genset._values import Record, decode, encode


@dataclasses.dataclass
class Inner:
    number: int


@dataclasses.dataclass
class Outer:
    either: Inner | dict  # type: ignore[type-arg]


def sent(value: Any) -> Any:
    """The value as the other end receives it."""
    return decode(encode(value, "a request"))


def test_maps_can_be_read_by_attribute_wherever_they_are() -> None:
    answer = sent({"choices": [{"message": {"content": "hello"}}], "usage": {"tokens": 1}})
    assert answer.choices[0].message.content == "hello"
    assert sent([{"text": "a"}])[0].text == "a"
    assert copy.deepcopy(answer) == answer == {"choices": [{"message": {"content": "hello"}}], "usage": {"tokens": 1}}
    with pytest.raises(AttributeError, match="no 'message', but choices, usage"):
        answer.message  # noqa: B018


def test_what_is_written_by_attribute_is_sent() -> None:
    request = sent({"text": "a", "options": {}, "parts": [{"number": 1}]})
    request.text = "x"
    request.options["k"] = 1
    request.parts[0].number = 2
    request.mine = {"deep": 1}
    request.mine.deep = 2
    expected = {"text": "x", "options": {"k": 1}, "parts": [{"number": 2}], "mine": {"deep": 2}}
    assert request == sent(request) == expected
    assert not vars(request)


def test_a_tuple_may_be_a_key() -> None:
    given = {"at": {(1, 2): [3], (1, (2, "a")): {"b": 4}}}
    assert sent(given) == given
    assert sent(given)["at"][1, (2, "a")].b == 4


def test_an_entry_with_the_name_of_a_method_is_read_by_its_key() -> None:
    record = Record(items=[1])
    setattr(record, "get", 2)
    assert record["items"] == [1] and list(record.items()) == [("items", [1]), ("get", 2)]
    assert record.get("items") == [1]


def test_a_map_stays_one_where_a_type_takes_any() -> None:
    check = checker(Outer)
    assert check is not None
    assert check(sent({"either": {"number": 1}})).either == {"number": 1}


class Broken:
    def model_dump(self) -> Any:
        raise ValueError("it cannot be written")


class Dated:
    """A model of a date, and of another value."""

    def __init__(self, other: Any = None) -> None:
        self.other = other

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        day = datetime.date(2026, 1, 2)
        return {"day": day.isoformat() if mode == "json" else day, "other": self.other}


class Binary:
    """A model of bytes that are no text."""

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        if mode == "json":
            raise ValueError("invalid utf-8 sequence")
        return {"data": b"\xff"}


def test_each_model_is_sent_in_the_form_that_it_needs() -> None:
    assert sent({"job": Dated(), "image": Binary()}) == {"job": {"day": "2026-01-02", "other": None}, "image": {"data": b"\xff"}}


async def forgotten() -> None:
    pass


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [{"b": 2**70}]}, "a request: a.0.b: a whole number must be from -2^63 to 2^64-1"),
        (2**70, "a request: a whole number must be from -2^63"),
        ({"text": "cut \ud83d"}, "a request: text: 'utf-8' codec can't encode character"),
        (Outer(Inner(-(2**70))), "a request: either.number: a whole number must"),
        ({"a": Broken()}, "a request: a: it cannot be written"),
        ({"a": (object(),)}, "a request: a.0: object cannot be sent: use a dict"),
        ({"a": Dated(), "b": object()}, "a request: b: object cannot be sent: use a dict"),
        ({"a": Dated(2**70)}, "a request: a.other: a whole number must"),
        ({"a": [Binary(), datetime.date(2026, 1, 2)]}, "a request: a.1: date cannot be sent: use a dict"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, problem: str) -> None:
    with pytest.raises(TypeError) as error:
        encode(value, "a request")
    assert str(error.value).startswith(problem)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="a request: 0.0.0"):
        encode(value, "a request")


def test_what_was_not_awaited_is_named() -> None:
    coroutine = forgotten()
    with pytest.raises(TypeError, match="a request: a: a coroutine cannot be sent: write `await` before what gave it"):
        encode({"a": coroutine}, "a request")
    coroutine.close()
