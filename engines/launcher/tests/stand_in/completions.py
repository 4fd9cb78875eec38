"""vLLM and TensorRT-LLM."""

import re

import chat
from api import Api
from model import OWN_EOS, Guide, Options, Refused, bad_request, guided_text, sample

# Some metrics of vLLM 0.32.0, with a series per rank; `vllm:cache_config_info` is shortened, and has the blocks of all ranks.
VLLM_METRICS = """# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
# HELP process_resident_memory_bytes Resident memory size in bytes.
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1.048576e+09
"""
VLLM_FAMILIES = {
    "vllm:num_requests_running": ("gauge", "Number of requests in model execution batches."),
    "vllm:num_requests_waiting": ("gauge", "Number of requests waiting to be processed."),
    "vllm:kv_cache_usage_perc": ("gauge", "KV-cache usage. 1 means 100 percent usage."),
    "vllm:prompt_tokens_total": ("counter", "Number of prefill tokens processed."),
    "vllm:prompt_tokens_created": ("gauge", "Number of prefill tokens processed."),
    "vllm:iteration_tokens_total": ("histogram", "Histogram of number of tokens per engine_step."),
    "vllm:cache_config_info": ("gauge", "Information of the LLMEngine CacheConfig"),
}
VLLM_BLOCKS = 2048


TRTLLM_FIELDS = set(
    "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens "
    "skip_special_tokens detokenize add_special_tokens response_format priority".split()
)


# What vLLM 0.32.0 streams for an answer that it aborts: it could not fetch the KV blocks, or a stop token came inside the grammar.
GIVEN_UP = {
    "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
}


