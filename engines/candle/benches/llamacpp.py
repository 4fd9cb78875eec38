"""Measures the speed of llama.cpp with a GGUF file: the figures of `genset bench engine`, measured in the same way.

llamacpp.py MODEL.gguf THREADS SEQUENCES CONTEXT_TOKENS NEW_TOKENS PREFILL_TOKENS

SEQUENCES is a list, such as 1,4,16,64. Prints JSON. Sampling costs nothing here: the next token is always the same one.
"""

import ctypes
import json
import sys
import time

import llama_cpp


@llama_cpp.llama_log_callback
def say_nothing(level, text, user_data):
    """Drops llama.cpp's log. An error ends the program with its own message."""


class Context:
    """A context for a number of sequences, each with its own KV cache, the fastest setting of llama.cpp."""

    def __init__(self, model, threads, sequences, tokens_each):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * tokens_each
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_threads = threads
        params.n_threads_batch = threads
        params.n_seq_max = sequences
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp gives no context")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def compute(self, rows):
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = is_wanted
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama.cpp computes no more")
        llama_cpp.llama_get_logits(self.context)
        llama_cpp.llama_synchronize(self.context)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def prompt(tokens, sequence):
    return [(3 + (place * 31 + sequence * 7919) % 1000, place, sequence, place == tokens - 1) for place in range(tokens)]


def decode(model, threads, sequences, context_tokens, new_tokens):
    context = Context(model, threads, sequences, -(-(context_tokens + new_tokens) // 256) * 256)
    for sequence in range(sequences):
        context.compute(prompt(context_tokens, sequence))
    began = time.perf_counter()
    for step in range(new_tokens):
        context.compute([(7, context_tokens + step, sequence, True) for sequence in range(sequences)])
    took = time.perf_counter() - began
    context.close()
    return sequences * new_tokens / took


def prefill(model, threads, tokens):
    context = Context(model, threads, 1, -(-tokens // 256) * 256)
    began = time.perf_counter()
    context.compute(prompt(tokens, 0))
    took = time.perf_counter() - began
    context.close()
    return tokens / took


def main():
    path, threads, sequences, context_tokens, new_tokens, prefill_tokens = sys.argv[1:]
    threads, context_tokens, new_tokens, prefill_tokens = map(int, (threads, context_tokens, new_tokens, prefill_tokens))
    llama_cpp.llama_log_set(say_nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    prefill(model, threads, prefill_tokens)
    decode(model, threads, 1, context_tokens, new_tokens)
    rates = [decode(model, threads, int(count), context_tokens, new_tokens) for count in sequences.split(",")]
    figures = {"decode": rates, "prefill_tokens_per_s": prefill(model, threads, prefill_tokens)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
