"""A server that speaks the documented and recorded shape of vLLM, SGLang, TensorRT-LLM or llama.cpp, with a tiny model that samples.

For the launcher's tests only: python3 stand_in.py API [--fault NAME] [--report PORT] [...the launcher's own flags]
"""

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import struct
import sys
import time

VOCABULARY = 1000
CANDIDATES = 24
CONTEXT = 256
OWN_EOS = 2

# Tokens of models/tiny-chat that are parts of characters.
PIECES = {
    97: b"\xa1", 107: b"\xab", 110: b"\xaf", 162: b"\xe3", 225: b"\x80", 226: b"\x81", 227: b"\x82", 244: b"\x93",
    1085: b"\xe3\x81",
}  # fmt: skip
# `vllm:cache_config_info` of vLLM 0.32.0, shortened: a line for each rank, with the blocks of all of them.
VLLM_METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
"""
VLLM_CACHE = """vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",enable_prefix_caching="True",engine="{rank}",\
num_gpu_blocks="{blocks}",prefix_caching_hash_algo="sha256"}} 1.0
"""
VLLM_BLOCKS = 2048

TRTLLM_FIELDS = set(
    "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens "
    "skip_special_tokens detokenize add_special_tokens response_format priority".split()
)


# Where each server reads its key; TensorRT-LLM has none.
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "llama": "LLAMA_API_KEY", "llama_cpp.server": "API_KEY"}


def api_key(args):
    """The key that requests must carry. A server without one, or with one that everybody can read, does not start."""
    if args.api == "trtllm":
        return None
    if args.api == "sglang":
        assert os.stat(args.config).st_mode & 0o077 == 0
        with open(args.config) as file:
            key = re.fullmatch(r'api-key: "(\w+)"\n', file.read())[1]
    else:
        key = os.environ[KEY_VARIABLES[args.api]]
    assert len(key) >= 32 and not any(key in word for word in sys.argv)
    return key


# What vLLM 0.32.0 answers once its EngineCore was killed; it ends by itself seconds later, and until then is not healthy.
DEAD_INSIDE = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


# What vLLM 0.32.0 streams in place of an answer whose KV blocks it could not fetch.
FETCH_FAILED = {
    "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
}


class Refused(Exception):
    def __init__(self, status, body, headers=()):
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers


class Options:
    """What the APIs spell in their own ways."""

    def __init__(self, body):
        self.temperature = body.get("temperature", 1.0)
        self.top_p = body.get("top_p", 1.0)
        self.top_k = body.get("top_k", 0)
        self.min_p = body.get("min_p", 0.0)
        self.presence = body.get("presence_penalty", 0.0)
        self.frequency = body.get("frequency_penalty", 0.0)
        self.repetition = body.get("repetition_penalty", body.get("repeat_penalty", 1.0))
        bias = body.get("logit_bias") or {}
        pairs = bias.items() if isinstance(bias, dict) else bias
        self.bias = {int(token): value for token, value in pairs}
        self.random = random.Random(body.get("seed"))


def raw_logits(prompt, generated, others):
    """The candidates after the last token, each with the model's own logit; others have hardly any chance."""
    previous = generated[-1] if generated else sum(prompt) % VOCABULARY
    first = 100 + (previous * 7 + 3) % 17
    scores = {(first + place * 29) % VOCABULARY: 5 - 0.4 * place for place in range(CANDIDATES)}
    for token in others:
        scores.setdefault(token, -10.0)
    return scores


def logits(prompt, generated, options):
    """As the options of the request make them."""
    scores = raw_logits(prompt, generated, options.bias)
    for token in list(scores):
        score = scores[token]
        if options.repetition != 1.0 and (token in generated or token in prompt):
            score = score / options.repetition if score > 0 else score * options.repetition
        count = generated.count(token)
        score -= options.frequency * count + options.presence * (count > 0)
        scores[token] = score + options.bias.get(token, 0.0)
    return scores


def ranking(scores):
    """Tokens with their log probabilities, best first."""
    highest = max(scores.values())
    total = math.log(sum(math.exp(score - highest) for score in scores.values())) + highest
    return sorted(((score - total, token) for token, score in scores.items()), key=lambda pair: (-pair[0], pair[1]))


