"""Writes a small Qwen2-VL with random weights, and the results of `transformers` for two images.

image_model TINY_CHAT FOLDER; run by the interpreter of a server's environment, which has `torch` and `transformers`.
"""

import base64
import io
import json
import sys

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SIDE = 56
QUESTION = "What is it?"
# Weights large enough for an image to change the tokens after it.
SPREAD = 0.1
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# The template shows only the name of a tool: servers add fields to what they receive.
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<|im_start|>tool\n{{ tool.function.name }}<|im_end|>\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image(red):
    """A picture whose rows all differ."""
    made = Image.new("RGB", (SIDE, SIDE))
    made.putdata([(red, 3 * x, 4 * y) for y in range(SIDE) for x in range(SIDE)])
    return made


def data_url(picture):
    written = io.BytesIO()
    picture.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def config(tokenizer):
    start, end, image, video = tokenizer.convert_tokens_to_ids(MARKS)
    vision = {
        "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2, "in_chans": 3,
        "initializer_range": SPREAD,
    }  # fmt: skip
    return Qwen2VLConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=SPREAD, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, vision_config=vision, vision_start_token_id=start,
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}, vision_end_token_id=end, image_token_id=image, video_token_id=video,
    )  # fmt: skip


def main():
    tiny_chat, folder = sys.argv[1:]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = TEMPLATE
    model = Qwen2VLForConditionalGeneration(config(tokenizer)).eval()
    model.save_pretrained(folder)
    pixels = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels), chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    render = lambda tools: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    prompt, prompt_with_tool = render(None), render([TOOL])
    expected = []
    for red in (10, 250):
        picture = image(red)
        taken = processor(text=prompt, images=picture, return_tensors="pt")
        with torch.no_grad():
            rated = model(**taken).logits[0, -1].log_softmax(-1)
        with_tool = processor(text=prompt_with_tool, images=picture, return_tensors="pt")
        best = int(rated.argmax())
        expected.append({
            "url": data_url(picture), "prompt_tokens": taken["input_ids"].shape[1],
            "first": tokenizer.decode([best]), "logprob": float(rated[best]),
            "prompt_tokens_with_tool": with_tool["input_ids"].shape[1],
        })  # fmt: skip
    with open(f"{folder}/computed.json", "w") as file:
        json.dump({"question": QUESTION, "tool": TOOL, "images": expected}, file)


if __name__ == "__main__":
    main()
