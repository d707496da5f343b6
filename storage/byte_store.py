"""What a place for the bytes of chunks beside Postgres must do: numbered objects that are written durably, read in
ranges, listed and removed.

The one idea: an object's number is used once and its bytes never change under a position, so whoever has read something
may keep it; which bytes count is said by the index in Postgres alone. `segments.py` keeps objects as files that grow by
appends, `object_store.py` as whole objects of a bucket.

Every failure is an OSError: FileNotFoundError where there is no such object, TimeoutError where the store says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
Range = tuple[int, int]
"""Position and size."""

MARKER = "sluice-store.json"
"""What the marker of a store is called in it."""

BUCKET_URL = re.compile(r"(s3|gs|az)://[^/?#@:\s]+(/[^?#\s]*)?")
"""What names a bucket and a prefix in it, and has no place for a secret."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundObject:
    object_id: int
    size_bytes: int
    age_s: float
    """Since it was last written to, by the store's clock and ours."""


class ByteStore(Protocol):
    """One store, which every node of the database must reach."""

    @property
    def location(self) -> str:
        """As the person who started the node gave it."""
        ...

    @property
    def listing_interval_s(self) -> float:
        """How long to leave between two looks for what nobody knows: some stores charge for a list."""
        ...

    def name(self, object_id: int) -> str:
        """What the object is called there, for people."""
        ...

    async def put(self, object_id: int, pieces: Sequence[Buffer]) -> None:
        """A whole new object, durable when this returns; where it raises there may be one all the same."""
        ...

    async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
        """What `look`, off the event loop, makes of the bytes of the ranges in the order given. Bytes that the object
        does not have are missing at the end of their range."""
        ...

    def forget(self, object_id: int | None) -> None:
        """What was read of it (None: of all) was wrong: the next read asks the store itself."""
        ...

    async def remove(self, object_ids: Sequence[int]) -> None:
        """Removes those that are there."""
        ...

    async def listed(self) -> list[FoundObject]:
        """Every object there is."""
        ...

    async def read_marker(self) -> bytes | None:
        """What says whose store this is; None if nothing does."""
        ...

    async def create_marker(self, marker: bytes) -> None:
        """Says it, where nothing did: FileExistsError otherwise, as far as the store can tell."""
        ...

    def close(self) -> None:
        """Lets go of threads; calls under way may end or not."""
        ...
