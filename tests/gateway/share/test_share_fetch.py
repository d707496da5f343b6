"""ShareFetch on a tail and share partitions in memory, without Postgres: turns, the cost of a read, and changes during
a request.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from gateway.apis.data.share_fetch import share_acknowledge, share_fetch
from gateway.cluster.placement import Leaders
from gateway.config.broker import BrokerConfig
from gateway.coordinator.facts import MemberId
from gateway.coordinator.settings import Settings, ShareSettings
from gateway.coordinator.share.partition import (
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    PartitionSettings,
)
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.net.holdings import Holdings
from gateway.quotas.limits import Quotas
from gateway.quotas.throttles import Throttles
from gateway.share import partitions
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.share_acknowledge import AcknowledgePartition, AcknowledgeTopic, ShareAcknowledgeRequest
from protocol.messages.share_fetch import (
    AcknowledgementBatch,
    FetchPartition,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
    ShareFetchRequest,
)
from protocol.records import Record, build_batch, read_head
from storage.errors import StorageUnavailable
from storage.share import ShareKey, ShareRow
from storage.types import Assignment, Partition, PartitionKey, PartitionState, ReadRequest, ReadResult, StoredBatch

NODE, OTHER = 1, 2
MEMBER = base64.urlsafe_b64encode(bytes(range(16))).rstrip(b"=").decode()
OTHER_MEMBER = base64.urlsafe_b64encode(bytes(range(1, 17))).rstrip(b"=").decode()
RECORD = bytes(build_batch([Record(0, 1, None, b"value")]))


class Rows:
    """Replaces the store. Every partition begins at offset 0."""

    def __init__(self) -> None:
        self.rows: dict[ShareKey, ShareRow] = {}
        self.tried: list[list[ShareRow]] = []
        self.unavailable = 0
        """Number of further writes that get no answer."""
        self.is_away = False
        self.led = self.leading = self.most_leading = 0

    async def lead(self, key: ShareKey) -> ShareRow | None:
        self.leading += 1
        self.led += 1
        self.most_leading = max(self.most_leading, self.leading)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            if self.is_away:
                raise StorageUnavailable("gone")
            return self.rows.get(key)
        finally:
            self.leading -= 1

    async def begin(self, key: ShareKey, start_offset: int) -> ShareRow:
        return self.rows.setdefault(key, ShareRow(1, start_offset))

    async def write(self, rows: Sequence[tuple[ShareKey, ShareRow]]) -> list[bool]:
        self.tried.append([row for _, row in rows])
        if self.unavailable:
            self.unavailable -= 1
            raise StorageUnavailable("no answer in time")
        self.rows.update(rows)
        return [True] * len(rows)

    async def epochs(self, keys: Sequence[ShareKey]) -> list[int | None]:
        return [self.rows[key].state_epoch if key in self.rows else None for key in keys]


def at_offset(offset: int) -> bytes:
    return offset.to_bytes(8, "big") + RECORD[8:]


@dataclass
class Log:
    """Replaces the log in Postgres."""

    stored: dict[PartitionKey, int] = field(default_factory=dict[PartitionKey, int])
    """First offsets of batches of one record."""
    reads: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.opened.set()

    def state(self, key: PartitionKey) -> PartitionState:
        count = self.stored.get(key, 0)
        return PartitionState(0, count, count, 1, 0)

    async def states(self, keys: Sequence[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        return {key: self.state(key) for key in keys}

    async def read(self, requests: Sequence[ReadRequest], *, max_bytes: int) -> list[ReadResult]:
        self.reads += 1
        self.begun.set()
        await self.opened.wait()
        results: list[ReadResult] = []
        for asked in requests:
            last = min(self.stored.get(asked.partition_key, 0), asked.offset + asked.max_bytes // len(RECORD))
            batches = tuple(StoredBatch(at, at, 1, at_offset(at)) for at in range(asked.offset, last))
            results.append(ReadResult(self.state(asked.partition_key), batches))
        return results


class Node:
    def __init__(self, partitions: int) -> None:
        self.topic_id: UUID = uuid4()
        self.log = Log()
        self.tail = Tail(1 << 30)
        self.leader = NODE
        keys = [PartitionKey(number) for number in range(partitions)]
        topic = SimpleNamespace(
            name="t",
            partitions=[Partition(number, key, 1, None, self.topic_id, partitions) for number, key in enumerate(keys)],
        )

        async def resolved(_: Any) -> None: ...

        catalog = SimpleNamespace(
            get_by_id={self.topic_id: topic}.get,
            resolve_all_ids=resolved,
            resolve_all=resolved,
            broker=SimpleNamespace(fetch_max_bytes=1 << 30),
            assigned=None,
        )
        membership = SimpleNamespace(
            leads=lambda partition: self.leader == NODE,  # pyright: ignore[reportUnknownLambdaType]
            leaders=SimpleNamespace(leader=lambda partition: self.leader),  # pyright: ignore[reportUnknownLambdaType]
            brokers=list,
            broker_ids=(),
            levels={},
        )
        self.rows = Rows()
        self.share = SharePartitions(cast("Any", self.rows))
        self.sessions = ShareSessions()
        self.services = SimpleNamespace(
            authorizer=None,
            catalog=catalog,
            membership=membership,
            metrics=SimpleNamespace(count_topic_bytes_out=lambda name, size_bytes: None),  # pyright: ignore[reportUnknownLambdaType]
            settings=SimpleNamespace(broker=BrokerConfig()),
            groups=SimpleNamespace(settings=Settings(share=ShareSettings(auto_offset_reset="earliest"))),
            share=self.share,
            share_sessions=self.sessions,
            tail=self.tail,
            throttles=Throttles(Quotas),
            log=self.log,
        )
        self.epochs: dict[str, int] = {}
        self.holdings = Holdings(1 << 30)

    def append(self, partition: int, count: int = 1) -> None:
        """Append batches of one record. The tail holds them."""
        key = PartitionKey(partition)
        for _ in range(count):
            offset = self.log.stored.get(key, 0)
            self.log.stored[key] = offset + 1
            self.tail.record_append(
                key,
                base_offset=offset,
                last_offset=offset,
                records=at_offset(offset),
                log_start_offset=0,
                leader_epoch=1,
                now_s=asyncio.get_running_loop().time(),
            )

    def store(self, partition: int, count: int) -> None:
        """Append batches of one record that only Postgres holds."""
        self.log.stored[PartitionKey(partition)] = count

    async def fetch(
        self, *partitions: int, member: str = MEMBER, connection: str = "connection", **more: Any
    ) -> dict[int, PartitionData]:
        epoch = self.epochs.get(member, 0)
        self.epochs[member] = epoch + 1
        named = tuple(FetchPartition(partition_index=index) for index in partitions)
        given: dict[str, Any] = {
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 30,
            "max_records": 500,
            "batch_size": 500,
            "topics": (FetchTopic(topic_id=self.topic_id, partitions=named),) if named else (),
            **more,
        }
        context = RequestContext(
            ApiKey.SHARE_FETCH,
            2,
            1,
            "tests",
            ConnectionInfo(connection, "/127.0.0.1", holdings=self.holdings),
            cast("Any", self.services),
        )
        answer = await share_fetch(
            ShareFetchRequest(group_id="s", member_id=member, share_session_epoch=epoch, **given), context
        )
        assert answer.error_code == ErrorCode.NONE
        return {part.partition_index: part for topic in answer.responses for part in topic.partitions}


def acquired(part: PartitionData | None) -> list[tuple[int, int]]:
    return [] if part is None else [(each.first_offset, each.last_offset) for each in part.acquired_records]


def offsets(part: PartitionData) -> list[int]:
    assert isinstance(part.records, tuple)
    return [read_head(batch).base_offset for batch in part.records]


async def nowhere() -> int:
    raise AssertionError("the partition has been read already")


async def parked_at(node: Node) -> None:
    async with asyncio.timeout(30):
        while not node.tail.parked_count:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)


async def test_answer_contains_only_batches_of_acquired_records() -> None:
    node = Node(1)
    node.append(0, 40)
    first = (await node.fetch(0, max_records=10))[0]
    assert (acquired(first), offsets(first)) == ([(0, 9)], list(range(10)))
    second = (await node.fetch(max_records=3))[0]
    assert (acquired(second), offsets(second)) == ([(10, 12)], [10, 11, 12])


async def test_a_busy_partition_does_not_keep_the_group_from_anothers_backlog() -> None:
    node = Node(2)
    node.store(1, 50)
    backlog: list[tuple[int, int]] = []
    for _ in range(6):
        node.append(0)
        answer = await node.fetch(*((0, 1) if not backlog else ()), max_records=20)
        backlog += acquired(answer.get(1))
        if backlog and backlog[-1][1] == 49:
            break
    assert backlog == [(0, 19), (20, 39), (40, 49)]


async def test_records_in_memory_wait_only_for_earlier_turns() -> None:
    node = Node(3)
    node.append(0)
    node.store(1, 5)
    node.append(2)
    answer = await node.fetch(0, 1, 2)
    assert [acquired(answer[index]) for index in range(3)] == [[(0, 0)], [], [(0, 0)]]
    assert node.log.reads == 0
    node.append(0)
    answer = await node.fetch()
    assert {index: acquired(part) for index, part in answer.items()} == {1: [(0, 4)], 0: [(1, 1)]}
    assert node.log.reads == 1


async def test_a_long_tail_does_not_hold_the_event_loop() -> None:
    node = Node(1)
    node.append(0, 30_000)
    began = time.process_time()
    assert acquired((await node.fetch(0, max_records=500))[0]) == [(0, 499)]
    # This takes some milliseconds. A read of the whole tail would take most of a second.
    assert time.process_time() - began < 0.1


async def test_partition_that_moved_to_another_node_is_not_acquired() -> None:
    node = Node(1)
    waiting = asyncio.create_task(node.fetch(0, max_wait_ms=20_000))
    await node.log.begun.wait()
    node.leader = OTHER
    node.services.membership.leads = lambda key: False  # pyright: ignore[reportUnknownLambdaType]
    node.append(0)
    part = (await asyncio.wait_for(waiting, 10))[0]
    assert (part.error_code, acquired(part)) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, [])
    assert part.current_leader.leader_id == OTHER
    assert node.share.count == 0


async def test_records_of_a_slow_read_are_not_acquired_after_a_change_of_leaders() -> None:
    node = Node(1)
    node.store(0, 4)
    node.log.opened.clear()
    waiting = asyncio.create_task(node.fetch(0))
    await node.log.begun.wait()
    node.leader = OTHER
    node.services.membership.leads = lambda key: False  # pyright: ignore[reportUnknownLambdaType]
    node.log.opened.set()
    part = (await asyncio.wait_for(waiting, 10))[0]
    assert (part.error_code, acquired(part)) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, [])


async def test_partition_assigned_to_another_node_is_not_acquired() -> None:
    node = Node(1)
    catalog, membership = node.services.catalog, node.services.membership
    leaders = membership.leaders = Leaders((NODE, OTHER))
    membership.leads = lambda part: leaders.leader(part) == NODE  # pyright: ignore
    (partition,) = catalog.get_by_id(node.topic_id).partitions
    named = catalog.get_by_id(node.topic_id).partitions
    named[0] = replace(partition, assignment=Assignment((NODE,)))
    waiting = asyncio.create_task(node.fetch(0, max_wait_ms=20_000))
    await parked_at(node)
    named[0], catalog.assigned = replace(partition, assignment=Assignment((OTHER,))), object()
    node.append(0)
    part = (await asyncio.wait_for(waiting, 10))[0]
    assert (part.error_code, acquired(part)) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, [])
    assert part.current_leader.leader_id == OTHER
    assert node.share.count == 0


@pytest.mark.parametrize("by", ["other nodes", "an election"])
@pytest.mark.parametrize("parked", [False, True])
async def test_leadership_lost_and_regained_between_two_checks_is_noticed(by: str, *, parked: bool) -> None:
    node = Node(1)
    node.append(0, 4)
    assert acquired((await node.fetch(0))[0]) == [(0, 3)]
    waiting = None
    if parked:
        waiting = asyncio.create_task(node.fetch(max_wait_ms=20_000))
        await parked_at(node)
    # In the meantime another node has led the partition and delivered the next records.
    if by == "other nodes":
        node.services.membership.leaders = SimpleNamespace()
    else:
        node.services.catalog.assigned = object()
    node.rows.rows[ShareKey("s", node.topic_id, 0)] = ShareRow(2, 5)
    node.append(0)
    if not parked:
        assert await node.fetch() == {}
    node.append(0)
    answer = await (asyncio.wait_for(waiting, 10) if waiting is not None else node.fetch())
    assert acquired(answer[0]) == [(5, 5)]


@pytest.mark.parametrize("forgets", [False, True], ids=["read", "forgotten"])
async def test_a_lock_is_not_renewed_after_another_node_led_the_partition(*, forgets: bool) -> None:
    node = Node(1)
    node.append(0, 4)
    assert acquired((await node.fetch(0))[0]) == [(0, 3)]
    if forgets:
        forgotten = ForgottenTopic(topic_id=node.topic_id, partitions=(0,))
        assert await node.fetch(forgotten_topics_data=(forgotten,)) == {}
    # In the meantime another node has led the partition and delivered the same records.
    node.services.membership.leaders = SimpleNamespace(leader=lambda partition: NODE)  # pyright: ignore[reportUnknownLambdaType]
    node.rows.rows[ShareKey("s", node.topic_id, 0)] = ShareRow(2, 0)
    renewing = AcknowledgementBatch(first_offset=0, last_offset=3, acknowledge_types=(AcknowledgeType.RENEW,))
    request = ShareAcknowledgeRequest(
        group_id="s",
        member_id=MEMBER,
        share_session_epoch=node.epochs[MEMBER],
        is_renew_ack=True,
        topics=(
            AcknowledgeTopic(
                topic_id=node.topic_id,
                partitions=(AcknowledgePartition(partition_index=0, acknowledgement_batches=(renewing,)),),
            ),
        ),
    )
    context = RequestContext(
        ApiKey.SHARE_ACKNOWLEDGE, 2, 1, "tests", ConnectionInfo("connection", "/127.0.0.1"), cast("Any", node.services)
    )
    answer = await share_acknowledge(request, context)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_a_session_that_ended_acquires_nothing() -> None:
    node = Node(1)
    node.store(0, 3)
    node.log.opened.clear()
    late = asyncio.create_task(node.fetch(0, max_wait_ms=20_000))
    await node.log.begun.wait()
    node.sessions.connection_closed("connection", node.share)
    node.log.opened.set()
    assert acquired((await asyncio.wait_for(late, 10))[0]) == []
    other = (await node.fetch(0, member=OTHER_MEMBER, connection="other"))[0]
    assert acquired(other) == [(0, 2)]


@pytest.mark.parametrize("replaces", [False, True], ids=["continued", "replaced"])
async def test_one_request_of_a_session_waits_for_records(*, replaces: bool) -> None:
    """A waiting request remembers all partitions of its session. A client could let one wait on each of its
    connections."""
    node = Node(1)
    first = asyncio.create_task(node.fetch(0, max_wait_ms=60_000))
    await parked_at(node)
    if replaces:
        node.epochs[MEMBER] = 0
    second = asyncio.create_task(node.fetch(0, connection="another", max_wait_ms=60_000))
    assert acquired((await asyncio.wait_for(first, 5)).get(0)) == []
    await parked_at(node)
    node.append(0)
    assert acquired((await asyncio.wait_for(second, 5))[0]) == [(0, 0)]


async def test_slow_read_counts_no_more_bytes_than_it_may_return() -> None:
    """Otherwise three clients with Java's defaults would fill the node for as long as Postgres is slow."""
    node = Node(1)
    node.store(0, 4)
    node.log.opened.clear()
    reading = asyncio.create_task(node.fetch(0, max_bytes=50 * 2**20))
    await node.log.begun.wait()
    held_bytes = node.holdings.held_bytes
    node.log.opened.set()
    assert acquired((await reading)[0]) == [(0, 3)]
    assert held_bytes == 2**20
    assert node.holdings.held_bytes == 0


