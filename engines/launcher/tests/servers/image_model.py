"""Writes a small LLaVA with random weights, and what `transformers` makes of two images.

image_model TINY_CHAT FOLDER; run by the interpreter of a server's environment, which has `torch` and `transformers`.
"""

import base64
import io
import json
import sys

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

SIDE, PATCH = 56, 14
QUESTION = "What is it?"
# Weights large enough for an image to change what follows it.
SPREAD = 0.1


def image(red):
    """A picture that has no two equal rows."""
    made = Image.new("RGB", (SIDE, SIDE))
    made.putdata([(red, 3 * x, 4 * y) for y in range(SIDE) for x in range(SIDE)])
    return made


def data_url(picture):
    written = io.BytesIO()
    picture.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def name_as_published(file):
    """Names the weights of the vision tower as the published checkouts do, which servers look for."""
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(renamed, file, {"format": "pt"})


def main():
    tiny_chat, folder = sys.argv[1:]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": SPREAD}
    text = LlamaConfig(
        **sizes, vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH, projection_dim=64)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=placeholder,
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    name_as_published(f"{folder}/model.safetensors")
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    # As vLLM puts images before the text of a template that takes no parts.
    messages = [{"role": "user", "content": f"<image>\n{QUESTION}"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = []
    for red in (10, 250):
        picture = image(red)
        taken = processor(text=prompt, images=picture, return_tensors="pt")
        with torch.no_grad():
            rated = model(**taken).logits[0, -1].log_softmax(-1)
        expected.append({
            "url": data_url(picture), "prompt_tokens": taken["input_ids"].shape[1], "logprob": float(rated.max()),
        })  # fmt: skip
    with open(f"{folder}/expected.json", "w") as file:
        json.dump({"question": QUESTION, "images": expected}, file)


if __name__ == "__main__":
    main()
