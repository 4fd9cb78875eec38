"""A model's worker: `backend.py MODEL_PATH [NAME]`. Answers with the tokens after the prompt's last."""

import asyncio
import sys

from genset.llm import ModelType, register_llm
from genset.runtime import Runtime, worker

VOCABULARY = 2048


async def generate(request, context):
    stop = request["stop_conditions"]
    prompt = request["token_ids"]
    ends = set(stop.get("stop_token_ids", []))
    if not stop.get("ignore_eos"):
        ends |= set(stop.get("eos_token_ids", []))
    token = prompt[-1]
    most = stop.get("max_tokens") or 16
    for count in range(1, most + 1):
        await asyncio.sleep(0)
        if context.is_stopped():
            yield {"token_ids": [], "finish_reason": "cancelled"}
            return
        token = (token + 1) % VOCABULARY
        if token in ends and count > stop.get("min_tokens", 0):
            yield {"token_ids": [], "finish_reason": "stop", "stop_token": token}
            return
        chunk = {"token_ids": [token]}
        if count == most:
            chunk["finish_reason"] = "length"
        yield chunk


@worker()
async def main(runtime: Runtime):
    endpoint = runtime.namespace("py").component("backend").endpoint("generate")
    name = sys.argv[2] if len(sys.argv) > 2 else "py"
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed")
    await register_llm(ModelType.Backend, endpoint, sys.argv[1], name, sampling=sampling)
    await endpoint.serve_endpoint(generate)


asyncio.run(main())
