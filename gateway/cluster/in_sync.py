"""Which of a partition's named nodes may lead it where `eligible.leader.replicas.version` is 0, and who stays in sync.

The one idea: Kafka's rules from before KIP-966, as functions of values. No replica of ours lacks a record, so at level
1 every live one may lead, which is the best that KIP-966 promises. At level 0 an administrator wants what Kafka did
before: who dies leaves those in sync while another of them lives, and only they may lead. Who writes it down is
`gateway/operate/in_sync_replicas.py`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from storage.types import Assignment

FEATURE = "eligible.leader.replicas.version"

NO_LEADER = -1


def members(assignment: Assignment) -> tuple[int, ...]:
    """Those in sync, in the order of the replicas; never none: all of them where nobody has left, or where none of them
    is a replica any more."""
    if assignment.in_sync is None:
        return assignment.replicas
    return tuple(node for node in assignment.replicas if node in assignment.in_sync) or assignment.replicas


def leader(assignment: Assignment, alive: AbstractSet[int]) -> int:
    """Who leads: of those in sync and alive the one that was kept or elected, else the first; NO_LEADER if none is."""
    living = [node for node in members(assignment) if node in alive]
    if assignment.leader in living:
        return assignment.leader
    return living[0] if living else NO_LEADER


def followed(assignment: Assignment, alive: AbstractSet[int], *, unclean: bool) -> tuple[int, ...] | None:
    """Who is to be in sync now that these nodes are alive, as `Assignment.in_sync` has it; the same again when asked
    again.

    Where somebody leads: every replica that is alive, for who comes back has all records at once. Where nobody does,
    those stay that were in sync, for they died at one moment as far as anybody saw; unless the topic would rather have
    any leader (`unclean.leader.election.enable`): then the first replica that is alive is in sync alone.
    """
    living = tuple(node for node in assignment.replicas if node in alive)
    if leader(assignment, alive) != NO_LEADER:
        kept = living
    else:
        kept = living[:1] if unclean and living else members(assignment)
    return None if kept == assignment.replicas else kept
