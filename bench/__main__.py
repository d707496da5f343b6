"""`python -m bench`: measure a real gateway with an embedded Postgres against the targets, and print a report.

    python -m bench                     everything, a quarter of an hour
    python -m bench produce heartbeats  some of it
    python -m bench --write docs/benchmarks.md
    python -m bench isolation           latency beside other work: `bench/isolation.py`
    python -m bench curves              cost as it grows: `bench/curves.py`

The last two are no part of everything, because they take long. They have options and a report of their own. The command
ends with 1 if a target is missed.

Each measurement starts a gateway of its own in a fresh directory. Client, gateway and Postgres share the machine, so
figures of different runs compare only roughly. The disk's own sync time is measured beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench import (
    attacks,
    cluster,
    codec,
    consumer_groups,
    curves,
    depth,
    distance,
    fixture,
    floor,
    frames,
    handoff,
    isolation,
    librdkafka,
    memory,
    retention,
    snapshot,
    sql,
    validation,
)
from bench.machine import measured_by
from bench.servers import running_gateway
from storage.embedded import EmbeddedPostgres
from tests.gateway_process import GatewayProcess

MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    target: str
    measured: str
    met: bool


def measure_produce() -> list[Row]:
    with running_gateway() as gateway:
        librdkafka.create_topic(gateway.bootstrap, "bench", 8)
        before = psutil.Process(gateway.pid).cpu_times()
        result = librdkafka.produce(gateway.bootstrap, "bench", seconds=30)
        after = psutil.Process(gateway.pid).cpu_times()
    busy = (after.user + after.system - before.user - before.system) / result.seconds
    rate = result.megabytes_per_second
    return [
        Row(
            "librdkafka produce, 1 KiB records, acks=all, 30 s sustained",
            "≥ 80 MB/s",
            f"{rate:.0f} MB/s ({result.records:,} records acknowledged in {result.seconds:.1f} s; "
            f"gateway {busy:.2f} cores)",
            rate >= 80,
        )
    ]


def measure_latency() -> list[Row]:
    with running_gateway() as gateway:
        librdkafka.create_topic(gateway.bootstrap, "bench", 1)
        sync = librdkafka.disk_sync(str(gateway.data_dir))
        result = librdkafka.one_in_flight(gateway.bootstrap, "bench")
    over = result.p50_ms - sync.p50_ms
    return [
        Row(
            "one record in flight, acks=all",
            "p50 ≤ 1 ms over the disk's sync",
            f"p50 {result.p50_ms:.2f} ms, p99 {result.p99_ms:.2f} ms; disk sync p50 {sync.p50_ms:.2f} ms: "
            f"{over:.2f} ms over",
            over <= 1,
        )
    ]


def measure_floor() -> list[Row]:
    with running_gateway() as gateway:
        librdkafka.create_topic(gateway.bootstrap, "bench", 1)
        found = asyncio.run(floor.measure(gateway, "bench"))
    over = found.gateway - found.append
    return [
        Row(
            "one record in flight, storey by storey",
            "gateway ≤ 0.5 ms over its commit",
            f"p50 disk sync {found.disk_sync:.2f}, statement {found.statement:.2f}, append without sync "
            f"{found.decide:.2f}, append {found.append:.2f}, through the gateway {found.gateway:.2f}, librdkafka "
            f"{found.client:.2f} ms: {over:.2f} ms over",
            over <= 0.5,
        )
    ]


def measure_consume() -> list[Row]:
    partitions = 4
    with running_gateway() as gateway:
        librdkafka.create_topic(gateway.bootstrap, "tail", partitions)
        warm = librdkafka.produce(gateway.bootstrap, "tail", seconds=1)
        while warm.records < 90_000:
            more = librdkafka.produce(gateway.bootstrap, "tail", seconds=0.3)
            warm = librdkafka.Throughput(warm.records + more.records, warm.seconds, warm.record_bytes)
        tail_records = min(warm.records, 100_000)
        # Records that the tail (the newest records, in memory) no longer holds would need a cold read. So start at the
        # last records.
        tail = max(
            (librdkafka.consume_tail(gateway.bootstrap, "tail", partitions, records=tail_records) for _ in range(3)),
            key=lambda result: result.megabytes_per_second,
        )
        librdkafka.create_topic(gateway.bootstrap, "cold", partitions)
        written = librdkafka.produce(gateway.bootstrap, "cold", seconds=6)
        gateway.restart()
        cold = librdkafka.consume(gateway.bootstrap, "cold", partitions, records=written.records)
    return [
        Row(
            "librdkafka consume of the tail",
            "≥ 250 MB/s",
            f"{tail.megabytes_per_second:.0f} MB/s ({tail.records:,} records of 1 KiB, best of 3)",
            tail.megabytes_per_second >= 250,
        ),
        Row(
            "librdkafka consume of a cold log",
            "≥ 120 MB/s",
            f"{cold.megabytes_per_second:.0f} MB/s ({cold.records:,} records, first read after a restart)",
            cold.megabytes_per_second >= 120,
        ),
    ]


def measure_heartbeats() -> list[Row]:
    with running_gateway() as gateway:
        host, _, port = gateway.bootstrap.rpartition(":")
        before = psutil.Process(gateway.pid).cpu_times()
        result = asyncio.run(frames.heartbeats(host, int(port), connections=50, window=10, seconds=8))
        after = psutil.Process(gateway.pid).cpu_times()
    cpu_us = (after.user + after.system - before.user - before.system) / max(1, result.requests) * 1e6
    return [
        Row(
            "heartbeats per process (50 connections, 10 in flight each)",
            "≥ 25,000/s",
            f"{result.per_second:,.0f}/s (≈{cpu_us:.0f} µs of gateway CPU each, setup included)",
            result.per_second >= 25_000,
        )
    ]


def measure_join_wave() -> list[Row]:
    with running_gateway() as gateway:
        host, _, port = gateway.bootstrap.rpartition(":")
        times = [asyncio.run(frames.join_wave(host, int(port), 500)) for _ in range(3)]
    return [
        Row(
            "500 members joining one group, last join to all synced",
            "≤ 1 s",
            f"{sorted(times)[1]:.2f} s (median of {', '.join(f'{value:.2f}' for value in times)})",
            sorted(times)[1] <= 1,
        )
    ]


def measure_crowd() -> list[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with running_gateway() as gateway:
            host, _, port = gateway.bootstrap.rpartition(":")
            crowd = asyncio.run(frames.crowd(host, int(port), 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return [
        Row(
            "10,000 groups of one member that join at once, until all are stable",
            "≤ 10 s, nobody refused",
            f"{crowd.seconds:.1f} s, {crowd.refused} refused",
            crowd.seconds <= 10 and not crowd.refused,
        )
    ]


def measure_consumer_groups() -> list[Row]:
    members = partitions = 1_000
    target = consumer_groups.target(members=members, partitions=partitions)
    with running_gateway() as gateway:
        host, _, port = gateway.bootstrap.rpartition(":")
        librdkafka.create_topic(gateway.bootstrap, "bench", partitions)
        wave = asyncio.run(consumer_groups.wave(host, int(port), "bench", members=members, partitions=partitions))
    with running_gateway() as gateway:
        cores, asked = asyncio.run(_live(gateway))
    return [
        Row(
            "target of 1,000 members and 1,000 partitions",
            "≤ 50 ms",
            f"{target.whole_ms:.1f} ms anew, {target.one_more_ms:.2f} ms for one more member",
            target.whole_ms <= 50,
        ),
        Row(
            "1,000 members that join at once, until each has its own of 1,000 partitions",
            "≤ 5 s",
            f"{wave.seconds:.1f} s",
            wave.seconds <= 5,
        ),
        Row("… their heartbeats once it is quiet", "p99 ≤ 10 ms", f"p99 {wave.p99_ms:.1f} ms", wave.p99_ms <= 10),
        Row(
            "10,000 members in 10 groups that ask every 5 s",
            "≤ 0.25 core",
            f"{cores:.2f} core ({asked:,} heartbeats)",
            cores <= 0.25,
        ),
    ]


async def _live(gateway: GatewayProcess) -> tuple[float, int]:
    host, _, port = gateway.bootstrap.rpartition(":")
    topics = [f"bench-{at}" for at in range(10)]
    for topic in topics:
        librdkafka.create_topic(gateway.bootstrap, topic, 100)
    crowd = await consumer_groups.enter(host, int(port), topics, members=10_000)
    before, began = psutil.Process(gateway.pid).cpu_times(), time.perf_counter()
    asked = await crowd.live(interval_s=5, seconds=20)
    after, seconds = psutil.Process(gateway.pid).cpu_times(), time.perf_counter() - began
    crowd.close()
    return (after.user + after.system - before.user - before.system) / seconds, asked


def measure_memory() -> list[Row]:
    with running_gateway() as gateway:
        idle, connected, committed = asyncio.run(memory.measure(gateway))
    return [
        Row("resident memory, idle", "≤ 120 MB", f"{idle / MEGABYTE:.0f} MB", idle <= 120 * MEGABYTE),
        Row("… with 1,000 connections", "≤ 250 MB", f"{connected / MEGABYTE:.0f} MB", connected <= 250 * MEGABYTE),
        Row(
            "… with 100,000 committed offsets",
            "≤ 250 MB",
            f"{committed / MEGABYTE:.0f} MB",
            committed <= 250 * MEGABYTE,
        ),
        *measure_attacks(),
    ]


def measure_attacks() -> list[Row]:
    rows: list[Row] = []
    for what, attack in (
        ("40 peers that ask 40 times for 64 MB and read nothing", attacks.unread_answers),
        ("40 producers of 15 KB frames while Postgres stands still", attacks.stalled_storage),
        ("the same with records of 100 bytes", partial(attacks.stalled_storage, record_bytes=100)),
    ):
        with running_gateway() as gateway:
            grown = asyncio.run(attack(gateway))
        before, greatest, after = (value / MEGABYTE for value in (grown.before, grown.greatest, grown.after))
        rows.append(
            Row(
                f"resident memory under attack: {what}",
                f"≤ {attacks.ALLOWED_BYTES / MEGABYTE:.0f} MB more",
                f"{before:.0f} MB before, at most {greatest:.0f} ({greatest - before:.0f} more), {after:.0f} after; "
                f"{grown.sent_bytes / MEGABYTE:.0f} MB sent",
                grown.within,
            )
        )
    return rows


def measure_validation() -> list[Row]:
    def tell(cost: validation.Cost) -> None:
        print(f"  {cost.codec}, {cost.batch_bytes}: {cost.lost:.0%}", file=sys.stderr, flush=True)

    return [
        Row(
            f"what looking inside batches costs: {cost.codec}, batches of {cost.batch_bytes // 1000} kB",
            "≤ 15 % of throughput",
            f"{cost.lost:.0%} ({cost.validated:.0f} of {cost.unvalidated:.0f} MB/s; gateway CPU "
            f"{cost.validated_cpu_ms:.2f} instead of {cost.unvalidated_cpu_ms:.2f} ms/MB)",
            cost.lost <= 0.15,
        )
        for cost in validation.measure(running_gateway, tell=tell)
    ]


def measure_codec() -> list[Row]:
    ours, theirs = codec.join_group_response_us()
    return [
        Row(
            "decode + encode of a JoinGroup response, 50 members",
            "≤ 1.5 × kafka-python's",
            f"{ours:.0f} µs, kafka-python {theirs:.0f} µs: {ours / theirs:.2f} ×",
            ours <= 1.5 * theirs,
        )
    ]


def measure_depth() -> list[Row]:
    shallow, deep = asyncio.run(depth.measure())
    return [
        Row(
            "cold fetch at 10 k and at 1 M batches of depth",
            "the same",
            f"p50 {shallow.p50_ms:.2f} and {deep.p50_ms:.2f} ms, p99 {shallow.p99_ms:.2f} and {deep.p99_ms:.2f} ms "
            "(64 KiB answers over the wire)",
            deep.p50_ms <= 1.25 * shallow.p50_ms,
        )
    ]


def measure_cluster() -> list[Row]:
    return [Row(*line) for line in cluster.measure()]


def measure_handoff() -> list[Row]:
    return [Row(*line) for line in handoff.measure()]


def measure_snapshot() -> list[Row]:
    first_ms, last_ms = asyncio.run(snapshot.measure())
    return [
        Row(
            f"one small commit while a snapshot is open, first and last of {snapshot.APPENDS:,}",
            "the same",
            f"p50 {first_ms:.2f} and {last_ms:.2f} ms",
            last_ms <= 1.25 * first_ms,
        )
    ]


def measure_retention() -> list[Row]:
    def checking_often(gateway: GatewayProcess) -> GatewayProcess:
        settings = {"group.initial.rebalance.delay.ms": "0", **retention.SETTINGS}
        return GatewayProcess(gateway.data_dir, database_url=None, settings=settings, environment={})

    with running_gateway(checking_often) as gateway:
        found = retention.measure(gateway)
    limit = retention.PARTITIONS * retention.RETENTION_BYTES / MEGABYTE
    seconds = found.produced.seconds
    last = found.samples[-1]

    def size(what: str) -> str:
        return f"{found.greatest(what) / MEGABYTE:.0f}"

    return [
        Row(
            f"the log under retention.bytes ({limit:.0f} MB) while {found.produced.megabytes_per_second:.0f} MB/s are "
            f"produced for {seconds:.0f} s",
            f"at most {found.log_bound_bytes / MEGABYTE:.0f} MB, its files {found.disk_bound_bytes / MEGABYTE:.0f} MB",
            f"at most {size('log_bytes')} MB, its files {size('disk_bytes')} MB, Postgres {size('database_bytes')} MB; "
            f"{found.deleted_bytes / seconds / MEGABYTE:.0f} MB/s deleted",
            found.bounded,
        ),
        Row(
            f"Postgres after {found.through_bytes / GIGABYTE:.1f} GB went through to segments",
            f"≤ {retention.DATABASE_BOUND_BYTES / MEGABYTE:.0f} MB after 50 GB, its write-ahead log apart",
            f"{last.database_bytes / MEGABYTE:.0f} MB for {found.chunks:,} chunks, write-ahead log "
            f"{last.wal_bytes / MEGABYTE:.0f} MB",
            found.small,
        ),
    ]


def measure_distance() -> list[Row]:
    rows: list[Row] = []
    for store, found in asyncio.run(distance.measure()).items():
        places = (found.near, found.passed_on, found.far)
        statements, in_flight = (
            [statistics.median(values) for values in column]
            for column in ([place.statement_ms for place in places], [place.in_flight_ms for place in places])
        )
        rates = [statistics.mean(place.bytes_per_second) / MEGABYTE for place in places]
        bar_ms = found.round_trip_ms + distance.TOLERANCE_MS
        away = f"Postgres {found.round_trip_ms:.2f} ms away, {store}"
        rows += [
            Row(
                f"one record in flight, {away}",
                f"p50 ≤ one round trip and {distance.TOLERANCE_MS} ms over that without the delay: {bar_ms:.2f}",
                f"{found.over_ms:.2f} ms over: p50 {in_flight[0]:.2f} ms near, {in_flight[1]:.2f} passed on without "
                f"delay, {in_flight[2]:.2f} far; `select 1` {statements[0]:.2f}, {statements[1]:.2f}, "
                f"{statements[2]:.2f} ms",
                found.over_ms <= bar_ms,
            ),
            Row(
                f"librdkafka produce, {away}",
                f"≥ {distance.SHARE} of that with a near one",
                f"{found.share:.2f}: {rates[0]:.0f} MB/s near, {rates[1]:.0f} passed on without delay, {rates[2]:.0f} "
                "far",
                found.share >= distance.SHARE,
            ),
        ]
    return rows


def measure_sql() -> list[Row]:
    with running_gateway() as gateway:
        url = EmbeddedPostgres(gateway.data_dir).running_url()
        assert url is not None
        for name, partitions in (("bench-12", 12), ("bench-1", 1), ("bench-delay", 1), ("bench-stock", 12)):
            librdkafka.create_topic(gateway.bootstrap, name, partitions)
        one = sql.compare(url, 1, "bench-12")
        wide = sql.compare(url, sql.CLIENTS, "bench-12")
        hot = sql.compare(url, sql.CLIENTS, "bench-1")
        delays = asyncio.run(sql.delays_ms(url, gateway.bootstrap, "bench-delay"))
        outbox = asyncio.run(sql.delays_of_an_outbox_ms(url, gateway.bootstrap, "bench-delay"))
        closed, open_ = asyncio.run(sql.delays_beside_an_open_transaction_ms(url, gateway.bootstrap, "bench-delay"))
        many = asyncio.run(sql.many_ms(url, "bench-12"))
        stock_alone, stock_beside = sql.stock_rates(url, gateway.bootstrap, "bench-stock")
    p50, p99 = statistics.median(delays), _p99(delays)
    return [
        Row(
            "insert + produce, 1 client, against the insert alone",
            "≤ 2× the time",
            f"{1000 / one.alone:.2f} and {1000 / one.produced:.2f} ms: {one.alone / one.produced:.2f}×",
            one.alone <= 2 * one.produced,
        ),
        Row(
            f"the same, {sql.CLIENTS} clients over 12 partitions",
            "≥ 0.4× the commits",
            f"{wide.alone:,.0f} and {wide.produced:,.0f} commits/s: {wide.produced / wide.alone:.2f}×",
            wide.produced >= 0.4 * wide.alone,
        ),
        Row(
            f"the same, {sql.CLIENTS} clients on one partition",
            "≥ 5,000 commits/s",
            f"{hot.produced:,.0f} commits/s (alone {hot.alone:,.0f})",
            hot.produced >= 5_000,
        ),
        Row(
            "from a SQL commit to a stock consumer",
            "p50 ≤ 10 ms, p99 ≤ 50 ms",
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
            p50 <= 10 and p99 <= 50,
        ),
        Row(
            f"the same by an outbox table, polled every {sql.OUTBOX_POLL_S * 1000:.0f} ms",
            f"above the p50 of SQL, {p50:.1f} ms",
            f"p50 {statistics.median(outbox):.1f} ms, p99 {_p99(outbox):.1f} ms",
            statistics.median(outbox) > p50,
        ),
        Row(
            f"from a SQL commit to a stock consumer, beside a transaction open for {sql.OPEN_S:.0f} s or longer",
            "p99 ≤ 1.2× of without, or 1 ms more",
            f"p99 {_p99(closed):.1f} ms without and {_p99(open_):.1f} ms with it",
            _p99(open_) <= max(1.2 * _p99(closed), _p99(closed) + 1),
        ),
        Row(
            f"a stock producer beside {sql.PACE_PER_S} SQL transactions/s into the same 12 partitions",
            "≥ 0.8× of without",
            f"{stock_alone:,.0f} and {stock_beside:,.0f} records/s: {stock_beside / stock_alone:.2f}×",
            stock_beside >= 0.8 * stock_alone,
        ),
        Row("1,000 records by one produce_many", "≤ 40 ms", f"{many:.1f} ms", many <= 40),
    ]


def _p99(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) * 99 // 100]


def measure_fixture() -> list[Row]:
    found = fixture.measure()
    return [
        Row(
            "a test server is ready (sluice.testing)",
            "≤ 1.0 s",
            f"{found.start_s:.2f} s; the first of the machine {found.first_start_s:.2f} s",
            found.start_s <= 1.0,
        ),
        Row("its reset between two tests", "≤ 30 ms", f"{found.reset_s * 1000:.1f} ms", found.reset_s <= 0.030),
        Row(
            "its memory after 1,000 records of 1 KB",
            "≤ 200 MB",
            f"{found.used_bytes / MEGABYTE:.0f} MB",
            found.used_bytes <= 200 * MEGABYTE,
        ),
    ]


MEASUREMENTS: dict[str, Callable[[], list[Row]]] = {
    "codec": measure_codec,
    "memory": measure_memory,
    "latency": measure_latency,
    "floor": measure_floor,
    "heartbeats": measure_heartbeats,
    "join-wave": measure_join_wave,
    "crowd": measure_crowd,
    "consumer-groups": measure_consumer_groups,
    "depth": measure_depth,
    "sql": measure_sql,
    "fixture": measure_fixture,
    "distance": measure_distance,
    "cluster": measure_cluster,
    "snapshot": measure_snapshot,
    "retention": measure_retention,
    "handoff": measure_handoff,
    "consume": measure_consume,
    "produce": measure_produce,
    "validation": measure_validation,
}


def report(rows: list[Row]) -> str:
    lines = [
        "# Benchmarks",
        "",
        measured_by("make bench"),
        "",
        "| what | target | measured | met |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.target} | {row.measured} | {'yes' if row.met else '**no**'} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


REPORTS = {"isolation": isolation.main, "curves": curves.main}
"""Measurements with options and a report of their own: the name, and the function that takes the remaining
arguments."""


def measured(measure: Callable[[], list[Row]], name: str) -> list[Row]:
    """Return the rows of a measurement. If it fails, as on a disk that is too small for it, one row gives the reason,
    and the report keeps all other rows."""
    try:
        return measure()
    except (RuntimeError, OSError) as error:
        return [Row(name, "it can be measured", f"not measured: {error}", False)]


def main() -> int:
    if sys.argv[1:] and (own := REPORTS.get(sys.argv[1])) is not None:
        return own(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measurements", nargs="*", choices=[*MEASUREMENTS, []], metavar="|".join(MEASUREMENTS))
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.measurements or MEASUREMENTS:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        rows += measured(MEASUREMENTS[name], name)
        print(f"  {rows[-1].measured}", file=sys.stderr, flush=True)
    text = report(rows)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
