"""Models served by a handler in this process.

    await register_llm(ModelType.Backend, endpoint, "models/tiny-chat")
    await endpoint.serve_endpoint(generate)

Frontends find the model after the handler has answered the worker's first probe, the canary: one token in, one out.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from genset import _model_files
from genset._convert import Answer, kv_event, load_event, request_from_wire
from genset._declared import warn_of_sampling
from genset._frames import pack, unpack
from genset._bodies import Bodies
from genset._checks import check_limits, check_parsers, check_values, json_of
from genset._handler import Answering, Codec, Encoder, Handler, Plain, checked
from genset._places import Places
from genset.engine import GUIDED, MEDIA, ROLES, USUAL_SAMPLING, Context, Event, WorkerHandle
from genset.exceptions import EngineError, EngineShutdown, Internal, InvalidArgument
from genset.runtime import Check, Endpoint, Runtime, Service
from genset.types import GenerateChunk, GenerateRequest, Load, Metric

__all__ = ["KvEventPublisher", "LoadPublisher", "MetricsPublisher", "ModelType", "StepPublisher", "register_llm"]

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""How long requests that the worker cut short may take to end by themselves. After that they are cancelled."""


class ModelType(enum.Flag):
    """What a handler receives and yields."""

    Backend = enum.auto()
    """`token_ids` in; `token_ids` and finally `finish_reason` out: a `genset.GenerateRequest`, and `genset.GenerateChunk`s. An answer that
    ends without a `finish_reason` counts as `length` if it has `max_tokens` tokens, else as `stop`."""
    Chat = enum.auto()
    """The body of a chat request as its client sent it in; a `chat.completion`, `chat.completion.chunk`s or plain text out, which become
    a stream or a whole answer as the client asked. Requests of `/v1/responses` and `/v1/messages` arrive as bodies of streamed chats."""
    Completion = enum.auto()
    """The same for `/v1/completions`."""
    Embedding = enum.auto()
    """`embed`, a list of token sequences, in; `embeddings`, one vector per sequence, out."""


