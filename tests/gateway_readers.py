"""A group of readers on a real gateway that acts out a scenario: its topics, its settings and its state.

The one idea: the scenario asks the gateway for the group's state (ConsumerGroupDescribe), so members may be of any
kind. No scenario sleeps for a fixed time. If a state must last, it is checked for a short time. Subclasses define how a
reader communicates: by frames in `frames/readers.py`, by a stock client in `clients/readers.py`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar
from uuid import UUID

from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest, DescribedGroup
from protocol.messages.consumer_group_describe import TopicPartitions as DescribedPartitions
from protocol.messages.consumer_group_heartbeat import TopicPartitions
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.gateway.data_plane import batch_of, produce_request
from tests.gateway_process import GatewayProcess
from tests.readers import Partition, Readers
from tests.wire import WireClient

T = TypeVar("T")
LONGEST_S = 30
LEADS_AGAIN = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE}
)


class GatewayReaders(Readers):
    look_s = 0.005
    """Seconds between two requests for the group's state."""
    moment_s = 0.2
    """Seconds without a change after which the group counts as settled. A gateway gives a waiting member its partition
    within some milliseconds."""

    def __init__(
        self, gateway: GatewayProcess, partitions: int, topics: tuple[str, ...], configs: Mapping[str, str]
    ) -> None:
        super().__init__(partitions, topics)
        self._gateway = gateway
        self._runner = asyncio.Runner()
        self._group_id = fresh("readers")
        self._names = {topic: fresh(topic) for topic in topics}
        self._topic_ids: dict[str, UUID] = {}
        self._seen = DescribedGroup()
        """The group's state at the last request."""
        self._admin = self._run(self._open(configs))

    async def _open(self, configs: Mapping[str, str]) -> WireClient:
        admin = await WireClient.connect(self._gateway.bootstrap, client_id="admin")
        for topic, count in self.partition_counts.items():
            self._topic_ids[topic] = await create_topic(admin, self._names[topic], count)
        assert await configure(admin, self._group_id, group_handoff_mode="drain", **configs) == [ErrorCode.NONE]
        return admin

    def close(self) -> None:
        try:
            self.leave(*self.readers)
            self._run(self._admin.close())
        finally:
            # Close a failed scenario too. Otherwise its tasks would continue and disturb the report.
            self._runner.close()

    def _run(self, awaited: Awaitable[T]) -> T:
        return self._runner.run(asyncio.wait_for(awaited, LONGEST_S))

    @property
    def now_ms(self) -> float:
        return self._runner.get_loop().time() * 1_000

    # --- how they speak -----------------------------------------------------------------------------------------------

    @abstractmethod
    def member_id(self, name: str) -> str:
        """Return the id by which the coordinator knows the reader."""

    @abstractmethod
    async def speak(self, *names: str) -> None:
        """Let these readers send heartbeats and follow the answers."""

    @abstractmethod
    async def read(self, name: str, at_most: int | None = None) -> set[Partition]: ...

    @abstractmethod
    async def commit_of(self, name: str, only: Iterable[Partition] | None = None) -> None: ...

    def beat(self, *names: str) -> None:
        self._run(self.speak(*names))

    def poll(self, *names: str, at_most: int | None = None) -> set[Partition]:
        return set[Partition]().union(*self._run(together(self.read(name, at_most) for name in names)))

    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        self._run(together(self.commit_of(name, only) for name in names))

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
        """Wait until the group is settled with `waiting` partitions pending. With None, any number may be pending."""
        try:
            self._run(self._settle(waiting, work=work))
        except TimeoutError:
            raise AssertionError(f"{waiting} are to wait, and not: {self._seen}, {self.readers}") from None

    async def _settle(self, waiting: int | None, *, work: bool) -> None:
        clock = asyncio.get_running_loop().time
        stood_still_s, before = clock(), object()
        while True:
            if work:
                await together(self.read(name) for name in self.readers)
                await together(self.commit_of(name) for name in self.readers)
            await self.speak(*self.readers)
            awaited = self._awaited(await self.describe())
            now = [(name, each.epoch, sorted(each.owned)) for name, each in self.readers.items()]
            if awaited is None or now != before or awaited != (awaited if waiting is None else waiting):
                stood_still_s = clock()
            elif awaited:
                if clock() - stood_still_s >= self.moment_s:
                    return
            elif not work or not self._unread():
                return
            before = now
            await asyncio.sleep(self.look_s)

    def _awaited(self, group: DescribedGroup) -> int | None:
        """Count the partitions that their target owners do not own yet. Return None if the group does not yet report
        what the readers know, or the readers do not yet know what the group reports.
        """
        members = {each.member_id: each for each in group.members}
        if members.keys() != set(map(self.member_id, self.readers)) or group.assignment_epoch != group.group_epoch:
            return None
        targets: set[Partition] = set()
        awaited = 0
        for name, reader in self.readers.items():
            member_id = self.member_id(name)
            target = self.partitions_of(members[member_id].target_assignment.topic_partitions)
            assigned = self.partitions_of(members[member_id].assignment.topic_partitions)
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

    async def describe(self) -> DescribedGroup:
        """Describe the group. A gateway that was stopped for long must first acquire the lease of the group again."""
        while True:
            response = await self._admin.send(ConsumerGroupDescribeRequest(group_ids=(self._group_id,)), 1)
            (self._seen,) = response.groups
            if self._seen.error_code not in LEADS_AGAIN:
                return self._seen
            await asyncio.sleep(self.look_s)

    def partitions_of(self, assigned: Iterable[TopicPartitions | DescribedPartitions]) -> set[Partition]:
        topics = {topic_id: topic for topic, topic_id in self._topic_ids.items()}
        return {(topics[each.topic_id], index) for each in assigned for index in each.partitions}


async def together(awaited: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*awaited)


def by_topic(partitions: Iterable[Partition]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        found.setdefault(topic, []).append(index)
    return {topic: tuple(indexes) for topic, indexes in found.items()}
