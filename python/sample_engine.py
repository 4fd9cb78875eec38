"""The engine to copy: answers every prompt with rotating token ids.

    python sample_engine.py --model-path models/tiny-chat
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run
from genset.exceptions import EngineShutdown, InvalidArgument

CONTEXT_LENGTH = 32_768


class SampleEngine(LLMEngine):
    """Building one is cheap; expensive work belongs in `start`."""

    def __init__(self, model_name: str = "sample", vocab_size: int = 2048, token_delay: float = 0.0) -> None:
        self.model_name = model_name
        self.vocab_size = vocab_size
        self.token_delay = token_delay
        self._is_running = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[SampleEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(prog="sample_engine.py", description="Answers with rotating token ids")
        parser.add_argument("--model-path", help="folder with the tokenizer, GGUF file, or name of the Hub; needed unless `genset run MODEL` starts this")
        parser.add_argument("--model-name", default="sample", help="what clients call the model")
        parser.add_argument("--namespace", default="genset")
        parser.add_argument("--vocab-size", type=int, default=2048, help="token ids are below this")
        parser.add_argument("--token-delay-ms", type=float, default=0.0, help="pause before each token")
        args = parser.parse_args(argv)
        engine = cls(args.model_name, args.vocab_size, args.token_delay_ms / 1000)
        config = WorkerConfig(namespace=args.namespace, model_name=args.model_name, model_path=args.model_path)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        if self.vocab_size < 1:
            raise InvalidArgument("vocab_size: must be at least 1", field="vocab_size")
        self.worker.report_progress("building the model")
        self._is_running = True
        return EngineConfig(
            model=self.model_name,
            context_length=CONTEXT_LENGTH,
            vocab_size=self.vocab_size,
            # There is one next token at any temperature, so these options hold trivially.
            sampling=("temperature", "top_p", "top_k", "min_p", "seed"),
            resume=True,
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if not self._is_running:
            raise EngineShutdown("the engine does not run")
        prompt = request["token_ids"]
        stop = request.get("stop_conditions", {})
        ends = set(stop.get("stop_token_ids", []))
        if not stop.get("ignore_eos", False):
            ends |= set(stop.get("eos_token_ids", []))
        room = CONTEXT_LENGTH - len(prompt)
        max_tokens = min(stop.get("max_tokens") or room, room)
        token = prompt[-1]
        for generated in range(max_tokens):
            await asyncio.sleep(self.token_delay)
            if context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            token = (token + 1) % self.vocab_size
            if token in ends and generated >= stop.get("min_tokens", 0):
                yield {"token_ids": [], "index": 0, "finish_reason": "stop", "stop_token": token}
                return
            chunk: GenerateChunk = {"token_ids": [token], "index": 0}
            if generated == max_tokens - 1:
                chunk["finish_reason"] = "length"
            yield chunk

    async def cleanup(self) -> None:
        self._is_running = False


def main() -> None:
    run(SampleEngine)


if __name__ == "__main__":
    main()
