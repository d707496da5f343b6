"""Rows of groups and members."""

from __future__ import annotations

import dataclasses

from storage.groups import GroupStore
from storage.types import CoordinatorLease, GroupChange, GroupRecord, MemberRecord, Saved


def member(member_id: str, member_epoch: int = 0, **document: object) -> MemberRecord:
    return MemberRecord(member_id, {"client_id": "client", "assignment": "YQ==", **document}, member_epoch)


def group(group_id: str = "g", **changes: object) -> GroupRecord:
    return dataclasses.replace(
        GroupRecord(
            group_id=group_id,
            group_type="classic",
            state="Stable",
            protocol_type="consumer",
            generation_id=3,
            document={"protocol_name": "range", "leader_id": "m2"},
            members=(member("m1", group_instance_id="instance-1"), member("m2")),
        ),
        **changes,  # type: ignore[arg-type]
    )


def whole(record: GroupRecord, lease: CoordinatorLease, **changes: object) -> GroupChange:
    """Return the change after which the stored group equals `record`."""
    return dataclasses.replace(
        GroupChange(
            lease=lease,
            group_id=record.group_id,
            group_type=record.group_type,
            state=record.state,
            protocol_type=record.protocol_type,
            generation_id=record.generation_id,
            document=record.document,
            all_heard=True,
            changed=record.members,
            replaced=True,
        ),
        **changes,  # type: ignore[arg-type]
    )


async def save(groups: GroupStore, record: GroupRecord, lease: CoordinatorLease) -> None:
    assert await groups.save([whole(record, lease)], wait=True) == [Saved.SAVED]


async def load(groups: GroupStore, group_id: str) -> GroupRecord | None:
    return (await groups.load([group_id])).get(group_id)
