"""Makes the reference encoders and their results from `transformers` and `sentence-transformers`.

    python -m venv venv && venv/bin/pip install torch transformers sentence-transformers safetensors
    venv/bin/python make.py

Writes a checkout for each model beside this file: config.json, model.safetensors (random weights, bf16), a small
tokenizer, the files of `sentence-transformers` (modules.json, the configuration of pooling and so on), and expected.json:
inputs as token ids and as text with their embeddings, computed in f32 on the CPU.
"""

import json

import sentence_transformers
import torch
import transformers
from sentence_transformers.models import Dense, Normalize, Pooling
from transformers import AutoModel

from tiny import BERT_SPECIALS, MODERN, QWEN_SPECIALS, ROBERTA, ROBERTA_SPECIALS, SIZES
from tiny import config_of, fresh, randomized, rounded, write_tokenizer

QWEN = dict(num_key_value_heads=1, head_dim=16, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True)

# name: kind, specials, changes, pooling, further modules
EMBEDDERS = {
    "bert": ("bert", BERT_SPECIALS, dict(), ["mean"], ["normalize"]),
    "bert-dense": ("bert", BERT_SPECIALS, dict(hidden_act="gelu_new"), ["cls"], ["dense", "normalize"]),
    "xlm-roberta": ("xlm-roberta", ROBERTA_SPECIALS, ROBERTA, ["cls", "max", "mean_sqrt_len_tokens"], []),
    "modernbert": ("modernbert", BERT_SPECIALS, MODERN, ["mean"], ["normalize"]),
    "qwen3": ("qwen3", QWEN_SPECIALS, QWEN, ["lasttoken"], ["normalize"]),
}
# Lengths around the window, a KV block and a partition of the attention.
LENGTHS = [1, 7, 19, 140]
TEXTS = ["Hello there", "the cat sat on the mat", "a", "what is the capital of france? paris, of course."]


def embed(modules, model, tokens):
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = model(ids).last_hidden_state
        features = dict(token_embeddings=hidden, attention_mask=torch.ones_like(ids))
        for module in modules:
            features = module(features)
    return rounded(features["sentence_embedding"][0].tolist())


def write_modules(folder, width, pooling, further):
    modes = {"pooling_mode_" + mode if mode != "cls" else "pooling_mode_cls_token": True for mode in pooling}
    modes = {mode.replace("_mean", "_mean_tokens").replace("_max", "_max_tokens") if mode in ("pooling_mode_mean", "pooling_mode_max") else mode: value for mode, value in modes.items()}
    modes.setdefault("pooling_mode_mean_tokens", False)
    modules = [Pooling(width, **modes)]
    width = modules[0].get_sentence_embedding_dimension()
    listed = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for kind in further:
        if kind == "dense":
            modules.append(Dense(width, 24))
            listed.append(("2_Dense", "Dense"))
        else:
            modules.append(Normalize())
            listed.append((f"{len(listed)}_Normalize", "Normalize"))
    lines = [
        dict(idx=index, name=str(index), path=path, type=f"sentence_transformers.models.{kind}")
        for index, (path, kind) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(lines, indent=2) + "\n")
    for module, (path, kind) in zip(modules, listed[1:]):
        if kind != "Normalize":
            (folder / path).mkdir()
            if kind == "Dense":
                module.to(torch.bfloat16).to(torch.float32)
            module.save(str(folder / path))
    (folder / "sentence_bert_config.json").write_text('{\n  "max_seq_length": 150,\n  "do_lower_case": false\n}\n')
    return modules


def write_expected(folder, content):
    made = f"transformers {transformers.__version__}, sentence-transformers {sentence_transformers.__version__}"
    content = dict(made_with=f"{made}, torch {torch.__version__}", **content)
    (folder / "expected.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(folder.name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), "bytes")


def make_embedder(name, kind, specials, changes, pooling, further):
    folder = fresh(name)
    randomized(AutoModel.from_config(config_of(kind, changes), attn_implementation="eager")).save_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = write_tokenizer(folder, specials)
    modules = write_modules(folder, model.config.hidden_size, pooling, further)
    prompt = ""
    if name == "qwen3":
        prompt = "query: "
        prompts = dict(prompts=dict(query=prompt, document=""), default_prompt_name="query", similarity_fn_name="cosine")
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts, indent=2) + "\n")
    cases = []
    for length in LENGTHS:
        tokens = torch.randint(len(specials), SIZES["vocab_size"], (length,)).tolist()
        cases.append(dict(tokens=tokens, embedding=embed(modules, model, tokens)))
    texts = []
    for text in TEXTS:
        tokens = tokenizer.encode(prompt + text).ids
        texts.append(dict(text=text, tokens=tokens, embedding=embed(modules, model, tokens)))
    write_expected(folder, dict(cases=cases, texts=texts))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name, described in EMBEDDERS.items():
        make_embedder(name, *described)
