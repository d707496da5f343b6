"""A group being changed: the working copy that one step makes, alters and seals.

The one idea: mutation lives for the length of one step. A handler that accepts a request opens a `Draft`, changes
members through domain verbs, and seals it into a `Step`; a handler that refuses returns the very group it received. The
verbs keep related fields consistent: a removed member loses its deadlines and its parked requests, every parked request
that is displaced is answered, counts follow members, and each change is recorded as a fact. This module does not decide
when rebalances start and end; `rebalance.py` does.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.classic.handoff import member_gone, member_replaced
from gateway.coordinator.classic.model import (
    GROUP_FIELDS,
    LEGAL_TRANSITIONS,
    Group,
    GroupState,
    Member,
    Parked,
    PendingMember,
    Watch,
)
from gateway.coordinator.facts import (
    Departure,
    EveryoneHeard,
    Fact,
    MemberFenced,
    MemberId,
    MemberLeft,
    MemberReplaced,
    shortened,
)
from gateway.coordinator.handoff import Handoff
from gateway.coordinator.machine import ConnectionId, Reply, RequestId, Step
from gateway.coordinator.protocols import names, offered_bytes
from gateway.coordinator.requests import JoinReply, SyncReply
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode


class Draft:
    """Fields are those of `Group`, under the same names, as far as steps change them; `seal` puts them together."""

    group_id: str
    state: GroupState
    exists: bool
    protocol_type: str | None
    protocol_name: str | None
    generation_id: int
    leader_id: MemberId | None
    members: dict[MemberId, Member]
    pending: dict[MemberId, PendingMember]
    pending_sync: set[MemberId]
    untold: frozenset[MemberId]
    unheard: set[MemberId]
    session_deadlines: dict[MemberId, int]
    connection_deadlines: dict[MemberId, int]
    phase_deadline_ms: int | None
    initial_delay_remaining_ms: int | None
    new_member_added: bool
    subscribed_topics: frozenset[str] | None
    watch: Watch
    handoffs: tuple[Handoff, ...]
    hold_deadlines: dict[MemberId, int]
    awaiting_join: int
    protocol_support: dict[str, int]
    offered_bytes: int

    def __init__(self, group: Group, now_ms: int, settings: Settings) -> None:
        self.now_ms = now_ms
        self.settings = settings
        self.replies: list[tuple[RequestId, Reply]] = []
        self.facts: list[Fact] = []
        # A draft and a group have the same attributes. Copying all of them at once takes a tenth of the time of copying
        # them one by one.
        self.__dict__.update(group.__dict__)
        self.members = dict(group.members)
        self.pending = dict(group.pending)
        self.pending_sync = set(group.pending_sync)
        self.unheard = set(group.unheard)
        self.session_deadlines = dict(group.session_deadlines)
        self.connection_deadlines = dict(group.connection_deadlines)
        self.protocol_support = dict(group.protocol_support)
        self.hold_deadlines = dict(group.hold_deadlines)
        self._had_unheard = bool(group.unheard)

    def seal(self) -> Step[Group]:
        # Nothing is stored during a join phase; the end of the phase stores the same.
        if (
            self._had_unheard
            and not self.unheard
            and self.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE)
        ):
            self.tell(EveryoneHeard())
        own, sealed = self.__dict__, object.__new__(Group)
        attributes = sealed.__dict__
        attributes.update([(name, own[name]) for name in GROUP_FIELDS])
        attributes["pending_sync"] = frozenset(self.pending_sync)
        attributes["unheard"] = frozenset(self.unheard)
        return Step(sealed, tuple(self.replies), tuple(self.facts))

    def transition(self, to: GroupState) -> None:
        if to not in LEGAL_TRANSITIONS[self.state]:
            raise AssertionError(f"group {self.group_id}: {self.state.value} cannot become {to.value}")
        self.state = to

    def answer(self, request_id: RequestId, reply: Reply) -> None:
        self.replies.append((request_id, reply))

    def tell(self, fact: Fact) -> None:
        self.facts.append(fact)

    # --- members ----------------------------------------------------------------------------------------------------

    def put(self, member: Member) -> None:
        """Add the member. If a member with its id exists, replace that member."""
        before = self.members.get(member.member_id)
        if before is None:
            last = next(reversed(self.members.values()), None)
            if last is not None and member.position <= last.position:
                member = replace(member, position=last.position + 1)
            self._count(member, +1)
        else:
            if before.protocols is not member.protocols:
                self._count_protocols(before, -1)
                self._count_protocols(member, +1)
            self.awaiting_join += (member.parked_join is not None) - (before.parked_join is not None)
        self.members[member.member_id] = member

    def remove(self, member_id: MemberId, departure: Departure, reason: str | None = None) -> None:
        """Remove the member and answer its parked requests. If it was the leader, the eldest member becomes leader."""
        member = self.members.pop(member_id)
        self.tell(MemberLeft(member_id, departure, shortened(reason)))
        self._count(member, -1)
        self._refuse_parked(member, ErrorCode.UNKNOWN_MEMBER_ID)
        self._forget(member_id)
        self.pending_sync.discard(member_id)
        self.hold_deadlines.pop(member_id, None)
        member_gone(self, member_id, departure)
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)

    def rename(self, old_id: MemberId, new: Member, reason: str | None) -> None:
        """Replace a static member with `new`, which inherits its order, its leadership and its pending sync.

        The old id's parked requests are answered FENCED_INSTANCE_ID (`replaceStaticMember`).
        """
        old = self.members[old_id]
        self._refuse_parked(old, ErrorCode.FENCED_INSTANCE_ID)
        self._count(old, -1)
        self._count(new, +1)
        self._forget(old_id)
        self.tell(MemberReplaced(new.member_id, old_id, new.group_instance_id or "", shortened(reason)))
        self.tell(MemberFenced(old_id, new.group_instance_id))
        self.members = {
            (new.member_id if member_id == old_id else member_id): (new if member_id == old_id else member)
            for member_id, member in self.members.items()
        }
        if old_id in self.pending_sync:
            self.pending_sync.discard(old_id)
            self.pending_sync.add(new.member_id)
        if self.leader_id == old_id:
            self.leader_id = new.member_id
        member_replaced(self, old_id, new.member_id)

    def park_join(self, member: Member, parked: Parked) -> None:
        """Park a join for `member`. A join already parked for it is answered, because its client has asked again."""
        if member.parked_join is not None:
            self.answer(member.parked_join.request_id, JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        held = replace(member, parked_join=parked)
        self.put(held)
        self.arm_session(held)

    def park_sync(self, member: Member, parked: Parked) -> None:
        """Park a sync for `member`; one already parked is answered, as in `park_join`."""
        if member.parked_sync is not None:
            self.answer(member.parked_sync.request_id, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))
        held = replace(member, parked_sync=parked)
        self.put(held)
        self.arm_session(held)

    def _refuse_parked(self, member: Member, error: ErrorCode) -> None:
        if member.parked_join is not None:
            self.answer(member.parked_join.request_id, JoinReply(error, member.member_id))
        if member.parked_sync is not None:
            self.answer(member.parked_sync.request_id, SyncReply(error))

    def _count(self, member: Member, by: int) -> None:
        self._count_protocols(member, by)
        if member.parked_join is not None:
            self.awaiting_join += by

    def _count_protocols(self, member: Member, by: int) -> None:
        self.offered_bytes += by * offered_bytes(member.protocols)
        for name in names(member.protocols):
            count = self.protocol_support.get(name, 0) + by
            if count:
                self.protocol_support[name] = count
            else:
                del self.protocol_support[name]

    # --- time -------------------------------------------------------------------------------------------------------

    def hear(self, member: Member, connection_id: ConnectionId) -> Member:
        """Record that the member spoke through this connection, which is its key from now on."""
        self.connection_deadlines.pop(member.member_id, None)
        self.unheard.discard(member.member_id)
        if member.connection_id != connection_id:
            member = replace(member, connection_id=connection_id)
            self.put(member)
        return member

    def arm_session(self, member: Member) -> None:
        self.session_deadlines[member.member_id] = self.now_ms + session_ms(member, self.settings)

    def rebalance_timeout_ms(self) -> int:
        """Return the longest rebalance timeout of any member."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def _forget(self, member_id: MemberId) -> None:
        self.unheard.discard(member_id)
        self.session_deadlines.pop(member_id, None)
        self.connection_deadlines.pop(member_id, None)


def session_ms(member: Member, settings: Settings) -> int:
    """Return how long the member may be silent. A new member's first join may be parked for longer than any session."""
    first_join_held = member.is_new and member.parked_join is not None
    return settings.new_member_join_timeout_ms if first_join_held else member.session_timeout_ms
