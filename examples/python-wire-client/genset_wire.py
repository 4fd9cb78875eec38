"""A client of Genset's wire protocol: connects to a worker, calls its endpoints, streams the answers.

It uses only what docs/wire-protocol.md says, to show that the document is enough. It needs Python 3.11, the standard
library and `msgpack`. It is written to be read and extended, not tuned for speed.

    instance = genset_discovery.list_instances("/run/user/1000/genset/discovery")[0]
    async with await Connection.open(instance.host, instance.port) as connection:
        async with await connection.call(instance.endpoint, instance.id, request) as stream:
            async for item in stream:
                print(item)
"""

import asyncio
import contextlib
import enum
import hashlib
import hmac
import secrets
import struct
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import msgpack

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
MAX_HANDSHAKE_BYTES = 4096
HEADER = struct.Struct(">IBBI")  # length of the rest, kind, flags, stream
HEADER_REST = 6


# Errors


class WireError(Exception):
    """Any error that keeps a call from being answered."""


class ProtocolError(WireError):
    """The peer broke the protocol, or speaks another protocol or version."""


class Refused(WireError):
    """The peer ended the connection and said why."""

    def __init__(self, go_away: dict[str, Any]):
        self.code: str = go_away["code"]
        super().__init__(f"{self.code}: {go_away['reason']}")


class Disconnected(WireError):
    """The connection ended during a call. The call may be sent to another instance."""


