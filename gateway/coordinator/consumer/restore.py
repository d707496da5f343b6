"""A consumer group on its way to and from storage.

The one idea: only epochs, assignments and targets must survive, one row for each member. Every member gets a full
session to send a request, and a full rebalance timeout if it must release partitions, so a restart moves nothing. But
that happens only once: until all members have sent a request, further restarts continue the running session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.classic.restore import session_left_ms
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.consumer import handoff
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import ConsumerGroup, MemberRow, session_ms
from gateway.coordinator.consumer.partitions import NOTHING
from gateway.coordinator.document import dump, load
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import Document, StoredGroup, StoredMember
from gateway.coordinator.settings import ConsumerSettings


def stored_member(group: ConsumerGroup, member_id: MemberId) -> StoredMember | None:
    member = group.members.get(member_id)
    if member is None:
        return None
    row = MemberRow(member, group.target.get(member_id, NOTHING))
    return StoredMember(dump(row), member.member_epoch)


def restore(
    group_id: str,
    stored: StoredGroup,
    members: Mapping[MemberId, Document],
    silent_ms: int | None,
    now_ms: int,
    settings: ConsumerSettings,
) -> ConsumerGroup:
    group = load(
        ConsumerGroup, {**stored.document, "group_epoch": stored.generation_id}, group_id=group_id, exists=True
    )
    draft = Draft(group, now_ms, settings, NO_TOPICS)
    for document in members.values():
        row = load(MemberRow, document)
        draft.put(row.member)
        draft.target[row.member.member_id] = row.target
        left_ms = session_left_ms(session_ms(row.member, settings), silent_ms)
        draft.session_deadlines = draft.session_deadlines.moved(row.member.member_id, now_ms + left_ms)
        draft.arm_rebalance(None, row.member)
    handoff.take_over(draft)
    restored: ConsumerGroup = draft.seal().group
    return replace(restored, unheard=frozenset(restored.members))
