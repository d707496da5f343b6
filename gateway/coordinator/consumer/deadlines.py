"""Time: sessions, the time to release partitions, and the time of a classic member to rejoin and to sync.

The one idea: a deadline is re-read when it fires, so a late, early or repeated Tick does exactly what is due. A member
whose time is over is removed with its partitions. The next heartbeat of any member computes the new owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import handoff
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import Departure, MemberId
from gateway.coordinator.machine import Step
from gateway.coordinator.settings import ConsumerSettings


def next_deadline(group: ConsumerGroup) -> int | None:
    """Return the earliest time at which a Tick is due; None if the group waits for nothing but requests."""
    others = (group.rebalance_deadlines, group.join_deadlines, group.sync_deadlines, group.drain_deadlines)
    earliest = [min(deadlines.values()) for deadlines in others if deadlines]
    earliest += [each.deadline_ms for each in group.unsettled]
    session_ms = group.session_deadlines.earliest()
    return min(earliest if session_ms is None else (session_ms, *earliest), default=None)


def postponed(group: ConsumerGroup, by_ms: int) -> ConsumerGroup:
    """Return the same group with every deadline later, because for this long the node could neither read requests
    nor respond."""
    return replace(
        group,
        session_deadlines=group.session_deadlines.later(by_ms),
        rebalance_deadlines=_later(group.rebalance_deadlines, by_ms),
        join_deadlines=_later(group.join_deadlines, by_ms),
        sync_deadlines=_later(group.sync_deadlines, by_ms),
        drain_deadlines=_later(group.drain_deadlines, by_ms),
        moving={
            key: replace(each, deadline_ms=each.deadline_ms + by_ms) if each.deadline_ms else each
            for key, each in group.moving.items()
        },
        unsettled=tuple(replace(each, deadline_ms=each.deadline_ms + by_ms) for each in group.unsettled),
    )


def _later(deadlines: Mapping[MemberId, int], by_ms: int) -> Mapping[MemberId, int]:
    return {member_id: at_ms + by_ms for member_id, at_ms in deadlines.items()}


def tick(group: ConsumerGroup, cluster: Cluster, now_ms: int, settings: ConsumerSettings) -> Step[ConsumerGroup]:
    over = dict.fromkeys(group.session_deadlines.due(now_ms), Departure.SESSION_EXPIRED)
    for deadlines, departure in (
        (group.rebalance_deadlines, Departure.NOT_REVOKED),
        (group.join_deadlines, Departure.NOT_REJOINED),
        (group.sync_deadlines, Departure.NEVER_SYNCED),
    ):
        for member_id, deadline_ms in deadlines.items():
            if deadline_ms <= now_ms:
                over.setdefault(member_id, departure)
    undrained = any(deadline_ms <= now_ms for deadline_ms in group.drain_deadlines.values())
    undrained = undrained or any(each.deadline_ms <= now_ms for each in group.unsettled)
    if not over and not undrained:
        return Step(group)
    draft = Draft(group, now_ms, settings, cluster)
    # In the order in which the members joined: a step depends only on its values.
    if over:
        draft.lose_all({member_id: (over[member_id], None) for member_id in group.members if member_id in over})
    handoff.expire(draft)
    return draft.seal()
