"""Instances of Kafka Streams in frames."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from gateway.coordinator.streams.topology import StatusCode
from protocol.errors import ErrorCode
from protocol.messages.streams_group_heartbeat import (
    CopartitionGroup,
    KeyValue,
    StreamsGroupHeartbeatRequest,
    StreamsGroupHeartbeatResponse,
    Subtopology,
    TaskIds,
    TopicInfo,
    Topology,
)
from tests.frames.handoff import configure
from tests.frames.members import fresh
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

NONE = ErrorCode.NONE


def reading(topic: str) -> Topology:
    """Return a topology that has one subtopology and no state."""
    return Topology(epoch=0, subtopologies=(Subtopology(subtopology_id="0", source_topics=(topic,)),))


def counting(topic: str, group_id: str) -> Topology:
    """Return a topology of two subtopologies, with a repartition topic between them and a changelog topic."""
    repartition, changelog = f"{group_id}-words-repartition", f"{group_id}-counts-changelog"
    compacted = (KeyValue(key="cleanup.policy", value="compact"),)
    return Topology(
        epoch=0,
        subtopologies=(
            Subtopology(
                subtopology_id="0",
                source_topics=(topic,),
                repartition_sink_topics=(repartition,),
            ),
            Subtopology(
                subtopology_id="1",
                repartition_source_topics=(TopicInfo(name=repartition),),
                state_changelog_topics=(TopicInfo(name=changelog, topic_configs=compacted),),
                copartition_groups=(CopartitionGroup(repartition_source_topics=(0,)),),
            ),
        ),
    )


class Instance:
    """A member that follows its assignment: it owns its tasks from the moment at which it receives them."""

    def __init__(self, client: WireClient, group_id: str, topology: Topology, name: str) -> None:
        self.client = client
        self.group_id = group_id
        self.topology = topology
        self.member_id = name
        self.epoch = 0
        self.active: frozenset[tuple[str, int]] = frozenset()
        self.statuses: dict[StatusCode, str] = {}

    async def join(self, **more: Any) -> StreamsGroupHeartbeatResponse:
        self.epoch, self.active = 0, frozenset()
        given = {
            "rebalance_timeout_ms": 5_000,
            "topology": self.topology,
            "active_tasks": (),
            "standby_tasks": (),
            "warmup_tasks": (),
            "process_id": f"process-{self.member_id}",
            "client_tags": (),
        }
        return await self.beat(**{**given, **more})

    async def beat(self, *, code: ErrorCode = NONE, **more: Any) -> StreamsGroupHeartbeatResponse:
        request = StreamsGroupHeartbeatRequest(
            group_id=self.group_id, member_id=self.member_id, member_epoch=self.epoch, **more
        )
        response: StreamsGroupHeartbeatResponse = await self.client.send(request, 0)
        assert response.error_code == code, response.error_message
        if code is not NONE:
            return response
        self.epoch = response.member_epoch
        self.statuses = {StatusCode(each.status_code): each.status_detail for each in response.status or ()}
        if response.active_tasks is not None:
            self.active = tasks(response.active_tasks)
        return response

    async def report(self) -> StreamsGroupHeartbeatResponse:
        """Report the owned tasks, as clients do after they have taken or released tasks."""
        return await self.beat(active_tasks=ids(self.active), standby_tasks=(), warmup_tasks=())

    async def leave(self) -> None:
        self.epoch = -1
        await self.beat()


def tasks(given: tuple[TaskIds, ...]) -> frozenset[tuple[str, int]]:
    return frozenset((each.subtopology_id, index) for each in given for index in each.partitions)


def ids(owned: frozenset[tuple[str, int]]) -> tuple[TaskIds, ...]:
    names = sorted({name for name, _ in owned})
    return tuple(
        TaskIds(subtopology_id=name, partitions=tuple(sorted(index for each, index in owned if each == name)))
        for name in names
    )


@asynccontextmanager
async def client_of(gateway: GatewayProcess) -> AsyncGenerator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as client:
        yield client


async def at_once(client: WireClient) -> str:
    """Create a streams group that assigns tasks at once, without waiting for more members."""
    group_id = fresh("group")
    assert await configure(client, group_id, streams_initial_rebalance_delay_ms="0") == [NONE]
    return group_id