def sample(prompt, generated, options, guide=None):
    """The next token, and the log probabilities of all candidates, best first: the model's own, as vLLM tells them."""
    scores = logits(prompt, generated, options)
    if guide and guide.next(generated) is not None:
        scores = {guide.next(generated): 0.0}
    ranked = ranking(scores)
    token = ranked[0][1]
    if options.temperature > 0 and options.top_k != 1:
        kept = ranked[: options.top_k] if options.top_k > 0 else ranked
        heat = max(options.temperature, 1e-4)
        weights = [math.exp((logprob - kept[0][0]) / heat) for logprob, _ in kept]
        kept_weights, mass = [], sum(weights)
        reached = 0.0
        for weight in weights:
            if kept_weights and (reached >= options.top_p or weight < options.min_p * weights[0]):
                break
            kept_weights.append(weight)
            reached += weight / mass
        token = options.random.choices([token for _, token in kept[: len(kept_weights)]], kept_weights)[0]
    return token, ranking(raw_logits(prompt, generated, scores))


def guided_text(regex=None, schema=None, choice=None):
    """A text of the language, for the few that the conformance kit asks for; None where there is none to follow."""
    if choice is not None:
        return choice[0]
    if schema is not None:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if schema.get("type", "object") not in ("object", "string", "integer", "array", "boolean", "null"):
            raise bad_request(f"there is no type {schema['type']}")
        return json.dumps(schema.get("const", {}))
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise bad_request(f"bad regex: {error}") from error
        digits = re.fullmatch(r"\[0-9\]\{(\d+)\}", regex)
        if digits:
            return "0" * int(digits[1])
        return re.sub(r"\\(.)", r"\1", regex.strip("()").split("|")[0])
    return None


def bad_request(message):
    return Refused(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})


class Guide:
    """Says the next token of a text, a byte each, and its end; after that it masks nothing, as the real ones do."""

    def __init__(self, text):
        self.text = text.encode() if text is not None else None

    def next(self, generated):
        if self.text is None or len(generated) > len(self.text):
            return None
        return 100 + self.text[len(generated)] if len(generated) < len(self.text) else OWN_EOS

    def is_over(self, generated):
        return self.text is not None and len(generated) > len(self.text)


class Api:
    health = "/health"

    def __init__(self, context):
        self.context = context
        self.seen = []

    def cached(self, prompt):
        """The tokens of a prompt that are said to be cached: half of one that came before."""
        is_known = prompt in self.seen
        self.seen.append(prompt)
        return len(prompt) // 2 if is_known else 0

    def get(self, path):
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "stand-in", "max_model_len": self.context}]}
        raise Refused(404, {"detail": "Not Found"})

    def check(self, prompt, max_tokens):
        if len(prompt) + (max_tokens or 0) > self.context:
            message = f"{len(prompt)} and {max_tokens} tokens are more than the context of {self.context}"
            raise Refused(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})


