"""Seeded runs of the simulation, and their coverage of the table. Other tests put bugs into the coordinator, and check
that such runs find them.
"""

from __future__ import annotations

import os

import pytest

from gateway.coordinator.classic.model import GroupState
from gateway.coordinator.classic.table import TABLE
from tests.steps.seeds import finds, first_always

from .mutants import Mutant, load
from .simulation.run import run

BLOCKS = int(os.environ.get("SLUICE_SIMULATION_BLOCKS", "10"))
BLOCKS_EACH_TIME = 2
SEEDS_PER_BLOCK = 200
"""Each seed takes about 10 ms."""

TRANSITIONS = {
    (event.__name__, state, leads_to)
    for event, row in TABLE.items()
    for state, cell in row.items()
    if state is not GroupState.DEAD
    for leads_to in cell.leads_to
}
SEEDS_OF_TRANSITIONS = (57, 922, 799, 28, 300, 672, 609, 20, 64, 289)
"""Seeds that together meet every transition."""


def transitions_met(seed: int) -> set[tuple[str, GroupState, GroupState]]:
    """Return the transitions of one run. The run must keep all rules."""
    outcome = run(seed)
    assert outcome.foul is None, f"seed {seed}: {outcome.foul}\n" + "\n".join(outcome.told[-40:])
    assert outcome.seen <= TRANSITIONS, f"seed {seed}"
    return outcome.seen


@pytest.mark.parametrize("block", first_always(range(BLOCKS), BLOCKS_EACH_TIME))
def test_every_seeded_run_keeps_the_rules(block: int) -> None:
    """Each request gets one answer, generations only rise, each partition has one owner, transitions are those of the
    table, and every live member is Stable in the end. `python -m tests.coordinator.simulation SEED` replays a failing
    seed.
    """
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        transitions_met(seed)


def test_every_transition_of_the_table_is_met() -> None:
    unmet = set(TRANSITIONS)
    for seed in (*SEEDS_OF_TRANSITIONS, *range(5 * SEEDS_PER_BLOCK)):
        if not unmet:
            break
        unmet -= transitions_met(seed)
    assert not unmet


def test_same_seed_gives_the_same_run() -> None:
    assert run(11).told == run(11).told


