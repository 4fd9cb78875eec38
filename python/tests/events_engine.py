"""An engine that publishes the events that a control operation names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run


class EventsEngine(LLMEngine):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EventsEngine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="events", context_length=8, kv_events=True)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        yield {"token_ids": [1], "finish_reason": "length"}

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        if op == "store":
            blocks = [1, 2]
            self.worker.publish_kv_stored(blocks)
            blocks.clear()
        else:
            self.worker.report_dead("the device is lost")
            for used in range(arguments["loads"]):
                self.worker.publish_load({"kv_used_blocks": used})
        return None

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    run(EventsEngine)
