"""The process that a worker started: serves an engine over the socket it inherited."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from genset._channel import Channel, kill_group
from genset._convert import Answer, request_from_wire
from genset._declared import completed, needs_files
from genset._frames import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Kind,
    ProtocolError,
    encode,
    encode_batch,
    pack,
    unpack,
    unpack_request,
)
from genset._slips import called, check_chunks, started
from genset._stepper import Stepper
from genset._stream import Stream, Turns, as_engine_error, awaited_cancelled, check_size, is_left
from genset.batch import BatchEngine
from genset.engine import STEP, Context, Event, LLMEngine, WorkerHandle, control_reply
from genset.exceptions import EngineError, InvalidArgument, NotFound

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""How long a stopped request may take to end by itself. After that it is cancelled at its `await`."""

CLEANUP_S = 30.0
"""The time limit of the cleanup after a failed start, equal to the worker's limit for any other cleanup."""

_BATCH_BYTES = 256 << 10
_BATCH_HEAD_BYTES = 11
"""The most bytes of a frame's payload beside its only item: the heads of a list and of a pair, and the stream's id."""
_EVENTS_KEPT = 4096
_NIL = b"\xc0"
_STEP = pack(STEP)
_DEAD = b"\x81\xa4dead"
"""The prefix of an event that reports the engine's death."""


