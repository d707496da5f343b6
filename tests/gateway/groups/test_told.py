"""Listeners of group events, for any type of group. The stores are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from gateway.coordinator.consumer.model import ConsumerGroupHeartbeat
from gateway.coordinator.facts import Fact, MemberId, MemberJoined
from gateway.coordinator.machine import ClientRequest, ConnectionId, RequestId
from gateway.coordinator.settings import Settings
from gateway.coordinator.share.model import ShareGroupHeartbeat
from gateway.groups.groups import Groups
from gateway.groups.journal import Journal
from storage.types import CoordinatorLease, GroupChange, NodeId, Saved

MEMBER = MemberId("AAAAAAAAAAAAAAAAAAAAAQ")
SUBSCRIBED = ("t",)


class Stored:
    """A store without groups, which accepts every write."""

    async def load(self, group_ids: Sequence[str]) -> dict[str, Any]:
        return {}

    async def save(self, changes: Sequence[GroupChange], *, wait: bool = False) -> Sequence[Saved]:
        return [Saved.SAVED for _ in changes]


class AllLeases:
    def lease_for(self, group_id: str) -> CoordinatorLease:
        return CoordinatorLease(0, NodeId(1), 1)


class Written:
    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def happened(self, before: object, after: object, facts: tuple[Fact, ...]) -> None:
        self.facts += facts


@pytest.mark.parametrize(
    "joins",
    [
        ConsumerGroupHeartbeat(
            RequestId(1),
            ConnectionId("c"),
            1,
            1,
            "client",
            "/127.0.0.1",
            MEMBER,
            MEMBER,
            0,
            rebalance_timeout_ms=1_000,
            subscribed_topic_names=SUBSCRIBED,
            owned={},
        ),
        ShareGroupHeartbeat(RequestId(1), ConnectionId("c"), "client", "/127.0.0.1", MEMBER, 0, None, SUBSCRIBED),
    ],
    ids=["consumer", "share"],
)
async def test_journal_and_every_reader_of_facts_receive_a_join(joins: ClientRequest[Any]) -> None:
    journal, read = Written(), list[Fact]()
    stored = cast(Any, Stored())
    groups = Groups(stored, stored, cast(Any, AllLeases()), Settings(), journal=cast(Journal, journal))
    groups.readers.append(lambda group_id, facts: read.extend(facts))
    assert (await cast(Any, groups.submit("g", joins))).error == 0
    for told in (journal.facts, read):
        assert [fact.member_id for fact in told if isinstance(fact, MemberJoined)] == [MEMBER]
    await groups.drain()
