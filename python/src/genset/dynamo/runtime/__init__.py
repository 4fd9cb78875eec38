"""The names of `dynamo.runtime`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, overload

from genset.dynamo import absent
from genset.dynamo.runtime import logging as logging
from genset.runtime import Client, Component, Context, Endpoint, Main, Namespace, Result
from genset.runtime import Runtime as DistributedRuntime
from genset.runtime import worker

__all__ = ["Client", "Component", "Context", "DistributedRuntime", "Endpoint", "Namespace", "dynamo_worker"]

_INSTEAD = {
    "dynamo_endpoint": "a method of a service has genset.dynamo.sdk.dynamo_endpoint; a handler needs no decorator",
    "EtcdKvCache": "discovery keeps endpoints alone; keep the program's own data in a store of its own",
    "Backend": "write a handler for genset.dynamo.llm.register_llm with ModelType.Backend",
}


@overload
def dynamo_worker(static: Main[Result]) -> Callable[..., Coroutine[Any, Any, Result | None]]: ...


@overload
def dynamo_worker(
    static: bool = False, *, enable_nats: bool = True, **options: Any
) -> Callable[[Main[Result]], Callable[..., Coroutine[Any, Any, Result | None]]]: ...


def dynamo_worker(static: bool | Main[Any] = False, *, enable_nats: bool = True, **options: Any) -> Any:
    """As `genset.runtime.worker`. `enable_nats` has no effect: events travel over the request plane, and only that may need NATS."""
    return worker(static, **options) if isinstance(static, bool) else worker(static)


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
