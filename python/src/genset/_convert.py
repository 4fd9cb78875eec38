"""Conversions between the worker's maps and the dictionaries that engines see."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any, cast

import msgpack

from genset._values import encode
from genset.exceptions import Internal, InvalidArgument
from genset.types import GenerateChunk, GenerateRequest, Load, OutputOptions, SamplingOptions, StopConditions

logger = logging.getLogger(__name__)

_REASONS = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "length": "length",
    "max_tokens": "length",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "abort": "cancelled",
    "aborted": "cancelled",
    "content_filter": "content_filter",
}


_TOKENS_PREFIX = b"\x81\xa6tokens\x81\xa9token_ids"  # {"tokens": {"token_ids": ...}}
TOKEN_PREFIX = _TOKENS_PREFIX + b"\x91\xce"
"""The prefix of an item with one token. The token id follows as four bytes, big endian."""
_PACKER = msgpack.Packer()
"""Used only by the thread that packs answers. Made once: making one costs more than packing a token."""


def request_from_wire(wire: dict[str, Any]) -> GenerateRequest:
    """The request as an engine sees it."""
    request: GenerateRequest = {
        "model": wire["model"],
        "stop_conditions": cast(StopConditions, wire.get("stop") or {}),
        "sampling_options": cast(SamplingOptions, wire.get("sampling") or {}),
        "output_options": cast(OutputOptions, wire.get("output") or {}),
        "guided_decoding": _guided(wire.get("guided")),
        "priority": wire.get("priority", 0),
        "cache_salt": wire.get("cache_salt"),
        "adapter": wire.get("adapter"),
        "transfer": wire.get("transfer"),
        "resumed_tokens": wire.get("resumed_tokens", 0),
        "data_parallel_rank": wire.get("data_parallel_rank"),
        "annotations": wire.get("annotations") or {},
    }
    ((kind, value),) = wire["input"].items()
    if kind == "tokens":
        request["token_ids"] = value
    elif kind == "text":
        request["text"] = value
    elif kind == "chat":
        request["messages"], request["tools"] = value.get("messages", []), value.get("tools", [])
    elif kind == "embed":
        request["embed"] = value
    elif kind == "score":
        request["score"] = value
    else:
        raise Internal(f"an input of the kind {kind!r}, which this version of the package does not know")
    return request


def request_to_wire(request: GenerateRequest) -> dict[str, Any]:
    """The request as the worker reads it."""
    if "text" in request:
        inputs: dict[str, Any] = {"text": request["text"]}
    elif "messages" in request:
        inputs = {"chat": {"messages": request["messages"], "tools": request.get("tools", [])}}
    elif "embed" in request:
        inputs = {"embed": request["embed"]}
    elif "score" in request:
        inputs = {"score": request["score"]}
    else:
        inputs = {"tokens": request["token_ids"]}
    wire: dict[str, Any] = {"model": request.get("model", ""), "input": inputs}
    for ours, theirs in (("stop_conditions", "stop"), ("sampling_options", "sampling"), ("output_options", "output")):
        if ours in request:
            wire[theirs] = request[ours]  # type: ignore[literal-required]
    guided = request.get("guided_decoding")
    if guided:
        wire["guided"] = "json_object" if "json_object" in guided else guided
    for key in ("priority", "cache_salt", "adapter", "transfer", "resumed_tokens", "data_parallel_rank", "annotations"):
        if request.get(key) is not None:
            wire[key] = request[key]
    return wire


def _guided(guided: Any) -> dict[str, Any] | None:
    # An enum variant without data is a string.
    return {guided: True} if isinstance(guided, str) else guided


class Answer:
    """Makes the items of one answer, and counts its tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        self._prompt_tokens = len(request.get("token_ids") or ()) + sum(map(len, request.get("embed") or ()))
        self._prompt_tokens += sum(len(pair["token_ids"]) for pair in request.get("score") or ())
        self._is_of_tokens = "token_ids" in request
        self.completion_tokens = 0
        self.is_finished = False

    def plain(self, chunk: GenerateChunk) -> bytes | None:
        """The packed item of a chunk with nothing but tokens, the usual case; None for others, which go to `items`."""
        if len(chunk) == (2 if "index" in chunk else 1):
            token_ids = chunk.get("token_ids")
            if token_ids:
                try:
                    packed: bytes = _PACKER.pack(token_ids)
                except (TypeError, ValueError, OverflowError):
                    # `items` raises the error with the field's name.
                    packed = encode(token_ids, "token_ids")
                self.completion_tokens += len(token_ids)
                return _TOKENS_PREFIX + packed
        return None

    def items(self, chunk: GenerateChunk) -> list[bytes]:
        """The packed items of a chunk; none for an empty one."""
        plain = self.plain(chunk)
        if plain is not None:
            return [plain]
        # The worker reads vectors as 32-bit numbers anyway, and they fill almost the whole of their item.
        return [encode(item, "a chunk", has_single_floats="embeddings" in item) for item in self._maps(chunk)]

    def finish(self) -> list[bytes]:
        """Returns nothing: the worker reports an answer without a finish reason."""
        return []

    def _maps(self, chunk: GenerateChunk) -> list[dict[str, Any]]:
        reason = chunk.get("finish_reason")
        items: list[dict[str, Any]] = []
        token_ids, text, count = chunk.get("token_ids"), chunk.get("text"), chunk.get("token_count")
        if text is not None and token_ids is not None:
            # The same tokens twice, or text that a detokenizer held back until the end. The answer has the form of the request.
            if self._is_of_tokens:
                text = None
            elif token_ids:
                count, token_ids = _known(count, len(token_ids)), None
        if text is not None:
            count = _known(count, 1 if text else 0)
            self.completion_tokens += count
            if text or count:
                items.append({"text": {"text": text, "token_count": count}})
        if "embeddings" in chunk:
            items.append({"embeddings": chunk["embeddings"]})
        if "scores" in chunk:
            items.append({"scores": chunk["scores"]})
        tokens: dict[str, Any] = {}
        if token_ids:
            self.completion_tokens += len(token_ids)
            tokens["token_ids"] = token_ids
            if chunk.get("logprobs"):
                tokens["logprobs"] = chunk["logprobs"]
        if reason is not None:
            items.append({"finished": self._finished(chunk, reason, tokens)})
        elif tokens:
            items.append({"tokens": tokens})
        return items

    def _finished(self, chunk: GenerateChunk, reason: Any, last: dict[str, Any]) -> dict[str, Any]:
        known = _known_reason(reason)
        usage: Any = chunk.get("completion_usage") or {}
        cached = usage.get("cached_tokens")
        if cached is None:
            # OpenAI's form, which Dynamo's handlers give.
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.is_finished = True
        counted: dict[str, Any] = {
            "prompt_tokens": _known(usage.get("prompt_tokens"), self._prompt_tokens),
            "completion_tokens": _known(usage.get("completion_tokens"), self.completion_tokens),
            "cached_tokens": cached,
        }
        if "predictions" in usage:
            counted["predictions"] = usage["predictions"]
        finished: dict[str, Any] = {"reason": known, "usage": counted, "last": last}
        if "stop_token" in chunk:
            finished["stop_token"] = chunk["stop_token"]
        if "transfer" in chunk:
            finished["transfer"] = chunk["transfer"]
        return finished


