"""Measure the SQL door: transactions that insert and produce, beside the same transactions that only insert.

Clients are sessions of asyncpg in processes of their own, so that no event loop limits them. All of it shares the
machine with the gateway and its Postgres. Runs with and without the SQL door alternate, and the medians count.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

import asyncpg
from confluent_kafka import Consumer, Producer, TopicPartition

SECONDS = float(os.environ.get("SLUICE_BENCH_SQL_SECONDS", "4"))
ROUNDS = 3
CLIENTS = 16
PROCESSES = 2

_TABLE = "create table if not exists bench_order (id bigint generated always as identity, total numeric, note text)"
_INSERT = "insert into bench_order (total, note) values (99.90, 'a row of about a hundred bytes, as orders have them')"
_PRODUCE = """select kafka.produce('{topic}', key => 'key-' || $1::bigint::text,
    value => '{{"id": 4711, "total": 99.90, "note": "a row of about a hundred bytes, as orders have them"}}')"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of alternating runs: commits per second without and with produce."""

    alone: float
    produced: float


async def _commit(url: str, clients: int, topic: str | None, seconds: float) -> int:
    """Commit transactions for some time and return their number."""
    end_s = time.perf_counter() + seconds

    async def client(number: int) -> int:
        connection: Any = await asyncpg.connect(url)
        insert = await connection.prepare(_INSERT)
        produce = None if topic is None else await connection.prepare(_PRODUCE.format(topic=topic))
        count = 0
        while time.perf_counter() < end_s:
            await connection.execute("begin")
            await insert.fetch()
            if produce is not None:
                await produce.fetch(number * 1_000_000 + count)
            await connection.execute("commit")
            count += 1
        await connection.close()
        return count

    return sum(await asyncio.gather(*(client(number) for number in range(clients))))


def _process(url: str, clients: int, topic: str | None, seconds: float) -> int:
    return asyncio.run(_commit(url, clients, topic, seconds))


def commits_per_second(url: str, clients: int, topic: str | None) -> float:
    """Return the rate of `clients` sessions that insert, and produce if a topic is given."""
    processes = min(PROCESSES, clients)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        counts = pool.starmap(_process, [(url, clients // processes, topic, SECONDS)] * processes)
    return sum(counts) / SECONDS


def compare(url: str, clients: int, topic: str) -> Comparison:
    """Alternate runs with and without produce."""
    asyncio.run(_execute(url, _TABLE))
    alone: list[float] = []
    produced: list[float] = []
    for _ in range(ROUNDS):
        alone.append(commits_per_second(url, clients, None))
        produced.append(commits_per_second(url, clients, topic))
    return Comparison(statistics.median(alone), statistics.median(produced))


async def _execute(url: str, statement: str) -> None:
    connection: Any = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


async def delays_ms(url: str, bootstrap: str, topic: str, count: int = 300) -> Sequence[float]:
    """Return, for single transactions, the time from the commit's answer to a stock consumer, in milliseconds."""
    connection: Any = await asyncpg.connect(url)
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench-sql", "fetch.wait.max.ms": 500, "enable.auto.commit": False}
    )
    arrivals: dict[bytes, float] = {}
    begun = threading.Event()
    await connection.execute("select kafka.produce($1, 'first', partition => 0)", topic)
    await connection.fetchval("select kafka.flush()")
    consumer.assign([TopicPartition(topic, 0, 0)])

    def consume() -> None:
        deadline_s = time.perf_counter() + 60
        while len(arrivals) < count + 1 and time.perf_counter() < deadline_s:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                arrivals[bytes(message.value() or b"")] = time.perf_counter()
                begun.set()

    committed: dict[bytes, float] = {}
    with ThreadPool(1) as pool:
        consuming = pool.apply_async(consume)
        await asyncio.to_thread(begun.wait, 30)
        for number in range(count):
            value = f"record {number}"
            await connection.execute("select kafka.produce($1, $2, partition => 0)", topic, value)
            committed[value.encode()] = time.perf_counter()
            await asyncio.sleep(0.02)
        consuming.get(70)
    consumer.close()
    await connection.close()
    return sorted(max(0.0, arrivals[value] - at_s) * 1000 for value, at_s in committed.items())


async def many_ms(url: str, topic: str) -> float:
    """Return the median time of a transaction with one produce_many of 1,000 records, in milliseconds."""
    connection: Any = await asyncpg.connect(url)
    values = [f"a value of about a hundred bytes, as orders have them, number {number:06}" for number in range(1000)]
    keys = [f"key-{number}" for number in range(1000)]
    taken: list[float] = []
    for _ in range(20):
        start_s = time.perf_counter()
        await connection.execute("select kafka.produce_many($1, $2::text[], $3::text[])", topic, values, keys)
        taken.append((time.perf_counter() - start_s) * 1000)
    await connection.close()
    return statistics.median(taken)


def stock_rate(bootstrap: str, topic: str, seconds: float) -> float:
    """Return the records per second that a stock producer gets acknowledged."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    acknowledged = 0

    def delivered(error: object, _message: object) -> None:
        nonlocal acknowledged
        acknowledged += error is None

    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        try:
            producer.produce(topic, b"x" * 100, on_delivery=delivered)
        except BufferError:
            producer.poll(0.01)
        producer.poll(0)
    producer.flush(30)
    return acknowledged / seconds
