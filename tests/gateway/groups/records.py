"""Stored records of groups, whose writes a test can delay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.groups.kinds import MACHINES, AnyGroup


class Record:
    """A stored group with any value."""

    def __init__(self, group: AnyGroup) -> None:
        self.group = group

    @property
    def group_id(self) -> str:
        return self.group.group_id


class Records:
    """Stores everything at once, and returns what was stored."""

    def __init__(self) -> None:
        self.stored: dict[str, AnyGroup] = {}

    async def write(
        self, group_id: str, group: AnyGroup, unstored: object, lease: object, wanted: object, *, apart: object = None
    ) -> None:
        self.stored[group_id] = group

    async def read(self, group_id: str, wanted: object) -> Record | None:
        return Record(self.stored[group_id]) if group_id in self.stored else None

    async def read_shard(self, shard: int, wanted: object) -> Sequence[Record]:
        return [Record(group) for group in self.stored.values()]

    def is_large(self, record: Record) -> bool:
        return False

    def restored(self, record: Record, now_ms: int, settings: Any) -> AnyGroup:
        stored, members = MACHINES.of(record.group), {}
        for member_id in stored.member_ids(record.group):
            member = stored.stored_member(record.group, member_id)
            assert member is not None
            members[member_id] = member.document
        return stored.restore(record.group_id, stored.stored(record.group), members, None, now_ms, settings)
