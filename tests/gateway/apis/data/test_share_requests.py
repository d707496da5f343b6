"""Requests of share groups at their largest size. They must yield to other requests while they run."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from gateway.apis import MAX_ADMIN_ELEMENTS
from gateway.apis.data.share_fetch import share_acknowledge, share_fetch
from gateway.apis.groups import share_group_offsets
from gateway.config.broker import BrokerConfig
from gateway.coordinator.facts import MemberId
from gateway.coordinator.settings import Settings, ShareSettings
from gateway.coordinator.share.model import ShareGroup
from gateway.coordinator.share.partition import Acquire, PartitionSettings
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo
from gateway.quotas.limits import Quotas
from gateway.quotas.throttles import Throttles
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import alter_share_group_offsets as altering
from protocol.messages import delete_share_group_offsets as deleting
from protocol.messages import describe_share_group_offsets as describing
from protocol.messages import share_acknowledge as acknowledging
from protocol.messages import share_fetch as fetching
from protocol.messages.share_fetch import AcknowledgementBatch
from storage.share import ShareKey, ShareRow, ShareStand, StoredRange
from storage.types import Partition, PartitionKey, Refusal, Topic
from tests.turns import HELD_MS

COUNT = MAX_ADMIN_ELEMENTS
MORE = 4 * COUNT
"""More elements than a request may have, so that a handler that does not yield is noticed."""
TOPIC = UUID(int=7)
MEMBER = "AAAAAAAAAAAAAAAAAAAACQ"
SETTINGS = ShareSettings()
RANGES = tuple(StoredRange(1, 2 * (index % 2), 1) for index in range(1_000))


class Loop(asyncio.SelectorEventLoop):
    """An event loop that records the duration of its longest turn."""

    longest_s = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        self.longest_s = max(self.longest_s, time.thread_time() - began)


async def services_for(topics: tuple[Topic, ...]) -> Any:
    """Make the context of a request. The measurement excludes creating the context and freeing it, so a test returns
    the context with its answer.
    """
    context = asking(topics)
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.longest_s = 0.0
    return context


def held_ms(work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[float, Any]:
    """Run `work`; return for how long it blocked the loop at most, and its result."""
    loop = Loop()
    gc.disable()  # no garbage collection during the measurement, because a gateway also postpones it
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            answer = runner.run(work())
    finally:
        gc.enable()
    return loop.longest_s * 1000, answer


class Store:
    """A store in which a share group has a position in every partition."""

    async def offsets(self, group_id: str, settled: object) -> dict[tuple[UUID, int], ShareStand]:
        return {(TOPIC, index): ShareStand(5, 0) for index in range(COUNT)}

    async def alter(self, group_id: str, starts: object) -> bool:
        return True

    async def delete(self, group_id: str, topic_ids: object) -> set[UUID]:
        return {TOPIC}

    async def lead(self, key: object) -> ShareRow:
        return ShareRow(1, 5)

    async def write(self, rows: list[object]) -> list[bool]:
        return [True for _ in rows]

    async def epochs(self, keys: list[object]) -> list[int | None]:
        return [1 for _ in keys]

    async def hear_leaders(self, group_id: str, epochs: object) -> list[object]:
        return []

    async def states(self, group_id: str, names: list[object]) -> list[ShareRow]:
        return [ShareRow(1, 5, RANGES) for _ in names]


class Groups:
    settings = Settings(share=SETTINGS)

    def next_request_id(self) -> int:
        return 1

    def submit(self, group_id: str, event: object) -> Any:
        return SimpleNamespace(error=ErrorCode.NONE)

    @asynccontextmanager
    async def holding(self, group_id: str):
        yield ShareGroup(group_id, exists=True), None

    async def views(self, group_ids: list[str]):
        for group_id in group_ids:
            yield group_id, ShareGroup(group_id, exists=True)


def asking(topics: tuple[Topic, ...]) -> Any:
    by_name, by_id = ({topic.name: topic for topic in topics}, {topic.topic_id: topic for topic in topics})
    nothing: dict[str, None] = {}

    async def known(asked: object) -> None:
        """Return the known topics without a query."""

    async def states(keys: object) -> dict[str, None]:
        return nothing

    async def read(requests: list[object], max_bytes: int) -> list[Refusal]:
        return [Refusal.UNKNOWN_PARTITION for _ in requests]

    store: Any = Store()
    services = SimpleNamespace(
        authorizer=None,
        catalog=SimpleNamespace(
            get=by_name.get,
            get_by_id=by_id.get,
            resolve_all=known,
            resolve_all_ids=known,
            broker=SimpleNamespace(fetch_max_bytes=2**20),
            assigned=None,
        ),
        groups=Groups(),
        log=SimpleNamespace(states=states, read=read),
        settings=SimpleNamespace(broker=BrokerConfig()),
        membership=SimpleNamespace(leads=lambda key: True, leaders=None, levels={"share.version": 1}),
        share=SharePartitions(store, max_partitions=2 * COUNT),
        share_sessions=ShareSessions(),
        share_store=store,
        tail=Tail(2**20),
        throttles=Throttles(Quotas),
    )
    return SimpleNamespace(services=services, connection=ConnectionInfo("connection", "/127.0.0.1"), api_key=78)


def wide_topic(count: int = COUNT) -> Topic:
    partitions = tuple(Partition(index, PartitionKey(index), 0, None, TOPIC, count) for index in range(count))
    return Topic(TOPIC, "wide", internal=False, configs={}, partitions=partitions)


def narrow_topics(count: int) -> tuple[Topic, ...]:
    one = (Partition(0, PartitionKey(0), 0, None, TOPIC, 1),)
    return tuple(
        Topic(TOPIC if not number else UUID(int=100 + number), f"t{number}", internal=False, configs={}, partitions=one)
        for number in range(count)
    )


def test_share_fetch_of_very_many_partitions_gives_way() -> None:
    topic = wide_topic()
    first = fetching.ShareFetchRequest(
        group_id="g",
        member_id=MEMBER,
        max_wait_ms=0,
        max_records=1,
        topics=(
            fetching.FetchTopic(
                topic_id=TOPIC,
                partitions=tuple(fetching.FetchPartition(partition_index=index) for index in range(COUNT)),
            ),
        ),
    )
    batch = AcknowledgementBatch(first_offset=0, last_offset=0, acknowledge_types=(1,))
    then = acknowledging.ShareAcknowledgeRequest(
        group_id="g",
        member_id=MEMBER,
        share_session_epoch=1,
        topics=(
            acknowledging.AcknowledgeTopic(
                topic_id=TOPIC,
                partitions=tuple(
                    acknowledging.AcknowledgePartition(partition_index=index, acknowledgement_batches=(batch,))
                    for index in range(COUNT)
                ),
            ),
        ),
    )

    async def ask() -> tuple[Any, Any, Any]:
        context = await services_for((topic,))
        return await share_fetch(first, context), await share_acknowledge(then, context), context

    held, (records, acknowledged, _) = held_ms(ask)
    assert len(records.responses[0].partitions) == COUNT
    assert len(acknowledged.responses[0].partitions) == COUNT
    assert held < HELD_MS


def described() -> tuple[Any, Any]:
    asked = describing.DescribeShareGroupOffsetsRequestGroup(group_id="g", topics=None)
    return share_group_offsets.describe_share_group_offsets, describing.DescribeShareGroupOffsetsRequest(
        groups=(asked,)
    )


def altered() -> tuple[Any, Any]:
    partitions = tuple(
        altering.AlterShareGroupOffsetsRequestPartition(partition_index=index, start_offset=0) for index in range(MORE)
    )
    topic = altering.AlterShareGroupOffsetsRequestTopic(topic_name="wide", partitions=partitions)
    return share_group_offsets.alter_share_group_offsets, altering.AlterShareGroupOffsetsRequest(
        group_id="g", topics=(topic,)
    )


@pytest.mark.parametrize(("asked", "count"), [(described, COUNT), (altered, MORE)])
def test_describing_offsets_of_very_many_partitions_gives_way(asked: Callable[[], tuple[Any, Any]], count: int) -> None:
    (handler, request), topic = asked(), wide_topic(count)

    async def ask() -> tuple[Any, Any]:
        context = await services_for((topic,))
        return await handler(request, context), context

    held, (answer, _) = held_ms(ask)
    (one,) = answer.groups[0].topics if asked is described else answer.responses
    assert len(one.partitions) == count
    assert held < HELD_MS


def test_deleting_offsets_of_very_many_topics_gives_way() -> None:
    topics = narrow_topics(MORE)
    request = deleting.DeleteShareGroupOffsetsRequest(
        group_id="g",
        topics=tuple(deleting.DeleteShareGroupOffsetsRequestTopic(topic_name=topic.name) for topic in topics),
    )

    async def ask() -> tuple[Any, Any]:
        context = await services_for(topics)
        return await share_group_offsets.delete_share_group_offsets(request, context), context

    held, (answer, _) = held_ms(ask)
    assert len(answer.responses) == MORE
    assert held < HELD_MS


def test_end_of_a_session_with_locks_in_very_many_partitions_gives_way() -> None:
    keys = [ShareKey("g", TOPIC, index) for index in range(COUNT)]
    one = Acquire(MemberId(MEMBER), 5, 6, ((5, 5),), 1)

    async def anywhere() -> int:
        return 5

    async def acquire(partitions: SharePartitions) -> None:
        for key in keys:
            await partitions.load(key, anywhere, PartitionSettings())
            taken, _ = partitions.submit(key, one)
            assert taken.acquired

    async def end(partitions: SharePartitions) -> None:
        partitions.release(MemberId(MEMBER), keys)
        await partitions.let_go(MemberId(MEMBER))

    async def ask() -> list[bool]:
        store: Any = Store()
        partitions = SharePartitions(store)
        await acquire(partitions)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.longest_s = 0.0
        await end(partitions)
        return [bool(partitions.submit(key, one)[0].acquired) for key in keys[-3:]]

    held, again = held_ms(ask)
    assert all(again), "it is anyone's"
    assert held < HELD_MS


def test_full_node_refuses_a_share_partition_without_visiting_all() -> None:
    async def anywhere() -> int:
        return 5

    async def ask() -> ErrorCode:
        store: Any = Store()
        partitions = SharePartitions(store, max_partitions=COUNT)
        watch = partitions.watch(lambda: None)
        for index in range(COUNT):
            await partitions.load(ShareKey("g", TOPIC, index), anywhere, PartitionSettings())
            watch.add(ShareKey("g", TOPIC, index))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.longest_s = 0.0
        with pytest.raises(KafkaError) as refused:
            await asyncio.gather(
                *(
                    partitions.load(ShareKey("g", TOPIC, COUNT + more), anywhere, PartitionSettings())
                    for more in range(8)
                )
            )
        return refused.value.code

    held, code = held_ms(ask)
    assert code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert held < HELD_MS
