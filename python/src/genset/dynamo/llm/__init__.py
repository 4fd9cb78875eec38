"""The names of `dynamo.llm`."""

from __future__ import annotations

from typing import Any

from genset import llm
from genset.dynamo import absent
from genset.dynamo.llm import exceptions as exceptions
from genset.llm import ModelType
from genset.runtime import Endpoint

__all__ = ["ModelType", "register_llm"]

_LOAD = "use genset.llm.LoadPublisher(endpoint), whose publish takes a dictionary of counts; it needs no create_endpoint"
_INSTEAD = {
    "HttpService": "run `genset run in=http out=dyn`, or `python -m genset.frontend`",
    "HttpAsyncEngine": "register a handler with ModelType.Chat; `genset run in=http out=dyn` serves it",
    "KvEventPublisher": "use genset.llm.KvEventPublisher(endpoint), which takes hashes of blocks and no tokens",
    "KvIndexer": "routers index by themselves: `genset run in=http out=dyn --router-mode kv`",
    "KvMetricsPublisher": _LOAD,
    "KvRouter": "routers route by themselves: `genset run in=http out=dyn --router-mode kv`",
    "WorkerMetricsPublisher": _LOAD,
    "register_model": "use register_llm",
}


async def register_llm(
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int = 16,
    migration_limit: int = 0,
    user_data: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """As `genset.llm.register_llm`; an answer does not move to another instance unless `migration_limit` says so."""
    await llm.register_llm(
        model_type,
        endpoint,
        model_path,
        model_name,
        context_length,
        kv_cache_block_size,
        migration_limit,
        user_data,
        **options,
    )


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
