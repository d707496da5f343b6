"""Time: sessions, and how long a member may take to let go of partitions.

The one idea: a deadline is re-read when it fires, so a late, early or repeated Tick does exactly what is due. A member
whose time is over is gone, with its partitions; who gets them is computed with the next heartbeat of anyone.
"""

from __future__ import annotations

from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerSettings, ConsumerStep
from gateway.coordinator.consumer.topics import ClusterTopics


def next_deadline(group: ConsumerGroup) -> int | None:
    """When a Tick is due at the earliest; None if the group waits for nothing but requests."""
    return min((*group.session_deadlines.values(), *group.rebalance_deadlines.values()), default=None)


def tick(group: ConsumerGroup, now_ms: int, settings: ConsumerSettings, topics: ClusterTopics) -> ConsumerStep:
    silent = [member_id for member_id, deadline_ms in group.session_deadlines.items() if deadline_ms <= now_ms]
    late = [member_id for member_id, deadline_ms in group.rebalance_deadlines.items() if deadline_ms <= now_ms]
    if not silent and not late:
        return ConsumerStep(group)
    draft = Draft(group, now_ms, settings, topics)
    for member_id in silent:
        draft.lose(member_id, f"member {member_id} has expired")
    for member_id in late:
        if member_id in draft.members:
            draft.lose(member_id, f"member {member_id} did not let go of its partitions in time")
    return draft.seal()
