"""LoRA adapters of a server behind Genset: their answers, alone and in one batch with the model."""

import json
import os
import random
import struct

from genset import Beside, Genset, Refused
from questions import Asking

# The modules that an adapter changes, and its rank.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8
# The largest weight; large enough to change the answers.
LARGEST = 0.2
# The tolerance of log probabilities between two engines: weights of this size amplify rounding. An adapter changes them by 0.2 and more.
NEAR = 0.1
NAMES = ("loud", "quiet")
PROMPT = "The capital of France"


def write_adapter(folder, model, seed):
    """Writes an adapter with random weights in the format of the library `peft`."""
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    heads = config["num_attention_heads"] * config["head_dim"]
    kept = config["num_key_value_heads"] * config["head_dim"]
    hidden = config["hidden_size"]
    shapes = dict(zip(MODULES, ((hidden, heads), (hidden, kept), (hidden, kept), (heads, hidden))))
    draw = random.Random(seed)
    header, data = {}, b""
    for layer in range(config["num_hidden_layers"]):
        for module, (takes, makes) in shapes.items():
            for matrix, shape in (("A", (RANK, takes)), ("B", (makes, RANK))):
                count = shape[0] * shape[1]
                weights = struct.pack(f"<{count}f", *(draw.uniform(-LARGEST, LARGEST) for _ in range(count)))
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{matrix}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(weights)]}
                data += weights
    text = json.dumps(header).encode()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": MODULES, "bias": "none"}
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump(said, file)


def words(kind):
    """The arguments that load both adapters."""
    said = []
    for seed, name in enumerate(NAMES):
        folder = os.path.join(kind.args.out, f"adapter-{name}")
        write_adapter(folder, kind.model, seed)
        said += ["--adapter", f"{name}={folder}"]
    return said


def first_logprob(genset, name):
    """The first token of a model's answer, and its log probability."""
    body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 1, "logprobs": 0}
    found = genset.ask("/v1/completions", body)["choices"][0]["logprobs"]
    return found["tokens"][0], found["token_logprobs"][0]


def in_one_batch(kind, genset):
    listed = genset.ask("/v1/models")["data"]
    [base] = [model["id"] for model in listed if not model.get("parent")]
    assert {model["id"]: model["parent"] for model in listed if model.get("parent")} == {name: base for name in NAMES}, listed
    on = Asking(kind, genset)
    ids = on.ids(PROMPT)
    ask = lambda name: on.complete(ids, model=name)["choices"][0]["text"]
    alone = {name: ask(name) for name in (base, *NAMES)}
    assert len(set(alone.values())) == 3, alone
    for name, text in alone.items():
        # The server may know the base model by another name.
        theirs = kind.text(on.port, on.key, ids, 16, model=None if name == base else name)
        assert text == theirs, (name, text, theirs)
    together = [(name, Beside(lambda name=name: ask(name))) for name in list(alone) * 4]
    texts = [(name, beside.result()) for name, beside in together]
    assert all(text == alone[name] for name, text in texts), (alone, texts)
    try:
        ask("nobody")
    except Refused as refused:
        assert refused.status == 404, refused
    else:
        raise AssertionError("an adapter that is not there answered")
    # The same folders in the candle engine, which has its own implementation of adapters.
    own = ["in=http", "out=candle", kind.model, "--dtype", "f32", "--kv-cache-dtype", "f32", *words(kind)]
    with Genset(kind.args.genset, own, {}, os.path.join(kind.args.out, "adapters-candle.log")) as candle:
        candle.until_ready(kind.start)
        for name in NAMES:
            ours, theirs = first_logprob(candle, name), first_logprob(genset, name)
            assert ours[0] == theirs[0] and abs(ours[1] - theirs[1]) < NEAR, (name, ours, theirs)
