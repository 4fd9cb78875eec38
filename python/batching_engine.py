"""The engine to copy if one step computes the next token of many requests: continuous batching, with rotating token ids.

    python batching_engine.py --model-path models/tiny-chat
"""

from __future__ import annotations

import argparse
import time

from genset import BatchEngine, Context, EngineConfig, GenerateChunk, GenerateRequest, StepOutput, WorkerConfig
from genset.backend import run
from genset.exceptions import EngineShutdown

CONTEXT_LENGTH = 32_768
VOCAB_SIZE = 2048


class Sequence:
    """A request that has a place in the batch, or waits for one."""

    def __init__(self, request: GenerateRequest) -> None:
        prompt, stop = request["token_ids"], request.get("stop_conditions", {})
        self.ends = set(stop.get("stop_token_ids", []))
        if not stop.get("ignore_eos", False):
            self.ends |= set(stop.get("eos_token_ids", []))
        room = CONTEXT_LENGTH - len(prompt)
        self.max_tokens = min(stop.get("max_tokens") or room, room)
        self.min_tokens = stop.get("min_tokens", 0)
        self.generated = 0
        self.token = prompt[-1]

    def take(self, token: int) -> StepOutput:
        """Takes the chosen token, and returns the step's output."""
        if token in self.ends and self.generated >= self.min_tokens:
            return GenerateChunk(finish_reason="stop", stop_token=token)
        self.token = token
        self.generated += 1
        if self.generated == self.max_tokens:
            return GenerateChunk(token_ids=[token], finish_reason="length")
        return token


class BatchingEngine(BatchEngine[Sequence]):
    """Runs up to `max_num_seqs` sequences at once; the others wait for a place."""

    def __init__(self, model_name: str = "batching", max_num_seqs: int = 64, step_s: float = 0.0) -> None:
        self.model_name = model_name
        self.max_num_seqs = max_num_seqs
        self.step_s = step_s
        self._running: set[Sequence] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BatchingEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(prog="batching_engine.py", description="Answers with rotating token ids")
        parser.add_argument("--model-path", help="folder with the tokenizer")
        parser.add_argument("--model-name", default="batching", help="what clients call the model")
        parser.add_argument("--namespace", default="genset")
        parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences in a step")
        parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step")
        args = parser.parse_args(argv)
        config = WorkerConfig(namespace=args.namespace, model_name=args.model_name, model_path=args.model_path)
        return cls(args.model_name, args.max_num_seqs, args.step_ms / 1000), config

    async def start(self, worker_id: int) -> EngineConfig:
        self._running = set()
        return EngineConfig(
            model=self.model_name,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=self.max_num_seqs,
            # There is one next token at any temperature, so these options hold trivially.
            sampling=("temperature", "top_p", "top_k", "min_p", "seed"),
            resume=True,
        )

    def begin(self, request: GenerateRequest, context: Context) -> Sequence:
        if self._running is None:
            raise EngineShutdown("the engine does not run")
        return Sequence(request)

    def step(self, batch: list[Sequence]) -> list[StepOutput]:
        if self._running is None:
            raise EngineShutdown("the engine does not run")
        # A sequence keeps its place even while its reader has no room and it is in no batch.
        waiting = (sequence for sequence in batch if sequence not in self._running)
        for sequence in waiting:
            if len(self._running) == self.max_num_seqs:
                break
            self._running.add(sequence)
        inputs = [sequence.token for sequence in batch if sequence in self._running]
        tokens = iter(self._forward(inputs))
        return [sequence.take(next(tokens)) if sequence in self._running else None for sequence in batch]

    def _forward(self, inputs: list[int]) -> list[int]:
        """The model. Returns the next token of each sequence."""
        time.sleep(self.step_s)
        return [(token + 1) % VOCAB_SIZE for token in inputs]

    def end(self, sequence: Sequence) -> None:
        if self._running is not None:
            self._running.discard(sequence)

    async def cleanup(self) -> None:
        self._running = None


def main() -> None:
    run(BatchingEngine)


if __name__ == "__main__":
    main()
