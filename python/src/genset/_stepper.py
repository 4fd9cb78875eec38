"""The thread on which a `BatchEngine` computes. It sends the tokens of a whole step in one frame."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from genset._convert import TOKEN_PREFIX, Answer, request_from_wire
from genset._frames import Kind, encode, encode_batches, pack
from genset._stream import Stream, as_engine_error, check_size
from genset.batch import BatchEngine, StepOutput, as_chunk
from genset.exceptions import EngineError, EngineShutdown, Internal, text_of

logger = logging.getLogger(__name__)

_NIL = b"\xc0"
_TOKENS_END = 1 << 32

_IDLE_S = 0.001
"""A step that makes nothing in less time had nothing to compute: all its sequences wait for others. The next step starts this much
later, or when something arrives, so that such steps leave the processor to the work they wait for."""


class Turn(enum.Enum):
    """The result of one turn of the thread."""

    NO_STEP = enum.auto()
    NOTHING_MADE = enum.auto()
    MADE = enum.auto()


class Lane:
    """One request in the steps. It belongs to the thread, except for its stream's credit and stop."""

    def __init__(self, stream: Stream, body: dict[str, Any]) -> None:
        self.stream = stream
        self.request = request_from_wire(body)
        self.answer = Answer(self.request)
        self.prefix = stream.prefix + TOKEN_PREFIX
        self.sequence: Any = None
        self.is_running = False
        """Between the engine's `begin` and `end`."""
        self.kept: deque[bytes] = deque()
        """Items that wait for credit. Meanwhile the lane is in no step, so they belong to one chunk."""


class Stepper:
    """Begins requests, takes steps while there is credit for their output, and ends requests."""

    def __init__(
        self,
        engine: BatchEngine[Any],
        streams: dict[int, Stream],
        write: Callable[[bytes], None],
        frame_bytes: int,
        item_bytes: int,
    ) -> None:
        """Frames have `frame_bytes` at most, but for one with a single larger item; an item has `item_bytes` at most."""
        self._engine = engine
        self._streams = streams
        self._write = write
        self._frame_bytes = frame_bytes
        self._item_bytes = item_bytes
        self._new: deque[Lane] = deque()
        self._lanes: dict[int, Lane] = {}
        self._pairs: list[bytes] = []
        self._errors: list[bytes] = []
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genset-steps", daemon=True)
        self._thread.start()

    # On the event loop.

    def submit(self, stream: Stream, body: dict[str, Any]) -> None:
        """Hands a request to the thread, which also ends its stream."""
        if self._is_over:
            raise EngineShutdown("the engine takes no more steps")
        lane = Lane(stream, body)
        stream.wake = self._wake.set
        self._new.append(lane)
        self._wake.set()

    def close(self) -> None:
        """Returns when the current step and every sequence have ended. Blocks."""
        self._is_over = True
        self._wake.set()
        self._thread.join()

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                # Cleared first: the next turn sees what arrives during this one.
                self._wake.clear()
                began = time.monotonic()
                turn = self._turn()
                if turn is Turn.NO_STEP:
                    self._wake.wait()
                elif turn is Turn.NOTHING_MADE and time.monotonic() - began < _IDLE_S:
                    self._wake.wait(_IDLE_S)
                else:
                    self._engine.worker.report_step()
            self._end_all(EngineShutdown("the engine is shut down"))
        except BaseException as error:
            self._is_over = True
            logger.exception("the thread that takes the steps ended")
            self._end_all(Internal(f"the thread that takes the steps ended: {type(error).__name__}"))
            self._engine.worker.report_dead(f"the thread that takes the steps ended: {type(error).__name__}: {text_of(error)}")

    def _turn(self) -> Turn:
        """Takes a step, if there is one to take."""
        while self._new:
            self._begin(self._new.popleft())
        ready: list[Lane] = []
        for lane in tuple(self._lanes.values()):
            stream = lane.stream
            if stream.is_stopped:
                self._close(lane)
                continue
            if lane.kept:
                self._send_kept(lane)
            if lane.is_running and not lane.kept and stream.sent < stream.granted:
                ready.append(lane)
        made = bool(ready) and self._step(ready)
        self._flush()
        if made:
            return Turn.MADE
        return Turn.NOTHING_MADE if ready else Turn.NO_STEP

    def _begin(self, lane: Lane) -> None:
        self._lanes[lane.stream.id] = lane
        if lane.stream.is_stopped:
            self._close(lane)
            return
        try:
            lane.sequence = self._engine.begin(lane.request, lane.stream.context)
            lane.is_running = True
        except Exception as error:
            self._fail(lane, as_engine_error(error))

    def _step(self, ready: list[Lane]) -> bool:
        """Takes a step. Returns whether it made an output or an error for any sequence."""
        try:
            outputs = self._engine.step([lane.sequence for lane in ready])
            if len(outputs) != len(ready):
                raise Internal(f"step answered {len(outputs)} of {len(ready)} sequences")
        except Exception as error:
            # Not kept in a local: the error holds this frame, and so would hold all that the engine's step held.
            self._fail_all(ready, as_engine_error(error))
            return True
        made = False
        pairs = self._pairs
        for lane, output in zip(ready, outputs):
            if type(output) is int and 0 <= output < _TOKENS_END:
                # The usual case: a single token.
                lane.stream.sent += 1
                lane.answer.completion_tokens += 1
                pairs.append(lane.prefix + output.to_bytes(4, "big"))
                made = True
            elif output is not None:
                self._take(lane, output)
                made = True
        return made

    def _take(self, lane: Lane, output: StepOutput) -> None:
        try:
            chunk = as_chunk(output)
            if chunk is not None:
                for item in lane.answer.items(chunk):
                    check_size(item, self._item_bytes)
                    lane.kept.append(item)
        except Exception as error:
            self._fail(lane, as_engine_error(error))
            return
        if lane.answer.is_finished:
            self._end(lane)
        self._send_kept(lane)

    def _send_kept(self, lane: Lane) -> None:
        """Sends the items that have credit. The last item of an answer ends its stream."""
        stream = lane.stream
        while lane.kept and stream.sent < stream.granted:
            stream.sent += 1
            self._pairs.append(stream.prefix + lane.kept.popleft())
        if lane.answer.is_finished and not lane.kept:
            self._close(lane)

    def _close(self, lane: Lane) -> None:
        if self._forget(lane):
            self._pairs.append(lane.stream.prefix + _NIL)

    def _fail(self, lane: Lane, error: EngineError) -> None:
        if self._forget(lane):
            self._errors.append(encode(Kind.ERROR, lane.stream.id, pack(error.to_wire())))

    def _forget(self, lane: Lane) -> bool:
        """Forgets the lane. Returns whether its stream was still open."""
        self._end(lane)
        self._lanes.pop(lane.stream.id, None)
        return self._streams.pop(lane.stream.id, None) is not None

    def _end(self, lane: Lane) -> None:
        if not lane.is_running:
            return
        lane.is_running = False
        try:
            self._engine.end(lane.sequence)
        except Exception:
            logger.exception("the end of request %s failed", lane.stream.context.id())

    def _fail_all(self, lanes: Iterable[Lane], error: EngineError) -> None:
        for lane in lanes:
            self._fail(lane, error)

    def _end_all(self, error: EngineError) -> None:
        self._fail_all((*self._lanes.values(), *self._new), error)
        self._flush()

    def _flush(self) -> None:
        frames: list[bytes] = self._errors
        if self._pairs:
            frames = [encode_batches(self._pairs, self._frame_bytes), *frames]
            self._pairs = []
        if frames:
            self._errors = []
            self._write(b"".join(frames))
