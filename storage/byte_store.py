"""The interface of a place for the bytes of chunks outside Postgres: numbered objects that are written durably, read in
ranges, listed and removed.

The one idea: an object's number is used once, and its bytes never change under a position. So a reader may cache what
it has read. The index in Postgres alone says which bytes count. `segments.py` keeps objects as files that grow by
appends, `object_store.py` as whole objects of a bucket.

Every failure is an OSError: FileNotFoundError if the object does not exist, TimeoutError if the store does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
Range = tuple[int, int]
"""Position and size in bytes."""

MARKER = "sluice-store.json"
"""Name of the marker in a store."""

BUCKET_URL = re.compile(r"(s3|gs|az)://[^/?#@:\s]+(/[^?#\s]*)?")
"""Matches a bucket and a prefix in it. The pattern has no place for a secret."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundObject:
    object_id: int
    size_bytes: int
    age_s: float
    """Time since the last write, by the clocks of the store and of this machine."""


class ByteStore(Protocol):
    """One store, which every node of the database must reach."""

    @property
    def location(self) -> str:
        """The place, as the setting spells it."""
        ...

    @property
    def listing_interval_s(self) -> float:
        """Time between two searches for unknown objects. It is long for stores that charge for listing."""
        ...

    def name(self, object_id: int) -> str:
        """Return the object's name in the store, for messages to people."""
        ...

    async def put(self, object_id: int, pieces: Sequence[Buffer]) -> None:
        """Write a whole new object durably. If this raises an error, the object may exist nevertheless."""
        ...

    async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
        """Read byte ranges, and return what `look` returns for their bytes. Ranges are passed to it in the given order.
        `look` runs off the event loop. If the object is too short, the end of a range's bytes is missing."""
        ...

    def forget(self, object_id: int | None) -> None:
        """Drop what is cached of the object (None: of all objects), because it was wrong. The next read asks the store
        itself.
        """
        ...

    async def remove(self, object_ids: Sequence[int]) -> None:
        """Remove those objects that exist."""
        ...

    async def listed(self) -> list[FoundObject]:
        """List every object."""
        ...

    async def read_marker(self) -> bytes | None:
        """Return the marker that says which database owns this store, or None."""
        ...

    async def create_marker(self, marker: bytes) -> None:
        """Write the marker. Raise FileExistsError if one exists, as far as the store can tell."""
        ...

    async def replace_marker(self, marker: bytes) -> None:
        """Write the marker in place of the present one."""
        ...

    def close(self) -> None:
        """Release threads. Calls in progress may end or not."""
        ...
