"""Makes reference models with packed weights, and the results of `transformers` with the unpacked weights.

    python -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python packed.py [NAME...]

Writes a folder for each model, or each named one, as make.py does. It needs no packing library: it packs the weights itself,
and computes the reference with each format's published formula, in f32:

- GPTQ (AutoGPTQ's and GPTQModel's linear layers), AWQ (AutoAWQ's `packing_utils.py`, version gemm), compressed-tensors
  (`pack_quantized`): scale * (value - zero), for each group of columns of a row;
- FP8: value * scale, for the whole matrix, each row, or each block;
- MXFP4 (`transformers`' `convert_moe_packed_tensors`): value * 2^(scale - 127), in blocks of 32 columns.
"""

import json
import shutil
import sys

import torch
import transformers
from make import HERE, SIZES, write_expected
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

WIDE = dict(SIZES, hidden_size=64, intermediate_size=96)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def words(nibbles):
    """Packs `[..., 8 * n]` four-bit numbers into `[..., n]` words, the first in the lowest bits."""
    shifted = nibbles.long().unflatten(-1, (-1, 8)) << (4 * torch.arange(8))
    total = shifted.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).contiguous()


def groups(weight, size, symmetric, scale_dtype, order=None):
    """Four-bit values and zero points, scales, and the numbers that they encode; `order` is the group of each column."""
    rows, columns = weight.shape
    size = columns if size == -1 else size
    of = torch.arange(columns) // size if order is None else order
    count = int(of.max()) + 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
    for group in range(count):
        part = weight[:, of == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / 7
            zeros[:, group] = 8
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / 15
            zeros[:, group] = (-low / scales[:, group]).round()
    scales = scales.to(scale_dtype)
    values = ((weight / scales.float()[:, of]).round() + zeros[:, of]).clamp(0, 15).long()
    return values, zeros, scales, scales.float()[:, of] * (values - zeros[:, of])


def gptq(weight, group_size, symmetric=True, order=False, offset=1, scale_dtype=torch.float16):
    columns = weight.shape[1]
    of = torch.arange(columns) // (columns if group_size == -1 else group_size)
    if order:
        of = of[torch.randperm(columns)]
    values, zeros, scales, numbers = groups(weight, group_size, symmetric, scale_dtype, of)
    return numbers, {
        "qweight": words(values).t().contiguous(),
        "qzeros": words((zeros.t() - offset) & 15),
        "scales": scales.t().contiguous(),
        "g_idx": of.to(torch.int32),
    }


def awq(weight, group_size):
    values, zeros, scales, numbers = groups(weight, group_size, False, torch.float16)
    pack = lambda x: words(x.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))
    return numbers, {"qweight": pack(values), "qzeros": pack(zeros), "scales": scales.t().contiguous()}


def compressed(weight, group_size, symmetric):
    # Numbers from -8 on, stored from 0 on; zero points likewise.
    values, zeros, scales, numbers = groups(weight, group_size, symmetric, torch.bfloat16)
    parts = {
        "weight_packed": words(values),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.t()).t().contiguous()
    return numbers, parts


def fp8(weight, scale_name, block=None, scale_dtype=torch.float32):
    """`block` is the rows and columns per scale; None for a single scale, (1, -1) for one per row."""
    rows, columns = weight.shape
    high, wide = (rows, columns) if block is None else block
    wide = columns if wide == -1 else wide
    down, across = -(-rows // high), -(-columns // wide)
    scale = torch.empty(down, across)
    for i in range(down):
        for j in range(across):
            scale[i, j] = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide].abs().max() / 448
    scale = scale.to(scale_dtype)
    spread = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = {"weight": values, scale_name: scale.reshape(()) if block is None else scale}
    return values.float() * spread, parts


def compressed_config(form, weights, activations=None):
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format=form, config_groups=dict(group_0=group), ignore=["lm_head"]
    )


