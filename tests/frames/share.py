"""Members of share groups in frames."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from protocol.errors import ErrorCode
from protocol.messages.share_acknowledge import (
    AcknowledgePartition,
    AcknowledgeTopic,
    ShareAcknowledgeRequest,
)
from protocol.messages.share_fetch import (
    AcknowledgementBatch,
    FetchPartition,
    FetchTopic,
    PartitionData,
    ShareFetchRequest,
    ShareFetchResponse,
)
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.records import Record, build_batch
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.frames.transactions import produce
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

NONE = ErrorCode.NONE
ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
Acknowledged = tuple[int, int, int]
"""First offset, last offset and acknowledgement type."""


def member_name() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


class Reader:
    """A member of a share group, with its share session at one node."""

    def __init__(self, client: WireClient, group_id: str, topic: str, topic_id: UUID) -> None:
        self.client = client
        self.group_id = group_id
        self.topic = topic
        self.topic_id = topic_id
        self.member_id = member_name()
        self.member_epoch = 0
        self.session_epoch = 0

    async def join(self) -> None:
        """Send heartbeats until the group assigns the topic."""
        async with asyncio.timeout(30):
            while True:
                names = (self.topic,) if self.member_epoch == 0 else None
                answer = await self.client.send(
                    ShareGroupHeartbeatRequest(
                        group_id=self.group_id,
                        member_id=self.member_id,
                        member_epoch=self.member_epoch,
                        subscribed_topic_names=names,
                    ),
                    1,
                )
                assert answer.error_code == NONE, answer.error_message
                self.member_epoch = answer.member_epoch
                if answer.assignment is not None and answer.assignment.topic_partitions:
                    return

    async def leave(self) -> None:
        answer = await self.client.send(
            ShareGroupHeartbeatRequest(group_id=self.group_id, member_id=self.member_id, member_epoch=-1), 1
        )
        assert answer.error_code == NONE

    async def ask(
        self,
        *acknowledged: Acknowledged,
        code: ErrorCode = NONE,
        version: int = 2,
        partitions: Sequence[int] = (0,),
        **more: Any,
    ) -> ShareFetchResponse:
        batches = tuple(
            AcknowledgementBatch(first_offset=first, last_offset=last, acknowledge_types=(how,))
            for first, last, how in acknowledged
        )
        named = tuple(FetchPartition(partition_index=index, acknowledgement_batches=batches) for index in partitions)
        given = {
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "max_records": 500,
            "batch_size": 500,
            "topics": (FetchTopic(topic_id=self.topic_id, partitions=named),) if named else (),
            **more,
        }
        epoch = given.pop("share_session_epoch", self.session_epoch)
        answer: ShareFetchResponse = await self.client.send(
            ShareFetchRequest(
                group_id=self.group_id,
                member_id=self.member_id,
                share_session_epoch=epoch,
                **given,
            ),
            version,
        )
        assert answer.error_code == code, answer.error_message
        if code is NONE:
            self.session_epoch = epoch + 1
        return answer

    async def fetch(self, *acknowledged: Acknowledged, **more: Any) -> list[tuple[int, int, int]]:
        """Return the acquired ranges of partition 0: first offset, last offset and delivery count."""
        data = part_of(await self.ask(*acknowledged, **more))
        if data is None:
            return []
        assert (data.error_code, data.acknowledge_error_code) == (NONE, NONE), data
        return [(each.first_offset, each.last_offset, each.delivery_count) for each in data.acquired_records]

    async def acknowledge(self, *acknowledged: Acknowledged, epoch: int | None = None, renews: bool = False) -> int:
        """Return the error of partition 0, or of the request."""
        batches = tuple(
            AcknowledgementBatch(first_offset=first, last_offset=last, acknowledge_types=(how,))
            for first, last, how in acknowledged
        )
        epoch = self.session_epoch if epoch is None else epoch
        answer = await self.client.send(
            ShareAcknowledgeRequest(
                group_id=self.group_id,
                member_id=self.member_id,
                share_session_epoch=epoch,
                is_renew_ack=renews,
                topics=(
                    AcknowledgeTopic(
                        topic_id=self.topic_id,
                        partitions=(AcknowledgePartition(partition_index=0, acknowledgement_batches=batches),),
                    ),
                ),
            ),
            2,
        )
        if answer.error_code != NONE:
            return int(answer.error_code)
        self.session_epoch += 1
        return int(answer.responses[0].partitions[0].error_code)


def part_of(answer: ShareFetchResponse, index: int = 0) -> PartitionData | None:
    found = [part for topic in answer.responses for part in topic.partitions if part.partition_index == index]
    return found[0] if found else None


@asynccontextmanager
async def reading(gateway: GatewayProcess, group_id: str, topic: str, topic_id: UUID) -> AsyncGenerator[Reader]:
    """Open a connection of its own for a new member, and let the member join."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        reader = Reader(client, group_id, topic, topic_id)
        await reader.join()
        yield reader


@asynccontextmanager
async def scene(gateway: GatewayProcess, records: int = 0, **configs: str) -> AsyncGenerator[Reader]:
    """Create a group that reads from the beginning, its first member, and records in partition 0."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        group_id, topic = fresh("share"), fresh("topic")
        topic_id = await create_topic(client, topic, 2)
        configs = {"share_auto_offset_reset": "earliest", **configs}
        assert await configure(client, group_id, **configs) == [NONE]
        for _ in range(records):
            await send(client, topic)
        reader = Reader(client, group_id, topic, topic_id)
        await reader.join()
        yield reader


def batch_of(*values: bytes) -> bytes:
    now_ms = time.time_ns() // 1_000_000
    return build_batch([Record(number, now_ms, None, value) for number, value in enumerate(values)])


async def send(client: WireClient, topic: str, *values: bytes) -> None:
    answer = await produce(client, (topic, 0), batch_of(*(values or (b"value",))))
    assert answer.error_code == NONE
