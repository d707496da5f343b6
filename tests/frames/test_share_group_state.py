"""The state of share groups as brokers tell each other (KIP-932), on the wire: it is the one that members read by."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from protocol.errors import ErrorCode
from protocol.messages import delete_share_group_state as deleting
from protocol.messages import initialize_share_group_state as initializing
from protocol.messages import read_share_group_state as reading_state
from protocol.messages import read_share_group_state_summary as summing
from protocol.messages import write_share_group_state as writing
from protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from tests.frames.members import create_topic, fresh
from tests.frames.test_handoff import configure
from tests.frames.test_share_groups import ACCEPT, NONE, RELEASE, Reader, batch_of, part_of, reading, scene
from tests.frames.transactions import produce
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

AVAILABLE, ACKNOWLEDGED, ARCHIVED = 0, 2, 4
Batch = tuple[int, int, int, int]
"""First and last offset, state, delivery count."""
State = tuple[int, int, list[Batch]]
"""State epoch, start offset, batches."""


@dataclass
class Kept:
    """The state of partition 0 of a group's topic, asked for by one client."""

    client: WireClient
    group_id: str
    topic_id: UUID
    index: int = 0

    async def initialize(self, state_epoch: int, start_offset: int) -> int:
        part = initializing.PartitionData(partition=self.index, state_epoch=state_epoch, start_offset=start_offset)
        topic = initializing.InitializeStateData(topic_id=self.topic_id, partitions=(part,))
        request = initializing.InitializeShareGroupStateRequest(group_id=self.group_id, topics=(topic,))
        return self.code_of(await self.client.send(request, 0))

    async def write(
        self, *batches: Batch, start_offset: int = -1, state_epoch: int = 0, leader_epoch: int = 0, version: int = 1
    ) -> int:
        part = writing.PartitionData(
            partition=self.index,
            state_epoch=state_epoch,
            leader_epoch=leader_epoch,
            start_offset=start_offset,
            state_batches=tuple(
                writing.StateBatch(first_offset=first, last_offset=last, delivery_state=state, delivery_count=count)
                for first, last, state, count in batches
            ),
        )
        topic = writing.WriteStateData(topic_id=self.topic_id, partitions=(part,))
        request = writing.WriteShareGroupStateRequest(group_id=self.group_id, topics=(topic,))
        return self.code_of(await self.client.send(request, version))

    async def read(self, leader_epoch: int = 0) -> State | int:
        """Or the error."""
        part = reading_state.PartitionData(partition=self.index, leader_epoch=leader_epoch)
        topic = reading_state.ReadStateData(topic_id=self.topic_id, partitions=(part,))
        request = reading_state.ReadShareGroupStateRequest(group_id=self.group_id, topics=(topic,))
        answer = await self.client.send(request, 0)
        found = answer.results[0].partitions[0]
        if found.error_code:
            return self.code_of(answer)
        return (
            found.state_epoch,
            found.start_offset,
            [
                (each.first_offset, each.last_offset, each.delivery_state, each.delivery_count)
                for each in found.state_batches
            ],
        )

    async def summary(self, version: int = 1) -> tuple[int, int, int, int] | int:
        """State epoch, leader epoch, start offset, how many are settled behind it; or the error."""
        part = summing.PartitionData(partition=self.index, leader_epoch=0)
        topic = summing.ReadStateSummaryData(topic_id=self.topic_id, partitions=(part,))
        request = summing.ReadShareGroupStateSummaryRequest(group_id=self.group_id, topics=(topic,))
        answer = await self.client.send(request, version)
        found = answer.results[0].partitions[0]
        if found.error_code:
            return self.code_of(answer)
        return found.state_epoch, found.leader_epoch, found.start_offset, found.delivery_complete_count

    async def delete(self) -> int:
        part = deleting.PartitionData(partition=self.index)
        topic = deleting.DeleteStateData(topic_id=self.topic_id, partitions=(part,))
        request = deleting.DeleteShareGroupStateRequest(group_id=self.group_id, topics=(topic,))
        return self.code_of(await self.client.send(request, 0))

    def code_of(self, answer: Any) -> int:
        """What is said of the partition that was asked for, and of nothing else."""
        (topic,) = answer.results
        (part,) = topic.partitions
        assert (topic.topic_id, part.partition) == (self.topic_id, self.index)
        assert (part.error_message is not None) is (part.error_code != NONE)
        return int(part.error_code)


def state_of(reader: Reader) -> Kept:
    return Kept(reader.client, reader.group_id, reader.topic_id)


