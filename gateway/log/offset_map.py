"""The newest offset of each key: a hash table of sixteen bytes a slot, for ten million keys where a dict takes two
gigabytes.

The one idea: a key is its digest of twelve bytes (two of ten million are alike once in 10**15 runs), an offset four
bytes relative to where the map begins. Slots lie in one mapping whose pages are taken when they are first written and
which doubles until it is as large as it may be.
"""

from __future__ import annotations

import mmap
import struct
from hashlib import blake2b
from typing import cast

from protocol.buffer import Buffer

SLOT_BYTES = 16
DIGEST_BYTES = 12
FIRST_SLOTS = 1 << 12
MAX_SPAN = 2**32 - 2
"""Number of offsets that one map can distinguish."""

_OFFSET = struct.Struct("<I")
_FREE = bytes(4)


class OffsetMap:
    """Offsets from `base_offset` on, at most `max_keys` of them and what the last batch brings more."""

    __slots__ = ("_base_offset", "_count", "_end_mask", "_limit", "_max_keys", "_table")

    def __init__(self, base_offset: int, max_keys: int) -> None:
        self._base_offset = base_offset
        self._max_keys = max_keys
        self._count = 0
        self._allocate(FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self._max_keys

    def covers(self, offset: int) -> bool:
        """Return True if the offset can be stored. A run must end before an offset that cannot."""
        return 0 <= offset - self._base_offset < MAX_SPAN

    def put(self, key: Buffer, offset: int) -> None:
        """Store the offset of a key. `offset` is above every offset stored before. Ignore an offset below
        `base_offset`: it belongs to the beginning of a batch that DeleteRecords has split."""
        if offset < self._base_offset:
            return
        digest = blake2b(key, digest_size=DIGEST_BYTES).digest()
        at = self._find(digest)
        table = self._table
        if table[at + DIGEST_BYTES : at + SLOT_BYTES] == _FREE:
            if self._count >= self._limit:
                self._grow()
                at = self._find(digest)
                table = self._table
            self._count += 1
            table[at : at + DIGEST_BYTES] = digest
        # Store the distance plus one, because a slot of zeros is free.
        _OFFSET.pack_into(table, at + DIGEST_BYTES, offset - self._base_offset + 1)

    def newest(self, key: Buffer) -> int:
        """Return the newest offset of the key; −1 for an unknown key."""
        at = self._find(blake2b(key, digest_size=DIGEST_BYTES).digest())
        (distance,) = cast("tuple[int]", _OFFSET.unpack_from(self._table, at + DIGEST_BYTES))
        return self._base_offset + distance - 1 if distance else -1

    def _find(self, digest: bytes) -> int:
        """Return the position of the digest's slot, or of the free slot for it."""
        table, end_mask = self._table, self._end_mask
        at = int.from_bytes(digest[:5], "little") * SLOT_BYTES & end_mask
        while True:
            slot = table[at : at + SLOT_BYTES]
            if slot.startswith(digest) or slot.endswith(_FREE):
                return at
            at = at + SLOT_BYTES & end_mask

    def _allocate(self, slots: int) -> None:
        size = slots * SLOT_BYTES
        self._table = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._end_mask = size - 1
        self._limit = slots * 3 // 4

    def _grow(self) -> None:
        before = self._table
        self._allocate(2 * len(before) // SLOT_BYTES)
        for at in range(0, len(before), SLOT_BYTES):
            slot = before[at : at + SLOT_BYTES]
            if not slot.endswith(_FREE):
                to = self._find(slot[:DIGEST_BYTES])
                self._table[to : to + SLOT_BYTES] = slot
        before.close()
