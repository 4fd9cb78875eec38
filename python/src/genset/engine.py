"""What an engine author writes: a subclass of `LLMEngine`."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import math
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol, Union

from genset._checks import check_limits, check_name, check_parsers, check_values, json_of
from genset._convert import kv_event, load_event, request_to_wire
from genset.exceptions import Internal, InvalidArgument, Unsupported
from genset.types import GenerateChunk, GenerateRequest, Load, Metric


class Follower(Protocol):
    """A request that ends with the one that it is made for."""

    def stop(self, reason: str) -> None:
        """That one was stopped."""


class _Stopped(asyncio.Future[bool]):
    """Done when its request is stopped. The context holds it only while something waits for it: a program may make one for each token."""

    def __init__(self, awaited: set[_Stopped]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._awaited = awaited
        self._waiters = 0

    def add_done_callback(self, *arguments: Any, **named: Any) -> None:
        super().add_done_callback(*arguments, **named)
        self._waiters += 1
        if not self.done():
            self._awaited.add(self)

    def remove_done_callback(self, fn: Any, /) -> int:
        removed = super().remove_done_callback(fn)
        self._waiters -= removed
        if not self._waiters:
            self._awaited.discard(self)
        return removed

    def cancel(self, msg: Any = None) -> bool:
        self._awaited.discard(self)
        return super().cancel(msg)


class Context:
    """The context of one request: id, headers, trace, deadline and cancellation."""

    def __init__(
        self,
        request_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        traceparent: str = "",
        tracestate: str = "",
        deadline_ms: int | None = None,
    ) -> None:
        self._id = request_id
        self._reason: str | None = None
        self._waiting: weakref.WeakSet[_Stopped] | None = None
        self._awaited: set[_Stopped] = set()
        self.headers: Mapping[str, str] = headers or {}
        self.traceparent = traceparent
        """W3C trace context, empty when there is none."""
        self.tracestate = tracestate
        self.deadline_ms = deadline_ms
        """Milliseconds left when the request arrived; None for no deadline."""
        self.native: Any = None
        """The native runtime's request, or None: the parent of the requests that a handler sends on its behalf."""
        self._followers: weakref.WeakSet[Follower] | None = None

    def id(self) -> str:
        """The request's id, unique among those in flight."""
        return self._id

    def is_stopped(self) -> bool:
        """Whether the request was stopped: nobody waits for its answer any more. Any thread may call it."""
        return self._reason is not None

    def stop_reason(self) -> str | None:
        """`client`, `deadline`, `shutdown` or `engine_dead` once the request is stopped, else None."""
        return self._reason

    async def stopped(self) -> None:
        """Waits until the request is stopped."""
        await self.async_killed_or_stopped()

    def stop(self, reason: str = "client") -> None:
        """Stops the request; the first reason is kept. Called by the package, by tests, and for a context that the program made."""
        if self._reason is None:
            self._reason = reason
            for waiting in list(self._waiting or ()):
                if not waiting.done():
                    waiting.set_result(True)
            self._awaited.clear()
            for follower in list(self._followers or ()):
                follower.stop(reason)

    def follow(self, follower: Follower) -> None:
        """Stops `follower` with this request. Does not keep it alive. Called by the package, on the event loop."""
        if self._reason is not None:
            follower.stop(self._reason)
        elif self._followers is None:
            self._followers = weakref.WeakSet((follower,))
        else:
            self._followers.add(follower)

    # Dynamo's names, kept for programs that call them.

    def is_killed(self) -> bool:
        """As `is_stopped`."""
        return self.is_stopped()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """As `stopped`, as a future."""
        stopped = _Stopped(self._awaited)
        if self._reason is not None:
            stopped.set_result(True)
        elif self._waiting is None:
            self._waiting = weakref.WeakSet((stopped,))
        else:
            self._waiting.add(stopped)
        return stopped

    def stop_generating(self) -> None:
        """As `stop`."""
        self.stop()

    @property
    def trace_id(self) -> str | None:
        """The trace of `traceparent`, in hex digits."""
        return self._part_of_trace(1)

    @property
    def span_id(self) -> str | None:
        """The span of `traceparent`, the caller's, in hex digits."""
        return self._part_of_trace(2)

    def _part_of_trace(self, place: int) -> str | None:
        parts = self.traceparent.split("-")
        return parts[place] if len(parts) > 3 else None


USUAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)
"""The sampling options that reach an engine whose config does not declare which it honours."""


