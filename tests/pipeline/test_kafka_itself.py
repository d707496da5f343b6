"""Apache Kafka as the source, mainly to test transactions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.kafka.process import KafkaProcess, assemble
from tests.pipeline import jobs, topics

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProcess]:
    if shutil.which("mvn") is None:
        pytest.skip("Apache Kafka's jars are fetched by Maven, which is not installed")
    assemble()
    process = KafkaProcess(tmp_path_factory.mktemp("kafka"), settings={})
    process.start()
    yield process
    process.close()


def transact(bootstrap: str, topic: str, name: str, *ends: tuple[str, int]) -> Producer:
    """Produce transactions of this many records each. They end in `commit` or `abort`, or do not end (`open`)."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "transaction.timeout.ms": 600_000})
    producer.init_transactions(60)
    for number, (end, records) in enumerate(ends):
        producer.begin_transaction()
        for index in range(records):
            producer.produce(topic, f"{name} {end} {number}.{index}".encode(), b"k", index % 2,
                             timestamp=topics.START_MS + index)  # fmt: skip
        producer.flush(60)
        if end == "commit":
            producer.commit_transaction(60)
        elif end == "abort":
            producer.abort_transaction(60)
    return producer


def values(spark: SparkSession, path: str) -> list[str]:
    rows = spark.read.format("delta").load(path).orderBy("partition", "offset").collect()
    return [bytes(row.value).decode() for row in rows]


def test_what_was_aborted_or_is_not_committed_yet_is_not_archived(
    spark: SparkSession, kafka: KafkaProcess, tmp_path: Path
) -> None:
    out, topic = str(tmp_path / "table"), topics.fresh(kafka.bootstrap, 2)
    transact(kafka.bootstrap, topic, "first", ("commit", 40), ("abort", 30), ("commit", 20), ("abort", 10))
    still_open = transact(kafka.bootstrap, topic, "open", ("open", 10))
    # Small batches end within transactions, at markers, and within aborted records.
    given = ("--topics", topic, "--max-batch-records", "16")
    told = jobs.archive(spark, kafka.bootstrap, out, *given)
    assert len(told.events("committed")) > 4
    held = values(spark, out)
    assert len(held) == 60
    assert all(value.startswith("first commit") for value in held)
    assert jobs.verify(spark, kafka.bootstrap, out).code == 0

    still_open.commit_transaction(60)
    jobs.archive(spark, kafka.bootstrap, out, *given)
    held = values(spark, out)
    assert sum(value.startswith("open") for value in held) == 10
    assert len(held) == 70
    assert jobs.verify(spark, kafka.bootstrap, out).code == 0

    target = f"{topic}-again"
    jobs.replay(spark, kafka.bootstrap, out, "--topic-map", f"{topic}={target}", "--create-topics")
    for partition in (0, 1):
        came = [record[2] for _, record in topics.read(kafka.bootstrap, target, partition, 35)]
        assert [value.decode() for value in came if value is not None] == [
            row for row in held if int(row.rpartition(".")[2]) % 2 == partition
        ]


def test_read_uncommitted_archives_what_was_aborted_as_well(
    spark: SparkSession, kafka: KafkaProcess, tmp_path: Path
) -> None:
    out, topic = str(tmp_path / "table"), topics.fresh(kafka.bootstrap, 2)
    transact(kafka.bootstrap, topic, "all", ("commit", 20), ("abort", 10))
    everything = ("--isolation", "read_uncommitted")
    jobs.archive(spark, kafka.bootstrap, out, "--topics", topic, *everything)
    assert len(values(spark, out)) == 30
    assert jobs.verify(spark, kafka.bootstrap, out, *everything).code == 0
    # The archive holds records that a read_committed reader of the topic does not receive, and verify reports them.
    assert jobs.verify(spark, kafka.bootstrap, out).code != 0


def test_what_retention_took_is_told(spark: SparkSession, kafka: KafkaProcess, tmp_path: Path) -> None:
    out, topic = str(tmp_path / "table"), topics.fresh(kafka.bootstrap, 1)
    topics.fill(kafka.bootstrap, topic, topics.records(100, 1))
    jobs.archive(spark, kafka.bootstrap, out, "--topics", topic)
    topics.delete_records(kafka.bootstrap, topic, 0, 40)
    proof = jobs.verify(spark, kafka.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 60)
    assert "offsets before 40 have been removed from the topic" in proof.words
