"""A client may send its next request before the last answer arrives: each request sees the effects of earlier ones."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from tests.frames.members import Member, create_topic, fresh, join_all, member, settle
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import until_blocked
from tests.wire import WireClient

ROUNDS = 20


def commit_of(one: Member, topic: str, offset: int) -> OffsetCommitRequest:
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    return OffsetCommitRequest(
        group_id=one.group_id,
        generation_id_or_member_epoch=one.generation_id,
        member_id=one.member_id,
        topics=(OffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
    )


def commit_to(one: Member, *topics: tuple[str, int, int]) -> OffsetCommitRequest:
    """Return an OffsetCommit request for each given (topic, partition, offset)."""
    return OffsetCommitRequest(
        group_id=one.group_id,
        generation_id_or_member_epoch=one.generation_id,
        member_id=one.member_id,
        topics=tuple(
            OffsetCommitRequestTopic(
                name=topic,
                partitions=(OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset),),
            )
            for topic, partition, offset in topics
        ),
    )


def everything_of(group_id: str) -> OffsetFetchRequest:
    return OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=group_id, topics=None),))


async def test_commit_counts_if_the_join_behind_it_ends_its_generation(gateway: GatewayProcess) -> None:
    """librdkafka commits when it revokes, and joins again without waiting for the answer."""
    topic, group_id = fresh("behind"), fresh("behind")
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic)
        await join_all(one)
        for offset in range(1, ROUNDS):
            await settle(one)
            committed = one.client.send_nowait(commit_of(one, topic, offset), 9)
            joined = one.join_nowait()
            answer = await asyncio.wait_for(committed, 10)
            assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE
            assert (await joined).error_code == ErrorCode.NONE
            stored = await one.client.send(everything_of(group_id), 8)
            assert stored.groups[0].topics[0].partitions[0].committed_offset == offset


async def test_commit_counts_if_its_member_leaves_at_once(gateway: GatewayProcess) -> None:
    """The member leaves without waiting for either answer."""
    topic = fresh("leaving")
    async with await WireClient.connect(gateway.bootstrap) as onlooker:
        await create_topic(onlooker, topic)
        for offset in range(1, ROUNDS):
            group_id = fresh("leaving")
            client = await WireClient.connect(gateway.bootstrap)
            one = Member(client, group_id)
            await join_all(one)
            await settle(one)
            committed = client.send_nowait(commit_of(one, topic, offset), 9)
            left = client.send_nowait(
                LeaveGroupRequest(group_id=group_id, members=(MemberIdentity(member_id=one.member_id),)), 5
            )
            assert (await asyncio.wait_for(committed, 10)).topics[0].partitions[0].error_code == ErrorCode.NONE
            assert (await asyncio.wait_for(left, 10)).error_code == ErrorCode.NONE
            await client.close()
            stored = await onlooker.send(everything_of(group_id), 8)
            assert stored.groups[0].topics[0].partitions[0].committed_offset == offset


async def test_offset_fetch_behind_a_commit_sees_the_offset(gateway: GatewayProcess) -> None:
    topic, group_id = fresh("read"), fresh("read")
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic)
        await join_all(one)
        await settle(one)
        for offset in range(1, ROUNDS):
            one.client.send_nowait(commit_of(one, topic, offset), 9)
            stored = await one.client.send(everything_of(group_id), 8)
            assert stored.groups[0].topics[0].partitions[0].committed_offset == offset


async def test_pipelined_commits_share_transactions_and_are_answered_in_order(gateway: GatewayProcess) -> None:
    """The first commit is in Postgres while the others arrive. Two transactions suffice for all these commits, although
    heartbeats arrive between them.
    """
    topic, group_id = fresh("shared"), fresh("shared")
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic, ROUNDS)
        await join_all(one)
        await settle(one)
        alive = HeartbeatRequest(group_id=group_id, generation_id=one.generation_id, member_id=one.member_id)
        database = await asyncpg.connect(gateway.database_url)
        try:
            async with database.transaction():
                await database.execute("select from sluice.consumer_group where group_id = $1 for update", group_id)
                answered: list[int] = []
                waiting: list[asyncio.Future[Any]] = []
                for partition in range(ROUNDS):
                    committed = one.client.send_nowait(commit_to(one, (topic, partition, partition)), 9)
                    committed.add_done_callback(lambda _, number=2 * partition: answered.append(number))
                    beaten = one.client.send_nowait(alive, 4)
                    beaten.add_done_callback(lambda _, number=2 * partition + 1: answered.append(number))
                    waiting += [committed, beaten]
                # The gateway answers another connection's request only after it has read all the commits.
                await until_blocked(database)
                async with await WireClient.connect(gateway.bootstrap) as other:
                    await other.send(everything_of(group_id), 8)
                assert not answered
            await asyncio.wait_for(asyncio.gather(*waiting), 10)
            assert answered == sorted(answered)
            transactions = await database.fetchval(
                "select count(distinct xmin::text) from sluice.committed_offset where group_id = $1", group_id
            )
        finally:
            await database.close()
        assert transactions <= 3, "one that was under way, and what was read behind it"
        stored = await one.client.send(everything_of(group_id), 8)
        assert {each.partition_index: each.committed_offset for each in stored.groups[0].topics[0].partitions} == {
            partition: partition for partition in range(ROUNDS)
        }


async def test_later_of_two_pipelined_commits_wins_if_the_first_is_slower(
    gateway: GatewayProcess,
) -> None:
    topic, group_id = fresh("overtaken"), fresh("overtaken")
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic)
        await join_all(one)
        await settle(one)
        for offset in range(1, 2 * ROUNDS, 2):
            first = one.client.send_nowait(commit_to(one, (fresh("absent"), 0, 1), (topic, 0, offset)), 9)
            second = one.client.send_nowait(commit_to(one, (topic, 0, offset + 1)), 9)
            codes = [each.partitions[0].error_code for each in (await asyncio.wait_for(first, 10)).topics]
            assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NONE]
            assert (await asyncio.wait_for(second, 10)).topics[0].partitions[0].error_code == ErrorCode.NONE
            stored = await one.client.send(everything_of(group_id), 8)
            assert stored.groups[0].topics[0].partitions[0].committed_offset == offset + 1


async def test_offset_fetch_does_not_see_a_commit_behind_it(gateway: GatewayProcess) -> None:
    topic, group_id = fresh("unseen"), fresh("unseen")
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic)
        await join_all(one)
        await settle(one)
        for offset in range(1, ROUNDS):
            before = one.client.send_nowait(commit_of(one, topic, offset), 9)
            fetched = one.client.send_nowait(everything_of(group_id), 8)
            after = one.client.send_nowait(commit_of(one, topic, offset + 1000), 9)
            stored = await asyncio.wait_for(fetched, 10)
            assert stored.groups[0].topics[0].partitions[0].committed_offset == offset
            for answer in (await before, await after):
                assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE


async def test_metadata_behind_a_creation_shows_the_topic(gateway: GatewayProcess) -> None:
    async with await WireClient.connect(gateway.bootstrap) as client:
        for _ in range(ROUNDS):
            name = fresh("created")
            topic = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            client.send_nowait(CreateTopicsRequest(topics=(topic,), timeout_ms=10_000), 7)
            asked = MetadataRequest(topics=(MetadataRequestTopic(name=name),), allow_auto_topic_creation=False)
            metadata = await client.send(asked, 12)
            assert metadata.topics[0].error_code == ErrorCode.NONE
