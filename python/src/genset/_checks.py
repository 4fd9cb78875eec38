"""Converts plain data to the types that methods name: pydantic models and dataclasses with their fields. Also checks what programs
declare of a model."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import json
import logging
import os
import types
import typing
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import msgpack

from genset._parsers import REASONING_ALIASES, REASONING_PARSERS, TOOL_ALIASES, TOOL_PARSERS
from genset.exceptions import InvalidArgument

logger = logging.getLogger(__name__)

MOST = 2**32 - 1
"""The largest integer allowed as an argument."""

_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a map",
}
_LIKE: dict[Any, Any] = {
    collections.abc.Iterable: list,
    collections.abc.Sequence: list,
    collections.abc.Mapping: dict,
}
"""The plain data type of each of them."""


def hints_of(annotated: Any) -> dict[str, Any]:
    """The types that a method or a class names; none if they are unknown."""
    try:
        return typing.get_type_hints(annotated)
    except Exception as error:
        # A deferred annotation may be anything: a name or an attribute that only a type checker imports, or a text.
        logger.warning("%s: its annotations are not known (%s), so bodies are not checked", annotated.__qualname__, error)
        return {}


def checker(of: Any, leaves_out: bool = False, reads_json: bool = False) -> Callable[[Any], Any] | None:
    """Returns a function that converts plain data to a pydantic model or a dataclass, or to such an optional one, or to lists, maps and
    unions of them, or raises `InvalidArgument`; None for other types. With `leaves_out` it ignores fields that a dataclass lacks, as pydantic
    models do; otherwise it refuses them. With `reads_json` a text is parsed as the JSON of a pydantic model. With either, lists, maps and
    unions stay plain data."""
    if _is_optional(of):
        (some,) = (hint for hint in typing.get_args(of) if hint is not type(None))
        check = checker(some, leaves_out, reads_json)
        return None if check is None else lambda value: None if value is None else check(value)
    if not _has_fields(of):
        is_checked = not (leaves_out or reads_json) and _names_fields(of)
        return (lambda value: _fitted(of, value, "")) if is_checked else None
    if leaves_out and dataclasses.is_dataclass(of) and "__pydantic_validator__" not in vars(of):
        names = {field.name for field in dataclasses.fields(of) if field.init}
        return lambda value: _fitted(of, _only(names, value), "")
    if reads_json and hasattr(of, "model_validate_json"):
        read = of.model_validate_json
        return lambda value: _validated(read, value, "") if isinstance(value, str | bytes) else _fitted(of, value, "")
    return lambda value: _fitted(of, value, "")


def _is_optional(of: Any) -> bool:
    return typing.get_origin(of) in (typing.Union, types.UnionType) and len(typing.get_args(of)) == 2 and type(None) in typing.get_args(of)


def _has_fields(of: Any) -> bool:
    return inspect.isclass(of) and typing.get_origin(of) is None and (hasattr(of, "model_validate") or dataclasses.is_dataclass(of))


def _names_fields(of: Any) -> bool:
    return _has_fields(of) or any(map(_names_fields, typing.get_args(of)))


def _only(names: Container[str], value: Any) -> Any:
    return {name: item for name, item in value.items() if name in names} if isinstance(value, dict) else value


def check_values(
    of: Any, values: Mapping[str, Any], names: Mapping[str, Sequence[str]], least: Mapping[str, int] | None = None
) -> None:
    """Raises `InvalidArgument`, naming the field, for a value that does not have its type in `of`, is no integer from its `least` to 2^32-1,
    or is not among its `names`, if it has any."""
    for name, hint in hints_of(of).items():
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
            # Lists may be given as tuples.
            value = list(value)
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        fitted = _fitted(hint, value, name)
        low = 0 if least is None else least.get(name, 0)
        if type(fitted) is int and not (isinstance(value, int) and low <= value <= MOST):
            raise InvalidArgument(f"{value!r} is no whole number from {low} to {MOST}", field=name)
        for each in value if isinstance(value, list) else [value]:
            check_name(each, names.get(name, ()), name)


def check_name(value: Any, names: Sequence[str], field: str) -> None:
    """Raises `InvalidArgument` if there are names and the value is not among them."""
    if names and value is not None and value not in names:
        raise InvalidArgument(f"{value!r} is none of {', '.join(names)}", field=field)


def json_of(value: Any, field: str) -> Any:
    """The value as JSON has it; raises `InvalidArgument` if JSON cannot hold it."""
    try:
        made = json.loads(json.dumps(value, allow_nan=False))
        # Numbers must fit 64 bits.
        msgpack.packb(made)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"is not what JSON can hold: {error}", field=field) from None
    return made


def check_seconds(value: float | None, field: str) -> None:
    """Raises `InvalidArgument` for a time that is not from 0 to `MOST` seconds."""
    if value is not None and not 0 <= value <= MOST:
        raise InvalidArgument(f"{value!r} is no number of seconds from 0 to {MOST}", field=field)


LIMITS = ("request_timeout", "idle_timeout", "canary_interval", "canary_timeout")
"""Times of a worker, in seconds, as `register_llm` and `WorkerConfig` name them."""


def check_limits(given: Mapping[str, Any]) -> None:
    """Raises `InvalidArgument` if one of `LIMITS` is out of range, or if `canary_timeout` is 0."""
    for name in LIMITS:
        check_seconds(given[name], name)
    if given["canary_timeout"] == 0:
        raise InvalidArgument("must be more than 0, for no engine answers at once", field="canary_timeout")


def check_parsers(tool: str | None, reasoning: str | None, tool_field: str = "tool_parser") -> None:
    """Raises `InvalidArgument` for a parser name that frontends do not know. `auto` counts as not given."""
    if tool not in (*TOOL_ALIASES, "auto"):
        check_name(tool, TOOL_PARSERS, tool_field)
    if reasoning not in (*REASONING_ALIASES, "auto"):
        check_name(reasoning, REASONING_PARSERS, "reasoning_parser")


def _fitted(hint: Any, value: Any, at: str) -> Any:
    """Converts the value to the type; `at` is the path of its field, empty for the whole."""
    of, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if of is typing.Union or of is types.UnionType:
        return _one_of(arguments, value, at)
    if isinstance(of, type) and hasattr(of, "model_validate"):
        return _validated(of.model_validate, value, at, getattr(of, "model_validate_json", None))
    if isinstance(of, type) and "__pydantic_validator__" in vars(of):
        # A pydantic dataclass.
        validator = vars(of)["__pydantic_validator__"]
        return _validated(validator.validate_python, value, at, validator.validate_json)
    if isinstance(of, type) and dataclasses.is_dataclass(of):
        return _built(of, value, at)
    if of is tuple and arguments[1:] == (...,):
        return tuple(_fitted(types.GenericAlias(list, arguments[:1]), value, at))
    if arguments:
        of = _LIKE.get(of, of)
    if of is float and type(value) is int:
        return float(value)
    if of is int and type(value) is float and value.is_integer():
        # Some clients write every number as a float.
        return int(value)
    # In Python a bool is an int.
    if of in _PLAIN and not (isinstance(value, of) and (of is bool or not isinstance(value, bool))):
        raise InvalidArgument(f"must be {_PLAIN[of]}", field=at or "request")
    if of is list and arguments:
        return [_fitted(arguments[0], item, _within(at, place)) for place, item in enumerate(value)]
    if of is dict and arguments:
        return {key: _fitted(arguments[1], item, _within(at, key)) for key, item in value.items()}
    return value


def _one_of(hints: Sequence[Any], value: Any, at: str) -> Any:
    # Maps are `Record`s, a subclass of dict.
    if type(value) in hints or (dict in hints and isinstance(value, dict)):
        return value
    others = [hint for hint in hints if hint is not type(None)]
    for hint in others[:-1]:
        try:
            return _fitted(hint, value, at)
        except InvalidArgument:
            continue
    return _fitted(others[-1], value, at)


@functools.cache
def _names_too(validate: Callable[..., Any]) -> dict[str, bool]:
    """Arguments that let pydantic, from 2.11 on, take a field by its name as well as by its alias: models are sent with the names."""
    try:
        is_known = "by_name" in inspect.signature(validate).parameters
    except ValueError:  # A C callable with an unknown signature.
        is_known = False
    return {"by_alias": True, "by_name": True} if is_known else {}


def _json_text(value: Any) -> str | None:
    """The value as JSON, or None if JSON has no such value, as for bytes."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _validated(validate: Callable[..., Any], value: Any, at: str, validate_json: Callable[..., Any] | None = None) -> Any:
    try:
        return validate(value, **_names_too(validate))
    except ValueError as error:
        if validate_json is not None and (text := _json_text(value)) is not None:
            # A strict model takes texts for dates, lists for sets and the like, as they are sent, from JSON alone.
            return _validated(validate_json, text, at)
        errors: Callable[[], list[dict[str, Any]]] | None = getattr(error, "errors", None)
        first: dict[str, Any] = errors()[0] if errors is not None else {"loc": (), "msg": str(error)}
        field = at
        for name in first["loc"]:
            field = _within(field, name)
        raise InvalidArgument(str(first["msg"]), field=field or "request") from None


def _built(of: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise InvalidArgument(f"must be a map with the fields of {of.__name__}", field=at or "request")
    fields = {field.name: field for field in dataclasses.fields(of) if field.init}
    # A dataclass is sent with the fields that it computes itself.
    computed = {field.name for field in dataclasses.fields(of) if not field.init}
    for name in value:
        if name not in fields and name not in computed:
            raise InvalidArgument(f"{of.__name__} has no such field", field=_within(at, name))
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidArgument("Field required", field=_within(at, name))
    hints = _hints_of_fields(of)
    made = {name: _fitted(hints.get(name), item, _within(at, name)) for name, item in value.items() if name in fields}
    try:
        return of(**made)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(str(error), field=at or "request") from None


@functools.cache
def _hints_of_fields(of: Any) -> dict[str, Any]:
    return hints_of(of)


def _within(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)
