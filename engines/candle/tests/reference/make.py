"""Makes the reference models and their results from `transformers`.

    python -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python make.py [NAME...]

Writes a folder beside this file for each model, or each named one: config.json, model.safetensors (random weights, bf16) and
expected.json: prompts, and the logits of every position in f32, computed on the CPU.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
GRANITE = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.1,
    residual_multiplier=0.22,
    logits_scaling=4.0,
    tie_word_embeddings=True,
)
MODELS = {
    "llama": ("llama", dict()),
    "llama3": ("llama", dict(rope=dict(LLAMA3, rope_theta=500000.0), tie_word_embeddings=True)),
    "llama-linear": ("llama", dict(rope=dict(rope_type="linear", factor=4.0, rope_theta=10000.0))),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(sliding_window=8)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(num_attention_heads=6)),
    "qwen3-yarn": ("qwen3", dict(rope=YARN)),
    "qwen3-moe": (
        "qwen3_moe",
        dict(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)),
    "gemma2": (
        "gemma2",
        dict(
            sliding_window=8,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            num_hidden_layers=3,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            sliding_window=8,
            sliding_window_pattern=3,
            query_pre_attn_scalar=16,
            num_hidden_layers=4,
            num_key_value_heads=1,
        ),
    ),
    "phi3": ("phi3", dict(sliding_window=8)),
    "phi4-mini": (
        "phi3",
        dict(
            hidden_size=64,
            tie_word_embeddings=True,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=64,
            rope=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                partial_rotary_factor=0.5,
                original_max_position_embeddings=64,
                short_factor=[1.0, 1.0, 1.0, 1.0],
                long_factor=[1.0, 1.5, 2.5, 4.0],
            ),
        ),
    ),
    "glm": ("glm", dict()),
    "glm4": ("glm4", dict()),
    "granite": ("granite", GRANITE),
    "granite4": (
        "granitemoehybrid",
        dict(
            GRANITE,
            layer_types=["full_attention", "full_attention"],
            num_local_experts=0,
            shared_intermediate_size=72,
            position_embedding_type="rope",
            mamba_n_heads=4,
        ),
    ),
    "seed-oss": ("seed_oss", dict()),
    "ernie45": ("ernie4_5", dict(use_bias=True)),
    "exaone4": (
        "exaone4",
        dict(
            sliding_window=8,
            num_hidden_layers=4,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            rope=dict(LLAMA3, rope_theta=10000.0),
        ),
    ),
    "cohere2": (
        "cohere2",
        dict(
            hidden_size=64,
            sliding_window=8,
            num_hidden_layers=4,
            logit_scale=0.25,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        ),
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        dict(rope=dict(rope_type="dynamic", alpha=50.0, factor=1.0, rope_theta=10000.0)),
    ),
    "ministral3": (
        "ministral3",
        dict(
            rope=dict(
                YARN,
                factor=16.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        ),
    ),
    "olmoe": (
        "olmoe",
        dict(hidden_size=64, intermediate_size=48, num_experts=6, num_experts_per_tok=2),
    ),
    "granite-moe": (
        "granitemoe",
        dict(GRANITE, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2),
    ),
    "qwen2-moe": (
        "qwen2_moe",
        dict(
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=72,
        ),
    ),
    "starcoder2": ("starcoder2", dict(sliding_window=8)),
    "olmo2": ("olmo2", dict(num_attention_heads=6)),
    "olmo3": (
        "olmo3",
        dict(
            sliding_window=8,
            num_hidden_layers=5,
            rope=dict(
                full_attention=YARN,
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=4, tie_word_embeddings=True)),
}
# Lengths around the block size, the windows and the scaled context.
LENGTHS = [1, 7, 19, 45]


def make(name, kind, changes):
    changes = dict(SIZES, **changes)
    rope = changes.pop("rope", None)
    if rope is not None:
        changes["rope_parameters"] = rope
    config = AutoConfig.for_model(kind, **changes)
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            center = 1.0 if "norm" in parameter_name and "gemma" not in kind else 0.0
            parameter.copy_(center + 0.15 * torch.randn_like(parameter))
    model = model.to(torch.bfloat16)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Loaded again, so that values computed from the configuration were not rounded to bf16.
    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        # With cached keys, the factors are chosen once, by the model's context, which is long.
        rope["short_factor"] = rope["long_factor"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    write_expected(folder, model, config.vocab_size)


def write_expected(folder, model, vocab_size):
    """Computes logits and writes them beside the model."""
    cases = []
    for length in LENGTHS:
        tokens = torch.randint(3, vocab_size, (1, length))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0]
        kept = logits[-4:]
        cases.append(
            dict(
                tokens=tokens[0].tolist(),
                logits=[[round(v, 6) for v in row] for row in kept.tolist()],
            )
        )
    expected = dict(
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__}",
        note="logits of the last rows (at most 4) of each prompt",
        cases=cases,
    )
    (folder / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size} bytes, {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or MODELS:
        kind, changes = MODELS[name]
        make(name, kind, changes)
