"""An engine that does what the model's name asks for, usually something wrong."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run


class Stray(BaseException):
    """An exception that is not an `Exception`."""


class Untold(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("it is not known")


class Single:
    """An async iterator that is not a generator."""

    def __init__(self) -> None:
        self._chunks: list[GenerateChunk] = [{"token_ids": [7], "finish_reason": "stop"}]

    def __aiter__(self) -> Single:
        return self

    async def __anext__(self) -> GenerateChunk:
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.pop()


class SlipsEngine(LLMEngine):
    cleanups = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[SlipsEngine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        if sys.argv[1:] in (["exit"], ["exit-again"]):
            raise SystemExit("there is no device")
        if sys.argv[1:] == ["left"]:
            raise GeneratorExit
        if sys.argv[1:] == ["cancelled"]:
            raise asyncio.CancelledError
        return EngineConfig(model="slips", context_length=8)

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        return {"location": f"{self.cleanups} cleanups"}

    def generate(self, request: GenerateRequest, context: Context) -> Any:
        if request["model"] == "iterator":
            return Single()
        return [] if request["model"] == "list" else self.answer(request)

    async def answer(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        what = request["model"]
        if what == "exit":
            raise SystemExit(3)
        if what == "left":
            raise GeneratorExit
        if what == "stray":
            raise Stray("from afar")
        if what == "untold":
            raise Untold
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "number":
            yield 5
        if what == "cancelled":
            awaited = asyncio.get_running_loop().create_future()
            awaited.cancel()
            await awaited
        if what.startswith("large "):
            yield {"text": "x" * int(what.removeprefix("large ")), "token_count": 1}
        if what == "blocks":
            yield {"token_ids": [1]}
            signal.sigwait({signal.SIGUSR1})
        yield {"token_ids": [1], "finish_reason": "length"}

    async def cleanup(self) -> None:
        self.cleanups += 1
        if sys.argv[1:] == ["exit-again"]:
            raise SystemExit(4)


if __name__ == "__main__":
    # In all threads: `generate` waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    run(SlipsEngine)