def pack(value):
    """A value as MessagePack."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        return b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, str):
        return b"\xdb" + len(value.encode()).to_bytes(4, "big") + value.encode()
    if isinstance(value, dict):
        return b"\xdf" + len(value).to_bytes(4, "big") + b"".join(pack(key) + pack(value[key]) for key in value)
    return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(map(pack, value))


class Socket:
    """A socket of ZeroMQ that others connect to (ZMTP 3.0, no security)."""

    def __init__(self, kind, path, answer=None):
        self.kind, self.path, self.answer, self.peers = kind, path, answer, set()

    async def listen(self):
        await asyncio.start_unix_server(self.meet, self.path)

    def send(self, writer, parts):
        for place, part in enumerate(parts):
            more = place + 1 < len(parts)
            writer.write(bytes([2 | more]) + len(part).to_bytes(8, "big") + part)

    async def meet(self, reader, writer):
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0"))
        ready = b"\x05READY\x0bSocket-Type" + len(self.kind).to_bytes(4, "big") + self.kind
        writer.write(bytes([4, len(ready)]) + ready)
        parts = []
        try:
            await reader.readexactly(64)
            while True:
                flags = (await reader.readexactly(1))[0]
                size = int.from_bytes(await reader.readexactly(8 if flags & 2 else 1), "big")
                part = await reader.readexactly(size)
                self.peers.add(writer)
                if flags & 4:
                    continue
                parts.append(part)
                if not flags & 1:
                    if self.answer:
                        self.answer(writer, parts)
                    parts = []
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.peers.discard(writer)
            writer.close()


class Blocks:
    """The prefix cache of a rank of vLLM 0.32.0, which is never full here, and its KV events as they were seen."""

    def __init__(self, rank, size, config):
        self.rank, self.size, self.known, self.sent = rank, size, set(), []
        self.sockets = []
        if config.get("enable_kv_cache_events"):
            paths = [self.path(config[name]) for name in ("endpoint", "replay_endpoint")]
            self.sockets = [Socket(b"PUB", paths[0]), Socket(b"ROUTER", paths[1], self.replay)]

    def path(self, endpoint):
        """Ranks have sockets of their own."""
        assert endpoint.startswith("ipc://")
        if self.rank == 0:
            return endpoint[6:]
        if "inproc" not in endpoint:
            raise ValueError("Invalid endpoint: must contain 'inproc' or 'tcp'")
        return f"{endpoint[6:]}_dp{self.rank}"

    def replay(self, writer, parts):
        start = int.from_bytes(parts[1], "big")
        for number, payload in enumerate(self.sent[start:], start):
            self.sockets[1].send(writer, [b"", b"", number.to_bytes(8, "big"), payload])
        self.sockets[1].send(writer, [b"", b"", b"\xff" * 8, b""])

    def publish(self, events):
        payload = pack([time.time(), events, self.rank])
        for writer in self.sockets[0].peers if self.sockets else ():
            self.sockets[0].send(writer, [b"", len(self.sent).to_bytes(8, "big"), payload])
        self.sent.append(payload)

    def chain(self, tokens, salt):
        """The hashes of the full blocks."""
        hashes, before = [], str(salt)
        for start in range(0, len(tokens) - self.size + 1, self.size):
            digest = hashlib.sha256(f"{before} {tokens[start : start + self.size]}".encode()).digest()
            before = int.from_bytes(digest[-8:], "big")
            hashes.append(before)
        return hashes

    def cached(self, tokens, salt):
        """How many tokens are there. One is always computed."""
        chain = self.chain(tokens[:-1], salt)
        return self.size * next((place for place, block in enumerate(chain) if block not in self.known), len(chain))

    def store(self, tokens, salt):
        chain = self.chain(tokens, salt)
        first = next((place for place, block in enumerate(chain) if block not in self.known), len(chain))
        if first == len(chain):
            return
        self.known.update(chain)
        salted = [[salt]] if salt and first == 0 else []
        stored = {
            "type": "BlockStored",
            "block_hashes": chain[first:],
            "parent_block_hash": chain[first - 1] if first else None,
            "token_ids": tokens[first * self.size : len(chain) * self.size],
            "block_size": self.size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": salted + [None] * (len(chain) - first - len(salted)),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self.publish([stored])


class Connector:
    """What NixlConnector says, seen at vLLM 0.32.0; its blocks are a name, which is fetched once over a side channel."""

    def __init__(self, config, fault, rank):
        self.role, self.fault = json.loads(config)["kv_role"], fault
        self.host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        self.port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) + rank
        self.kept = set()

    async def listen(self):
        await asyncio.start_server(self.give, self.host, self.port)

    async def give(self, reader, writer):
        name = (await reader.readline()).decode().strip()
        if name in self.kept:
            self.kept.remove(name)
            writer.write(b"blocks\n")
        writer.close()

    def keep(self, prompt):
        """What the answer to a prefill says of its blocks."""
        if self.role == "kv_consumer" or self.fault == "no-params":
            return None
        name = f"cmpl-{random.getrandbits(64):016x}-0-{random.getrandbits(32):08x}"
        self.kept.add(name)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 2 + len(prompt) // 128))],
            "remote_engine_id": "d75fd860-0000-4000-8000-000000000000",
            "remote_request_id": name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    async def fetch(self, params):
        """Whether the blocks came."""
        if self.fault == "fetch-fails":
            return False
        try:
            reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        except OSError:
            return False
        writer.write(params["remote_request_id"].encode() + b"\n")
        answer = await reader.readline()
        writer.close()
        return answer == b"blocks\n"


class Rank:
    """A data-parallel rank of vLLM."""

    def __init__(self, number, args):
        self.blocks = Blocks(number, args.block_size, json.loads(args.kv_events_config))
        config = args.kv_transfer_config
        self.connector = Connector(config, args.fault, number) if config else None

    async def listen(self):
        for socket in self.blocks.sockets:
            await socket.listen()
        if self.connector:
            await self.connector.listen()


class Completions(Api):
    """vLLM and TensorRT-LLM."""

    path = "/v1/completions"

    def __init__(self, context, ranks=()):
        super().__init__(context)
        self.is_vllm, self.ranks, self.turn = bool(ranks), ranks, 0

    def rank_of(self, headers):
        """The rank that the request names, else the next one."""
        named = headers.get("x-data-parallel-rank", "")
        if not re.fullmatch(r"-?\d+", named):
            self.turn += 1
            return self.turn % len(self.ranks)
        if not 0 <= int(named) < len(self.ranks):
            raise bad_request(f"data_parallel_rank {named} is out of range [0, {len(self.ranks)}).")
        return int(named)

    def get(self, path):
        if path == "/metrics" and self.is_vllm:
            blocks = VLLM_BLOCKS * len(self.ranks)
            size = self.ranks[0].blocks.size
            lines = [VLLM_CACHE.format(rank=rank, size=size, blocks=blocks) for rank in range(len(self.ranks))]
            return VLLM_METRICS + "".join(lines)
        models = super().get(path)
        if not self.is_vllm:
            del models["data"][0]["max_model_len"]
        return models

    async def answer(self, path, headers, body, pace, send):
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
            await send(FETCH_FAILED)
            return await send("[DONE]")
        whole = {"choices": []}
        if not body.get("stream"):
            send = self.gather(whole)
        has_ids = body.get("return_token_ids") if self.is_vllm else not body.get("detokenize", True)
        options, generated, reason = Options(body), [], None
        asked = body.get("structured_outputs") or {}
        schema = asked.get("json", {} if asked.get("json_object") else None)
        guide = Guide(guided_text(asked.get("regex"), schema, asked.get("choice")))
        salt = body.get("cache_salt")
        cached = rank.blocks.cached(prompt, salt) if rank else self.cached(prompt)
        while reason is None:
            await pace()
            if rank:
                rank.blocks.store(prompt + generated, salt)
            token, ranked = sample(prompt, generated, options, guide)
            is_early = len(generated) < body.get("min_tokens", 0)
            if token in body.get("stop_token_ids", []) and is_early:
                token = next(other for _, other in ranked if other not in body["stop_token_ids"])
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

    def gather(self, whole):
        """Puts what would be streamed into one answer."""

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


def is_incomplete(text):
    """Whether the text ends inside a character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


