"""`Worker`: an engine and its worker inside your own program."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from genset import _model_files
from genset._checks import LIMITS, check_seconds
from genset._declared import completed, needs_files
from genset._frames import pack
from genset._slips import called, check_engine, started
from genset.engine import Context, Event, LLMEngine, WorkerConfig, WorkerHandle, control_reply
from genset.exceptions import Disconnected, EngineShutdown, InvalidArgument, Unsupported
from genset.llm import ModelService, Tokens, engine_id, model_spec
from genset.runtime import GRACE_S, Runtime, serve_until_signalled
from genset.types import Metric

logger = logging.getLogger(__name__)

_SERIES_KEPT = 4096
"""The number of series that a worker shows."""
_KV_EVENTS_KEPT = 4096


class Worker:
    """Serves an engine in this process, on this event loop.

        await Worker(engine, WorkerConfig(model_name="m", model_path="models/tiny-chat")).run()

    An engine that computes for long on the event loop blocks the whole program: `genset.backend.run` gives it its own process.
    A `BatchEngine` needs that too for shared steps: here each request takes its own. Without `runtime` the worker joins the fleet of its
    config, and SIGTERM or SIGINT drains it; with one, the program does both. Its metrics and those that the engine publishes are on the
    status port, if `GENSET_STATUS_PORT` names one. Several workers of a program with that port share a `runtime`.
    """

    def __init__(self, engine: LLMEngine, config: WorkerConfig, *, runtime: Runtime | None = None, grace: float = GRACE_S) -> None:
        if config.extra_args or config.engine_restarts:
            raise InvalidArgument("extra_args and engine_restarts are for genset.backend.run, where the engine has its own process")
        check_engine(engine)
        check_seconds(grace, "grace")
        self.engine = engine
        self.config = config
        self._runtime = runtime
        self._grace_s = grace
        self._service: ModelService | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Starts the engine and serves it until the runtime shuts down. Cleans the engine up before it returns or raises.

        Raises the error of `start`, `InvalidArgument` for an invalid config, and the error that the engine died of.
        """
        if self._runtime is not None:
            await self._serve(self._runtime)
            return
        config = self.config
        await serve_until_signalled(
            self._serve, discovery_backend=config.discovery_backend, request_plane=config.request_plane
        )

    async def _serve(self, runtime: Runtime) -> None:
        engine, config = self.engine, self.config
        endpoint = runtime.namespace(config.namespace).component(config.component).endpoint(config.endpoint)
        worker_id = engine_id(runtime)
        early = _Early()
        engine.worker = WorkerHandle(functools.partial(self._publish, early), self._progress, config.role)
        try:
            path = config.model_path or config.model_name
            declared = completed(await started(engine, worker_id), path, config.migration_limit)
            logger.info("engine started: %s", declared.model)
            wire = declared.to_wire()
            wire["model"] = config.served_model_name or config.model_name or wire["model"]
            limits = {f"{name}_s": getattr(config, name) for name in LIMITS if getattr(config, name) is not None}
            spec = model_spec(
                endpoint,
                wire,
                await _model_files.locate(path) if needs_files(declared) else None,
                endpoint_types=config.endpoint_types.split(",") if config.endpoint_types else None,
                context_length=config.context_length,
                role=config.role,
                migration_limit=3 if config.migration_limit is None else config.migration_limit,
                user_data=config.user_data,
                tool_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                chat_template=config.custom_jinja_template,
                grace_s=self._grace_s,
                worker_id=worker_id,
                **limits,
            )
            self._service = ModelService(
                endpoint,
                # It gets both, whatever its arguments are called, as in a process of its own.
                lambda request, context: engine.generate(request, context),
                spec,
                Tokens(endpoint.name),
                hooks=self._hook,
                on_stop=self._on_stop,
                on_served=lambda: early.end(self._publish_now),
            )
            await runtime.serve(self._service)
        except asyncio.CancelledError:
            early.check()
            raise
        finally:
            self._service = None
            early.end(self._publish_now)
            await self._clean_up(has_failed=isinstance(sys.exc_info()[1], Exception))

    async def _clean_up(self, has_failed: bool) -> None:
        """Cleans the engine up. If the worker has failed, an error of `cleanup` is logged and does not replace the worker's."""
        try:
            await called(self.engine.cleanup)
        except Exception:
            if not has_failed:
                raise
            logger.exception("cleanup failed")
        else:
            logger.info("engine cleaned up")

    async def _hook(self, request: Any) -> dict[str, Any] | None:
        """Answers the worker's calls to the engine other than requests."""
        if "control" in request:
            arguments = dict(request["control"])
            return control_reply(await called(self.engine.control, arguments.pop("op"), arguments))
        if "drain" not in request:
            raise Unsupported(f"this version of the package does not know {', '.join(request)}")
        await called(self.engine.drain)
        return None

    def _on_stop(self, context: Context) -> None:
        task = asyncio.ensure_future(self._abort(context))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, context: Context) -> None:
        try:
            await called(self.engine.abort, context)
        except Exception:
            logger.exception("abort of request %s failed", context.id())

    def _publish(self, early: _Early, event: Event) -> None:
        packed = pack(event)  # If it cannot be packed, that is the caller's error.
        if not early.keep(event, packed):
            self._publish_now(packed)

    def _publish_now(self, packed: bytes) -> None:
        service = self._service
        if service is not None:
            # Without a worker it has no effect, and the caller may be a thread that does nothing else.
            with contextlib.suppress(EngineShutdown):
                service.publish(packed)

    def _progress(self, stage: str, fraction: float | None) -> None:
        logger.info("%s%s", stage, "" if fraction is None else f" ({fraction:.0%})")


