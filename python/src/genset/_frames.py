"""Frames of `docs/wire-protocol.md`, without I/O."""

from __future__ import annotations

import enum
import struct
from typing import Any

import msgpack

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
_HEADER = struct.Struct(">IBBI")  # length of the rest, kind, flags, stream
_HEADER_REST = 6


class ProtocolError(Exception):
    """The worker broke the protocol, or speaks another version."""


class Kind(enum.IntEnum):
    """The kind of a frame."""

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


Frame = tuple[int, int, bytes]
"""Kind, stream and payload."""


def pack(value: Any) -> bytes:
    """Encodes one MessagePack value."""
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed


def unpack(payload: bytes) -> Any:
    """Decodes the only value of a payload."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except ValueError as error:
        raise ProtocolError("a payload that is not one MessagePack value") from error


def unpack_request(payload: bytes) -> tuple[Any, Any]:
    """Decodes the two values of a Request: head and request."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=MAX_FRAME_BYTES)
    unpacker.feed(payload)
    try:
        return unpacker.unpack(), unpacker.unpack()
    except (ValueError, msgpack.OutOfData) as error:
        raise ProtocolError("a Request that is not two MessagePack values") from error


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Encodes a whole frame."""
    return _HEADER.pack(_HEADER_REST + len(payload), kind, 0, stream) + payload


def encode_batch(pairs: list[bytes]) -> bytes:
    """Encodes a frame on stream 0 with pairs that are packed already."""
    header = b"\xdd" + len(pairs).to_bytes(4, "big")
    return encode(Kind.ITEM, 0, b"".join((header, *pairs)))


def encode_batches(pairs: list[bytes], limit: int) -> bytes:
    """As `encode_batch`, but splits several pairs into frames of at most `limit` bytes."""
    if len(pairs) == 1 or sum(map(len, pairs)) <= limit:
        return encode_batch(pairs)
    middle = len(pairs) // 2
    return encode_batches(pairs[:middle], limit) + encode_batches(pairs[middle:], limit)


class Decoder:
    """Turns bytes into frames, however they are split on arrival."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that are complete now."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, kind, _flags, stream = _HEADER.unpack_from(buffer, start)
            if not _HEADER_REST <= length <= _HEADER_REST + self._limit:
                raise ProtocolError(f"a frame of length {length}; payloads may have {self._limit} bytes")
            end = start + 4 + length
            if end > len(buffer):
                break
            frames.append((kind, stream, bytes(buffer[start + _HEADER.size : end])))
            start = end
        del buffer[:start]
        return frames
