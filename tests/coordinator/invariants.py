"""Rules that hold for every classic group between two steps. No single event can be blamed for a violation, so every
test that steps a group checks the rules after each step.
"""

from __future__ import annotations

from collections import Counter

from gateway.coordinator.classic.machine import DURABLE
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.machine import RequestId, Step

PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE


def held_requests(group: Group) -> set[RequestId]:
    """Return the requests that the group must still answer."""
    return {
        parked.request_id
        for member in group.members.values()
        for parked in (member.parked_join, member.parked_sync)
        if parked is not None
    }


def broken_invariants(group: Group) -> list[str]:
    """Return the violated rules as sentences; empty for a sound group."""
    members = group.members
    parked_joins = [member_id for member_id, member in members.items() if member.parked_join is not None]
    parked_syncs = [member_id for member_id, member in members.items() if member.parked_sync is not None]
    instances = Counter(m.group_instance_id for m in members.values() if m.group_instance_id is not None)
    offered = sum(len(metadata) for m in members.values() for _, metadata in m.protocols)
    support = Counter(name for m in members.values() for name in {name for name, _ in m.protocols if name})
    voted = group.state in (COMPLETING, STABLE)
    claims = {
        "a member is filed under its own id": all(key == member.member_id for key, member in members.items()),
        "awaiting_join counts the parked joins": group.awaiting_join == len(parked_joins),
        "protocol_support counts the members' protocols": dict(group.protocol_support) == dict(support),
        "offered_bytes counts the members' metadata": group.offered_bytes == offered,
        "joins are parked only while Preparing": not parked_joins or group.state is PREPARING,
        "syncs are parked while Completing, or of members that await a partition": group.state is COMPLETING
        or all(
            group.state is STABLE and any(each.is_pending and each.target == key for each in group.handoffs)
            for key in parked_syncs
        ),
        "nobody is held without a deadline": not (parked_joins or parked_syncs)
        or group.phase_deadline_ms is not None
        or (group.state is STABLE and all(key in group.hold_deadlines for key in parked_syncs)),
        "who is awaited is not held": not {each.source for each in group.handoffs if each.is_pending}
        & (set(parked_syncs) if group.state is STABLE else set()),
        "a handoff is between members": all(
            each.source in members and (each.target is None or each.target in members) and each.source != each.target
            for each in group.handoffs
        ),
        "a partition is handed over once": len({(each.topic, each.partition) for each in group.handoffs})
        == len(group.handoffs),
        "members are held in the generation that was assigned": not group.hold_deadlines or group.state is STABLE,
        "only members are held": group.hold_deadlines.keys() <= members.keys(),
        "whoever is not held has a session": all(
            key in group.session_deadlines or key in parked_joins or key in parked_syncs for key in members
        ),
        "only members have sessions": group.session_deadlines.keys() <= members.keys(),
        "only disconnected dynamic members have a grace": all(
            key in members and members[key].connection_id is None and members[key].group_instance_id is None
            for key in group.connection_deadlines
        ),
        "an instance has one member": all(count == 1 for count in instances.values()),
        "nobody is member and pending": not (group.pending.keys() & members.keys()),
        "a group without members is Empty or Preparing": bool(members) or group.state not in (COMPLETING, STABLE),
        "an Empty or Dead group holds no members and no phase": group.state not in (GroupState.EMPTY, GroupState.DEAD)
        or (not members and group.phase_deadline_ms is None and group.leader_id is None),
        "members have a leader among them": (group.leader_id in members) if members else True,
        "pending syncs are members'": group.pending_sync <= members.keys(),
        "pending syncs are awaited in Completing or Stable, until a deadline": not group.pending_sync
        or (voted and group.phase_deadline_ms is not None),
        "Completing awaits its leader": group.state is not COMPLETING or group.leader_id in group.pending_sync,
        "Stable has a phase only while syncs are awaited": group.state is not STABLE
        or group.phase_deadline_ms is None
        or bool(group.pending_sync),
        "Preparing has a phase": group.state is not PREPARING or group.phase_deadline_ms is not None,
        "the initial delay is part of Preparing": group.initial_delay_remaining_ms is None or group.state is PREPARING,
        "newcomers are noted during the initial delay only": not group.new_member_added
        or group.initial_delay_remaining_ms is not None,
        "a protocol is chosen once all have joined": not voted or bool(group.protocol_name),
        "the chosen protocol is everyone's": not voted or support[group.protocol_name or ""] == len(members),
        "nothing is assigned before the leader has spoken": group.state is not COMPLETING
        or not any(member.assignment for member in members.values()),
        "new members are those that await their first answer": all(
            not member.is_new or group.state is PREPARING for member in members.values()
        ),
    }
    return [claim for claim, holds in claims.items() if not holds]


def must_store(taken: Step) -> bool:
    return any(type(fact) in DURABLE for fact in taken.facts)


def broken_by(taken: Step) -> list[str]:
    """Return the violated rules of the group after a step, and of the facts that the step stores."""
    broken = broken_invariants(taken.group)
    if must_store(taken) and taken.group.state is PREPARING:
        broken.append("a join phase in flight is not stored")
    return broken
