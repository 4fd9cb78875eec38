"""Writes a small Llama-shaped model with random weights in CTranslate2's format: enough to try the engine, though its answers are
meaningless.

    python make_model.py FOLDER [VOCAB_SIZE]
"""

from __future__ import annotations

import sys

import ctranslate2
import numpy

VOCAB_SIZE, LAYERS, HEADS, WIDTH, INNER = 512, 2, 4, 64, 128


def make(folder: str, vocab_size: int = VOCAB_SIZE, seed: int = 7) -> None:
    random = numpy.random.default_rng(seed)

    def weights(*shape: int) -> numpy.ndarray:
        return random.normal(0.0, shape[-1] ** -0.5, shape).astype(numpy.float32)

    def ones() -> numpy.ndarray:
        return numpy.ones(WIDTH, numpy.float32)

    spec = ctranslate2.specs.TransformerDecoderModelSpec.from_config(
        LAYERS,
        HEADS,
        activation=ctranslate2.specs.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
    )
    decoder = spec.decoder
    decoder.embeddings.weight = weights(vocab_size, WIDTH)
    decoder.scale_embeddings = False
    # Separate from the embeddings, or a token would usually be followed by itself.
    decoder.projection.weight = 4.0 * weights(vocab_size, WIDTH)
    decoder.layer_norm.gamma = ones()
    for layer in decoder.layer:
        attention, ffn = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = ones()
        attention.linear[0].weight = weights(3 * WIDTH, WIDTH)
        attention.linear[1].weight = weights(WIDTH, WIDTH)
        ffn.layer_norm.gamma = ones()
        ffn.linear_0.weight = weights(INNER, WIDTH)
        ffn.linear_0_noact.weight = weights(INNER, WIDTH)
        ffn.linear_1.weight = weights(WIDTH, INNER)
    # The engine works with ids; the names have no meaning.
    spec.register_vocabulary(["<unk>", "<s>", "</s>"] + [f"<{number}>" for number in range(3, vocab_size)])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
    spec.validate()
    spec.optimize()
    spec.save(folder)


if __name__ == "__main__":
    make(sys.argv[1], *map(int, sys.argv[2:]))
