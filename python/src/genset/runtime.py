"""The runtime in this process: names, served endpoints and clients of other endpoints.

    @worker()
    async def main(runtime: Runtime) -> None:
        endpoint = runtime.namespace("demo").component("text").endpoint("upper")
        await endpoint.serve_endpoint(upper)

    async def upper(request):
        yield request["text"].upper()

    asyncio.run(main())

A handler receives plain data: what MessagePack can hold, with pydantic models and dataclasses as dictionaries. It runs on the
program's own event loop. It waits at `yield` while its reader has no room.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import logging
import signal
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, cast, overload

from genset import _logging
from genset._bridge import Bridge, load_native
from genset._checks import check_values
from genset._client import Client, ResponseStream
from genset._handler import CANCEL_GRACE_S, Answering, Codec, Handler, Plain, checked
from genset._values import Record
from genset.engine import Context
from genset.exceptions import EngineError, EngineShutdown, InvalidArgument

__all__ = ["Client", "Component", "Context", "Endpoint", "Namespace", "Record", "ResponseStream", "Runtime", "get_runtime", "worker"]

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""How long requests may continue after a process begins to drain."""

FINISH_S = 30.0
"""How long the program's function, and other tasks that served, may take after the drain."""

KILL_S = GRACE_S + FINISH_S + 15.0
"""How long to wait before killing a process that was told to drain. It includes the time to leave the fleet and to exit."""

Result = TypeVar("Result")
Main = Callable[..., Coroutine[Any, Any, Result]]
Check = Callable[[Any], Any]
"""Converts plain data to a value of a type, or raises `InvalidArgument`. `genset._checks.checker` returns one."""

class Model(Protocol):
    """What `genset.llm.register_llm` stores for a model's endpoint."""

    def service(
        self, endpoint: Endpoint, handler: Handler, max_requests: int, grace_s: float, check: Check | None = None
    ) -> Service:
        """Serves the model; `check` converts its requests to the handler's type."""


_runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
"""The live runtimes of all event loops by their own ids, in the order in which they connected."""
_connecting: weakref.WeakValueDictionary[int, asyncio.Task[Runtime]] = weakref.WeakValueDictionary()
"""The connections that `get_runtime` makes, by the event loop's id. A task holds its loop, so no other loop has that id meanwhile."""


def _live() -> list[Runtime]:
    # A copy: another thread's loop may connect one meanwhile.
    found = [reference() for reference in _runtimes.valuerefs()]
    return [runtime for runtime in found if runtime is not None]


