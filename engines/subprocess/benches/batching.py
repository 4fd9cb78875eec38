"""Like stepping.py, with steps that the package calls: one token, or a chunk of several, for each running request."""

import sys

from genset import BatchEngine, EngineConfig, WorkerConfig
from genset.backend import run


class Sequence:
    def __init__(self, steps):
        self.left = steps


class BatchingEngine(BatchEngine):
    def __init__(self, tokens_a_chunk):
        self.tokens_a_chunk = tokens_a_chunk
        self.output = 7 if tokens_a_chunk == 1 else {"token_ids": [7] * tokens_a_chunk}

    @classmethod
    async def from_args(cls, argv=None):
        return cls(int(sys.argv[1])), WorkerConfig()

    async def start(self, worker_id):
        return EngineConfig(model="stepping", context_length=1 << 30, vocab_size=100)

    def begin(self, request, context):
        return Sequence(request["stop_conditions"]["max_tokens"] // self.tokens_a_chunk)

    def step(self, batch):
        return [self.next(sequence) for sequence in batch]

    def next(self, sequence):
        if sequence.left == 0:
            return {"finish_reason": "length"}
        sequence.left -= 1
        return self.output

    async def cleanup(self):
        pass


if __name__ == "__main__":
    run(BatchingEngine)
