"""Engines in Python for Genset: subclass `LLMEngine`, and hand the class to `genset.backend.run`."""

from genset.engine import Context, EngineConfig, LLMEngine, WorkerConfig, WorkerHandle
from genset.types import (
    CompletionUsage,
    GenerateChunk,
    GenerateRequest,
    Load,
    Metric,
    OutputOptions,
    SamplingOptions,
    StopConditions,
    TokenLogprob,
    TopLogprob,
    TransferParams,
)

__all__ = [
    "CompletionUsage",
    "Context",
    "EngineConfig",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "Load",
    "Metric",
    "OutputOptions",
    "SamplingOptions",
    "StopConditions",
    "TokenLogprob",
    "TopLogprob",
    "TransferParams",
    "WorkerConfig",
    "WorkerHandle",
]
__version__ = "0.1.0"
