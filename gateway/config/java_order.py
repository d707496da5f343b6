"""The order in which Kafka lists settings and quotas: that of a Java HashMap."""

from __future__ import annotations

from collections.abc import Iterable


def java_hash(text: str) -> int:
    """Return Java's String.hashCode of an ASCII text, as a non-negative number."""
    code = 0
    for character in text:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return code


def bucket(code: int, count: int) -> int:
    """Return the position of a hash code in a HashMap that has grown to hold `count` keys."""
    size = 1
    while count > 0.75 * size:
        size *= 2
    return (code ^ (code >> 16)) & (size - 1)


def in_java_order(names: Iterable[str], count: int | None = None) -> list[str]:
    """Return the names in the order of a HashMap of `count` keys; by default, of as many keys as there are names.
    Names that share a place keep their order."""
    listed = list(names)
    held = len(listed) if count is None else count
    return sorted(listed, key=lambda name: bucket(java_hash(name), held))