async def register_llm(
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = 16,
    migration_limit: int = 3,
    user_data: Mapping[str, Any] | None = None,
    *,
    aliases: Sequence[str] = (),
    sampling: Sequence[str] | None = None,
    max_logprobs: int | None = None,
    guided: Sequence[str] = (),
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    custom_template_path: str | None = None,
    resume: bool = False,
    kv_events: bool = False,
    kv_ranks: bool = False,
    data_parallel_size: int = 1,
    total_kv_blocks: int | None = None,
    vocab_size: int | None = None,
    max_num_seqs: int | None = None,
    role: str = "aggregated",
    media: Sequence[str] = (),
    priority: bool = False,
    max_running_requests: int = 1024,
    max_waiting_requests: int = 4096,
    request_timeout: float = 600.0,
    idle_timeout: float | None = None,
    canary_interval: float = 30.0,
    canary_timeout: float = 30.0,
) -> None:
    """Registers a model that `endpoint` serves. Call it before the endpoint's `serve_endpoint`.

    `model_path` is a model's folder, a GGUF file, or the name of a model in the Hugging Face Hub (`ORG/NAME`, `ORG/NAME@REVISION`,
    `ORG/NAME:QUANTIZATION`, `ORG/NAME/FILE.gguf`; `hf://` before it or not). Its tokenizer and template are published. Files that the Hub's
    cache lacks are fetched as by `genset pull --config-only`, a GGUF file whole; for bodies, which need no files, nothing is fetched.
    `model_name` is the name clients use, by default `ORG/NAME` of the Hub's model, or the name of the folder or file. `context_length` is
    the most tokens of prompt and answer; by default that of the model's files. If they have none, requests of any length are accepted.
    `migration_limit` is how often a request may migrate to another instance, with the tokens it has. The handler there sees them as the
    end of a longer prompt. A request with a seed, a penalty or a grammar cannot continue so: once its answer has begun, it is lost with
    its instance. With `resume` it migrates too, and the handler treats the last `resumed_tokens` of `token_ids` as generated: seeds
    continue after them, penalties count them, grammars continue from them. `user_data` is published unchanged; workers of one model may
    differ in it. `sampling` names the options that the handler honours; a request with another is refused. By default the usual ones
    are accepted. `max_logprobs` is the number of candidates per token with log probabilities, and `guided` names the kinds of structured
    output that the handler supports; without them requests for these are refused. With `priority` the handler serves requests with a
    larger `priority` first; without it a request with one is refused. With `kv_events` routers follow the `KvEventPublisher`; without it
    they rely on the prompts they sent, if `total_kv_blocks` says that there are KV blocks.
    `data_parallel_size` is the number of ranks, of which a request may name one (`data_parallel_rank`). With `kv_ranks` the
    `KvEventPublisher` is given the rank of each event, and routers choose among the ranks.
    Token ids are below `vocab_size`, by default that of the model's files. `max_num_seqs`, how many requests the handler runs at once, is
    published. `max_running_requests` is the most requests that the handler is given at once, including the worker's canary. A canary that
    finds no free place is skipped, as long as the requests that ran at the handler's last output may still be within their limits.

    `role` is `prefill` or `decode`, for a model in two pools: the handlers serve two endpoints, of separate components, registered with
    the same arguments except `role`. Both receive the client's request. A prefill handler answers with one token and, in the chunk
    with the `finish_reason` `length`, `transfer`: a map with `data`, any JSON value, for the decode handler. An answer that ends with its
    first token has no `transfer`, and the `finish_reason` is required. A decode handler finds it as `request["transfer"]`, and yields the
    whole answer, including the first token. If its `source_worker_id` is 0, nothing was computed, and the handler does the prefill too.

    `media` is what chats may have beside text: any of `image` and `audio`. Such a chat arrives as `messages`, with parts of the types
    `image_url`, whose `url` is a `data:` URL, and `input_audio`; the handler makes the prompt, and reports its length in
    `completion_usage`. Everything else arrives as `token_ids`. `role`, `media` and `priority` are for `ModelType.Backend`.

    `idle_timeout` is the longest silence inside an answer in seconds, 0 for no limit. The default is 120 for tokens and none for bodies,
    whose answer may be a single item at the end. Embeddings have none, and refuse one. An answer without such a limit is ended only by
    its request's deadline. `request_timeout` is the time limit for requests whose clients gave none, in seconds, 0 for none.

    `canary_timeout` is how long the handler may take to answer a canary, in seconds. The worker sends the first before it lists the model,
    and others whenever the handler yielded nothing for `canary_interval` seconds, 0 for never. The third in a row without an answer ends
    the model, except while other requests are answered, while a `StepPublisher` reports steps, or while bodies or embeddings from before
    the silence are in progress and within their deadlines.

    Raises `InvalidArgument` or `Unsupported`, naming the argument.
    """
    given = locals()
    if not isinstance(model_type, ModelType):
        raise InvalidArgument(f"{model_type!r} is no ModelType, such as ModelType.Backend", field="model_type")
    if model_type & ~_BODIES and model_type not in (ModelType.Backend, ModelType.Embedding):
        raise InvalidArgument("only Chat and Completion go together: one handler reads tokens or bodies", field="model_type")
    _check_values(given)
    if resume and model_type is not ModelType.Backend:
        raise InvalidArgument("only answers of tokens, of a ModelType.Backend, continue on another worker", field="resume")
    _check(model_type, role, media, priority, vocab_size, idle_timeout)
    _check_free(endpoint)
    has_bodies = bool(model_type & _BODIES)
    # A path may be given as a `pathlib.Path`.
    model_path = os.fspath(model_path)
    name = model_name or _model_files.name_of(model_path)
    folder = await _find(model_path, has_bodies)
    # Another call may have registered one meanwhile.
    _check_free(endpoint)
    if sampling is None and model_type is ModelType.Backend:
        sampling = USUAL_SAMPLING
        warn_of_sampling("register_llm", name)
    if idle_timeout is None:
        idle_timeout = _SPEC["idle_timeout_s"] if model_type is ModelType.Backend else 0.0
    moves = migration_limit > 0 and model_type is ModelType.Backend
    kind = "text" if has_bodies else "embed" if model_type is ModelType.Embedding else "tokens"
    engine: dict[str, Any] = {
        "model": name,
        "context_length_tokens": context_length or 0,
        "vocab_size": vocab_size,
        "kv_block_size": kv_cache_block_size,
        "kv_total_blocks": total_kv_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": None,
        "data_parallel_size": data_parallel_size,
        "capabilities": {
            # Media are parts of messages.
            "inputs": [kind, "chat"] if media else [kind],
            "media": list(media),
            "whole_bodies": has_bodies,
            "sampling": list(sampling or ()),
            "max_logprobs": max_logprobs,
            "guided": list(guided),
            "priority": priority,
            "kv_events": kv_events,
            "kv_ranks": kv_ranks,
            "resume": moves and resume,
            "resume_as_prompt": moves and not resume,
            # The same for both pools, as everything that a model's instances publish.
            "roles": [] if role == "aggregated" else ["prefill", "decode"],
        },
        "canary": _canary(name, model_type) if has_bodies else None,
    }
    spec = model_spec(
        endpoint,
        engine,
        folder,
        aliases=list(aliases),
        endpoint_types=_endpoint_types(model_type),
        role=role,
        migration_limit=migration_limit,
        user_data=user_data,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        chat_template=None if custom_template_path is None else os.fspath(custom_template_path),
        max_running=max_running_requests,
        max_waiting=max_waiting_requests,
        request_timeout_s=request_timeout,
        idle_timeout_s=idle_timeout,
        canary_interval_s=canary_interval,
        canary_timeout_s=canary_timeout,
    )
    if has_bodies:
        codec: Codec = Bodies(endpoint.name, name, StepPublisher(endpoint).publish)
    else:
        # A prefill answer without a `finish_reason` may have lost its transfer.
        codec = Tokens(endpoint.name, spec["worker_id"], role == "prefill")
    endpoint.runtime._models[endpoint.name] = _Registered(spec, codec)


