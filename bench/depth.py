"""Measure a cold fetch at a depth of 10 thousand and of a million batches: its cost must follow the answer, not the
log.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.frames import Connection
from bench.librdkafka import create_topic
from protocol.api_keys import ApiKey
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from protocol.records import Record, build_batch
from storage.embedded import EmbeddedPostgres
from tests.gateway_process import GatewayProcess

SHALLOW, DEEP = 10_000, 1_000_000
SAMPLES = 400
ANSWER_BYTES = 64 * 1024
FETCH_VERSION = 12

FILL = """
with target as (
    update sluice.partition set next_offset = $2::bigint, max_timestamp_ms = $2::bigint
    where topic_id = (select topic_id from sluice.topic where name = $1) returning partition_key
), added as (
    insert into sluice.chunk (partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms,
        position, size_bytes, batch_count, leader_epoch, inline_slot, final_heads)
    select target.partition_key, n, n, n, n, nextval('sluice.inline_position'), length($3::bytea), 1, 0, 0, false
    from target, generate_series(0, $2::bigint - 1) as n
    returning partition_key, base_offset, position
)
insert into sluice.inline_records (slot, position, partition_key, base_offset, records)
select 0, position, partition_key, base_offset, $3::bytea from added
"""


@dataclass(frozen=True, slots=True)
class Cost:
    p50_ms: float
    p99_ms: float


def fresh_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    directory.chmod(0o755)
    (directory / "gateway").mkdir()
    return directory


async def measure() -> tuple[Cost, Cost]:
    """Return the time of one Fetch of 64 KiB at a random offset, over the wire, from a log of SHALLOW batches and from
    a log of DEEP batches.
    """
    directory = fresh_directory()
    server = EmbeddedPostgres(directory / "server")
    url = await server.start()
    gateway = GatewayProcess(directory / "gateway", database_url=url, settings={}, environment={})
    try:
        await asyncio.to_thread(gateway.start)
        for name, batches in (("shallow", SHALLOW), ("deep", DEEP)):
            await asyncio.to_thread(create_topic, gateway.bootstrap, name, 1)
            connection = await asyncpg.connect(url)
            try:
                await connection.execute(FILL, name, batches, build_batch([Record(0, 0, None, b"x" * 100, ())]))
                await connection.execute("vacuum analyze sluice.chunk")
            finally:
                await connection.close()
        host, _, port = gateway.bootstrap.rpartition(":")
        client = await Connection.open(host, int(port))
        times: dict[str, list[float]] = {"shallow": [], "deep": []}
        generator = random.Random(1)
        for _ in range(SAMPLES):
            for name, batches in (("shallow", SHALLOW), ("deep", DEEP)):
                times[name].append(await fetch_ms(client, name, generator.randrange(batches - 1000)))
        client.writer.close()
        return cost(times["shallow"]), cost(times["deep"])
    finally:
        await asyncio.to_thread(gateway.close)
        await server.stop()
        shutil.rmtree(directory)


def cost(times_ms: list[float]) -> Cost:
    return Cost(statistics.median(times_ms), statistics.quantiles(times_ms, n=100)[98])


async def fetch_ms(client: Connection, topic: str, offset: int) -> float:
    started = time.perf_counter()
    answer = await client.ask(
        ApiKey.FETCH,
        FETCH_VERSION,
        FetchRequest(
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=ANSWER_BYTES,
            session_epoch=-1,
            topics=(
                FetchTopic(
                    topic=topic,
                    partitions=(FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=ANSWER_BYTES),),
                ),
            ),
        ),
        FetchResponse,
    )
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert isinstance(answer, FetchResponse)
    (partition,) = answer.responses[0].partitions
    if partition.error_code or not partition.records:
        raise RuntimeError(f"Fetch at {offset} answered {partition.error_code} and no records")
    return elapsed_ms
