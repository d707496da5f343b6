"""Measure the resident memory of the gateway process: idle, with 1,000 connections, with 100,000 committed offsets."""

from __future__ import annotations

import asyncio

from bench.attacks import resident
from bench.frames import Connection, frame
from bench.librdkafka import create_topic
from protocol.api_keys import ApiKey
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tests.gateway_process import GatewayProcess

CONNECTIONS = 1000
GROUPS, PARTITIONS = 1000, 100


async def measure(gateway: GatewayProcess) -> tuple[int, int, int]:
    idle = resident(gateway)
    host, _, port = gateway.bootstrap.rpartition(":")
    connections = [await Connection.open(host, int(port)) for _ in range(CONNECTIONS)]
    for connection in connections:
        await connection.ask(
            ApiKey.API_VERSIONS,
            3,
            ApiVersionsRequest(client_software_name="bench", client_software_version="1"),
            ApiVersionsResponse,
        )
    connected = resident(gateway)
    for connection in connections[1:]:
        connection.writer.close()
    await asyncio.to_thread(create_topic, gateway.bootstrap, "memory", PARTITIONS)
    for index in range(GROUPS):
        request = OffsetCommitRequest(
            group_id=f"memory-{index}",
            generation_id_or_member_epoch=-1,
            topics=(
                OffsetCommitRequestTopic(
                    name="memory",
                    partitions=tuple(
                        OffsetCommitRequestPartition(partition_index=partition, committed_offset=index)
                        for partition in range(PARTITIONS)
                    ),
                ),
            ),
        )
        connections[0].writer.write(frame(ApiKey.OFFSET_COMMIT, 8, 1, request))
        answer = await connections[0].receive(ApiKey.OFFSET_COMMIT, 8, OffsetCommitResponse)
        assert isinstance(answer, OffsetCommitResponse)
        codes = {partition.error_code for topic in answer.topics for partition in topic.partitions}
        if codes != {0}:
            raise RuntimeError(f"OffsetCommit answered {codes}")
    committed = resident(gateway)
    connections[0].writer.close()
    return idle, connected, committed
