"""A tiny model that samples, and the grammars of a few texts."""

import json
import math
import random
import re

VOCABULARY = 1000
CANDIDATES = 24
OWN_EOS = 2


class Refused(Exception):
    def __init__(self, status, body, headers=()):
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers


class Options:
    """The options that the APIs spell differently."""

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


def likeliest(previous):
    return 100 + (previous * 7 + 3) % 17


def end_of(prompt):
    """What the first token depends on: the sum of the prompt, or the last token of a greedy answer at its end."""
    previous = 0
    for token in prompt:
        previous = token if token == likeliest(previous) else (previous + token) % VOCABULARY
    return previous


def raw_logits(prompt, generated, others):
    """The candidates after the last token, with the model's own logits; other tokens have almost no probability."""
    first = likeliest(generated[-1] if generated else end_of(prompt))
    scores = {(first + place * 29) % VOCABULARY: 5 - 0.4 * place for place in range(CANDIDATES)}
    for token in others:
        scores.setdefault(token, -10.0)
    return scores


def logits(prompt, generated, options):
    """The logits after the request's options are applied."""
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
    """The next token, and the model's own log probabilities of all candidates, best first, as vLLM reports them."""
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
    """A text that the grammar allows, for the few grammars of the conformance kit; None without a grammar."""
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
    """Allows only the next token of a text, one per byte, and then its end. After that it masks nothing, like the real ones."""

    def __init__(self, text):
        self.text = text.encode() if text is not None else None

    def next(self, generated):
        if self.text is None or len(generated) > len(self.text):
            return None
        return 100 + self.text[len(generated)] if len(generated) < len(self.text) else OWN_EOS

    def is_inside(self, generated, token):
        """Whether the token belongs to the text."""
        return token != OWN_EOS and self.next(generated) == token

    def is_over(self, generated):
        return self.text is not None and len(generated) > len(self.text)
