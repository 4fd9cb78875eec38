"""The names of `dynamo._core` that programs import."""

from __future__ import annotations

from typing import Any

from genset.dynamo import absent
from genset.dynamo.runtime import Client, Component, Context, DistributedRuntime, Endpoint, Namespace

__all__ = ["Client", "Component", "Context", "DistributedRuntime", "Endpoint", "Namespace"]

_INSTEAD = {
    name: "import it from genset.dynamo.llm"
    for name in ("KvEventPublisher", "ModelType", "WorkerMetricsPublisher", "register_llm", "register_model")
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
