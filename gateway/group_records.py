"""Groups as they are stored: between the coordinator's value and storage's record, which know nothing of each other.

The one idea: a record is the group's whole surviving state, so a write can be repeated and a read needs nothing else.
"""

from __future__ import annotations

from gateway.coordinator.model import Group, GroupState, MemberId, Settings
from gateway.coordinator.restore import StoredGroup, StoredMember, restore
from storage.types import GroupRecord, MemberRecord


def to_record(group: Group, state_timestamp_ms: int) -> GroupRecord:
    """`state_timestamp_ms` is the wall-clock time of the group's last change of state: offset expiry counts from it."""
    return GroupRecord(
        group_id=group.group_id,
        state=group.state.value,
        state_timestamp_ms=state_timestamp_ms,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        generation_id=group.generation_id,
        leader_id=group.leader_id,
        members=tuple(
            MemberRecord(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                session_timeout_ms=member.session_timeout_ms,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                protocols=member.protocols,
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )


def restored(record: GroupRecord, now_ms: int, settings: Settings) -> Group:
    """The group with every member's session beginning at `now_ms` (monotonic); see `coordinator.restore`."""
    return restore(
        StoredGroup(
            group_id=record.group_id,
            state=GroupState(record.state),
            protocol_type=record.protocol_type,
            protocol_name=record.protocol_name,
            generation_id=record.generation_id,
            leader_id=None if record.leader_id is None else MemberId(record.leader_id),
            members=tuple(
                StoredMember(
                    member_id=MemberId(member.member_id),
                    group_instance_id=member.group_instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    session_timeout_ms=member.session_timeout_ms,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                    protocols=member.protocols,
                    assignment=member.assignment,
                )
                for member in record.members
            ),
        ),
        now_ms,
        settings,
    )
