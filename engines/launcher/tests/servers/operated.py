"""Operations on a server, its own reports, and an answer that continues at another worker; the name of each trial is a row of the
table."""

import os
import signal
import subprocess
import time

from adapters import write_adapter
from genset import Genset, wait_until

ENDPOINT = "dyn://real.operated.generate"
STORY = "Tell me a story about the sea. "

TRIALS = []


def trial(name):
    def add(function):
        TRIALS.append((name, function))
        return function

    return add


class Operated:
    """A worker, and the frontend for requests to it."""

    def __init__(self, run, worker, front, place, profiles):
        self.run, self.kind = run, run.kind
        self.worker, self.front = worker, front
        self.place, self.profiles = place, profiles
        [self.model] = [model["id"] for model in front.ask("/v1/models")["data"]]

    def chat(self, text=STORY, max_tokens=32):
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}

    def cached(self):
        """The number of cached tokens for a prompt of several blocks."""
        answer = self.front.ask("/v1/chat/completions", self.chat(STORY * 12, 1))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stream(self):
        return Text(self.front.stream("/v1/chat/completions", self.chat(max_tokens=300)))

    def control(self, *words):
        """The exit code and the output of `genset control`."""
        asked = [self.run.args.genset, "control", ENDPOINT, *self.place, *words]
        ended = subprocess.run(asked, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    def done(self, *words):
        code, said = self.control(*words)
        assert code == 0, said


class Text:
    """The text of a streamed answer."""

    def __init__(self, stream):
        self.events, self.text, self.last = iter(stream), "", None

    def read(self, characters=None):
        """Reads a part of it, or all."""
        for self.last in self.events:
            if self.last != "[DONE]":
                assert "error" not in self.last, self.last
                self.text += "".join(choice["delta"].get("content") or "" for choice in self.last["choices"])
            if characters and len(self.text) >= characters:
                break
        return self

    def whole(self):
        self.read()
        assert self.last == "[DONE]", self.last
        return self.text


@trial("its figures and its own metrics at the status port")
def figures(on):
    on.stream().whole()
    names = (on.kind.gauge, "genset_model_server_kv_cache_utilization")

    def told():
        lines = on.worker.ask("/metrics").splitlines()
        return all(any(line.startswith(name) for line in lines) for name in names)

    return wait_until(30, f"metrics {names}", told)[1]


@trial("the prefix cache is cleared")
def cleared(on):
    on.cached()
    assert on.cached() > 0
    on.done("clear-prefix-cache")
    assert on.cached() == 0


@trial("the prefix cache is cleared beside an answer")
def cleared_beside(on):
    alone = on.stream().whole()
    answer = on.stream().read(20)
    code, said = on.control("clear-prefix-cache")
    assert code == 0 if on.kind.clears_beside else "unavailable" in said, said
    together = answer.whole()
    assert together == alone, (together, alone)


@trial("a sleep that it was not started for")
def sleeps_not(on):
    code, said = on.control("sleep")
    assert code == 1 and on.kind.sleep_setting in said, said
    on.stream().whole()


@trial("a profile")
def profile(on):
    on.done("start-profile")
    on.stream().whole()
    on.done("stop-profile")
    found = [file for _, _, files in os.walk(on.profiles) for file in files]
    assert found, f"nothing is in {on.profiles}"
    on.stream().whole()


@trial("adapters are loaded and unloaded beside an answer")
def adapters_change(on):
    folders = []
    for seed in (10, 11):
        folders.append(os.path.join(on.kind.args.out, f"adapter-{seed}"))
        write_adapter(folders[-1], on.kind.model, seed)
    if not on.kind.has_adapters:
        code, said = on.control("load-adapter", "late", folders[0])
        assert code == 1 and "is not asked of" in said, said
        return

    def is_listed(name):
        return any(model["id"] == name for model in on.front.ask("/v1/models")["data"])

    def load(name, folder):
        on.done("load-adapter", name, folder)
        wait_until(30, f"the adapter {name}", lambda: is_listed(name))

    def text(model):
        # Several blocks, which the second question would find in the prefix cache.
        body = {**on.chat(STORY * 12), "model": model}
        return [on.front.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"] for _ in range(2)]

    base = text(on.model)
    alone = on.stream().whole()
    answer = on.stream().read(20)
    load("late", folders[0])
    first = text("late")
    on.done("unload-adapter", "late")
    wait_until(30, "the end of the adapter", lambda: not is_listed("late"))
    load("late", folders[1])
    second = text("late")
    load("fresh", folders[1])
    assert second == text("fresh"), (second, text("fresh"))
    assert len({base[0], first[0], second[0]}) == 3, (base, first, second)
    assert text(on.model) == base
    together = answer.whole()
    assert together == alone, (together, alone)
    for name in ("late", "fresh"):
        on.done("unload-adapter", name)
    code, said = on.control("load-adapter", "none", on.place[-1])
    assert code == 1 and "none" not in on.control("adapters")[1], said


def goes_on(on, workers):
    """Kills the server that answers; returns how long it took until the next text arrived."""
    alone = on.stream().whole()
    answer = on.stream().read(20)
    servers = [worker.server() for worker in workers]
    busy = [pid for pid, port, key in servers if on.kind.running(port, key) > 0]
    assert len(busy) == 1, servers
    os.kill(busy[0], signal.SIGKILL)
    begun = time.monotonic()
    answer.read(len(answer.text) + 200)
    took = time.monotonic() - begun
    together = answer.whole()
    assert together == alone, (together, alone)
    return took


def tried(run, folder):
    """Runs all trials."""
    place = ("--discovery-path", os.path.join(folder, "discovery"))
    profiles = os.path.join(folder, "profiles")
    extra, env = run.kind.operated(profiles)
    start = lambda: run.genset(f"in={ENDPOINT}", *place, extra=extra, env=env)
    with start() as first:
        first.until_ready(run.kind.start)
        with Genset(run.args.genset, ["in=http", "out=dyn", *place], {}, run.log) as front:
            front.until_ready(60)
            on = Operated(run, first, front, place, profiles)
            for name, function in TRIALS if run.kind.is_operated else ():
                run.row(name, lambda: function(on))
            with start() as second:
                second.until_ready(run.kind.start)
                run.row("an answer goes on at another worker", lambda: goes_on(on, [first, second]))