ROLES = ("aggregated", "prefill", "decode")
MEDIA = ("image", "audio")
GUIDED = ("json_object", "json_schema", "regex", "choice", "grammar")
_CONFIG_NAMES = {
    "inputs": ("tokens", "text", "chat", "embed", "score"),
    "media": MEDIA,
    "sampling": USUAL_SAMPLING,
    "guided": GUIDED,
    "roles": ROLES,
    "deviations": ("batch_variant", "no_min_tokens", "penalties_count_prompt", "logprobs_after_bias"),
}
_CONFIG_LEAST = {"vocab_size": 1, "kv_cache_block_size": 1, "data_parallel_size": 1}
_ENDPOINT_TYPES = ("chat", "completions", "embeddings", "scores")


@dataclasses.dataclass
class EngineConfig:
    """What an engine declares about itself after its start. Requests for other abilities are refused before they reach it."""

    model: str
    served_model_name: str | None = None
    context_length: int | None = None
    """The most tokens of prompt and answer together. None takes the limit from the model's files; if they have none, requests of any
    length are accepted."""
    vocab_size: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    """The number of KV blocks. With it, and without `kv_events`, routers assume that the prompts they sent are cached."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    inputs: tuple[str, ...] = ("tokens",)
    """Any of `tokens`, `text`, `chat`, `embed`, `score`."""
    media: tuple[str, ...] = ()
    """Any of `image`, `audio`: what `messages` may have beside text, as parts of the types `image_url`, whose `url` is a `data:` URL, and
    `input_audio`. For engines that take `chat`; an engine that also takes `tokens` receives a text-only chat as tokens."""
    sampling: tuple[str, ...] | None = None
    """The sampling options that the engine honours; a request with another one is refused. `()` means none. None means not declared:
    then the options of `USUAL_SAMPLING` reach the engine, and the log warns."""
    max_logprobs: int | None = None
    guided: tuple[str, ...] = ()
    """Any of `json_object`, `json_schema`, `regex`, `choice`, `grammar`."""
    priority: bool = False
    adapters: bool = False
    kv_events: bool = False
    kv_ranks: bool = False
    """Whether KV events name their data-parallel rank, if there are several ranks."""
    resume: bool = False
    """Whether the engine can continue another instance's answer with the same result: seeds, penalties and grammars treat the last
    `resumed_tokens` of the prompt as generated."""
    resume_as_prompt: bool = False
    """Whether the engine can continue another instance's answer as a longer prompt. Requests with a seed, a penalty or a grammar
    cannot continue this way: once their answer has begun, they are lost with their instance."""
    roles: tuple[str, ...] = ()
    """Any of `aggregated`, `prefill`, `decode`; empty means `aggregated` only."""
    deviations: tuple[str, ...] = ()
    """Known deviations of the engine: any of `batch_variant`, `no_min_tokens`, `penalties_count_prompt`, `logprobs_after_bias`."""
    canary: GenerateRequest | None = None
    """The request with which the worker probes the engine's health: before it lists the engine, and after a long silence. None for one
    token in, one out."""

    def to_wire(self) -> dict[str, Any]:
        """Returns the config as the worker reads it. Raises `InvalidArgument`, naming the field, for an invalid value."""
        if self.context_length is None:
            raise InvalidArgument(
                "EngineConfig needs it: the most tokens of prompt and answer together",
                field="context_length",
            )
        check_values(EngineConfig, vars(self), _CONFIG_NAMES, _CONFIG_LEAST)
        return {
            "model": self.served_model_name or self.model,
            "context_length_tokens": self.context_length,
            "vocab_size": self.vocab_size,
            "kv_block_size": self.kv_cache_block_size,
            "kv_total_blocks": self.total_kv_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "data_parallel_size": self.data_parallel_size,
            "capabilities": {
                "inputs": list(self.inputs),
                "media": list(self.media),
                "sampling": list(USUAL_SAMPLING if self.sampling is None else self.sampling),
                "max_logprobs": self.max_logprobs,
                "guided": list(self.guided),
                "priority": self.priority,
                "adapters": self.adapters,
                "kv_events": self.kv_events,
                "kv_ranks": self.kv_ranks,
                "resume": self.resume,
                "resume_as_prompt": self.resume_as_prompt,
                "roles": list(self.roles),
                "deviations": list(self.deviations),
            },
            "canary": None if self.canary is None else self._canary(self.canary),
        }

    def _canary(self, canary: GenerateRequest) -> dict[str, Any]:
        kinds = ("token_ids", "text", "messages", "embed", "score")
        if not isinstance(canary, dict) or not any(kind in canary for kind in kinds):
            raise InvalidArgument(f"must be a request with one of {', '.join(kinds)}", field="canary")
        return request_to_wire({"model": self.model, **canary})


@dataclasses.dataclass
class WorkerConfig:
    """How the worker presents itself. Used if the program starts the worker, but not if the worker started the program."""

    namespace: str = "genset"
    component: str = ""
    """Empty for the role's default: `backend`, `prefill` or `decode`."""
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    model_path: str | None = None
    """Folder with the tokenizer, or a GGUF file. Defaults to `model_name`, which may be just a name if the engine takes only text or chats."""
    role: str = "aggregated"
    """The instance's role: `aggregated`, `prefill` or `decode`. The engine declares the roles it supports in `EngineConfig.roles`."""
    endpoint_types: str | None = None
    """Any of `chat`, `completions`, `embeddings`, `scores`, separated by commas; None for all that the engine supports."""
    discovery_backend: str | None = None
    request_plane: str | None = None
    event_plane: str | None = None
    """Accepted and ignored: events travel over the request plane."""
    use_kv_events: bool = False
    """Accepted and ignored: `EngineConfig.kv_events` decides."""
    context_length: int | None = None
    """Lowers the engine's context, in tokens."""
    migration_limit: int | None = None
    """How often a request may migrate to another instance; None for the default of `genset run`, 3. A request whose answer has begun
    migrates only if the engine declares `EngineConfig.resume` or `resume_as_prompt`."""
    tool_call_parser: str | None = None
    """The parser with which frontends find tool calls in the text: a name of `genset run --tool-parser`. None for the one that the
    chat template shows."""
    reasoning_parser: str | None = None
    """The parser with which frontends find reasoning in the text: a name of `genset run --reasoning-parser`, or None likewise."""
    user_data: Mapping[str, Any] | None = None
    """A JSON object that is published unchanged with the model."""
    custom_jinja_template: str | None = None
    """File with a chat template that replaces the model's own."""
    request_timeout: float | None = None
    """The time limit for requests whose client gave no deadline, in seconds; 0 for none, None for the default of `genset run`, 600."""
    idle_timeout: float | None = None
    """The longest silence inside an answer, in seconds, 0 for no limit; None for 120."""
    canary_interval: float | None = None
    """The worker probes the engine after this much silence, in seconds; 0 probes only at the start. None for 30."""
    canary_timeout: float | None = None
    """How long the engine may take to answer a probe, including the first, in seconds; None for 30."""
    engine_restarts: int = 0
    """How often in a row the worker restarts the engine's process after it exited by itself."""
    extra_args: list[str] = dataclasses.field(default_factory=list)
    """Further arguments for `genset run`, passed on unchanged."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(WorkerConfig):
            value = getattr(self, field.name)
            if value is None and field.default is not dataclasses.MISSING:
                # The option was not given.
                setattr(self, field.name, field.default)
            elif isinstance(value, os.PathLike):
                setattr(self, field.name, os.fspath(value))
        self.component = self.component or ("backend" if self.role == "aggregated" else self.role)
        check_values(WorkerConfig, vars(self), {"role": ROLES}, {"context_length": 1})
        for kind in self.endpoint_types.split(",") if self.endpoint_types else []:
            check_name(kind, _ENDPOINT_TYPES, "endpoint_types")
        check_limits(vars(self))
        check_parsers(self.tool_call_parser, self.reasoning_parser, "tool_call_parser")
        if self.user_data is not None:
            json_of(dict(self.user_data), "user_data")

    @classmethod
    def from_runtime_config(cls, runtime_config: object, **overrides: Any) -> WorkerConfig:
        """Copies the fields that `runtime_config` has under the same names, except those that are None; `overrides` win. The parsers and
        the role may have Dynamo's names: `dyn_tool_call_parser`, `dyn_reasoning_parser`, `disaggregation_mode`."""
        values = {field.name: getattr(runtime_config, field.name, None) for field in dataclasses.fields(cls)}
        for name in ("tool_call_parser", "reasoning_parser"):
            if values[name] is None:
                values[name] = getattr(runtime_config, f"dyn_{name}", None)
        if values["role"] is None:
            mode = getattr(runtime_config, "disaggregation_mode", None)
            mode = getattr(mode, "value", mode)
            values["role"] = "aggregated" if mode == "agg" else mode
        return cls(**{name: value for name, value in {**values, **overrides}.items() if value is not None})


