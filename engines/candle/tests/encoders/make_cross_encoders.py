"""Makes the reference cross-encoders and their results from `transformers`.

    python -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python make_cross_encoders.py

Writes a checkout for each model beside this file: config.json, model.safetensors (random weights, bf16), a small
tokenizer, and expected.json: pairs as token ids and as texts with their scores, computed in f32 on the CPU. A score is
the model's single output after the activation that the checkout names, by default the sigmoid.
"""

import json

import torch
import transformers
from transformers import AutoModelForSequenceClassification

from tiny import BERT_SPECIALS, MODERN, ROBERTA, ROBERTA_SPECIALS, SIZES
from tiny import config_of, fresh, randomized, rounded, write_tokenizer

IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
MEAN = dict(MODERN, classifier_pooling="mean", classifier_bias=True, norm_bias=True)

# name: kind, specials, changes, further keys of config.json, whether the model gets token kinds
CROSS_ENCODERS = {
    "bert-scores": ("bert", BERT_SPECIALS, dict(), dict(sbert_ce_default_activation_function=IDENTITY), True),
    "xlm-roberta-scores": ("xlm-roberta", ROBERTA_SPECIALS, ROBERTA, dict(), False),
    "modernbert-scores": ("modernbert", BERT_SPECIALS, MODERN, dict(sentence_transformers=dict(activation_fn=SIGMOID)), False),
    "modernbert-mean-scores": ("modernbert", BERT_SPECIALS, MEAN, dict(), False),
}
# Numbers of tokens of the first and the second kind, around the window, a KV block and a partition of the attention.
LENGTHS = [(1, 1), (4, 3), (3, 16), (20, 120), (6, 0)]
TEXTS = [
    ("what is a cat?", "the cat sat on the mat"),
    ("what is a cat?", "a"),
    ("Hello", "Hello there, hello."),
    ("what is the capital of france?", "paris, of course. it is on the river seine, and has two million inhabitants"),
]


def score(model, tokens, first_tokens, has_kinds, is_sigmoid):
    kinds = [0] * first_tokens + [1] * (len(tokens) - first_tokens)
    further = dict(token_type_ids=torch.tensor([kinds])) if has_kinds else {}
    ids = torch.tensor([tokens])
    with torch.no_grad():
        number = model(ids, attention_mask=torch.ones_like(ids), **further).logits[0]
    assert number.shape == (1,)
    return rounded((torch.sigmoid(number) if is_sigmoid else number).tolist())[0]


def make(name, kind, specials, changes, further, has_kinds):
    folder = fresh(name)
    config = config_of(kind, dict(changes, num_labels=1))
    randomized(AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")).save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(written, **further), indent=2) + "\n")
    tokenizer = write_tokenizer(folder, specials, max_length=150)
    is_sigmoid = IDENTITY not in json.dumps(further)
    cases = []
    for first, second in LENGTHS:
        tokens = torch.randint(len(specials), SIZES["vocab_size"], (first + second,)).tolist()
        case = dict(tokens=tokens, first_tokens=first)
        cases.append(dict(case, score=score(model, tokens, first, has_kinds, is_sigmoid)))
    texts = []
    for first, second in TEXTS:
        encoded = tokenizer.encode(first, second)
        kinds = encoded.type_ids
        case = dict(first=first, second=second, tokens=encoded.ids, first_tokens=kinds.count(0))
        assert kinds == sorted(kinds)
        texts.append(dict(case, score=score(model, encoded.ids, kinds.count(0), has_kinds, is_sigmoid)))
    made = f"transformers {transformers.__version__}, torch {torch.__version__}"
    content = dict(made_with=made, cases=cases, texts=texts)
    (folder / "expected.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(name, [case["score"] for case in cases + texts])


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name, described in CROSS_ENCODERS.items():
        make(name, *described)
