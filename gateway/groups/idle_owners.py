"""Find members of cooperative groups that read nothing of their assignment.

The one idea: a client that accepts an assignment asks where to begin (OffsetFetch), or fetches, or commits. A client
that does none of these within `patience_s` has not accepted it. Its rebalance callback calls `assign` although a
cooperative protocol needs `incremental_assign`, which librdkafka refuses, or the callback is stuck. No client reads its
partitions, and the member keeps them while it heartbeats. This is reported once per assignment and has no other
consequence.

An owner is watched only if clients of all partitions that it gained are sent to this node. A client that asks another
node is not seen here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from gateway.coordinator.classic.handoff import member_on
from gateway.coordinator.classic.model import Group
from gateway.coordinator.classic.observer import claim_of, is_cooperative, partitions_or_none
from gateway.coordinator.facts import (
    MAX_NAMED,
    Fact,
    MemberId,
    MemberSynced,
    OffsetsCommitted,
    ProtocolViolated,
    Violation,
)
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE
from gateway.groups.groups import Groups
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST
from protocol.errors import ProtocolError
from storage.types import Partition

Key = TypeVar("Key", str, tuple[UUID, int])

PATIENCE_S = 15.0
MAX_OWNERS = 10_000
MAX_PARTITIONS = 100
"""Maximal number of partitions that are watched of one owner."""


@dataclass(frozen=True, slots=True, eq=False)
class _Owner:
    group_id: str
    member_id: MemberId
    generation_id: int
    client_id: str
    client_host: str
    partitions: tuple[tuple[str, int], ...]
    """The first partitions that it gained, to be named."""
    partition_count: int
    keys: tuple[tuple[UUID, int], ...]


class IdleOwners:
    """The idle owners in the classic groups of one node."""

    def __init__(
        self,
        groups: Groups,
        catalog: Catalog,
        leads: Callable[[Partition], bool],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._groups = groups
        self._catalog = catalog
        self._leads = leads
        self._patience_s = patience_s
        self._owners: dict[tuple[str, MemberId], _Owner] = {}
        self._by_group: dict[str, set[_Owner]] = {}
        self._by_partition: dict[tuple[UUID, int], set[_Owner]] = {}
        self._loop = asyncio.get_running_loop()
        groups.readers.append(self.told)

    @property
    def watching(self) -> bool:
        return bool(self._owners)

    def told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        for fact in facts:
            if isinstance(fact, MemberSynced):
                # The facts arrive before the group has its new value.
                self._loop.call_soon(self._watch, group_id, fact.member_id, context=NO_REQUEST.copy())
            elif isinstance(fact, OffsetsCommitted):
                self._forget(self._owners.get((group_id, fact.member_id)))

    def asked_offsets(self, group_id: str, connection_id: str, client_id: str, client_host: str) -> None:
        """Note that a client has asked for offsets of the group. The client is the member that speaks on its
        connection, or else any member with the same client id and host."""
        group = self._groups.settled(group_id) if group_id in self._by_group else None
        if not isinstance(group, Group):
            return
        speaker = member_on(group, connection_id)
        if speaker is not None:
            self._forget(self._owners.get((group_id, speaker)))
            return
        for owner in tuple(self._by_group[group_id]):
            if (owner.client_id, owner.client_host) == (client_id, client_host):
                self._forget(owner)

    def fetched(self, partitions: Iterable[tuple[UUID, int]]) -> None:
        for partition in partitions:
            for owner in tuple(self._by_partition.get(partition, ())):
                self._forget(owner)

    def _watch(self, group_id: str, member_id: MemberId) -> None:
        self._forget(self._owners.get((group_id, member_id)))
        group = self._groups.settled(group_id)
        if not isinstance(group, Group) or group.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return
        member = group.members.get(member_id)
        if member is None or not is_cooperative(group.protocol_name) or len(self._owners) >= MAX_OWNERS:
            return
        claimed = frozenset[tuple[str, int]]()
        with suppress(ProtocolError):
            claimed = claim_of(member, group.protocol_name).partitions
        gained = sorted(partitions_or_none(member.assignment) - claimed)
        keys: list[tuple[UUID, int]] = []
        for name, index in gained[:MAX_PARTITIONS]:
            topic = self._catalog.get(name)
            if topic is None or index >= len(topic.partitions) or not self._leads(topic.partitions[index]):
                return
            keys.append((topic.topic_id, index))
        if not keys:
            return
        owner = _Owner(
            group_id,
            member_id,
            group.generation_id,
            member.client_id,
            member.client_host,
            tuple(gained[:MAX_NAMED]),
            len(gained),
            tuple(keys),
        )
        self._owners[group_id, member_id] = owner
        self._by_group.setdefault(group_id, set()).add(owner)
        for key in keys:
            self._by_partition.setdefault(key, set()).add(owner)
        self._loop.call_later(self._patience_s, self._look, owner, context=NO_REQUEST.copy())

    def _look(self, owner: _Owner) -> None:
        if self._owners.get((owner.group_id, owner.member_id)) is not owner:
            return
        self._forget(owner)
        group = self._groups.settled(owner.group_id)
        if not isinstance(group, Group) or group.generation_id != owner.generation_id:
            return
        if owner.member_id in group.members:
            fact = ProtocolViolated(
                Violation.NOTHING_READ,
                group.generation_id,
                (owner.member_id,),
                1,
                owner.partitions,
                owner.partition_count,
            )
            self._groups.noticed(owner.group_id, fact)

    def _forget(self, owner: _Owner | None) -> None:
        if owner is None:
            return
        self._owners.pop((owner.group_id, owner.member_id), None)
        _discard(self._by_group, owner.group_id, owner)
        for key in owner.keys:
            _discard(self._by_partition, key, owner)


def _discard(index: dict[Key, set[_Owner]], key: Key, owner: _Owner) -> None:
    owners = index.get(key)
    if owners is not None:
        owners.discard(owner)
        if not owners:
            del index[key]
