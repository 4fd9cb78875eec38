"""Chats and completions whose handler reads the client's body and answers in the API's own objects.

Objects are checked for their shape, not for their content. A handler may also yield plain text, or whole objects where the client asked
for chunks, or the reverse.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from genset._frames import pack, unpack
from genset._handler import Encoder
from genset.exceptions import Internal


class Bodies:
    """Requests and answers of `ModelType.Chat` and `ModelType.Completion`."""

    def __init__(self, endpoint: str, model: str, on_kept: Callable[[], None]) -> None:
        """`on_kept` is called for each piece that is kept for the end, since the worker does not see it."""
        self._endpoint = endpoint
        self._model = model
        self._on_kept = on_kept

    def request(self, payload: bytes) -> tuple[Any, Encoder]:
        body = json.loads(unpack(payload)["input"]["text"])
        return body, BodyAnswer(self._endpoint, self._model, body, self._on_kept)


class BodyAnswer:
    """Writes the objects of one answer."""

    def __init__(self, endpoint: str, model: str, body: Mapping[str, Any], on_kept: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._on_kept = on_kept
        self._is_chat = "messages" in body
        self._is_stream = body.get("stream") is True
        self._head = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + os.urandom(16).hex(),
            "created": int(time.time()),
            "model": body.get("model", model),
        }
        self._usage: Mapping[str, Any] = {}
        self._counted = 0
        self._whole: dict[str, Any] | None = None
        self._chunks_head: dict[str, Any] = self._head
        self._choices: dict[int, dict[str, Any]] = {}
        self._has_text = False
        self._has_answered = False
        self.is_finished = False

    def plain(self, value: Any) -> bytes | None:
        return None

    def items(self, value: Any) -> list[bytes]:
        self._has_answered = True
        items = self._written(value)
        if not items:
            self._on_kept()
        return items

    def _written(self, value: Any) -> list[bytes]:
        """The items of a value; none if it is kept for the end."""
        if isinstance(value, str):
            return self._event(self._chunk({"content": value})) if self._is_stream else self._keep_text(value)
        made = self._object(value)
        self._usage = _dumped(made.get("usage")) or self._usage
        is_whole = self._is_chat and any("message" in choice for choice in made["choices"])
        if self._is_stream:
            return self._event(_as_chunk(made) if is_whole else made)
        if not is_whole:
            self._keep(made)
        elif self._whole is not None:
            raise Internal(f"{self._endpoint} gave two whole answers to one request")
        else:
            self._whole = made
        return []

    def finish(self) -> list[bytes]:
        """The whole answer if it is not streamed, and the end."""
        items: list[bytes] = []
        if self._is_stream:
            if not self._has_answered:
                raise Internal(f"{self._endpoint} answered nothing")
            if self._has_text:
                items += self._event(self._chunk({}, "stop"))
        else:
            whole = self._whole or self._collected()
            items += self._event(whole)
        self.is_finished = True
        usage = {
            "prompt_tokens": self._usage.get("prompt_tokens") or 0,
            "completion_tokens": self._counted,
            "cached_tokens": (_dumped(self._usage.get("prompt_tokens_details")) or {}).get("cached_tokens"),
        }
        return [*items, pack({"finished": {"reason": "stop", "usage": usage, "last": {}}})]

    def _object(self, value: Any) -> dict[str, Any]:
        made = _dumped(value)
        if not isinstance(made, dict):
            raise Internal(
                f"an answer of {self._endpoint} is a {type(value).__name__}; "
                "yield text, or the API's objects as dictionaries or pydantic models"
            )
        if "error" in made and "choices" not in made:
            raise Internal(f"{self._endpoint} answered with an error object; raise an exception of genset.exceptions")
        choices = made.get("choices")
        choices = [_dumped(choice) for choice in choices] if isinstance(choices, list) else choices
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise Internal(f"an answer of {self._endpoint} has no list of choices, but {', '.join(map(str, made)) or 'nothing'}")
        return {**self._head, "object": self._kind(), **made, "choices": choices}

    def _kind(self) -> str:
        if not self._is_chat:
            return "text_completion"
        return "chat.completion.chunk" if self._is_stream else "chat.completion"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """A piece of plain text as the API's chunk."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._is_chat:
            if not self._has_text:
                delta = {"role": "assistant", **delta}
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        self._has_text = True
        return {**self._head, "object": self._kind(), "choices": [choice]}

    def _json(self, made: dict[str, Any]) -> str:
        try:
            return json.dumps(made, ensure_ascii=False, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise Internal(f"an answer of {self._endpoint} is no JSON: {error}") from error

    def _event(self, made: dict[str, Any]) -> list[bytes]:
        text = self._json(made)
        # The worker counts tokens per item; `usage` has the total up to now.
        total = max(self._counted, int(self._usage.get("completion_tokens") or 0))
        count, self._counted = total - self._counted, total
        return [pack({"text": {"text": text, "token_count": count}})]

    def _keep_text(self, text: str) -> list[bytes]:
        self._has_text = True
        self._choice(0)["text"].append(text)
        return []

    def _choice(self, index: int) -> dict[str, Any]:
        return self._choices.setdefault(index, {"text": [], "fields": {}, "calls": {}, "rest": {}})

    def _keep(self, made: dict[str, Any]) -> None:
        """Adds a chunk to an answer that is not streamed."""
        # Its parts may be pydantic models.
        made = json.loads(self._json(made))
        self._chunks_head = {key: made[key] for key in made if key not in ("choices", "object", "usage")}
        for choice in made["choices"]:
            kept = self._choice(choice.get("index", 0))
            delta = choice.get("delta") or {}
            kept["text"].append(choice.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls") or []:
                _merge_call(kept["calls"].setdefault(call.get("index", len(kept["calls"])), {}), call)
            for key, value in delta.items():
                if key in ("content", "tool_calls") or value is None:
                    continue
                before = kept["fields"].get(key)
                joins = isinstance(before, str) and isinstance(value, str) and key != "role"
                kept["fields"][key] = before + value if joins else value
            for key, value in choice.items():
                if key == "logprobs" and value and kept["rest"].get("logprobs"):
                    kept["rest"]["logprobs"] = _joined(kept["rest"]["logprobs"], value)
                elif key not in ("delta", "text", "index") and value is not None:
                    kept["rest"][key] = value

    def _collected(self) -> dict[str, Any]:
        if not self._choices:
            raise Internal(f"{self._endpoint} answered nothing")
        choices = [self._collected_choice(index, kept) for index, kept in sorted(self._choices.items())]
        made = {**self._chunks_head, "object": self._kind(), "choices": choices}
        if self._usage:
            made["usage"] = self._usage
        return made

    def _collected_choice(self, index: int, kept: dict[str, Any]) -> dict[str, Any]:
        text = "".join(kept["text"])
        choice: dict[str, Any] = {"index": index, "finish_reason": "stop", "logprobs": None, **kept["rest"]}
        if not self._is_chat:
            return {**choice, "text": text}
        calls = [call for _, call in sorted(kept["calls"].items())]
        message = {"role": "assistant", "content": text or (None if calls else ""), **kept["fields"]}
        if calls:
            message["tool_calls"] = calls
        return {**choice, "message": message}


def _dumped(value: Any) -> Any:
    """A pydantic model as its fields, anything else as it is."""
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(exclude_none=True)


def _plain(value: Any) -> Any:
    if not hasattr(value, "model_dump"):
        raise TypeError(f"{type(value).__name__} cannot be written")
    return _dumped(value)


def _as_chunk(made: dict[str, Any]) -> dict[str, Any]:
    """Converts a whole chat completion to the only event of a stream."""
    choices = []
    for choice in made["choices"]:
        message = dict(_dumped(choice.get("message")) or {})
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": index, **_dumped(call)} for index, call in enumerate(message["tool_calls"])]
        rest = {key: value for key, value in choice.items() if key != "message"}
        choices.append({**rest, "delta": message})
    return {**made, "object": "chat.completion.chunk", "choices": choices}


def _merge_call(kept: dict[str, Any], call: Mapping[str, Any]) -> None:
    """Merges a piece of a tool call: its arguments are appended, everything else is set once."""
    for key, value in call.items():
        if key == "function":
            function = kept.setdefault("function", {"name": "", "arguments": ""})
            function["name"] = value.get("name") or function["name"]
            function["arguments"] += value.get("arguments") or ""
        elif key != "index" and value is not None:
            kept[key] = value


def _joined(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the log probabilities of two pieces: lists are appended."""
    made = dict(before)
    for key, value in more.items():
        known = made.get(key)
        made[key] = known + value if isinstance(known, list) and isinstance(value, list) else value
    return made
