"""Converts the program's values to MessagePack and back: plain data, pydantic models and dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgpack


class Record(dict[str, Any]):
    """A map of a request or an answer: a dictionary whose entries are also attributes. Names of dictionary methods, such as `items`, `values`
    and `get`, stay methods: read such an entry as `record["items"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r}, but {', '.join(map(str, self)) or 'nothing'}") from None
        if type(value) is dict:
            # The program put it there. Writes to it must persist.
            value = self[name] = Record(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _plain(value: Any) -> Any:
    """Converts what MessagePack does not know to plain data."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, int):
        raise TypeError("a whole number must be from -2^63 to 2^64-1")
    if inspect.isawaitable(value):
        raise TypeError(f"a {type(value).__name__} cannot be sent: write `await` before what gave it")
    raise TypeError(
        f"{type(value).__name__} cannot be sent: use a dict, list, str, bytes, number, bool or None, a dataclass or a pydantic model"
    )


def _as_json(value: Any) -> Any:
    """As `_plain`, but a model that MessagePack cannot hold is as JSON has it, with texts for dates, UUIDs and the like, which pydantic
    reads again. Of one that JSON cannot hold either, such as one with bytes that are no text, only the fields that need it are."""
    plain = _plain(value)
    dump = getattr(value, "model_dump", None)
    if dump is None or _fits(plain, _plain):
        return plain
    with contextlib.suppress(*_UNFIT):
        return dump(mode="json")
    for name in [name for name, each in plain.items() if not _fits(each, _plain)] if isinstance(plain, dict) else ():
        with contextlib.suppress(*_UNFIT):
            plain.update(dump(mode="json", include={name}))
    return plain


def _fits(value: Any, default: Callable[[Any], Any]) -> bool:
    try:
        msgpack.packb(value, default=default)
    except _UNFIT:
        return False
    return True


_UNFIT = (TypeError, ValueError, OverflowError)
_DEEPEST_NAMED = 16
"""The most levels of nesting that an error names."""


def _fault(value: Any, depth: int = 0) -> list[str]:
    """The names on the path to what cannot be packed in the value."""
    if not isinstance(value, Mapping | list | tuple):
        try:
            value = _as_json(value)
        except _UNFIT:
            return []
    inner = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, each in inner if depth < _DEEPEST_NAMED else ():
        if not _fits(each, _as_json):
            return [str(name), *_fault(each, depth + 1)]
    return []


def encode(value: Any, what: str, *, has_single_floats: bool = False) -> bytes:
    """Encodes the value as MessagePack, its fractions with 64 bits, or with 32. `what` names it in errors, before the field: "a request",
    "an answer of demo.text.upper"."""
    try:
        packed = msgpack.packb(value, default=_plain, use_single_float=has_single_floats)
    except _UNFIT:
        try:
            packed = msgpack.packb(value, default=_as_json, use_single_float=has_single_floats)
        except _UNFIT as error:
            field = ".".join(_fault(value))
            at = f"{field}: " if field else ""
            raise TypeError(f"{what}: {at}{error}") from error
    assert isinstance(packed, bytes)
    return packed


def decode(payload: bytes) -> Any:
    """Decodes the value; every map in it is a `Record`."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False, object_hook=Record)
    except TypeError:
        # MessagePack has lists for tuples, and a list is no key.
        return msgpack.unpackb(payload, strict_map_key=False, object_pairs_hook=_record)


def _record(pairs: list[tuple[Any, Any]]) -> Record:
    return Record((_key(key), value) for key, value in pairs)


def _key(key: Any) -> Any:
    return tuple(map(_key, key)) if isinstance(key, list) else key
