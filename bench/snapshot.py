"""Measure a small commit while another session holds a snapshot open, as `pg_dump` does: dead row versions are kept."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time

import asyncpg

from bench.depth import fresh_directory
from bench.librdkafka import create_topic
from protocol.records import Record, build_batch
from storage.embedded import EmbeddedPostgres
from storage.log import LogStore
from storage.pool import Database
from storage.types import NewBatch, PartitionKey
from tests.gateway_process import GatewayProcess

APPENDS = 20_000
WINDOW = 2_000


async def measure() -> tuple[float, float]:
    """Append one idempotent batch to one partition APPENDS times. Return the p50 in milliseconds of the first and of
    the last WINDOW commits.
    """
    directory = fresh_directory()
    server = EmbeddedPostgres(directory / "server")
    url = await server.start()
    try:
        gateway = GatewayProcess(directory / "gateway", database_url=url, settings={}, environment={})
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(create_topic, gateway.bootstrap, "held", 1)
        await asyncio.to_thread(gateway.close)
        database = await Database.open(url)
        holder = await asyncpg.connect(url)
        try:
            key = PartitionKey(
                await holder.fetchval(
                    "select partition_key from sluice.partition join sluice.topic using (topic_id) where name = 'held'"
                )
            )
            await holder.execute("begin isolation level repeatable read")
            await holder.fetchval("select count(*) from sluice.partition")
            store = LogStore(database)
            times_ms: list[float] = []
            for sequence in range(APPENDS):
                records = bytearray(build_batch([Record(0, 0, None, b"x" * 100, ())]))
                began = time.perf_counter()
                await store.append([NewBatch(key, records, 1, 0, 1, 0, sequence)])
                times_ms.append((time.perf_counter() - began) * 1000)
            await store.close()
        finally:
            await holder.close()
            await database.close()
        return statistics.median(times_ms[:WINDOW]), statistics.median(times_ms[-WINDOW:])
    finally:
        await server.stop()
        shutil.rmtree(directory)
