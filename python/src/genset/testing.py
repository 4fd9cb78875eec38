"""What tests of an engine need: a context without a worker, and an answer gathered."""

from __future__ import annotations

from genset.engine import Context, LLMEngine
from genset.types import GenerateChunk, GenerateRequest

StubContext = Context
"""A context that nobody else stops: `StubContext()`, and `stop()` where the client should leave."""


async def collect(
    engine: LLMEngine,
    request: GenerateRequest,
    context: Context | None = None,
    *,
    stop_after: int | None = None,
) -> list[GenerateChunk]:
    """Every chunk of an answer. The request is stopped once `stop_after` chunks were read."""
    context = context or StubContext("test")
    chunks: list[GenerateChunk] = []
    async for chunk in engine.generate(request, context):
        chunks.append(chunk)
        if len(chunks) == stop_after:
            context.stop()
    return chunks
