"""A group read back from storage, by a coordinator that has just begun or taken over.

The one idea: members are given a full session to be heard again, so a restart of the gateway is not a rebalance. What
is not stored is lost without harm: a join phase in flight (whoever was held in it asks again), pending ids, parked
requests, connections.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.coordinator.draft import Draft
from gateway.coordinator.model import Group, GroupState, Member, MemberId, Protocols, Settings
from gateway.coordinator.protocols import subscribed_topics
from gateway.coordinator.rebalance import prepare_rebalance


@dataclass(frozen=True, slots=True)
class StoredMember:
    member_id: MemberId
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """What a `Step` with `persist` asked to store."""

    group_id: str
    state: GroupState
    """Empty, CompletingRebalance or Stable."""
    protocol_type: str | None
    protocol_name: str | None
    generation_id: int
    leader_id: MemberId | None
    members: tuple[StoredMember, ...]
    """In the order of joining."""


def restore(stored: StoredGroup, now_ms: int, settings: Settings) -> Group:
    """A group larger than `group.max.size` opens a rebalance at once, whose latecomers are then turned away."""
    draft = Draft(Group(stored.group_id), now_ms, settings)
    draft.exists = True
    draft.state = stored.state
    draft.protocol_type = stored.protocol_type
    draft.protocol_name = stored.protocol_name
    draft.generation_id = stored.generation_id
    draft.leader_id = stored.leader_id
    for each in stored.members:
        member = _member(each)
        draft.put(member)
        draft.arm_session(member)
    if stored.protocol_name is not None:
        draft.subscribed_topics = subscribed_topics(stored.protocol_type, stored.protocol_name, draft.members.values())
    if stored.state is GroupState.COMPLETING_REBALANCE:
        draft.pending_sync = set(draft.members)
        draft.phase_deadline_ms = now_ms + draft.rebalance_timeout_ms()
    if len(draft.members) > settings.group_max_size:
        prepare_rebalance(draft, "restored with more members than group.max.size")
    return draft.seal().group


def _member(stored: StoredMember) -> Member:
    return Member(
        member_id=stored.member_id,
        group_instance_id=stored.group_instance_id,
        client_id=stored.client_id,
        client_host=stored.client_host,
        session_timeout_ms=stored.session_timeout_ms,
        rebalance_timeout_ms=stored.rebalance_timeout_ms,
        protocols=stored.protocols,
        assignment=stored.assignment,
    )
