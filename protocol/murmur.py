"""The hash by which Kafka's Java client chooses the partition of a record with a key."""

from __future__ import annotations

_SEED, _MIX, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Return the murmur2 hash of a key, with its sign bit cleared. The hash modulo the number of partitions is the
    key's partition.
    """
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
