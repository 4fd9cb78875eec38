"""The names of `dynamo.common.backend.engine`."""

from genset.engine import Context, EngineConfig, LLMEngine
from genset.types import GenerateChunk, GenerateRequest

__all__ = ["Context", "EngineConfig", "GenerateChunk", "GenerateRequest", "LLMEngine"]
