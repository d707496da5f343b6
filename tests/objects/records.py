"""Records that gateways move to a bucket."""

from __future__ import annotations

import asyncio

import asyncpg
import confluent_kafka

PATIENCE_S = 60.0


def produce(bootstrap: str, topic: str, count: int, *, partition: int = 0, first: int = 0) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 2, "batch.size": 20_000})
    failed: list[object] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    for number in range(first, first + count):
        value = f"{number:09d}".encode() * 50
        producer.produce(topic, value, partition=partition, on_delivery=delivered)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert not failed, failed[:3]


async def moved(database_url: str) -> None:
    """Wait until the store holds every chunk and Postgres holds no inline record any more."""
    connection = await asyncpg.connect(database_url, server_settings={"search_path": "sluice"})
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await connection.fetchval(
                    "select exists (select from chunk) and not exists (select from inline_records)"
                    " and not exists (select from chunk where object_id is null)"
                ):
                    return
                await asyncio.sleep(0.05)
    finally:
        await connection.close()
