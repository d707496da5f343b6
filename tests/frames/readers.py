"""Readers of a consumer group on a real gateway, frame by frame: heartbeats, fetches and commits as stock clients send
them, at the moment that a scenario names.

The one idea: they fetch as Java's consumer does, which asks for no more of a partition while it holds some: so what
its next fetch asks for is what its application has been given, and the gateway knows it. What is true of the group is
asked of the gateway (ConsumerGroupDescribe); nobody sleeps, and what is to stay as it is must do so for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar
from uuid import UUID

from gateway.coordinator.handoff import HandoffEnd
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest, DescribedGroup
from protocol.messages.consumer_group_describe import TopicPartitions as DescribedPartitions
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, TopicPartitions
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.fetch import FetchRequest, FetchTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.clients.workers import counted
from tests.frames.members import create_topic, fresh
from tests.frames.test_handoff import configure
from tests.gateway.data_plane import at, batch_of, offsets_in, produce_request
from tests.gateway_process import GatewayProcess
from tests.readers import Partition, Readers
from tests.wire import WireClient

T = TypeVar("T")
SETTINGS = {
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "50",
}
MORTAL_MS = 2_000
LONGEST_S = 30
MOMENT_S = 0.2
"""How long nothing may happen. A gateway that gives away what somebody waits for does it within some milliseconds."""
POLL_S = 0.005
JAVA = "apache-kafka-java"


class WireReaders(Readers):
    def __init__(
        self,
        gateway: GatewayProcess,
        partitions: int,
        *,
        topics: tuple[str, ...] = ("t",),
        timeout_ms: int = 30_000,
        mortal: bool = False,
    ) -> None:
        super().__init__(partitions, topics)
        self._gateway = gateway
        self._runner = asyncio.Runner()
        self._group_id = fresh("readers")
        self._names = {topic: fresh(topic) for topic in topics}
        self._topic_ids: dict[str, UUID] = {}
        self._clients: dict[str, WireClient] = {}
        self._held: dict[tuple[str, Partition], list[int]] = {}
        """Offsets that were fetched and that the application has not been given."""
        self._seen = DescribedGroup()
        """As it was last described."""
        self._ended_before = counted(gateway, "group_handoffs_total")
        self._admin = self._run(self._open(timeout_ms, mortal=mortal))

    async def _open(self, timeout_ms: int, *, mortal: bool) -> WireClient:
        admin = await WireClient.connect(self._gateway.bootstrap, client_id="admin")
        for topic, count in self.partition_counts.items():
            self._topic_ids[topic] = await create_topic(admin, self._names[topic], count)
        configs = {"group_handoff_mode": "drain", "group_handoff_timeout_ms": str(timeout_ms)}
        if mortal:
            configs |= {"consumer_session_timeout_ms": str(MORTAL_MS), "consumer_heartbeat_interval_ms": "100"}
        assert await configure(admin, self._group_id, **configs) == [ErrorCode.NONE]
        return admin

    def close(self) -> None:
        try:
            self.leave(*self.readers)
            self._run(self._admin.close())
        finally:
            # Also of a scenario that failed: tasks that nobody ends trouble whoever reports it.
            self._runner.close()

    def _run(self, awaited: Awaitable[T]) -> T:
        return self._runner.run(asyncio.wait_for(awaited, LONGEST_S))

    @property
    def now_ms(self) -> float:
        return self._runner.get_loop().time() * 1_000

    @property
    def ended(self) -> set[HandoffEnd]:
        now = counted(self._gateway, "group_handoffs_total")
        return {HandoffEnd(reason) for reason, count in now.items() if count > self._ended_before.get(reason, 0)}

    # --- what readers do ----------------------------------------------------------------------------------------------

    def come(self, *names: str) -> None:
        self._run(_all(self._come(name) for name in names))

    async def _come(self, name: str) -> None:
        await self._disconnect(name)
        self.begin(name)
        client = self._clients[name] = await WireClient.connect(
            self._gateway.bootstrap, client_id=f"{self._group_id}-{name}"
        )
        await client.send(ApiVersionsRequest(client_software_name=JAVA, client_software_version="4.0.0"), 3)
        await self._heartbeat(name, 0, set())

    def beat(self, *names: str) -> None:
        self._run(self._beat(*names))

    async def _beat(self, *names: str) -> None:
        await _all(
            self._heartbeat(name, self.readers[name].epoch, says)
            for name, says in [(name, self.about_to_beat(name)) for name in names]
        )

    async def _heartbeat(self, name: str, epoch: int, says: set[Partition] | None) -> None:
        joins = epoch == 0
        response = await self._clients[name].send(
            ConsumerGroupHeartbeatRequest(
                group_id=self._group_id,
                member_id=name,
                member_epoch=epoch,
                rebalance_timeout_ms=60_000 if joins else -1,
                subscribed_topic_names=tuple(map(self._names.__getitem__, self.topics)) if joins else None,
                topic_partitions=None
                if says is None
                else tuple(
                    TopicPartitions(topic_id=self._topic_ids[topic], partitions=indexes)
                    for topic, indexes in _by_topic(says).items()
                ),
            ),
            1,
        )
        assert response.error_code == ErrorCode.NONE, response
        told = None if response.assignment is None else self._read(response.assignment.topic_partitions)
        gained = self.answered(name, response.member_epoch, told)
        if gained:
            self.readers[name].positions.update(await self._committed(name, gained))
            await self._fetch(name, *gained)

    def _read(self, assigned: Iterable[TopicPartitions | DescribedPartitions]) -> set[Partition]:
        topics = {topic_id: topic for topic, topic_id in self._topic_ids.items()}
        return {(topics[each.topic_id], index) for each in assigned for index in each.partitions}

    async def _committed(self, name: str, partitions: set[Partition]) -> Mapping[Partition, int]:
        """Where to begin."""
        asked = OffsetFetchRequestGroup(
            group_id=self._group_id,
            member_id=name,
            member_epoch=self.readers[name].epoch,
            topics=tuple(
                OffsetFetchRequestTopics(name=self._names[topic], partition_indexes=indexes)
                for topic, indexes in _by_topic(partitions).items()
            ),
        )
        response = await self._clients[name].send(OffsetFetchRequest(groups=(asked,), require_stable=True), 9)
        (group,) = response.groups
        assert group.error_code == ErrorCode.NONE, response
        topics = {called: topic for topic, called in self._names.items()}
        found: dict[Partition, int] = {}
        for each in group.topics:
            for part in each.partitions:
                assert part.error_code == ErrorCode.NONE, response
                found[topics[each.name], part.partition_index] = max(part.committed_offset, 0)
        return found

    async def _fetch(self, name: str, *partitions: Partition) -> None:
        """The next batch of each, of which each record is one."""
        reader, client = self.readers[name], self._clients[name]
        answers = [
            client.send_nowait(
                FetchRequest(
                    max_wait_ms=0,
                    min_bytes=0,
                    topics=(
                        FetchTopic(
                            topic=self._names[topic],
                            partitions=(at(reader.positions[topic, index], index, max_bytes=1),),
                        ),
                    ),
                ),
                12,
            )
            for topic, index in partitions
        ]
        for partition, answer in zip(partitions, answers, strict=True):
            part = (await answer).responses[0].partitions[0]
            assert part.error_code == ErrorCode.NONE, part
            self._held[name, partition] = offsets_in(part)

    def poll(self, *names: str, at_most: int | None = None) -> set[Partition]:
        return set[Partition]().union(*self._run(_all(self._poll(name, at_most) for name in names)))

    async def _poll(self, name: str, at_most: int | None) -> set[Partition]:
        reader = self.readers[name]
        left = dict.fromkeys(sorted(reader.owned & reader.told), at_most)
        await self._fetch(name, *(each for each in left if not self._held.get((name, each))))
        found: set[Partition] = set()
        while left:
            for partition, count in list(left.items()):
                held = self._held.pop((name, partition))
                if not held or count == 0:
                    self._held[name, partition] = held
                    del left[partition]
                    continue
                for offset in held:
                    self.deliver(name, partition, offset)
                found.add(partition)
                left[partition] = None if count is None else count - 1
            await self._fetch(name, *left)
        return found

    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        self._run(_all(self._commit(name, only) for name in names))

    async def _commit(self, name: str, only: Iterable[Partition] | None = None) -> None:
        offsets = self.to_commit(name, only)
        if not offsets:
            return
        request = OffsetCommitRequest(
            group_id=self._group_id,
            generation_id_or_member_epoch=self.readers[name].epoch,
            member_id=name,
            topics=tuple(
                OffsetCommitRequestTopic(
                    name=self._names[topic],
                    partitions=tuple(
                        OffsetCommitRequestPartition(
                            partition_index=index, committed_offset=offsets[topic, index], committed_metadata=""
                        )
                        for index in indexes
                    ),
                )
                for topic, indexes in _by_topic(offsets).items()
            ),
        )
        response = await self._clients[name].send(request, 9)
        codes = {part.error_code for topic in response.topics for part in topic.partitions}
        assert codes == {ErrorCode.NONE}, response

    def leave(self, *names: str) -> None:
        self._run(_all(self._leave(name) for name in names))

    async def _leave(self, name: str) -> None:
        client = self._clients[name]
        self.end(name)
        request = ConsumerGroupHeartbeatRequest(group_id=self._group_id, member_id=name, member_epoch=-1)
        response = await client.send(request, 1)
        assert response.error_code == ErrorCode.NONE, response
        await self._disconnect(name)

    async def _disconnect(self, name: str) -> None:
        self._held = {key: offsets for key, offsets in self._held.items() if key[0] != name}
        client = self._clients.pop(name, None)
        if client is not None:
            await client.abort()

    def die(self, *names: str) -> None:
        for name in names:
            self.end(name)
        self._run(self._die(*names))

    async def _die(self, *names: str) -> None:
        await _all(self._disconnect(name) for name in names)
        while {each.member_id for each in (await self._describe()).members} != set(self.readers):
            await self._beat(*self.readers)
            await asyncio.sleep(POLL_S)

    # --- what happens -------------------------------------------------------------------------------------------------

    def produce(self, records: int = 1, *, only: Iterable[Partition] | None = None) -> None:
        partitions = sorted(self.partitions() if only is None else only)
        for _ in range(records):
            batches = [(self._names[topic], index, batch_of(b"x")) for topic, index in partitions]
            response = self._run(self._admin.send(produce_request(batches), 9))
            codes = {part.error_code for topic in response.responses for part in topic.partition_responses}
            assert codes == {ErrorCode.NONE}, response
        for partition in partitions:
            self.ends[partition] = self.ends.get(partition, 0) + records

    def grow(self, **topics: int) -> None:
        gone = self.partition_counts.keys() - topics.keys()
        grown = {topic: count for topic, count in topics.items() if count > self.partition_counts[topic]}
        self.partition_counts = topics
        if gone:
            names = tuple(DeleteTopicState(name=self._names[topic]) for topic in gone)
            deleted = self._run(self._admin.send(DeleteTopicsRequest(topics=names, timeout_ms=10_000), 6))
            assert {each.error_code for each in deleted.responses} == {ErrorCode.NONE}, deleted
        if grown:
            wanted = tuple(
                CreatePartitionsTopic(name=self._names[topic], count=count, assignments=None)
                for topic, count in grown.items()
            )
            request = CreatePartitionsRequest(topics=wanted, timeout_ms=10_000, validate_only=False)
            created = self._run(self._admin.send(request, 3))
            assert {each.error_code for each in created.results} == {ErrorCode.NONE}, created

    def settle(self, *, waiting: int = 0, work: bool = False) -> None:
        self._settled(waiting, work=work)

    def rest(self) -> None:
        self._settled(None)

    def outlast(self) -> None:
        self._settled(0)

    def _settled(self, waiting: int | None, *, work: bool = False) -> None:
        """`waiting` None: as many as there are."""
        try:
            self._run(self._settle(waiting, work=work))
        except TimeoutError:
            raise AssertionError(f"{waiting} are to wait, and not: {self._seen}, {self.readers}") from None

    async def _settle(self, waiting: int | None, *, work: bool) -> None:
        clock = asyncio.get_running_loop().time
        stood_still_s, before = clock(), object()
        while True:
            if work:
                await _all(self._poll(name, None) for name in self.readers)
                await _all(self._commit(name) for name in self.readers)
            await self._beat(*self.readers)
            awaited = self._awaited(await self._describe())
            now = [(name, each.epoch, sorted(each.owned)) for name, each in self.readers.items()]
            if awaited is None or now != before or awaited != (awaited if waiting is None else waiting):
                stood_still_s = clock()
            elif awaited:
                if clock() - stood_still_s >= MOMENT_S:
                    return
            elif not work or not self._unread():
                return
            before = now
            await asyncio.sleep(POLL_S)

    def _awaited(self, group: DescribedGroup) -> int | None:
        """How many partitions are not yet with those who are to have them; None while the group does not say yet that
        it knows all that the readers know, or they what it does."""
        members = {each.member_id: each for each in group.members}
        if members.keys() != self.readers.keys() or group.assignment_epoch != group.group_epoch:
            return None
        targets: set[Partition] = set()
        awaited = 0
        for name, reader in self.readers.items():
            target = self._read(members[name].target_assignment.topic_partitions)
            assigned = self._read(members[name].assignment.topic_partitions)
            if not assigned == reader.owned == reader.told:
                return None
            targets |= target
            awaited += len(target - assigned)
        return awaited if targets == self.partitions() else None

    def _unread(self) -> bool:
        return any(
            each.positions[partition] < self.ends.get(partition, 0)
            for each in self.readers.values()
            for partition in each.owned
        )

    async def _describe(self) -> DescribedGroup:
        response = await self._admin.send(ConsumerGroupDescribeRequest(group_ids=(self._group_id,)), 1)
        (self._seen,) = response.groups
        return self._seen


async def _all(awaited: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*awaited)


def _by_topic(partitions: Iterable[Partition]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        found.setdefault(topic, []).append(index)
    return {topic: tuple(indexes) for topic, indexes in found.items()}
