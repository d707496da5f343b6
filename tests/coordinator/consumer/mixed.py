"""A group whose members speak both protocols. Every step runs in both machines, as in the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerGroupHeartbeatReply
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Machines, RequestId, Step, Tick
from gateway.coordinator.requests import (
    Heartbeat,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeavingMember,
    OffsetCommit,
    OffsetCommitReply,
    Protocols,
    SyncGroup,
    SyncReply,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import MigrationPolicy, Settings
from protocol.consumer import (
    Assignment,
    Subscription,
    TopicPartition,
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from protocol.errors import ErrorCode

from .scene import Named, named, partitions, topic_id

MACHINES = Machines(CLASSIC, CONSUMER)
NONE = ErrorCode.NONE
SESSION_MS = 10_000
REBALANCE_MS = 60_000


def offer(
    *protocols: str,
    topics: tuple[str, ...] = ("t",),
    owned: Named | None = None,
    generation: int = -1,
    version: int = 3,
    rack: str | None = None,
) -> Protocols:
    claimed = tuple(TopicPartition(topic, tuple(sorted(indexes))) for topic, indexes in (owned or {}).items())
    metadata = encode_subscription(Subscription(version, topics, None, claimed, generation, rack))
    return tuple((protocol, metadata) for protocol in protocols or ("range",))


def assigned(given: Named) -> bytes:
    topics = tuple(TopicPartition(topic, tuple(sorted(indexes))) for topic, indexes in given.items())
    return encode_assignment(Assignment(3, topics))


def read(assignment: bytes) -> Named:
    return {topic: set(indexes) for topic, indexes in decode_assignment(assignment).assigned_partitions}


class Mixed:
    def __init__(
        self,
        topics: dict[str, int] | None = None,
        *,
        policy: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL,
        consumer: Mapping[str, Any] = {},
        **settings: Any,
    ) -> None:
        base = Settings(group_initial_rebalance_delay_ms=0, **settings)
        self.settings = replace(base, consumer=replace(base.consumer, migration_policy=policy, **consumer))
        self.group: Any = MACHINES.missing("g")
        self.now_ms = 1_000_000
        self.last = Step(self.group)
        self.answers: dict[int, Any] = {}
        self._requests = 0
        found = {name: ClusterTopic(topic_id(name), name, count) for name, count in (topics or {"t": 4}).items()}
        self.cluster = Cluster(found, {topic.topic_id: topic for topic in found.values()}, 1)

    @property
    def facts(self) -> list[str]:
        return [str(fact) for fact in self.last.facts]

    @property
    def is_consumer(self) -> bool:
        return isinstance(self.group, ConsumerGroup)

    def play(self, event: Any) -> Any:
        """Process the event. Return the answer, or None if the answer is still pending (`answers`
        receives it later).
        """
        self.last = MACHINES.step(self.group, event, self.cluster, self.now_ms, self.settings)
        self.group = self.last.group
        self.answers.update(self.last.replies)
        return self.answers.get(getattr(event, "request_id", -1))

    def restart(self) -> None:
        """Let another node read the stored group and continue it."""
        machine = MACHINES.of(self.group)
        members = {
            member_id: machine.stored_member(self.group, member_id) for member_id in machine.member_ids(self.group)
        }
        documents = {member_id: member.document for member_id, member in members.items() if member is not None}
        stored = machine.stored(self.group)
        self.group = machine.restore("g", stored, documents, None, self.now_ms, self.settings)

    def tick(self, after_ms: int) -> None:
        self.now_ms += after_ms
        self.play(Tick())

    def _ask(self, kind: type, *fields: Any, connection: str = "c") -> Any:
        self._requests += 1
        return self.play(kind(RequestId(self._requests), ConnectionId(connection), *fields))

    # --- the consumer protocol ---------------------------------------------------------------------------------------

    def beat(self, member: str, epoch: int, owned: Named | None = None, **more: Any) -> ConsumerGroupHeartbeatReply:
        self._requests += 1
        event = ConsumerGroupHeartbeat(
            request_id=RequestId(self._requests),
            connection_id=ConnectionId("c"),
            connection_number=1,
            version=1,
            client_id="client",
            client_host="/127.0.0.1",
            new_member_id=MemberId(f"made-{self._requests}"),
            member_id=MemberId(member),
            member_epoch=epoch,
            owned=None if owned is None else partitions(owned),
        )
        return self.play(replace(event, **more))

    def enter(self, member: str, *topics: str, **more: Any) -> ConsumerGroupHeartbeatReply:
        given: dict[str, Any] = {"subscribed_topic_names": topics or ("t",), "rebalance_timeout_ms": REBALANCE_MS}
        return self.beat(member, 0, {}, **(given | more))

    def told(self, reply: ConsumerGroupHeartbeatReply) -> tuple[int, Named | None]:
        assert reply.error is NONE, reply
        return reply.member_epoch, None if reply.assignment is None else named(reply.assignment)

    # --- the classic protocol ----------------------------------------------------------------------------------------

    def join(
        self,
        member: str,
        offered: Protocols | None = None,
        *,
        instance: str | None = None,
        version: int = 3,
        protocol_type: str = "consumer",
        session_ms: int = SESSION_MS,
        connection_number: int = 1,
        new_id: str | None = None,
    ) -> JoinReply | None:
        self._requests += 1
        event = JoinGroup(
            RequestId(self._requests),
            ConnectionId(f"c-{member or new_id}-{connection_number}"),
            version,
            "client",
            "/127.0.0.1",
            MemberId(member),
            instance,
            protocol_type,
            offer() if offered is None else offered,
            session_ms,
            REBALANCE_MS,
            MemberId(new_id or f"new-{self._requests}"),
            None,
            connection_number,
        )
        return self.play(event)

    def sync(
        self,
        member: str,
        generation: int,
        assignments: Mapping[str, Named] | None = None,
        *,
        instance: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> SyncReply | None:
        given = tuple((MemberId(each), assigned(share)) for each, share in (assignments or {}).items())
        return self._ask(SyncGroup, MemberId(member), instance, generation, protocol_type, protocol_name, given)

    def share(self, member: str, generation: int, **more: Any) -> Named:
        reply = self.sync(member, generation, **more)
        assert reply is not None
        assert reply.error is NONE, reply
        return read(reply.assignment)

    def alive(self, member: str, generation: int, *, instance: str | None = None) -> ErrorCode:
        return self._ask(Heartbeat, MemberId(member), instance, generation).error

    def commit(
        self,
        member: str,
        generation: int,
        offsets: Named | None = None,
        *,
        version: int = 8,
        instance: str | None = None,
    ) -> OffsetCommitReply:
        pairs = tuple((topic_id(name), index) for name, indexes in (offsets or {}).items() for index in sorted(indexes))
        return self._ask(OffsetCommit, version, MemberId(member), instance, generation, pairs)

    def txn_commit(self, member: str, generation: int, *, instance: str | None = None) -> OffsetCommitReply:
        return self._ask(TxnOffsetCommit, MemberId(member), instance, generation)

    def leave(self, *members: tuple[str, str | None] | str) -> list[ErrorCode]:
        leaving = tuple(
            LeavingMember(MemberId(each), None) if isinstance(each, str) else LeavingMember(MemberId(each[0]), each[1])
            for each in members
        )
        return [each.error for each in self._ask(LeaveGroup, leaving).members]

    def classic_group(self, shares: Mapping[str, Named], *protocols: str, instances: Mapping[str, str] = {}) -> int:
        """Build a Stable classic group of these members. Return its generation."""
        there: list[str] = []
        for member in shares:
            self.join("", offer(*protocols), new_id=member, instance=instances.get(member))
            for other in there:
                self.join(other, offer(*protocols), instance=instances.get(other))
            there.append(member)
        for member in (*(each for each in shares if each != self.group.leader_id), self.group.leader_id):
            self.sync(member, self.group.generation_id, shares)
        assert self.group.state.value == "Stable"
        return self.group.generation_id
