"""For engines that compute one step for all requests at once: subclass `BatchEngine` instead of `LLMEngine`."""

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
"""A step's result for one sequence: a token, a chunk, an error that ends it, or nothing."""


class BatchEngine(LLMEngine, Generic[S]):
    """An engine whose `step` computes the next tokens of many requests together. `S` is its state of one request.

    The package calls `begin`, `step` and `end` one after the other from a dedicated thread, so they may compute as long as
    they like: pings and new requests are answered meanwhile. `from_args`, `start`, `drain`, `control` and `cleanup` run on the
    event loop, as in `LLMEngine`; `cleanup` runs after the last step has ended.
    """

    @abc.abstractmethod
    def begin(self, request: GenerateRequest, context: Context) -> S:
        """Accepts a request. An exception is the request's error, and `end` is not called for it."""

    @abc.abstractmethod
    def step(self, batch: list[S]) -> Sequence[StepOutput]:
        """Computes a step for `batch`: the sequences whose readers have room for tokens; never empty, oldest first.

        Returns one entry for each, in order: the token, if there is nothing else to say; else a chunk, and one with
        `finish_reason` is the sequence's last; an `EngineError`, which ends the sequence; or None if the step made nothing for it, because
        it waits or its prompt is still being read. An exception ends all of `batch`, and no other sequence. A step that makes
        nothing for any sequence in less than a millisecond is followed by a pause of one. Every other step is reported
        (`WorkerHandle.report_step`), so a prompt may take as many steps as it needs. A step that takes minutes must report by itself.
        """

    def end(self, sequence: S) -> None:  # noqa: B027
        """The sequence has ended, for whatever reason: its end, an error, a client that left. Frees what it holds."""

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Answers one request alone, for tests. Requests from a worker go through shared steps instead."""
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
    """The chunk of a step's result; None for nothing."""
    if isinstance(output, EngineError):
        raise output
    if isinstance(output, int):
        return {"token_ids": [output], "index": 0}
    if output is None or isinstance(output, dict):
        return output
    raise Internal(f"step made a {type(output).__name__}, where a token, a chunk, an EngineError or None is due")
