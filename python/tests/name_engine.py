"""An engine whose model is only a name: `name_engine.py KIND` takes inputs of that kind."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run


class NameEngine(LLMEngine):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[NameEngine, WorkerConfig]:
        return cls(), WorkerConfig(model_name="only-a-name")

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="only-a-name", context_length=64, inputs=(sys.argv[1],), sampling=())

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        yield {"text": "hello", "token_count": 1, "finish_reason": "stop"}

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    run(NameEngine)
