"""The names of `dynamo.sdk`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from genset import sdk
from genset.dynamo import absent
from genset.sdk import IMAGE as DYNAMO_IMAGE
from genset.sdk import depends, get_runtime
from genset.sdk import on_shutdown as async_on_shutdown
from genset.sdk import on_start as async_on_start

__all__ = ["DYNAMO_IMAGE", "async_on_shutdown", "async_on_start", "depends", "dynamo_endpoint", "get_runtime", "service"]

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

_NO_PORT = "a service has no HTTP port: `genset run in=http out=dyn` has one, for methods that dynamo_endpoint(model=...) offers as models"
_REFUSED = {
    "app": _NO_PORT,
    "is_api": _NO_PORT,
    "transports": _NO_PORT,
    "traffic": "the caller limits the time of its request: client.generate(request, timeout=30)",
}
"""Arguments of Dynamo's decorators that have no place here, with what to do instead."""


def _refuse(decorator: str, arguments: Mapping[str, Any]) -> None:
    for name, instead in _REFUSED.items():
        if name in arguments:
            raise TypeError(f"@{decorator}({name}=...): {instead}")


def service(cls: None = None, /, **arguments: Any) -> Callable[[Class], Class]:
    """As `genset.sdk.service`; refuses further arguments of Dynamo's with what to do instead."""
    _refuse("service", arguments)
    return sdk.service(cls, **arguments)


def dynamo_endpoint(name: str | None = None, *, model: str | None = None, **options: Any) -> Callable[[Function], Function]:
    """As `genset.sdk.endpoint`, but a pydantic model may also be sent as JSON text, and a model's answer does not migrate unless
    `migration_limit` is given."""
    _refuse("dynamo_endpoint", options)
    if model is not None:
        options.setdefault("migration_limit", 0)
    offered = sdk.endpoint(name, model=model, **options)

    def decorate(method: Function) -> Function:
        method.__dict__[sdk.READS_JSON] = True
        return offered(method)

    return decorate


_INSTEAD = {
    "api": "run `genset run in=http out=dyn` for HTTP; a method is offered by dynamo_endpoint(model=...)",
    "dynamo_context": "use genset.runtime.get_runtime()",
    "endpoint": "use dynamo_endpoint",
    "dynamo_api": "run `genset run in=http out=dyn` for HTTP; a method is offered by dynamo_endpoint(model=...)",
    "ServiceConfig": "use genset.sdk.config()",
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
