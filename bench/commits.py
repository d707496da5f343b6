"""Measure offset commits at frame level: how many per second a server answers, be it a gateway or Kafka.

Each connection is one member of a group of its own. It keeps a window of OffsetCommit requests of one partition in
flight, like a consumer that commits each record without waiting.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from bench.frames import FRAME_HEAD_BYTES, Connection, Counter, Rate, frame, join, sync
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)

VERSION = 8
WARM_UP_S = 0.5
COORDINATOR_S = 30.0


async def commits(
    host: str, port: int, topic: str, *, connections: int, window: int, seconds: float, exists: bool = True
) -> Rate:
    """Return the commits answered per second.

    Raise RuntimeError if a commit is not answered as expected: without an error, or with UNKNOWN_TOPIC_OR_PARTITION if
    the topic does not exist.
    """
    loop = asyncio.get_running_loop()
    keepers = [await Connection.open(host, port) for _ in range(connections)]
    requests = await asyncio.gather(*(_joined(keeper, topic, exists) for keeper in keepers))
    counters: list[Counter] = []
    for request, answer_bytes in requests:
        make_counter = partial(Counter, request, answer_bytes, window)
        counters.append((await loop.create_connection(make_counter, host, port))[1])
    for counter in counters:
        counter.start()
    await asyncio.sleep(WARM_UP_S)
    before, started = sum(counter.answered for counter in counters), time.perf_counter()
    await asyncio.sleep(seconds)
    answered, elapsed = sum(counter.answered for counter in counters) - before, time.perf_counter() - started
    for counter in counters:
        counter.running = False
        assert counter.transport is not None
        counter.transport.close()
    for keeper in keepers:
        keeper.writer.close()
    return Rate(answered, elapsed)


async def _joined(connection: Connection, topic: str, exists: bool) -> tuple[bytes, int]:
    """Return the frame of a commit by a new member of a new group, and the size of its answer."""
    group_id = f"bench-commits-{time.time_ns()}"
    async with asyncio.timeout(COORDINATOR_S):
        while True:
            try:
                joined = await join(connection, group_id)
            except RuntimeError:
                # Kafka has only begun to create the topic for coordinators.
                await asyncio.sleep(0.1)
            else:
                break
    await sync(connection, group_id, joined)
    request = OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=joined.generation_id,
        member_id=joined.member_id,
        topics=(
            OffsetCommitRequestTopic(
                name=topic,
                partitions=(OffsetCommitRequestPartition(partition_index=0, committed_offset=7),),
            ),
        ),
    )
    answer = await connection.ask(ApiKey.OFFSET_COMMIT, VERSION, request, OffsetCommitResponse)
    assert isinstance(answer, OffsetCommitResponse)
    wanted = ErrorCode.NONE if exists else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    error = answer.topics[0].partitions[0].error_code
    if error != wanted:
        raise RuntimeError(f"OffsetCommit answered {error}")
    answer_bytes = sum(len(chunk) for chunk in codec.encode(answer, VERSION))
    return frame(ApiKey.OFFSET_COMMIT, VERSION, 7, request), FRAME_HEAD_BYTES + answer_bytes
