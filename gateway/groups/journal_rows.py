"""Turn facts into rows: what a settled step writes into the journal (docs/journal.md).

The one idea: a step arrives as the group before it, the group after it, and the facts. All are frozen, so rows can be
made later and on another thread. Little is remembered between steps (`Told`: the owners, and the times at which the
rebalance and the generation began). If this memory is lost, the group is written completely again, like a group that
was loaded. Facts arrive in the order in which a machine decides. Rows have the order that the journal promises: causes
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.facts import (
    AssignmentGiven,
    Conversion,
    Departure,
    Fact,
    GenerationAssigned,
    GenerationStarted,
    GroupDeleted,
    GroupTypeChanged,
    MemberChanged,
    MemberFenced,
    MemberId,
    MemberJoined,
    MemberLeft,
    MemberRejoined,
    MemberReplaced,
    MemberSynced,
    PartitionsWithheld,
    ProtocolViolated,
    RebalanceBegun,
    TargetComputed,
    Trigger,
)
from gateway.coordinator.handoff import HandoffBegun, HandoffEnded
from gateway.coordinator.machine import Machines
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE
from gateway.coordinator.settings import Settings
from gateway.coordinator.share.model import ShareGroup
from gateway.groups.journal_members import (
    Topics,
    assigned_to,
    assignor_of,
    claimed_by,
    has_caught_up,
    holds,
    instance_of,
    member_of,
    owned_by,
    spoke,
)
from gateway.groups.journal_sheet import Happened, Sheet, Told
from gateway.groups.kinds import AnyGroup
from storage.journal import JournalRow

MAX_GROUPS = 50_000
"""Groups about which something is remembered. The group without rows for the longest time is forgotten first."""

DEAD = GroupState.DEAD.value
EMPTY = GroupState.EMPTY.value
STABLE = GroupState.STABLE.value

LONG_REBALANCE_MS = 1_000
"""Duration of a rebalance from which the generation's row names the members that joined last."""
MAX_NAMED = 3

_EXPIRED = {
    Departure.SESSION_EXPIRED: "session_timeout",
    Departure.CONNECTION_CLOSED: "connection_closed",
    Departure.NOT_REJOINED: "rebalance_timeout",
    Departure.NOT_REVOKED: "rebalance_timeout",
    Departure.NEVER_SYNCED: "sync_timeout",
}
_TRIGGERS = {
    Trigger.MEMBER_JOINED: "member_joined",
    Trigger.MEMBER_REJOINED: "member_rejoined",
    Trigger.MEMBER_RETURNED: "static_replaced",
    Trigger.MEMBER_LEFT: "member_left",
    Trigger.TOO_MANY_MEMBERS: "too_many_members",
    Trigger.TOPICS_CHANGED: "topics_changed",
    Trigger.SUBSCRIPTION_CHANGED: "subscription_changed",
    Trigger.GUARDED: "handoff",
    Trigger.MIGRATED: "migrated",
}
_ARRIVALS = (MemberJoined, MemberRejoined, MemberReplaced)


class Rows:
    """Make the rows of steps. Steps must be passed in the order in which they happened."""

    def __init__(self, machines: Machines[AnyGroup, Settings], topics: Topics) -> None:
        self._machines = machines
        self._topics = topics
        self._told: OrderedDict[str, Told] = OrderedDict()

    def forget(self) -> None:
        """Forget all groups, because rows were lost. Each group is written again completely when its next event
        happens.
        """
        self._told.clear()

    def of(self, happened: Happened) -> list[JournalRow]:
        return _Telling(self._machines, self._topics, self._told, happened).rows()