GPTQ = dict(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=False, checkpoint_format="gptq")
DYNAMIC = dict(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
# For each: the kind of model, the changes to its configuration, its quantization_config, and the function that packs a matrix.
MODELS = {
    "gptq": ("llama", {}, GPTQ, lambda w: gptq(w, 32)),
    "gptq-zeros": (
        "qwen2",
        {},
        dict(GPTQ, sym=False, group_size=-1),
        lambda w: gptq(w, -1, symmetric=False),
    ),
    "gptq-order": (
        "qwen3",
        {},
        dict(GPTQ, desc_act=True, sym=False),
        lambda w: gptq(w, 32, symmetric=False, order=True),
    ),
    "gptq-v2": (
        "phi3",
        {},
        dict(GPTQ, checkpoint_format="gptq_v2", sym=False),
        lambda w: gptq(w, 32, symmetric=False, offset=0),
    ),
    # Groups that are not whole blocks.
    "gptq-small-groups": ("llama", {}, dict(GPTQ, group_size=16), lambda w: gptq(w, 16)),
    "awq": (
        "llama",
        {},
        dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        lambda w: awq(w, 32),
    ),
    "compressed-int4": (
        "qwen3",
        {},
        compressed_config(
            "pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
        ),
        lambda w: compressed(w, 32, True),
    ),
    "compressed-int4-zeros": (
        "llama",
        {},
        compressed_config("pack-quantized", dict(num_bits=4, type="int", strategy="channel", symmetric=False)),
        lambda w: compressed(w, -1, False),
    ),
    "fp8-blocks": (
        "qwen3",
        {},
        dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[24, 56]),
        lambda w: fp8(w, "weight_scale_inv", (24, 56), torch.bfloat16),
    ),
    "fp8-rows": (
        "llama",
        {},
        compressed_config(
            "float-quantized", dict(num_bits=8, type="float", strategy="channel", symmetric=True), DYNAMIC
        ),
        lambda w: fp8(w, "weight_scale", (1, -1)),
    ),
    "fp8-whole": (
        "mistral",
        dict(sliding_window=8),
        dict(quant_method="fp8", activation_scheme="dynamic"),
        lambda w: fp8(w, "weight_scale"),
    ),
}

# Whether experts are in MXFP4.
GPT_OSS = {"gpt-oss": True, "gpt-oss-bf16": False}


def make(name, kind, changes, quantization, pack):
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(kind, **dict(WIDE, **changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = {}
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            center = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_((center + 0.15 * torch.randn_like(parameter)).bfloat16())
            tensors[parameter_name] = parameter.bfloat16()
        for module_name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
                del tensors[f"{module_name}.weight"]
                numbers, parts = pack(module.weight)
                module.weight.copy_(numbers)
                tensors |= {f"{module_name}.{part}": tensor for part, tensor in parts.items()}
    write(name, config, model, tensors, quantization)


def mxfp4(shape):
    """Random blocks and scales, `[..., rows, columns / 32, 16]`, and the numbers that they encode."""
    *outer, columns = shape
    blocks = torch.randint(0, 256, (*outer, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (*outer, columns // 32), dtype=torch.uint8)
    table = torch.tensor(FP4 + [-value for value in FP4])
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1)
    numbers = torch.ldexp(pairs.flatten(-2), scales[..., None].int() - 127)
    return numbers.flatten(-2), {"_blocks": blocks, "_scales": scales}


def make_gpt_oss(name, is_packed):
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(
        "gpt_oss",
        **dict(
            WIDE,
            num_local_experts=3,
            num_experts_per_tok=2,
            sliding_window=8,
            # Low enough that some numbers exceed it.
            swiglu_limit=1.0,
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
                rope_theta=150000.0,
            ),
        ),
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = {}
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            center = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_((center + 0.15 * torch.randn_like(parameter)).bfloat16())
            is_matrices = parameter_name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            if is_packed and is_matrices:
                # Rows first; the model has columns first.
                numbers, parts = mxfp4(parameter.mT.shape)
                parameter.copy_(numbers.mT)
                tensors |= {parameter_name + part: tensor for part, tensor in parts.items()}
            else:
                tensors[parameter_name] = parameter.bfloat16().contiguous()
    quantization = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    write(name, config, model, tensors, quantization if is_packed else None)


def write(name, config, model, tensors, quantization):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    config.save_pretrained(folder)
    file = folder / "config.json"
    described = json.loads(file.read_text())
    described["architectures"] = [type(model).__name__]
    if quantization is not None:
        described["quantization_config"] = quantization
    file.write_text(json.dumps(described, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    write_expected(folder, model, config.vocab_size)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or [*MODELS, *GPT_OSS]:
        if name in GPT_OSS:
            make_gpt_oss(name, GPT_OSS[name])
        else:
            make(name, *MODELS[name])