MUTANTS = [
    Mutant(
        "the guard looks away",
        "observer:guarded",
        "given = _without(given, taken_out)",
        "",
        found_by=(27,),
    ),
    Mutant(
        "an absent static member is believed to hold nothing",
        "observer:claimants",
        "partitions if member_id in group.members else ()",
        "()",
        seeds=2500,
        found_by=(1575,),
    ),
    Mutant(
        "a claim from before the last assignment counts for nothing",
        "observer:claimants",
        "member_id in group.watch.absent",
        "_is_stale(group.watch, member_id, claim)",
    ),
    Mutant(
        "the generation rises when a rebalance starts",
        "rebalance:prepare_rebalance",
        "draft.transition(GroupState.PREPARING_REBALANCE)",
        """
        draft.transition(GroupState.PREPARING_REBALANCE)
        draft.generation_id += 1
        """,
    ),
    Mutant(
        "assignments of the last generation are kept",
        "rebalance:_begin_generation",
        'replace(member, parked_join=None, is_new=False, assignment=b"", last_assignment=last, member_epoch=0)',
        "replace(member, parked_join=None, is_new=False, last_assignment=last, member_epoch=0)",
    ),
    Mutant(
        "members the leader left out keep what they had",
        "sync:_hand_out",
        'assignments.get(member.member_id, b"")',
        "assignments.get(member.member_id, next(iter(assignments.values()), b''))",
    ),
    Mutant(
        "a follower is answered before the leader has assigned",
        "sync:sync_completing",
        "member.member_id == draft.leader_id",
        "True",
    ),
    Mutant(
        "an answered join does not start the session again",
        "rebalance:_begin_generation",
        "draft.arm_session(settled)",
        "",
    ),
    Mutant(
        "a heartbeat does not keep the session",
        "heartbeat:hear",
        "group.with_session_deadline(member_id, now_ms + timeout_ms)",
        "group",
    ),
    Mutant(
        "a pending id is given to whoever asks next",
        "identity:_identify_nameless",
        "pending.connection_id == event.connection_id",
        "True",
    ),
    Mutant(
        "members are known by client id",
        "identity:dynamic_member",
        "member.connection_id == connection_id and member.group_instance_id is None",
        "member.group_instance_id is None",
    ),
    Mutant(
        "a closed connection's key is kept",
        "deadlines:_disconnect",
        "held.connection_id if held is not None else None",
        "held.connection_id if held is not None else closed",
    ),
    Mutant(
        "a superseded join is never answered",
        "draft:Draft.park_join",
        """
        if member.parked_join is not None:
            self.answer(member.parked_join.request_id, JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        """,
        "",
    ),
    Mutant(
        "the held requests of a removed member are never answered",
        "draft:Draft.remove",
        "self._refuse_parked(member, ErrorCode.UNKNOWN_MEMBER_ID)",
        "",
    ),
    Mutant(
        "syncs held when a new rebalance starts are never answered",
        "rebalance:prepare_rebalance",
        "_refuse_parked_syncs(draft)",
        "",
    ),
    Mutant(
        "members that did not re-join stay in the new generation",
        "rebalance:complete_join_phase",
        "member.parked_join is None and member.group_instance_id is None",
        "False",
    ),
    Mutant(
        "a refused rejoin puts the member out",
        "join:join",
        "return refuse(group, event, ErrorCode.INCONSISTENT_GROUP_PROTOCOL)",
        """
        draft = Draft(group, now_ms, settings)
        draft.answer(event.request_id, JoinReply(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, event.member_id))
        if requester.member_id in draft.members:
            draft.remove(requester.member_id, Departure.LEFT)
        return draft.seal()
        """,
    ),
    Mutant(
        "a returning static member's new id is not stored",
        "join:return_while_stable",
        "draft.tell(AssignmentGiven(member.member_id, draft.generation_id))",
        "",
    ),
    Mutant(
        "a member that left is stored for ever",
        "draft:Draft.remove",
        "self.tell(MemberLeft(member_id, departure, shortened(reason)))",
        "",
    ),
    Mutant(
        "a member's new assignment is not stored",
        "sync:_hand_out",
        "draft.tell(AssignmentGiven(member.member_id, draft.generation_id))",
        "",
    ),
    Mutant(
        "a replaced static member's sync is awaited for ever",
        "draft:Draft.rename",
        "self.pending_sync.discard(old_id)",
        "",
    ),
    Mutant(
        "members are not told of a rebalance",
        "heartbeat:heartbeat_preparing",
        "ErrorCode.REBALANCE_IN_PROGRESS",
        "ErrorCode.NONE",
    ),
    Mutant(
        "who never syncs is never removed",
        "deadlines:_end_phase",
        "[member_id for member_id in draft.members if member_id in draft.pending_sync]",
        "[]",
        found_by=(64,),
    ),
    Mutant(
        "the join phase begins anew with each join",
        "rebalance:rebalance",
        "maybe_complete_join_phase(draft)",
        """
        draft.phase_deadline_ms = draft.now_ms + draft.rebalance_timeout_ms()
        maybe_complete_join_phase(draft)
        """,
    ),
    Mutant(
        "the initial delay is cut short by the second join",
        "rebalance:maybe_complete_join_phase",
        """
        if draft.initial_delay_remaining_ms is not None:
            return
        """,
        "",
    ),
    Mutant(
        "a rejoining leader loses its place to the youngest member",
        "rebalance:_elect_leader",
        'draft.members.get(draft.leader_id or MemberId(""))',
        "list(draft.members.values())[-1]",
    ),
    Mutant(
        "the leader is told the metadata of each one's first protocol",
        "rebalance:joined",
        "metadata_of(each, draft.protocol_name)",
        "each.protocols[0][1]",
    ),
    Mutant(
        "a restart forgets that syncs are awaited",
        "restore:restore",
        "draft.pending_sync = set(draft.members)",
        "",
    ),
    Mutant(
        "static members have a grace, too",
        "deadlines:_disconnect",
        "connection_id is None and member.group_instance_id is None and grace_ms >= 0",
        "connection_id is None and grace_ms >= 0",
    ),
    Mutant(
        "a member that comes back is still removed after the grace",
        "draft:Draft.hear",
        "self.connection_deadlines.pop(member.member_id, None)",
        "",
    ),
    Mutant(
        "a draft shares the group's members",
        "draft:Draft.__init__",
        "dict(group.members)",
        "group.members",
    ),
    Mutant(
        "nobody is held for what another claims",
        "handoff:held",
        "deadline_ms > draft.now_ms",
        "False",
    ),
    Mutant(
        "who is awaited is held, too",
        "handoff:held",
        "{each.target for each in pending} - {each.source for each in pending}",
        "{each.target for each in pending}",
    ),
    Mutant(
        "what sources claim is not looked at",
        "handoff:_holders",
        "claims = claims_of(draft)",
        "claims = {}",
    ),
    Mutant(
        "the newest claim counts, though who has it has read nothing",
        "handoff:_holders",
        "holders[partition] = holders.get(partition, set[MemberId]()) | claimers",
        "",
        found_by=(70,),
    ),
    Mutant(
        "members that are gone are waited for",
        "handoff:member_gone",
        "each.source == member_id",
        "False",
    ),
    Mutant(
        "a source that never lets go is waited for for ever",
        "handoff:expire",
        "each.forced or early or each.deadline_ms > draft.now_ms",
        "True",
    ),
    Mutant(
        "what is no longer awaited is stored as awaited",
        "handoff:replace_all",
        "draft.tell(HandoffsChanged())",
        "",
    ),
    Mutant(
        "a held member is not told when its wait is over",
        "handoff:replace_all",
        "_release(draft)",
        "",
        found_by=(38,),
    ),
    Mutant(
        "members held when a rebalance starts are never answered",
        "rebalance:prepare_rebalance",
        "draft.state is GroupState.COMPLETING_REBALANCE or draft.hold_deadlines",
        "draft.state is GroupState.COMPLETING_REBALANCE",
    ),
    Mutant(
        "a coordinator that takes over gives targets what is awaited",
        "restore:restore",
        "handoff.take_over(draft, stored.clock_lead_ms, SHORTEST_SESSION_MS)",
        "draft.handoffs = ()",
    ),
    Mutant(
        "offsets are told as settled while a source has the partition",
        "handoff:awaited_by",
        "awaited = [each for each in group.handoffs if not each.forced]",
        "awaited = []",
        seeds=3000,
        found_by=(2173,),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_planted_bug_is_found_by_a_seed(mutant: Mutant) -> None:
    coordinator = load(mutant)

    def goes_wrong(seed: int) -> bool:
        return run(seed, coordinator).foul is not None

    assert finds(range(mutant.seeds), goes_wrong, found_before=mutant.found_by)


def test_mutant_leaves_the_original_module_unchanged() -> None:
    """A mutant does not affect the coordinator of any other test."""
    from gateway.coordinator.classic import draft, join, machine

    load(MUTANTS[0])
    import gateway.coordinator.classic.rebalance as again

    assert machine.TABLE is not load(MUTANTS[0]).TABLE
    assert join.rebalance is again.rebalance
    assert again.Draft is draft.Draft