def _known(told: int | None, counted: int) -> int:
    return counted if told is None else told


def _known_reason(given: Any) -> str:
    """The finish reason as the worker reads it; raises `Internal` if it says that the answer failed."""
    if isinstance(given, dict):
        # SGLang's form, with what was matched, or Dynamo's of an error.
        given = f"error: {given['error']}" if "error" in given else given.get("type")
    if isinstance(given, enum.Enum) and isinstance(given.value, str):
        # Its own text is `FinishReason.LENGTH`.
        given = given.value
    kind, _, problem = str(given).partition(":")
    if kind.lower() == "error":
        missing = "the engine ended the answer with finish_reason 'error'; raise an exception that says what went wrong"
        raise Internal(problem.strip() or missing)
    reason = str(given).lower()
    known = _REASONS.get(reason)
    if known is None:
        names = ", ".join(sorted(set(_REASONS.values())))
        logger.warning("finish_reason %r is none of %s; it counts as stop", reason, names)
    return known or "stop"


def load_event(load: Mapping[str, Any]) -> dict[str, Any]:
    """A load as the worker reads it. Raises `InvalidArgument` for a count that a load does not have: the worker would ignore it."""
    for name in load:
        if name not in Load.__annotations__:
            raise InvalidArgument(f"is none of the counts of a load: {', '.join(Load.__annotations__)}", field=name)
    return {"load": dict(load)}


def kv_event(data: Any, rank: int | None) -> dict[str, Any]:
    """A KV event as the worker reads it."""
    return {"kv": data} if rank is None else {"kv_rank": {"rank": rank, "data": data}}
