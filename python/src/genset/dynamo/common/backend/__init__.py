"""The names of `dynamo.common.backend`."""

from __future__ import annotations

from typing import Any

from genset.backend.worker import Worker
from genset.dynamo import absent
from genset.engine import Context, EngineConfig, LLMEngine, WorkerConfig
from genset.types import GenerateChunk, GenerateRequest

__all__ = ["Context", "EngineConfig", "GenerateChunk", "GenerateRequest", "LLMEngine", "Worker", "WorkerConfig"]

_INSTEAD = {
    "DisaggregationMode": "write WorkerConfig(role=...): aggregated, prefill or decode",
    "KvEventSource": "declare EngineConfig(kv_events=True), and publish with self.worker.publish_kv_stored and publish_kv_removed",
    "LlmRegistration": "its fields are those of EngineConfig itself",
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _INSTEAD, submodules=("engine", "run", "sample_main", "worker"))
