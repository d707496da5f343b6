"""Gateways with records in a bucket. The records are read back during an outage of the bucket, after kills, and by
several nodes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from tests.chaos.load import Load, assert_nothing_lost, read_all
from tests.clients.topics import create_topic
from tests.cluster.conftest import metric
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.objects.conftest import StartGateway
from tests.objects.records import PATIENCE_S, moved, produce
from tests.objects.s3_server import Fault, FaultyRoad, S3Server
from tests.wire import WireClient

AWAY_S = float(os.environ.get("SLUICE_TEST_AWAY_S", "5"))
"""Seconds of the store's outage. A long run uses 60 and more."""
KILLS = int(os.environ.get("SLUICE_TEST_KILLS", "12")) // 3
ANSWER_S = 15.0


@pytest.fixture
def road(s3: S3Server) -> Iterator[FaultyRoad]:
    with FaultyRoad(s3.port) as road:
        yield road


async def fetch(client: WireClient, *topics: str, offset: int = 0) -> list[PartitionData]:
    asked = tuple(
        FetchTopic(
            topic=topic, partitions=(FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20),)
        )
        for topic in topics
    )
    response = await client.send(FetchRequest(max_wait_ms=0, min_bytes=1, topics=asked), 12, seconds=ANSWER_S)
    return [topic.partitions[0] for topic in response.responses]


def has_records(data: PartitionData) -> bool:
    return data.error_code == ErrorCode.NONE and bool(data.records)


