"""A single-threaded engine that follows the protocol, except for the fault named by its first argument, if any.

Each fault is one that an author could make. `tests/process_kill_matrix.rs` says which checks of the conformance kit catch it.
`one_seat` is not a fault: it computes one answer at a time. Nor is `swift`: its answers are short and come at once.
`needs_a_leash` ends if the worker gives it none.
"""

import os
import select
import socket
import subprocess
import sys
import time

from frames import Decoder, Kind, encode, pack, unpack, unpack_request

FAULT = sys.argv[1] if len(sys.argv) > 1 else "none"
VOCAB_SIZE = 100
# Whole answers of one that is deaf take more than a cancellation may, and less than a call.
CONTEXT_LENGTHS = {"swift": 64, "deaf_while_computing": 4096}
CONFIG = {
    "model": "faulty",
    "context_length_tokens": CONTEXT_LENGTHS.get(FAULT, 8192),
    "vocab_size": VOCAB_SIZE,
    "data_parallel_size": 1,
    "capabilities": {"inputs": ["tokens"]},
}
SEATS = 1 if FAULT == "one_seat" else None
if SEATS is not None:
    CONFIG["max_num_seqs"] = SEATS
STEP_S = 0.001
# The kit gives some answers less credit than this, to see what they do without credit. A supervisor gives more, and its reader
# falls behind only by chance. So the faults without credit apply only to answers that began with little.
LITTLE_CREDIT = 100
# More items than a supervisor's reader is ever behind.
MANY_ITEMS = 1000
KNOWN = ("start", "events", "generate", "drain", "cleanup")
HEAD_FIELDS = {"endpoint", "instance", "id", "deadline_ms", "age_ms", "traceparent", "tracestate", "headers", "credit"}

if FAULT == "needs_a_leash":
    int(os.environ["GENSET_ENGINE_LEASH_FD"])
sock = socket.socket(fileno=int(os.environ["GENSET_ENGINE_FD"]))
sock.set_inheritable(False)
answers = {}
is_told_to_go = False
cancelled = 0


class Answer:
    """An active generation request."""

    def __init__(self, request, credit):
        self.prompt = request["input"]["tokens"]
        self.token = self.prompt[-1]
        stop = request.get("stop", {})
        self.left = stop.get("max_tokens") or CONFIG["context_length_tokens"] - len(self.prompt)
        self.credit = credit
        self.began_with_little = credit < LITTLE_CREDIT
        self.sent = 0


def send(kind, stream=0, value=None):
    sock.sendall(encode(kind, stream, b"" if value is None else pack(value)))


def refuse(stream, kind, message):
    send(Kind.ERROR, stream, {"kind": kind, "message": message})


def end(stream):
    answers.pop(stream, None)
    if FAULT != "forgets_end":
        send(Kind.END, stream)


def chunk(stream, token_ids):
    send(Kind.ITEM, stream, {"tokens": {"token_ids": token_ids}})


def finish(stream, answer, reason):
    usage = {"prompt_tokens": len(answer.prompt), "completion_tokens": answer.sent}
    if FAULT == "terminal_that_is_no_output":
        send(Kind.ITEM, stream, {"done": True})
    else:
        send(Kind.ITEM, stream, {"finished": {"reason": reason, "usage": usage}})
    if FAULT == "after_terminal":
        chunk(stream, [answer.token])
    end(stream)


def step(stream, answer):
    """One token of an answer, or its end."""
    if answer.credit <= 0 and not (FAULT == "ignores_credit" and answer.began_with_little):
        return
    answer.credit -= 1
    if answer.left == 0:
        finish(stream, answer, "length")
        return
    answer.token = (answer.token + 1) % VOCAB_SIZE
    answer.left -= 1
    answer.sent += 1
    # At the last token: a cancelled answer never reaches it, however fast this process is.
    is_last = answer.left == 0 and answer.sent >= 5
    if FAULT == "token_out_of_range" and is_last:
        chunk(stream, [VOCAB_SIZE])
    elif FAULT == "empty_chunk" and is_last:
        chunk(stream, [])
    else:
        chunk(stream, [answer.token])


def step_all():
    waits = any(answer.credit <= 0 and answer.began_with_little for answer in answers.values())
    if FAULT == "one_waits_all_wait" and waits:
        return
    for stream, answer in list(answers.items())[:SEATS]:
        step(stream, answer)


