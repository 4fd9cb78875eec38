"""Chats with images: a small Qwen2-VL behind Genset, compared with the results of `transformers`."""

import json
import os
import subprocess

from genset import Beside, Refused

# The tolerance of log probabilities between two engines.
NEAR = 0.01
# The arguments of its Genset: with tools, the parser of their calls is required.
WORDS = ("--tool-parser", "hermes")
# Questions, in order.
QUESTIONS = []


def question(name):
    def add(function):
        QUESTIONS.append((name, function))
        return function

    return add


def model(kind):
    """The folder of the model, created with the server's own libraries."""
    folder = os.path.join(kind.args.out, "images")
    if not os.path.exists(os.path.join(folder, "computed.json")):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "image_model.py")
        python = os.path.join(kind.args.bin, "python3")
        subprocess.run([python, "-B", script, kind.args.model, folder], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


class Seen:
    """The images, and how to ask about one."""

    def __init__(self, kind, genset):
        self.kind, self.genset = kind, genset
        with open(os.path.join(model(kind), "computed.json")) as file:
            self.expected = json.load(file)
        self.images = self.expected["images"]

    def body(self, url, **more):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": self.expected["question"]}]
        return {"model": "images", "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 16, **more}

    def ask(self, url, **more):
        return self.genset.ask("/v1/chat/completions", self.body(url, **more))

    def text(self, url, **more):
        return self.ask(url, **more)["choices"][0]["message"]["content"]


@question("two images, as transformers computes them")
def as_computed(seen):
    for image in seen.images:
        answer = seen.ask(image["url"], max_tokens=1, **({"logprobs": True} if seen.kind.rates_chats else {}))
        assert answer["usage"]["prompt_tokens"] == image["prompt_tokens"], (answer["usage"], image["prompt_tokens"])
        [choice] = answer["choices"]
        assert choice["message"]["content"] == image["first"], (choice, image["first"])
        if seen.kind.rates_chats:
            [rated] = choice["logprobs"]["content"]
            assert abs(rated["logprob"] - image["logprob"]) < NEAR, (rated, image["logprob"])


@question("16 chats with images at once, each as alone")
def together(seen):
    alone = [seen.text(image["url"]) for image in seen.images]
    assert alone[0] != alone[1], alone
    beside = [Beside(lambda image=image: seen.text(image["url"])) for image in seen.images * 8]
    assert [one.result() for one in beside] == alone * 8, alone


@question("usage, whole, streamed, and cut by a stop string")
def usage(seen):
    url, tokens = seen.images[0]["url"], seen.images[0]["prompt_tokens"]
    events = list(seen.genset.stream("/v1/chat/completions", seen.body(url, stream_options={"include_usage": True})))
    streamed = [event["usage"] for event in events if isinstance(event, dict) and event.get("usage")]
    assert streamed[-1]["prompt_tokens"] == tokens and streamed[-1]["completion_tokens"] == 16, streamed
    stop = seen.text(url)[3:5]
    cut = seen.ask(url, stop=stop, max_tokens=400)
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["usage"]["prompt_tokens"] == tokens, cut


@question("a tool beside an image is in the prompt")
def with_tool(seen):
    for image in seen.images:
        usage = seen.ask(image["url"], tools=[seen.expected["tool"]], max_tokens=1)["usage"]
        assert image["prompt_tokens_with_tool"] > image["prompt_tokens"], image
        assert usage["prompt_tokens"] == image["prompt_tokens_with_tool"], (usage, image)


@question("an image that the server cannot read is refused")
def unreadable(seen):
    try:
        seen.ask("data:image/png;base64,iVBORw0KGgoAAAAA")
    except Refused as refused:
        assert refused.status == 400, refused
    else:
        raise AssertionError("half an image was answered")
    assert seen.text(seen.images[0]["url"])
