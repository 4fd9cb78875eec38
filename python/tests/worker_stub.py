"""A minimal worker's side of the protocol, for tests. Run as a program, it starts an engine and waits to be killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgpack

from genset._frames import Decoder, Frame, Kind, encode, pack

HELLO = {"version": 1, "min_version": 1, "max_frame_bytes": 16 << 20, "has_secret": False, "nonce": b""}


class WorkerStub:
    """An engine's process with its socket."""

    def __init__(self, *command: str, stderr: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.leash, their_leash = socket.socketpair()
        fds = {"GENSET_ENGINE_FD": theirs, "GENSET_ENGINE_LEASH_FD": their_leash}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                **{name: str(end.fileno()) for name, end in fds.items()},
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            pass_fds=[end.fileno() for end in fds.values()],
            start_new_session=True,
            stderr=stderr,
        )
        theirs.close()
        their_leash.close()
        ours.settimeout(30)
        self.sock = ours
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def send(self, kind: Kind, stream: int, value: Any) -> None:
        self.sock.sendall(encode(kind, stream, pack(value)))

    def request(self, stream: int, endpoint: str, body: Any) -> None:
        self.requests([stream], endpoint, body)

    def requests(self, streams: Iterable[int], endpoint: str, body: Any, credit: int = 64) -> None:
        """Sends a request on each stream in one write: the engine sees them in one turn of its loop."""
        head = {"endpoint": endpoint, "instance": 0, "credit": credit}
        frames = (encode(Kind.REQUEST, stream, pack({**head, "id": f"r-{stream}"}) + pack(body)) for stream in streams)
        self.sock.sendall(b"".join(frames))

    def frame(self) -> Frame:
        while not self._frames:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

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
