"""A consumer group for example tests. A letter names a member, and a word names a topic. Time stands still unless a
test advances it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.machine import step
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerGroupHeartbeatReply
from gateway.coordinator.consumer.partitions import Partitions, partitions_of
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClusterChanged, ConnectionId, RequestId, Tick
from gateway.coordinator.requests import OffsetCommit, OffsetCommitReply, TxnOffsetCommit
from gateway.coordinator.settings import ConsumerSettings
from protocol.errors import ErrorCode

Named = dict[str, set[int]]


TOPIC_NAMES: dict[UUID, str] = {}


def topic_id(name: str) -> UUID:
    """Return an id for the name. Ids sort like the names in the tests: by their first letters."""
    found = UUID(bytes=name.encode()[:16].ljust(16, b"\0"))
    TOPIC_NAMES[found] = name
    return found


def partitions(named: Named) -> Partitions:
    return partitions_of((topic_id(name), indexes) for name, indexes in named.items())


def named(held: Partitions) -> Named:
    return {TOPIC_NAMES[topic]: set(indexes) for topic, indexes in held.items()}


class Scene:
    def __init__(self, topics: dict[str, int] | None = None, settings: ConsumerSettings | None = None) -> None:
        self.group = ConsumerGroup("g")
        self.settings = settings or ConsumerSettings()
        self.now_ms = 0
        self.facts: list[str] = []
        self.cluster = Cluster()
        self.set_topics({"t": 4} if topics is None else topics)

    def set_topics(self, topics: dict[str, int]) -> None:
        found = {name: ClusterTopic(topic_id(name), name, count) for name, count in topics.items()}
        by_id = {topic.topic_id: topic for topic in found.values()}
        self.cluster = Cluster(found, by_id, self.cluster.revision + 1, self.cluster.describing)

    def play(self, event: Any) -> Any:
        taken = step(self.group, event, self.cluster, self.now_ms, self.settings)
        self.group = taken.group
        self.facts = [str(fact) for fact in taken.facts]
        return taken.replies[0][1] if taken.replies else None

    def tick(self, after_ms: int) -> None:
        self.now_ms += after_ms
        self.play(Tick())

    def topics_changed(self, topics: dict[str, int]) -> None:
        self.set_topics(topics)
        self.play(ClusterChanged())

    def commit(self, member: str, epoch: int, held: Named | None = None, *, version: int = 9) -> OffsetCommitReply:
        pairs = tuple((topic_id(name), index) for name, indexes in (held or {}).items() for index in sorted(indexes))
        reply: OffsetCommitReply = self.play(
            OffsetCommit(RequestId(1), ConnectionId("c"), version, MemberId(member), None, epoch, pairs)
        )
        return reply

    def txn_commit(self, member: str, epoch: int, held: Named) -> OffsetCommitReply:
        pairs = tuple((topic_id(name), index) for name, indexes in held.items() for index in sorted(indexes))
        reply: OffsetCommitReply = self.play(
            TxnOffsetCommit(RequestId(1), ConnectionId("c"), MemberId(member), None, epoch, pairs)
        )
        return reply

    def heartbeat(
        self, member: str, epoch: int, owned: Named | None = None, **more: Any
    ) -> ConsumerGroupHeartbeatReply:
        event = ConsumerGroupHeartbeat(
            request_id=RequestId(1),
            connection_id=ConnectionId("c"),
            connection_number=1,
            version=1,
            client_id="client",
            client_host="/127.0.0.1",
            new_member_id=MemberId("made"),
            member_id=MemberId(member),
            member_epoch=epoch,
            owned=None if owned is None else partitions(owned),
        )
        return self.play(replace(event, **more))

    def join(self, member: str, *topics: str, **more: Any) -> ConsumerGroupHeartbeatReply:
        given: dict[str, Any] = {"subscribed_topic_names": topics or ("t",), "rebalance_timeout_ms": 60_000}
        return self.heartbeat(member, 0, {}, **(given | more))

    def told(self, reply: ConsumerGroupHeartbeatReply) -> tuple[int, Named | None]:
        """Return the epoch and the assignment of an answer that has no error."""
        assert reply.error is ErrorCode.NONE, reply
        return reply.member_epoch, None if reply.assignment is None else named(reply.assignment)

    def beat(self, member: str, epoch: int, owned: Named | None = None, **more: Any) -> tuple[int, Named | None]:
        return self.told(self.heartbeat(member, epoch, owned, **more))

    def refused(self, reply: ConsumerGroupHeartbeatReply) -> ErrorCode:
        assert reply.error is not ErrorCode.NONE
        assert (reply.member_id, reply.member_epoch, reply.assignment) == (None, 0, None)
        return reply.error
