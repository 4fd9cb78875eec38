"""The names of `dynamo.common.backend`."""

from genset.backend.worker import Worker
from genset.engine import Context, EngineConfig, LLMEngine, WorkerConfig
from genset.types import GenerateChunk, GenerateRequest

__all__ = ["Context", "EngineConfig", "GenerateChunk", "GenerateRequest", "LLMEngine", "Worker", "WorkerConfig"]
