"""Measure consumer groups (KIP-848) at frame level: a thousand members that join at once, and ten thousand at rest.

Members do exactly what stock clients do: they join, take their assignment, acknowledge it, and send the next heartbeat
after the interval that the answer named. Several members share a connection, so that the client costs little of the
cores it shares with the gateway.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from uuid import UUID

from bench.frames import Connection
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.assignors import Subscriber, uniform
from gateway.coordinator.consumer.spread import respread, spread_of
from gateway.coordinator.facts import MemberId
from protocol.api_keys import ApiKey
from protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

VERSION = 1
MEMBERS_PER_CONNECTION = 20
Owned = dict[UUID, frozenset[int]]


@dataclass(slots=True)
class Member:
    group_id: str
    member_id: str
    topic: str
    epoch: int = 0
    owned: Owned = field(default_factory=dict[UUID, frozenset[int]])
    interval_s: float = 0.0
    asked: list[float] = field(default_factory=list[float])
    """How long each answer took, in seconds."""

    async def ask(self, connection: Connection, **said: object) -> ConsumerGroupHeartbeatResponse:
        request = ConsumerGroupHeartbeatRequest(
            group_id=self.group_id,
            member_id=self.member_id,
            member_epoch=self.epoch,
            **said,  # type: ignore[arg-type]
        )
        began = time.perf_counter()
        answer = await connection.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, VERSION, request, ConsumerGroupHeartbeatResponse)
        self.asked.append(time.perf_counter() - began)
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        assert answer.error_code == 0, answer
        self.epoch = answer.member_epoch
        self.interval_s = answer.heartbeat_interval_ms / 1000
        return answer

    async def join(self, connection: Connection) -> None:
        await self._go(
            connection,
            await self.ask(
                connection, rebalance_timeout_ms=60_000, subscribed_topic_names=(self.topic,), topic_partitions=()
            ),
        )

    async def beat(self, connection: Connection) -> None:
        await self._go(connection, await self.ask(connection))

    async def _go(self, connection: Connection, answer: ConsumerGroupHeartbeatResponse) -> None:
        """Release revoked partitions, take over new ones, and report both in the next heartbeat."""
        while answer.assignment is not None:
            given = {each.topic_id: frozenset(each.partitions) for each in answer.assignment.topic_partitions}
            if given == self.owned:
                return
            self.owned = given
            held = tuple(
                TopicPartitions(topic_id=topic_id, partitions=tuple(indexes)) for topic_id, indexes in given.items()
            )
            answer = await self.ask(connection, topic_partitions=held)


@dataclass(frozen=True, slots=True)
class Wave:
    seconds: float
    p99_ms: float
    """p99 of heartbeats once the groups are stable."""


async def wave(host: str, port: int, topic: str, *, members: int, partitions: int) -> Wave:
    """Seconds from the first join until every partition has an owner and all members have the same epoch."""
    name = f"bench-wave-{time.time_ns()}"
    group = [Member(name, f"m{number:05}", topic) for number in range(members)]
    lines = await _lines(host, port, group)
    began = time.perf_counter()
    await asyncio.gather(*(_join_all(connection, line) for connection, line in lines))
    while not _converged(group, partitions):
        await asyncio.gather(*(_beat_all(connection, line) for connection, line in lines))
    seconds = time.perf_counter() - began
    for member in group:
        member.asked.clear()
    for _ in range(3):
        for at in range(MEMBERS_PER_CONNECTION):
            # Send several heartbeats concurrently: as many as would arrive within ten milliseconds if each member sent
            # one every five seconds.
            for first in range(0, len(lines), 2):
                await asyncio.gather(
                    *(line[at].beat(connection) for connection, line in lines[first : first + 2] if at < len(line))
                )
    took = sorted(each for member in group for each in member.asked)
    for connection, _ in lines:
        connection.writer.close()
    return Wave(seconds, took[int(len(took) * 0.99)] * 1000)


@dataclass(slots=True)
class Crowd:
    """Members of many groups that have joined and continue to send heartbeats."""

    lines: list[tuple[Connection, list[Member]]]

    async def live(self, *, interval_s: float, seconds: float) -> int:
        """Send a heartbeat of every member once per `interval_s`, evenly spread over time. Return the number of
        heartbeats.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds

        async def keep(at: int, connection: Connection, line: list[Member]) -> int:
            count = 0
            step_s = interval_s / len(line)
            due = loop.time() + step_s * at / len(self.lines)
            while due < until:
                await asyncio.sleep(due - loop.time())
                await line[count % len(line)].beat(connection)
                count += 1
                due += step_s
            return count

        return sum(
            await asyncio.gather(*(keep(at, connection, line) for at, (connection, line) in enumerate(self.lines)))
        )

    def close(self) -> None:
        for connection, _ in self.lines:
            connection.writer.close()


async def enter(host: str, port: int, topics: list[str], *, members: int) -> Crowd:
    """Let `members` join as many groups as there are topics, and wait until all groups are stable."""
    began = time.time_ns()
    groups = [
        [Member(f"bench-live-{began}-{at}", f"m{number:05}", topic) for number in range(members // len(topics))]
        for at, topic in enumerate(topics)
    ]
    lines = [line for group in groups for line in await _lines(host, port, group)]
    await asyncio.gather(*(_join_all(connection, line) for connection, line in lines))
    while True:
        await asyncio.gather(*(_beat_all(connection, line) for connection, line in lines))
        if len({(member.group_id, member.epoch) for _, line in lines for member in line}) == len(topics):
            return Crowd(lines)


async def _lines(host: str, port: int, group: list[Member]) -> list[tuple[Connection, list[Member]]]:
    return [
        (await Connection.open(host, port), group[first : first + MEMBERS_PER_CONNECTION])
        for first in range(0, len(group), MEMBERS_PER_CONNECTION)
    ]


async def _join_all(connection: Connection, line: list[Member]) -> None:
    for member in line:
        await member.join(connection)


async def _beat_all(connection: Connection, line: list[Member]) -> None:
    for member in line:
        await member.beat(connection)


def _converged(group: list[Member], partitions: int) -> bool:
    owned = sum(len(indexes) for member in group for indexes in member.owned.values())
    return owned == partitions and len({member.epoch for member in group}) == 1


# --- the target alone -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    whole_ms: float
    """Milliseconds to compute the assignment of all members from an empty one."""
    one_more_ms: float
    """Milliseconds to compute the assignment when one more member joins."""


def target(*, members: int, partitions: int) -> Target:
    topic = ClusterTopic(UUID(int=1), "t", partitions)
    cluster = Cluster({topic.name: topic}, {topic.topic_id: topic}, 1)
    topic_ids = frozenset(cluster.by_id)
    counts = {topic.topic_id: topic.partition_count}
    names = [MemberId(f"m{number:05}") for number in range(members)]
    began = time.perf_counter()
    shares = uniform({name: Subscriber(topic_ids) for name in names[1:]}, counts)
    whole_ms = (time.perf_counter() - began) * 1000
    spread = spread_of(shares, counts)
    began = time.perf_counter()
    respread(spread, shares, names)
    return Target(whole_ms, (time.perf_counter() - began) * 1000)