class _Early:
    """What an engine publishes before its worker is listed: all KV events, in order, and the last value of the load and of each series, which
    may be the only one. An early death cancels the task that made this object. Any thread may publish."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._death: str | None = None
        self._kv_events: list[bytes] = []
        self._last: dict[bytes, bytes] = {}
        self._is_over = False
        self._lock = threading.Lock()

    def keep(self, event: Event, packed: bytes) -> bool:
        """Keeps an event; returns False once the worker is listed."""
        with self._lock:
            if self._is_over:
                return False
            if isinstance(event, str):
                # A step: no request waits for an answer yet.
                return True
            if "metrics" in event:
                self._keep_samples(event["metrics"])
            elif "load" in event or "dead" in event:
                self._last[pack(list(event))] = packed
            else:
                self._keep_kv(packed)
        if "dead" in event:
            # A closed loop has no task to notify.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._die, event["dead"]["reason"])
        return True

    def _die(self, reason: str) -> None:
        # A listed worker handles the death itself.
        if self._task is not None and self._death is None and not self._is_over:
            self._death = reason
            self._task.cancel()

    def check(self) -> None:
        """Raises the error that the engine died of, if the task was cancelled for it."""
        if self._death is not None:
            # From Python 3.11 on a task counts its cancellations. This one must not count.
            getattr(self._task, "uncancel", int)()
            raise Disconnected(f"the engine reported itself dead: {self._death}")

    def _keep_samples(self, samples: Iterable[Metric]) -> None:
        for sample in samples:
            key = pack([sample.get("name"), sample.get("labels")])
            # The worker accepts no more either.
            if key in self._last or len(self._last) < _SERIES_KEPT:
                # Packed now: the caller may change it later.
                self._last[key] = pack({"metrics": [sample]})

    def _keep_kv(self, packed: bytes) -> None:
        if len(self._kv_events) >= _KV_EVENTS_KEPT:
            # Losing single events is unsafe. Without any, none of the blocks counts as reusable, which is safe.
            came = len(self._kv_events)
            logger.warning("%d KV events came before the worker was listed; they are dropped, with the blocks they told of", came)
            self._kv_events = [pack({"kv": "cleared"})]
        self._kv_events.append(packed)

    def end(self, publish: Callable[[bytes], None]) -> None:
        """Publishes the kept events, and keeps none from now on."""
        with self._lock:
            self._is_over = True
            kept = (*self._kv_events, *self._last.values())
            self._kv_events, self._last = [], {}
            for packed in kept:
                try:
                    publish(packed)
                except ValueError as error:
                    logger.warning("what was published at the start cannot be, and is dropped: %s", error)
