"""Deadlines of many members, one of which moves at a time.

The one idea: a group is a value, so a heartbeat that moves one deadline makes another mapping. A mapping kept in
buckets shares all buckets but one with the new one. So a heartbeat in a group of a thousand members copies some sixteen
deadlines, not a thousand. No bucket is mutated once a mapping holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.coordinator.facts import MemberId

BUCKETS = 64


class Deadlines(Mapping[MemberId, int]):
    """A mapping of deadlines. Its order of iteration is not defined."""

    __slots__ = ("buckets",)

    def __init__(self, deadlines: Mapping[MemberId, int] | None = None) -> None:
        buckets: tuple[dict[MemberId, int], ...] = tuple({} for _ in range(BUCKETS))
        for member_id, at_ms in (deadlines or {}).items():
            buckets[hash(member_id) % BUCKETS][member_id] = at_ms
        self.buckets = buckets

    def __getitem__(self, member_id: MemberId) -> int:
        return self.buckets[hash(member_id) % BUCKETS][member_id]

    def __iter__(self) -> Iterator[MemberId]:
        for bucket in self.buckets:
            yield from bucket

    def __len__(self) -> int:
        return sum(map(len, self.buckets))

    def __repr__(self) -> str:
        return repr(dict(self))

    def moved(self, member_id: MemberId, at_ms: int) -> Deadlines:
        """Return the same deadlines with one of them changed."""
        at = hash(member_id) % BUCKETS
        return self._with(at, {**self.buckets[at], member_id: at_ms})

    def without(self, member_id: MemberId) -> Deadlines:
        """Return the deadlines without the member's. Return the same object if the member had none."""
        at = hash(member_id) % BUCKETS
        bucket = self.buckets[at]
        if member_id not in bucket:
            return self
        return self._with(at, {key: at_ms for key, at_ms in bucket.items() if key != member_id})

    def earliest(self) -> int | None:
        return min((min(bucket.values()) for bucket in self.buckets if bucket), default=None)

    def due(self, now_ms: int) -> list[MemberId]:
        return [member_id for bucket in self.buckets for member_id, at_ms in bucket.items() if at_ms <= now_ms]

    def later(self, by_ms: int) -> Deadlines:
        """Return the same deadlines, all moved to a later time."""
        return self._made(tuple({key: at_ms + by_ms for key, at_ms in bucket.items()} for bucket in self.buckets))

    def _with(self, at: int, bucket: dict[MemberId, int]) -> Deadlines:
        buckets = list(self.buckets)
        buckets[at] = bucket
        return self._made(tuple(buckets))

    @staticmethod
    def _made(buckets: tuple[dict[MemberId, int], ...]) -> Deadlines:
        made = object.__new__(Deadlines)
        made.buckets = buckets
        return made


NO_DEADLINES = Deadlines()


def no_deadlines() -> Deadlines:
    """Return the default of fields that hold no deadlines."""
    return NO_DEADLINES
