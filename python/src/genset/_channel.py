"""The socket to the worker. A thread reads it; any thread writes frames, and the event loop sends what the socket did not take at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from genset._frames import Decoder, Frame, ProtocolError

ORPHAN_GRACE_S = 2.0
"""How long an engine may clean up after its worker died without notice. After that the whole process group is killed."""

_READ_BYTES = 256 << 10


class Channel:
    """Frames in and out. The thread notices the worker's death even while the event loop is blocked."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[Frame]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_frames = on_frames
        self._on_end = on_end
        self._unsent = bytearray()
        self._writing = threading.Lock()
        self._is_told_to_go = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="genset-reader", daemon=True)

    def open(self) -> None:
        """Starts reading."""
        self._thread.start()

    def expect_end(self) -> None:
        """The worker announced its end, so the end of the socket is no accident."""
        self._is_told_to_go.set()

    def close(self) -> None:
        """The process ends by itself: no kill."""
        self._is_over.set()
        self._loop.remove_writer(self._sock)

    # Writing, on any thread.

    def write(self, data: bytes) -> None:
        """Sends what the socket takes now, and the rest when the socket takes more."""
        with self._writing:
            if self._unsent:
                self._unsent += data
                return
            sent = self._send(data)
            if sent == len(data):
                return
            self._unsent += data[sent:]
        # A closed loop sends no more: the process is about to end.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._write_more)

    def _write_more(self) -> None:
        with self._writing:
            sent = self._send(bytes(self._unsent[:_READ_BYTES]))
            del self._unsent[:sent]
            if not self._unsent:
                self._loop.remove_writer(self._sock)

    def _send(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The worker is gone. The reader notices it too, and ends the process.
            return len(data)

    # Reading, on the thread.

    def _read(self) -> None:
        decoder = Decoder()
        problem: Exception | None = None
        try:
            while data := self._sock.recv(_READ_BYTES):
                frames = decoder.feed(data)
                if frames:
                    self._loop.call_soon_threadsafe(self._on_frames, frames)
        except (OSError, ProtocolError) as error:
            problem = error
        except RuntimeError:
            return  # The loop is closed: the process is about to end.
        try:
            self._loop.call_soon_threadsafe(self._on_end, problem)
        except RuntimeError:
            return
        if not self._is_told_to_go.is_set() and not self._is_over.wait(ORPHAN_GRACE_S):
            kill_group()


def kill_group() -> None:
    """Kills this process and its group: no supervisor is left to do it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
