"""Rules that hold in every run: checked after each step.

The rules do not depend on how the coordinator makes a step. The referee keeps its own records (what was stored, when
each member was last heard from, what leaders assigned) and compares the coordinator with them. It sees only events,
replies and the group's fields.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType

from gateway.coordinator.classic.model import Event, Group, GroupState
from gateway.coordinator.classic.observer import claims_of
from gateway.coordinator.facts import MemberId, MemberReplaced
from gateway.coordinator.handoff import FORCED, HandoffEnded
from gateway.coordinator.machine import ConnectionClosed, Document, RequestId, Step, StoredGroup, Tick
from gateway.coordinator.requests import (
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveReply,
    OffsetCommitReply,
    SyncGroup,
    SyncReply,
)
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode
from tests.coordinator.invariants import broken_by, broken_invariants, held_requests, must_store

from .assignor import PARTITIONS, read

NONE = ErrorCode.NONE
CHANGES_THE_GROUP = {
    (JoinReply, ErrorCode.MEMBER_ID_REQUIRED),
    (JoinReply, ErrorCode.GROUP_MAX_SIZE_REACHED),
    (HeartbeatReply, ErrorCode.REBALANCE_IN_PROGRESS),
}
"""Refusals that change the group, in Apache Kafka too, or that are no errors."""
NEVER = 1 << 60
Stored = tuple[StoredGroup, dict[MemberId, Document]]
EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE


class FoulError(AssertionError):
    """The coordinator has violated a rule."""


class Referee:
    def __init__(self, coordinator: ModuleType, settings: Settings) -> None:
        self.stored: Stored | None = None
        """The stored rows of the group and its members."""
        self._touched: set[MemberId] = set()
        """Members that steps have changed since the group was last stored."""
        self.seen: set[tuple[str, GroupState, GroupState]] = set()
        """For each step, its event and the group's states before and after."""
        self._coordinator = coordinator
        self._settings = settings
        self._heard_ms: dict[MemberId, int] = {}
        self._assigned: dict[str, bytes] = {}
        """Assignments by the leader of the current generation, by slot. The slot of a static member belongs to its
        instance id.
        """
        self._owners: dict[int, str] = {}
        """For each partition its owner's slot in the current generation."""
        self._told: dict[int, tuple[str | None, str | None]] = {}
        """Protocol type and name that members received, by generation."""
        self._initial_delay_ends_ms = 0
        self._assigned_ms = 0
        self._answered: set[MemberId] = set()
        """Members that have received their assignment of this generation, and static members that returned to it. They
        must not be held.
        """
        self.excused: set[int] = set()
        """Partitions that a member received before the old owner released them, because the maximal time of the handoff
        had passed.
        """

    def require(self, holds: bool, foul: str) -> None:
        if not holds:
            raise FoulError(foul)

    # --- one step -----------------------------------------------------------------------------------------------------

    def judge(self, before: Group, event: Event, taken: Step, now_ms: int) -> None:
        after = taken.group
        self.seen.add((type(event).__name__, before.state, after.state))
        self._check_sound(before, event, taken)
        self._check_refusal(before, event, taken)
        self._check_generation(before, event, taken)
        self._check_joins(before, event, taken)
        self._keep_books(before, event, taken, now_ms)
        self._check_syncs(before, event, taken)
        self._check_time(before, event, after, now_ms)
        self._check_holds(before, event, taken, now_ms)
        self._check_connections(before, event, after, now_ms)
        self._store(taken)

    def check_held(self, group: Group, waiting: set[RequestId]) -> None:
        """Check that the waiting requests are exactly those that the group holds, so that each request gets exactly one
        answer.
        """
        held = held_requests(group)
        self.require(held == waiting, f"held: {sorted(held)}, waiting: {sorted(waiting)}")

    def restored(self, group: Group, waiting: set[RequestId], now_ms: int) -> None:
        self.require(not broken_invariants(group), f"restored: {broken_invariants(group)}")
        self.check_held(group, waiting)
        self._touched.clear()
        if self.stored is not None and group.members:
            self.stored = replace(self.stored[0], all_heard=False), self.stored[1]
        self._heard_ms = dict.fromkeys(group.members, now_ms)
        self._initial_delay_ends_ms = 0
        # This coordinator does not know which members its predecessor held, nor since when.
        self._assigned_ms = now_ms

    # --- rules --------------------------------------------------------------------------------------------------------

    def _check_sound(self, before: Group, event: Event, taken: Step) -> None:
        after = taken.group
        broken = broken_by(taken)
        self.require(not broken, f"{broken} after {event}")
        leads_to = self._coordinator.TABLE[type(event)][before.state].leads_to
        self.require(after.state in leads_to, f"the table does not lead from {before.state} to {after.state}: {event}")

    def _check_refusal(self, before: Group, event: Event, taken: Step) -> None:
        """Check that a refused request changes nothing, answers no other member and stores nothing."""
        for request_id, reply in taken.replies:
            if request_id != getattr(event, "request_id", None):
                continue
            if isinstance(reply, LeaveReply) and reply.error is NONE:
                refused = all(member.error is not NONE for member in reply.members)
            else:
                refused = reply.error is not NONE and (type(reply), reply.error) not in CHANGES_THE_GROUP
            if refused:
                self.require(taken.group is before, f"refused with {reply.error.name}, but changed: {event}")
                self.require(len(taken.replies) == 1 and not must_store(taken), f"a refusal with consequences: {event}")

    def _check_generation(self, before: Group, event: Event, taken: Step) -> None:
        after = taken.group
        if after.state is GroupState.DEAD:
            self._told, self._owners, self._assigned = {}, {}, {}
            return
        risen = after.generation_id - before.generation_id
        self.require(risen in (0, 1), f"generation {before.generation_id} became {after.generation_id}")
        barrier_fell = after.state in (COMPLETING, EMPTY)
        if risen:
            self.require(barrier_fell, f"the generation rose, but the group is {after.state}")
            self._assigned, self._owners = {}, {}
        elif barrier_fell:
            self.require(before.state is after.state, "the join phase ended without a new generation")

    def _check_joins(self, before: Group, event: Event, taken: Step) -> None:
        after = taken.group
        joined = [reply for _, reply in taken.replies if isinstance(reply, JoinReply) and reply.error is NONE]
        for reply in joined:
            self._check_join(after, event, reply)
        if after.generation_id > before.generation_id:
            told = {reply.member_id for reply in joined}
            if before.leader_id in told:
                self.require(after.leader_id == before.leader_id, "a leader that re-joined was replaced")
            for member_id, member in after.members.items():
                self.require(
                    member_id in told or member.group_instance_id is not None,
                    f"{member_id} is in a generation that it was not told of",
                )
        if isinstance(event, JoinGroup):
            for request_id, reply in taken.replies:
                if request_id == event.request_id and isinstance(reply, JoinReply):
                    self._check_identity(event, reply)

    def _check_join(self, after: Group, event: Event, reply: JoinReply) -> None:
        self.require(reply.generation_id == after.generation_id, f"a join of another generation: {reply}")
        self.require(bool(reply.protocol_name), "a success without a protocol")
        protocol = (reply.protocol_type, reply.protocol_name)
        self.require(
            self._told.setdefault(reply.generation_id, protocol) == protocol, "two protocols in one generation"
        )
        self.require(reply.member_id in after.members, f"{reply.member_id} was let in, but is no member")
        leads = reply.member_id == after.leader_id
        returned = isinstance(event, JoinGroup) and event.group_instance_id is not None and not event.member_id
        if not returned:
            self.require(reply.leader == after.leader_id, f"told of leader {reply.leader}, not {after.leader_id}")
            self.require(bool(reply.members) == leads, "only the leader is told the members, and it always is")
        if reply.members:
            listed = [member.member_id for member in reply.members]
            self.require(listed == list(after.members), "the leader was told of other members")
            for member in reply.members:
                offered = dict(reversed(after.members[member.member_id].protocols))
                self.require(member.metadata == offered[reply.protocol_name or ""], "metadata of another protocol")

    def _check_identity(self, event: JoinGroup, reply: JoinReply) -> None:
        """Check that a member id is used by its own client only: the client named the id before, or the id was made for
        one of its connections.
        """
        if reply.error not in (NONE, ErrorCode.MEMBER_ID_REQUIRED) or reply.member_id == event.member_id:
            return
        asker = event.connection_id.partition("/")[0]
        self.require(
            reply.member_id.partition("#")[0] == asker, f"{asker} was given the id of another: {reply.member_id}"
        )

    def _check_syncs(self, before: Group, event: Event, taken: Step) -> None:
        after = taken.group
        askers = {m.parked_sync.request_id: key for key, m in before.members.items() if m.parked_sync is not None}
        if isinstance(event, SyncGroup):
            askers[event.request_id] = event.member_id
        for request_id, reply in taken.replies:
            if not isinstance(reply, SyncReply) or reply.error is not NONE:
                continue
            member_id = askers[request_id]
            slot = _slot(after, member_id)
            self.require(slot in self._assigned, f"{member_id} was answered before the leader assigned")
            given = self._assigned[slot]
            self.require(reply.assignment == given, f"{member_id} was not given what the leader assigned")
            self.require(
                (reply.protocol_type, reply.protocol_name) == self._told[after.generation_id], "another protocol"
            )
            self._claim(slot, after, reply.assignment)

    def _claim(self, slot: str, after: Group, assignment: bytes) -> None:
        assigned = read(assignment, after.protocol_type or "")
        if assigned is None:
            return
        generation_id, _, partitions = assigned
        self.require(generation_id == after.generation_id, f"an assignment of generation {generation_id}")
        for partition in partitions:
            owner = self._owners.setdefault(partition, slot)
            self.require(owner == slot, f"partition {partition} belongs to {owner} and to {slot}")

    # --- books --------------------------------------------------------------------------------------------------------

    def _keep_books(self, before: Group, event: Event, taken: Step, now_ms: int) -> None:
        after = taken.group
        if isinstance(event, SyncGroup) and before.state is COMPLETING and after.state is STABLE:
            sent = dict(event.assignments)
            self._assigned = {_slot(before, key): sent.get(key, b"") for key in before.members}
            if self._settings.group_cooperative_guard:
                self._assigned = {_slot(after, key): member.assignment for key, member in after.members.items()}
        self._listen(before, event, taken, now_ms)
        if before.state is EMPTY and after.state is PREPARING:
            self._initial_delay_ends_ms = now_ms + self._settings.group_initial_rebalance_delay_ms

    def _listen(self, before: Group, event: Event, taken: Step, now_ms: int) -> None:
        """Record which members have been heard from, for the session timer."""
        after, heard = taken.group, set[MemberId]()
        asker = getattr(event, "member_id", None)
        parked_syncs = {m.parked_sync.request_id: k for k, m in before.members.items() if m.parked_sync is not None}
        for request_id, reply in taken.replies:
            match reply:
                case HeartbeatReply(ErrorCode.NONE | ErrorCode.REBALANCE_IN_PROGRESS):
                    heard.add(asker or MemberId(""))
                case OffsetCommitReply(ErrorCode.NONE):
                    heard.add(asker or MemberId(""))
                case JoinReply(ErrorCode.NONE):
                    heard.add(reply.member_id)
                case SyncReply() if request_id in parked_syncs:
                    heard.add(parked_syncs[request_id])
                case SyncReply(ErrorCode.NONE) if before.state is COMPLETING:
                    heard.add(asker or MemberId(""))
                case _:
                    pass
        heard.update(after.members.keys() - before.members.keys())
        for member_id, member in after.members.items():
            for parked in (member.parked_join, member.parked_sync):
                if parked is not None and parked.request_id == getattr(event, "request_id", None):
                    heard.add(member_id)
        if isinstance(event, ConnectionClosed):
            heard.update(key for key in after.members if key not in before.session_deadlines)
            heard.update(
                key for key in after.members if _first_join_held(before, key) and not _first_join_held(after, key)
            )
        self._heard_ms.update(dict.fromkeys(heard & after.members.keys(), now_ms))

    def _store(self, taken: Step) -> None:
        """Store rows as the gateway does: those that this durable step, and all steps since the last durable one, have
        changed.
        """
        group = taken.group
        self._touched.update(member_id for fact in taken.facts for member_id in fact.touches())
        if must_store(taken):
            self.stored = None if group.state is GroupState.DEAD else self._written(group)
            self._touched.clear()
        if self.stored is not None and (must_store(taken) or group.state in (EMPTY, COMPLETING, STABLE)):
            shown = self._coordinator.stored(group), _member_rows(self._coordinator, group)
            self.require(shown == self.stored, "the group shows what was not stored")

    def _written(self, group: Group) -> Stored:
        members = {} if self.stored is None else dict(self.stored[1])
        for member_id in self._touched:
            row = self._coordinator.stored_member(group, member_id)
            if row is None:
                members.pop(member_id, None)
            else:
                members[member_id] = row.document
        return self._coordinator.stored(group), members

    # --- time ---------------------------------------------------------------------------------------------------------

    def _silent_ms(self, group: Group, member_id: MemberId, now_ms: int) -> int:
        """Return how long ago the member's session ended; negative if it has not ended. A held member's session does
        not end.
        """
        member = group.members[member_id]
        if not member.is_new and (member.parked_join or member.parked_sync):
            return -1
        first_join_held = member.is_new and member.parked_join
        timeout_ms = self._settings.new_member_join_timeout_ms if first_join_held else member.session_timeout_ms
        return now_ms - self._heard_ms[member_id] - timeout_ms

    def _check_time(self, before: Group, event: Event, after: Group, now_ms: int) -> None:
        if before.initial_delay_remaining_ms is not None and after.state is COMPLETING:
            self.require(now_ms >= self._initial_delay_ends_ms, "the initial delay was cut short")
        same_phase = before.state is after.state and before.generation_id == after.generation_id
        initial = before.initial_delay_remaining_ms is not None
        if same_phase and after.awaiting_join and before.awaiting_join and not initial:
            self.require(
                (after.phase_deadline_ms or 0) <= (before.phase_deadline_ms or 0),
                "the join phase was prolonged while somebody is held",
            )
        if same_phase and after.state is COMPLETING:
            self.require(after.phase_deadline_ms == before.phase_deadline_ms, "the sync phase was moved")
        if not isinstance(event, Tick):
            return
        for member_id, member in before.members.items():
            if member_id in after.members:
                late_ms = self._silent_ms(after, member_id, now_ms)
                self.require(late_ms < 0, f"{member_id} is {late_ms} ms past its session")
            else:
                self._check_removal(before, member_id, now_ms)
                self.require(
                    member.parked_join is None or member.is_new,
                    f"{member_id} was removed while its join was held",
                )
        if (before.phase_deadline_ms or NEVER) <= now_ms:
            kept = before.pending_sync & after.members.keys()
            self.require(not kept, f"{sorted(kept)} never synced, but stayed")
        for pending in after.pending.values():
            self.require(pending.deadline_ms > now_ms, f"{pending.member_id} is pending beyond its time")
        phase_ms, next_ms = after.phase_deadline_ms, self._coordinator.next_deadline(after)
        self.require(phase_ms is None or phase_ms > now_ms, "a phase did not end in time")
        self.require(next_ms is None or next_ms > now_ms, "a Tick left something undone")

    def _check_holds(self, before: Group, event: Event, taken: Step, now_ms: int) -> None:
        """Check that a held member is answered at the right time: when no partition is pending any more, or after half
        its session timeout.
        """
        after = taken.group
        if before.state is COMPLETING and after.state is STABLE:
            self._assigned_ms = now_ms
        if after.generation_id != before.generation_id:
            claimed = Counter(each for claim in claims_of(after).values() for _, each in claim.partitions)
            self.excused = {each for each in self.excused if claimed[each] > 1}
            self._answered = set()
        awaited = [each for each in after.handoffs if each.is_pending]
        for fact in taken.facts:
            if isinstance(fact, HandoffEnded) and fact.reason in FORCED:
                self.excused.add(fact.partition)
            elif isinstance(fact, MemberReplaced):
                self._answered.add(fact.member_id)
        askers = {m.parked_sync.request_id: key for key, m in before.members.items() if m.parked_sync is not None}
        if isinstance(event, SyncGroup):
            askers[event.request_id] = event.member_id
        for request_id, reply in taken.replies:
            if isinstance(reply, SyncReply) and reply.error is NONE:
                member_id = askers[request_id]
                early = {each.partition for each in awaited if each.target == member_id}
                longest_ms = min(10_000, after.members[member_id].session_timeout_ms // 2)
                waited = now_ms - self._assigned_ms >= longest_ms
                unheld = any(each.source == member_id for each in awaited) or member_id in self._answered
                self._answered.add(member_id)
                self.require(not early or waited or unheld, f"{member_id} is given {early}, which are awaited")
        for member in after.members.values():
            if after.state is STABLE and member.parked_sync is not None and isinstance(event, Tick):
                longest_ms = min(10_000, member.session_timeout_ms // 2)
                self.require(now_ms - self._assigned_ms < longest_ms, f"{member.member_id} is held too long")

    def _check_removal(self, before: Group, member_id: MemberId, now_ms: int) -> None:
        member = before.members[member_id]
        phase_over = (before.phase_deadline_ms or NEVER) <= now_ms
        causes = (
            self._silent_ms(before, member_id, now_ms) >= 0,
            before.connection_deadlines.get(member_id, NEVER) <= now_ms,
            member_id in before.pending_sync and before.state in (COMPLETING, STABLE) and phase_over,
            before.state is PREPARING
            and member.parked_join is None
            and member.group_instance_id is None
            and phase_over,
        )
        self.require(any(causes), f"{member_id} was removed without a cause")

    def _check_connections(self, before: Group, event: Event, after: Group, now_ms: int) -> None:
        dynamic = [m.connection_id for m in after.members.values() if m.group_instance_id is None and m.connection_id]
        asked = getattr(event, "member_id", None) == "" and isinstance(event, JoinGroup)
        if asked and not event.group_instance_id:  # type: ignore[union-attr]
            used = [*dynamic, *(p.connection_id for p in after.pending.values())]
            count = used.count(event.connection_id)  # type: ignore[union-attr]
            former = [m.connection_id for m in before.members.values() if m.group_instance_id is None]
            former += [p.connection_id for p in before.pending.values()]
            self.require(
                count <= max(1, former.count(event.connection_id)),  # type: ignore[union-attr]
                "a phantom beside the connection's own member",
            )
        if isinstance(event, ConnectionClosed):
            self.require(after.members.keys() == before.members.keys(), "a closed connection removed a member")
            self.require(event.connection_id not in dynamic, "a closed connection is still a key")
            grace_ms = self._settings.group_connection_grace_ms
            for member_id, member in after.members.items():
                lost = before.members[member_id].connection_id is not None and member.connection_id is None
                counts = lost and member.group_instance_id is None and grace_ms >= 0
                if counts:
                    deadline_ms = after.connection_deadlines.get(member_id)
                    self.require(deadline_ms == now_ms + grace_ms, f"{member_id} has no grace")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_ownership(self, group: Group) -> None:
        """Check that every partition that the leader assigned has one owner once all members have synced."""
        self.require(set(self._owners) == set(range(PARTITIONS)), f"only {sorted(self._owners)} have an owner")
        slots = {_slot(group, member_id) for member_id in group.members}
        self.require(set(self._owners.values()) <= slots, "partitions of somebody who is gone")


def _member_rows(coordinator: ModuleType, group: Group) -> dict[MemberId, Document]:
    return {key: coordinator.stored_member(group, key).document for key in group.members}


def _slot(group: Group, member_id: MemberId) -> str:
    return group.members[member_id].group_instance_id or member_id


def _first_join_held(group: Group, member_id: MemberId) -> bool:
    member = group.members.get(member_id)
    return member is not None and member.is_new and member.parked_join is not None


def frozen_copy(group: Group) -> Group:
    """Return a copy. A comparison with it shows whether a step has mutated its input."""
    return replace(
        group,
        members=dict(group.members),
        pending=dict(group.pending),
        session_deadlines=dict(group.session_deadlines),
        connection_deadlines=dict(group.connection_deadlines),
        hold_deadlines=dict(group.hold_deadlines),
        protocol_support=dict(group.protocol_support),
    )
