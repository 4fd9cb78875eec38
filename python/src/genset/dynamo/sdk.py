"""The names of `dynamo.sdk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from genset import sdk
from genset.dynamo import absent
from genset.sdk import IMAGE as DYNAMO_IMAGE
from genset.sdk import depends, get_runtime, service
from genset.sdk import on_shutdown as async_on_shutdown
from genset.sdk import on_start as async_on_start

__all__ = ["DYNAMO_IMAGE", "async_on_shutdown", "async_on_start", "depends", "dynamo_endpoint", "get_runtime", "service"]

Function = TypeVar("Function", bound=Callable[..., Any])


def dynamo_endpoint(name: str | None = None, *, model: str | None = None, **options: Any) -> Callable[[Function], Function]:
    """As `genset.sdk.endpoint`, but a pydantic model may also be sent as JSON text, and a model's answer does not migrate unless
    `migration_limit` is given."""
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