class Completions(Api):
    """vLLM and TensorRT-LLM."""

    path = "/v1/completions"

    def __init__(self, context, ranks=()):
        super().__init__(context)
        self.is_vllm, self.ranks, self.turn = bool(ranks), ranks, 0
        if self.is_vllm:
            self.path = (self.path, chat.PATH)

    def rank_of(self, headers):
        """The rank that the request selects, else the next one."""
        named = headers.get("x-data-parallel-rank", "")
        if not re.fullmatch(r"-?\d+", named):
            self.turn += 1
            return self.turn % len(self.ranks)
        if not 0 <= int(named) < len(self.ranks):
            raise bad_request(f"data_parallel_rank {named} is out of range [0, {len(self.ranks)}).")
        return int(named)

    def get(self, path):
        if path == "/metrics" and self.is_vllm:
            return self.metrics()
        told = self.controls.get(path)
        if told is not None:
            return told
        models = super().get(path)
        if not self.is_vllm:
            del models["data"][0]["max_model_len"]
        return models

    def metrics(self):
        text = VLLM_METRICS
        for name, (kind, about) in VLLM_FAMILIES.items():
            text += f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
            for number, rank in enumerate(self.ranks):
                labels, scheduled = f'engine="{number}",model_name="m"', rank.scheduled
                # One block of each rank is never used.
                usage = scheduled.blocks(rank.blocks.size) / (VLLM_BLOCKS - 1)
                cache = f'block_size="{rank.blocks.size}",cache_dtype="auto",enable_prefix_caching="True",engine="{number}"'
                buckets = [f'{name}_bucket{{engine="{number}",le="{le}",model_name="m"}} 1.0\n' for le in ("1.0", "8.0", "+Inf")]
                text += {
                    "vllm:num_requests_running": f"{name}{{{labels}}} {len(scheduled.running):.1f}\n",
                    "vllm:num_requests_waiting": f"{name}{{{labels}}} {len(scheduled.waiting):.1f}\n",
                    "vllm:kv_cache_usage_perc": f"{name}{{{labels}}} {usage}\n",
                    "vllm:prompt_tokens_total": f"{name}{{{labels}}} {scheduled.prompt_tokens:.1f}\n",
                    "vllm:prompt_tokens_created": f"{name}{{{labels}}} 1.79536330057e+09\n",
                    "vllm:iteration_tokens_total": f"{name}_sum{{{labels}}} 1.0\n{''.join(buckets)}{name}_count{{{labels}}} 1.0\n",
                    "vllm:cache_config_info": f'{name}{{{cache},num_gpu_blocks="{VLLM_BLOCKS * len(self.ranks)}"}} 1.0\n',
                }[name]
        return text

    async def answer(self, path, headers, body, pace, send):
        if path == chat.PATH:
            return await chat.vllm(self.answer, headers, body, pace, send)
        if not self.is_vllm and set(body) - TRTLLM_FIELDS:
            unknown = ", ".join(set(body) - TRTLLM_FIELDS)
            message = f"Extra inputs are not permitted: {unknown}"
            raise Refused(400, {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400})
        prompt, max_tokens = body["prompt"], body.get("max_tokens", 16)
        self.check(prompt, max_tokens)
        if self.is_vllm and body.get("min_tokens", 0) > max_tokens:
            raise bad_request(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body['min_tokens']}.")
        rank = self.ranks[self.rank_of(headers)] if self.is_vllm else None
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_prefill") and not await rank.connector.fetch(transfer):
            await send(GIVEN_UP)
            return await send("[DONE]")
        whole = {"choices": []}
        if not body.get("stream"):
            send = self.gather(whole)
        has_ids = body.get("return_token_ids") if self.is_vllm else not body.get("detokenize", True)
        options, generated, reason = Options(body), [], None
        # A request keeps its adapter, also if that is unloaded meanwhile.
        lora = body.get("model") if body.get("model") in self.controls.adapters else None
        weights = [self.controls.adapters[lora]] if lora else []
        asked = body.get("structured_outputs") or {}
        schema = asked.get("json", {} if asked.get("json_object") else None)
        guide = Guide(guided_text(asked.get("regex"), schema, asked.get("choice")))
        salt = body.get("cache_salt")
        cached = rank.blocks.cached(prompt, salt, lora) if rank else self.cached(prompt)
        if rank:
            await rank.scheduled.enter(len(prompt))
        while reason is None:
            await pace()
            await self.controls.awake()
            if rank:
                rank.blocks.store(prompt + generated, salt, lora)
                rank.scheduled.hold(len(prompt) + len(generated))
            token, ranked = sample(weights + prompt, generated, options, guide)
            kept_away = self.kept_away(body) if len(generated) < body.get("min_tokens", 0) else ()
            if token in kept_away:
                token = next(other for _, other in ranked if other not in kept_away)
            if self.is_vllm and guide.is_inside(generated, token) and token in body.get("stop_token_ids", []):
                await send(GIVEN_UP)
                return await send("[DONE]")
            generated.append(token)
            stops = token in body.get("stop_token_ids", []) or (token == OWN_EOS and not body.get("ignore_eos"))
            reason = "stop" if stops else "length" if len(generated) >= max_tokens else None
            is_kept = self.is_vllm or not stops
            choice = self.choice(body, token, ranked if is_kept else None, reason, has_ids)
            is_named = token != OWN_EOS or body.get("ignore_eos")
            choice["stop_reason"] = token if stops and is_named else None
            if has_ids and not is_kept:
                choice["token_ids"] = []
            await send({"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(generated),
            "completion_tokens": len(generated),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await send({"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m", "choices": [], "usage": usage})
        await send("[DONE]")
        if not body.get("stream"):
            keeps = rank and rank.connector and transfer.get("do_remote_decode")
            whole["choices"][0]["prompt_token_ids"] = prompt
            raise Refused(200, {**whole, "kv_transfer_params": rank.connector.keep(prompt) if keeps else None})

    def kept_away(self, body):
        """The tokens banned until `min_tokens`: for vLLM including the model's own end, ignored or not."""
        return {*body.get("stop_token_ids", []), *([OWN_EOS] if self.is_vllm else [])}

    def gather(self, whole):
        """Combines the streamed events into one answer."""

        async def send(event):
            if event == "[DONE]":
                return
            choices = event["choices"]
            whole.update({**event, "choices": whole["choices"] or choices})
            if choices and whole["choices"] is not choices:
                first, more = whole["choices"][0], choices[0]
                for name in ("text", "token_ids"):
                    first[name] += more[name]
                for name in ("finish_reason", "stop_reason"):
                    first[name] = more[name]

        return send

    def choice(self, body, token, ranked, reason, has_ids):
        choice = {
            "index": 0,
            "text": f" t{token}" if self.is_vllm else "",
            "logprobs": self.logprobs(body, token, ranked) if ranked else None,
            "finish_reason": reason,
            "stop_reason": None,
        }
        if has_ids:
            choice["token_ids"] = [token]
        return choice

    def logprobs(self, body, token, ranked):
        if body.get("logprobs") is None:
            return None

        def name(token):
            return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else f" t{token}"

        chosen = next(logprob for logprob, other in ranked if other == token)
        top = {name(other): logprob for logprob, other in ranked[: body["logprobs"]]}
        top.setdefault(name(token), chosen)
        return {"text_offset": [0], "token_logprobs": [chosen], "tokens": [name(token)], "top_logprobs": [top]}
