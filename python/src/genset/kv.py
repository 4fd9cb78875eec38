"""Hashes of KV blocks as routers compute them from a prompt. An engine publishes them for the blocks in its prefix cache.

    hashes = hash_blocks(request["token_ids"], 16, cache_salt=request.get("cache_salt"), adapter=request.get("adapter"))
    self.worker.publish_kv_stored(hashes)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from genset._xxh3 import xxh3_64
from genset.exceptions import InvalidArgument

__all__ = ["hash_blocks"]

_SALT_SEED = int.from_bytes(b"genset", "big")
_ADAPTER_SEED = int.from_bytes(b"adapter", "big")


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
    parent: int | None = None,
) -> list[int]:
    """Returns the hash of each full block of a sequence, in order, over all tokens up to its end. Tokens after the last full block have none.

    `block_size` is the engine's declared `kv_cache_block_size`; `cache_salt` and `adapter` are the request's. `parent` is the hash of
    the block before the first, for extending a sequence; it already includes salt and adapter. A block of 16 tokens takes about
    7 microseconds.
    """
    if block_size < 1:
        raise InvalidArgument("must be at least 1", field="block_size")
    before = _root(cache_salt, adapter) if parent is None else _number(parent)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        hashes.append(xxh3_64(before + struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])))
        before = _number(hashes[-1])
    return hashes


def _root(cache_salt: str | None, adapter: str | None) -> bytes:
    """The salt and the adapter, hashed: the parent of a sequence's first block. Empty if there is neither."""
    salt = b"" if cache_salt is None else _number(xxh3_64(cache_salt.encode(), _SALT_SEED))
    if adapter is None:
        return salt
    return _number(xxh3_64(bytes([bool(salt)]) + salt + adapter.encode(), _ADAPTER_SEED))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