class Llama(Api):
    """llama-server: its own API and OpenAI's with text. With --say its answers are these tokens."""

    path = ("/completion", "/tokenize", "/v1/completions", "/v1/chat/completions")

    def __init__(self, context, say):
        super().__init__(context)
        self.say = [int(token) for token in say.split(",")] if say else []

    def get(self, path):
        if path == "/props":
            return {"default_generation_settings": {"n_ctx": self.context}, "total_slots": 4}
        raise Refused(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})

    async def answer(self, path, headers, body, pace, send):
        if path == "/tokenize":
            raise Refused(200, {"tokens": self.tokenize(body)})
        if path == "/completion":
            return await self.tokens(body, pace, send)
        if self.say:
            return await self.said(path, body, pace, send)
        return await text_answer(path, body, pace, send, has_usage=True)

    def tokenize(self, body):
        """The longest pieces first; what is no text by itself is given as bytes."""
        rest, tokens = body["content"].encode(), []
        while rest:
            token, piece = max(PIECES.items(), key=lambda item: len(item[1]) * rest.startswith(item[1]))
            rest = rest.removeprefix(piece)
            tokens.append({"id": token, "piece": list(piece)})
        return tokens if body["with_pieces"] else [token["id"] for token in tokens]

    def step(self, prompt, generated, options):
        """The next token, its text, and the candidates."""
        if not self.say:
            token, ranked = sample(prompt, generated, options)
            return token, f" t{token}".encode(), ranked
        token = [*self.say, OWN_EOS][len(generated)]
        return token, PIECES.get(token, b""), [(0.0, token)]

    async def tokens(self, body, pace, send):
        prompt, max_tokens = body["prompt"], body.get("n_predict", -1)
        if len(prompt) >= self.context:
            error = {"code": 400, "message": "the request exceeds the context", "type": "exceed_context_size_error"}
            raise Refused(400, {"error": error})
        options, generated, text, reason = Options(body), [], b"", "limit"
        cached = self.cached(prompt)
        timings = {"cache_n": cached, "prompt_n": len(prompt) - cached}
        counts = {"tokens_evaluated": len(prompt)}
        while (max_tokens < 0 or len(generated) < max_tokens) and len(prompt) + len(generated) < self.context:
            await pace()
            token, piece, ranked = self.step(prompt, generated, options)
            generated.append(token)
            text += piece
            if is_incomplete(text):
                # Nothing is sent, and then the whole character with its last token alone.
                if self.say and token == OWN_EOS:
                    reason = "eos"
                    break
                continue
            counts["tokens_predicted"] = len(generated)
            event = {"index": 0, "content": text.decode(), "tokens": [token], "stop": False, "id_slot": 0, **counts}
            text = b""
            if body.get("timings_per_token"):
                event["timings"] = {**timings, "predicted_n": len(generated)}
            if body.get("n_probs", 0) > 0:
                top = [{"id": other, "token": "", "bytes": [], "logprob": at} for at, other in ranked[: body["n_probs"]]]
                chosen = next(logprob for logprob, other in ranked if other == token)
                event["completion_probabilities"] = [{"id": token, "token": "", "logprob": chosen, "top_logprobs": top}]
            await send(event)
            if self.say and token == OWN_EOS:
                reason = "eos"
                break
        counts["tokens_predicted"] = len(generated)
        timings["predicted_n"] = len(generated)
        end = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": reason, "timings": timings}
        await send({**end, **counts})

    async def said(self, path, body, pace, send):
        """A character a piece, of several tokens; the end of the sequence is counted too."""
        is_chat, text, generated, timings = path == "/v1/chat/completions", b"", 0, {"prompt_n": 3, "cache_n": 2}
        for token in self.say:
            await pace()
            generated += 1
            text += PIECES[token]
            if is_incomplete(text):
                continue
            choice = {"index": 0, "finish_reason": None, "logprobs": None}
            choice.update({"delta": {"content": text.decode()}} if is_chat else {"text": text.decode()})
            event = {"id": "1", "choices": [choice]}
            if body.get("timings_per_token"):
                event["timings"] = {**timings, "predicted_n": generated}
            await send(event)
            text = b""
        usage = {"completion_tokens": generated + 1, "prompt_tokens": 5, "total_tokens": generated + 6}
        timings["predicted_n"] = generated + 1
        last = {"index": 0, "finish_reason": "stop"}
        if is_chat:
            await send({"id": "1", "choices": [{**last, "delta": {}}]})
            await send({"id": "1", "choices": [], "usage": usage, "timings": timings})
        else:
            await send({"id": "1", "choices": [{**last, "text": ""}], "usage": usage, "timings": timings})
        await send("[DONE]")


