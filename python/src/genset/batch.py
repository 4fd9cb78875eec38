"""For engines that compute a step for all their requests at once: a subclass of `BatchEngine` in place of `LLMEngine`."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, TypeVar, Union

from genset.engine import Context, LLMEngine
from genset.exceptions import EngineError, Internal
from genset.types import GenerateChunk, GenerateRequest

S = TypeVar("S")

StepOutput = Union[int, GenerateChunk, EngineError, None]
"""What a step made for one sequence: a token, a chunk, an error that ends it, or nothing."""


class BatchEngine(LLMEngine, Generic[S]):
    """An engine whose `step` makes the next tokens of many requests together. `S` is what it keeps of one request.

    The package calls `begin`, `step` and `end` from one thread of its own, one after the other, so they may compute as long as
    they like: pings and new requests are answered meanwhile. `from_args`, `start`, `drain`, `control` and `cleanup` run on the
    event loop, as in `LLMEngine`; `cleanup` comes when the last step has ended.
    """

    @abc.abstractmethod
    def begin(self, request: GenerateRequest, context: Context) -> S:
        """Takes a request in. What is raised is the request's error, and `end` is not called for it."""

    @abc.abstractmethod
    def step(self, batch: list[S]) -> Sequence[StepOutput]:
        """Computes a step for `batch`, the sequences whose tokens somebody has room for; never empty, oldest first.

        Returns an entry for each, in order: the token, if there is just that to say; else a chunk, and one with
        `finish_reason` is the sequence's last; an `EngineError` that ends it; None where the step made nothing for it, because
        it waits or its prompt is still being read. What is raised ends all of `batch`, and no other sequence. A step that makes
        nothing for anybody in less than a millisecond is followed by a pause of one. Each other is reported
        (`WorkerHandle.report_step`), so a prompt may take as many as it needs; one that takes minutes reports in between, by itself.
        """

    def end(self, sequence: S) -> None:  # noqa: B027
        """The sequence is over, for whatever reason: its end, an error, a client that left. Free what it holds."""

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Answers one request by itself, for tests. What a worker asks goes through shared steps instead."""
        sequence = self.begin(request, context)
        try:
            while not context.is_stopped():
                (output,) = self.step([sequence])
                chunk = as_chunk(output)
                if chunk is not None:
                    yield chunk
                    if chunk.get("finish_reason") is not None:
                        return
                await asyncio.sleep(0)
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        finally:
            self.end(sequence)


def as_chunk(output: StepOutput) -> GenerateChunk | None:
    """The chunk of what a step made; None for nothing."""
    if isinstance(output, EngineError):
        raise output
    if isinstance(output, int):
        return {"token_ids": [output], "index": 0}
    if output is None or isinstance(output, dict):
        return output
    raise Internal(f"step made a {type(output).__name__}, where a token, a chunk, an EngineError or None is due")