def _check_free(endpoint: Endpoint) -> None:
    """Refuses a second model for the endpoint, and one that comes too late."""
    if any(service.name == endpoint.name for service in endpoint.runtime._services):
        raise InvalidArgument(f"{endpoint.name} is served already: call register_llm before serve_endpoint")
    if endpoint.name in endpoint.runtime._models:
        raise InvalidArgument(f"{endpoint.name} has a model already: give the second one an endpoint of its own")


_BODIES = ModelType.Chat | ModelType.Completion
_NAMES = {"role": ROLES, "media": MEDIA, "sampling": USUAL_SAMPLING, "guided": GUIDED}
_LEAST = dict.fromkeys(("kv_cache_block_size", "data_parallel_size", "vocab_size", "max_num_seqs", "max_running_requests"), 1)


def _check_values(given: dict[str, Any]) -> None:
    """Refuses invalid values of `register_llm`'s arguments, so that serving finds no error later."""
    check_values(register_llm, given, _NAMES, _LEAST)
    check_parsers(given["tool_parser"], given["reasoning_parser"])
    check_limits(given)
    if given["user_data"] is not None:
        json_of(dict(given["user_data"]), "user_data")
    template = given["custom_template_path"]
    if template is not None and not os.path.isfile(template):
        raise InvalidArgument(f"{template} is no file", field="custom_template_path")


def _check(
    model_type: ModelType, role: str, media: Sequence[str], priority: bool, vocab_size: int | None, idle_timeout: float | None
) -> None:
    """Refuses arguments that do not apply to a handler of this type."""
    if vocab_size is not None and model_type & _BODIES:
        raise InvalidArgument("is about token ids, and a handler of bodies gets none", field="vocab_size")
    if idle_timeout and model_type is ModelType.Embedding:
        raise InvalidArgument("embeddings have none: leave it out, and the request's deadline ends them", field="idle_timeout")
    for name, is_given in (("role", role != "aggregated"), ("media", bool(media)), ("priority", priority)):
        if is_given and model_type is not ModelType.Backend:
            raise InvalidArgument("is for a ModelType.Backend: a body comes whole, and embeddings have none", field=name)

