"""Tools for an engine's tests: a context without a worker, a collected answer, and the conformance kit with one test per check.

In a test module, this makes one test per check of the kit; `pytest -k CN03` runs one of them:

    from genset.testing import conformance_tests
    test_conformance = conformance_tests("python my_engine.py")
"""

from __future__ import annotations

from collections.abc import Mapping

from genset.engine import Context, LLMEngine
from genset.testing._kit import ConformanceRun, conformance_tests
from genset.types import GenerateChunk, GenerateRequest

__all__ = ["ConformanceRun", "StubContext", "collect", "conformance_tests"]


class StubContext(Context):
    """A context that only the test stops: call `stop()` where the client should leave."""

    def __init__(
        self,
        request_id: str = "test",
        *,
        stopped: bool = False,
        headers: Mapping[str, str] | None = None,
        traceparent: str = "",
        tracestate: str = "",
        deadline_ms: int | None = None,
    ) -> None:
        super().__init__(
            request_id, headers=headers, traceparent=traceparent, tracestate=tracestate, deadline_ms=deadline_ms
        )
        if stopped:
            self.stop()


async def collect(
    engine: LLMEngine,
    request: GenerateRequest,
    context: Context | None = None,
    *,
    stop_after: int | None = None,
) -> list[GenerateChunk]:
    """Returns all chunks of an answer. Stops the request after `stop_after` chunks."""
    context = context or StubContext()
    chunks: list[GenerateChunk] = []
    async for chunk in engine.generate(request, context):
        chunks.append(chunk)
        if len(chunks) == stop_after:
            context.stop()
    return chunks
