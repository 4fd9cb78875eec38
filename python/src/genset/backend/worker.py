"""`Worker`: an engine and its worker inside a program of one's own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from genset import _model_files
from genset._declared import completed
from genset._frames import pack
from genset.engine import Context, Event, LLMEngine, WorkerConfig, WorkerHandle, control_reply
from genset.exceptions import InvalidArgument, Unsupported
from genset.llm import ModelService, Tokens, model_spec
from genset.runtime import GRACE_S, Runtime, serve_until_signalled

logger = logging.getLogger(__name__)


class Worker:
    """Serves an engine in this process, on this event loop.

        await Worker(engine, WorkerConfig(model_name="m", model_path="models/tiny-chat")).run()

    An engine that computes for long on the event loop holds up the whole program: `genset.backend.run` gives it a process of its own.
    What needs that too: a `BatchEngine`'s shared steps (here each request takes its own), and published metrics. Without `runtime` the worker joins the fleet that its config names, and SIGTERM or SIGINT drain it; with one,
    both are the program's to do.
    """

    def __init__(self, engine: LLMEngine, config: WorkerConfig, *, runtime: Runtime | None = None, grace: float = GRACE_S) -> None:
        if config.extra_args or config.engine_restarts:
            raise InvalidArgument("extra_args and engine_restarts are for genset.backend.run, where the engine has its own process")
        self.engine = engine
        self.config = config
        self._runtime = runtime
        self._grace_s = grace
        self._service: ModelService | None = None
        self._aborting: set[asyncio.Task[None]] = set()
        self._has_warned = False

    async def run(self) -> None:
        """Starts the engine and serves it until the runtime shuts down; the engine is cleaned up when it returns, or raises.

        Raises what `start` raised, `InvalidArgument` for a config that cannot be served, and the error that the engine died of.
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
        engine.worker = WorkerHandle(self._publish, self._progress, config.role)
        try:
            path = config.model_path or config.model_name
            declared = completed(await engine.start(runtime.worker_id), path, config.migration_limit)
            logger.info("engine started: %s", declared.model)
            wire = declared.to_wire()
            wire["model"] = config.served_model_name or config.model_name or wire["model"]
            needs_files = bool({"tokens", "embed", "score"} & set(declared.inputs))
            spec = model_spec(
                endpoint,
                wire,
                await asyncio.to_thread(_model_files.find, path) if needs_files else None,
                endpoint_types=config.endpoint_types.split(",") if config.endpoint_types else None,
                context_length=config.context_length,
                role=config.role,
                migration_limit=3 if config.migration_limit is None else config.migration_limit,
                user_data=config.user_data,
                tool_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                chat_template=config.custom_jinja_template,
                grace_s=self._grace_s,
                worker_id=runtime.worker_id,
            )
            self._service = ModelService(
                endpoint, engine.generate, spec, Tokens(endpoint.name), hooks=self._hook, on_stop=self._on_stop
            )
            await runtime.serve(self._service)
        finally:
            self._service = None
            await engine.cleanup()
            logger.info("engine cleaned up")

    async def _hook(self, request: Any) -> dict[str, Any] | None:
        """What the worker asks of the engine beside requests."""
        if "control" in request:
            arguments = dict(request["control"])
            return control_reply(await self.engine.control(arguments.pop("op"), arguments))
        if "drain" not in request:
            raise Unsupported(f"this version of the package does not know {', '.join(request)}")
        await self.engine.drain()
        return None

    def _on_stop(self, context: Context) -> None:
        task = asyncio.ensure_future(self._abort(context))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, context: Context) -> None:
        try:
            await self.engine.abort(context)
        except Exception:
            logger.exception("abort of request %s failed", context.id())

    def _publish(self, event: Event) -> None:
        packed = pack(event)  # What cannot be packed is the caller's error.
        if "metrics" in event:
            self._warn_of_metrics()
        elif self._service is not None:
            self._service.publish(packed)

    def _warn_of_metrics(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("metrics of an engine inside a program are not published; run it with genset.backend.run for that")

    def _progress(self, stage: str, fraction: float | None) -> None:
        logger.info("%s%s", stage, "" if fraction is None else f" ({fraction:.0%})")
