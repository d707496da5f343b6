"""A group being changed: the working copy that one step makes, alters and seals.

The one idea: mutation lives for the length of one step. A handler that accepts a request opens a `Draft`, says in
domain verbs what happens to members, and seals it into a `Step`; a handler that refuses gives back the very group it
was given. The verbs keep in agreement what must agree: a member that goes takes its deadlines and its parked requests
with it, every parked request that is displaced is answered, counts follow members. When rebalances start and end is not
decided here, but in `rebalance.py`.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.model import (
    LEGAL_TRANSITIONS,
    ConnectionId,
    Group,
    GroupState,
    JoinReply,
    Member,
    MemberId,
    Parked,
    Reply,
    RequestId,
    Settings,
    Step,
    SyncReply,
)
from gateway.coordinator.protocols import names
from protocol.errors import ErrorCode

MAX_REASON_CHARS = 255
"""As clients cut them; whoever does not is cut here."""


class Draft:
    """Fields are those of `Group`, under the same names; `seal` puts them together again."""

    __slots__ = (
        "awaiting_join",
        "connection_deadlines",
        "exists",
        "generation_id",
        "group_id",
        "initial_delay_remaining_ms",
        "leader_id",
        "members",
        "new_member_added",
        "now_ms",
        "pending",
        "pending_sync",
        "persist",
        "phase_deadline_ms",
        "protocol_name",
        "protocol_support",
        "protocol_type",
        "reasons",
        "replies",
        "session_deadlines",
        "settings",
        "state",
        "subscribed_topics",
    )

    def __init__(self, group: Group, now_ms: int, settings: Settings) -> None:
        self.now_ms = now_ms
        self.settings = settings
        self.replies: list[tuple[RequestId, Reply]] = []
        self.reasons: list[str] = []
        self.persist = False
        self.group_id = group.group_id
        self.state = group.state
        self.exists = group.exists
        self.protocol_type = group.protocol_type
        self.protocol_name = group.protocol_name
        self.generation_id = group.generation_id
        self.leader_id = group.leader_id
        self.members = dict(group.members)
        self.pending = dict(group.pending)
        self.pending_sync = set(group.pending_sync)
        self.session_deadlines = dict(group.session_deadlines)
        self.connection_deadlines = dict(group.connection_deadlines)
        self.phase_deadline_ms = group.phase_deadline_ms
        self.initial_delay_remaining_ms = group.initial_delay_remaining_ms
        self.new_member_added = group.new_member_added
        self.subscribed_topics = group.subscribed_topics
        self.awaiting_join = group.awaiting_join
        self.protocol_support = dict(group.protocol_support)

    def seal(self) -> Step:
        group = Group(
            group_id=self.group_id,
            state=self.state,
            exists=self.exists,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol_name,
            generation_id=self.generation_id,
            leader_id=self.leader_id,
            members=self.members,
            pending=self.pending,
            pending_sync=frozenset(self.pending_sync),
            session_deadlines=self.session_deadlines,
            connection_deadlines=self.connection_deadlines,
            phase_deadline_ms=self.phase_deadline_ms,
            initial_delay_remaining_ms=self.initial_delay_remaining_ms,
            new_member_added=self.new_member_added,
            subscribed_topics=self.subscribed_topics,
            awaiting_join=self.awaiting_join,
            protocol_support=self.protocol_support,
        )
        return Step(group, tuple(self.replies), self.persist, tuple(self.reasons))

    def transition(self, to: GroupState) -> None:
        if to not in LEGAL_TRANSITIONS[self.state]:
            raise AssertionError(f"group {self.group_id}: {self.state.value} cannot become {to.value}")
        self.state = to

    def answer(self, request_id: RequestId, reply: Reply) -> None:
        self.replies.append((request_id, reply))

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    # --- members ----------------------------------------------------------------------------------------------------

    def put(self, member: Member) -> None:
        """Adds the member, or replaces what is held under its id."""
        before = self.members.get(member.member_id)
        if before is None:
            self._count(member, +1)
        else:
            if before.protocols is not member.protocols:
                self._count_protocols(before, -1)
                self._count_protocols(member, +1)
            self.awaiting_join += (member.parked_join is not None) - (before.parked_join is not None)
        self.members[member.member_id] = member

    def remove(self, member_id: MemberId, error: ErrorCode = ErrorCode.UNKNOWN_MEMBER_ID) -> None:
        """Takes the member out; its parked requests are answered with `error`. A leader's place goes to the eldest."""
        member = self.members.pop(member_id)
        self._count(member, -1)
        self._refuse_parked(member, error)
        self._forget_deadlines(member_id)
        self.pending_sync.discard(member_id)
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)

    def rename(self, old_id: MemberId, new: Member) -> None:
        """Puts `new` in the place of a static member: order, leadership and a sync still awaited go over to it.

        The old id's parked requests are answered FENCED_INSTANCE_ID (`replaceStaticMember`).
        """
        old = self.members[old_id]
        self._refuse_parked(old, ErrorCode.FENCED_INSTANCE_ID)
        self._count(old, -1)
        self._count(new, +1)
        self._forget_deadlines(old_id)
        self.members = {
            (new.member_id if member_id == old_id else member_id): (new if member_id == old_id else member)
            for member_id, member in self.members.items()
        }
        if old_id in self.pending_sync:
            self.pending_sync.discard(old_id)
            self.pending_sync.add(new.member_id)
        if self.leader_id == old_id:
            self.leader_id = new.member_id

    def park_join(self, member: Member, parked: Parked) -> None:
        """Holds a join for `member`. A join already held for it is answered: its client has asked again."""
        if member.parked_join is not None:
            self.answer(member.parked_join.request_id, JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        held = replace(member, parked_join=parked)
        self.put(held)
        self.arm_session(held)

    def park_sync(self, member: Member, parked: Parked) -> None:
        """Holds a sync for `member`; one already held is answered, as in `park_join`."""
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
        for name in names(member.protocols):
            count = self.protocol_support.get(name, 0) + by
            if count:
                self.protocol_support[name] = count
            else:
                del self.protocol_support[name]

    # --- time -------------------------------------------------------------------------------------------------------

    def hear(self, member: Member, connection_id: ConnectionId) -> Member:
        """The member has spoken through this connection, which is its key from here on."""
        self.connection_deadlines.pop(member.member_id, None)
        if member.connection_id != connection_id:
            member = replace(member, connection_id=connection_id)
            self.put(member)
        return member

    def arm_session(self, member: Member) -> None:
        self.session_deadlines[member.member_id] = self.now_ms + session_ms(member, self.settings)

    def rebalance_timeout_ms(self) -> int:
        """The longest that any member asked for."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def _forget_deadlines(self, member_id: MemberId) -> None:
        self.session_deadlines.pop(member_id, None)
        self.connection_deadlines.pop(member_id, None)


def session_ms(member: Member, settings: Settings) -> int:
    """How long the member may be silent. A new member's first join may be held for longer than any session."""
    first_join_held = member.is_new and member.parked_join is not None
    return settings.new_member_join_timeout_ms if first_join_held else member.session_timeout_ms


def because(what: str, reason: str | None) -> str:
    """What happened, with the client's own words for it (KIP-800), which mean nothing to the protocol."""
    return f"{what}: {reason[:MAX_REASON_CHARS]}" if reason else what
