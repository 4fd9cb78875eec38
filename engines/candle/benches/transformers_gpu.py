"""Prints the tokens per second of `transformers` on a GPU, as JSON; called by `cargo xtask gpu-test`.

The decode time is that of the later tokens of a longer answer, without prefill and start-up.
"""

import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

REPEATS = 3
SHORT = 16  # tokens of the answer that is subtracted


def main() -> None:
    folder, device = sys.argv[1], sys.argv[2]
    many, context, new, prefill = map(int, sys.argv[3:])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    vocab_size = model.config.vocab_size

    def prompt(rows: int, length: int) -> torch.Tensor:
        return torch.randint(3, vocab_size, (rows, length), device=device)

    def generate(ids: torch.Tensor, tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def decode(rows: int) -> float:
        def once() -> float:
            ids = prompt(rows, context)
            return rows * (new - SHORT) / (generate(ids, new) - generate(ids, SHORT))

        once()
        return statistics.median(once() for _ in range(REPEATS))

    def prefill_rate() -> float:
        generate(prompt(1, prefill), 1)
        return statistics.median(prefill / generate(prompt(1, prefill), 1) for _ in range(REPEATS))

    with torch.inference_mode():
        print(json.dumps({"one": decode(1), "many": decode(many), "prefill": prefill_rate()}))


if __name__ == "__main__":
    main()
