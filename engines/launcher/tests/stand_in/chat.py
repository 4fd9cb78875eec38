"""Chats with images and audio, for vLLM and SGLang: replaces their processors and the chat template."""

import base64
import binascii
import hashlib

from model import bad_request

PATH = "/v1/chat/completions"

# The number of tokens of an image and of a sound. Their ids are computed from the bytes.
TOKENS = {"image": 4, "audio": 2}


def decoded(data):
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise bad_request(f"not base64: {error}") from error


def read(messages):
    """The prompt's tokens, and the number of tokens of each kind of medium."""
    prompt, counts = [], {}
    for message in messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = {"text": None, "image_url": "image", "input_audio": "audio"}[part["type"]]
            if kind is None:
                prompt += [1 + len(word) for word in part["text"].split()]
                continue
            if kind == "image":
                head, data = part["image_url"]["url"].split(",", 1)
                # The real servers would fetch other URLs. They must receive none.
                assert head.startswith("data:image/") and head.endswith(";base64"), head
            else:
                data = part["input_audio"]["data"]
            digest = hashlib.sha256(decoded(data)).digest()
            prompt += [100 + byte for byte in digest[: TOKENS[kind]]]
            counts[kind] = counts.get(kind, 0) + TOKENS[kind]
    return prompt, counts


def event(choices, usage=None):
    made = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
    return made if usage is None else {**made, "usage": usage}


def usage_of(prompt, generated, details=None):
    total = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    return total if details is None else {**total, "prompt_tokens_details": details}


async def vllm(answer, headers, body, pace, send):
    """Answers a chat like vLLM 0.32.0, by a completion of the prompt."""
    prompt, counts = read(body["messages"])
    asked = {**body, "prompt": prompt}
    asked["logprobs"] = body.get("top_logprobs", 0) if body.get("logprobs") else None
    given = 0

    async def send_chat(made):
        nonlocal given
        if made == "[DONE]" or "error" in made:
            return await send(made)
        if not made["choices"]:
            details = {**made["usage"]["prompt_tokens_details"], "multimodal_tokens": counts}
            return await send(event([], usage_of(len(prompt), given, details)))
        choice = made["choices"][0]
        given += len(choice.get("token_ids", []))
        rated = choice.pop("logprobs")
        if rated:
            tops = [{"token": name, "logprob": logprob} for name, logprob in rated["top_logprobs"][0].items()]
            chosen = {"token": rated["tokens"][0], "logprob": rated["token_logprobs"][0]}
            choice["logprobs"] = {"content": [{**chosen, "top_logprobs": tops[: asked["logprobs"]]}]}
        choice["delta"] = {"content": choice.pop("text")}
        await send(event([choice], usage_of(len(prompt), given)))

    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    await send(event([role], usage_of(len(prompt), 0)))
    await answer("/v1/completions", headers, asked, pace, send_chat)


NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


async def sglang(answer, is_incremental, headers, body, pace, send):
    """Answers a chat like SGLang 0.5.23: with text, without tokens."""
    if body.get("return_token_ids"):
        raise bad_request("return_token_ids is not supported with streaming on /v1/chat/completions.")
    prompt, counts = read(body["messages"])
    params = {NAMES.get(name, name): value for name, value in body.items()}
    if "response_format" in body:
        params["json_schema"] = body["response_format"]["json_schema"]["schema"]
    names = ("cache_salt", "extra_key", "routed_dp_rank", "data_parallel_rank")
    asked = {"input_ids": prompt, "sampling_params": params, **{name: body[name] for name in names if name in body}}
    seen, meta = 0, {}

    async def send_chat(made):
        nonlocal seen, meta
        if made == "[DONE]":
            details = {"cached_tokens": meta["cached_tokens"], **{f"{kind}_tokens": count for kind, count in counts.items()}}
            await send(event([], usage_of(len(prompt), meta["completion_tokens"], details)))
            return await send(made)
        meta = made["meta_info"]
        new = made["output_ids"] if is_incremental else made["output_ids"][seen:]
        seen += len(new)
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "stop" and new[-1:] == [reason["matched"]]:
            new = new[:-1]
        text = "".join(f" t{token}" for token in new)
        usage = usage_of(len(prompt), meta["completion_tokens"])
        await send(event([{"index": 0, "delta": {"content": text}, "finish_reason": None}], usage))
        if reason:
            end = {"index": 0, "delta": {}, "finish_reason": reason["type"], "matched_stop": reason.get("matched")}
            await send(event([end], usage))

    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    await send(event([role], usage_of(len(prompt), 0)))
    await answer("/generate", headers, asked, pace, send_chat)