@asynccontextmanager
async def nobody(
    gateway: GatewayProcess, records: int = 0, reset: str = "earliest"
) -> AsyncGenerator[tuple[Kept, str]]:
    """A group that nobody has joined or begun, and records in partition 0 of a topic, whose name is given."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        group_id, topic = fresh("share"), fresh("topic")
        topic_id = await create_topic(client, topic, 2)
        assert await configure(client, group_id, share_auto_offset_reset=reset) == [NONE]
        if records:
            assert (await produce(client, (topic, 0), batch_of(*[b"value"] * records))).error_code == NONE
        yield Kept(client, group_id, topic_id), topic


async def test_members_begin_where_the_state_was_initialized(gateway: GatewayProcess) -> None:
    async with nobody(gateway, records=5) as (state, topic):
        assert await state.summary() == (0, 0, -1, -1)
        assert await state.read() == ErrorCode.INVALID_REQUEST
        assert await state.write() == ErrorCode.INVALID_REQUEST
        assert await state.initialize(3, 2) == NONE
        assert await state.read() == (3, 2, [])
        assert await state.summary() == (3, 0, 2, 0)
        assert await state.summary(version=0) == (3, 0, 2, -1)
        async with reading(gateway, state.group_id, topic, state.topic_id) as one:
            assert await one.fetch() == [(2, 4, 1)]
            # Anew, while a member has them.
            assert await state.initialize(4, 1) == NONE
            assert await one.fetch() == [(1, 4, 1)]
            # What was acquired before is nobody's any more.
            assert await state.initialize(4, 1) == NONE
            assert await one.acknowledge((1, 4, ACCEPT)) == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert await one.fetch() == [(1, 4, 1)]
            assert await one.acknowledge((1, 4, ACCEPT)) == NONE
        assert await state.summary() == (4, 0, 5, 0)


async def test_who_initializes_no_offset_leaves_it_to_the_first_reader(gateway: GatewayProcess) -> None:
    async with nobody(gateway, records=3, reset="latest") as (state, topic):
        assert await state.initialize(7, -1) == NONE
        assert await state.read() == (7, -1, [])
        assert await state.summary() == (7, 0, -1, -1)
        async with reading(gateway, state.group_id, topic, state.topic_id) as one:
            assert await one.fetch() == []
        assert await state.read() == (7, 3, [])


async def test_what_was_acknowledged_is_read(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=6) as one:
        state = state_of(one)
        assert await one.fetch() == [(0, 5, 1)]
        assert await one.acknowledge((0, 0, ACCEPT), (2, 2, RELEASE), (3, 4, ACCEPT), (5, 5, 3)) == NONE
        expected = [(1, 2, AVAILABLE, 1), (3, 4, ACKNOWLEDGED, 1), (5, 5, ARCHIVED, 1)]
        assert await state.read() == (0, 1, expected)
        assert await state.summary() == (0, 0, 1, 3)
        # Reading has taken nothing from anybody.
        assert await one.acknowledge((1, 1, ACCEPT)) == NONE
        assert await state.read() == (0, 2, [(2, 2, AVAILABLE, 1), *expected[1:]])


async def test_what_is_written_is_what_members_see(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=10) as one:
        state = state_of(one)
        assert await state.initialize(1, 0) == NONE
        assert (
            await state.write(
                (2, 3, ACKNOWLEDGED, 1), (5, 5, AVAILABLE, 2), (7, 8, ARCHIVED, 5), start_offset=1, state_epoch=1
            )
            == NONE
        )
        batches = [(2, 3, ACKNOWLEDGED, 1), (5, 5, AVAILABLE, 2), (7, 8, ARCHIVED, 5)]
        assert await state.read() == (1, 1, batches)
        assert await state.summary() == (1, 0, 1, 4)
        assert await one.fetch() == [(1, 1, 1), (4, 4, 1), (5, 5, 3), (6, 6, 1), (9, 9, 1)]
        assert await one.acknowledge((1, 1, ACCEPT), (4, 6, ACCEPT), (9, 9, ACCEPT)) == NONE
        assert await state.read() == (1, 10, [])


async def test_what_is_written_is_one_with_what_is_known(gateway: GatewayProcess) -> None:
    """Of each record what was delivered more often, or is further: upstream's PersisterStateBatchCombiner."""
    async with scene(gateway) as one:
        state = state_of(one)
        assert await state.initialize(-1, 100) == NONE
        assert await state.write((100, 109, AVAILABLE, 2), version=0) == NONE
        assert (
            await state.write((102, 103, ACKNOWLEDGED, 2), (105, 106, ACKNOWLEDGED, 1), (108, 112, AVAILABLE, 3))
            == NONE
        )
        assert await state.read() == (
            -1,
            100,
            [(100, 101, AVAILABLE, 2), (102, 103, ACKNOWLEDGED, 2), (104, 107, AVAILABLE, 2), (108, 112, AVAILABLE, 3)],
        )
        assert await state.write(start_offset=109) == NONE
        assert await state.read() == (-1, 109, [(109, 112, AVAILABLE, 3)])


