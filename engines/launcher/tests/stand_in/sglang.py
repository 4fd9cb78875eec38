"""SGLang."""

import json
import os
import sys

import chat
from api import Api
from kv import Blocks, Scheduled
from model import OWN_EOS, Guide, Options, Refused, bad_request, guided_text, logits, ranking, sample

# Some metrics of SGLang, available with `--enable-metrics`.
METRICS = """# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {prompt_tokens:.1f}
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{{model_name="m"}} 0.28
"""
# The capacity of a rank's KV cache, in tokens.
TOKENS = 131072


def told(ranked, prompt, generated, options):
    """The log probabilities that it reports: after biases and penalties, and after the temperature unless configured otherwise."""
    scores = {token: logprob for logprob, token in ranked} | logits(prompt, generated, options)
    if not os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") and options.temperature > 0:
        scores = {token: score / options.temperature for token, score in scores.items()}
    return ranking(scores)


class RadixBlocks(Blocks):
    """The prefix cache of a rank, and its events in the encoding of 0.5.23's publisher, format `dynamo`."""

    def is_on(self, config):
        return config.get("publisher") == "zmq" and config["format"] == "dynamo"

    async def listen(self):
        for socket in self.sockets:
            await socket.listen()

    def chain(self, tokens, salt, lora=None):
        """Hashes are signed."""
        return [block - (1 << 64 if block >> 63 else 0) for block in super().chain(tokens, salt, lora)]

    def stored(self, hashes, parent, tokens, salt, lora):
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self.size,
            "lora_id": None,
            "medium": "GPU",
        }
        return {**stored, "cache_salt": salt} if salt else stored


class Sglang(Api):
    path = ("/generate", chat.PATH)

    def __init__(self, context, args):
        super().__init__(context)
        self.is_incremental, self.rank_count, self.has_metrics = args.incremental, args.dp_size, args.enable_metrics
        config = json.loads(args.kv_events_config)
        self.size = args.page_size
        self.ranks = [RadixBlocks(rank, self.size, config) for rank in range(args.dp_size)]
        self.scheduled = [Scheduled(args.max_num_seqs) for _ in self.ranks]

    def get(self, path):
        if path == "/metrics" and self.has_metrics:
            return METRICS.format(prompt_tokens=sum(each.prompt_tokens for each in self.scheduled))
        if path == "/v1/loads?include=core":
            return {"version": "0.5.23", "loads": [self.load(rank) for rank in range(self.rank_count)]}
        if path == "/server_info":
            ranks = {"dp_size": self.rank_count, "attn_dp_size": 1, **self.controls.options}
            return {**ranks, "page_size": self.size, "max_total_num_tokens": TOKENS, "max_req_input_len": self.context - 6, "version": "0.5.23"}
        return super().get(path)

    def load(self, rank):
        scheduled = self.scheduled[rank]
        used = scheduled.blocks(self.size) * self.size
        return {
            "dp_rank": rank,
            "num_running_reqs": len(scheduled.running),
            "num_waiting_reqs": len(scheduled.waiting),
            "num_used_tokens": used,
            "max_total_num_tokens": TOKENS,
            "token_usage": used / TOKENS,
        }

    def check(self, prompt, max_tokens):
        if len(prompt) >= self.context - 6:
            message = f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({self.context - 6} tokens)."
            raise Refused(400, {"error": {"message": message}})
        super().check(prompt, max_tokens)

    async def answer(self, path, headers, body, pace, send):
        if path == chat.PATH:
            return await chat.sglang(self.answer, self.is_incremental, headers, body, pace, send)
        prompt, params = body["input_ids"], body["sampling_params"]
        max_tokens = params.get("max_new_tokens", 128)
        self.check(prompt, max_tokens)
        if params.get("top_k", 1) < 1 and params["top_k"] != -1:
            raise bad_request(f"top_k must be -1 (disable) or at least 1, got {params['top_k']}.")
        if params.get("top_k", 1) > 2**31 - 1:
            print("RuntimeError: value cannot be converted to type int32 without overflow", file=sys.stderr, flush=True)
            os._exit(1)
        penalty = params.get("repetition_penalty", 1.0)
        if not 0 < penalty <= 2:
            raise bad_request(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {penalty}.")
        rank = body.get("routed_dp_rank", body.get("data_parallel_rank", 0))
        if not 0 <= rank < self.rank_count:
            raise bad_request(f"routed_dp_rank={rank} out of range [0, {self.rank_count})")
        options, generated, chosen, tops, reason = Options(params), [], [], [], None
        # If a request had only the other field, the events would not include the salt.
        salt = body.get("cache_salt")
        assert salt == body.get("extra_key")
        blocks = self.ranks[rank]
        cached = blocks.cached(prompt, salt)
        blocks.store(prompt, salt)
        stop_ids = [] if params.get("ignore_eos") else [*params.get("stop_token_ids", []), OWN_EOS]
        guide = Guide(guided_text(params.get("regex"), params.get("json_schema")))
        await self.controls.awake()
        await self.scheduled[rank].enter(len(prompt))
        while reason is None:
            await pace()
            self.scheduled[rank].hold(len(prompt) + len(generated))
            token, ranked = sample(prompt, generated, options, guide)
            ranked = told(ranked, prompt, generated, options)
            # Bans the model's own end too, ignored or not.
            kept_away = {*params.get("stop_token_ids", []), OWN_EOS}
            if token in kept_away and len(generated) < params.get("min_new_tokens", 0):
                token = next(other for _, other in ranked if other not in kept_away)
            generated.append(token)
            chosen.append([next(logprob for logprob, other in ranked if other == token), token, None])
            tops.append([[logprob, other, None] for logprob, other in ranked[: body.get("top_logprobs_num", 0)]])
            if token in stop_ids:
                reason = {"type": "stop", "matched": token}
            elif len(generated) >= max_tokens:
                reason = {"type": "length", "length": len(generated)}
            elif guide.is_over(generated[:-1]):
                # It checks one token too late, at a token that is not an end.
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
            if reason:
                blocks.store(prompt + generated[:-1], salt)
            await send({"text": None, "output_ids": generated[new], "meta_info": meta})
        await send("[DONE]")
