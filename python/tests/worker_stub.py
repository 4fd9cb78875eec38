"""A worker's side of the protocol, as little as a test needs. Run as a program, it starts an engine and waits to be killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import msgpack

from genset._frames import Decoder, Frame, Kind, encode, pack

HELLO = {"version": 1, "min_version": 1, "max_frame_bytes": 16 << 20, "has_secret": False, "nonce": b""}


class WorkerStub:
    """An engine's process, and the socket to it."""

    def __init__(self, *command: str) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "GENSET_ENGINE_FD": str(theirs.fileno()), "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(30)
        self.sock = ours
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def send(self, kind: Kind, stream: int, value: Any) -> None:
        self.sock.sendall(encode(kind, stream, pack(value)))

    def request(self, stream: int, endpoint: str, body: Any, credit: int = 64) -> None:
        head = {"endpoint": endpoint, "instance": 0, "id": f"r-{stream}", "credit": credit}
        self.sock.sendall(encode(Kind.REQUEST, stream, pack(head) + pack(body)))

    def frame(self) -> Frame:
        while not self._frames:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    def start(self) -> None:
        self.send(Kind.HELLO, 0, HELLO)
        assert self.frame()[0] == Kind.HELLO
        self.request(1, "start", {"worker_id": 1, "role": "aggregated"})
        while True:
            kind, _, payload = self.frame()
            assert kind == Kind.ITEM, payload
            if [1, None] in msgpack.unpackb(payload):
                return


if __name__ == "__main__":
    worker = WorkerStub(*sys.argv[1:])
    worker.start()
    print("engine", worker.process.pid, flush=True)
    time.sleep(1000)