class RemoteError(WireError):
    """An `Error` frame: the worker refused the request, or failed to serve it."""

    RETRYABLE = frozenset(
        ["overloaded", "unavailable", "engine_shutdown", "cannot_connect", "disconnected", "stream_incomplete"]
    )

    def __init__(self, error: dict[str, Any]):
        self.kind: str = error["kind"]
        self.details: dict[str, Any] = error.get("details") or {}
        super().__init__(f"{self.kind}: {error['message']}")

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed if it is sent again, to this or another instance."""
        return self.kind in self.RETRYABLE


# Frames


class Kind(enum.IntEnum):
    HELLO = 0
    REQUEST = 1
    ITEM = 2
    END = 3
    ERROR = 4
    CANCEL = 5
    CREDIT = 6
    PING = 7
    PONG = 8
    GO_AWAY = 9
    AUTH = 10
    LEAVING = 11


def encode_frame(kind: int, stream: int, payload: bytes) -> bytes:
    return HEADER.pack(HEADER_REST + len(payload), kind, 0, stream) + payload


async def read_frame(reader: asyncio.StreamReader, limit: int) -> tuple[int, int, bytes]:
    """Reads the next frame: kind, stream and payload."""
    length, kind, _flags, stream = HEADER.unpack(await reader.readexactly(HEADER.size))
    if not HEADER_REST <= length <= HEADER_REST + limit:
        raise ProtocolError(f"a frame of length {length}; the limit is {limit}")
    return kind, stream, await reader.readexactly(length - HEADER_REST)


def unpack(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except ValueError as error:
        raise ProtocolError("a payload that is not one MessagePack value") from error


# Handshake


def proof(secret: bytes, role: str, caller_nonce: bytes, callee_nonce: bytes) -> bytes:
    """The proof by which `role` ("caller" or "callee") shows that it knows the secret."""
    key = hashlib.blake2b(secret.strip(b" \t\n\r\x0c"), digest_size=32).digest()
    data = f"genset wire {role}".encode() + caller_nonce + callee_nonce
    return hashlib.blake2b(data, digest_size=32, key=key).digest()


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes | None
) -> dict[str, Any]:
    """Exchanges Hellos with the callee, and returns its Hello."""

    async def receive(wanted: Kind) -> dict[str, Any]:
        while True:
            kind, _, payload = await read_frame(reader, MAX_HANDSHAKE_BYTES)
            if kind == Kind.GO_AWAY:
                raise Refused(unpack(payload))
            if kind == wanted:
                return unpack(payload)
            if kind in Kind._value2member_map_:
                raise ProtocolError(f"{Kind(kind).name} where {wanted.name} was due")

    nonce = secrets.token_bytes(32)
    hello = {
        "version": PROTOCOL_VERSION,
        "min_version": PROTOCOL_VERSION,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "has_secret": secret is not None,
        "nonce": nonce,
    }
    writer.write(encode_frame(Kind.HELLO, 0, msgpack.packb(hello)))
    theirs = await receive(Kind.HELLO)
    if not theirs["min_version"] <= PROTOCOL_VERSION <= theirs["version"]:
        raise ProtocolError(f"the peer speaks versions {theirs['min_version']} to {theirs['version']}, not 1")
    if secret is None and not theirs.get("has_secret", False):
        return theirs
    if secret is None or not theirs.get("has_secret", False) or len(theirs["nonce"]) < 16:
        # The callee reports the mismatch too. Give no proof over a nonce that is too short to be genuine.
        await receive(Kind.AUTH)
        raise ProtocolError("the peer went on without a shared secret")
    writer.write(encode_frame(Kind.AUTH, 0, msgpack.packb({"proof": proof(secret, "caller", nonce, theirs["nonce"])})))
    answer = await receive(Kind.AUTH)
    if not hmac.compare_digest(answer["proof"], proof(secret, "callee", nonce, theirs["nonce"])):
        raise Refused({"code": "unauthorized", "reason": "the worker has another secret"})
    return theirs


# Connections and streams


class Connection:
    """A connection to one process, shared by any number of calls. Make one with `open`, and close it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_limit: int):
        self._reader, self._writer = reader, writer
        self._peer_limit = peer_limit
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._heard = True
        self._ended: WireError | None = None
        self.is_going_away = False
        """Whether the peer refuses new calls."""
        self.leaving: set[int] = set()
        """Instances that announced that they refuse new calls."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        secret: bytes | None = None,
        *,
        connect_timeout: float = 3.0,
        ping_interval: float = 0.5,
        peer_timeout: float = 1.5,
    ) -> Self:
        """Connects, does the handshake, and proves the secret if there is one. All times are in seconds."""
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                hello = await _handshake(reader, writer, secret)
            except asyncio.IncompleteReadError as error:
                writer.close()
                raise Disconnected("the peer closed the connection in the handshake") from error
            except BaseException:
                writer.close()
                raise
        connection = cls(reader, writer, min(hello["max_frame_bytes"], MAX_FRAME_BYTES))
        connection._tasks = [
            asyncio.create_task(connection._read()),
            asyncio.create_task(connection._keep(ping_interval, peer_timeout)),
        ]
        return connection

    async def call(
        self,
        endpoint: str,
        instance: int,
        request: Any,
        *,
        request_id: str | None = None,
        deadline_ms: int | None = None,
        headers: dict[str, str] | None = None,
        window: int = 64,
    ) -> "Stream":
        """Sends a request. `window` is the most items that may be unread, at least 2."""
        if self._ended:
            raise Disconnected(str(self._ended)) from self._ended
        head = {"endpoint": endpoint, "instance": instance, "id": request_id or secrets.token_hex(8), "credit": window}
        if deadline_ms is not None:
            head["deadline_ms"] = deadline_ms
        if headers:
            head["headers"] = headers
        payload = msgpack.packb(head) + msgpack.packb(request)
        if len(payload) > self._peer_limit:
            raise ValueError(f"a request of {len(payload)} bytes; the peer takes {self._peer_limit}")
        stream = Stream(self, self._next_id, window)
        self._next_id += 1
        self._streams[stream.id] = stream
        self._send(Kind.REQUEST, stream.id, payload)
        await self._writer.drain()
        return stream

    async def closed(self) -> None:
        """Waits until the connection has ended."""
        await asyncio.wait(self._tasks[:1])

    async def close(self) -> None:
        """Ends the connection, and every call on it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(Disconnected("this side closed the connection"))
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def _send(self, kind: Kind, stream: int, payload: bytes) -> None:
        if not self._ended:
            self._writer.write(encode_frame(kind, stream, payload))

    async def _read(self) -> None:
        try:
            while True:
                frame = await read_frame(self._reader, MAX_FRAME_BYTES)
                self._heard = True
                self._take(*frame)
        except asyncio.IncompleteReadError:
            self._end(Disconnected("the peer closed the connection"))
        except OSError as error:
            self._end(Disconnected(str(error)))
        except WireError as error:
            self._end(error)
        except (KeyError, TypeError) as error:
            self._end(ProtocolError(f"a payload of another type than its frame's: {error!r}"))

    def _take(self, kind: int, id: int, payload: bytes) -> None:
        match kind:
            case Kind.ITEM | Kind.END | Kind.ERROR:
                # Late frames of a stream that was left.
                if stream := self._streams.get(id):
                    stream._take(kind, payload)
            case Kind.PING:
                self._send(Kind.PONG, 0, payload)
            case Kind.GO_AWAY:
                go_away = unpack(payload)
                if go_away["code"] != "shutdown":
                    raise Refused(go_away)
                self.is_going_away = True
            case Kind.LEAVING:
                self.leaving.add(unpack(payload)["instance"])
            case Kind.HELLO | Kind.AUTH | Kind.REQUEST | Kind.CANCEL | Kind.CREDIT:
                raise ProtocolError(f"{Kind(kind).name} from a callee")

    async def _keep(self, ping_interval: float, peer_timeout: float) -> None:
        silent = 0.0
        while silent < peer_timeout:
            await asyncio.sleep(ping_interval)
            if self._heard:
                self._heard, silent = False, 0.0
            else:
                silent += ping_interval
                self._send(Kind.PING, 0, b"")
        self._end(Disconnected(f"the peer was silent for {silent} s"))

    def _end(self, error: WireError) -> None:
        if self._ended is None:
            self._ended = error
            self._writer.close()
            for stream in list(self._streams.values()):
                stream._end(Disconnected(str(error)))


