"""A CTranslate2 language model that answers Genset's requests, with one thread per running request. `ctranslate2_engine.py` and
`ctranslate2_handler.py` serve it."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ctranslate2

from genset import Context, GenerateChunk, GenerateRequest, SamplingOptions
from genset.exceptions import EngineShutdown, InvalidArgument
from genset.metrics import Metrics
from genset.types import Load, Metric

OPTIONS = ("temperature", "top_p", "top_k", "repetition_penalty")
"""The sampling options that it honours."""
STEP_BOUNDS_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5]
PUBLISH_EVERY_S = 1.0


class Decoding:
    """One request on its thread. Steps pass tokens to the event loop, and end when no more are wanted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self.is_over = threading.Event()
        self._loop = loop

    def wake(self, _done: object = None) -> None:
        """Wakes the reader for news other than a token."""
        self.tokens.put_nowait(None)

    def step(self, result: Any) -> bool:
        """Takes a token on CTranslate2's thread. Returns whether to stop."""
        if not self.is_over.is_set():
            self._loop.call_soon_threadsafe(self.tokens.put_nowait, result.token_id)
        return self.is_over.is_set()


class Model:
    """Answers `parallel` requests at a time; others wait in order. The constructor loads the weights, which takes a while."""

    def __init__(self, folder: str, context_length: int, parallel: int, device: str) -> None:
        path = Path(folder)
        if not ctranslate2.contains_model(folder):
            raise InvalidArgument(f"{path} holds no CTranslate2 model; convert one first", field="model")
        self.name = path.name
        self.context_length = context_length
        self.parallel = parallel
        self._vocabulary: list[str] = json.loads((path / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(folder, device=device, inter_threads=parallel, intra_threads=1)
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="ctranslate2")
        self._running: set[Decoding] = set()
        self._metrics = Metrics()
        self._tokens = self._metrics.counter("ctranslate2_tokens_total", "Tokens generated")
        self._step_s = self._metrics.histogram("ctranslate2_step_seconds", "Time between two tokens", STEP_BOUNDS_S)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        loop = asyncio.get_running_loop()
        stop = request.get("stop_conditions", {})
        prompt = request["token_ids"]
        room = self.context_length - len(prompt)
        max_tokens = min(stop.get("max_tokens") or room, room)
        ends = set(stop.get("stop_token_ids", []))
        if not stop.get("ignore_eos", False):
            ends |= set(stop.get("eos_token_ids", []))
        decoding = Decoding(loop)
        self._running.add(decoding)
        options = sampling(request.get("sampling_options", {}), self.vocab_size)
        job = loop.run_in_executor(self._pool, self._decode, prompt, max_tokens, options, decoding)
        job.add_done_callback(decoding.wake)
        stopped = asyncio.ensure_future(context.stopped())
        stopped.add_done_callback(decoding.wake)
        generated = 0
        try:
            while True:
                token = await decoding.tokens.get()
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                if token is None:
                    # The thread ended before its last token: it raised, or `close` ended it.
                    await job
                    raise EngineShutdown("the engine stopped while it generated")
                if token in ends and generated >= stop.get("min_tokens", 0):
                    yield {"token_ids": [], "index": 0, "finish_reason": "stop", "stop_token": token}
                    return
                generated += 1
                chunk: GenerateChunk = {"token_ids": [token], "index": 0}
                if generated == max_tokens:
                    chunk["finish_reason"] = "length"
                    yield chunk
                    return
                yield chunk
        finally:
            # However it ends, even by cancellation at an `await`: no further step is made.
            decoding.is_over.set()
            self._running.discard(decoding)
            job.cancel()
            stopped.cancel()

    def _decode(self, prompt: list[int], max_tokens: int, options: dict[str, Any], decoding: Decoding) -> None:
        """Runs on a thread of the pool, without the GIL except in `step`."""
        last = time.perf_counter()
        # `step` must not hold `self`: CTranslate2's thread may be the last to drop it, and a generator that ends there joins itself.
        tokens, step_s = self._tokens, self._step_s

        def step(result: Any) -> bool:
            nonlocal last
            now = time.perf_counter()
            tokens.add()
            step_s.observe(now - last)
            last = now
            return decoding.step(result)

        self._generator.generate_batch(
            [[self._vocabulary[token] for token in prompt]],
            max_length=max_tokens,
            # The caller checks the request's end tokens, which do not count before `min_tokens`.
            end_token=[],
            include_prompt_in_result=False,
            callback=step,
            **options,
        )

    async def publish(self, load: Callable[[Load], None], metrics: Callable[[list[Metric]], None]) -> None:
        """Publishes load and metrics until it is cancelled."""
        while True:
            running = len(self._running)
            waiting = max(0, running - self.parallel)
            load({"running_requests": running - waiting, "waiting_requests": waiting})
            metrics(self._metrics.samples())
            await asyncio.sleep(PUBLISH_EVERY_S)

    async def close(self) -> None:
        """Ends the running requests, each after its current step."""
        for decoding in self._running:
            decoding.is_over.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


def sampling(asked: SamplingOptions, vocab_size: int) -> dict[str, Any]:
    """CTranslate2's options; greedy if no temperature is given."""
    options: dict[str, Any] = {"repetition_penalty": asked.get("repetition_penalty") or 1.0}
    temperature = asked.get("temperature") or 0.0
    if temperature > 0.0:
        options["sampling_temperature"] = temperature
        top_k = asked.get("top_k") or 0
        # CTranslate2 looks for as many candidates as it is told, even if the vocabulary has fewer; 0 is all.
        options["sampling_topk"] = top_k if top_k < vocab_size else 0
        options["sampling_topp"] = asked.get("top_p") or 1.0
    return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of both programs."""
    parser.add_argument("--model", required=True, help="folder of the converted model")
    parser.add_argument("--model-name", default="ctranslate2", help="what clients call the model")
    parser.add_argument("--namespace", default="genset")
    parser.add_argument("--context-length", type=int, default=2048, help="tokens of prompt and answer together")
    parser.add_argument("--parallel", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
