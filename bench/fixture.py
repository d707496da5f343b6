"""Measure the test server of `sluice.testing`: how soon it is ready, how fast it resets, how much memory it takes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import psutil
from confluent_kafka import Producer

from sluice.testing import Kafka

STARTS = 7
RESETS = 15
RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class Fixture:
    first_start_s: float
    """Seconds until the first start of a machine is ready. This start also creates the Postgres cluster that later
    starts copy.
    """
    start_s: float
    reset_s: float
    used_bytes: int
    """Memory (proportional set size) of the server and its Postgres, after RECORDS records of 1 KB."""


def measure() -> Fixture:
    """Start and reset servers one after the other, and return the medians."""
    starts_s: list[float] = []
    resets_s: list[float] = []
    used_bytes = 0
    for _ in range(STARTS):
        kafka = Kafka()
        began_s = time.perf_counter()
        kafka.start()
        starts_s.append(time.perf_counter() - began_s)
        try:
            _produce(kafka, kafka.create_topic(partitions=3), RECORDS)
            assert kafka.pid is not None
            processes = [psutil.Process(kafka.pid), *psutil.Process(kafka.pid).children(recursive=True)]
            used_bytes = max(used_bytes, sum(process.memory_full_info().pss for process in processes))
            if len(starts_s) == STARTS:
                resets_s = [_reset(kafka) for _ in range(RESETS)]
        finally:
            kafka.stop()
    return Fixture(starts_s[0], statistics.median(starts_s[1:]), statistics.median(resets_s), used_bytes)


def _reset(kafka: Kafka) -> float:
    _produce(kafka, kafka.create_topic(partitions=3), 1)
    began_s = time.perf_counter()
    kafka.reset()
    return time.perf_counter() - began_s


def _produce(kafka: Kafka, topic: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for _ in range(records):
        producer.produce(topic, b"x" * 1_000)
    assert producer.flush(30) == 0