_SPEC: dict[str, Any] = {
    "aliases": [],
    "endpoint_types": None,
    "context_length": None,
    "role": "aggregated",
    "migration_limit": 3,
    "tool_parser": None,
    "reasoning_parser": None,
    "chat_template": None,
    "max_running": 1024,
    "max_waiting": 4096,
    "request_timeout_s": 600.0,
    "idle_timeout_s": 120.0,
    "canary_interval_s": 30.0,
    "canary_timeout_s": 30.0,
}


def model_spec(
    endpoint: Endpoint, engine: dict[str, Any], folder: str | None, *, user_data: Mapping[str, Any] | None, **options: Any
) -> dict[str, Any]:
    """What the native module needs to know of a model: its engine, where its files are, and what differs from `_SPEC`."""
    worker_id = _worker_id(endpoint, engine["model"])
    spec = {**_SPEC, "endpoint": endpoint.path, "worker_id": worker_id, "engine": engine, "model_path": folder}
    spec["user_data"] = None if user_data is None else json_of(dict(user_data), "user_data")
    return {**spec, **options}


async def _find(model_path: str, has_bodies: bool) -> str | None:
    """Where the model's files are. A handler that reads bodies needs none if the path only says what the model is called."""
    try:
        return await _model_files.locate(model_path, may_fetch=not has_bodies)
    except InvalidArgument:
        if has_bodies:
            return None
        raise


def _endpoint_types(model_type: ModelType) -> list[str] | None:
    names = {ModelType.Chat: "chat", ModelType.Completion: "completions"}
    types = [name for kind, name in names.items() if kind in model_type]
    return types or None


def _canary(name: str, model_type: ModelType) -> dict[str, Any]:
    """The request that the worker probes a handler of bodies with."""
    body: dict[str, Any] = {"model": name, "max_tokens": 1, "stream": False}
    if ModelType.Chat in model_type:
        body["messages"] = [{"role": "user", "content": "ping"}]
    else:
        body["prompt"] = "ping"
    return {"model": name, "input": {"text": json.dumps(body)}}


def _worker_id(endpoint: Endpoint, name: str) -> int:
    """Returns the runtime's id if the model is the first of its component, whose worker also serves endpoints of fixed names, and the
    first instance of its model, since routers tell instances apart by their ids. Otherwise returns a new id."""
    component = endpoint.path[:2]
    models = [model for model in endpoint.runtime._models.values() if isinstance(model, _Registered)]
    taken = endpoint.runtime._has_engine or any(model.component == component or model.model == name for model in models)
    return endpoint.runtime._bridge.node.new_instance_id() if taken else endpoint.runtime.worker_id


def engine_id(runtime: Runtime) -> int:
    """Returns the id of an engine's worker. It is needed before the engine says which model it is, so it is the runtime's only if the runtime
    has no other model."""
    taken, runtime._has_engine = runtime._has_engine or bool(runtime._models), True
    return runtime._bridge.node.new_instance_id() if taken else runtime.worker_id


class _Registered:
    """A registered model without a handler yet."""

    def __init__(self, spec: dict[str, Any], codec: Codec) -> None:
        self._spec = spec
        self._codec = codec
        self.component = spec["endpoint"][:2]
        self.model = spec["engine"]["model"]
        self.number: int | None = None
        """The number of its service, once it is served."""

    def service(
        self, endpoint: Endpoint, handler: Handler, max_requests: int, grace_s: float, check: Check | None = None
    ) -> Service:
        spec = {**self._spec, "grace_s": grace_s, "max_running": min(max_requests, self._spec["max_running"])}
        service = ModelService(endpoint, handler, spec, checked(self._codec, check, isinstance(self._codec, Bodies)))
        self.number = service.number
        return service


_ANSWERS = ("token_ids", "text", "embeddings", "scores", "finish_reason")


