"""A streams group under test: one value, a clock, topics, and members whose reports the test chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid5

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Document, RequestId, Step, Tick, Value
from gateway.coordinator.settings import Settings, StreamsSettings
from gateway.coordinator.streams.machine import STREAMS
from gateway.coordinator.streams.model import StreamsGroup, StreamsGroupHeartbeat, StreamsGroupHeartbeatReply
from gateway.coordinator.streams.tasks import Tasks
from gateway.coordinator.streams.topology import Subtopology, Topology
from protocol.errors import ErrorCode

GROUP = "app"
NAMESPACE = UUID(int=7)
READING = Topology(0, (Subtopology("0", ("t",)),))


def cluster_of(topics: Mapping[str, int], revision: int = 1) -> Cluster:
    made = [ClusterTopic(uuid5(NAMESPACE, name), name, count) for name, count in topics.items()]
    return Cluster({each.name: each for each in made}, {each.topic_id: each for each in made}, revision)


class Scene:
    """A test scene of one streams group. With `at_once`, the first member does not wait for others."""

    def __init__(self, topics: Mapping[str, int] | None = None, **settings: Any) -> None:
        own = StreamsSettings(**{"initial_rebalance_delay_ms": 0, **settings})
        self.settings = Settings(streams=own)
        self.cluster = cluster_of({"t": 4} if topics is None else topics)
        self.group: StreamsGroup = STREAMS.missing(GROUP)
        self.now_ms = 0
        self.last: Step[Value] = Step(self.group)
        self.stored = STREAMS.stored(self.group)
        self.rows: dict[MemberId, Document] = {}
        """Rows that durable facts have written, as the runner writes them."""
        self._requests = 0

    def play(self, event: Any) -> Any:
        """Process an event and return the reply, or None if the event has no reply."""
        self.last = STREAMS.step(self.group, event, self.cluster, self.now_ms, self.settings)
        assert isinstance(self.last.group, StreamsGroup)
        self.group = self.last.group
        self._store()
        return self.last.replies[0][1] if self.last.replies else None

    def _store(self) -> None:
        """Store the rows of the members that the facts change. Check that a coordinator that reads these rows sees the
        same group.
        """
        if any(type(fact) in STREAMS.durable for fact in self.last.facts):
            self.stored = STREAMS.stored(self.group)
            for member_id in {each for fact in self.last.facts for each in fact.touches()}:
                row = STREAMS.stored_member(self.group, member_id)
                if row is None:
                    self.rows.pop(member_id, None)
                else:
                    self.rows[member_id] = row.document
        shown = {each: STREAMS.stored_member(self.group, each) for each in STREAMS.member_ids(self.group)}
        assert self.rows == {each: row.document for each, row in shown.items() if row is not None}
        # After a coordinator has read a group, it has heard from no member yet. It stores this fact with the next row.
        now = replace(STREAMS.stored(self.group), all_heard=self.stored.all_heard)
        assert self.stored == now

    def beat(self, member_id: str, epoch: int, **more: Any) -> StreamsGroupHeartbeatReply:
        self._requests += 1
        owned: Tasks | None = more.pop("owned", None)
        if owned is not None:
            more |= {"active": owned.active, "standby": owned.standby, "warmup": frozenset()}
        given = {"connection_number": 1, "client_id": "client", "client_host": "/host", **more}
        return self.play(
            StreamsGroupHeartbeat(
                request_id=RequestId(self._requests),
                connection_id=ConnectionId("c"),
                member_id=MemberId(member_id),
                member_epoch=epoch,
                **given,
            )
        )

    def join(self, member_id: str, topology: Topology = READING, **more: Any) -> StreamsGroupHeartbeatReply:
        given = {
            "topology": topology,
            "process_id": f"process of {member_id}",
            "rebalance_timeout_ms": 10_000,
            "owned": Tasks(),
            **more,
        }
        return self.beat(member_id, 0, **given)

    def pass_time(self, ms: int) -> None:
        """Advance the clock. Deadlines fire on the way, each at its time."""
        end_ms = self.now_ms + ms
        while True:
            deadline_ms = STREAMS.next_deadline(self.group)
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(deadline_ms, self.now_ms)
            self.play(Tick())
        self.now_ms = end_ms

    def topics(self, topics: Mapping[str, int]) -> None:
        """Change the cluster's topics without an event to the group."""
        self.cluster = cluster_of(topics, self.cluster.revision + 1)

    def restore(self, silent_ms: int | None = None) -> None:
        """Let another coordinator read the stored group."""
        self.group = STREAMS.restore(GROUP, self.stored, self.rows, silent_ms, self.now_ms, self.settings)

    def set(self, **settings: Any) -> None:
        self.settings = replace(self.settings, streams=replace(self.settings.streams, **settings))


def refused(reply: StreamsGroupHeartbeatReply) -> ErrorCode:
    assert reply.error is not ErrorCode.NONE
    return reply.error
