"""Questions to a server through Genset; the name of each question is a row of the table.

An answer is compared with known results of the model, or with the server's direct answer.
"""

import json
import os

from genset import Beside, Refused, ask, wait_until

QUESTIONS = []

# The length of an answer to cut, cancel or kill.
LONG = 400


def question(name):
    def add(function):
        QUESTIONS.append((name, function))
        return function

    return add


class Asking:
    """A Genset and the server behind it."""

    def __init__(self, kind, genset):
        self.kind, self.genset = kind, genset
        _, self.port, self.key = genset.server()
        # Adapters are listed as models with a parent.
        [self.model] = [model["id"] for model in genset.ask("/v1/models")["data"] if not model.get("parent")]
        with open(os.path.join(kind.args.model, "golden.json")) as file:
            self.golden = json.load(file)["cases"]

    def chat(self, text="Tell me a story about the sea.", **more):
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 32, **more}

    def answers(self, *text, **more):
        answer = self.genset.ask("/v1/chat/completions", self.chat(*text, **more))
        return [choice["message"]["content"] for choice in answer["choices"]]

    def answer(self, *text, **more):
        [answer] = self.answers(*text, **more)
        return answer

    def complete(self, prompt, **more):
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 16, **more}
        return self.genset.ask("/v1/completions", body)

    def long(self):
        return self.genset.stream("/v1/chat/completions", self.chat(ignore_eos=True, max_tokens=LONG))

    def ids(self, text):
        return self.genset.ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})["tokens"]

    def is_refused(self, status, code, body):
        """Asserts that a chat is refused with this error."""
        try:
            self.genset.ask("/v1/chat/completions", self.chat(**body))
        except Refused as refused:
            assert (refused.status, refused.kind) == (status, code or refused.kind), refused
            return
        raise AssertionError(f"{body} was not refused")

    def running(self):
        return self.kind.running(self.port, self.key)


@question("a chat, and the same streamed with usage")
def chat(on):
    whole = on.genset.ask("/v1/chat/completions", on.chat("What is the capital of France?"))
    text, usage = "", None
    body = on.chat("What is the capital of France?", stream_options={"include_usage": True})
    for event in on.genset.stream("/v1/chat/completions", body):
        if event == "[DONE]":
            break
        usage = event.get("usage") or usage
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    assert text == whole["choices"][0]["message"]["content"] == "The capital of France is Paris.", (text, whole)
    counts = ("prompt_tokens", "completion_tokens")
    assert [usage[count] for count in counts] == [whole["usage"][count] for count in counts], (usage, whole["usage"])
    assert usage["prompt_tokens"] > 0, usage


@question("58 golden answers, emoji and Japanese among them")
def golden(on):
    wrong = [(case, got) for case in on.golden if (got := on.answer(case["messages"], max_tokens=128)) != case["answer"]]
    assert len(on.golden) == 58 and not wrong, wrong


@question("the server's own answers")
def own_answers(on):
    for case in on.golden[:35]:
        ids = on.ids(case["messages"][-1]["content"])
        ours = on.complete(ids)["choices"][0]["text"]
        theirs = on.kind.text(on.port, on.key, ids, 16)
        assert ours == theirs, (case, ours, theirs)


@question("completions by token ids, two in one")
def two_in_one(on):
    prompts = [on.ids("The capital of France"), on.ids("Once upon a time")]
    both = [choice["text"] for choice in on.complete(prompts)["choices"]]
    assert both == [on.complete(prompt)["choices"][0]["text"] for prompt in prompts], both


@question("n = 3, and n = 2 streamed")
def several(on):
    three = on.answers(n=3, temperature=1)
    assert len(three) == 3, three
    seen = {0: "", 1: ""}
    for event in on.genset.stream("/v1/chat/completions", on.chat(n=2)):
        for choice in () if event == "[DONE]" else event["choices"]:
            seen[choice["index"]] += choice["delta"].get("content") or ""
    assert seen[0] == seen[1] == on.answer(), seen


@question("stop strings, across tokens too")
def stop(on):
    whole = on.answer("What is the capital of France?")
    for place in range(4, 12):
        cut = on.answer("What is the capital of France?", stop=[whole[place : place + 3]])
        assert cut == whole[: whole.index(whole[place : place + 3])], (place, cut)


@question("stop_token_ids")
def stop_tokens(on):
    prompt = on.ids("The capital of France")
    body = {"logprobs": 1, "ignore_eos": True, "max_tokens": 8, "stop_token_ids": on.ids(" Paris")[-1:]}
    # Whatever the answer is, its third token ends it.
    tokens = on.genset.ask("/tokenize", {"model": on.model, "prompt": on.complete(prompt)["choices"][0]["text"]})["tokens"]
    body["stop_token_ids"] = [tokens[2]]
    choice = on.complete(prompt, **body)["choices"][0]
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["tokens"]) <= 2, choice


@question("log probabilities equal the server's")
def logprobs(on):
    for text in ("The capital of France", "Once upon a time", "Hello"):
        ids = on.ids(text)
        choice = on.complete(ids, logprobs=5, max_tokens=1)["choices"][0]
        theirs = on.kind.logprob(on.port, on.key, ids)
        assert abs(choice["logprobs"]["token_logprobs"][0] - theirs) < 0.01, (choice, theirs)
        assert len(choice["logprobs"]["top_logprobs"][0]) == 5, choice


