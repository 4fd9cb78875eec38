"""The names of `dynamo.llm`."""

from __future__ import annotations

from typing import Any

from genset import llm
from genset.dynamo import absent
from genset.dynamo.llm import exceptions as exceptions
from genset.exceptions import InvalidArgument
from genset.llm import ModelType
from genset.runtime import Endpoint

__all__ = ["KvEventPublisher", "KvMetricsPublisher", "ModelType", "WorkerMetricsPublisher", "register_llm", "register_model"]

_INSTEAD = {
    "HttpService": "run `genset run in=http out=dyn`, or `python -m genset.frontend`",
    "HttpError": "raise an exception of genset.dynamo.llm.exceptions: InvalidArgument is a 400, NotFound a 404",
    "KvMetricsAggregator": "`genset top` shows the load of a fleet's workers; routers follow it by themselves",
    "DisaggregatedRouter": "run `genset run --role prefill` and `decode`, or register_llm(role=...): frontends route between both",
    "HttpAsyncEngine": "register a handler with ModelType.Chat; `genset run in=http out=dyn` serves it",
    "ModelInput": "register_llm takes ModelType.Backend for a handler of tokens, and ModelType.Chat or ModelType.Completion for one of bodies",
    "ModelRuntimeConfig": "register_llm takes its values as arguments: total_kv_blocks, max_num_seqs, tool_parser, reasoning_parser",
    "KvIndexer": "routers index by themselves: `genset run in=http out=dyn --router-mode kv`",
    "KvRouter": "routers route by themselves: `genset run in=http out=dyn --router-mode kv`",
    "ZmqKvEventPublisher": "publish with KvEventPublisher; for a vLLM or SGLang that `genset run` starts, the worker does",
    "unregister_llm": "a model leaves when its serve_endpoint ends: cancel that task, or shut the runtime down",
}


class KvEventPublisher(llm.KvEventPublisher):
    """`genset.llm.KvEventPublisher`, which refuses Dynamo's arguments with an explanation."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        instead = "KvEventPublisher(endpoint) takes a model's endpoint, and its methods hashes of blocks (genset.kv.hash_blocks) in place of tokens"
        super().__init__(_endpoint(arguments, named, instead))


class WorkerMetricsPublisher(llm.LoadPublisher):
    """`genset.llm.LoadPublisher`, which refuses Dynamo's arguments with an explanation."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        instead = "WorkerMetricsPublisher(endpoint) takes a model's endpoint, its publish a dictionary of counts, and there is no create_endpoint"
        super().__init__(_endpoint(arguments, named, instead))


KvMetricsPublisher = WorkerMetricsPublisher
"""Its name in Dynamo's older documents."""


def _endpoint(arguments: tuple[Any, ...], named: dict[str, Any], instead: str) -> Endpoint:
    """The only argument of a publisher."""
    given: list[Any] = [*arguments, *named.items()]
    match given:
        case [Endpoint() as endpoint] | [("endpoint", Endpoint() as endpoint)]:
            return endpoint
    raise InvalidArgument(instead, field="endpoint")


async def register_llm(
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = 16,
    migration_limit: int = 0,
    user_data: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """As `genset.llm.register_llm`, but an answer does not migrate unless `migration_limit` is given."""
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


register_model = register_llm
"""The name in Dynamo's newer documents."""


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD)
