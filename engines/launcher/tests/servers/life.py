"""The lifecycle of a server behind Genset; the name of each trial is a row of the table. Each trial starts its own Genset."""

import os
import signal
import time

from genset import Refused, read_proc, wait_until
from questions import Asking

TRIALS = []


def trial(name, words=(), needs=None):
    """`words` are additional arguments of Genset; `needs` is the property that a kind must have."""

    def add(function):
        TRIALS.append((name, words, needs, function))
        return function

    return add


def last_of(stream):
    """The last event of a stream."""
    last = None
    for event in stream:
        last = event
    return last


def begun(asking):
    """A stream whose first events were read."""
    stream = asking.long()
    events = iter(stream)
    next(events)
    return events


@trial("SIGTERM, idle")
def term(kind, genset):
    genset.children()
    genset.process.send_signal(signal.SIGTERM)
    code, took = genset.ended(60)
    assert code == 0, code
    genset.nothing_left(10)
    return took


@trial("SIGTERM with 8 streams", ("--grace", "60"))
def term_busy(kind, genset):
    streams = [begun(Asking(kind, genset)) for _ in range(8)]
    genset.children()
    genset.process.send_signal(signal.SIGTERM)
    lasts = [last_of(stream) for stream in streams]
    assert lasts == ["[DONE]"] * 8, lasts
    code, took = genset.ended(60)
    assert code == 0, code
    genset.nothing_left(10)
    return took


def killed(kind, genset, pid):
    """An answer that loses its server ends with an error that lets it migrate, and the worker stops."""
    events = begun(Asking(kind, genset))
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    last = last_of(events)
    took = time.monotonic() - begin
    assert isinstance(last, dict) and "error" in last, last
    assert "kind=disconnected" in genset.said(), genset.said()[-3000:]
    code, _ = genset.ended(kind.death)
    assert code == 1, code
    genset.nothing_left(10)
    return took


@trial("kill -9 of the server")
def kill_server(kind, genset):
    return killed(kind, genset, genset.server()[0])


@trial("kill -9 of a part of the server", needs="part")
def kill_part(kind, genset):
    parts = [pid for pid in genset.children() if kind.part in " ".join(read_proc(pid, "cmdline"))]
    assert parts, f"there is no {kind.part}"
    return killed(kind, genset, parts[0])


@trial("kill -9 of the server, with one restart", ("--engine-restarts", "1"))
def restart(kind, genset):
    first = genset.server()[0]
    begin = time.monotonic()
    os.kill(first, signal.SIGKILL)

    def is_back():
        try:
            return Asking(kind, genset).answer() and genset.server()[0] != first
        except (AssertionError, OSError, Refused, ValueError):
            return False

    wait_until(kind.start, "another server", is_back)
    took = time.monotonic() - begin
    genset.children()
    os.kill(genset.server()[0], signal.SIGKILL)
    assert genset.ended(kind.death)[0] == 1
    genset.nothing_left(10)
    return took


@trial("kill -9 of genset")
def kill_genset(kind, genset):
    assert genset.children()
    genset.process.kill()
    genset.ended(10)
    return genset.nothing_left(30)