class Runtime:
    """This process in the fleet, for one event loop. `connect` makes it, `shutdown` ends it."""

    def __init__(self, bridge: Bridge, status_port: int | None = None) -> None:
        self._bridge = bridge
        self._status_port = status_port
        self._services: list[Service] = []
        self._ending: asyncio.Task[None] | None = None
        self._models: dict[str, Model] = {}
        self._has_engine = False
        """Whether a `genset.backend.Worker` serves, or served, in it."""
        self._servers: set[asyncio.Task[Any]] = set()
        self._has_served = False
        self._status: asyncio.Future[int | None] | None = None
        self.worker_id: int = bridge.node.new_instance_id()
        """The id under which this process's endpoints are listed, below 2^53."""

    @classmethod
    async def connect(cls, static: bool = False, **options: Any) -> Runtime:
        """Joins the fleet that the environment names (`ETCD_ENDPOINTS`, `NATS_SERVER`, `GENSET_DISCOVERY_BACKEND`, ...).

        `options` override the environment. They are the flags of `genset run --help` for the network and the status port, with `_` for
        `-`: `discovery_backend="etcd"`, `etcd_endpoints=["http://a:2379", "http://b:2379"]`, `discovery_shared=True`. With `static` it joins
        no fleet: served endpoints are found only in this process. The port of `status_port` opens at once, that of `GENSET_STATUS_PORT`
        when something is served.

        Raises ValueError for an unknown option, `InvalidArgument` if the process cannot listen on the status port. Servers are first
        needed when something is served or called: if they cannot be reached, that raises `Unavailable` or `CannotConnect`.
        """
        flags = [_flag(name, value) for name, value in options.items() if value is not None]
        bridge = Bridge()
        try:
            named = await bridge.operation(lambda op: bridge.node.connect(op, flags, static))
            runtime = cls(bridge, named)
            if options.get("status_port") is not None:
                await runtime.open_status()
        except BaseException:
            bridge.close()
            raise
        bridge.hold(runtime)
        _runtimes[id(runtime)] = runtime
        return runtime

    async def open_status(self) -> int | None:
        """Opens the status port (`/live`, `/ready`, `/health`, `/metrics`, `/control`) and returns it; None if neither `status_port` nor
        `GENSET_STATUS_PORT` names one.

        The process is ready while it serves something, and all of it is listed. `worker` calls this at its start, and so does the first
        service. A script that only calls endpoints therefore takes no port from the process whose environment it inherited.

        Raises `InvalidArgument`, naming the address, if the process cannot listen on it, as for the second `Runtime` of a process with one
        port: what runs in one process shares its runtime, so that `/ready` is about all of it.
        """
        status = self._status
        # Tries again after a failure: the address may be free by now.
        if status is None or (status.done() and (status.cancelled() or status.exception() is not None)):
            status = self._status = self._bridge.operation(self._bridge.node.open_status)
        try:
            # Several callers may wait for it.
            return await asyncio.shield(status)
        except InvalidArgument as error:
            if not any(other._listens_on(self._status_port) for other in _live() if other is not self):
                raise
            instead = "another Runtime of this process has the port: share it, as in Worker(engine, config, runtime=runtime)"
            raise InvalidArgument(f"{error.message}; {instead}", field=error.field) from None

    def _listens_on(self, port: int | None) -> bool:
        status, ending = self._status, self._ending
        if status is None or self._status_port != port or (ending is not None and ending.done()):
            return False
        # Two that begin at once may not know yet which of them got the port.
        return not status.done() or not (status.cancelled() or status.exception())

    def namespace(self, name: str) -> Namespace:
        """Returns a namespace: a pipeline, usually a model. Raises ValueError for an invalid name."""
        self._bridge.node.check_name((name, "x", "x"))
        return Namespace(self, name)

    def endpoint(self, path: str) -> Endpoint:
        """Returns an endpoint by its full name: `namespace.component.endpoint`, with `dyn://` before it or with slashes."""
        parts = path.removeprefix("dyn://").replace("/", ".").split(".")
        if len(parts) != 3:
            raise ValueError(f"{path!r} is no endpoint: write namespace.component.endpoint")
        return self.namespace(parts[0]).component(parts[1]).endpoint(parts[2])

    async def serve(self, service: Service) -> None:
        """Serves until the shutdown. `Endpoint.serve_endpoint` and `genset.sdk` make services."""
        if self.is_draining:
            raise EngineShutdown("the runtime is shutting down")
        if self._status_port is not None:
            await self.open_status()
            if self.is_draining:
                return
        if any(other.name == service.name for other in self._services):
            raise InvalidArgument(f"{service.name} is served by this process already; give the second one another name")
        self.note_server()
        self._services.append(service)
        try:
            await service.run()
        finally:
            self._services.remove(service)

    def note_server(self) -> None:
        """Registers this task as one that serves: it notices the drain by itself and gets `FINISH_S` to end after it."""
        self._has_served = True
        task = asyncio.current_task()
        if task is not None:
            self._servers.add(task)
            task.add_done_callback(self._servers.discard)

    async def finish(self, hurried: asyncio.Future[None]) -> None:
        """Returns when the shutdown is over and the serving tasks have ended or used up their time, or soon after `hurried` is done."""
        ending = self.begin_shutdown()
        await asyncio.wait((ending, hurried), return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            # Cancelled requests need a moment to end.
            await asyncio.wait([ending], timeout=2 * CANCEL_GRACE_S)
        if not self._servers or hurried.done():
            return
        ended = asyncio.ensure_future(_end(set(self._servers)))
        await asyncio.wait((ended, hurried), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if self._servers and not hurried.done():
            logger.warning("what was left to do after the drain is cut short after %g s", FINISH_S)

    @property
    def is_draining(self) -> bool:
        """Whether the shutdown has begun."""
        return self._ending is not None

    def begin_shutdown(self) -> asyncio.Task[None]:
        """Begins the shutdown and returns its task. Later calls return the same task."""
        if self._ending is None:
            self._ending = self._bridge.loop.create_task(self._end())
        return self._ending

    def hurry(self) -> None:
        """Cuts the grace period of a shutdown short."""
        for service in self._services:
            service.hurry()

    def shutdown(self) -> Coroutine[Any, Any, None]:
        """Unlists all endpoints, lets their requests end within their grace, and leaves the fleet. Leaves nothing running. Begins at the call,
        as programs of Dynamo expect, which do not await it."""
        return _until_over(self.begin_shutdown())

    async def _end(self) -> None:
        await asyncio.gather(*(service.stop() for service in self._services), return_exceptions=True)
        try:
            await self._bridge.operation(self._bridge.node.shutdown)
        finally:
            self._bridge.close()

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def _flag(name: str, value: Any) -> str:
    """An option as the command line has it."""
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"--{name.replace('_', '-')}={value}"


async def _until_over(ending: asyncio.Task[None]) -> None:
    await asyncio.shield(ending)


async def _end(servers: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(servers, timeout=FINISH_S)


class Namespace:
    """A namespace of a runtime."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def component(self, name: str) -> Component:
        """Returns a component: a load-balanced service of the pipeline. Raises ValueError for an invalid name."""
        self._runtime._bridge.node.check_name((self.name, name, "x"))
        return Component(self._runtime, self.name, name)


class Component:
    """A component of a namespace."""

    def __init__(self, runtime: Runtime, namespace: str, name: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self.name = name

    async def create_service(self) -> None:
        """Does nothing: serving an endpoint makes its service. Kept for programs that call it."""

    def endpoint(self, name: str) -> Endpoint:
        """Returns an endpoint: one thing the component does. Raises ValueError for an invalid name."""
        path = (self._namespace, self.name, name)
        self._runtime._bridge.node.check_name(path)
        return Endpoint(self._runtime, path)


class Endpoint:
    """An endpoint of a component: this process serves it or calls it."""

    def __init__(self, runtime: Runtime, path: tuple[str, str, str]) -> None:
        self.runtime = runtime
        self.path = path
        """Namespace, component and endpoint."""

    @property
    def name(self) -> str:
        """The full name."""
        return ".".join(self.path)

    async def client(self) -> Client:
        """Returns a client of the endpoint's instances."""
        bridge = self.runtime._bridge
        bridge.check()
        return Client(bridge, bridge.node.caller(self.path), self.name)

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        metrics_labels: Any = None,
        health_check_payload: Any = None,
        *,
        max_requests: int = 4096,
        grace: float = GRACE_S,
    ) -> None:
        """Serves the endpoint until the runtime shuts down. If a model is registered for it, serves the model.

        `handler(request)`, or `handler(request, context)`, is an async generator, a coroutine, a generator or a function. An
        exception of `genset.exceptions` reaches the caller unchanged, any other as `Internal`. With `graceful_shutdown` requests may
        continue for `grace` seconds once the process drains; without it they are cancelled. Beyond `max_requests` at once, requests are
        refused as `Overloaded`.

        Raises `InvalidArgument` if this process serves the endpoint already, or for a value out of range, such as a `max_requests` of 0.
        """
        check_values(Endpoint.serve_endpoint, {"max_requests": max_requests, "grace": grace}, {}, {"max_requests": 1})
        if not grace >= 0:
            raise InvalidArgument(f"{grace!r} is no number of seconds from 0", field="grace")
        if metrics_labels:
            logger.warning("%s: metrics_labels have no effect, series have the labels of the model", self.name)
        if health_check_payload:
            logger.warning("%s: health_check_payload has no effect, a model is probed with a request of one token", self.name)
        await self.runtime.serve(self._service(handler, max_requests, grace if graceful_shutdown else 0.0))

    def _service(self, handler: Handler, max_requests: int, grace_s: float, check: Check | None = None) -> Service:
        model = self.runtime._models.get(self.name)
        if model is not None:
            return model.service(self, handler, max_requests, grace_s, check)
        return EndpointService(self, handler, checked(Plain(self.name), check), max_requests, grace_s)


class Service:
    """Something that is served."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.name = endpoint.name
        self.bridge = endpoint.runtime._bridge
        self.number = self.bridge.number()

    async def run(self) -> None:
        """Serves until `stop`, or until its task is cancelled."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stops serving; returns when the requests have ended."""
        raise NotImplementedError

    def hurry(self) -> None:
        """Cancels the requests that `stop` waits for."""
        raise NotImplementedError


class EndpointService(Service):
    """An endpoint with a handler."""

    def __init__(self, endpoint: Endpoint, handler: Handler, codec: Codec, max_requests: int, grace_s: float) -> None:
        super().__init__(endpoint)
        self._endpoint = endpoint
        self._answering = Answering(self.bridge, self.name, handler, codec)
        self._max_requests = max_requests
        self._grace_s = grace_s
        self._stopped = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        node, number = self.bridge.node, self.number
        self.bridge.servings[number] = self._answering.on_call
        worker_id = self._endpoint.runtime.worker_id
        try:
            await self.bridge.operation(
                lambda op: node.serve(op, number, self._endpoint.path, worker_id, self._max_requests)
            )
            logger.info("%s: served by instance %014x", self.name, worker_id)
            await self._stopped.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        node, number = self.bridge.node, self.number
        try:
            try:
                await self.bridge.operation(lambda op: node.stop(op, number))
            except EngineShutdown:
                pass
            except EngineError as error:
                # Its requests need no discovery, and connected clients know of the stop.
                logger.warning("%s: stays on the list until its lease is over: %s", self.name, error)
            if not await self._answering.idle(self._grace_s):
                logger.warning("%s: requests were cut short after %g s", self.name, self._grace_s)
        finally:
            self.bridge.flush()
            node.close(number)
            self.bridge.servings.pop(number, None)
            self._ended.set()

    async def stop(self) -> None:
        self._stopped.set()
        await self._ended.wait()

    def hurry(self) -> None:
        self._answering.cancel()


async def get_runtime() -> Runtime:
    """Returns the first connected runtime of this event loop that is not shut down. Connects one if there is none, for scripts that
    only call endpoints."""
    loop = asyncio.get_running_loop()
    for runtime in _live():
        if runtime._bridge.loop is loop and not runtime.is_draining:
            return runtime
    connecting = _connecting.get(id(loop))
    if connecting is None or connecting.done():
        connecting = _connecting[id(loop)] = loop.create_task(Runtime.connect())
    # Several callers may wait for it.
    return await asyncio.shield(connecting)


@overload
def worker(static: Main[Result]) -> Callable[..., Coroutine[Any, Any, Result | None]]: ...


@overload
def worker(static: bool = False, **options: Any) -> Callable[[Main[Result]], Callable[..., Coroutine[Any, Any, Result | None]]]: ...


def worker(static: bool | Main[Any] = False, **options: Any) -> Any:
    """Makes `async def main(runtime, ...)` a program: `asyncio.run(main())`.

    It sets up the log, joins the fleet (`options` as for `Runtime.connect`; with `static` none), opens the status port if
    `GENSET_STATUS_PORT` or `status_port` names one, and calls the function with the runtime. SIGTERM or SIGINT drains: the endpoints
    are unlisted, their requests end, and `serve_endpoint` returns. A second signal ends the program at once. After its
    `serve_endpoint` the function has 30 s. Anything else that it awaits is cancelled when the drain is over.
    """
    if not isinstance(static, bool):
        return worker()(static)
    is_static = static

    def decorate(main: Main[Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
        @functools.wraps(main)
        async def program(*arguments: Any, **named: Any) -> Any:
            return await serve_until_signalled(lambda runtime: main(runtime, *arguments, **named), is_static, **options)

        return program

    return decorate


async def serve_until_signalled(main: Main[Result], static: bool = False, **options: Any) -> Result | None:
    """What `worker` does with a function: sets up the log, joins the fleet and runs it until a signal."""
    start_logging()
    runtime = await Runtime.connect(static, **options)
    try:
        await runtime.open_status()
        running = main(runtime)
        if not inspect.isawaitable(running):
            raise TypeError(f"what @worker() runs gave a {type(running).__name__} that cannot be awaited: write `async def main(runtime)`")
    except BaseException:
        await runtime.shutdown()
        raise
    return cast("Result | None", await _run(runtime, running))


async def _run(runtime: Runtime, main: Awaitable[Any]) -> Any:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    hurried: asyncio.Future[None] = loop.create_future()
    endings: list[asyncio.Task[None]] = []

    async def end() -> None:
        # Without anything to drain, the function is cancelled before the shutdown ends its requests with an error.
        if runtime._has_served:
            await runtime.finish(hurried)
        # A function that waits for something else than its endpoints does not notice the drain.
        task.cancel()

    def on_signal(name: str) -> None:
        # Not `is_draining`: the program may have begun a shutdown by itself, and then this signal is the first.
        if endings:
            logger.warning("%s: stopping at once", name)
            runtime.hurry()
            if not hurried.done():
                hurried.set_result(None)
            return
        logger.info("%s: draining; a second signal stops at once", name)
        endings.append(loop.create_task(end()))
        runtime.begin_shutdown()

    try:
        with _told_of_signals(loop, on_signal):
            return await task
    except asyncio.CancelledError:
        if not runtime.is_draining:
            raise
        return None
    finally:
        for ending in endings:
            ending.cancel()
        await runtime.shutdown()


_on_signals: list[tuple[asyncio.AbstractEventLoop, Callable[[str], None]]] = []
"""What the programs on the main thread's loop do at a signal. A loop has one handler for each signal, and may run several programs, such
as two `genset.backend.Worker`s."""

_untold = 0
"""Signals that the loop has not passed on yet."""


@contextlib.contextmanager
def _told_of_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_signal` with the name of a signal that ends programs."""
    global _untold
    _untold = 0
    signals = (signal.SIGINT, signal.SIGTERM)
    mine = (loop, on_signal)
    # Only the main thread's loop handles signals; in other threads they are not ours.
    with contextlib.suppress(RuntimeError, ValueError):
        for number in signals:
            loop.add_signal_handler(number, _tell_all, number.name)
            # In place of asyncio's, which does nothing. The loop is told by its pipe all the same.
            signal.signal(number, _interrupt)
        # Programs that were under way when their loop was closed are still there.
        _on_signals[:] = [each for each in _on_signals if not each[0].is_closed()]
        _on_signals.append(mine)
    try:
        yield
    finally:
        if mine in _on_signals:
            _on_signals.remove(mine)
            if not _on_signals:
                for number in signals:
                    with contextlib.suppress(RuntimeError, ValueError):
                        loop.remove_signal_handler(number)


def _interrupt(_number: int, _frame: types.FrameType | None) -> None:
    """Runs in the main thread at the signal, also while something blocks the loop. That is then ended by an exception at the second signal."""
    global _untold
    _untold += 1
    if _untold > 1:
        raise KeyboardInterrupt


def _tell_all(name: str) -> None:
    global _untold
    _untold = 0
    for _, on_signal in tuple(_on_signals):
        on_signal(name)


def start_logging() -> None:
    """Sends the native module's log to standard error, and Python's log too unless the program has set one up."""
    native = load_native()
    native.start_logging(0)
    atexit.register(native.end_logging)
    _logging.configure_program()
