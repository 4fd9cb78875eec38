"""The names of `dynamo.sdk`."""

from __future__ import annotations

from typing import Any

from genset.dynamo import absent
from genset.sdk import IMAGE as DYNAMO_IMAGE
from genset.sdk import depends, get_runtime, service
from genset.sdk import endpoint as dynamo_endpoint
from genset.sdk import on_shutdown as async_on_shutdown
from genset.sdk import on_start as async_on_start

__all__ = ["DYNAMO_IMAGE", "async_on_shutdown", "async_on_start", "depends", "dynamo_endpoint", "get_runtime", "service"]

_INSTEAD = {
    "api": "run `genset run in=http out=dyn` for HTTP; a model is offered by genset.dynamo.llm.register_llm",
    "dynamo_context": "use genset.runtime.get_runtime()",
    "endpoint": "use dynamo_endpoint",
    "dynamo_api": "run `genset run in=http out=dyn` for HTTP",
    "ServiceConfig": "use genset.sdk.config()",
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
