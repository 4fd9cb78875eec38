"""The common part of the reference encoders: sizes, small tokenizers, random weights, and writing their files."""

import json
import pathlib
import shutil

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig

HERE = pathlib.Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=3,
    max_position_embeddings=160,
)
BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
MODERN = dict(
    pad_token_id=0,
    cls_token_id=2,
    sep_token_id=3,
    local_attention=8,
    global_attn_every_n_layers=2,
)
ROBERTA = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1)


def tokenizer_of(specials):
    pieces = list(LETTERS) + ["##" + letter for letter in LETTERS] + list("?.,!")
    vocabulary = {piece: index for index, piece in enumerate(specials + pieces)}
    unknown = next(special for special in specials if "unk" in special.lower())
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(specials)
    if specials is BERT_SPECIALS:
        single, pair, used = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ["[CLS]", "[SEP]"]
    elif specials is ROBERTA_SPECIALS:
        single, pair, used = "<s> $A </s>", "<s> $A </s> </s> $B </s>", ["<s>", "</s>"]
    else:
        single, pair, used = "$A <|endoftext|>", "$A $B <|endoftext|>", ["<|endoftext|>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, vocabulary[token]) for token in used]
    )
    # Training settings, which servers must ignore.
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(pad_id=vocabulary[specials[0]], pad_token=specials[0], length=16)
    return tokenizer


def write_tokenizer(folder, specials, max_length=1000000000000000019884624838656):
    tokenizer = tokenizer_of(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(model_max_length=max_length)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def randomized(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_((1.0 if is_scale else 0.0) + 0.15 * torch.randn_like(parameter))
    return model.to(torch.bfloat16)


def config_of(kind, changes):
    return AutoConfig.for_model(kind, **dict(SIZES, **changes))


def fresh(name):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch.manual_seed(sum(map(ord, name)))
    return folder


def rounded(values):
    return [round(value, 6) for value in values]
