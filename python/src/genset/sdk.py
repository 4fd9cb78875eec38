"""Services as classes: endpoints are methods, other services are attributes.

    @service(namespace="demo")
    class Upper:
        @endpoint()
        async def generate(self, request: Text) -> AsyncIterator[Text]:
            yield Text(text=request.text.upper())

    @service(namespace="demo")
    class Twice:
        upper = depends(Upper)

        @endpoint()
        async def generate(self, request: Text):
            async for answer in self.upper.generate(request):
                yield answer
                yield answer

`genset serve module:Twice` starts both, each in a process of its own. A request whose method names a pydantic model or a dataclass is
checked against it; answers may be such values too. `@endpoint(model="name")` offers a method over HTTP.
"""

from __future__ import annotations

import asyncio
import collections.abc
import dataclasses
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from genset._checks import checker, hints_of
from genset._client import Client, ResponseStream
from genset._values import decode
from genset.exceptions import Internal, InvalidArgument
from genset.llm import ModelType, register_llm
from genset.runtime import GRACE_S, Endpoint, Runtime, get_runtime, worker

__all__ = [
    "IMAGE",
    "ModelOffer",
    "ServiceSpec",
    "config",
    "depends",
    "endpoint",
    "endpoint_of",
    "get_runtime",
    "on_shutdown",
    "on_start",
    "serve",
    "service",
    "worker",
]

logger = logging.getLogger(__name__)

IMAGE: str = os.environ.get("GENSET_IMAGE") or os.environ.get("DYNAMO_IMAGE") or ""
"""The container image of services that name none: from `GENSET_IMAGE`, else `DYNAMO_IMAGE`."""

DEFAULT_NAMESPACE = "genset"
SERVICE_ARGS = "ServiceArgs"
"""The key of a service's settings whose `workers` and `resources` override those of its declaration, as in Dynamo."""
MAX_REQUESTS = 4096
"""The most concurrent requests of an endpoint."""
_SPEC = "__genset_service__"
_ENDPOINT = "__genset_endpoint__"
_MODEL = "__genset_model__"
_HOOK = "__genset_hook__"
READS_JSON = "__genset_reads_json__"
"""Marks an endpoint that also takes a pydantic model as JSON text, and may answer with the text of one."""

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class ModelOffer:
    """A model that an endpoint serves: the arguments of `endpoint` for `register_llm`."""

    name: str
    kind: ModelType
    path: str
    """Empty if it needs no files."""
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """The arguments of `service` for a class, and what the class defines."""

    cls: type
    name: str
    """The component, by default the class's name."""
    namespace: str
    resources: Mapping[str, str]
    """Any of `cpu` (cores, as `2` or `500m`), `memory` (as `20Gi`) and `gpu` (devices), for each worker."""
    workers: int
    """The number of processes of this service."""
    image: str
    endpoints: Mapping[str, str]
    """Names of endpoints to names of methods."""
    dependencies: Mapping[str, type]
    """Names of attributes to the classes of `depends`."""
    models: Mapping[str, ModelOffer] = dataclasses.field(default_factory=dict)
    """Names of endpoints to their models."""

    @staticmethod
    def of(cls: type) -> ServiceSpec:
        """Returns the spec of a class; TypeError if it is no service."""
        spec = vars(cls).get(_SPEC) if isinstance(cls, type) else None
        if not isinstance(spec, ServiceSpec):
            raise TypeError(f"{getattr(cls, '__name__', repr(cls))} is no service: decorate the class with @service(...)")
        return spec

    def adjusted(self, settings: Mapping[str, Any]) -> ServiceSpec:
        """Returns the spec with the `workers` and `resources` that the service's settings have under `ServiceArgs`. Raises TypeError or
        ValueError for what these cannot be."""
        given = settings.get(SERVICE_ARGS) or {}
        if not isinstance(given, Mapping):
            raise TypeError(f"{SERVICE_ARGS}: {given!r} is no map of workers and resources")
        unknown = set(given) - {"workers", "resources"}
        if unknown:
            raise TypeError(f"{SERVICE_ARGS} knows workers and resources, not {', '.join(sorted(map(str, unknown)))}")
        # As in the rest of a file, what has no value is not given.
        given = {name: value for name, value in given.items() if value is not None}
        workers, resources = given.get("workers", self.workers), given.get("resources", {})
        _check_workers(workers, f"{SERVICE_ARGS}.workers")
        if not isinstance(resources, Mapping):
            raise TypeError(f"{SERVICE_ARGS}.resources: {resources!r} is no map of cpu, memory and gpu")
        resources = {name: amount for name, amount in resources.items() if amount is not None}
        resources = {**self.resources, **_resources(resources, f"{SERVICE_ARGS}.resources")}
        return dataclasses.replace(self, workers=workers, resources=resources)

    def graph(self) -> Iterator[ServiceSpec]:
        """The services this one depends on, each before its dependents, and finally this one."""
        yield from _graph(self, set())


