"""Which hash put a key where it lies: the two that Kafka's clients use by default.

Java's client, kafka-python and franz-go place by murmur2; librdkafka (and all that is built on it) by CRC32. A topic
that both write has the events of one key in two partitions, out of order, and nobody notices.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable


def murmur2(key: bytes) -> int:
    """The 32-bit murmur2 of Kafka's Java client, with its sign bit cleared."""
    mask, mix = 0xFFFFFFFF, 0x5BD1E995
    value = (0x9747B28C ^ len(key)) & mask
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        block = int.from_bytes(key[start : start + 4], "little") * mix & mask
        block = (block ^ block >> 24) * mix & mask
        value = (value * mix & mask) ^ block
    if len(key) > whole:
        value = (value ^ int.from_bytes(key[whole:], "little")) * mix & mask
    value = (value ^ value >> 13) * mix & mask
    return (value ^ value >> 15) & 0x7FFFFFFF


def guessed(placed: Iterable[tuple[bytes, int]], partitions: int) -> str | None:
    """ "murmur2", "crc32", "mixed" (each of some keys) or None if neither explains where these keys lie."""
    keys = list(placed)
    if partitions < 2 or len(keys) < 4:
        return None
    java = sum(murmur2(key) % partitions == partition for key, partition in keys)
    librdkafka = sum(zlib.crc32(key) % partitions == partition for key, partition in keys)
    if java == len(keys):
        return "murmur2"
    if librdkafka == len(keys):
        return "crc32"
    explained = sum(partition in (murmur2(key) % partitions, zlib.crc32(key) % partitions) for key, partition in keys)
    by_chance = len(keys) / partitions
    return "mixed" if explained == len(keys) and min(java, librdkafka) > 1.5 * by_chance else None
