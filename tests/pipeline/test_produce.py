"""The writer of a replay's batch, run as a Spark task runs it. Several partitions wait for the broker together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pyarrow as pa
import pytest

from pipeline.replay.plan import MARK
from pipeline.replay.produce import ForeignWriterError, Writer, _Run, mark
from tests.gateway_process import GatewayProcess
from tests.pipeline import topics
from tests.pipeline.jobs import Record

PARTITIONS, EACH = 5, 3
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def batch(topic: str, partition: int) -> pa.RecordBatch:
    """Return records of a source partition that belong to the target partition of the same number."""
    columns = {
        "target_topic": pa.array([topic] * EACH),
        "target_partition": pa.array([partition] * EACH, pa.int32()),
        "topic": pa.array(["source"] * EACH),
        "partition": pa.array([partition] * EACH, pa.int32()),
        "offset": pa.array(range(EACH), pa.int64()),
        "timestamp_ms": pa.array([topics.START_MS] * EACH, pa.int64()),
        "key": pa.array([None] * EACH, pa.binary()),
        "value": pa.array([b"%d" % at for at in range(EACH)], pa.binary()),
        "headers": pa.array([[]] * EACH, HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


def writer(gateway: GatewayProcess, topic: str, at_once: int = 64) -> Writer:
    bases, settings = (
        {(topic, partition): 0 for partition in range(PARTITIONS)},
        {"bootstrap.servers": gateway.bootstrap},
    )
    return Writer("r", 1, settings, bases, keep_timestamps=True, settle=False, at_once=at_once)


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_every_partition_has_its_records_and_rows(gateway: GatewayProcess, at_once: int) -> None:
    topic = topics.fresh(gateway.bootstrap, PARTITIONS)
    rows = [
        row
        for part in writer(gateway, topic, at_once).write(batch(topic, partition) for partition in range(PARTITIONS))
        for row in part.to_pylist()
    ]
    assert [(row["source_partition"], row["target_partition"], row["target_from"], row["records"]) for row in rows] == [
        (partition, partition, 0, EACH) for partition in range(PARTITIONS)
    ]
    for partition in range(PARTITIONS):
        held = topics.read(gateway.bootstrap, topic, partition, EACH)
        assert [record[2] for _, record in held] == [b"0", b"1", b"2"]


def test_another_writer_is_found_in_a_partition_that_is_not_the_last(gateway: GatewayProcess) -> None:
    topic = topics.fresh(gateway.bootstrap, PARTITIONS)

    def batches() -> Iterator[pa.RecordBatch]:
        for partition in range(PARTITIONS):
            yield batch(topic, partition)
            if partition == 1:
                topics.fill(gateway.bootstrap, topic, [(0, None, b"foreign", topics.START_MS, [])])

    with pytest.raises(ForeignWriterError, match=f"{topic}-0 ends at 4 instead of 3"):
        list(writer(gateway, topic).write(batches()))


def test_a_writer_waits_for_another_one_of_its_batch_that_still_writes(gateway: GatewayProcess) -> None:
    """A cluster that has lost an executor may run a stage again while tasks of its first run still write."""
    topic, whole = topics.fresh(gateway.bootstrap, PARTITIONS), vars(_Run)["_watermarks"]
    records: list[Record] = [
        (0, None, b"%d" % at, topics.START_MS, [(MARK, mark("source", 0, at, topics.START_MS))]) for at in range(EACH)
    ]
    topics.fill(gateway.bootstrap, topic, records[:1])
    looks = iter(([], records[1:]))

    def watermarks(run: _Run, key: tuple[str, int]) -> tuple[int, int]:
        topics.fill(gateway.bootstrap, topic, next(looks, []))
        return whole(run, key)

    with patch.object(_Run, "_watermarks", watermarks):
        [rows] = writer(gateway, topic).write([batch(topic, 0)])
    assert [(row["target_from"], row["records"]) for row in rows.to_pylist()] == [(0, EACH)]
    held = topics.read(gateway.bootstrap, topic, 0, EACH)
    assert [record[2] for _, record in held] == [b"0", b"1", b"2"]


@pytest.mark.timeout(60)
def test_a_writer_does_not_wait_for_another_client_that_never_stops(gateway: GatewayProcess) -> None:
    topic, whole = topics.fresh(gateway.bootstrap, PARTITIONS), vars(_Run)["_watermarks"]

    def watermarks(run: _Run, key: tuple[str, int]) -> tuple[int, int]:
        topics.fill(gateway.bootstrap, topic, [(0, None, b"foreign", topics.START_MS, [])])
        return whole(run, key)

    settling = replace(writer(gateway, topic), settle=True)
    with patch.object(_Run, "_watermarks", watermarks), pytest.raises(ForeignWriterError, match="of another client"):
        list(settling.write([batch(topic, 0)]))
