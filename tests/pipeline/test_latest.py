"""The table of the newest row per key: what a client that applies every change in order would hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from pipeline import delta, table
from pipeline.errors import PipelineError
from pipeline.latest import job as latest_job
from pipeline.partitioners import murmur2
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.jobs import DiedError, Record

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]
PARTITIONS = 2


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def changes(count: int, seed: int) -> list[Record]:
    """Upserts and tombstones of few keys, each key in its partition, and records without a key."""
    chance = random.Random(seed)
    found: list[Record] = []
    for index in range(count):
        key = b"key %d" % chance.randrange(12)
        value = None if chance.random() < 0.3 else b"value %d" % index
        partition = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
        # Times go backwards now and then; only the offset counts within a partition.
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


def test_the_table_holds_what_a_client_that_applies_every_change_holds(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, latest = topics.fresh(gateway.bootstrap, PARTITIONS), f"{out}_latest"
    records = changes(120, seed=1)
    topics.fill(gateway.bootstrap, topic, records)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    told = jobs.latest(spark, out, latest, "--max-batch-records", "50")
    assert len(told.events("committed")) == 3
    assert held(spark, latest) == applied(records)

    more = changes(40, seed=2)
    topics.fill(gateway.bootstrap, topic, more)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    with patch.object(delta, "merge", side_effect=DiedError), pytest.raises(DiedError):
        jobs.latest(spark, out, latest)
    jobs.latest(spark, out, latest)
    assert held(spark, latest) == applied([*records, *more])
    assert jobs.latest(spark, out, latest).events("committed") == []
    with pytest.raises(PipelineError, match="made with another --archive, --envelope or --topics"):
        jobs.latest(spark, out, latest, "--envelope", "debezium")

    # A batch that is merged again, from its beginning, changes nothing and brings nothing back.
    done = latest_job.last_merged(spark, latest)
    assert done is not None
    first = latest_job.Merged(out, "none", (), done.batch)
    with (
        patch.object(latest_job, "last_merged", side_effect=[first, None]),
        pytest.raises(PipelineError, match="Another job merges"),
    ):
        jobs.latest(spark, out, latest)
    assert held(spark, latest) == applied([*records, *more])


def test_debeziums_envelope_is_opened(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic, latest = topics.fresh(gateway.bootstrap, 1), f"{out}_latest"

    def change(operation: str, key: int, after: object, *, schema: bool = False) -> Record:
        told = {"op": operation, "before": {"id": key}, "after": after}
        value = {"schema": {}, "payload": told} if schema else told
        return (0, b'{"id":%d}' % key, json.dumps(value).encode(), topics.START_MS, [])

    given = [
        change("r", 1, {"id": 1, "name": "a"}), change("c", 2, {"id": 2}, schema=True),
        change("u", 1, {"id": 1, "name": "b"}, schema=True), change("c", 3, {"id": 3}), change("d", 3, None),
        (0, b'{"id":3}', None, topics.START_MS, []), change("t", 2, None), change("d", 4, None),
    ]  # fmt: skip
    topics.fill(gateway.bootstrap, topic, given)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    jobs.latest(spark, out, latest, "--envelope", "debezium")
    assert {key: json.loads(value) for key, value in held(spark, latest).items()} == {
        b'{"id":1}': {"id": 1, "name": "b"}, b'{"id":2}': {"id": 2},
    }  # fmt: skip