class LlamaCppPython(Api):
    health = "/openapi.json"
    path = ("/v1/completions", "/v1/chat/completions", "/extras/tokenize/count")

    async def answer(self, path, headers, body, pace, send):
        if path == "/extras/tokenize/count":
            raise Refused(200, {"count": len(body["input"].split())})
        return await text_answer(path, body, pace, send, has_usage=False)


async def text_answer(path, body, pace, send, has_usage):
    """Gives the words back."""
    is_chat = path == "/v1/chat/completions"
    text = body["messages"][-1]["content"] if is_chat else body["prompt"]
    words, limit = text.split(" "), body.get("max_tokens")
    for place, word in enumerate(words[:limit]):
        await pace()
        piece = word if place == 0 else f" {word}"
        choice = {"index": 0, "finish_reason": None, "logprobs": None}
        choice.update({"delta": {"content": piece}} if is_chat else {"text": piece})
        await send({"id": "1", "choices": [choice]})
    reason = "length" if limit is not None and limit < len(words) else "stop"
    last = {"index": 0, "finish_reason": reason}
    last.update({"delta": {}} if is_chat else {"text": ""})
    await send({"id": "1", "choices": [last]})
    if has_usage:
        await send({"id": "1", "choices": [], "usage": {"prompt_tokens": len(words), "completion_tokens": len(words[:limit])}})
    await send("[DONE]")


