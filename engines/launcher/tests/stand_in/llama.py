"""The servers of llama.cpp."""

from api import Api
from model import OWN_EOS, Options, Refused, sample

# Tokens of models/tiny-chat that are parts of characters.
PIECES = {
    97: b"\xa1", 107: b"\xab", 110: b"\xaf", 162: b"\xe3", 225: b"\x80", 226: b"\x81", 227: b"\x82", 244: b"\x93",
    1085: b"\xe3\x81",
}  # fmt: skip


# The error of every running request once all of them have more tokens than their shared cache (b11434).
IS_FULL = {"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}


# Some metrics of llama-server, available with `--metrics`.
METRICS = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt_tokens}
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {processing}
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""


class IsFull(Exception):
    pass


class SharedCache:
    """The tokens of the running requests. If they exceed the cache, all running requests fail."""

    def __init__(self, size):
        self.size, self.held, self.failed = size, {}, set()

    def hold(self, who, tokens):
        if who in self.failed:
            raise IsFull
        self.held[who] = tokens
        if sum(self.held.values()) > self.size:
            self.failed |= set(self.held)
            raise IsFull

    def release(self, who):
        self.held.pop(who, None)
        self.failed.discard(who)


def is_incomplete(text):
    """Whether the text ends inside a character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def rating(token, ranked, count):
    """The model's own probabilities at a position."""
    top = [{"id": other, "token": "", "bytes": [], "logprob": at} for at, other in ranked[:count]]
    chosen = next((logprob for logprob, other in ranked if other == token), -20.0)
    return {"id": token, "token": "", "bytes": [], "logprob": chosen, "top_logprobs": top}


class Llama(Api):
    """llama-server: its own API, and OpenAI's with text. With --say its answers consist of the given tokens."""

    path = ("/completion", "/tokenize", "/apply-template", "/v1/completions", "/v1/chat/completions")

    def __init__(self, context, say, has_metrics):
        super().__init__(context)
        self.has_metrics, self.prompt_tokens = has_metrics, 0
        self.cache = SharedCache(context)
        self.say = [int(token) for token in say.split(",")] if say else []
        self.words = [*self.say, OWN_EOS]

    def get(self, path):
        if path == "/props":
            return {"default_generation_settings": {"n_ctx": self.context}, "total_slots": 4}
        if path == "/metrics" and self.has_metrics:
            return METRICS.format(prompt_tokens=self.prompt_tokens, processing=len(self.cache.held))
        raise Refused(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})

    async def answer(self, path, headers, body, pace, send):
        if path == "/apply-template":
            raise Refused(200, {"prompt": body["messages"][-1]["content"]})
        if path == "/tokenize" and not body.get("with_pieces"):
            raise Refused(200, {"tokens": [100 + len(word) for word in body["content"].split()]})
        if path == "/tokenize":
            raise Refused(200, {"tokens": self.tokenize(body)})
        if path == "/completion":
            who = object()
            if not body["stream"]:
                return self.whole(body)
            try:
                return await self.tokens(who, body, pace, send)
            except IsFull:
                return await send(IS_FULL)
            finally:
                self.cache.release(who)
        if self.say:
            return await self.said(path, body, pace, send)
        return await text_answer(path, body, pace, send, has_usage=True)

    def tokenize(self, body):
        """Tokenizes by the longest pieces first. Pieces that are not text by themselves are bytes."""
        rest, tokens = body["content"].encode(), []
        while rest:
            token, piece = max(PIECES.items(), key=lambda item: len(item[1]) * rest.startswith(item[1]))
            rest = rest.removeprefix(piece)
            tokens.append({"id": token, "piece": list(piece)})
        return tokens

    def place(self, prompt):
        """How much of the repeated --say tokens the prompt ends with."""
        said = self.words * (len(prompt) // len(self.words) + 1)
        return next((size for size in range(len(prompt), 0, -1) if prompt[-size:] == said[:size]), 0)

    def step(self, prompt, generated, options):
        """The next token, its text, and the candidates."""
        if not self.say:
            token, ranked = sample(prompt, generated, options)
            return token, f" t{token}".encode(), ranked
        place = (self.place(prompt) + len(generated)) % len(self.words)
        token = self.words[place]
        return token, PIECES.get(token, b""), [(-0.5, 900), (-1 - place / 16, token)]

    def whole(self, body):
        """An unstreamed answer names every token. It rates those after which the text ends with a whole character."""
        generated, text, rated, options = [], b"", [], Options(body)
        while len(generated) < body["n_predict"] and OWN_EOS not in generated:
            token, piece, ranked = self.step(body["prompt"], generated, options)
            if body.get("grammar") == "root ::= [a-z]":
                token, piece = 74, b"h"
            generated.append(token)
            text += piece
            if body.get("n_probs", 0) > 0 and not is_incomplete(text):
                rated.append(rating(token, ranked, body["n_probs"]))
        answer = {"content": "?", "tokens": generated, "stop": True, "stop_type": "limit"}
        raise Refused(200, {**answer, "completion_probabilities": rated} if rated else answer)

    async def tokens(self, who, body, pace, send):
        prompt, max_tokens = body["prompt"], body.get("n_predict", -1)
        if len(prompt) >= self.context:
            error = {"code": 400, "message": "the request exceeds the context", "type": "exceed_context_size_error"}
            raise Refused(400, {"error": error})
        options, generated, text, reason = Options(body), [], b"", "limit"
        cached = self.cached(prompt)
        timings = {"cache_n": cached, "prompt_n": len(prompt) - cached}
        counts = {"tokens_evaluated": len(prompt)}
        self.prompt_tokens += len(prompt)
        while (max_tokens < 0 or len(generated) < max_tokens) and len(prompt) + len(generated) < self.context:
            self.cache.hold(who, len(prompt) + len(generated))
            await pace()
            token, piece, ranked = self.step(prompt, generated, options)
            generated.append(token)
            text += piece
            if is_incomplete(text):
                # Sends nothing until the character is complete, then all of it with only its last token.
                if token == OWN_EOS:
                    reason = "eos"
                    break
                continue
            counts["tokens_predicted"] = len(generated)
            event = {"index": 0, "content": text.decode(errors="replace"), "tokens": [token], "stop": False, "id_slot": 0, **counts}
            text = b""
            if body.get("timings_per_token"):
                event["timings"] = {**timings, "predicted_n": len(generated)}
            if body.get("n_probs", 0) > 0:
                event["completion_probabilities"] = [rating(token, ranked, body["n_probs"])]
            await send(event)
            if token == OWN_EOS:
                reason = "eos"
                break
        counts["tokens_predicted"] = len(generated)
        timings["predicted_n"] = len(generated)
        end = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": reason, "timings": timings}
        await send({**end, **counts})

    async def said(self, path, body, pace, send):
        """Sends one character per piece, of several tokens. The count includes the end of the sequence."""
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
    """Echoes the words of the prompt."""
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
