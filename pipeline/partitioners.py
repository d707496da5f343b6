"""Recognise the hash that placed a key, of the two that Kafka's clients use by default.

Java's client, kafka-python and franz-go place by murmur2; librdkafka (and every client built on it) by CRC32. If both
kinds write to a topic, the events of one key are in two partitions and out of order, without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

_SEED, _MIX, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF
# in bytes. Longer keys are hashed one by one, because each of their words would cost a pass over all keys
_LONGEST_TOGETHER = 1024

Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def murmur2(key: bytes) -> int:
    """Return the 32-bit murmur2 hash of Kafka's Java client, with its sign bit cleared."""
    value = (_SEED ^ len(key)) & _MASK
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        block = int.from_bytes(key[start : start + 4], "little") * _MIX & _MASK
        block = (block ^ block >> 24) * _MIX & _MASK
        value = (value * _MIX & _MASK) ^ block
    if len(key) > whole:
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MIX & _MASK
    value = (value ^ value >> 13) * _MIX & _MASK
    return (value ^ value >> 15) & 0x7FFFFFFF


def murmur2_of(keys: Sequence[bytes]) -> Hashes:
    """Return `murmur2` of each key, computed word by word over all keys at once."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    together = lengths <= _LONGEST_TOGETHER
    found = np.zeros(len(keys), np.int64)
    for index in np.flatnonzero(~together).tolist():
        found[index] = murmur2(keys[index])
    # The keys are sorted by length, the longest first. So the keys that still have another word are the first ones.
    order = np.flatnonzero(together)
    order = order[np.argsort(-lengths[order], kind="stable")]
    if not len(order):
        return found
    sizes = lengths[order]
    numbers: list[int] = order.tolist()
    data = np.frombuffer(b"".join([keys[index] for index in numbers]), np.uint8).astype(np.uint32)
    starts = np.cumsum(sizes) - sizes
    value = (np.uint32(_SEED) ^ sizes.astype(np.uint32)).astype(np.uint32)
    mix = np.uint32(_MIX)
    for word in range(int(sizes[0]) // 4):
        some = int(np.searchsorted(-sizes, -(word + 1) * 4, side="right"))
        at = starts[:some] + word * 4
        block = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
        block *= mix
        block ^= block >> 24
        block *= mix
        value[:some] = value[:some] * mix ^ block
    rest = sizes % 4
    for byte in (2, 1, 0):
        some = np.flatnonzero(rest > byte)
        value[some] ^= data[starts[some] + sizes[some] // 4 * 4 + byte] << (8 * byte)
    value[rest > 0] *= mix
    value ^= value >> 13
    value *= mix
    value ^= value >> 15
    found[order] = value & np.uint32(0x7FFFFFFF)
    return found


def guessed(placed: Iterable[tuple[bytes, int]], partitions: int) -> str | None:
    """Return "murmur2" or "crc32", if that hash explains the partitions of all keys. Return "mixed" if each explains
    some keys, and None if neither explains any.
    """
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