_CPU = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(m?)")


def parse_cpu(text: str) -> float:
    """Parses `2`, `0.5` or `500m` as cores; ValueError for anything else."""
    found = _CPU.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no number of cores, such as 2, 0.5 or 500m")
    number, milli = found.groups()
    return float(number) / (1000 if milli else 1)


_BYTES = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([kMGT]|[KMGT]i|)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(text: str) -> int:
    """Parses `20Gi`, `512M` or a number as bytes, at least one; ValueError for anything else."""
    found = _BYTES.fullmatch(text)
    if found is None or not int(float(found[1]) * _UNITS[found[2]]):
        raise ValueError(f"{text!r} is no memory, such as 20Gi, 512M or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_gpus(text: str) -> int:
    """Parses `2` or `2.0` as devices; ValueError for anything else."""
    number, _, part = text.partition(".")
    if not (number.isascii() and number.isdigit()) or part.strip("0"):
        raise ValueError(f"{text!r} is no whole number of devices")
    return int(number)


_PARSERS: Mapping[str, Callable[[str], object]] = {"cpu": parse_cpu, "memory": parse_bytes, "gpu": parse_gpus}


def _resources(given: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns checked resources. Raises TypeError for unknown ones and ValueError for invalid ones, which name `where` they are."""
    unknown = set(given) - set(_PARSERS)
    if unknown:
        raise TypeError(f"{where} knows cpu, memory and gpu, not {', '.join(sorted(map(str, unknown)))}")
    for resource, amount in given.items():
        try:
            _PARSERS[resource](str(amount))
        except ValueError as error:
            raise ValueError(f"{where}: {resource}: {error}") from None
    return {key: str(value) for key, value in given.items()}


def _check_workers(given: Any, where: str) -> None:
    if type(given) is not int or given < 1:
        raise ValueError(f"{where}: {given!r} is no number of processes, at least 1")


_PART = re.compile(r"[A-Za-z0-9_-]{1,63}")


def _check_part(part: Any, cls: type) -> None:
    """Raises ValueError for what is no part of an endpoint's name."""
    if not isinstance(part, str) or _PART.fullmatch(part) is None:
        raise ValueError(f"{cls.__name__}: {part!r} is no part of a name: use 1 to 63 letters, digits, - and _")


def _graph(spec: ServiceSpec, seen: set[type]) -> Iterator[ServiceSpec]:
    if spec.cls in seen:
        return
    seen.add(spec.cls)
    for other in spec.dependencies.values():
        yield from _graph(ServiceSpec.of(other), seen)
    yield spec


def service(
    cls: None = None,
    /,
    *,
    namespace: str | None = None,
    name: str | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    image: str = "",
    dynamo: Mapping[str, Any] | None = None,
) -> Callable[[Class], Class]:
    """Makes a class a service; the class stays as it is. The process that serves it builds it without arguments.

    `resources` are for each of the `workers` processes: `cpu`, `memory`, `gpu`. `dynamo` is another way to give the namespace.
    """
    if cls is not None:
        raise TypeError("write @service(), with brackets")
    given = dict(dynamo or {})
    is_enabled = given.pop("enabled", True)
    space = namespace or given.pop("namespace", None) or DEFAULT_NAMESPACE
    given.pop("namespace", None)
    if given:
        raise TypeError(f"@service(dynamo={{...}}) knows enabled and namespace, not {', '.join(given)}")
    if not is_enabled:
        raise TypeError("@service(dynamo={'enabled': False}): a class that is not to be served needs no decorator")
    _check_workers(workers, "@service(workers=...)")
    checked = _resources(resources or {}, "@service(resources=...)")

    def decorate(cls: Class) -> Class:
        endpoints: dict[str, str] = {}
        for method, each in _members(cls, _ENDPOINT):
            at = each.__dict__[_ENDPOINT]
            other = endpoints.setdefault(at, method)
            # One method may be two attributes: `answer = generate`.
            if getattr(cls, other) is not each:
                raise TypeError(f"{cls.__name__}: {other} and {method} are both the endpoint {at}: give one another name")
        spec = ServiceSpec(
            cls=cls,
            name=name or cls.__name__,
            namespace=space,
            resources=checked,
            workers=workers,
            image=image or IMAGE,
            endpoints=endpoints,
            dependencies={key: value.of for key, value in _attributes(cls) if isinstance(value, depends)},
            models={each.__dict__[_ENDPOINT]: each.__dict__[_MODEL] for _, each in _members(cls, _MODEL)},
        )
        # Refuses what is no method before the service starts.
        _members(cls, _HOOK)
        for part in (space, spec.name, *endpoints):
            _check_part(part, cls)
        setattr(cls, _SPEC, spec)
        return cls

    return decorate


_BODIES = ModelType.Chat | ModelType.Completion
_GIVEN = {"model_type", "endpoint", "model_path", "model_name"}
_OPTIONS = [option for option in inspect.signature(register_llm).parameters if option not in _GIVEN]


def endpoint(
    name: str | None = None,
    *,
    model: str | None = None,
    model_type: ModelType | None = None,
    model_path: str | None = None,
    **options: Any,
) -> Callable[[Function], Function]:
    """Makes a method an endpoint: an async generator, a coroutine, a generator or a function of a request.

    With `model` the method serves a model of that name, which frontends offer over HTTP. It receives and yields what the `ModelType`
    says, by default `ModelType.Chat`, the body of a chat. `model_path` and `options` are those of `register_llm`; a handler of bodies
    needs no files.

    Raises TypeError for arguments that do not go together.
    """
    if callable(name):
        raise TypeError("write @endpoint(), with brackets")
    offer = _offer(model, model_type, model_path, options)

    def decorate(method: Function) -> Function:
        method.__dict__[_ENDPOINT] = name or method.__name__
        if offer is not None:
            method.__dict__[_MODEL] = offer
        return method

    return decorate


def _offer(model: str | None, model_type: ModelType | None, path: str | None, options: dict[str, Any]) -> ModelOffer | None:
    unknown = [option for option in options if option not in _OPTIONS]
    if unknown:
        raise TypeError(f"@endpoint(...) and register_llm know no {', '.join(unknown)}")
    if not model:
        given = [*options, *(["model_type"] if model_type is not None else []), *(["model_path"] if path is not None else [])]
        if given:
            raise TypeError(f"@endpoint({given[0]}=...) is about a model: give its name, @endpoint(model=...)")
        return None
    kind = ModelType.Chat if model_type is None else model_type
    if path is None and not kind & _BODIES:
        raise TypeError(f"@endpoint(model={model!r}, model_type={kind!r}) needs the model's tokenizer: give model_path too")
    return ModelOffer(model, kind, path or "", options)


def on_start(method: Function | None = None) -> Function:
    """Marks a method, a coroutine or not, that runs before the service is listed. If one fails, the service ends without `on_shutdown`."""
    return _hook(method, "start")


def on_shutdown(method: Function | None = None) -> Function:
    """Marks a method, a coroutine or not, that runs after the service's requests have ended. Each runs, also after one that failed."""
    return _hook(method, "shutdown")


def _hook(method: Function | None, when: str) -> Function:
    if method is None:
        raise TypeError(f"write @on_{when}, without brackets")
    method.__dict__[_HOOK] = when
    return method


def _members(cls: type, mark: str) -> list[tuple[str, Callable[..., Any]]]:
    marked: list[tuple[str, Callable[..., Any]]] = []
    for name, member in _attributes(cls):
        # The mark may be within the wrapper or on it: decorators come in any order.
        within = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if not any(mark in getattr(each, "__dict__", {}) for each in (member, within)):
            continue
        if not inspect.isfunction(member):
            raise TypeError(f"{cls.__name__}.{name} is a {type(member).__name__}: endpoints and hooks are methods of an instance")
        marked.append((name, member))
    return marked


def _attributes(cls: type) -> Iterable[tuple[str, Any]]:
    """The attributes of the class and its bases, by name, without invoking descriptors."""
    found: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        found.update(each.__dict__)
    return found.items()


class depends:  # noqa: N801 - it reads as a declaration
    """An attribute that is a client of another service: its endpoints are methods that return a `ResponseStream`."""

    def __init__(self, of: type) -> None:
        ServiceSpec.of(of)
        self.of = of
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"__genset_client_of_{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        client = instance.__dict__.get(self._name)
        if client is None:
            client = instance.__dict__[self._name] = ServiceClient(_runtime_of(instance), ServiceSpec.of(self.of))
        return client


_RUNTIME = "__genset_runtime"


def _runtime_of(instance: object) -> Runtime:
    runtime = instance.__dict__.get(_RUNTIME)
    if not isinstance(runtime, Runtime):
        raise RuntimeError(
            f"{type(instance).__name__} is not served, so it has no clients yet: "
            "use what it depends on in endpoints and in on_start, not in __init__"
        )
    return runtime


class ServiceClient:
    """A client of a service: `await client.generate(request)`, or `async for` over it. Answers have the type that the method declares; of a
    model's endpoint, they are what a `Client` of it yields."""

    def __init__(self, runtime: Runtime, spec: ServiceSpec) -> None:
        self._clients: dict[str, Client] = {}
        for name, method in spec.endpoints.items():
            at = runtime.namespace(spec.namespace).component(spec.name).endpoint(name)
            bridge = runtime._bridge
            function = getattr(spec.cls, method)
            reader = _reader(_answer_type(function), at.name, gives_json=hasattr(function, READS_JSON))
            self._clients[name] = Client(bridge, bridge.node.caller(at.path), at.name, reader)

    def client(self, name: str) -> Client:
        """The client of one endpoint, for choosing instances."""
        return self._clients[name]

    def __getattr__(self, name: str) -> Callable[..., ResponseStream]:
        try:
            return self._clients[name].generate
        except KeyError:
            raise AttributeError(f"the service has no endpoint {name!r}, but {', '.join(self._clients)}") from None


def _request_type(method: Callable[..., Any]) -> Any:
    # The first is the instance.
    names = list(inspect.signature(method).parameters)[1:2]
    return hints_of(method).get(names[0]) if names else None


def _answer_type(method: Callable[..., Any]) -> Any:
    hint = hints_of(method).get("return")
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, collections.abc.AsyncIterable | collections.abc.Iterator):
        arguments = typing.get_args(hint)
        return arguments[0] if arguments else None
    return hint


def _reader(of: Any, endpoint: str, gives_json: bool = False) -> Callable[[bytes], Any]:
    check = checker(of, reads_json=gives_json)
    return decode if check is None else lambda payload: _read(check, payload, endpoint, gives_json)


def _read(check: Callable[[Any], Any], payload: bytes, endpoint: str, gives_json: bool) -> Any:
    value = decode(payload)
    if gives_json and isinstance(value, str):
        # Programs of Dynamo parse it themselves.
        return value
    try:
        return check(value)
    except InvalidArgument as error:
        # The fault is not in the request that this process received.
        raise Internal(f"{endpoint} answered what it does not say it gives: {error}") from None


def endpoint_of(instance: object, name: str) -> Endpoint:
    """Returns an endpoint of a served service by its name: for `register_llm` in `on_start`, if `@endpoint(model=...)` cannot know the
    model yet."""
    spec = ServiceSpec.of(type(instance))
    if name not in spec.endpoints:
        raise ValueError(f"{spec.name} has no endpoint {name!r}, but {', '.join(spec.endpoints)}")
    return _runtime_of(instance).namespace(spec.namespace).component(spec.name).endpoint(name)


_config: Mapping[str, Any] = {}


def config() -> Mapping[str, Any]:
    """This service's part of the configuration, from `genset serve -f FILE --Service.key=value`."""
    return _config


def set_config(values: Mapping[str, Any]) -> None:
    """Called by the process that serves a service, before it builds the class."""
    global _config
    _config = dict(values)


async def serve(cls: type, runtime: Runtime, grace: float = GRACE_S, on_started: Callable[[], None] = lambda: None) -> None:
    """Builds the service and serves all its endpoints until the runtime shuts down. `genset serve` calls it, and programs may. Calls
    `on_started` after the methods of `on_start`."""
    spec = ServiceSpec.of(cls)
    if not spec.endpoints:
        raise TypeError(f"{spec.name} has no endpoint: decorate a method with @endpoint()")
    instance = cls()
    instance.__dict__[_RUNTIME] = runtime
    for name, model in spec.models.items():
        await register_llm(model.kind, endpoint_of(instance, name), model.path, model.name, **model.options)
    await _call_hooks(instance, "start")
    on_started()
    runtime.note_server()
    serving = [asyncio.ensure_future(_serve_one(instance, spec, name, runtime, grace)) for name in spec.endpoints]
    try:
        ended, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_EXCEPTION)
        for each in ended:
            each.result()
    finally:
        # If one failed, the others still run. Each is cancelled once: a second time would cut the requests that it lets end.
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await _call_hooks(instance, "shutdown")


async def _serve_one(instance: object, spec: ServiceSpec, name: str, runtime: Runtime, grace: float) -> None:
    at = runtime.namespace(spec.namespace).component(spec.name).endpoint(name)
    name_of_method = spec.endpoints[name]
    method = getattr(spec.cls, name_of_method)
    # For a model too: its requests are bodies, which fit the type or not. Extra fields of a client are no fault.
    check = checker(_request_type(method), leaves_out=at.name in runtime._models, reads_json=hasattr(method, READS_JSON))
    await runtime.serve(at._service(getattr(instance, name_of_method), MAX_REQUESTS, grace, check))


async def _call_hooks(instance: object, when: str) -> None:
    failed: list[Exception] = []
    for name, member in _members(type(instance), _HOOK):
        if member.__dict__[_HOOK] == when:
            try:
                result = getattr(instance, name)()
                if inspect.isawaitable(result):
                    await result
            except Exception as error:
                if when == "start":
                    raise
                # The others free things of their own.
                logger.warning("%s.%s failed", type(instance).__name__, name, exc_info=bool(failed))
                failed.append(error)
    if failed:
        raise failed[0]
