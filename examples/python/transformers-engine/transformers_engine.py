"""Hugging Face transformers behind Genset: a causal language model of any family that the library supports.

    python transformers_engine.py --model ../../../models/tiny-chat
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

# Read when torch is loaded. It makes threads sleep while they wait for each other. By default they spin, and on a busy machine
# each then takes a core from the thread that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from genset import BatchEngine, Context, EngineConfig, GenerateChunk, GenerateRequest, SamplingOptions, StepOutput, WorkerConfig
from genset.backend import run
from genset.exceptions import EngineShutdown, InvalidArgument

CHUNK_TOKENS = 256
"""Prompt tokens per forward pass. A cancelled or new request waits for at most one such pass."""


class Sequence:
    """One request: its tokens, their keys and values, and its sampler."""

    def __init__(self, request: GenerateRequest, cache: DynamicCache, context_length: int, device: str) -> None:
        prompt = request["token_ids"]
        stop = request.get("stop_conditions", {})
        room = context_length - len(prompt)
        self.pending = prompt
        """Tokens that the model has not read yet."""
        self.cache = cache
        self.tokens_left = min(stop.get("max_tokens") or room, room)
        self.generated = 0
        self.min_tokens = stop.get("min_tokens", 0)
        self.ends = set(stop.get("stop_token_ids", []))
        if not stop.get("ignore_eos", False):
            self.ends |= set(stop.get("eos_token_ids", []))
        self.options: SamplingOptions = request.get("sampling_options", {})
        self.random = torch.Generator(device)
        seed = self.options.get("seed")
        if seed is None:
            self.random.seed()
        else:
            # Any integer is accepted; the generator needs an unsigned 64-bit one.
            self.random.manual_seed(seed % (1 << 63))


class TransformersEngine(BatchEngine[Sequence]):
    """Serves one model. In a step each sequence has its own forward pass, so requests do not affect each other's answers. At most
    `max_num_seqs` sequences hold keys and values at a time; the others wait for a place."""

    def __init__(
        self,
        model: str,
        context_length: int | None = None,
        max_num_seqs: int = 8,
        device: str = "cpu",
        dtype: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.path = model
        self.context_length = context_length
        self.max_num_seqs = max_num_seqs
        self.device = device
        # Few CPUs compute as fast with 16 bits.
        self.dtype = dtype or ("float32" if device == "cpu" else "auto")
        # Leaves cores for the event loop and the worker.
        self.threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._model: Any = None
        self._vocab_size = 0
        self._running: set[Sequence] = set()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[TransformersEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(prog="transformers_engine.py", description="Serves a model with transformers")
        parser.add_argument("--model", required=True, help="folder of the model, or its name in the Hugging Face Hub")
        parser.add_argument("--model-name", help="what clients call the model")
        parser.add_argument("--namespace", default="genset")
        parser.add_argument("--context-length", type=int, help="tokens of prompt and answer together; the model's without it")
        parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that run at a time")
        parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
        parser.add_argument("--dtype", help="float32, bfloat16; without it float32 on a CPU, elsewhere that of the files")
        parser.add_argument("--threads", type=int, help="that compute on a CPU; without it half as many as it has")
        args = parser.parse_args(argv)
        engine = cls(args.model, args.context_length, args.max_num_seqs, args.device, args.dtype, args.threads)
        config = WorkerConfig(namespace=args.namespace, model_name=args.model_name or "", model_path=args.model)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        torch.set_num_threads(self.threads)
        self.worker.report_progress("loading weights")
        model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, self.path, dtype=self.dtype)
        self._model = model.to(self.device).eval()
        config = model.config.get_text_config()
        self._vocab_size = config.vocab_size
        most = config.max_position_embeddings
        self.context_length = min(self.context_length or most, most)
        return EngineConfig(
            model=self.path.rstrip("/").rpartition("/")[2],
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            max_num_seqs=self.max_num_seqs,
            sampling=("temperature", "top_p", "top_k", "min_p", "seed"),
        )

    def begin(self, request: GenerateRequest, context: Context) -> Sequence:
        if self._model is None or self.context_length is None:
            raise EngineShutdown("the engine does not run")
        if max(request["token_ids"]) >= self._vocab_size:
            raise InvalidArgument("a token is not in the vocabulary", field="prompt")
        return Sequence(request, DynamicCache(config=self._model.config), self.context_length, self.device)

    def step(self, batch: list[Sequence]) -> list[StepOutput]:
        if self._model is None:
            raise EngineShutdown("the engine does not run")
        room, outputs = CHUNK_TOKENS, list[StepOutput]()
        for sequence in batch:
            length = min(len(sequence.pending), CHUNK_TOKENS)
            # A step reads about one chunk of prompts. Sequences that generate get a token in every step.
            if not self._has_place(sequence) or (length > 1 and room <= 0):
                outputs.append(None)
                continue
            room -= length
            outputs.append(self._advance(sequence, length))
        return outputs

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether it may hold keys and values. A sequence keeps its place even while it is in no batch."""
        if len(self._running) < self.max_num_seqs:
            self._running.add(sequence)
        return sequence in self._running

    @torch.inference_mode()
    def _advance(self, sequence: Sequence, length: int) -> StepOutput:
        # How a prompt is cut does not depend on other sequences, so neither do the sums.
        read = torch.tensor([sequence.pending[:length]], device=self.device)
        output = self._model(input_ids=read, cache=sequence.cache, use_cache=True, logits_to_keep=1)
        sequence.pending = sequence.pending[length:]
        if sequence.pending:
            return None
        token = choose(output.logits[0, -1].float(), sequence.options, sequence.random)
        if token in sequence.ends and sequence.generated >= sequence.min_tokens:
            return GenerateChunk(token_ids=[], finish_reason="stop", stop_token=token)
        sequence.pending = [token]
        sequence.generated += 1
        if sequence.generated == sequence.tokens_left:
            return GenerateChunk(token_ids=[token], finish_reason="length")
        return token

    def end(self, sequence: Sequence) -> None:
        self._running.discard(sequence)

    async def cleanup(self) -> None:
        self._model = None


def choose(logits: torch.Tensor, options: SamplingOptions, random: torch.Generator) -> int:
    """Returns the next token: the likeliest, or a random one if a temperature is given."""
    temperature = options.get("temperature") or 0.0
    if temperature <= 0.0:
        return int(logits.argmax())
    # Shifts the likeliest to 0, so that a tiny temperature does not overflow.
    logits = (logits.double() - logits.max()) / temperature
    probabilities, tokens = torch.softmax(logits, -1).sort(descending=True, stable=True)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    top_k = options.get("top_k") or 0
    if top_k > 0:
        kept[top_k:] = False
    # The likeliest is always kept.
    top_p = options.get("top_p")
    if top_p is not None:
        kept[1:] &= (probabilities.cumsum(-1) - probabilities)[1:] < top_p
    min_p = options.get("min_p") or 0.0
    kept[1:] &= probabilities[1:] >= min_p * probabilities[0]
    place = torch.multinomial(probabilities * kept, 1, generator=random)
    return int(tokens[place])


def main() -> None:
    run(TransformersEngine)


if __name__ == "__main__":
    main()
