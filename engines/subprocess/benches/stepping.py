"""An engine that makes a token for every running request in each step, like batching engines, at no cost of its own."""

import asyncio

from genset import EngineConfig, LLMEngine, WorkerConfig
from genset.backend import run


class SteppingEngine(LLMEngine):
    def __init__(self, tokens_a_chunk):
        self.chunk = {"token_ids": [7] * tokens_a_chunk, "index": 0}

    @classmethod
    async def from_args(cls, argv=None):
        import sys

        return cls(int(sys.argv[1])), WorkerConfig()

    async def start(self, worker_id):
        return EngineConfig(model="stepping", context_length=1 << 30, vocab_size=100)

    async def generate(self, request, context):
        chunk = self.chunk
        steps = request["stop_conditions"]["max_tokens"] // len(chunk["token_ids"])
        for _ in range(steps):
            await asyncio.sleep(0)
            yield chunk
        yield {"finish_reason": "length"}

    async def cleanup(self):
        pass


if __name__ == "__main__":
    run(SteppingEngine)
