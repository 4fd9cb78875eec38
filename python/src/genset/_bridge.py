"""Connects one event loop and the native runtime: requests to it, and events from it.

The native module runs no Python. It collects events and wakes the loop once; `Bridge` then takes all of them in one call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from genset import exceptions
from genset._frames import pack, unpack

if TYPE_CHECKING:
    from genset._native import Call, Node

_DONE, _CALLED, _CREDIT, _STOPPED, _ITEM, _ENDED = range(6)


def load_native() -> Any:
    """The native module; raises an error that says where to get it."""
    try:
        from genset import _native
    except ImportError as error:
        raise ImportError(
            f"this installation of genset has no native module ({error}), which runtime, llm and sdk need. "
            "Install the wheel: `cargo xtask wheel`, then `pip install dist/genset-*.whl`"
        ) from error
    return _native


_pid = os.getpid()


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


class Told(Protocol):
    """A request in progress, sent or answered here, that receives events."""

    def on_item(self, item: bytes) -> None:
        """An item of its answer arrived."""

    def on_end(self, error: exceptions.EngineError | None) -> None:
        """Its answer ended."""


class Answering(Protocol):
    """A call that is answered here."""

    def grant(self, items: int) -> None:
        """Its reader has room for more items."""

    def stop(self, reason: str) -> None:
        """The request was stopped."""


class Bridge:
    """A native node and its event loop. Use it only on that loop."""

    def __init__(self) -> None:
        self.node: Node = load_native().Node()
        self.loop = asyncio.get_running_loop()
        self._pid = _pid
        self._numbers = itertools.count(1)
        self._operations: dict[int, asyncio.Future[int | None]] = {}
        self._written: list[tuple[Call, bytes]] = []
        self._is_open = True
        self.servings: dict[int, Callable[[Call], None]] = {}
        """The receivers of calls, by served endpoint."""
        self.calls: dict[int, Answering] = {}
        """The calls in progress."""
        self.asked: weakref.WeakValueDictionary[int, Told] = weakref.WeakValueDictionary()
        """The requests that wait for answers. A request is held by its caller only; dropping it cancels the request."""
        self.loop.add_reader(self.node.fd, self._take)

    def hold(self, owner: object) -> None:
        """Keeps `owner` alive until it closes the bridge or the loop is closed. The bridge has no reference to it, so it dies with the loop."""
        self.loop.add_reader(self.node.fd, self._take, owner)

    def check(self) -> None:
        """Raises an error if the runtime cannot be used: after a fork or a shutdown."""
        if self._pid != _pid:
            raise RuntimeError(
                "this runtime was connected before os.fork(), and its threads and connections stayed in the parent: "
                "connect one in the child, or start processes with the method 'spawn'"
            )
        if not self._is_open:
            raise exceptions.EngineShutdown("the runtime was shut down")

    def check_here(self) -> None:
        """As `check`; raises RuntimeError also where another event loop runs."""
        self.check()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            # A script may prepare requests between two runs of its loop.
            return
        if running is not self.loop:
            raise RuntimeError(
                "this runtime belongs to another event loop: connect one on this loop, "
                "or run what uses it on its own loop, with asyncio.run_coroutine_threadsafe"
            )

    def number(self) -> int:
        """Returns a new number for events to refer to."""
        return next(self._numbers)

    def operation(self, begin: Callable[[int], None]) -> asyncio.Future[int | None]:
        """Starts an operation of the node, and returns the future of its result."""
        self.check_here()
        number = self.number()
        future: asyncio.Future[int | None] = self.loop.create_future()
        self._operations[number] = future
        try:
            begin(number)
        except BaseException:
            del self._operations[number]
            raise
        return future

    def expect(self) -> tuple[int, asyncio.Future[int | None]]:
        """Returns a number for an operation that another one starts, and the future of its result."""
        number = self.number()
        future: asyncio.Future[int | None] = self.loop.create_future()
        # Retrieves the exception, so that asyncio does not warn of it.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._operations[number] = future
        return number, future

    def write(self, call: Call, item: bytes) -> None:
        """Writes an item in one call with all others of this turn of the loop."""
        if not self._written:
            self.loop.call_soon(self.flush)
        self._written.append((call, item))

    def flush(self) -> None:
        """Sends the items written so far."""
        if self._written:
            written, self._written = self._written, []
            self.node.send(written)

    def close(self) -> None:
        """Ends the node's threads. No events arrive after that."""
        if self._is_open and self._pid == _pid:
            self._is_open = False
            self.loop.remove_reader(self.node.fd)
            for future in self._operations.values():
                future.cancel()
            for told in list(self.asked.values()):
                told.on_end(exceptions.EngineShutdown("the runtime was shut down"))
            self._operations.clear()
            self.asked.clear()
            self.node.end()

    def _take(self, _owner: object = None) -> None:
        for kind, number, value, error in self.node.take():
            if kind == _ITEM:
                told = self.asked.get(number)
                if told is not None:
                    told.on_item(value)
            elif kind == _CREDIT:
                answering = self.calls.get(number)
                if answering is not None:
                    answering.grant(value)
            elif kind == _ENDED:
                told = self.asked.pop(number, None)
                if told is not None:
                    told.on_end(None if error is None else exceptions.from_wire(unpack(error)))
            elif kind == _CALLED:
                self._call(number, value)
            elif kind == _STOPPED:
                answering = self.calls.get(number)
                if answering is not None:
                    answering.stop(value)
            elif kind == _DONE:
                self._end_operation(number, value, error)

    def _call(self, number: int, call: Call) -> None:
        serving = self.servings.get(number)
        if serving is None:
            call.fail(pack(exceptions.EngineShutdown("this endpoint is served no more").to_wire()))
        else:
            serving(call)

    def _end_operation(self, number: int, value: int | None, error: bytes | None) -> None:
        future = self._operations.pop(number, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(exceptions.from_wire(unpack(error)))
