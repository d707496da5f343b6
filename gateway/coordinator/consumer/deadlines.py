"""Time: sessions, and how long a member may take to let go of partitions.

The one idea: a deadline is re-read when it fires, so a late, early or repeated Tick does exactly what is due. A member
whose time is over is gone, with its partitions; who gets them is computed with the next heartbeat of anyone.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import handoff
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import Departure
from gateway.coordinator.machine import Step
from gateway.coordinator.model import ConsumerSettings


def next_deadline(group: ConsumerGroup) -> int | None:
    """When a Tick is due at the earliest; None if the group waits for nothing but requests."""
    deadlines = (
        *group.session_deadlines.values(),
        *group.rebalance_deadlines.values(),
        *group.drain_deadlines.values(),
    )
    return min(deadlines, default=None)


def postponed(group: ConsumerGroup, by_ms: int) -> ConsumerGroup:
    """The same group with every deadline later: for this long nobody could be heard, or be told."""
    return replace(
        group,
        session_deadlines={key: at_ms + by_ms for key, at_ms in group.session_deadlines.items()},
        rebalance_deadlines={key: at_ms + by_ms for key, at_ms in group.rebalance_deadlines.items()},
        drain_deadlines={key: at_ms + by_ms for key, at_ms in group.drain_deadlines.items()},
        moving={
            key: replace(each, deadline_ms=each.deadline_ms + by_ms) if each.deadline_ms else each
            for key, each in group.moving.items()
        },
    )


def tick(group: ConsumerGroup, cluster: Cluster, now_ms: int, settings: ConsumerSettings) -> Step:
    silent = [member_id for member_id, deadline_ms in group.session_deadlines.items() if deadline_ms <= now_ms]
    late = [member_id for member_id, deadline_ms in group.rebalance_deadlines.items() if deadline_ms <= now_ms]
    undrained = any(deadline_ms <= now_ms for deadline_ms in group.drain_deadlines.values())
    if not silent and not late and not undrained:
        return Step(group)
    draft = Draft(group, now_ms, settings, cluster)
    for member_id in silent:
        draft.lose(member_id, Departure.SESSION_EXPIRED)
    for member_id in late:
        if member_id in draft.members:
            draft.lose(member_id, Departure.NOT_REVOKED)
    handoff.expire(draft)
    return draft.seal()