class _TokenAnswer(Answer):
    """The answer of a `ModelType.Backend`; an invalid answer is refused with the reason."""

    def __init__(self, request: GenerateRequest, codec: Tokens) -> None:
        super().__init__(request)
        self._codec = codec
        self._endpoint = codec.endpoint
        self._worker_id = codec.worker_id
        self._max_tokens = request["stop_conditions"].get("max_tokens")
        self._is_generated = "embed" not in request
        self._example = "{'token_ids': [1]}, the last with finish_reason" if self._is_generated else "{'embeddings': [[0.5, 0.5]]}"
        self._is_begun = False

    def plain(self, chunk: GenerateChunk) -> bytes | None:
        self._is_begun = True
        if not isinstance(chunk, dict):
            kind = type(chunk).__name__
            raise Internal(f"an answer of {self._endpoint} is a {kind}; yield dictionaries such as {self._example}")
        return super().plain(chunk)

    def items(self, chunk: GenerateChunk) -> list[bytes]:
        if not any(name in chunk for name in _ANSWERS):
            has = ", ".join(map(str, chunk)) or "nothing"
            raise Internal(f"an answer of {self._endpoint} has {has}, and none of {', '.join(_ANSWERS)}")
        transfer: Any = chunk.get("transfer")
        if transfer is not None and chunk.get("finish_reason") is None:
            raise Internal(f"an answer of {self._endpoint} has transfer without finish_reason; they belong into the same chunk, the last")
        if transfer is not None and not (isinstance(transfer, dict) and "data" in transfer):
            raise Internal(f"the transfer of an answer of {self._endpoint} has no data; give {{'data': ...}}, for the decode handler")
        return super().items(chunk)

    def finish(self) -> list[bytes]:
        if not self._is_begun:
            raise Internal(f"the handler of {self._endpoint} gave nothing; yield dictionaries such as {self._example}")
        if self._codec.needs_reason:
            return super().finish()
        if self._is_generated:
            self._codec.warn_of_open_end()
        is_full = self._max_tokens is not None and self.completion_tokens >= self._max_tokens
        return self.items({"finish_reason": "length" if is_full else "stop"})

    def _finished(self, chunk: GenerateChunk, reason: Any, last: dict[str, Any]) -> dict[str, Any]:
        finished = super()._finished(chunk, reason, last)
        if self._worker_id is not None and finished.get("transfer") is not None:
            # A handler need not know its own id.
            finished["transfer"] = {"source_worker_id": self._worker_id, **finished["transfer"]}
        return finished


class Tokens:
    """Requests and answers of a `ModelType.Backend`, an `Embedding`, or an engine."""

    def __init__(self, endpoint: str, worker_id: int | None = None, needs_reason: bool = True) -> None:
        """`worker_id` is put into prefill transfers that name none. With `needs_reason` an answer that ends without a `finish_reason` is an
        error."""
        self.endpoint = endpoint
        self.worker_id = worker_id
        self.needs_reason = needs_reason
        self._has_warned = False

    def request(self, payload: bytes) -> tuple[Any, Encoder]:
        request = request_from_wire(unpack(payload))
        return request, _TokenAnswer(request, self)

    def warn_of_open_end(self) -> None:
        """Warns, once, that answers end without a `finish_reason`."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: an answer ended without finish_reason; such count as length at max_tokens, else as stop", self.endpoint)


class ModelService(Service):
    """A model with its handler. The worker in the native module admits requests, probes, drains and keeps the contract."""

    def __init__(
        self,
        endpoint: Endpoint,
        handler: Handler,
        spec: dict[str, Any],
        codec: Codec,
        hooks: Handler | None = None,
        on_stop: Callable[[Context], None] | None = None,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """`hooks` answers the worker's calls other than requests. `on_stop` is called for stopped requests, and `on_served` when the
        model is listed: from then on published events arrive."""
        super().__init__(endpoint)
        self._on_served = on_served
        places = Places(self.name, spec["max_running"], spec["idle_timeout_s"])
        self._answering = Answering(self.bridge, self.name, handler, codec, on_stop, places)
        self._hooks = None if hooks is None else Answering(self.bridge, self.name, hooks, Plain(self.name))
        self._hooks_number = None if hooks is None else self.bridge.number()
        self._spec = {**spec, "hooks": self._hooks_number}
        self._ended: asyncio.Future[int | None] | None = None

    async def run(self) -> None:
        node, number = self.bridge.node, self.number
        self.bridge.servings[number] = self._answering.on_call
        if self._hooks is not None and self._hooks_number is not None:
            self.bridge.servings[self._hooks_number] = self._hooks.on_call
        end, self._ended = self.bridge.expect()
        spec = pack(self._spec)
        try:
            await self._begin(lambda op: node.serve_model(op, end, number, spec))
            logger.info("%s: serves the model %s", self.name, self._spec["engine"]["model"])
            if self._on_served is not None:
                self._on_served()
            await asyncio.wait([self._ended])
            await self._answering.idle(IDLE_S)
            # Raises the error that ended it, if there was one.
            self._ended.result()
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            for each in (number, self._hooks_number):
                self.bridge.servings.pop(each, None)  # type: ignore[arg-type]

    def publish(self, event: bytes) -> None:
        """Publishes an event of the engine. Any thread may call it."""
        self.bridge.check()
        self.bridge.node.publish(self.number, event)

    async def _begin(self, begin: Callable[[int], None]) -> None:
        try:
            await self.bridge.operation(begin)
        except EngineError:
            # It was never served, so no end will come.
            if self._ended is not None:
                self._ended.cancel()
            raise

    async def stop(self) -> None:
        if self._ended is None:
            return
        if not self._ended.done():
            self._tell_stop()
            await asyncio.wait([self._ended])
        await self._answering.idle(IDLE_S)

    def hurry(self) -> None:
        self._tell_stop()

    def _tell_stop(self) -> None:
        try:
            stopping = self.bridge.operation(lambda op: self.bridge.node.stop(op, self.number))
            stopping.add_done_callback(lambda done: done.cancelled() or done.exception())
        except EngineShutdown:
            pass


class _Publisher:
    """Publishes for the model of an endpoint. Before the model is served, publishing has no effect."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def _publish(self, event: Event) -> None:
        model = self._endpoint.runtime._models.get(self._endpoint.name)
        if not isinstance(model, _Registered):
            raise InvalidArgument(f"{self._endpoint.name} has no model: call register_llm first")
        if model.number is not None:
            bridge = self._endpoint.runtime._bridge
            bridge.check()
            bridge.node.publish(model.number, pack(event))


