"""Converts between a client's values and the wire, without I/O. For a model's endpoint a client writes what the handler receives and reads
what the handler yields, though the wire carries requests and outputs of the protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, cast

from genset._convert import request_to_wire
from genset._frames import pack
from genset._values import Record, decode
from genset.exceptions import Internal, InvalidArgument
from genset.types import GenerateRequest

Reader = Callable[[bytes], Any]

NOTHING = object()
"""Returned by a reader for an item that is not a value of the handler."""

_INPUTS = ("token_ids", "text", "messages", "embed", "score")


class Form(Protocol):
    """The form of one endpoint's requests and answers."""

    def write(self, payload: bytes) -> bytes:
        """The request as the endpoint takes it. `payload` is the program's value as MessagePack; raises `InvalidArgument` if it is invalid."""

    def reader(self) -> Reader:
        """Returns a reader for the items of one answer."""


class AsItIs:
    """Any endpoint but a model's."""

    def __init__(self, read: Reader) -> None:
        self._read = read

    def write(self, payload: bytes) -> bytes:
        return payload

    def reader(self) -> Reader:
        return self._read


class Generating:
    """A model whose handler takes a `GenerateRequest` and yields `GenerateChunk`s."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._endpoint = endpoint
        self._model = model

    def write(self, payload: bytes) -> bytes:
        given = decode(payload)
        # A pydantic model writes absent fields as None.
        request = {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}
        if sum(name in request for name in _INPUTS) != 1:
            raise InvalidArgument(
                f"{self._endpoint} serves a model: give a map with one of {', '.join(_INPUTS)}, a GenerateRequest", field="request"
            )
        for name in request:
            if name not in GenerateRequest.__annotations__:
                raise InvalidArgument("a GenerateRequest has no such field", field=str(name))
        return pack(request_to_wire(cast(GenerateRequest, {**request, "model": request.get("model") or self._model})))

    def reader(self) -> Reader:
        return _Chunks(self._endpoint).read


class _Chunks:
    """The chunks of one answer."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._whole = Record()
        """What arrives in one piece with the end: vectors and scores."""

    def read(self, item: bytes) -> Any:
        ((kind, value),) = decode(item).items()
        if kind in ("tokens", "text"):
            return value
        if kind in ("embeddings", "scores"):
            # An engine may give them in parts.
            self._whole[kind] = [*self._whole.get(kind, ()), *value]
            return NOTHING
        if kind == "finished":
            return self._last(value)
        raise Internal(f"{self._endpoint} answered with {kind!r}, which this version of the package does not know")

    def _last(self, finished: Record) -> Record:
        usage = finished["usage"]
        last = finished.get("last") or {}
        chunk = Record({name: value for name, value in last.items() if value}, **self._whole) or Record(token_ids=[])
        chunk["finish_reason"] = finished["reason"]
        chunk["completion_usage"] = Record(usage, total_tokens=usage["prompt_tokens"] + usage["completion_tokens"])
        for name in ("stop_token", "transfer"):
            if finished.get(name) is not None:
                chunk[name] = finished[name]
        return chunk


class Whole:
    """A model whose handler takes the bodies of clients and yields the API's objects."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._endpoint = endpoint
        self._model = model

    def write(self, payload: bytes) -> bytes:
        body = decode(payload)
        if isinstance(body, dict):
            body = json.dumps(body)
        elif not isinstance(body, str):
            raise InvalidArgument(f"{self._endpoint} serves a model: give the body of a request, a map or its JSON text", field="request")
        return pack({"model": self._model, "input": {"text": body}})

    def reader(self) -> Reader:
        return _object


def _object(item: bytes) -> Any:
    output = decode(item)
    return json.loads(output["text"]["text"], object_hook=Record) if "text" in output else NOTHING


def form_of(endpoint: str, model: str | None, reads_bodies: bool, read: Reader) -> Form:
    """The form of an endpoint, given the name of its model, if it serves one. `read` decodes the items of all others."""
    if model is None:
        return AsItIs(read)
    return Whole(endpoint, model) if reads_bodies else Generating(endpoint, model)
