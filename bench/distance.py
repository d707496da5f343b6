"""Measure the cost of a remote Postgres: one record in flight and produce, with Postgres near and 1.2 ms away.

In turns, the gateway reaches the same Postgres by its socket and through a forwarding process (`delay.py`). Unlike a
network, the forwarding process uses the same cores. So it is also measured without a delay. A statement that does
nothing shows how far away Postgres is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from bench import librdkafka
from bench.delay import delayed
from bench.depth import fresh_directory
from storage.embedded import EmbeddedPostgres
from storage.embedded_socket import PORT, SOCKET_NAME, USER
from tests.gateway_process import GatewayProcess

DELAY_S = 0.0006
"""Seconds by which each direction is delayed."""
ROUNDS = int(os.environ.get("SLUICE_BENCH_DISTANCE_ROUNDS", "3"))
SECONDS = float(os.environ.get("SLUICE_BENCH_DISTANCE_SECONDS", "8"))
"""Duration of each measurement of produce."""
SAMPLES = 1_000
PARTITIONS = 6
TOLERANCE_MS = 0.2
"""Allowed difference between the delay's effect on one record in flight and on a round trip: a statement that does
nothing wakes fewer threads.
"""
SHARE = 0.8

NEAR, PASSED_ON, FAR = "near", "passed on", "far"
STORES = ("inline", "segments")
"""Two stores: no directory, as with a Postgres given by its URL, and a directory for the log."""


@dataclass(slots=True)
class Figures:
    """Figures for one place of Postgres and one store. Each has one value per round."""

    statement_ms: list[float] = field(default_factory=list[float])
    in_flight_ms: list[float] = field(default_factory=list[float])
    bytes_per_second: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Distance:
    """Figures of one store."""

    near: Figures
    passed_on: Figures
    far: Figures

    @property
    def round_trip_ms(self) -> float:
        """Return the milliseconds that the delay alone adds to a statement that does nothing."""
        return statistics.median(self.far.statement_ms) - statistics.median(self.passed_on.statement_ms)

    @property
    def over_ms(self) -> float:
        """Return by how much the delay lengthens one record in flight, without the cost of the forwarding process."""
        return statistics.median(self.far.in_flight_ms) - statistics.median(self.passed_on.in_flight_ms)

    @property
    def share(self) -> float:
        """Return the share of the throughput that is left if Postgres is far away, as the mean of all rounds."""
        return statistics.mean(self.far.bytes_per_second) / statistics.mean(self.near.bytes_per_second)


async def measure() -> dict[str, Distance]:
    """Return the measurements by store."""
    directory = fresh_directory()
    server = EmbeddedPostgres(directory / "server")
    await server.start()
    socket = directory / "server" / "socket" / SOCKET_NAME
    found: dict[str, dict[str, Figures]] = {
        store: {place: Figures() for place in (NEAR, PASSED_ON, FAR)} for store in STORES
    }
    number = itertools.count()
    try:
        with delayed(socket, 0) as passed_on, delayed(socket, DELAY_S) as far:
            ports = {NEAR: None, PASSED_ON: passed_on, FAR: far}
            for turn in range(ROUNDS):
                for store in STORES:
                    for place, port in list(ports.items())[:: 1 if turn % 2 == 0 else -1]:
                        database = f"distance_{next(number)}"
                        with _gateway_directory(directory / database) as own:
                            await _measure(server, database, port, own, store, found[store][place])
    finally:
        await server.stop()
        shutil.rmtree(directory)
    return {store: Distance(places[NEAR], places[PASSED_ON], places[FAR]) for store, places in found.items()}


@contextlib.contextmanager
def _gateway_directory(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


async def _measure(
    server: EmbeddedPostgres, database: str, port: int | None, directory: Path, store: str, figures: Figures
) -> None:
    """Measure one gateway on a new database, which is dropped afterwards."""
    holder = await asyncpg.connect(server.url)
    try:
        await holder.execute(f"create database {database}")
        if port is None:
            host = str(directory.parent / "server" / "socket")
            url = f"postgresql://{USER}@/{database}?host={host}&port={PORT}&sslmode=disable"
        else:
            url = f"postgresql://{USER}@127.0.0.1:{port}/{database}?sslmode=disable"
        figures.statement_ms.append(await _statement_ms(url))
        await asyncio.to_thread(_produce, url, directory, store, figures)
        await holder.execute(f"drop database {database} with (force)")
        # Wait until the writes of the last measurement are on disk, so that they do not slow down the next one.
        await holder.execute("checkpoint")
    finally:
        await holder.close()


def _produce(url: str, directory: Path, store: str, figures: Figures) -> None:
    place = "inline" if store == "inline" else str(directory / "log")
    gateway = GatewayProcess(directory, database_url=url, settings={}, environment={"SLUICE_LOG_STORE": place})
    gateway.start()
    try:
        librdkafka.create_topic(gateway.bootstrap, "one", 1)
        figures.in_flight_ms.append(librdkafka.one_in_flight(gateway.bootstrap, "one", samples=SAMPLES).p50_ms)
        librdkafka.create_topic(gateway.bootstrap, "many", PARTITIONS)
        produced = librdkafka.produce(gateway.bootstrap, "many", seconds=SECONDS)
        figures.bytes_per_second.append(produced.records * produced.record_bytes / produced.seconds)
    finally:
        gateway.close()


async def _statement_ms(url: str) -> float:
    """Return the p50 of a statement that does nothing."""
    connection = await asyncpg.connect(url)
    times_ms: list[float] = []
    try:
        for _ in range(SAMPLES):
            began = time.perf_counter()
            await connection.fetchval("select 1")
            times_ms.append((time.perf_counter() - began) * 1000)
    finally:
        await connection.close()
    return statistics.median(times_ms)
