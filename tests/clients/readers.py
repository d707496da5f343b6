"""Readers of a consumer group that are stock consumers: librdkafka with `group.protocol=consumer`.

The one idea: a partition is a reader's own from its assign callback to its revoke callback. Consumers fetch nothing
unless a scenario has them read, and then to the end: so what they were served is what their application was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka
from confluent_kafka import Consumer, TopicPartition

from tests.closing import close
from tests.frames.readers import LONGEST_S, OnGateway
from tests.gateway_process import GatewayProcess
from tests.readers import Partition

POLL_S = 0.01
Rebalanced = Callable[[Consumer, list[TopicPartition]], None]


class StockReaders(OnGateway):
    def __init__(self, gateway: GatewayProcess, partitions: int, **given: Any) -> None:
        super().__init__(gateway, partitions, **given)
        self._consumers: dict[str, Consumer] = {}

    def come(self, *names: str) -> None:
        """And are members, with what they are given at first."""
        for name in names:
            assert name not in self._consumers, "one process cannot take over from another that is still there"
            self.begin(name)
            consumer = self._consumers[name] = Consumer(
                {
                    "bootstrap.servers": self.gateway.bootstrap,
                    "group.id": self.group_id,
                    "client.id": self.client_id(name),
                    "group.protocol": "consumer",
                    "enable.auto.commit": False,
                    "auto.offset.reset": "earliest",
                    "fetch.wait.max.ms": 20,
                }
            )
            topics = [self.names[topic] for topic in self.topics]
            consumer.subscribe(topics, on_assign=self._assigned(name), on_revoke=self._revoked(name))
        self.run(self._joined(*names))

    async def _joined(self, *names: str) -> None:
        while True:
            await self._beat(*names)
            members = self.members(await self._describe())
            if all(name in members and self.assigned_to(members[name]) == self.owned(name) for name in names):
                return

    def _assigned(self, name: str) -> Rebalanced:
        def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            reader = self.readers[name]
            self.answered(name, 0, reader.owned | {self._named(each) for each in partitions})
            committed = consumer.committed(partitions, timeout=LONGEST_S)
            begin = [TopicPartition(each.topic, each.partition, max(each.offset, 0)) for each in committed]
            reader.positions.update({self._named(each): each.offset for each in begin})
            consumer.incremental_assign(begin)
            consumer.pause(partitions)

        return assigned

    def _revoked(self, name: str) -> Rebalanced:
        def revoked(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if name in self.readers:
                self.readers[name].told = self.owned(name) - {self._named(each) for each in partitions}
                self.about_to_beat(name)
            consumer.incremental_unassign(partitions)

        return revoked

    def _named(self, partition: TopicPartition) -> Partition:
        topics = {called: topic for topic, called in self.names.items()}
        return topics[partition.topic], partition.partition

    def _at(self, partition: Partition, offset: int = confluent_kafka.OFFSET_INVALID) -> TopicPartition:
        return TopicPartition(self.names[partition[0]], partition[1], offset)

    async def _beat(self, *names: str) -> None:
        for name in names:
            message = self._consumers[name].poll(POLL_S)
            assert message is None, (message.error(), message.topic(), message.partition(), message.offset())

    async def _poll(self, name: str, at_most: int | None) -> set[Partition]:
        assert at_most is None, "a consumer that stops on its way has been served more than its application"
        reader, consumer = self.readers[name], self._consumers[name]
        unread = {each for each in reader.owned if reader.positions[each] < self.ends.get(each, 0)}
        if not unread:
            return unread
        found: set[Partition] = set()
        consumer.resume([self._at(each) for each in unread])
        until_s = time.monotonic() + LONGEST_S
        while any(reader.positions[each] < self.ends[each] for each in unread & reader.owned):
            assert time.monotonic() < until_s, f"{name} was given nothing of {unread}"
            message = consumer.poll(POLL_S)
            if message is None:
                continue
            topic, index, offset = message.topic(), message.partition(), message.offset()
            assert message.error() is None, message.error()
            assert topic is not None and index is not None and offset is not None  # noqa: PT018
            partition = self._named(TopicPartition(topic, index))
            self.deliver(name, partition, offset)
            found.add(partition)
        consumer.pause([self._at(each) for each in unread & reader.owned])
        return found

    async def _commit(self, name: str, offsets: Mapping[Partition, int]) -> None:
        if offsets:
            wanted = [self._at(partition, offset) for partition, offset in offsets.items()]
            for each in self._consumers[name].commit(offsets=wanted, asynchronous=False) or ():
                assert each.error is None, each

    def leave(self, *names: str) -> None:
        for name in names:
            self.end(name)
            close(self._consumers.pop(name))

    def die(self, *names: str) -> None:
        raise AssertionError("a consumer cannot be killed without its process")
