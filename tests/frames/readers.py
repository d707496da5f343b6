"""Readers of a consumer group on a real gateway, frame by frame: heartbeats, fetches and commits as stock clients send
them, at the moments that a scenario names.

The readers fetch as Java's consumer does. The Java consumer fetches no more of a partition while it holds records of
that partition. So its next fetch shows the gateway which records the application has received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from gateway.coordinator.handoff import HandoffEnd
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, TopicPartitions
from protocol.messages.fetch import FetchRequest, FetchTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.clients.workers import counted
from tests.gateway.data_plane import at, offsets_in
from tests.gateway_process import GatewayProcess
from tests.gateway_readers import GatewayReaders, by_topic, together
from tests.readers import Partition
from tests.wire import WireClient

SETTINGS = {
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "50",
}
MORTAL_MS = 2_000
JAVA = "apache-kafka-java"


class WireReaders(GatewayReaders):
    def __init__(
        self,
        gateway: GatewayProcess,
        partitions: int,
        *,
        topics: tuple[str, ...] = ("t",),
        timeout_ms: int = 30_000,
        mortal: bool = False,
    ) -> None:
        configs = {"group_handoff_timeout_ms": str(timeout_ms)}
        if mortal:
            configs |= {"consumer_session_timeout_ms": str(MORTAL_MS), "consumer_heartbeat_interval_ms": "100"}
        super().__init__(gateway, partitions, topics, configs)
        self._clients: dict[str, WireClient] = {}
        self._held: dict[tuple[str, Partition], list[int]] = {}
        """Offsets that were fetched and not yet delivered to the application."""
        self._ended_before = counted(gateway, "group_handoffs_total")

    def member_id(self, name: str) -> str:
        return name

    @property
    def ended(self) -> set[HandoffEnd]:
        now = counted(self._gateway, "group_handoffs_total")
        return {HandoffEnd(reason) for reason, count in now.items() if count > self._ended_before.get(reason, 0)}

    # --- what readers do ----------------------------------------------------------------------------------------------

    def come(self, *names: str) -> None:
        self._run(together(self._come(name) for name in names))

    async def _come(self, name: str) -> None:
        await self._disconnect(name)
        self.begin(name)
        client = self._clients[name] = await WireClient.connect(
            self._gateway.bootstrap, client_id=f"{self._group_id}-{name}"
        )
        await client.send(ApiVersionsRequest(client_software_name=JAVA, client_software_version="4.0.0"), 3)
        await self._heartbeat(name, 0, set())

    async def speak(self, *names: str) -> None:
        await together(
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
                    for topic, indexes in by_topic(says).items()
                ),
            ),
            1,
        )
        assert response.error_code == ErrorCode.NONE, response
        told = None if response.assignment is None else self.partitions_of(response.assignment.topic_partitions)
        gained = self.answered(name, response.member_epoch, told)
        if gained:
            self.readers[name].positions.update(await self._committed(name, gained))
            await self._fetch(name, *gained)

    async def _committed(self, name: str, partitions: set[Partition]) -> Mapping[Partition, int]:
        """Return the committed offsets, at which the reader begins."""
        asked = OffsetFetchRequestGroup(
            group_id=self._group_id,
            member_id=name,
            member_epoch=self.readers[name].epoch,
            topics=tuple(
                OffsetFetchRequestTopics(name=self._names[topic], partition_indexes=indexes)
                for topic, indexes in by_topic(partitions).items()
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
        """Fetch the next batch of each partition. Each record is a batch."""
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

    async def read(self, name: str, at_most: int | None = None) -> set[Partition]:
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

    async def commit_of(self, name: str, only: Iterable[Partition] | None = None) -> None:
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
                for topic, indexes in by_topic(offsets).items()
            ),
        )
        response = await self._clients[name].send(request, 9)
        codes = {part.error_code for topic in response.topics for part in topic.partitions}
        assert codes == {ErrorCode.NONE}, response

    def leave(self, *names: str) -> None:
        self._run(together(self._leave(name) for name in names))

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
        await together(self._disconnect(name) for name in names)
        while {each.member_id for each in (await self.describe()).members} != set(self.readers):
            await self.speak(*self.readers)
            await asyncio.sleep(self.look_s)