Event = Union[dict[str, Any], str]
"""An event as the worker reads it. An event without data is just its name."""

STEP = "step"
STEP_INTERVAL_S = 0.25
"""The shortest time between two step events. One event stands for all steps in that time."""


class WorkerHandle:
    """Publishes an engine's events. `LLMEngine.worker` is one, and is set before `start`. Any thread may call the methods; without
    a worker they have no effect."""

    def __init__(
        self,
        publish: Callable[[Event], None] | None = None,
        progress: Callable[[str, float | None], None] | None = None,
        role: str = "aggregated",
    ) -> None:
        self._publish: Callable[[Event], None] = publish or (lambda event: None)
        self._progress: Callable[[str, float | None], None] = progress or (lambda stage, fraction: None)
        self.role = role
        """`aggregated`, `prefill` or `decode`."""
        self._next_step_s = -math.inf

    def report_progress(self, stage: str, fraction: float | None = None) -> None:
        """Reports how far `start` is; `fraction` is from 0 to 1."""
        self._progress(stage, fraction)

    def publish_load(self, load: Load) -> None:
        """Publishes how busy the engine is; the last value counts. Raises `InvalidArgument` for a count that a `Load` does not have."""
        self._publish(load_event(load))

    def publish_metrics(self, metrics: list[Metric]) -> None:
        """Sets series of the worker's `/metrics`; the last value of each counts."""
        self._publish({"metrics": metrics})

    def publish_kv_stored(self, blocks: list[int], parent: int | None = None, rank: int | None = None) -> None:
        """Blocks became reusable. Each is the child of the one before; the first follows `parent`. Compute the hashes with
        `genset.kv.hash_blocks`, as routers do: no other hash matches a prompt. `rank` is the data-parallel rank of the blocks, for engines
        that declare `kv_ranks`."""
        self._publish(kv_event({"stored": {"parent": parent, "blocks": blocks}}, rank))

    def publish_kv_removed(self, blocks: list[int], rank: int | None = None) -> None:
        """Blocks are no longer reusable."""
        self._publish(kv_event({"removed": {"blocks": blocks}}, rank))

    def publish_kv_cleared(self, rank: int | None = None) -> None:
        """No block of the rank, or of any rank if it is None, is reusable any more."""
        self._publish(kv_event("cleared", rank))

    def report_step(self) -> None:
        """Reports that the engine has computed a step, for any request. Call it after each step, even one that read only a part of a prompt:
        while steps are reported, no answer counts as silent and a canary that waits behind a long prompt is no failure. Sends at most four
        events a second. For a `BatchEngine` under `genset.backend.run` the package reports the steps."""
        now_s = time.monotonic()
        if now_s >= self._next_step_s:
            self._next_step_s = now_s + STEP_INTERVAL_S
            self._publish(STEP)

    def report_dead(self, reason: str) -> None:
        """Reports that the engine cannot continue: the worker unlists it and ends its requests."""
        self._publish({"dead": {"reason": reason}})