class Stand:
    def __init__(self, args, api):
        self.args, self.api, self.key = args, api, api_key(args)
        self.healthy_at = time.monotonic() + args.slow_start
        self.report = None
        self.requests = 0
        self.is_dead_inside = False

    async def run(self):
        if self.args.report:
            _, self.report = await asyncio.open_connection("127.0.0.1", self.args.report)
            self.say("pid", os.getpid())
            side_channel = {name: value for name, value in os.environ.items() if name.startswith("VLLM_NIXL_")}
            self.say("start", {"args": sys.argv[1:], "env": side_channel})
        for rank in getattr(self.api, "ranks", ()):
            await rank.listen()
        server = await asyncio.start_server(self.serve, "127.0.0.1", self.args.port, limit=1 << 24)
        print("INFO: listening", flush=True)
        async with server:
            await server.serve_forever()

    def say(self, what, value=None):
        if self.report:
            self.report.write(json.dumps({what: value}).encode() + b"\n")

    async def serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.dispatch(method, path, headers, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def dispatch(self, method, path, headers, body, reader, writer):
        try:
            if path == self.api.health:
                is_up = time.monotonic() >= self.healthy_at and self.args.fault != "never-healthy"
                if self.args.fault == "hang" and self.requests > 0:
                    await asyncio.Event().wait()
                is_up = is_up and not self.is_dead_inside
                return respond(writer, 200 if is_up else 503, {"status": "ok" if is_up else "loading"})
            if self.key and headers.get("authorization") != f"bearer {self.key}":
                raise Refused(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
            if method == "GET":
                return respond(writer, 200, self.api.get(path))
            known = self.api.path
            if path not in ([known] if isinstance(known, str) else known):
                raise Refused(404, {"detail": "Not Found"})
            self.requests += 1
            self.say("request", {"path": path, "headers": headers, "body": json.loads(body)})
            await self.stream(path, headers, json.loads(body), reader, writer)
        except Refused as refused:
            respond(writer, refused.status, refused.body, refused.headers)

    async def stream(self, path, headers, body, reader, writer):
        fault = self.args.fault
        if fault and fault.startswith("status-"):
            message = {"error": {"message": "no", "type": "x", "code": None}}
            raise Refused(int(fault[7:]), message, [("retry-after", "7")])
        if self.is_dead_inside:
            raise Refused(500, DEAD_INSIDE)
        begun = False
        sent = 0

        async def pace():
            await asyncio.sleep(self.args.delay)
            if fault == "exit" and sent == 3:
                print("ERROR: the device is gone", file=sys.stderr, flush=True)
                os._exit(7)

        def chunk(data):
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        async def send(event):
            nonlocal begun, sent
            if not begun:
                begun = True
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}\n\n".encode()
            sent += 1
            if fault == "garbage" and sent == 3:
                data = b"data: {\"choices\": [{]\n\n"
            elif fault == "half" and sent == 3:
                chunk(data[: len(data) // 2])
                writer.write(b"0\r\n\r\n")
                raise ConnectionError
            elif fault == "early-end" and sent == 3:
                writer.write(b"0\r\n\r\n")
                raise ConnectionError
            elif fault == "error-event" and sent == 3:
                data = b'data: {"error": {"message": "out of blocks", "type": "x", "code": 503}}\n\n'
            elif fault == "dies-inside" and sent == 3:
                self.is_dead_inside = True
                data = f"data: {json.dumps(DEAD_INSIDE)}\n\n".encode()
            elif fault == "odd-token" and sent == 3:
                data = data.replace(b'_ids": [', b'_ids": [5000, ', 1)
            if fault == "split":
                for byte in data:
                    chunk(bytes([byte]))
                    await asyncio.sleep(0)
            else:
                chunk(data)
            await writer.drain()

        work = asyncio.ensure_future(self.api.answer(path, headers, body, pace, send))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            self.say("cancelled", sent)
            return
        work.result()
        writer.write(b"0\r\n\r\n")
        self.say("finished", sent)


def respond(writer, status, body, headers=()):
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("api")
    parser.add_argument("--fault")
    parser.add_argument("--report", type=int)
    parser.add_argument("--delay", type=float, default=0.001)
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--say")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--port", type=int)
    parser.add_argument("--config")
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--kv-events-config", default="{}")
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--dp-size", type=int, default=1)
    args, _ = parser.parse_known_args()
    for step in range(3):
        print(f"INFO: loading shard {step + 1} of 3", file=sys.stderr, flush=True)
    if args.fault == "exit-at-start":
        print("ERROR: no GPU here", file=sys.stderr, flush=True)
        sys.exit(3)
    apis = {
        "vllm": lambda: Completions(args.context, [Rank(number, args) for number in range(args.data_parallel_size)]),
        "trtllm": lambda: Completions(args.context),
        "sglang": lambda: Sglang(args.context, args.incremental, args.dp_size),
        "llama": lambda: Llama(args.context, args.say),
        "llama_cpp.server": lambda: LlamaCppPython(args.context),
    }
    asyncio.run(Stand(args, apis[args.api]()).run())


if __name__ == "__main__":
    main()
