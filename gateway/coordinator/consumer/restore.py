"""A consumer group read back from storage, by a coordinator that has just begun or taken over.

The one idea: epochs, assignments and targets are all that must survive; every member is given a full session to be
heard again, and a full rebalance timeout where it was to let go of partitions, so a restart moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, ConsumerSettings
from gateway.coordinator.consumer.partitions import Partitions
from gateway.coordinator.consumer.topics import NO_TOPICS
from gateway.coordinator.model import MemberId


def restore(
    group: ConsumerGroup,
    members: Iterable[ConsumerMember],
    target: Mapping[MemberId, Partitions],
    now_ms: int,
    settings: ConsumerSettings,
) -> ConsumerGroup:
    """`group` has the stored epochs, hash and assignor. A target without a member is left out."""
    draft = Draft(group, now_ms, settings, NO_TOPICS)
    for stored in members:
        member = replace(stored, connection_number=-1)
        draft.put(member)
        draft.arm_session(member.member_id)
        draft.arm_rebalance(None, member)
    draft.target = {member_id: partitions for member_id, partitions in target.items() if member_id in draft.members}
    return draft.seal().group
