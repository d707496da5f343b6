"""Hashes of hashes: a tree whose root stands for all its leaves.

The one idea: a leaf and a node begin with different bytes, as in RFC 6962, so that no node has the hash of a leaf. If
the last hash of a level has no neighbour, the next level takes it unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

_LEAF, _NODE = b"\x00", b"\x01"
EMPTY = hashlib.sha256().hexdigest()


def leaf(content: bytes) -> bytes:
    return hashlib.sha256(_LEAF + content).digest()


def root(contents: Iterable[bytes]) -> str:
    """Return the root over `contents` in their order, in hexadecimal digits."""
    level: Sequence[bytes] = [leaf(content) for content in contents]
    if not level:
        return EMPTY
    while len(level) > 1:
        level = [
            hashlib.sha256(_NODE + level[at] + level[at + 1]).digest() if at + 1 < len(level) else level[at]
            for at in range(0, len(level), 2)
        ]
    return level[0].hex()