class LLMEngine(abc.ABC):
    """An inference engine. `from_args`, `start`, `generate` and `cleanup` are required."""

    worker: WorkerHandle = WorkerHandle()

    @classmethod
    @abc.abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        """Parses the command line and builds the engine, without side effects."""

    @abc.abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the model. Called once; when it returns, `generate` is ready for concurrent calls."""

    @abc.abstractmethod
    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Answers one request: an `async def` with `yield`. The last chunk has `finish_reason`, and the generator is closed at its `yield`:
        of what follows only `finally` runs.

        Poll `context.is_stopped()` between chunks and end with `finish_reason="cancelled"`. A generator that does not end within
        `CANCEL_GRACE_S` after the stop is cancelled at its `await`.
        """

    async def abort(self, context: Context) -> None:
        """Called when the request was stopped: frees what it holds elsewhere. `generate` sees the stop in its context too. A request that was
        stopped before its turn comes here and not to `generate`."""

    async def drain(self) -> None:
        """Called before the shutdown, while peers can still reach this process."""

    @abc.abstractmethod
    async def cleanup(self) -> None:
        """Frees everything. It may be called twice, and after a `start` that failed half-way."""

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """An operator's request: `sleep`, `wake`, `clear_prefix_cache`, `load_adapter`, `unload_adapter`, `list_adapters`,
        `update_weights`, `start_profile`, `stop_profile`. Returns None when done, or `{"adapters": [...]}` or `{"location": ...}` if the
        operation has a result."""
        raise Unsupported(f"this engine does not support {op}", field="op")


def control_reply(reply: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the result of `LLMEngine.control` as the worker reads it."""
    if reply is None:
        return {"result": "done"}
    if "adapters" in reply:
        return {"result": "adapters", **reply}
    if "location" in reply:
        return {"result": "profile", **reply}
    raise Internal("control must return None, adapters or a location")