class Stream(AsyncIterator[Any]):
    """The answer to one call: its items, as they arrive. Leaving the `async with` block early abandons the call."""

    def __init__(self, connection: Connection, id: int, window: int):
        if window < 2:
            raise ValueError("window: must be at least 2")
        self.id = id
        self._connection = connection
        self._window = window
        self._items: deque[bytes] = deque()
        self._unacknowledged = 0
        self._error: WireError | None = None
        self._is_ended = False
        self._news = asyncio.Event()

    @property
    def unread(self) -> int:
        """The number of items that arrived and were not read yet; never more than the window."""
        return len(self._items)

    async def __anext__(self) -> Any:
        while not self._items:
            if self._error:
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        item = unpack(self._items.popleft())
        self._acknowledge()
        return item

    def cancel(self, reason: str = "client") -> None:
        """Asks the worker to stop. Its last items still arrive: read on to the end."""
        if not self._is_ended:
            self._connection._send(Kind.CANCEL, self.id, msgpack.packb({"reason": reason, "discard": False}))

    def leave(self, reason: str = "client") -> None:
        """Abandons the call: no more items arrive."""
        if not self._is_ended:
            self._connection._send(Kind.CANCEL, self.id, msgpack.packb({"reason": reason, "discard": True}))
            self._items.clear()
            self._end(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.leave()

    def _acknowledge(self) -> None:
        self._unacknowledged += 1
        if not self._is_ended and self._unacknowledged >= self._window // 2:
            self._connection._send(Kind.CREDIT, self.id, msgpack.packb({"items": self._unacknowledged}))
            self._unacknowledged = 0

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.ERROR:
            self._end(RemoteError(unpack(payload)))
        elif kind == Kind.END:
            self._end(None)
        elif len(self._items) >= self._window:
            raise ProtocolError(f"stream {self.id} has more items than it had credit for")
        else:
            self._items.append(payload)
            self._news.set()

    def _end(self, error: WireError | None) -> None:
        self._is_ended, self._error = True, error
        self._connection._streams.pop(self.id, None)
        self._news.set()
