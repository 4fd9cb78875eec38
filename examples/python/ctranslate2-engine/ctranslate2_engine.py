"""CTranslate2 behind Genset: a converted language model on CPU or GPU, as an engine in its own process.

    python make_model.py /tmp/model 2048       # or ct2-transformers-converter, for a real one
    python ctranslate2_engine.py --model /tmp/model --tokenizer ../../../models/tiny-chat
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator

from ctranslate2_model import OPTIONS, Model, add_arguments
from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import run
from genset.exceptions import EngineShutdown


class CTranslate2Engine(LLMEngine):
    """Serves one model, `parallel` requests at a time."""

    def __init__(self, model: str, context_length: int, parallel: int, device: str) -> None:
        self.folder = model
        self.context_length = context_length
        self.parallel = parallel
        self.device = device
        self._model: Model | None = None
        self._publisher: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[CTranslate2Engine, WorkerConfig]:
        parser = argparse.ArgumentParser(prog="ctranslate2_engine.py", description="Serves a CTranslate2 model")
        add_arguments(parser)
        parser.add_argument("--tokenizer", help="folder with tokenizer.json; needed unless `genset run MODEL` starts this")
        args = parser.parse_args(argv)
        engine = cls(args.model, args.context_length, args.parallel, args.device)
        config = WorkerConfig(namespace=args.namespace, model_name=args.model_name, model_path=args.tokenizer)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker.report_progress("loading weights")
        model = await asyncio.to_thread(Model, self.folder, self.context_length, self.parallel, self.device)
        self._model = model
        self._publisher = asyncio.create_task(model.publish(self.worker.publish_load, self.worker.publish_metrics))
        return EngineConfig(
            model=model.name,
            context_length=self.context_length,
            vocab_size=model.vocab_size,
            max_num_seqs=self.parallel,
            sampling=OPTIONS,
        )

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if self._model is None:
            raise EngineShutdown("the engine does not run")
        return self._model.generate(request, context)

    async def cleanup(self) -> None:
        if self._publisher is not None:
            self._publisher.cancel()
            self._publisher = None
        if self._model is not None:
            await self._model.close()
            self._model = None


def main() -> None:
    run(CTranslate2Engine)


if __name__ == "__main__":
    main()
