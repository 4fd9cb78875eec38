"""Conversion of plain data to dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import pytest

from genset._checks import checker, hints_of
from genset._values import decode, encode
from genset.exceptions import InvalidArgument


@dataclasses.dataclass
class Inner:
    number: int


@dataclasses.dataclass
class Outer:
    text: str
    inner: Inner
    several: list[Inner] = dataclasses.field(default_factory=list)
    named: dict[str, Inner] = dataclasses.field(default_factory=dict)
    ratio: float = 0.5
    maybe: Optional[Inner] = None
    either: int | str | None = None
    sequence: Sequence[Inner] = ()
    iterable: Iterable[Inner] = ()
    row: tuple[Inner, ...] = ()
    mapping: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    anything: Any = None
    made: int = dataclasses.field(default=7, init=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text must not be empty")


def built(**fields: Any) -> Any:
    check = checker(Outer)
    assert check is not None
    return check({"text": "t", "inner": {"number": 1}, **fields})


def test_what_is_in_a_dataclass_is_built_too() -> None:
    assert built() == Outer("t", Inner(1))
    fields: dict[str, Any] = {"several": [{"number": 2}], "named": {"a": {"number": 3}}, "maybe": {"number": 4}}
    expected = Outer("t", Inner(1), [Inner(2)], {"a": Inner(3)}, 2.0, Inner(4), "x", anything=[1])
    assert built(**fields, ratio=2, either="x", anything=[1]) == expected
    assert built(maybe=None, either=3) == Outer("t", Inner(1), either=3)
    number = built(inner={"number": 2.0}).inner.number
    assert number == 2 and type(number) is int


def test_a_dataclass_that_computes_a_field_arrives_as_it_was_sent() -> None:
    whole = built(sequence=[{"number": 4}], iterable=[])
    assert built(**decode(encode(whole, "a request"))) == whole
    assert built(made=8).made == 7


def test_sequences_tuples_and_mappings_are_built_as_lists_and_dicts_are() -> None:
    made = built(sequence=[{"number": 1}], iterable=[{"number": 2}], row=[{"number": 3}], mapping={"a": {"number": 4}})
    assert (made.sequence, made.iterable, made.row, made.mapping) == ([Inner(1)], [Inner(2)], (Inner(3),), {"a": Inner(4)})


def test_what_does_not_fit_is_named() -> None:
    def refused(**fields: Any) -> str:
        with pytest.raises(InvalidArgument) as error:
            built(**fields)
        return str(error.value)

    assert refused(text=1) == "text: must be a text"
    assert refused(ratio="much") == "ratio: must be a number"
    assert refused(inner={}) == "inner.number: Field required"
    assert refused(inner={"number": 1.5}) == "inner.number: must be a whole number"
    assert refused(inner={"number": True}) == "inner.number: must be a whole number"
    assert refused(inner=1) == "inner: must be a map with the fields of Inner"
    assert refused(several={}) == "several: must be a list"
    assert refused(sequence="x") == "sequence: must be a list"
    assert refused(row=[{"number": 2}, {}]) == "row.1.number: Field required"
    assert refused(mapping=[]) == "mapping: must be a map"
    assert refused(several=[{"number": 2}, {"number": "3"}]) == "several.1.number: must be a whole number"
    assert refused(named={"a": {"other": 1}}) == "named.a.other: Inner has no such field"
    assert refused(maybe=[]) == "maybe: must be a map with the fields of Inner"
    assert refused(either=1.5) == "either: must be a text"
    assert refused(text="") == "request: text must not be empty"


def test_what_there_is_no_field_for_may_be_left_out() -> None:
    check = checker(Outer, leaves_out=True)
    assert check is not None
    assert check({"text": "t", "inner": {"number": 1}, "made": 8, "other": 1}) == Outer("t", Inner(1))
    with pytest.raises(InvalidArgument, match="inner.other: Inner has no such field"):
        check({"text": "t", "inner": {"number": 1, "other": 1}})
    with pytest.raises(InvalidArgument, match="must be a map with the fields of Outer"):
        check([])


def test_other_types_are_not_checked() -> None:
    assert checker(None) is checker(int) is checker(list[int]) is None


@pytest.mark.parametrize(
    ("of", "value", "expected"),
    [
        (Optional[Inner], {"number": 1}, Inner(1)),
        (Inner | None, None, None),
        (list[Inner], [{"number": 1}], [Inner(1)]),
        (dict[str, Inner], {"a": {"number": 1}}, {"a": Inner(1)}),
        (list[Optional[Inner]], [None, {"number": 1}], [None, Inner(1)]),
        (Inner | str, "a", "a"),
    ],
)
def test_types_made_of_dataclasses_are_checked_too(of: Any, value: Any, expected: Any) -> None:
    check = checker(of)
    assert check is not None and check(value) == expected
    with pytest.raises(InvalidArgument):
        check(1)


def test_a_model_s_optional_body_is_checked_as_one_that_must_be_there() -> None:
    check = checker(Inner | None, leaves_out=True)
    assert check is not None and check({"number": 1, "stream": True}) == Inner(1)
    # Only the fields of the whole body can be left out.
    assert checker(list[Inner], leaves_out=True) is None


def test_annotations_that_cannot_be_evaluated_leave_a_method_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    for annotation in ("asyncio.Absent", "Absent", "int[str]", "any text"):

        def method(self: Any, request: Any) -> None: ...

        method.__annotations__["request"] = annotation
        assert hints_of(method) == {}
    assert len(caplog.records) == 4