async def test_share_fetch_gives_way_while_it_skips_many_records() -> None:
    node = Node(1)
    node.append(0, 3)
    markers = bytearray(RECORD)
    markers[21:23] = (0x20).to_bytes(2, "big")
    for offset in range(3, 60):
        node.tail.record_append(
            PartitionKey(0),
            base_offset=offset,
            last_offset=offset,
            records=offset.to_bytes(8, "big") + bytes(markers[8:]),
            log_start_offset=0,
            leader_epoch=1,
            now_s=asyncio.get_running_loop().time(),
        )
    assert acquired((await node.fetch(0, max_records=3))[0]) == [(0, 2)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await node.fetch(max_bytes=1, max_records=1) == {}
    counting.cancel()
    assert turns >= 20


async def test_partition_reloaded_during_a_fetch_is_checked_again() -> None:
    node = Node(1)
    node.store(0, 8)
    assert acquired((await node.fetch(0, max_records=4))[0]) == [(0, 3)]
    node.log.opened.clear()
    node.log.begun.clear()
    late = asyncio.create_task(node.fetch(0, member=OTHER_MEMBER, connection="other", max_wait_ms=20_000))
    await node.log.begun.wait()
    key = ShareKey("s", node.topic_id, 0)
    node.share.drop([key])
    await node.share.load(key, nowhere, PartitionSettings())
    node.log.opened.set()
    assert acquired((await asyncio.wait_for(late, 10))[0]) == [(0, 7)]


async def test_partitions_are_read_from_postgres_concurrently() -> None:
    node = Node(40)
    node.append(39)
    answer = await node.fetch(*range(40))
    assert acquired(answer[39]) == [(0, 0)]
    assert (node.rows.led, node.rows.most_leading) == (40, 8)


async def test_unanswered_partitions_do_not_each_query_postgres() -> None:
    node = Node(40)
    node.rows.is_away = True
    answer = await node.fetch(*range(40))
    assert {part.error_code for part in answer.values()} == {ErrorCode.NOT_LEADER_OR_FOLLOWER}
    assert (len(answer), node.rows.led) == (40, 8)
    node.rows.is_away = False
    node.append(0)
    assert acquired((await node.fetch())[0]) == [(0, 0)]


# --- writing --------------------------------------------------------------------------------------------------------


def of_all(first: int, last: int, *types: AcknowledgeType) -> Acknowledge:
    kinds = tuple(types[offset % len(types)] for offset in range(last - first + 1))
    return Acknowledge(MemberId(MEMBER), (AcknowledgedBatch(first, last, kinds),))


async def test_a_write_that_is_repeated_has_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "PAUSE_S", 0.0)
    node = Node(1)
    node.append(0, 4)
    await node.fetch(0)
    key = ShareKey("s", node.topic_id, 0)
    node.rows.unavailable = 2
    await node.share.apply(key, of_all(0, 1, AcknowledgeType.ACCEPT))
    await node.share.apply(key, of_all(2, 3, AcknowledgeType.ACCEPT))
    numbers = [row.write_number for (row,) in node.rows.tried]
    assert numbers == [1, 2, 3, 4]
    assert [row.start_offset for (row,) in node.rows.tried] == [2, 2, 2, 4]


async def test_partitions_with_many_states_are_written_in_small_groups() -> None:
    node = Node(12)
    for index in range(12):
        node.append(index, 1_000)
    for _ in range(12):
        await node.fetch(*(range(12) if not node.epochs else ()), max_records=1_000)
    ways = of_all(0, 999, AcknowledgeType.RELEASE, AcknowledgeType.ACCEPT)
    waiting = [node.share.submit(ShareKey("s", node.topic_id, index), ways)[1] for index in range(12)]
    await asyncio.gather(*(each for each in waiting if each is not None))
    assert [len(rows) for rows in node.rows.tried] == [5, 5, 2]
    assert all(len(row.ranges) == 1_000 for rows in node.rows.tried for row in rows)
