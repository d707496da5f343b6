"""Changes of keyed records, as clients produce and apply them."""

from __future__ import annotations

import random

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from pipeline import table
from pipeline.partitioners import murmur2
from tests.pipeline import topics
from tests.pipeline.jobs import Record

PARTITIONS = 2


def changes(count: int, seed: int) -> list[Record]:
    """Return upserts and tombstones of a few keys, and records without a key. Each key has one partition."""
    chance = random.Random(seed)
    found: list[Record] = []
    for index in range(count):
        key = b"key %d" % chance.randrange(12)
        value = None if chance.random() < 0.3 else b"value %d" % index
        partition = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
        # Some timestamps go backwards. Only the offset determines the order within a partition.
        found.append((partition, key, value, topics.START_MS + chance.randrange(1000), []))
    return [*found, (0, None, b"without a key", topics.START_MS, [])]


def applied(records: list[Record]) -> dict[bytes, bytes]:
    held: dict[bytes, bytes] = {}
    for _, key, value, _, _ in records:
        if key is not None and value is not None:
            held[key] = value
        elif key is not None:
            held.pop(key, None)
    return held


def held(spark: SparkSession, path: str) -> dict[bytes, bytes]:
    rows = table.read(spark, path).collect()
    assert len({bytes(row.key) for row in rows}) == len(rows)
    return {bytes(row.key): bytes(row.value) for row in rows}


Version = tuple[bytes, int, bytes, int, int | None, int | None]
"""Key, offset, value, valid from, valid to, and the offset at which the version ends. Times are in milliseconds."""


def lived(records: list[Record]) -> list[Version]:
    """Return the versions of each key that a client sees if it applies every change in order."""
    found: list[Version] = []
    current: dict[bytes, Version] = {}
    clock: dict[bytes, int] = {}
    offsets = [0] * PARTITIONS
    for partition, key, value, time_ms, _ in records:
        offset = offsets[partition]
        offsets[partition] += 1
        if key is None:
            continue
        clock[key] = max(clock.get(key, 0), time_ms)
        if key in current:
            found.append((*current.pop(key)[:4], clock[key], offset))
        if value is not None:
            current[key] = (key, offset, value, clock[key], None, None)
    return sorted([*found, *current.values()], key=lambda each: each[:2])


def held_versions(spark: SparkSession, where: str) -> list[Version]:
    def ms(column: str) -> Column:
        return F.unix_millis(column).alias(column)

    rows = table.read(spark, where).select(
        "key", "offset", "value", ms("valid_from"), ms("valid_to"), "valid_to_offset"
    )
    found = [(bytes(key), offset, bytes(value), *rest) for key, offset, value, *rest in rows.collect()]
    return sorted(found, key=lambda each: each[:2])


def living(records: list[Record]) -> list[Record]:
    """Return the changes without deletes of keys that have no row at that time."""
    kept: list[Record] = []
    keys: set[bytes | None] = set()
    for record in records:
        if record[2] is not None or record[1] in keys:
            kept.append(record)
            (keys.discard if record[2] is None else keys.add)(record[1])
    return kept
