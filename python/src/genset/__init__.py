"""Engines in Python for Genset: subclass `LLMEngine` or `BatchEngine`, and hand the class to `genset.backend.run`."""

from genset.batch import BatchEngine, StepOutput
from genset.engine import Context, EngineConfig, LLMEngine, WorkerConfig, WorkerHandle
from genset.types import (
    CompletionUsage,
    GenerateChunk,
    GenerateRequest,
    Load,
    Metric,
    OutputOptions,
    PredictionTokens,
    SamplingOptions,
    ScorePair,
    StopConditions,
    TokenLogprob,
    TopLogprob,
    TransferParams,
)

__all__ = [
    "BatchEngine",
    "CompletionUsage",
    "Context",
    "EngineConfig",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "Load",
    "Metric",
    "OutputOptions",
    "PredictionTokens",
    "SamplingOptions",
    "ScorePair",
    "StepOutput",
    "StopConditions",
    "TokenLogprob",
    "TopLogprob",
    "TransferParams",
    "WorkerConfig",
    "WorkerHandle",
]
__version__ = "0.1.0"