class KvEventPublisher(_Publisher):
    """Tells routers which blocks of the prefix cache are reusable. Compute the hashes with `genset.kv.hash_blocks`, as routers do: no other
    hash matches a prompt."""

    def publish_stored(self, blocks: Sequence[int], parent: int | None = None, rank: int | None = None) -> None:
        """Blocks became reusable. Each is the child of the one before; the first follows `parent`. `rank` is the data-parallel rank of the
        blocks, for models with several."""
        self._publish(kv_event({"stored": {"parent": parent, "blocks": list(blocks)}}, rank))

    def publish_removed(self, blocks: Sequence[int], rank: int | None = None) -> None:
        """Blocks are no longer reusable."""
        self._publish(kv_event({"removed": {"blocks": list(blocks)}}, rank))

    def publish_cleared(self, rank: int | None = None) -> None:
        """No block of the rank, or of any rank if it is None, is reusable any more."""
        self._publish(kv_event("cleared", rank))


class LoadPublisher(_Publisher):
    """Tells routers how busy the engine is."""

    def publish(self, load: Load) -> None:
        """Sets the current load. Absent fields are 0, except `kv_total_blocks`, which is then that of `register_llm`. Raises `InvalidArgument`
        for a count that a `Load` does not have."""
        self._publish(load_event(load))


class StepPublisher(_Publisher):
    """Tells the worker that the handler works while it yields nothing, as in a long prompt."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._worker = WorkerHandle(self._publish)

    def publish(self) -> None:
        """Reports that the handler has computed a step, for any request: no request counts as silent, and a waiting canary is no failure. Any
        thread may call it, as often as it likes."""
        self._worker.report_step()


class MetricsPublisher(_Publisher):
    """Adds the model's own metrics to this process's `/metrics`, on the status port."""

    def publish(self, samples: Sequence[Metric]) -> None:
        """Sets series, such as `genset.metrics.Metrics.samples()`; the last value of each counts. A series is dropped with a warning if its
        name is invalid for Prometheus, and beyond 4096 series and 4 KiB of name, labels and help."""
        self._publish({"metrics": list(samples)})
