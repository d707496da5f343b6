"""The named nodes that may lead a partition at `eligible.leader.replicas.version` 0, and the ones that stay in sync.

The one idea: Kafka's rules from before KIP-966, as functions of values. No replica here lacks a record, so at level 1
every live replica may lead, which is the best that KIP-966 promises. At level 0 an administrator wants Kafka's earlier
rules: a replica that dies leaves the in-sync set while another member lives, and only members may lead.
`gateway/operate/in_sync_replicas.py` writes the set down.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from storage.types import Assignment

FEATURE = "eligible.leader.replicas.version"

NO_LEADER = -1


def members(assignment: Assignment) -> tuple[int, ...]:
    """Return the in-sync replicas in the order of the replicas. The set is never empty: it is all replicas if none
    has left, or if no member is a replica any more."""
    if assignment.in_sync is None:
        return assignment.replicas
    return tuple(node for node in assignment.replicas if node in assignment.in_sync) or assignment.replicas


def leader(assignment: Assignment, alive: AbstractSet[int]) -> int:
    """Return the leader: of the live in-sync replicas the one that was kept or elected, else the first; NO_LEADER if
    none is live."""
    living = [node for node in members(assignment) if node in alive]
    if assignment.leader in living:
        return assignment.leader
    return living[0] if living else NO_LEADER


def followed(assignment: Assignment, alive: AbstractSet[int], *, unclean: bool) -> tuple[int, ...] | None:
    """Return the new in-sync set, as `Assignment.in_sync` has it, now that these nodes are alive. Repeating the call
    changes nothing.

    If a replica leads, every live replica is in sync, because a replica that returns has all records at once. If none
    leads, the members stay, because they died at one moment as far as any node saw. With
    `unclean.leader.election.enable` the first live replica becomes the only member instead.
    """
    living = tuple(node for node in assignment.replicas if node in alive)
    if leader(assignment, alive) != NO_LEADER:
        kept = living
    else:
        kept = living[:1] if unclean and living else members(assignment)
    return None if kept == assignment.replicas else kept
