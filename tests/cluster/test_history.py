"""Postgres is restored to an earlier state under running gateways. No node serves the lost history, and clients learn
where their history ends."""

from __future__ import annotations

import json
import time
from pathlib import Path

from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from protocol.messages.produce import PartitionProduceResponse
from tests.cluster.proxy import proxied
from tests.cluster.records import produce
from tests.forks import forks
from tests.frames.members import create_topic
from tests.gateway_process import GatewayProcess
from tests.restorable_postgres import RestorablePostgres
from tests.steps.waiting import until
from tests.wire import WireClient

KEPT, LOST = 7, 3
DEADLINE_S = 60.0


async def until_ok(client: WireClient, topic: str, value: bytes = b"old") -> int:
    """Produce until a record succeeds after Postgres has returned, and return its offset."""

    async def produced() -> PartitionProduceResponse:
        return (await client.send(produce(topic, value), 9)).responses[0].partition_responses[0]

    answer = await until(produced, "Postgres is back", holds=lambda answer: answer.error_code == ErrorCode.NONE)
    return answer.base_offset


async def fetched(client: WireClient, topic: str, offset: int, epoch: int):
    partition = FetchPartition(partition=0, current_leader_epoch=epoch, fetch_offset=offset, partition_max_bytes=2**20)
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=2**20,
        topics=(FetchTopic(topic=topic, partitions=(partition,)),),
    )
    return (await client.send(request, 11)).responses[0].partitions[0]


async def epoch_of(client: WireClient, topic: str) -> int:
    answer = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=topic),)), 9)
    return answer.topics[0].partitions[0].leader_epoch


async def epoch_after(client: WireClient, topic: str, before: int) -> int:
    """Wait until the node has read the new leader epoch, and return it. Until then the node responds with the old
    epoch.
    """
    return await until(lambda: epoch_of(client, topic), "a new epoch", holds=lambda epoch: epoch > before)


async def test_acknowledged_records_that_a_restore_removed_are_served_by_no_node(
    restorable: RestorablePostgres, tmp_path: Path
) -> None:
    nodes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        node = GatewayProcess(tmp_path / name, database_url=restorable.url, settings={}, environment={}, forks=forks())
        nodes.append(node)
    a, b = nodes
    try:
        for node in nodes:
            node.start()
        async with await WireClient.connect(a.bootstrap) as on_a, await WireClient.connect(b.bootstrap) as on_b:
            await create_topic(on_a, "t")
            for offset in range(KEPT):
                assert await until_ok(on_a, "t") == offset
            restorable.save()
            await until_ok(on_a, "t")
            for _ in range(LOST - 1):
                # A node that acknowledged none of the lost records notices the loss only when it next renews its
                # registration.
                await until_ok(on_b, "t")
            before = await epoch_of(on_a, "t")
            assert (await fetched(on_a, "t", KEPT, before)).records
            given = (
                await on_a.send(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4)
            ).producer_id

            restorable.put_back()
            assert await until_ok(on_b, "t", b"new") == KEPT, "the offset of a record that is gone"
            assert await until_ok(on_a, "t", b"new") > KEPT
            after = await epoch_after(on_a, "t", before)
            assert await epoch_after(on_b, "t", before) == after
            for client in (on_a, on_b):
                stale = await fetched(client, "t", KEPT + LOST, before)
                assert stale.error_code == ErrorCode.FENCED_LEADER_EPOCH
                # Right after an outage a node may learn of the other node's appends a moment late. Also, a record whose
                # produce had no known outcome and was repeated may be stored twice.
                deadline = time.monotonic() + DEADLINE_S
                while not (part := await fetched(client, "t", KEPT + 1, after)).records:
                    assert time.monotonic() < deadline, part
                assert part.high_watermark >= KEPT + 2
                assert b"new" in bytes((await fetched(client, "t", KEPT, after)).records), "not the record that is gone"
                ends = await client.send(
                    OffsetForLeaderEpochRequest(
                        replica_id=-1,
                        topics=(
                            OffsetForLeaderTopic(
                                topic="t",
                                partitions=(
                                    OffsetForLeaderPartition(
                                        partition=0, current_leader_epoch=after, leader_epoch=before
                                    ),
                                ),
                            ),
                        ),
                    ),
                    3,
                )
                assert ends.topics[0].partitions[0].end_offset == KEPT
            again = (
                await on_a.send(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4)
            ).producer_id
            fresh = (
                await on_b.send(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1), 4)
            ).producer_id
            assert len({given, again, fresh}) == 3
    finally:
        for node in nodes:
            node.close()


async def test_a_node_whose_connections_stay_open_follows_a_failover(
    restorable: RestorablePostgres, tmp_path: Path
) -> None:
    """A proxy in front of Postgres may keep connections to a former primary that is still running."""
    records = tmp_path / "records"
    with proxied(restorable.url) as proxy:
        environment = {"SLUICE_LOG_STORE": str(records)}
        node = GatewayProcess(tmp_path, database_url=proxy.url, settings={}, environment=environment, forks=forks())
        try:
            node.start()
            async with await WireClient.connect(node.bootstrap) as client:
                await create_topic(client, "t")
                assert await until_ok(client, "t") == 0
                restorable.save()
                with restorable.promoted_copy() as promoted:
                    assert await until_ok(client, "t") == 1
                    before = await epoch_of(client, "t")
                    proxy.move_new_connections(promoted)
                    await epoch_after(client, "t", before)
                    assert await until_ok(client, "t", b"new") == 1, "a record that only the former primary has"
                    assert json.loads((records / "sluice-store.json").read_text())["history"] > 0
        finally:
            node.close()