class Child:
    """Serves one engine until the worker announces the end with GoAway and closes the socket."""

    def __init__(
        self,
        engine: LLMEngine,
        sock: socket.socket,
        model_path: str = "",
        migration_limit: int | None = None,
        *,
        has_files: bool = True,
    ) -> None:
        """Without files `model_path` is only a name, which is enough for engines that take text."""
        self._engine = engine
        self._has_files = has_files
        self._model_path = model_path
        self._migration_limit = migration_limit
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(sock, self._loop, self._on_frames, self._on_end)
        self._streams: dict[int, Stream] = {}
        self._turns = Turns(self._loop)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._events: asyncio.Queue[bytes] = asyncio.Queue(_EVENTS_KEPT)
        self._events_stream: Stream | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._answers: set[asyncio.Task[None]] = set()
        """Tasks of `generate`, each until its generator is closed, which may be later than the end of its stream."""
        self._batch_limit = 2048
        self._item_limit = 2048
        self._stepper: Stepper | None = None
        self._is_greeted = False
        self._is_told_to_go = False
        self._endpoints = {
            "start": self._start,
            "generate": self._generate,
            "drain": self._drain,
            "cleanup": self._cleanup,
            "control": self._control,
            "events": self._publish,
        }

    async def serve(self) -> None:
        """Returns when the worker has closed the socket after its GoAway; raises if the worker broke the protocol."""
        hello = {"version": PROTOCOL_VERSION, "min_version": PROTOCOL_VERSION, "max_frame_bytes": MAX_FRAME_BYTES}
        self._channel.write(encode(Kind.HELLO, 0, pack(hello)))
        self._channel.open()
        try:
            await self._over
        finally:
            self._channel.close()

    # Receiving.

    def _on_frames(self, frames: list[Frame]) -> None:
        try:
            for kind, stream, payload in frames:
                self._on_frame(kind, stream, payload)
        except ProtocolError as error:
            go_away = {"code": "protocol", "reason": str(error)}
            self._send(Kind.GO_AWAY, 0, pack(go_away))
            self._finish(error)

    def _on_frame(self, kind: int, stream: int, payload: bytes) -> None:
        if not self._is_greeted:
            self._greet(kind, payload)
        elif kind == Kind.REQUEST:
            self._on_request(stream, payload)
        elif kind == Kind.CREDIT and (granted := self._streams.get(stream)):
            granted.grant(unpack(payload)["items"])
        elif kind == Kind.CANCEL and (cancelled := self._streams.get(stream)):
            self._cancel(cancelled, unpack(payload).get("reason", "client"))
        elif kind == Kind.PING:
            self._send(Kind.PONG, 0, payload)
        elif kind == Kind.GO_AWAY:
            self._is_told_to_go = True
            self._channel.expect_end()

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != Kind.HELLO:
            raise ProtocolError(f"a frame of kind {kind} where Hello was due")
        hello = unpack(payload)
        if not hello["min_version"] <= PROTOCOL_VERSION <= hello["version"]:
            reason = (
                f"the package genset speaks version {PROTOCOL_VERSION} of the protocol, "
                f"the worker {hello['min_version']} to {hello['version']}; install versions that fit"
            )
            self._send(Kind.GO_AWAY, 0, pack({"code": "version", "reason": reason}))
            raise ProtocolError(reason)
        self._item_limit = min(MAX_FRAME_BYTES, hello["max_frame_bytes"]) - _BATCH_HEAD_BYTES
        self._batch_limit = min(_BATCH_BYTES, self._item_limit // 2)
        self._is_greeted = True

    def _on_request(self, stream_id: int, payload: bytes) -> None:
        if stream_id == 0 or stream_id in self._streams:
            raise ProtocolError(f"a Request on stream {stream_id}, which is not free")
        head, body = unpack_request(payload)
        stream = self._streams[stream_id] = Stream(stream_id, head)
        if stream.is_generate and isinstance(self._engine, BatchEngine):
            self._submit(self._engine, stream, body)
            return
        handler = self._endpoints.get(head["endpoint"])
        if handler is None:
            self._fail(stream, NotFound(f"there is no endpoint {head['endpoint']!r}", field="endpoint"))
            return
        stream.task = self._loop.create_task(self._answer(stream, handler(stream, body)))
        if stream.is_generate:
            self._answers.add(stream.task)
            stream.task.add_done_callback(self._answers.discard)

    def _submit(self, engine: BatchEngine[Any], stream: Stream, body: dict[str, Any]) -> None:
        if self._stepper is None:
            self._stepper = Stepper(engine, self._streams, self._channel.write, self._batch_limit, self._item_limit)
        try:
            self._stepper.submit(stream, body)
        except Exception as error:
            self._fail(stream, as_engine_error(error))

    def _cancel(self, stream: Stream, reason: str) -> None:
        logger.debug("request %s was stopped: %s", stream.context.id(), reason)
        stream.stop(reason)
        if stream.task is not None:
            self._loop.call_later(CANCEL_GRACE_S, stream.task.cancel)
        if stream.is_generate:
            self._in_background(self._abort(stream.context))

    async def _abort(self, context: Context) -> None:
        try:
            await called(self._engine.abort, context)
        except Exception:
            logger.exception("abort of request %s failed", context.id())

    def _on_end(self, problem: Exception | None) -> None:
        if self._is_told_to_go:
            self._finish(None)
        else:
            logger.error("the worker is gone (%s); the engine ends too", problem or "its end of the socket is closed")
            self._in_background(self._clean_up_alone())

    async def _clean_up_alone(self) -> None:
        try:
            # The group is killed soon, so requests get no grace.
            await self._clean_up(0.0)
        except Exception:
            logger.exception("cleanup failed")
        # The engine may have started processes of its own.
        kill_group()

    async def _clean_up(self, grace_s: float) -> None:
        if self._stepper is not None:
            await asyncio.to_thread(self._stepper.close)
        await self._end_answers(grace_s)
        await called(self._engine.cleanup)

    async def _end_answers(self, grace_s: float) -> None:
        """Returns when no generator uses the engine any more, or when some do not end after their cancellation."""
        for stream in self._streams.values():
            if stream.is_generate and not stream.is_stopped:
                stream.stop("shutdown")
        if not self._answers:
            return
        _, late = await asyncio.wait(set(self._answers), timeout=grace_s)
        for task in late:
            task.cancel()
        if late:
            _, stuck = await asyncio.wait(late, timeout=CANCEL_GRACE_S)
            if stuck:
                logger.warning("the engine is cleaned up while %d requests have not ended", len(stuck))

    def _finish(self, error: Exception | None) -> None:
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Sending.

    def _send(self, kind: Kind, stream: int, payload: bytes = b"") -> None:
        self._flush()
        self._channel.write(encode(kind, stream, payload))

    def _batch(self, stream: Stream, item: bytes) -> None:
        """Sends an item in one frame with all others of this turn of the event loop. Raises `Internal` if no frame can have it."""
        pair = stream.prefix + item
        if len(pair) > self._batch_limit:
            check_size(item, self._item_limit)
            # It fits into a frame, but perhaps not beside others.
            self._flush()
            self._channel.write(encode_batch([pair]))
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(pair)
        self._pending_bytes += len(pair)
        if self._pending_bytes > self._batch_limit:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            pairs, self._pending, self._pending_bytes = self._pending, [], 0
            self._channel.write(encode_batch(pairs))

    async def _item(self, stream: Stream, packed: bytes) -> None:
        if await stream.take_credit():
            self._batch(stream, packed)

    def _end(self, stream: Stream) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._batch(stream, _NIL)

    def _fail(self, stream: Stream, error: EngineError) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._send(Kind.ERROR, stream.id, pack(error.to_wire()))

    async def _answer(self, stream: Stream, handler: Coroutine[Any, Any, None]) -> None:
        try:
            await handler
        except asyncio.CancelledError:
            # Before Python 3.11 a task does not show that it is cancelled at the program's end.
            if stream.is_cut() or self._over.done():
                self._end(stream)
            else:
                self._fail(stream, awaited_cancelled(stream, "the engine"))
        except BaseException as error:
            if is_left(error, self._loop):
                raise
            self._fail(stream, as_engine_error(error))
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            self._end(stream)

    # Endpoints.

    async def _start(self, stream: Stream, body: dict[str, Any]) -> None:
        def progress(stage: str, fraction: float | None) -> None:
            self._on_loop(lambda: self._progress(stream, stage, fraction))

        self._engine.worker = WorkerHandle(self._queue_event, progress, body.get("role", "aggregated"))
        try:
            config = completed(await started(self._engine, body["worker_id"]), self._model_path, self._migration_limit)
            wire = config.to_wire()
            if not self._has_files and needs_files(config):
                raise InvalidArgument(
                    f"{self._model_path} is only a name, and the engine needs a tokenizer: give WorkerConfig a model_path, which is a folder with a "
                    "tokenizer, a GGUF file, or a name like Qwen/Qwen3-0.6B",
                    field="model_path",
                )
        except BaseException as error:
            if is_left(error, self._loop):
                raise
            # The worker ends the process as soon as it learns of the failure.
            await self._clean_up_start()
            raise
        await self._item(stream, pack({"config": wire}))
        logger.info("engine started: %s", config.model)

    async def _clean_up_start(self) -> None:
        async def cleanup() -> None:
            try:
                await called(self._engine.cleanup)
            except SystemExit as error:
                # Before Python 3.12 this is a task of its own, in which SystemExit would end the process.
                raise RuntimeError("cleanup called sys.exit()") from error

        try:
            await asyncio.wait_for(cleanup(), CLEANUP_S)
        except Exception:
            logger.exception("cleanup after the start that failed did not succeed")

    def _progress(self, stream: Stream, stage: str, fraction: float | None) -> None:
        # One unit of credit is reserved for the config. A stage that finds no credit may be lost.
        if stream.granted - stream.sent > 1 and stream.id in self._streams:
            stream.sent += 1
            self._batch(stream, pack({"progress": {"stage": stage, "fraction": fraction}}))

    async def _generate(self, stream: Stream, body: dict[str, Any]) -> None:
        if stream.is_stopped:
            # Its client left while it waited for its turn. A busy engine must not compute for nobody.
            return
        request = request_from_wire(body)
        answer = Answer(request)
        chunks = self._engine.generate(request, stream.context)
        check_chunks(chunks, self._engine)
        turn = self._turns.mark()
        try:
            async for chunk in chunks:
                if not isinstance(chunk, dict):
                    name, kind = type(self._engine).__name__, type(chunk).__name__
                    raise TypeError(f"{name} yields a {kind}: yield dictionaries such as {{'token_ids': [1]}}")
                plain = answer.plain(chunk)
                # Usually there is credit, and no need to wait for it.
                if plain is not None and stream.take_credit_now():
                    self._batch(stream, plain)
                else:
                    for item in answer.items(chunk) if plain is None else (plain,):
                        if not await stream.take_credit():
                            return
                        self._batch(stream, item)
                    if answer.is_finished:
                        self._end(stream)
                        return
                if turn == self._turns.count:
                    # The engine awaited nothing. Yield to the loop: it sends the output and reads the socket.
                    await asyncio.sleep(0)
                turn = self._turns.mark()
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
        # The worker reports a stream that ends without a terminal item: it knows the stream.

    async def _drain(self, stream: Stream, body: Any) -> None:
        await called(self._engine.drain)

    async def _cleanup(self, stream: Stream, body: Any) -> None:
        await self._clean_up(CANCEL_GRACE_S)
        logger.info("engine cleaned up")

    async def _control(self, stream: Stream, body: dict[str, Any]) -> None:
        arguments = dict(body)
        reply = await called(self._engine.control, arguments.pop("op"), arguments)
        await self._item(stream, pack(control_reply(reply)))

    async def _publish(self, stream: Stream, body: Any) -> None:
        self._events_stream = stream
        while True:
            await self._item(stream, await self._events.get())

    def _queue_event(self, event: Event) -> None:
        if event == STEP:
            self._on_loop(self._tell_step)
            return
        # Packed now: the caller may change its list later. If it cannot be packed or sent, that is the caller's error.
        packed = pack(event)
        check_size(packed, self._item_limit)
        self._on_loop(lambda: self._keep_event(packed))

    def _tell_step(self) -> None:
        # A step without credit, or without a listening worker, may be lost: the next one comes soon.
        stream = self._events_stream
        if stream is not None and stream.take_credit_now():
            self._batch(stream, _STEP)

    def _keep_event(self, packed: bytes) -> None:
        if self._events.full():
            # The worker is far behind. Losing single KV events is unsafe; clearing all blocks is safe, since then none counts as reusable.
            # Load and metrics have newer values later. A death is reported only once, so it is kept.
            logger.warning("the worker is %d events behind; they are dropped, with the KV blocks they told of", _EVENTS_KEPT)
            waiting = [self._events.get_nowait() for _ in range(_EVENTS_KEPT)]
            dead = [each for each in waiting if each.startswith(_DEAD)]
            for kept in (pack({"kv": "cleared"}), *dead[:1]):
                self._events.put_nowait(kept)
        self._events.put_nowait(packed)

    def _on_loop(self, call: Any) -> None:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            call()
        else:
            # A closed loop has no worker to notify, and the caller may be the engine's thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)
