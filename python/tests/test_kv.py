"""Hashes of KV blocks equal those of routers. `engines/subprocess/tests/python_package.rs` compares them with the routers' own."""

from __future__ import annotations

import pytest

from genset._xxh3 import xxh3_64
from genset.exceptions import InvalidArgument
from genset.kv import hash_blocks

# Number of bytes, hash without a seed, hash with the seed of salts: from the reference implementation, libxxhash 0.8.1.
REFERENCE = [
    (0, 0x2D06800538D394C2, 0x79CAC49D29011451),
    (1, 0xC44BDFF4074EECDB, 0x378DCA60F0C6EECD),
    (3, 0x5F4299FC161C9CBB, 0xB06C5B85B1B717F5),
    (4, 0x60DAB036A58211F2, 0xA118B655F8D7DEF1),
    (8, 0x3A1C2D7C85AF88F8, 0x3E25DFE2F97C3D24),
    (9, 0xE9612598145BB9DC, 0x59174B7168C5D12C),
    (16, 0x8355E3A6F61770DB, 0xA431917C05AD109A),
    (17, 0x9EF341A99DE37328, 0x3EABA2EA87ACB7E0),
    (72, 0x62C7252A413F57BB, 0x3097DB3434F59C34),
    (128, 0x85C6174C7FF4C46B, 0x10B7F20B9CCE98B0),
    (129, 0xEC7642B431BA3E5A, 0xC62D9D38B95C4B96),
    (240, 0x375A384D957FE865, 0x9CA633343F0239E3),
    (241, 0x02E8CD95421C6D02, 0x145626C99ECDAB64),
    (1024, 0xE5D78BAFA45B2AA5, 0x2BC13548BB625EA4),
    (1025, 0xE95C42288F28186E, 0x7E5A795647EB33C5),
    (2100, 0xF46CE9F4248EB269, 0x9A393FF08F7CBF83),
]


@pytest.mark.parametrize(("size", "plain", "seeded"), REFERENCE)
def test_the_hash_is_that_of_the_reference(size: int, plain: int, seeded: int) -> None:
    data = bytes(place % 251 for place in range(size))
    assert (xxh3_64(data), xxh3_64(data, 0x67656E736574)) == (plain, seeded)


def test_full_blocks_alone_are_hashed_each_with_what_is_before_it() -> None:
    assert hash_blocks([1], 2) == []
    hashes = hash_blocks([1, 2, 3, 4, 5], 2)
    assert hashes == [0x389E2C8892D5450, 0x66803502F7701AF4]
    assert hash_blocks([3, 4], 2, parent=hashes[0]) == hashes[1:]
    salted = hash_blocks([1, 2, 3, 4], 2, cache_salt="a", adapter="b")
    assert salted == [0xC0F95C859EF127AF, 0x109F21B291444973]
    # The parent is part of all following hashes.
    pairs = [(salt, adapter) for salt in (None, "", "a", "b") for adapter in (None, "", "a", "b")]
    assert len({each for salt, adapter in pairs for each in hash_blocks([5] * 4, 2, cache_salt=salt, adapter=adapter)}) == 32
    with pytest.raises(InvalidArgument, match="block_size: must be at least 1"):
        hash_blocks([1], 0)
