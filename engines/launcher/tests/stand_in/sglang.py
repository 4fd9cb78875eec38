"""SGLang."""

import os
import sys

from api import Api
from model import OWN_EOS, Guide, Options, Refused, bad_request, guided_text, sample

class Sglang(Api):
    path = "/generate"

    def __init__(self, context, is_incremental, ranks):
        super().__init__(context)
        self.is_incremental, self.rank_count = is_incremental, ranks

    def get(self, path):
        if path == "/server_info":
            ranks = {"dp_size": self.rank_count, "attn_dp_size": 1}
            return {**ranks, "page_size": 1, "max_total_num_tokens": 8192, "max_req_input_len": self.context - 6, "version": "0.5.23"}
        return super().get(path)

    def check(self, prompt, max_tokens):
        if len(prompt) >= self.context - 6:
            message = f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({self.context - 6} tokens)."
            raise Refused(400, {"error": {"message": message}})
        super().check(prompt, max_tokens)

    async def answer(self, path, headers, body, pace, send):
        prompt, params = body["input_ids"], body["sampling_params"]
        max_tokens = params.get("max_new_tokens", 128)
        self.check(prompt, max_tokens)
        if params.get("top_k", 1) > 2**31 - 1:
            print("RuntimeError: value cannot be converted to type int32 without overflow", file=sys.stderr, flush=True)
            os._exit(1)
        rank = body.get("routed_dp_rank", body.get("data_parallel_rank", 0))
        if not 0 <= rank < self.rank_count:
            raise bad_request(f"routed_dp_rank={rank} out of range [0, {self.rank_count})")
        options, generated, chosen, tops, reason = Options(params), [], [], [], None
        cached = self.cached(prompt)
        stop_ids = [] if params.get("ignore_eos") else [*params.get("stop_token_ids", []), OWN_EOS]
        guide = Guide(guided_text(params.get("regex"), params.get("json_schema")))
        while reason is None:
            await pace()
            token, ranked = sample(prompt, generated, options, guide)
            if token in stop_ids and len(generated) < params.get("min_new_tokens", 0):
                token = next(other for _, other in ranked if other not in stop_ids)
            generated.append(token)
            chosen.append([next(logprob for logprob, other in ranked if other == token), token, None])
            tops.append([[logprob, other, None] for logprob, other in ranked[: body.get("top_logprobs_num", 0)]])
            if token in stop_ids:
                reason = {"type": "stop", "matched": token}
            elif len(generated) >= max_tokens:
                reason = {"type": "length", "length": len(generated)}
            elif guide.is_over(generated[:-1]):
                # It looks a token later than it should, at a token that is no end.
                reason = {"type": "stop", "matched": token}
            new = slice(-1 if self.is_incremental else 0, None)
            meta = {
                "id": "1",
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(generated),
                "cached_tokens": cached,
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = chosen[new]
                meta["output_top_logprobs"] = tops[new]
            await send({"text": None, "output_ids": generated[new], "meta_info": meta})
        await send("[DONE]")