async def test_what_a_member_has_acquired_is_nobodys_once_the_state_is_written(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=4) as one:
        state = state_of(one)
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
            assert await one.fetch() == [(0, 3, 1)]
            assert await two.fetch() == []
            assert await state.write((1, 1, ACKNOWLEDGED, 1)) == NONE
            assert await one.acknowledge((0, 0, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
            assert await two.fetch() == [(0, 0, 2), (2, 3, 2)]
            assert await one.fetch() == []
            assert await one.acknowledge((2, 3, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
            assert await two.acknowledge((0, 0, ACCEPT), (2, 3, ACCEPT)) == NONE
        assert await state.read() == (0, 4, [])


async def test_who_waits_for_records_is_woken_by_a_state_that_gives_some_back(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one:
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.acknowledge((0, 1, ACCEPT)) == NONE
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as two:
            assert await two.fetch() == []
            waiting = asyncio.create_task(two.ask(max_wait_ms=30_000))
            state = state_of(one)
            assert await state.write(start_offset=0) == NONE
            part = part_of(await waiting)
            assert part is not None
            assert [(each.first_offset, each.last_offset) for each in part.acquired_records] == [(0, 1)]


async def test_older_epochs_are_fenced(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=3) as one:
        state = state_of(one)
        assert await state.initialize(5, 0) == NONE
        assert await state.initialize(4, 1) == ErrorCode.FENCED_STATE_EPOCH
        assert await state.write(start_offset=1, state_epoch=4) == ErrorCode.FENCED_STATE_EPOCH
        assert await state.read(2) == (5, 0, [])
        assert await state.read(1) == ErrorCode.FENCED_LEADER_EPOCH
        assert await state.read(-1) == ErrorCode.FENCED_LEADER_EPOCH
        assert await state.write(start_offset=1, state_epoch=5, leader_epoch=1) == ErrorCode.FENCED_LEADER_EPOCH
        assert await state.summary() == (5, 2, 0, 0)
        assert await state.write(start_offset=1, state_epoch=5, leader_epoch=2) == NONE
        assert await state.write(start_offset=2, state_epoch=-1, leader_epoch=-1) == NONE
        # As high as before or higher: writing raises neither.
        assert await state.write((2, 2, AVAILABLE, 1), state_epoch=9, leader_epoch=9) == NONE
        assert await state.summary() == (5, 2, 2, 0)
        assert await state.initialize(5, 0) == NONE
        assert await state.summary() == (5, 0, 0, 0)


async def test_a_leader_of_a_new_epoch_takes_over_by_reading(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=2) as one:
        state = state_of(one)
        assert await one.fetch() == [(0, 1, 1)]
        assert await state.read(0) == (0, 0, [])
        assert await one.acknowledge((0, 0, ACCEPT)) == NONE
        assert await state.read(1) == (0, 1, [(1, 1, AVAILABLE, 1)])
        assert await one.fetch() == [(1, 1, 2)]
        assert await state.read(2) == (0, 1, [(1, 1, AVAILABLE, 1)])
        assert await one.acknowledge((1, 1, ACCEPT)) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await one.fetch() == [(1, 1, 2)]
        assert await state.read(2) == (0, 1, [(1, 1, AVAILABLE, 1)])
        assert await one.acknowledge((1, 1, ACCEPT)) == NONE


async def test_a_state_that_was_reset_is_of_a_new_epoch(gateway: GatewayProcess) -> None:
    async with nobody(gateway, records=3) as (state, topic):
        assert await state.initialize(2, 0) == NONE
        part = AlterShareGroupOffsetsRequestPartition(partition_index=0, start_offset=1)
        asked = AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=(part,))
        request = AlterShareGroupOffsetsRequest(group_id=state.group_id, topics=(asked,))
        assert (await state.client.send(request, 0)).error_code == NONE
        assert await state.read() == (3, 1, [])
        assert await state.write(start_offset=2, state_epoch=2) == ErrorCode.FENCED_STATE_EPOCH


async def test_a_state_that_is_deleted_begins_anew(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=3) as one:
        state = state_of(one)
        assert await state.delete() == NONE
        assert await one.fetch() == [(0, 2, 1)]
        assert await one.acknowledge((0, 1, ACCEPT)) == NONE
        assert await state.delete() == NONE
        assert await state.read() == ErrorCode.INVALID_REQUEST
        assert await state.summary() == (0, 0, -1, -1)
        assert await one.acknowledge((2, 2, ACCEPT)) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await one.fetch() == [(0, 2, 1)]


async def test_what_cannot_be_is_refused(gateway: GatewayProcess) -> None:
    async with nobody(gateway) as (state, _):
        for where, code in (
            (Kept(state.client, state.group_id, uuid.uuid4()), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (Kept(state.client, state.group_id, state.topic_id, 2), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (Kept(state.client, state.group_id, state.topic_id, -1), ErrorCode.INVALID_REQUEST),
        ):
            assert await where.initialize(0, 0) == code
            assert await where.read() == code
            assert await where.write() == code
            assert await where.summary() == code
            assert await where.delete() == code
        assert await state.initialize(0, -2) == ErrorCode.INVALID_REQUEST
        assert await state.initialize(0, 0) == NONE
        for batch in (
            (1, 0, AVAILABLE, 1),
            (-1, 0, AVAILABLE, 1),
            (0, 2**63 - 1, ACKNOWLEDGED, 1),
            (0, 1, 1, 1),
            (0, 1, 3, 1),
            (0, 1, AVAILABLE, -1),
            (0, 1, AVAILABLE, 2**15 - 1),
        ):
            assert await state.write(batch) == ErrorCode.INVALID_REQUEST, batch
        assert await state.write(start_offset=-2) == ErrorCode.INVALID_REQUEST
        # As far as offsets and counts go.
        assert await state.write((0, 1, AVAILABLE, 2**15 - 2), (2, 2**63 - 2, ARCHIVED, 1)) == NONE
        assert await state.summary() == (0, 0, 0, 2**31 - 1)
        assert await state.write((0, 1, ACKNOWLEDGED, 2**15 - 2)) == NONE
        assert await state.summary() == (0, 0, 2**63 - 1, 0)


async def test_a_group_of_another_type_has_no_such_state(gateway: GatewayProcess) -> None:
    async with nobody(gateway) as (state, topic):
        joining = ConsumerGroupHeartbeatRequest(
            group_id=state.group_id,
            member_id="member",
            member_epoch=0,
            rebalance_timeout_ms=5_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        assert (await state.client.send(joining, 1)).error_code == NONE
        assert await state.initialize(0, 0) == ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize("group_id", ["", "group"])
async def test_who_names_no_partition_is_answered_nothing(gateway: GatewayProcess, group_id: str) -> None:
    topic_id = uuid.uuid4()
    async with await WireClient.connect(gateway.bootstrap) as client:
        for request, version in (
            (
                initializing.InitializeShareGroupStateRequest(
                    group_id=group_id, topics=(initializing.InitializeStateData(topic_id=topic_id),)
                ),
                0,
            ),
            (
                reading_state.ReadShareGroupStateRequest(
                    group_id=group_id, topics=(reading_state.ReadStateData(topic_id=topic_id),)
                ),
                0,
            ),
            (
                writing.WriteShareGroupStateRequest(
                    group_id=group_id, topics=(writing.WriteStateData(topic_id=topic_id),)
                ),
                1,
            ),
            (
                deleting.DeleteShareGroupStateRequest(
                    group_id=group_id, topics=(deleting.DeleteStateData(topic_id=topic_id),)
                ),
                0,
            ),
            (
                summing.ReadShareGroupStateSummaryRequest(
                    group_id=group_id, topics=(summing.ReadStateSummaryData(topic_id=topic_id),)
                ),
                1,
            ),
        ):
            assert (await client.send(request, version)).results == ()


async def test_the_coordinator_of_a_share_partition_is_found(gateway: GatewayProcess) -> None:
    async with nobody(gateway) as (state, _):
        encoded = base64.urlsafe_b64encode(state.topic_id.bytes).rstrip(b"=").decode()
        good = f"{state.group_id}:{encoded}:0"
        bad = ("", "group", f"group:{encoded}", f":{encoded}:0", "group:topic:0", f"group:{encoded}:first", f"{good}:0")
        answer = await state.client.send(FindCoordinatorRequest(key_type=2, coordinator_keys=(good, *bad)), 6)
        found, *refused = answer.coordinators
        assert (found.key, found.error_code, f"{found.host}:{found.port}") == (good, NONE, gateway.bootstrap)
        assert [each.error_code for each in refused] == [ErrorCode.INVALID_REQUEST] * len(bad)
        answer = await state.client.send(FindCoordinatorRequest(key_type=2, coordinator_keys=(good,)), 5)
        assert answer.coordinators[0].error_code == ErrorCode.INVALID_REQUEST
