"""XXH3-64 in pure Python, for code that cannot rely on a library: hashes of KV blocks, with short inputs.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_MASK = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MX1, _MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORDS = [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(len(_SECRET) - 7)]
"""The word at each byte offset of the secret."""
_STRIPE, _BLOCK = 64, 1024


def xxh3_64(data: bytes, seed: int = 0) -> int:
    """The hash of `data`; `seed` is unsigned 64-bit."""
    size = len(data)
    if size > 240:
        return _long(data, seed)
    if size > 128:
        return _to_240(data, seed)
    if size > 16:
        return _to_128(data, seed)
    return _to_16(data, seed)


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _fold(one: int, other: int) -> int:
    product = one * other
    return (product & _MASK) ^ (product >> 64)


def _avalanche(value: int) -> int:
    value = ((value ^ (value >> 37)) * _MX1) & _MASK
    return value ^ (value >> 32)


def _avalanche_64(value: int) -> int:
    value = ((value ^ (value >> 33)) * _P64_2) & _MASK
    value = ((value ^ (value >> 29)) * _P64_3) & _MASK
    return value ^ (value >> 32)


def _swapped(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _to_16(data: bytes, seed: int) -> int:
    size = len(data)
    if size > 8:
        low = _word(data, 0) ^ ((_WORDS[24] ^ _WORDS[32]) + seed & _MASK)
        high = _word(data, size - 8) ^ ((_WORDS[40] ^ _WORDS[48]) - seed & _MASK)
        return _avalanche((size + _swapped(low, 8) + high + _fold(low, high)) & _MASK)
    if size >= 4:
        seed ^= _swapped(seed & 0xFFFFFFFF, 4) << 32
        both = _word(data, size - 4, 4) + (_word(data, 0, 4) << 32)
        value = both ^ ((_WORDS[8] ^ _WORDS[16]) - seed & _MASK)
        rotated = [(value << by | value >> (64 - by)) & _MASK for by in (49, 24)]
        value = ((value ^ rotated[0] ^ rotated[1]) * _MX2) & _MASK
        value = ((value ^ ((value >> 35) + size)) * _MX2) & _MASK
        return value ^ (value >> 28)
    if size > 0:
        both = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        flip = (_WORDS[0] & 0xFFFFFFFF) ^ (_WORDS[4] & 0xFFFFFFFF)
        return _avalanche_64(both ^ (flip + seed & _MASK))
    return _avalanche_64(seed ^ _WORDS[56] ^ _WORDS[64])


def _mixed(data: bytes, at: int, secret_at: int, seed: int) -> int:
    low, high = struct.unpack_from("<QQ", data, at)
    return _fold(low ^ (_WORDS[secret_at] + seed & _MASK), high ^ (_WORDS[secret_at + 8] - seed & _MASK))


def _to_128(data: bytes, seed: int) -> int:
    size = len(data)
    sum_ = size * _P64_1
    for pair in range((size - 1) // 32 + 1):
        sum_ += _mixed(data, 16 * pair, 32 * pair, seed)
        sum_ += _mixed(data, size - 16 * (pair + 1), 32 * pair + 16, seed)
    return _avalanche(sum_ & _MASK)


def _to_240(data: bytes, seed: int) -> int:
    size = len(data)
    first = size * _P64_1 + sum(_mixed(data, 16 * part, 16 * part, seed) for part in range(8))
    rest = sum(_mixed(data, 16 * part, 16 * (part - 8) + 3, seed) for part in range(8, size // 16))
    last = _mixed(data, size - 16, 136 - 17, seed)
    return _avalanche(_avalanche(first & _MASK) + rest + last & _MASK)


def _long(data: bytes, seed: int) -> int:
    size = len(data)
    words = _WORDS if seed == 0 else _seeded(seed)
    sums = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    stripes = (size - 1) // _STRIPE
    for stripe in range(stripes):
        place = stripe % (_BLOCK // _STRIPE)
        _accumulate(sums, data, stripe * _STRIPE, words, place * 8)
        if place == _BLOCK // _STRIPE - 1:
            for lane, value in enumerate(sums):
                sums[lane] = ((value ^ (value >> 47) ^ words[128 + 8 * lane]) * _P32_1) & _MASK
    _accumulate(sums, data, size - _STRIPE, words, 192 - _STRIPE - 7)
    pairs = (_fold(sums[2 * i] ^ words[11 + 16 * i], sums[2 * i + 1] ^ words[19 + 16 * i]) for i in range(4))
    return _avalanche(size * _P64_1 + sum(pairs) & _MASK)


def _accumulate(sums: list[int], data: bytes, at: int, words: Sequence[int], secret_at: int) -> None:
    for lane, value in enumerate(struct.unpack_from("<8Q", data, at)):
        keyed = value ^ words[secret_at + 8 * lane]
        sums[lane ^ 1] = (sums[lane ^ 1] + value) & _MASK
        sums[lane] = (sums[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & _MASK


def _seeded(seed: int) -> list[int]:
    """The secret's words for long inputs."""
    parts = struct.unpack("<24Q", _SECRET)
    secret = struct.pack("<24Q", *((part + (-seed if place % 2 else seed)) & _MASK for place, part in enumerate(parts)))
    return [_word(secret, at) for at in range(len(secret) - 7)]
