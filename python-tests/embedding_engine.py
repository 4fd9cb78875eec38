"""A Python engine that only embeds, for tests: an embedding counts the input's tokens by remainder."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run

DIMENSIONS = 8


class EmbeddingEngine(LLMEngine):
    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EmbeddingEngine, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model-name", required=True)
        parser.add_argument("--model-path", required=True)
        args = parser.parse_args(argv)
        return cls(args.model_name), WorkerConfig(model_name=args.model_name, model_path=args.model_path)

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.model_name, context_length=512, inputs=("embed",), canary={"embed": [[1]]})

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        embeddings = [
            [float(sum(token % DIMENSIONS == place for token in tokens)) for place in range(DIMENSIONS)]
            for tokens in request["embed"]
        ]
        yield {"embeddings": embeddings, "index": 0}
        yield {"token_ids": [], "index": 0, "finish_reason": "stop"}

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    run(EmbeddingEngine)