def compute_at_once(stream):
    """Blocks other requests meanwhile; a long answer blocks them past every time limit."""
    while stream in answers and answers[stream].credit > 0:
        step(stream, answers[stream])
        time.sleep(STEP_S if stream not in answers or answers[stream].sent < MANY_ITEMS else 1)


def start(stream):
    if FAULT == "helper_of_its_own_session":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    send(Kind.ITEM, stream, {"config": CONFIG})
    send(Kind.END, stream)


def cleanup(stream):
    if FAULT == "prints_at_the_end":
        os.dup2(sock.fileno(), 1)
        print("bye, 3 requests served", flush=True)
    if FAULT == "cleanup_fails":
        refuse(stream, "internal", "the device is stuck")
    else:
        send(Kind.END, stream)


def on_request(stream, payload):
    head, body = unpack_request(payload)
    if FAULT == "strict_about_fields" and set(head) - HEAD_FIELDS:
        raise SystemExit(f"fields that are not known: {set(head) - HEAD_FIELDS}")
    endpoint = head["endpoint"]
    if endpoint not in KNOWN and FAULT == "dies_of_unknown_endpoints":
        raise KeyError(endpoint)
    if endpoint not in KNOWN and FAULT == "answers_unknown_endpoints":
        send(Kind.END, stream)
    elif endpoint not in KNOWN:
        refuse(stream, "unsupported", f"there is no endpoint {endpoint}")
    elif endpoint == "start":
        start(stream)
    elif endpoint == "generate":
        answers[stream] = Answer(body, head.get("credit", 0))
        if FAULT == "computes_at_once":
            compute_at_once(stream)
        while FAULT == "swift" and stream in answers and answers[stream].credit > 0:
            step(stream, answers[stream])
    elif endpoint == "cleanup":
        cleanup(stream)
    elif endpoint == "drain":
        send(Kind.END, stream)


def on_cancel(stream):
    if FAULT == "deaf_to_cancel" or stream not in answers:
        return
    is_waiting = answers[stream].credit <= 0
    if FAULT == ("deaf_while_waiting" if is_waiting else "deaf_while_computing"):
        return
    if FAULT == "cancel_hits_all":
        for other in list(answers):
            end(other)
        return
    finish(stream, answers[stream], "cancelled") if answers[stream].credit > 0 else end(stream)
    if FAULT == "token_after_cancel":
        chunk(stream, [1])


def on_frame(kind, stream, payload):
    global is_told_to_go
    if kind == Kind.HELLO:
        hello = unpack(payload)
        if not hello["min_version"] <= 1 <= hello["version"] and FAULT != "takes_any_version":
            send(Kind.GO_AWAY, 0, {"code": "version", "reason": "version 1 is spoken here"})
            sys.exit(1)
    elif kind == Kind.REQUEST:
        on_request(stream, payload)
    elif kind == Kind.CANCEL:
        on_cancel(stream)
    elif kind == Kind.CREDIT and stream in answers:
        answers[stream].credit += unpack(payload)["items"]
    elif kind == Kind.PING and FAULT == "pong_without_payload":
        send(Kind.PONG)
    elif kind == Kind.PING and not (FAULT == "no_pong_while_busy" and answers):
        sock.sendall(encode(Kind.PONG, 0, payload))
    elif kind == Kind.GO_AWAY:
        is_told_to_go = True
    elif kind > 10 and FAULT == "dies_of_unknown_frames":
        raise ValueError(f"a frame of kind {kind}")


def leave():
    """The socket was closed."""
    if FAULT == "outlives_its_worker" and not is_told_to_go:
        time.sleep(1000)
    if FAULT == "stays":
        time.sleep(1000)
    sys.exit(1 if FAULT == "exits_with_1" else 0)


def serve():
    version = 1
    send(Kind.HELLO, 0, {"version": version, "min_version": version, "max_frame_bytes": 16 << 20})
    decoder = Decoder()
    while True:
        readable, _, _ = select.select([sock], [], [], STEP_S if answers else None)
        if readable:
            data = sock.recv(1 << 16)
            if not data:
                leave()
            for frame in decoder.feed(data):
                on_frame(*frame)
        step_all()


try:
    serve()
except OSError:
    leave()
