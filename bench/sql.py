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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

import asyncpg
from confluent_kafka import Consumer, Producer, TopicPartition

SECONDS = float(os.environ.get("SLUICE_BENCH_SQL_SECONDS", "4"))
ROUNDS = 3
CLIENTS = 16
PROCESSES = 2
PACE_PER_S = 200
"""SQL transactions per second while a stock producer writes to the same partitions."""
OUTBOX_POLL_S = 0.1
OPEN_S = float(os.environ.get("SLUICE_BENCH_SQL_OPEN_SECONDS", "5"))
"""How long the open transaction has lasted when the measurement of the others begins."""

_TABLE = "create table if not exists bench_order (id bigint generated always as identity, total numeric, note text)"
_INSERT = "insert into bench_order (total, note) values (99.90, 'a row of about a hundred bytes, as orders have them')"
_PRODUCE = """select kafka.produce('{topic}', key => 'key-' || $1::bigint::text,
    value => '{{"id": 4711, "total": 99.90, "note": "a row of about a hundred bytes, as orders have them"}}')"""


_PRODUCE_ONE = "select kafka.produce($1, $2, partition => 0)"
_OUTBOX = """create table if not exists bench_outbox (
    id bigint generated always as identity primary key, topic text not null, value text not null)"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of alternating runs: commits per second with produce and without."""

    alone: float
    produced: float


async def _commit(url: str, clients: int, topic: str | None, seconds: float, pace_per_s: float | None = None) -> int:
    """Commit transactions for some time and return their number. `pace_per_s` limits the rate of each client."""
    start_s = time.perf_counter()
    end_s = start_s + seconds

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
            if pace_per_s is not None:
                await asyncio.sleep(start_s + count / pace_per_s - time.perf_counter())
        await connection.close()
        return count

    return sum(await asyncio.gather(*(client(number) for number in range(clients))))


def _process(url: str, clients: int, topic: str | None, seconds: float) -> int:
    return asyncio.run(_commit(url, clients, topic, seconds))


def commits_per_second(url: str, clients: int, topic: str | None) -> float:
    """Return the rate of `clients` sessions that insert rows. If a topic is given, they also produce."""
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


async def delays_ms(
    url: str, bootstrap: str, topic: str, statement: str = _PRODUCE_ONE, count: int = 300
) -> Sequence[float]:
    """Return, for single transactions, the time from the commit's answer to a stock consumer, in milliseconds, sorted.
    `statement` sends the value $2 to the topic $1."""
    connection: Any = await asyncpg.connect(url)
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench-sql", "fetch.wait.max.ms": 500, "enable.auto.commit": False}
    )
    arrivals: dict[bytes, float] = {}
    begun = threading.Event()
    await connection.fetchval("select kafka.flush()")
    start = await connection.fetchval(
        "select p.end_offset from kafka.partitions p where p.topic = $1 and p.partition = 0", topic
    )
    await connection.execute(statement, topic, "first")
    consumer.assign([TopicPartition(topic, 0, start)])

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
            await connection.execute(statement, topic, value)
            committed[value.encode()] = time.perf_counter()
            await asyncio.sleep(0.02)
        await asyncio.to_thread(consuming.get, 70)
    consumer.close()
    await connection.close()
    return sorted(max(0.0, arrivals[value] - at_s) * 1000 for value, at_s in committed.items())


async def delays_of_an_outbox_ms(url: str, bootstrap: str, topic: str) -> Sequence[float]:
    """Return the same delays if transactions write to an outbox table, and a stock producer polls the table."""
    await _execute(url, _OUTBOX)
    polling = asyncio.create_task(_poll_outbox(url, bootstrap))
    try:
        return await delays_ms(url, bootstrap, topic, "insert into bench_outbox (topic, value) values ($1, $2)")
    finally:
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling


async def _poll_outbox(url: str, bootstrap: str) -> None:
    connection: Any = await asyncpg.connect(url)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
    try:
        while True:
            rows = await connection.fetch("select id, topic, value from bench_outbox order by id limit 1000")
            for row in rows:
                producer.produce(row["topic"], row["value"].encode(), partition=0)
            if rows:
                await asyncio.to_thread(producer.flush, 30)
                await connection.execute(
                    "delete from bench_outbox where id = any ($1::bigint[])", [row["id"] for row in rows]
                )
            await asyncio.sleep(OUTBOX_POLL_S)
    finally:
        connection.terminate()


async def delays_beside_an_open_transaction_ms(
    url: str, bootstrap: str, topic: str
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the delays without and with a transaction that has inserted and produced to the topic and stays open. Runs
    with and without it alternate. Each result has the sorted delays of all its runs.
    """
    await _execute(url, _TABLE)
    without: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        without += await delays_ms(url, bootstrap, topic)
        connection: Any = await asyncpg.connect(url)
        await connection.execute("begin")
        await connection.execute(_INSERT)
        await connection.execute(_PRODUCE_ONE, topic, "of the open transaction")
        await asyncio.sleep(OPEN_S)
        beside += await delays_ms(url, bootstrap, topic)
        await connection.execute("rollback")
        await connection.close()
    return sorted(without), sorted(beside)


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


def stock_rates(url: str, bootstrap: str, topic: str) -> tuple[float, float]:
    """Return the records per second of a stock producer alone, and beside SQL transactions that produce to the same
    partitions at PACE_PER_S. Runs alternate, and the medians count."""
    asyncio.run(_execute(url, _TABLE))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        alone.append(_stock_rate(bootstrap, topic))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pacing = pool.apply_async(_paced, (url, topic, SECONDS))
            beside.append(_stock_rate(bootstrap, topic))
            pacing.get(60)
    return statistics.median(alone), statistics.median(beside)


def _paced(url: str, topic: str, seconds: float) -> int:
    return asyncio.run(_commit(url, 1, topic, seconds, PACE_PER_S))


def _stock_rate(bootstrap: str, topic: str) -> float:
    """Return the acknowledged records per second of a stock producer."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    acknowledged = 0

    def delivered(error: object, _message: object) -> None:
        nonlocal acknowledged
        acknowledged += error is None

    start_s = time.perf_counter()
    while time.perf_counter() < start_s + SECONDS:
        try:
            producer.produce(topic, b"x" * 100, on_delivery=delivered)
        except BufferError:
            producer.poll(0.01)
        producer.poll(0)
    producer.flush(30)
    return acknowledged / (time.perf_counter() - start_s)
