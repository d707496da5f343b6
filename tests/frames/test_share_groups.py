"""Share groups on the wire (KIP-932): records are acquired, acknowledged and released, and survive a kill."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from protocol.errors import ErrorCode
from protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.delete_share_group_offsets import (
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsRequestTopic,
)
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.share_fetch import (
    FetchPartition,
    FetchTopic,
    ForgottenTopic,
)
from protocol.messages.share_group_describe import ShareGroupDescribeRequest
from protocol.records import read_head, split_batches
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.frames.share import ACCEPT, NONE, REJECT, RELEASE, RENEW, Reader, batch_of, part_of, reading, scene, send
from tests.frames.transactions import produce, producer_of
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

# --- reading and acknowledging --------------------------------------------------------------------------------------


async def test_records_are_acquired_once_and_settled(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=3) as one:
        answer = await one.ask()
        data = part_of(answer)
        assert data is not None
        assert [(each.first_offset, each.last_offset, each.delivery_count) for each in data.acquired_records] == [
            (0, 2, 1)
        ]
        assert isinstance(data.records, bytes | memoryview)
        assert [read_head(batch).base_offset for batch in split_batches(data.records)] == [0, 1, 2]
        assert answer.acquisition_lock_timeout_ms == 30_000
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
            assert await two.fetch() == []
            assert await one.acknowledge((0, 1, ACCEPT), (2, 2, RELEASE)) == NONE
            assert await two.fetch() == [(2, 2, 2)]
            assert await two.fetch((2, 2, ACCEPT)) == []
            await send(one.client, one.topic)
            assert await one.fetch() == [(3, 3, 1)]


@pytest.mark.parametrize(
    ("size", "mode", "expected"),
    [
        (1, 0, [(0, 0), (1, 1), (2, 4), (5, 5), (6, 6)]),
        (2, 0, [(0, 1), (2, 4), (5, 6)]),
        (4, 0, [(0, 4), (5, 6)]),
        (6, 0, [(0, 5), (6, 6)]),
        (7, 0, [(0, 6)]),
        (1, 1, [(0, 6)]),
    ],
)
async def test_acquired_ranges_have_the_requested_batch_size(
    gateway: GatewayProcess, size: int, mode: int, expected: list[tuple[int, int]]
) -> None:
    """Acquired ranges follow the bounds of the written batches, as in Kafka's SharePartition.createBatches. Unlike
    Kafka, the gateway does not do so if the request limits the number of records.
    """
    async with scene(gateway) as one:
        for count in (1, 1, 3, 1, 1):
            await send(one.client, one.topic, *[b"value"] * count)
        told = await one.fetch(batch_size=size, share_acquire_mode=mode)
        assert told == [(first, last, 1) for first, last in expected]
        # One acknowledgement settles all of these records.
        assert await one.acknowledge((0, 6, ACCEPT)) == NONE
        assert await one.fetch(batch_size=size, share_acquire_mode=mode) == []


async def test_a_fetch_waits_for_records_and_for_those_that_are_released(gateway: GatewayProcess) -> None:
    async with scene(gateway) as one, reading(gateway, one.group_id, one.topic, one.topic_id) as two:
        assert await one.fetch() == []
        waiting = asyncio.create_task(one.fetch(max_wait_ms=20_000))
        await asyncio.sleep(0)
        await send(two.client, one.topic)
        assert await asyncio.wait_for(waiting, 10) == [(0, 0, 1)]
        waiting = asyncio.create_task(two.fetch(max_wait_ms=20_000))
        await asyncio.sleep(0)
        assert await one.acknowledge((0, 0, RELEASE)) == NONE
        assert await asyncio.wait_for(waiting, 10) == [(0, 0, 2)]


async def test_rejected_or_too_often_delivered_record_is_not_delivered_again(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one:
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.acknowledge((0, 0, REJECT), (1, 1, RELEASE)) == NONE
        for count in (2, 3, 4, 5):
            assert await one.fetch() == [(1, 1, count)]
            assert await one.acknowledge((1, 1, RELEASE)) == NONE
        assert await one.fetch() == []


async def test_more_partitions_are_read_and_forgotten(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        assert (await produce(one.client, (one.topic, 1), batch_of(b"value"))).error_code == NONE
        first = await one.ask(partitions=(0, 1), max_records=1)
        second = await one.ask(partitions=())
        acquired = [
            index
            for answer in (first, second)
            for index in (0, 1)
            if (part := part_of(answer, index)) is not None and part.acquired_records
        ]
        assert sorted(acquired) == [0, 1]
        await send(one.client, one.topic)
        forgotten = (ForgottenTopic(topic_id=one.topic_id, partitions=(0,)),)
        answer = await one.ask(partitions=(), forgotten_topics_data=forgotten)
        assert answer.responses == ()


@pytest.mark.parametrize(("mode", "expected"), [(0, [(0, 9, 1)]), (1, [(0, 3, 1)])])
async def test_batch_is_acquired_whole_or_up_to_the_record_limit(
    gateway: GatewayProcess, mode: int, expected: list[tuple[int, int, int]]
) -> None:
    async with scene(gateway) as one:
        await send(one.client, one.topic, *[b"value"] * 10)
        assert await one.fetch(max_records=4, share_acquire_mode=mode) == expected


async def test_aborted_records_are_not_delivered_to_read_committed_groups(gateway: GatewayProcess) -> None:
    async with scene(gateway, share_isolation_level="read_committed") as one:
        producer = await producer_of(one.client)
        partition = (one.topic, 0)
        for committed in (False, True):
            assert await producer.add(partition) == [NONE]
            assert (await producer.send(partition, b"value")).error_code == NONE
            assert await one.fetch() == []
            assert await producer.end(committed=committed) == NONE
        assert await one.fetch(max_wait_ms=5_000) == [(2, 2, 1)]
        assert await one.acknowledge((2, 2, ACCEPT)) == NONE
        assert await one.fetch() == []


async def test_aborted_records_beyond_the_window_are_skipped(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1, share_isolation_level="read_committed") as one:
        producer = await producer_of(one.client)
        partition = (one.topic, 0)
        assert await producer.add(partition) == [NONE]
        for _ in range(25):
            assert (await producer.send(partition, *[b"value"] * 100)).error_code == NONE
        assert await producer.end(committed=False) == NONE
        await send(one.client, one.topic)
        assert await one.fetch() == [(0, 0, 1)]
        # While the first record stays acquired, the window of acquirable records ends inside the gap of the log.
        assert await one.fetch(max_wait_ms=100) == []
        assert await one.fetch((0, 0, ACCEPT), max_wait_ms=5_000) == [(2_502, 2_502, 1)]


async def test_acknowledgement_of_records_of_another_member_is_refused(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one, reading(gateway, one.group_id, one.topic, one.topic_id) as two:
        assert await one.fetch() == [(0, 1, 1)]
        assert await two.fetch() == []
        assert await two.acknowledge((0, 0, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
        assert await one.acknowledge((0, 5, ACCEPT)) == ErrorCode.INVALID_REQUEST
        assert await one.acknowledge((1, 0, ACCEPT)) == ErrorCode.INVALID_REQUEST
        assert await one.acknowledge((0, 1, 9)) == ErrorCode.INVALID_REQUEST
        assert await one.acknowledge((0, 1, RENEW)) == ErrorCode.INVALID_REQUEST
        assert await one.acknowledge((0, 1, RENEW), renews=True) == NONE
        # All limits of the request must be 0, except the batch size.
        limits: dict[str, Any] = {"is_renew_ack": True, "max_bytes": 0, "max_records": 0, "min_bytes": 0}
        assert await one.fetch((0, 1, RENEW), **limits) == []
        await one.ask((0, 1, RENEW), **limits, max_wait_ms=1, code=ErrorCode.INVALID_REQUEST)
        assert await one.acknowledge((0, 1, ACCEPT)) == NONE


# --- sessions -------------------------------------------------------------------------------------------------------


async def test_share_session_epochs_are_checked(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        assert await one.acknowledge((0, 0, ACCEPT), epoch=3) == ErrorCode.SHARE_SESSION_NOT_FOUND
        assert await one.acknowledge((0, 0, ACCEPT), epoch=0) == ErrorCode.INVALID_SHARE_SESSION_EPOCH
        await one.ask((0, 0, ACCEPT), code=ErrorCode.INVALID_REQUEST)
        await one.ask(share_session_epoch=4, code=ErrorCode.SHARE_SESSION_NOT_FOUND)
        assert await one.fetch() == [(0, 0, 1)]
        await one.ask(share_session_epoch=3, code=ErrorCode.INVALID_SHARE_SESSION_EPOCH)
        assert await one.acknowledge((0, 0, ACCEPT), epoch=2) == ErrorCode.INVALID_SHARE_SESSION_EPOCH
        await one.ask(is_renew_ack=True, code=ErrorCode.INVALID_REQUEST)
        assert await one.fetch() == []


async def test_end_of_a_session_releases_unacknowledged_records(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one, reading(gateway, one.group_id, one.topic, one.topic_id) as two:
        assert await one.fetch() == [(0, 1, 1)]
        answer = await one.ask((0, 0, ACCEPT), share_session_epoch=-1)
        part = part_of(answer)
        assert part is not None
        assert (part.acknowledge_error_code, part.acquired_records) == (NONE, ())
        assert await two.fetch() == [(1, 1, 2)]
        await one.ask(share_session_epoch=1, code=ErrorCode.SHARE_SESSION_NOT_FOUND)


async def test_a_connection_that_closes_ends_its_sessions(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
            assert await two.fetch() == [(0, 0, 1)]
            waiting = asyncio.create_task(one.fetch(max_wait_ms=20_000))
            await asyncio.sleep(0)
        assert await asyncio.wait_for(waiting, 10) == [(0, 0, 2)]


async def test_record_of_disconnected_consumers_is_archived_at_the_delivery_limit(
    gateway: GatewayProcess,
) -> None:
    async with scene(gateway, records=1) as one:
        for count in range(1, 6):
            async with reading(gateway, one.group_id, one.topic, one.topic_id) as other:
                assert await other.fetch(max_wait_ms=5_000) == [(0, 0, count)]
        await send(one.client, one.topic)
        assert await one.fetch(max_wait_ms=5_000) == [(1, 1, 1)]


async def test_new_session_replaces_the_previous_one(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        assert await one.fetch() == [(0, 0, 1)]
        one.session_epoch = 0
        assert await one.fetch() == [(0, 0, 2)]


async def test_a_member_id_of_any_form_joins_and_fetches(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        one.member_id, one.member_epoch = "a-member/1", 0
        await one.join()
        assert await one.fetch() == [(0, 0, 1)]
        one.member_id, one.session_epoch = "x" * 37, 0
        await one.ask(code=ErrorCode.INVALID_REQUEST)


async def test_acknowledgement_beyond_the_read_records_is_an_invalid_request(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one:
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.acknowledge((0, 2, ACCEPT)) == ErrorCode.INVALID_REQUEST
        assert await one.acknowledge((0, 1, ACCEPT)) == NONE


# --- what lasts -----------------------------------------------------------------------------------------------------


async def test_acknowledged_records_stay_settled_after_a_kill(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({})
    async with scene(gateway, records=4) as one:
        assert await one.fetch() == [(0, 3, 1)]
        assert await one.acknowledge((0, 0, ACCEPT), (2, 2, REJECT)) == NONE
        gateway.kill()
    gateway.restart()
    async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
        assert await two.fetch() == [(1, 1, 2), (3, 3, 2)]
        assert await two.acknowledge((1, 1, ACCEPT), (3, 3, ACCEPT)) == NONE
        assert await two.fetch() == []


async def test_acquisition_locks_expire(gateway_factory: GatewayFactory) -> None:
    configs = {"group.share.min.record.lock.duration.ms": "1000", "group.share.record.lock.duration.ms": "1000"}
    gateway = gateway_factory(configs)
    async with scene(gateway, records=1) as one:
        assert await one.fetch() == [(0, 0, 1)]
        assert await one.fetch(max_wait_ms=20_000) == [(0, 0, 2)]
        assert await one.acknowledge((0, 0, ACCEPT)) == NONE


# --- offsets, and other groups --------------------------------------------------------------------------------------


async def test_a_group_without_settings_begins_at_the_end(gateway: GatewayProcess) -> None:
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("topic")
        topic_id = await create_topic(client, topic, 1)
        await send(client, topic)
        reader = Reader(client, fresh("share"), topic, topic_id)
        await reader.join()
        assert await reader.fetch() == []
        await send(client, topic)
        assert await reader.fetch() == [(1, 1, 1)]


async def test_share_group_begins_at_its_auto_offset_reset(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2, share_auto_offset_reset="by_duration:PT1H") as one:
        assert await one.fetch() == [(0, 1, 1)]
    async with await WireClient.connect(gateway.bootstrap) as client:
        for wrong in ("by_duration:", "by_duration:PT", "by_duration:1h", "nowhere"):
            codes = await configure(client, one.group_id, share_auto_offset_reset=wrong)
            assert codes == [ErrorCode.INVALID_CONFIG]


async def test_share_session_bounds_its_partitions(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        assert await one.fetch() == [(0, 0, 1)]
        for begin in (0, 10_000):
            await one.ask(partitions=range(begin, begin + 10_000), max_records=0)
        await one.ask(partitions=range(20_000, 20_001), max_records=0, code=ErrorCode.INVALID_REQUEST)


async def test_offsets_are_described_altered_and_deleted(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=4) as one:
        client, group_id, topic = one.client, one.group_id, one.topic

        async def described() -> list[tuple[int, int, int]]:
            group = DescribeShareGroupOffsetsRequestGroup(group_id=group_id, topics=None)
            answer = await client.send(DescribeShareGroupOffsetsRequest(groups=(group,)), 1)
            (found,) = answer.groups
            assert found.error_code == NONE
            return [
                (part.partition_index, part.start_offset, part.lag) for each in found.topics for part in each.partitions
            ]

        async def alter(offset: int) -> int:
            part = AlterShareGroupOffsetsRequestPartition(partition_index=0, start_offset=offset)
            asked = AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=(part,))
            answer = await client.send(AlterShareGroupOffsetsRequest(group_id=group_id, topics=(asked,)), 0)
            return int(answer.error_code)

        async def delete() -> tuple[int, list[int]]:
            asked = DeleteShareGroupOffsetsRequestTopic(topic_name=topic)
            answer = await client.send(DeleteShareGroupOffsetsRequest(group_id=group_id, topics=(asked,)), 0)
            return int(answer.error_code), [int(each.error_code) for each in answer.responses]

        assert await described() == []
        assert await one.fetch() == [(0, 3, 1)]
        assert await one.acknowledge((0, 0, ACCEPT), (2, 2, ACCEPT)) == NONE
        assert await described() == [(0, 1, 2)]
        assert await alter(0) == ErrorCode.NON_EMPTY_GROUP
        assert await delete() == (ErrorCode.NON_EMPTY_GROUP, [])
        await one.leave()
        assert await alter(2) == NONE
        assert await described() == [(0, 2, 2)]
        async with reading(gateway, group_id, topic, one.topic_id) as two:
            assert await two.fetch() == [(2, 3, 1)]
            await two.leave()
        assert await delete() == (NONE, [NONE])
        assert await described() == []
        assert await delete() == (NONE, [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION])
        # Changing the offsets of an unknown share group creates the group. For a group of another type the request is
        # refused.
        group_id = fresh("nobody")
        assert await alter(1) == NONE
        assert await described() == [(0, 1, 3)]
        group_id = fresh("consumer")
        joining = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id="member",
            member_epoch=0,
            rebalance_timeout_ms=5_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        assert (await client.send(joining, 1)).error_code == NONE
        assert await alter(1) == ErrorCode.GROUP_ID_NOT_FOUND
        assert await delete() == (ErrorCode.GROUP_ID_NOT_FOUND, [])


async def test_a_share_group_is_listed_described_and_deleted(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        client, group_id = one.client, one.group_id
        assert await one.fetch() == [(0, 0, 1)]
        listed = await client.send(ListGroupsRequest(types_filter=("share",)), 5)
        (mine,) = [each for each in listed.groups if each.group_id == group_id]
        assert (mine.group_type, mine.group_state) == ("share", "Stable")
        answer = await client.send(ShareGroupDescribeRequest(group_ids=(group_id,)), 1)
        (shown,) = answer.groups
        assert [member.member_id for member in shown.members] == [one.member_id]
        delete = DeleteGroupsRequest(groups_names=(group_id,))
        assert (await client.send(delete, 2)).results[0].error_code == ErrorCode.NON_EMPTY_GROUP
        await one.leave()
        assert (await client.send(delete, 2)).results[0].error_code == NONE
        assert await one.acknowledge((0, 0, ACCEPT)) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        part = part_of(await one.ask())
        assert part is not None
        assert part.error_code == ErrorCode.GROUP_ID_NOT_FOUND


async def test_recreated_share_group_has_no_earlier_state(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one:
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.acknowledge((0, 1, ACCEPT)) == NONE
        await one.leave()
        delete = DeleteGroupsRequest(groups_names=(one.group_id,))
        assert (await one.client.send(delete, 2)).results[0].error_code == NONE
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
            assert await two.fetch() == [(0, 1, 1)]


async def test_unknown_topic_fails_alone(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=1) as one:
        elsewhere = FetchTopic(topic_id=uuid.uuid4(), partitions=(FetchPartition(partition_index=0),))
        mine = FetchTopic(
            topic_id=one.topic_id,
            partitions=(FetchPartition(partition_index=0), FetchPartition(partition_index=7)),
        )
        answer = await one.ask(topics=(elsewhere, mine))
        codes = {
            (topic.topic_id, part.partition_index): part.error_code
            for topic in answer.responses
            for part in topic.partitions
        }
        assert codes == {
            (elsewhere.topic_id, 0): ErrorCode.UNKNOWN_TOPIC_ID,
            (one.topic_id, 0): NONE,
            (one.topic_id, 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        }
        (part,) = [each for topic in answer.responses for each in topic.partitions if each.acquired_records]
        assert (part.partition_index, part.error_code) == (0, NONE)
