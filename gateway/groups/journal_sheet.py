"""One step's rows of the journal (docs/journal.md), and what the group's rows have said so far.

The one idea: a row is filled in from the step (time, node, group, generation) and from its content. Ownership is
written as the difference to what was written last. `journal_rows.py` decides what deserves a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.facts import Fact, MemberId
from gateway.coordinator.handoff import HandoffBegun, HandoffEnded
from gateway.coordinator.machine import Machines
from gateway.coordinator.settings import Settings
from gateway.groups.journal_members import (
    AnyMember,
    OwnedPartition,
    Topics,
    instance_of,
    member_of,
    rebalance_timeout_ms,
    session_timeout_ms,
)
from gateway.groups.kinds import AnyGroup
from storage.journal import JournalEvent, JournalHandoff, JournalMember, JournalOwnership, JournalRow


@dataclass(frozen=True, slots=True)
class Happened:
    """One settled step. If it has no facts, the group was only loaded."""

    before: AnyGroup
    after: AnyGroup
    facts: tuple[Fact, ...]
    at_ms: int
    """Time of the wall clock."""
    now_ms: int
    """Time of the clock that the group's deadlines use."""
    node_id: int


@dataclass(slots=True)
class Told:
    """State that the rows of a group have reported so far."""

    state: str | None
    rebalance_ms: int | None = None
    generation_ms: int | None = None
    joined_ms: dict[MemberId, int] = field(default_factory=dict[MemberId, int])
    owned: dict[MemberId, set[OwnedPartition]] = field(default_factory=dict[MemberId, set[OwnedPartition]])
    synced: set[MemberId] = field(default_factory=set[MemberId])


class Sheet:
    def __init__(self, machines: Machines[AnyGroup, Settings], topics: Topics, happened: Happened) -> None:
        self._machines = machines
        self._topics = topics
        self._happened = happened
        self._before, self._after = happened.before, happened.after
        self._was = machines.of(happened.before).summary(happened.before)
        self._now = machines.of(happened.after).summary(happened.after)
        self._group_id = self._now.group_id
        self._generation_id = self._was.generation_id
        self._rows: list[JournalRow] = []
        self._told = Told(None)

    def _event(
        self,
        kind: str,
        *,
        reason: str | None = None,
        detail: str | None = None,
        member_id: str | None = None,
        member: AnyMember | None = None,
        group_instance_id: str | None = None,
        protocol_name: str | None = None,
        member_count: int | None = None,
        wait_ms: int | None = None,
        state_after: str | None = None,
    ) -> None:
        state_before = self._told.state
        if not isinstance(self._after, Group) and kind != "loaded":
            state_after = self._now.state
        after = state_after or state_before or self._was.state
        self._told.state = after
        self._rows.append(
            JournalEvent(
                at_ms=self._happened.at_ms,
                node_id=self._happened.node_id,
                group_id=self._group_id,
                generation_id=self._generation_id,
                group_type=self._now.group_type,
                kind=kind,
                reason=reason,
                detail=detail,
                state_before=state_before,
                state_after=after,
                member_id=member_id,
                group_instance_id=instance_of(member) or group_instance_id,
                client_id=None if member is None else member.client_id,
                client_host=None if member is None else member.client_host,
                protocol_name=protocol_name,
                member_count=member_count,
                wait_ms=wait_ms,
            )
        )

    def _members(self, group: AnyGroup, member_ids: Iterable[MemberId]) -> None:
        started_ms = self._told.rebalance_ms
        for member_id in member_ids:
            member = group.members[member_id]
            joined_ms = self._told.joined_ms.get(member_id)
            classic = isinstance(member, Member)
            waited = classic and joined_ms is not None and started_ms is not None
            self._rows.append(
                JournalMember(
                    at_ms=self._happened.at_ms,
                    node_id=self._happened.node_id,
                    group_id=self._group_id,
                    generation_id=self._generation_id,
                    member_id=member_id,
                    group_instance_id=instance_of(member),
                    client_id=member.client_id,
                    client_host=member.client_host,
                    session_timeout_ms=session_timeout_ms(member),
                    rebalance_timeout_ms=rebalance_timeout_ms(member),
                    join_wait_ms=max(joined_ms - started_ms, 0) if waited and joined_ms and started_ms else None,
                    leader=isinstance(group, Group) and group.leader_id == member_id,
                )
            )

    def _give(self, member_id: MemberId, partitions: set[OwnedPartition], change: str = "assigned") -> None:
        owned = self._told.owned.setdefault(member_id, set())
        self._ownership(member_id, partitions - owned, change)
        owned |= partitions

    def _release(self, member_id: MemberId, kept: set[OwnedPartition] | None) -> None:
        """Note that the member now owns only `kept`. If `kept` is None, the member has left or starts anew."""
        owned = self._told.owned.pop(member_id, set())
        if kept is not None:
            self._told.owned[member_id] = owned & kept
        self._ownership(member_id, owned - (kept or set()), "released")

    def _ownership(self, member_id: MemberId, partitions: set[OwnedPartition], change: str) -> None:
        for topic, partition in sorted(partitions, key=lambda each: (str(each[0]), each[1])):
            by_id = isinstance(topic, UUID)
            self._rows.append(
                JournalOwnership(
                    at_ms=self._happened.at_ms,
                    node_id=self._happened.node_id,
                    group_id=self._group_id,
                    generation_id=self._generation_id,
                    topic_id=topic if by_id else self._topics.id_of(topic),
                    topic=self._topics.name_of(topic) if by_id else topic,
                    partition=partition,
                    change=change,
                    member_id=member_id,
                )
            )

    def _handoff(
        self,
        fact: HandoffBegun | HandoffEnded,
        topic: str | UUID,
        partition: int,
        *,
        mark_offset: int | None = None,
        deadline_ms: int | None = None,
        reason: str | None = None,
        wait_ms: int | None = None,
    ) -> None:
        by_id = isinstance(topic, UUID)
        self._rows.append(
            JournalHandoff(
                at_ms=self._happened.at_ms,
                node_id=self._happened.node_id,
                group_id=self._group_id,
                generation_id=fact.generation_id,
                topic_id=topic if by_id else self._topics.id_of(topic),
                topic=self._topics.name_of(topic) if by_id else topic,
                partition=partition,
                phase="begun" if reason is None else "ended",
                mode=fact.mode.value,
                source_member_id=fact.source,
                target_member_id=fact.target,
                mark_offset=mark_offset,
                deadline_ms=deadline_ms,
                reason=reason,
                wait_ms=wait_ms,
            )
        )

    # --- times --------------------------------------------------------------------------------------------------

    def _since_start(self) -> int | None:
        started_ms = self._told.rebalance_ms
        return None if started_ms is None else max(self._happened.now_ms - started_ms, 0)

    def _since_generation(self) -> int | None:
        created_ms = self._told.generation_ms
        return None if created_ms is None else max(self._happened.now_ms - created_ms, 0)

    def _silent_ms(self, member_id: MemberId) -> int | None:
        """Return the time since the coordinator last heard from the member, as far as the session deadline shows it."""
        member, deadline_ms = member_of(self._before, member_id), self._before.session_deadlines.get(member_id)
        if not isinstance(member, Member) or deadline_ms is None or member.is_new:
            return None
        return max(self._happened.now_ms - (deadline_ms - member.session_timeout_ms), 0)
