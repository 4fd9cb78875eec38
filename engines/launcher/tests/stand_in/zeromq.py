"""The parts of ZeroMQ and MessagePack that publishers of KV events need."""

import asyncio
import struct

def pack(value):
    """Encodes a value as MessagePack."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        return b"\xd3" + value.to_bytes(8, "big", signed=True) if value < 0 else b"\xcf" + value.to_bytes(8, "big")
    if isinstance(value, str):
        return b"\xdb" + len(value.encode()).to_bytes(4, "big") + value.encode()
    if isinstance(value, dict):
        return b"\xdf" + len(value).to_bytes(4, "big") + b"".join(pack(key) + pack(value[key]) for key in value)
    return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(map(pack, value))


class Socket:
    """A socket of ZeroMQ that others connect to (ZMTP 3.0, no security)."""

    def __init__(self, kind, path, answer=None):
        self.kind, self.path, self.answer, self.peers = kind, path, answer, set()

    async def listen(self):
        await asyncio.start_unix_server(self.meet, self.path)

    def send(self, writer, parts):
        for place, part in enumerate(parts):
            more = place + 1 < len(parts)
            writer.write(bytes([2 | more]) + len(part).to_bytes(8, "big") + part)

    async def meet(self, reader, writer):
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0"))
        ready = b"\x05READY\x0bSocket-Type" + len(self.kind).to_bytes(4, "big") + self.kind
        writer.write(bytes([4, len(ready)]) + ready)
        parts = []
        try:
            await reader.readexactly(64)
            while True:
                flags = (await reader.readexactly(1))[0]
                size = int.from_bytes(await reader.readexactly(8 if flags & 2 else 1), "big")
                part = await reader.readexactly(size)
                self.peers.add(writer)
                if flags & 4:
                    continue
                parts.append(part)
                if not flags & 1:
                    if self.answer:
                        self.answer(writer, parts)
                    parts = []
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.peers.discard(writer)
            writer.close()