@question("seed")
def seed(on):
    draw = lambda seed: on.answer("zebra lamp quiet", temperature=2, seed=seed, max_tokens=24)
    for number in (7, 2**63 - 1):
        assert draw(number) == draw(number), number
    assert len({draw(number) for number in range(4)}) > 1, "every seed gives the same answer"


@question("an answer that is a JSON object")
def json_object(on):
    bound = on.answer(response_format={"type": "json_object"}, max_tokens=64)
    assert bound.lstrip().startswith("{"), bound


@question("an answer of a JSON schema")
def json_schema(on):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    bound = on.answer(response_format=form, max_tokens=64)
    if on.kind.ends_json or bound.strip().endswith("}"):
        assert json.loads(bound)["n"] in (1, 2), bound
    else:
        # The server allows endless white space by default.
        assert "".join(bound.split()) in ("{", '{"', '{"n', '{"n"', '{"n":', '{"n":1', '{"n":2'), bound


@question("an answer that is one of a choice")
def choice(on):
    assert on.answer(guided_choice=["red", "green"]) in ("red", "green")
    assert on.answer(guided_choice=["red", "green"], ignore_eos=True, max_tokens=16) in ("red", "green")


@question("a grammar that is none is a 400")
def bad_grammar(on):
    schema = {"type": "no such type"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    on.is_refused(400, None, {"response_format": form})


@question("guided_regex")
def regex(on):
    bound = on.answer(guided_regex="[0-9]{4}")
    assert len(bound) == 4 and bound.isdigit(), bound
    on.is_refused(400, None, {"guided_regex": "([0-9"})


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@question("a tool that must be called")
def tool(on):
    for must in ("required", {"type": "function", "function": {"name": "look"}}):
        body = on.chat(tools=TOOLS, tool_choice=must, max_tokens=128)
        message = on.genset.ask("/v1/chat/completions", body)["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"], message


@question("a tool that may be called is refused without a parser")
def auto_tool(on):
    on.is_refused(400, None, {"tools": TOOLS})


@question("min_tokens")
def min_tokens(on):
    answer = on.genset.ask("/v1/chat/completions", on.chat("Hello", min_tokens=40, max_tokens=60))
    assert answer["usage"]["completion_tokens"] >= 40, answer


@question("ignore_eos")
def ignore_eos(on):
    answer = on.genset.ask("/v1/chat/completions", on.chat("Hello", ignore_eos=True, max_tokens=50))
    assert answer["usage"]["completion_tokens"] == 50, answer
    assert answer["choices"][0]["finish_reason"] == "length", answer


@question("logit_bias and the other sampling options")
def sampling(on):
    if on.kind.has_tokens:
        [wanted] = on.ids("x")
        assert on.answer(logit_bias={str(wanted): 100}, max_tokens=3) == "xxx"
        assert "x" not in on.answer(logit_bias={str(wanted): -100})
    options = {"top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert on.answer(temperature=1, repetition_penalty=1.1, **options)
    # No number in a request may crash a server.
    assert on.answer(top_k=2**32 - 1)


@question("a client that hangs up leaves nothing running")
def hang_up(on):
    stream = on.long()
    next(iter(stream))
    wait_until(30, "a running request", on.running)
    stream.hang_up()
    return wait_until(30, "the end of what runs for nobody", lambda: on.running() == 0)[1]


@question("a prompt over the context")
def over_context(on):
    on.is_refused(400, "context_length_exceeded", {"messages": [{"role": "user", "content": "sea " * 4000}]})


@question("a prompt of the whole context")
def whole_context(on):
    limit = on.genset.ask(f"/v1/models/{on.model}")["max_model_len"]
    choice = on.complete([300] * (limit - 1), max_tokens=1, ignore_eos=True)["choices"][0]
    assert choice["finish_reason"] == "length", choice
    try:
        on.complete([300] * limit, max_tokens=1)
    except Refused as refused:
        assert refused.kind == "context_length_exceeded", refused
    else:
        raise AssertionError("a prompt of the whole context leaves no room, and was not refused")


@question("16 streams at once")
def at_once(on):
    alone = on.answer()

    def one():
        text = ""
        for event in on.genset.stream("/v1/chat/completions", on.chat()):
            text += "" if event == "[DONE]" else "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return text

    texts = [beside.result() for beside in [Beside(one) for _ in range(16)]]
    # Results may depend on the rest of the batch.
    assert all(texts) and texts.count(alone) >= 8, (alone, texts)


@question("four long answers at once")
def long_answers(on):
    # Together they exceed the context of one.
    streams = [on.genset.stream("/v1/chat/completions", on.chat("sea " * 300, ignore_eos=True, max_tokens=300)) for _ in range(4)]
    lasts = [list(stream)[-1] for stream in streams]
    assert lasts == ["[DONE]"] * 4, lasts


@question("a token id outside the vocabulary")
def no_token(on):
    for id in (2048, 2**31):
        try:
            on.complete([1, id])
        except Refused as refused:
            assert refused.status == 400, refused
        else:
            raise AssertionError(f"token {id} was not refused")


@question("the server answers nobody without its key")
def its_key(on):
    try:
        ask(on.port, "/v1/completions", {"prompt": "Hello", "max_tokens": 1})
    except Refused as refused:
        assert refused.status == 401, refused
    else:
        raise AssertionError("it answered")
