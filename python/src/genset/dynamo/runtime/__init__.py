"""The names of `dynamo.runtime`."""

from __future__ import annotations

from typing import Any

from genset.dynamo import absent
from genset.dynamo.runtime import logging as logging
from genset.runtime import Client, Component, Context, Endpoint, Namespace
from genset.runtime import Runtime as DistributedRuntime
from genset.runtime import worker as dynamo_worker

__all__ = ["Client", "Component", "Context", "DistributedRuntime", "Endpoint", "Namespace", "dynamo_worker"]

_INSTEAD = {
    "dynamo_endpoint": "a method of a service has genset.dynamo.sdk.dynamo_endpoint; a handler needs no decorator",
    "EtcdKvCache": "discovery keeps endpoints alone; keep the program's own data in a store of its own",
    "Backend": "write a handler for genset.dynamo.llm.register_llm with ModelType.Backend",
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
