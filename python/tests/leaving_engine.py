"""An engine whose requests take some turns of the event loop to end. Any control operation returns the order in which things ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run


class LeavingEngine(LLMEngine):
    def __init__(self) -> None:
        self.order: list[str] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LeavingEngine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="leaving", context_length=8)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        try:
            yield {"token_ids": [1]}
            while not context.is_stopped():
                await asyncio.sleep(0.001)
            yield {"token_ids": [], "finish_reason": "cancelled"}
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.order.append("ended")

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        return {"location": " ".join(self.order)}

    async def cleanup(self) -> None:
        self.order.append("cleanup")


if __name__ == "__main__":
    run(LeavingEngine)
