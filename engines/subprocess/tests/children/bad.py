"""An engine that follows the protocol, except for the fault named by its first argument."""

import os
import signal
import socket
import subprocess
import sys
import time

from frames import Decoder, Kind, encode, encode_batch, pack, unpack_request

FAULT = sys.argv[1]
CONFIG = {
    "model": "bad",
    "context_length_tokens": 1000,
    "vocab_size": 100,
    "data_parallel_size": 1,
    "capabilities": {"inputs": ["tokens"]},
}
TOKEN = {"tokens": {"token_ids": [5]}}
FINISHED = {"finished": {"reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}}

sock = socket.socket(fileno=int(os.environ["GENSET_ENGINE_FD"]))


def send(kind, stream=0, value=None):
    sock.sendall(encode(kind, stream, b"" if value is None else pack(value)))


def forever():
    while True:
        time.sleep(1)


def item(stream, value):
    send(Kind.ITEM, stream, value)


def answer(stream, *items):
    for value in items:
        item(stream, value)
    send(Kind.END, stream)


def raw(data):
    sock.sendall(data)
    forever()


def crash(signal_number):
    os.kill(os.getpid(), signal_number)
    forever()


def leave(code):
    sys.stderr.write("the last words\n")
    sys.stderr.flush()
    os._exit(code)


def half_frame():
    sock.sendall(encode(Kind.ITEM, 1, pack(TOKEN))[:-1])
    leave(0)


GENERATE = {
    "garbage": lambda stream: raw(b"this is no frame, it is text"),
    "half_frame": lambda stream: half_frame(),
    "unknown_stream": lambda stream: item(stream + 1000, TOKEN),
    "after_terminal": lambda stream: answer(stream, TOKEN, FINISHED, TOKEN),
    "two_terminals": lambda stream: answer(stream, TOKEN, FINISHED, FINISHED),
    "no_terminal": lambda stream: answer(stream, TOKEN),
    "token_out_of_range": lambda stream: answer(stream, {"tokens": {"token_ids": [100]}}, FINISHED),
    "no_usage": lambda stream: answer(stream, TOKEN, {"finished": {"reason": "stop"}}),
    "no_output": lambda stream: answer(stream, "not an output"),
    "empty_chunk": lambda stream: answer(stream, {"tokens": {"token_ids": []}}, FINISHED),
    "no_credit": lambda stream: [item(stream, TOKEN) for _ in range(10_000)],
    "bad_batch": lambda stream: raw(encode(Kind.ITEM, 0, pack("no batch"))),
    "batch": lambda stream: sock.sendall(
        encode_batch([b"\x92" + pack(stream) + pack(value) for value in (TOKEN, FINISHED, None)])
    ),
    "request_frame": lambda stream: send(Kind.REQUEST, 7, {}),
    "exit_0": lambda stream: leave(0),
    "exit_3": lambda stream: leave(3),
    "abort": lambda stream: crash(signal.SIGABRT),
    "killed": lambda stream: crash(signal.SIGKILL),
    "hang": lambda stream: forever(),
    "closed_socket": lambda stream: (sock.shutdown(socket.SHUT_RDWR), forever()),
    "kinds": lambda stream: send(
        Kind.ERROR, stream, {"kind": "overloaded", "message": "later", "details": {"field": "f"}}
    ),
}


def start(stream):
    if FAULT == "silent_start":
        for file in sys.argv[2:]:
            with open(file, "w") as pid:
                pid.write(str(os.getpid()))
        forever()
    if FAULT == "exit_in_start":
        leave(4)
    if FAULT == "start_refused":
        send(Kind.ERROR, stream, {"kind": "not_found", "message": "no such weights"})
        return
    if FAULT == "start_without_config":
        send(Kind.END, stream)
        return
    if FAULT == "config_without_context":
        answer(stream, {"config": {key: CONFIG[key] for key in ("model", "data_parallel_size", "capabilities")}})
        return
    if FAULT == "noisy":
        for _ in range(20_000):
            print("x" * 100)
            print("y" * 100, file=sys.stderr)
        print("the very last", file=sys.stderr, flush=True)
    if FAULT == "forks":
        started = subprocess.Popen(["sleep", "1000"])
        with open(sys.argv[2], "w") as file:
            file.write(f"{os.getpid()} {started.pid}")
    answer(stream, {"progress": {"stage": "half", "fraction": 0.5}}, {"config": CONFIG})


def serve():
    if FAULT == "silent_hello":
        forever()
    if FAULT == "other_version":
        send(Kind.HELLO, 0, {"version": 9, "min_version": 8, "max_frame_bytes": 1 << 20})
        forever()
    if FAULT == "refuses":
        send(Kind.GO_AWAY, 0, {"code": "version", "reason": "too old for me"})
        forever()
    if FAULT == "prints_on_the_socket":
        raw(b"Loading weights... done\n")
    send(Kind.HELLO, 0, {"version": 1, "min_version": 1, "max_frame_bytes": 16 << 20})
    decoder = Decoder()
    while data := sock.recv(1 << 16):
        for kind, stream, payload in decoder.feed(data):
            if kind == Kind.PING:
                sock.sendall(encode(Kind.PONG, 0, payload))
            if kind != Kind.REQUEST:
                continue
            endpoint = unpack_request(payload)[0]["endpoint"]
            if endpoint == "start":
                start(stream)
            elif endpoint == "generate":
                GENERATE.get(FAULT, lambda stream: answer(stream, TOKEN, FINISHED))(stream)
            elif endpoint == "cleanup":
                if FAULT == "ignores_cleanup":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    continue
                if FAULT == "cleanup_fails":
                    send(Kind.ERROR, stream, {"kind": "internal", "message": "the device is stuck"})
                else:
                    send(Kind.END, stream)
            elif endpoint == "control" and FAULT == "none":
                send(Kind.ERROR, stream, {"kind": "not_found", "message": "there is no such endpoint"})
            elif endpoint != "events":
                send(Kind.END, stream)
    if FAULT == "says_goodbye":
        with open(sys.argv[2], "w") as file:
            file.write("goodbye")
    if FAULT == "stays":
        forever()


serve()