async def test_records_move_to_the_bucket_and_are_read_from_it(
    start_gateway: StartGateway, s3: S3Server, url: str, database_url: str
) -> None:
    gateway = start_gateway(url, shared=database_url)
    topic = create_topic(gateway.bootstrap, 3)
    for partition in range(3):
        await asyncio.to_thread(produce, gateway.bootstrap, topic, 4_000, partition=partition)
    await moved(database_url)
    assert list(s3.files.glob(f"{url.rpartition('/')[2]}/*.object*")), "in the bucket"
    gateway.restart()
    records = await asyncio.to_thread(read_all, gateway.bootstrap, topic, 3)
    assert records == {(part, n): f"{n:09d}".encode() * 50 for part in range(3) for n in range(4_000)}


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.SILENT, Fault.ERRORS])
async def test_an_unavailable_store_affects_only_its_own_records(
    start_gateway: StartGateway, road: FaultyRoad, url: str, database_url: str, fault: Fault
) -> None:
    gateway = start_gateway(url, shared=database_url, port=road.port)
    away, here = create_topic(gateway.bootstrap, 1), create_topic(gateway.bootstrap, 1)
    await asyncio.to_thread(produce, gateway.bootstrap, away, 500)
    await moved(database_url)
    gateway.restart()  # Without the store, the gateway must serve records from memory.
    road.set(fault)
    until = time.monotonic() + AWAY_S
    client = await WireClient.connect(gateway.bootstrap)
    rounds = told = 0
    while time.monotonic() < until or not told:
        await asyncio.to_thread(produce, gateway.bootstrap, here, 20)
        lost, served = await fetch(client, away, here)
        # Readers of records in memory do not wait long for a silent store, because soon the store is known to be
        # unavailable.
        assert lost.error_code in (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        assert has_records(served)
        rounds += 1
        told += lost.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    # A failed request is repeated, perhaps for longer than records may wait in memory. The log then reports that.
    waited = gateway.log_text().count("longer than records at hand may wait")
    assert fault is Fault.SILENT or rounds - told <= waited, f"{told} of {rounds}, {waited} waited for"
    assert metric(gateway, "sluice_damaged_chunks_total") >= told
    assert "records cannot be read" in gateway.log_text()
    road.set(Fault.NONE)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if has_records((await fetch(client, away))[0]):
                break
            await asyncio.sleep(0.1)
    await moved(database_url)
    await client.close()
    assert len(await asyncio.to_thread(read_all, gateway.bootstrap, away, 1)) == 500
    assert len(await asyncio.to_thread(read_all, gateway.bootstrap, here, 1)) == 20 * rounds


async def test_a_fetch_waits_for_a_slow_store(
    start_gateway: StartGateway, road: FaultyRoad, url: str, database_url: str
) -> None:
    gateway = start_gateway(url, shared=database_url, port=road.port)
    topic = create_topic(gateway.bootstrap, 1)
    await asyncio.to_thread(produce, gateway.bootstrap, topic, 5_000)
    await moved(database_url)
    gateway.restart()
    road.set(Fault.SLOW)
    assert len(await asyncio.to_thread(read_all, gateway.bootstrap, topic, 1)) == 5_000
    await asyncio.to_thread(produce, gateway.bootstrap, topic, 100)
    await moved(database_url)
    assert metric(gateway, "sluice_damaged_chunks_total") == 0


async def test_a_removed_or_damaged_object_affects_only_its_own_records(
    start_gateway: StartGateway, s3: S3Server, url: str, database_url: str
) -> None:
    gateway = start_gateway(url, shared=database_url)
    one, two, three = (create_topic(gateway.bootstrap, 1) for _ in range(3))
    objects: list[str] = []
    for topic in (one, two, three):
        await asyncio.to_thread(produce, gateway.bootstrap, topic, 300)
        await moved(database_url)
        (new,) = {path.name for path in s3.files.glob(f"{url.rpartition('/')[2]}/*.object")} - set(objects)
        objects.append(new)
    folder = s3.files / url.rpartition("/")[2]
    (folder / objects[0]).unlink()
    content = bytearray((folder / objects[1]).read_bytes())
    content[1_000] ^= 0xFF
    (folder / objects[1]).write_bytes(content)
    gateway.restart()
    client = await WireClient.connect(gateway.bootstrap)
    first, second, third = await fetch(client, one, two, three)
    assert first.error_code == second.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert has_records(third)
    content[1_000] ^= 0xFF
    (folder / objects[1]).write_bytes(content)
    assert has_records((await fetch(client, two))[0]), "what was wrong is not remembered"
    await client.close()


async def test_nodes_share_a_bucket_and_only_one_moves_bytes_at_a_time(
    start_gateway: StartGateway, url: str, database_url: str
) -> None:
    nodes = [start_gateway(url, shared=database_url) for _ in range(2)]
    topic = create_topic(nodes[0].bootstrap, 4)
    load = Load(",".join(node.bootstrap for node in nodes), topic, 4)
    load.start()
    for kill in range(max(1, KILLS)):
        await asyncio.to_thread(load.wait_for, 1_000)
        node = nodes[kill % 2]
        node.kill()
        await asyncio.to_thread(node.restart)
    await asyncio.to_thread(load.wait_for, 1_000)
    await asyncio.to_thread(load.stop)
    await moved(database_url)
    for node in nodes:
        node.restart()
    await asyncio.to_thread(assert_nothing_lost, load)


def test_a_node_with_another_store_or_without_one_does_not_start(
    start_gateway: StartGateway, gateway_factory: GatewayFactory, s3: S3Server, url: str, database_url: str
) -> None:
    start_gateway(url, shared=database_url)
    for other, said in (
        (f"{url}-other", f"{url}-other is not where the records of this database lie"),
        ("inline", f"records of this database lie in {url}: give it as --log-store"),
    ):
        with pytest.raises(AssertionError, match=said) as told:
            gateway_factory(database_url=database_url, environment={"SLUICE_LOG_STORE": other, **s3.environment()})
        assert "Traceback" not in str(told.value)


def test_a_node_stops_in_time_while_its_store_is_silent(
    start_gateway: StartGateway, road: FaultyRoad, url: str, database_url: str
) -> None:
    gateway: GatewayProcess = start_gateway(url, shared=database_url, port=road.port)
    topic = create_topic(gateway.bootstrap, 1)
    road.set(Fault.SILENT)
    produce(gateway.bootstrap, topic, 100)
    waiting = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while not road.requests:
        assert time.monotonic() < deadline
        waiting.wait(0.05)
    begun = time.monotonic()
    assert gateway.stop() == 0
    assert time.monotonic() - begun < 6