class _Telling(Sheet):
    """Builds the rows of one step."""

    def __init__(
        self,
        machines: Machines[AnyGroup, Settings],
        topics: Topics,
        all_told: OrderedDict[str, Told],
        happened: Happened,
    ) -> None:
        super().__init__(machines, topics, happened)
        self._all_told = all_told
        self._told = all_told.get(self._group_id, self._told)
        self._handed_out = False

    def rows(self) -> list[JournalRow]:
        known = self._group_id in self._all_told
        if not self._happened.facts:
            self._loaded(self._after)
        else:
            if not known and self._was.member_count:
                self._loaded(self._before)
            elif not known:
                # A member id was only handed out, so no row mentions this group yet.
                self._told.state = self._was.state if self._was.exists and self._was.generation_id else None
            self._tell_all()
        self._remember()
        return self._rows

    def _remember(self) -> None:
        gone = not self._now.exists or self._now.state == DEAD
        if gone or not self._now.member_count:
            self._all_told.pop(self._group_id, None)
            return
        self._all_told[self._group_id] = self._told
        self._all_told.move_to_end(self._group_id)
        while len(self._all_told) > MAX_GROUPS:
            self._all_told.popitem(last=False)

    def _tell_all(self) -> None:
        arrivals: list[Fact] = []
        emptied_by = self._last_to_leave()
        for fact in self._happened.facts:
            if isinstance(fact, _ARRIVALS):
                if isinstance(fact, MemberReplaced):
                    self._fenced(fact.former_id, fact.group_instance_id)
                arrivals.append(fact)
            elif isinstance(fact, MemberLeft):
                if fact is not emptied_by:
                    self._left(fact)
            elif isinstance(fact, RebalanceBegun):
                self._rebalance(fact)
                self._arrived(arrivals)
                if not isinstance(self._after, Group) and self._now.member_count:
                    self._generation(self._after)
            elif isinstance(fact, ProtocolViolated):
                self._violated(fact)
            elif isinstance(fact, PartitionsWithheld):
                self._event("observed", reason="partitions_withheld", detail=str(fact))
            elif isinstance(fact, MemberFenced):
                pass  # the row for MemberReplaced already covers this fact
            else:
                self._arrived(arrivals)
                self._one(fact, emptied_by)
        self._arrived(arrivals)
        self._complete()

    def _one(self, fact: Fact, emptied_by: MemberLeft | None) -> None:
        after = self._after
        match fact:
            case GenerationStarted():
                self._started(fact, emptied_by)
            case GenerationAssigned():
                self._event("assignment_stored", state_after=STABLE, wait_ms=self._since_generation())
                self._hand_out(after)
            case MemberSynced():
                self._synced(fact.member_id)
            case TargetComputed():
                self._event("assignment_stored", wait_ms=self._since_generation(), protocol_name=fact.assignor)
            case AssignmentGiven() | MemberChanged():
                if not isinstance(after, Group):
                    self._reconciled(after, fact.member_id)
                elif not self._handed_out:
                    # A static member that returned gets its predecessor's assignment without a rebalance.
                    self._give(fact.member_id, assigned_to(after, fact.member_id))
            case GroupTypeChanged(conversion=Conversion.EMPTY):
                self._generation_id = self._now.generation_id
                self._told = Told(self._told.state)
            case HandoffBegun():
                for topic, partition in fact.partitions:
                    self._handoff(fact, topic, partition, deadline_ms=self._happened.at_ms + fact.left_ms)
            case HandoffEnded():
                self._handoff(
                    fact,
                    fact.topic,
                    fact.partition,
                    mark_offset=fact.mark,
                    reason=fact.reason.value,
                    wait_ms=fact.waited_ms,
                )
            case GroupTypeChanged():
                # The group's members are other values now, and its partitions have other names. So all of it is written
                # again.
                self._loaded(after, reason=fact.conversion.name.lower(), detail=str(fact))
            case GroupDeleted():
                self._event("deleted", reason="requested", state_after=DEAD)
            case _:
                pass

    def _violated(self, fact: ProtocolViolated) -> None:
        member_id = fact.members[0] if fact.members else None
        self._event(
            "observed",
            reason=fact.violation.name.lower(),
            detail=str(fact),
            member_id=member_id,
            member=member_of(self._after, member_id),
        )

    def _started(self, fact: GenerationStarted, emptied_by: MemberLeft | None) -> None:
        self._generation_id = fact.generation_id
        if fact.members:
            self._generation(self._after)
        elif emptied_by is not None:
            self._left(emptied_by, state_after=EMPTY, member_count=0)
        else:
            self._event("rebalance_completed", state_after=EMPTY, member_count=0, wait_ms=self._since_start())

    # --- members ------------------------------------------------------------------------------------------------

    def _last_to_leave(self) -> MemberLeft | None:
        """Return the member whose leaving made a classic group empty: its row comes last, as the journal promises."""
        facts = self._happened.facts
        emptied = any(isinstance(fact, GenerationStarted) and not fact.members for fact in facts)
        left = [fact for fact in facts if isinstance(fact, MemberLeft)] if emptied else []
        return left[-1] if left else None

    def _left(self, fact: MemberLeft, *, state_after: str | None = None, member_count: int | None = None) -> None:
        member = member_of(self._before, fact.member_id)
        expired = _EXPIRED.get(fact.departure)
        wait_ms: int | None = None
        if expired is not None:
            kind, reason = "member_expired", expired
            if isinstance(member, Member) and member.is_new and fact.departure is Departure.SESSION_EXPIRED:
                reason = "join_timeout"
            wait_ms = self._silent_ms(fact.member_id)
        elif fact.departure is Departure.TURNED_AWAY:
            kind, reason = "member_left", "turned_away"
        else:
            kind, reason = "member_left", "leave_static" if instance_of(member) is not None else "leave"
        self._event(
            kind,
            reason=reason,
            detail=fact.reason,
            member_id=fact.member_id,
            member=member,
            wait_ms=wait_ms,
            state_after=state_after,
            member_count=member_count,
        )
        self._release(fact.member_id, None)

    def _fenced(self, member_id: MemberId, instance_id: str) -> None:
        self._event("member_fenced", reason="static_replaced", member_id=member_id, group_instance_id=instance_id)
        self._release(member_id, None)

    def _arrived(self, arrivals: list[Fact]) -> None:
        for fact in arrivals:
            assert isinstance(fact, _ARRIVALS)
            member = member_of(self._after, fact.member_id)
            reason = {MemberJoined: "new", MemberRejoined: "rejoined", MemberReplaced: "static_replaced"}[type(fact)]
            self._told.joined_ms[fact.member_id] = self._happened.now_ms
            self._event(
                "member_joined",
                reason=reason,
                detail=fact.reason,
                member_id=fact.member_id,
                member=member,
                wait_ms=self._since_start(),
            )
            if isinstance(self._after, Group):
                self._release(fact.member_id, claimed_by(self._after, fact.member_id))
            elif isinstance(fact, MemberRejoined):
                self._release(fact.member_id, None)
        arrivals.clear()

    # --- rebalances ---------------------------------------------------------------------------------------------

    def _rebalance(self, fact: RebalanceBegun) -> None:
        reason, member_id = _TRIGGERS[fact.trigger], fact.member_id
        if fact.trigger is Trigger.MEMBER_LEFT:
            left = [each for each in self._happened.facts if isinstance(each, MemberLeft)]
            if left:
                member_id = member_id or left[0].member_id
                departure = next((each.departure for each in left if each.member_id == member_id), left[0].departure)
                if departure is Departure.NEVER_SYNCED:
                    reason = "sync_timeout"
                elif departure in _EXPIRED:
                    reason = "member_expired"
        elif fact.trigger is Trigger.MEMBER_REJOINED and self._leads_again(member_id):
            reason = "leader_rejoined"
        state = GroupState.PREPARING_REBALANCE.value
        if not isinstance(self._after, Group):
            self._generation_id = self._now.generation_id
            state = self._now.state
        self._told.rebalance_ms = self._happened.now_ms
        self._told.generation_ms = None
        self._told.joined_ms.clear()
        self._event("rebalance_started", reason=reason, member_id=member_id, state_after=state)

    def _leads_again(self, member_id: MemberId | None) -> bool:
        before, after = member_of(self._before, member_id), member_of(self._after, member_id)
        return (
            isinstance(self._before, Group)
            and self._before.leader_id == member_id
            and isinstance(before, Member)
            and isinstance(after, Member)
            and before.protocols == after.protocols
        )

    def _generation(self, group: AnyGroup) -> None:
        self._told.generation_ms = self._happened.now_ms
        self._told.synced.clear()
        changed: Iterable[MemberId] = self._machines.of(group).member_ids(group)
        if isinstance(group, Group):
            state, protocol_name, leader = GroupState.COMPLETING_REBALANCE.value, group.protocol_name, group.leader_id
        else:
            state, protocol_name, leader = None, assignor_of(group), None
            touched = {member_id for fact in self._happened.facts for member_id in spoke(fact)}
            changed = [member_id for member_id in changed if member_id in touched]
        last = self._joined_last(group)
        self._event(
            "generation_created",
            state_after=state,
            protocol_name=protocol_name,
            member_id=leader,
            member_count=self._now.member_count,
            detail=last,
            wait_ms=None if last is None else self._since_start(),
        )
        self._members(group, changed)

    def _joined_last(self, group: AnyGroup) -> str | None:
        """Return the members that a long join phase was waiting for, or None."""
        waited_ms = self._since_start()
        before = self._before
        if not isinstance(group, Group) or not isinstance(before, Group) or (waited_ms or 0) < LONG_REBALANCE_MS:
            return None
        late = [
            member_id
            for member_id in group.members
            if member_id in before.members and before.members[member_id].parked_join is None
        ]
        named = ", ".join(late[:MAX_NAMED])
        return named + (f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else "") or None

    def _hand_out(self, group: AnyGroup) -> None:
        self._handed_out = True
        if isinstance(group, Group) and group.protocol_type == CONSUMER_PROTOCOL_TYPE:
            for member_id in group.members:
                self._give(member_id, assigned_to(group, member_id))

    def _synced(self, member_id: MemberId) -> None:
        self._told.synced.add(member_id)
        self._event("member_synced", member_id=member_id, wait_ms=self._since_generation())

    def _complete(self) -> None:
        """Note whether this step ended the rebalance in progress, so that no member is waited for any more."""
        group = self._after
        if self._told.generation_ms is None or self._now.state != STABLE:
            return
        if isinstance(group, Group) and (group.pending_sync or holds(group)):
            return
        if isinstance(group, ShareGroup) and not all(has_caught_up(group, each) for each in group.members):
            # Such a group is Stable at once, although its members may not know the generation yet.
            return
        self._event("rebalance_completed", wait_ms=self._since_start(), member_count=self._now.member_count)
        self._told.rebalance_ms = self._told.generation_ms = None

    def _reconciled(self, group: AnyGroup, member_id: MemberId) -> None:
        if member_id not in group.members:
            return
        held = owned_by(group, member_id, self._topics)
        self._release(member_id, held)
        self._give(member_id, held)
        waits = self._told.generation_ms is not None and member_id not in self._told.synced
        if waits and has_caught_up(group, member_id):
            self._synced(member_id)

    # --- a group of which nothing is remembered ---------------------------------------------------------------------

    def _loaded(self, group: AnyGroup, *, reason: str | None = None, detail: str | None = None) -> None:
        """Write the complete state, for readers that have read nothing before."""
        summary = self._machines.of(group).summary(group)
        self._told = Told(summary.state)
        self._generation_id = summary.generation_id
        self._event("loaded", member_count=summary.member_count, reason=reason, detail=detail)
        member_ids = list(self._machines.of(group).member_ids(group))
        self._members(group, member_ids)
        for member_id in member_ids:
            self._give(member_id, owned_by(group, member_id, self._topics), change="kept")
