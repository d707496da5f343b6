"""Topics are archived into tables and replayed through a real gateway: the replayed records equal the archived ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

from pipeline import table
from pipeline.archive import unfit
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Range
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from pipeline.partitioners import murmur2
from pipeline.replay.plan import MARK
from pipeline.schema import DATA, RESCUED
from tests.closing import close
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.conftest import interpreting

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def held(spark: SparkSession, path: str) -> int:
    return spark.read.format("delta").load(path).count()


def test_a_topic_becomes_a_table_with_every_record_as_it_was(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    given = topics.records(300, 2)
    topics.fill(gateway.bootstrap, topic, given)
    told = jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--max-batch-records", "120")
    assert len(told.events("committed")) == 3
    for partition in (0, 1):
        rows = spark.read.format("delta").load(out).where(F.col("partition") == partition).orderBy("offset").collect()
        assert [row.offset for row in rows] == list(range(150))
        found = [
            (
                row.partition,
                None if row.key is None else bytes(row.key),
                None if row.value is None else bytes(row.value),
                int(row.timestamp.timestamp() * 1000),
                [(each.key, None if each.value is None else bytes(each.value)) for each in row.headers or ()],
            )
            for row in rows
        ]
        assert found == topics.per_partition(given, partition)
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_an_archive_goes_on_where_it_was_and_takes_new_partitions_and_topics(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(50, 1))
    given = ("--pattern", f"{topic}.*", "--from", "latest")
    jobs.archive(spark, gateway.bootstrap, out, *given)
    assert held(spark, out) == 0
    topics.fill(gateway.bootstrap, topic, topics.records(30, 1))
    topics.grow(gateway.bootstrap, topic, 2)
    topics.make(gateway.bootstrap, f"{topic}-more", 1)
    topics.fill(gateway.bootstrap, topic, [(1, None, b"new", topics.START_MS, [])])
    topics.fill(gateway.bootstrap, f"{topic}-more", topics.records(7, 1))
    jobs.archive(spark, gateway.bootstrap, out, *given)
    jobs.archive(spark, gateway.bootstrap, out, *given)
    assert held(spark, out) == 38
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_a_restore_of_old_records_keeps_them_settings_partitions_and_empty_topics(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 4, retention_ms="-1", max_message_bytes="900000")
    empty = topics.fresh(gateway.bootstrap, 3)
    old_ms = topics.START_MS - 400 * 86_400_000
    topics.fill(gateway.bootstrap, topic, [(0, None, b"%d" % index, old_ms + index, []) for index in range(20)])
    jobs.archive(spark, gateway.bootstrap, out, "--topics", f"{topic},{empty}")
    mapping = ("--topic-map", f"{topic}={topic}-2,{empty}={empty}-2", "--create-topics")
    with pytest.raises(PipelineError, match=r"retention\.ms=60000 .* removes records"):
        jobs.replay(spark, gateway.bootstrap, out, *mapping, "--name", "short", "--topic-config", "retention.ms=60000")
    told = jobs.replay(spark, gateway.bootstrap, out, *mapping)
    assert told.events("held")[0]["records"] == 20
    cluster = Cluster(gateway.bootstrap)
    assert (cluster.partitions_of(f"{topic}-2"), cluster.partitions_of(f"{empty}-2")) == (4, 3)
    settings = cluster.own_settings([f"{topic}-2"])[f"{topic}-2"]
    assert settings == {"retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": "900000"}
    topics.make(gateway.bootstrap, f"{topic}-3", 4, retention_ms="60000")
    warned = jobs.replay(
        spark, gateway.bootstrap, out, "--topic-map", f"{topic}={topic}-3", "--name", "warned", "--dry-run"
    )
    assert f"retention.ms=60000 of the topic {topic}-3 removes records" in warned.words


def test_records_whose_timestamp_does_not_fit_are_dead_letters_and_the_archive_goes_on(
    spark: SparkSession, gateway: GatewayProcess, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfit, "MAX_HOLES", 3)
    topic = topics.fresh(gateway.bootstrap, 2, message_timestamp_after_max_ms=str(2**63 - 1))
    far = 2**62
    mixed = [(0, None, b'{"n":%d}' % n, far if n % 2 else topics.START_MS, []) for n in range(10)]
    block = [(1, b"k", b'{"n":%d}' % n, far if 5 <= n < 15 else topics.START_MS, [("h", b"v")]) for n in range(20)]
    topics.fill(gateway.bootstrap, topic, [*mixed, *block])
    told = jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert sum(line["records"] for line in told.events("unfit")) == 15
    assert held(spark, out) == 15
    letters = spark.read.format("delta").load(f"{out}_dead_letters").orderBy("partition", "offset").collect()
    assert [(row.partition, row.offset) for row in letters] == [
        *((0, offset) for offset in range(1, 10, 2)),
        *((1, offset) for offset in range(5, 15)),
    ]
    assert (bytes(letters[-1].key), bytes(letters[-1].value), letters[-1].headers[0].key) == (b"k", b'{"n":14}', "h")
    assert letters[0].reason.startswith(f"the timestamp {far} ms does not fit")
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 15)
    assert f"{topic}-1 offsets 5 to 14: the timestamp does not fit" in proof.words
    typed = jobs.archive(spark, gateway.bootstrap, f"{out}_typed", "--topics", topic, "--value", "json")
    assert sum(line["records"] for line in typed.events("unfit")) == 15
    assert [row.n for row in spark.read.format("delta").load(f"{out}_typed").select("data.n").collect()].count(0) == 2


def test_repair_archives_again_what_verify_names(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(200, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--max-batch-records", "100")
    spark.sql(f"UPDATE delta.`{out}` SET value = X'00' WHERE partition = 1 AND offset IN (17, 18, 40)").collect()
    spark.sql(f"UPDATE delta.`{out}` SET date = DATE '1999-01-01' WHERE partition = 1 AND offset = 60").collect()
    lost = (
        spark.read.format("delta")
        .load(out)
        .where("partition = 0 AND offset = 70")
        .select("_metadata.file_path")
        .first()
    )
    assert lost is not None
    Path(lost[0].removeprefix("file:")).unlink()
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert proof.code == 3
    assert proof.events("damaged")
    assert f"{topic}-0 offsets 50 to 99, 50 records: the archive does not hold it, the topic does" in proof.words
    assert f"{topic}-1 offsets 17 to 18, 2 records: its value is another in the archive" in proof.words
    assert f"{topic}-1 offset 60: the date is 1999-01-01, not the day of the timestamp" in proof.words
    with pytest.raises(PipelineError, match=f"The archive does not claim {topic}-1 offsets 90 to 109"):
        jobs.repair(spark, gateway.bootstrap, out, "--ranges", f"{topic}-1:90-109")
    named = f"{topic}-0:50-99,{topic}-1:17-18,{topic}-1:40,{topic}-1:60"
    jobs.repair(spark, gateway.bootstrap, out, "--ranges", named)
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"], held(spark, out)) == (0, 200, 200)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_progress_is_committed_as_a_groups_offsets(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(40, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--group", f"lag-of-{topic}")
    assert Cluster(gateway.bootstrap).group_offsets(f"lag-of-{topic}") == {(topic, 0): 20, (topic, 1): 20}


def test_group_that_is_named_later_gets_the_progress_without_new_records(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(40, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--group", f"lag-of-{topic}")
    assert Cluster(gateway.bootstrap).group_offsets(f"lag-of-{topic}") == {(topic, 0): 20, (topic, 1): 20}


def test_group_is_not_behind_a_batch_of_an_aborted_transaction(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=0)
    producer.flush(60)
    producer.abort_transaction(60)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--group", f"lag-of-{topic}")
    [log] = Cluster(gateway.bootstrap).logs([topic])
    assert held(spark, out) == 0
    assert Cluster(gateway.bootstrap).group_offsets(f"lag-of-{topic}") == {(topic, 0): log.end}


def test_what_was_removed_before_it_was_archived_stops_the_job_or_is_named(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    topics.delete_records(gateway.bootstrap, topic, 0, 33)
    with pytest.raises(PipelineError, match=f"13 offsets were removed .*{topic}-0 offsets 20 to 32"):
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    told = jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--on-data-loss", "continue")
    assert told.events("lost")[0]["lost"] == [[topic, 0, 20, 33]]
    assert held(spark, out) == 27
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert proof.code == 0
    assert "offsets 20 to 32 were removed from the topic before they were archived" in proof.words
    assert "offsets before 33 have been removed from the topic" in proof.words
    assert proof.events("proved")[0]["offsets"] == 7


def test_a_topic_made_again_or_deleted_is_refused_in_words(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.delete(gateway.bootstrap, topic)
    with pytest.raises(PipelineError, match="has been deleted"):
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.make(gateway.bootstrap, topic, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(30, 1))
    with pytest.raises(PipelineError, match="deleted and created again"):
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    with pytest.raises(PipelineError, match="Nothing of the archive can be proved"):
        jobs.verify(spark, gateway.bootstrap, out)
    with pytest.raises(PipelineError, match="does not hold the topic typo"):
        jobs.verify(spark, gateway.bootstrap, out, "--topics", "typo")
    assert held(spark, out) == 20


def test_a_typed_archive_grows_columns_and_sets_bad_rows_aside(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)

    def fill(*values: bytes) -> None:
        topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in values])

    given = ("--topics", topic, "--value", "json")
    fill(b'{"id": 1}', b"no json", b'{"id": 2}')
    jobs.archive(spark, gateway.bootstrap, out, *given)
    fill(b'{"id": "x", "more": 1.5}', b"[]")
    jobs.archive(spark, gateway.bootstrap, out, *given)
    table = spark.read.format("delta").load(out).orderBy("offset")
    assert table.schema[DATA].dataType.simpleString() == "struct<id:bigint,more:double>"
    assert [row[0] for row in table.select(f"{DATA}.id").collect()] == [1, None, 2, None, None]
    assert [row[0] for row in table.select(RESCUED).collect()] == [None, None, None, '{"id":"x"}', None]
    dead = spark.read.format("delta").load(f"{out}_dead_letters").orderBy("offset").collect()
    assert [(row.offset, row.reason) for row in dead] == [
        (1, "the value is not JSON"),
        (4, "the value is JSON, but not an object"),
    ]
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_a_column_of_a_table_widens_and_verify_looks_at_it(
    spark: SparkSession, gateway: GatewayProcess, out: str, tmp_path: Path
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    (tmp_path / "schema").write_text("n int, x float, many array<int>")
    given = ("--topics", topic, "--value", "json", "--schema", str(tmp_path / "schema"))
    for values in (
        [b'{"n": 1, "x": 0.5, "many": [1]}'],
        [b'{"n": 2147483648, "x": 0.123456789, "many": [2, 2147483648]}', b'{"n": 9223372036854775808, "x": 1}'],
    ):
        topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in values])
        jobs.archive(spark, gateway.bootstrap, out, *given)
    table = spark.read.format("delta").load(out).orderBy("offset")
    assert table.schema[DATA].dataType.simpleString() == "struct<n:decimal(38,0),x:double,many:array<bigint>>"
    assert [(int(row.data.n), row.data.x, row.data.many, row[RESCUED]) for row in table.collect()] == [
        (1, 0.5, [1], None), (2147483648, 0.123456789, [2, 2147483648], None), (9223372036854775808, 1.0, None, None),
    ]  # fmt: skip
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, len(proof.events("untyped"))) == (0, 1)
    spark.sql(f"UPDATE delta.`{out}` SET data.n = 3 WHERE offset = 1").collect()
    proof = jobs.verify(spark, gateway.bootstrap, out, "--value", "json")
    assert proof.code == 3
    assert [line["say"] for line in proof.events("difference")] == [
        f"DIFFERS {topic}-0 offset 1: its data is not what its value says"
    ]


def test_a_typed_batch_whose_dead_letters_are_committed_is_finished_as_it_was_planned(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    bad = [(0, None, b"bad", topics.START_MS, [])]
    topics.fill(gateway.bootstrap, topic, bad * 3)
    given = ("--topics", topic, "--value", "json")
    jobs.archive(spark, gateway.bootstrap, out, *given)
    topics.fill(gateway.bootstrap, topic, bad * 2)
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        jobs.archive(spark, gateway.bootstrap, out, *given)
    assert held(spark, f"{out}_dead_letters") == 5
    assert held(spark, out) == 3
    topics.fill(gateway.bootstrap, topic, bad * 4)
    jobs.archive(spark, gateway.bootstrap, out, *given)
    dead = spark.read.format("delta").load(f"{out}_dead_letters")
    assert sorted(row.offset for row in dead.collect()) == list(range(9))


def test_typed_batch_whose_dead_letters_are_committed_goes_on_behind_what_retention_removed(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    bad = [(0, None, b"bad", topics.START_MS, [])]
    topics.fill(gateway.bootstrap, topic, bad * 3)
    given = ("--topics", topic, "--value", "json")
    jobs.archive(spark, gateway.bootstrap, out, *given)
    topics.fill(gateway.bootstrap, topic, bad * 4)
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        jobs.archive(spark, gateway.bootstrap, out, *given)
    topics.delete_records(gateway.bootstrap, topic, 0, 5)
    with pytest.raises(PipelineError, match=f"2 offsets were removed .*{topic}-0 offsets 3 to 4"):
        jobs.archive(spark, gateway.bootstrap, out, *given)
    told = jobs.archive(spark, gateway.bootstrap, out, *given, "--on-data-loss", "continue")
    assert told.events("lost")[0]["lost"] == [[topic, 0, 3, 5]]
    assert held(spark, out) == 5
    assert held(spark, f"{out}_dead_letters") == 7
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_once_archives_later_records_though_the_topic_has_lost_an_unfinished_batch(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    bad = [(0, None, b"bad", topics.START_MS, [])]
    topics.fill(gateway.bootstrap, topic, bad * 3)
    given = ("--topics", topic, "--value", "json")
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        jobs.archive(spark, gateway.bootstrap, out, *given)
    topics.fill(gateway.bootstrap, topic, bad * 4)
    topics.delete_records(gateway.bootstrap, topic, 0, 3)
    told = jobs.archive(spark, gateway.bootstrap, out, *given, "--on-data-loss", "continue")
    assert told.events("lost")[0]["lost"] == [[topic, 0, 0, 3]]
    assert [row.offset for row in table.read(spark, out).orderBy("offset").collect()] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("value", "timestamp", "given"),
    [(b"bad", topics.START_MS, ("--value", "json")), (b"{}", 2**62, ())],
    ids=["no JSON", "a timestamp that does not fit"],
)
def test_a_batch_that_is_tried_again_by_the_same_run_loses_no_dead_letter(
    spark: SparkSession, gateway: GatewayProcess, out: str, value: bytes, timestamp: int, given: tuple[str, ...]
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1, message_timestamp_after_max_ms=str(2**63 - 1))
    bad: list[jobs.Record] = [(0, None, value, timestamp, [])]
    job = jobs.archive_job_of(spark, gateway.bootstrap, out, "--topics", topic, *given)
    job.open()
    topics.fill(gateway.bootstrap, topic, bad)
    job.step_once()
    topics.fill(gateway.bootstrap, topic, bad)
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        job.step_once()
    topics.fill(gateway.bootstrap, topic, bad)
    job.step_once()
    job.step_once()
    dead = spark.read.format("delta").load(f"{out}_dead_letters")
    assert sorted(row.offset for row in dead.collect()) == [0, 1, 2]


def test_a_commit_whose_answer_was_lost_is_not_taken_for_another_jobs(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, whole = topics.fresh(gateway.bootstrap, 1), table.append
    job = jobs.archive_job_of(spark, gateway.bootstrap, out, "--topics", topic, "--group", f"lag-of-{topic}")
    job.open()

    def unanswered(*given: Any, **named: Any) -> None:
        whole(*given, **named)
        raise jobs.DiedError

    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    with patch.object(table, "append", unanswered), pytest.raises(jobs.DiedError):
        job.step_once()
    topics.grow(gateway.bootstrap, topic, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    job.step_once()
    job.step_once()
    assert held(spark, out) == 40
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_progress_of_an_idle_archive_outlives_the_commits_that_delta_forgets(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    # Other jobs commit, as `compact` does each night, and each commit makes a checkpoint.
    for setting in ("'delta.checkpointInterval' = '1'", "'night' = '1'"):
        spark.sql(f"ALTER TABLE delta.`{out}` SET TBLPROPERTIES ({setting})").collect()
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert jobs.archive(spark, gateway.bootstrap, out, "--topics", topic).events("committed") == []
    # After 30 days Delta removes the files of its log that a checkpoint replaces.
    for path in sorted(Path(out, "_delta_log").glob("*.json"))[:-1]:
        path.unlink()
    topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert held(spark, out) == 20
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_dead_letters_of_another_archive_are_refused(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    """Both archives number their batches from 1, so each would take the other's dead letters for its own."""
    one, two = (topics.fresh(gateway.bootstrap, 1) for _ in range(2))
    for topic in (one, two):
        topics.fill(gateway.bootstrap, topic, [(0, None, b"bad", topics.START_MS, [])])
    given = ("--value", "json", "--dead-letters", f"{out}_letters")
    jobs.archive(spark, gateway.bootstrap, out, "--topics", one, *given)
    with pytest.raises(PipelineError, match="holds dead letters of another archive"):
        jobs.archive(spark, gateway.bootstrap, f"{out}_two", "--topics", two, *given)
    topics.fill(gateway.bootstrap, one, [(0, None, b"bad", topics.START_MS, [])])
    jobs.archive(spark, gateway.bootstrap, out, "--topics", one, *given)
    assert held(spark, f"{out}_letters") == 2
    # An archive that begins anew at the same place numbers its batches from 1, too.
    table.drop(spark, out)
    with pytest.raises(PipelineError, match="holds dead letters of another archive"):
        jobs.archive(spark, gateway.bootstrap, out, "--topics", one, *given)


def test_typed_batch_whose_dead_letters_are_committed_is_finished_with_a_topic_that_is_named_no_more(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    one, two = (topics.fresh(gateway.bootstrap, 1) for _ in range(2))

    def fill(count: int) -> None:
        for topic in (one, two):
            topics.fill(gateway.bootstrap, topic, [(0, None, b"bad", topics.START_MS, [])] * count)

    fill(1)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", f"{one},{two}", "--value", "json")
    fill(2)
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        jobs.archive(spark, gateway.bootstrap, out, "--topics", f"{one},{two}", "--value", "json")
    told = jobs.archive(spark, gateway.bootstrap, out, "--topics", one, "--value", "json")
    assert told.events("lost") == []
    assert (held(spark, out), held(spark, f"{out}_dead_letters")) == (6, 6)


def test_job_whose_dead_letters_are_another_jobs_does_not_archive_their_batch(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, whole = topics.fresh(gateway.bootstrap, 1), table.append
    topics.fill(gateway.bootstrap, topic, [(0, None, b"bad", topics.START_MS, [])] * 3)
    given = ("--topics", topic, "--value", "json")
    small = jobs.archive_job_of(spark, gateway.bootstrap, out, *given, "--max-batch-records", "1")
    large = jobs.archive_job_of(spark, gateway.bootstrap, out, *given)
    small.open()
    large.open()
    pending = [small]

    def overtaken(*given: Any, **named: Any) -> None:
        if pending:
            with (
                patch.object(table, "append", whole),
                jobs.dying_before_the_commit_of(out),
                pytest.raises(jobs.DiedError),
            ):
                pending.pop().step_once()
        whole(*given, **named)

    with patch.object(table, "append", overtaken), pytest.raises(PipelineError, match="Another archive job writes to"):
        large.step_once()
    assert held(spark, out) == 0
    jobs.archive(spark, gateway.bootstrap, out, *given)
    dead = spark.read.format("delta").load(f"{out}_dead_letters")
    assert sorted(row.offset for row in dead.collect()) == [0, 1, 2]
    assert held(spark, out) == 3


def test_topic_that_is_deleted_before_its_first_batch_is_committed_is_left_out(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    stays, goes = (topics.fresh(gateway.bootstrap, 1) for _ in range(2))
    for topic in (stays, goes):
        topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    given = ("--topics", f"{stays},{goes}", "--on-data-loss", "continue")
    job = jobs.archive_job_of(spark, gateway.bootstrap, out, *given)
    job.open()
    with jobs.dying_before_the_commit_of(out), pytest.raises(jobs.DiedError):
        job.step_once()
    topics.delete(gateway.bootstrap, goes)
    job.step_once()
    assert held(spark, out) == 10
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_deleted_topic_that_the_pattern_does_not_match_does_not_end_the_archive(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    goes, stays = (topics.fresh(gateway.bootstrap, 1) for _ in range(2))
    for topic in (goes, stays):
        topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", goes)
    topics.delete(gateway.bootstrap, goes)
    told = jobs.archive(spark, gateway.bootstrap, out, "--pattern", stays)
    assert (held(spark, out), told.events("settings")) == (20, [])
    with pytest.raises(PipelineError, match=f"The topic {goes} has been deleted"):
        jobs.archive(spark, gateway.bootstrap, out, "--pattern", f"{stays}|{goes}")


def test_archive_of_an_open_transaction_goes_on_with_committed_records_only(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    for _ in range(10):
        producer.produce(topic, b"v", partition=0)
    producer.flush(60)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--isolation", "read_uncommitted")
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert held(spark, out) == 10
    producer.commit_transaction(60)
    topics.fill(gateway.bootstrap, topic, topics.records(5, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert held(spark, out) == 15
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_search_of_a_partition_ends_where_it_has_found_too_much(gateway: GatewayProcess) -> None:
    topic = topics.fresh(gateway.bootstrap, 1, message_timestamp_after_max_ms=str(2**63 - 1))
    count = 2 * unfit.MAX_HOLES + 20
    times = [2**62 if n % 2 else topics.START_MS for n in range(count)]
    topics.fill(gateway.bootstrap, topic, [(0, None, b"v", at, []) for at in times])
    pieces = [Range(topic, 0, 0, count - 5), Range(topic, 0, count - 4, count)]
    found = unfit.find({"bootstrap.servers": gateway.bootstrap}, pieces, read_committed=True)
    assert found.ranges == [Range(topic, 0, 0, 2 * unfit.MAX_HOLES)]


def test_an_avro_archive_takes_a_newer_schema_and_sets_bad_rows_aside(
    spark: SparkSession, gateway: GatewayProcess, out: str, tmp_path: Path
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    fields = ['{"name": "id", "type": "long"}', '{"name": "name", "type": "string"}']
    schemas = [f'{{"type": "record", "name": "order", "fields": [{", ".join(fields[:count])}]}}' for count in (1, 2)]

    def fill(schema: str, ddl: str, rows: list[tuple[Any, ...]], *more: bytes | None) -> None:
        packed = spark.createDataFrame(rows, ddl).select(to_avro(F.struct("*"), schema)).collect()
        values = [b"\x00\x00\x00\x00\x07" + bytes(row[0]) for row in packed]
        topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in (*values, *more)])

    def archive(schema: str) -> None:
        (tmp_path / "order.avsc").write_text(schema)
        given = ("--value", "avro", "--framing", "confluent", "--schema", str(tmp_path / "order.avsc"))
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, *given)

    fill(schemas[0], "id long", [(1,), (2,)], b"\x00\x00\x00\x00\x07", None)
    archive(schemas[0])
    fill(schemas[1], "id long, name string", [(3, "three")])
    archive(schemas[1])
    table = spark.read.format("delta").load(out).orderBy("offset")
    assert table.schema[DATA].dataType.simpleString() == "struct<id:bigint,name:string>"
    found = [None if row.data is None else (row.data.id, row.data.name) for row in table.collect()]
    assert found == [(1, None), (2, None), None, None, (3, "three")]
    dead = spark.read.format("delta").load(f"{out}_dead_letters").collect()
    assert [(row.offset, row.reason) for row in dead] == [(2, "the value is not Avro of the given schema")]
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_verify_names_the_first_difference(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(100, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    spark.sql(f"UPDATE delta.`{out}` SET value = X'00' WHERE partition = 1 AND offset = 17").collect()
    spark.sql(f"DELETE FROM delta.`{out}` WHERE partition = 1 AND offset = 20").collect()
    told = jobs.verify(spark, gateway.bootstrap, out)
    assert told.code != 0
    assert [line["say"] for line in told.events("difference")] == [
        f"DIFFERS {topic}-1 offset 17: its value is another in the archive than in the topic",
        f"DIFFERS {topic}-1 offset 20: the archive does not hold it, the topic does",
    ]


def test_verify_of_some_topics_counts_their_records_outside_of_the_claim(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    one, two = (topics.fresh(gateway.bootstrap, 1) for _ in range(2))
    for topic in (one, two):
        topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", f"{one},{two}")
    rows = table.read(spark, out).where((F.col("topic") == one) & (F.col("offset") == 3))
    rows.withColumn("offset", F.lit(1_000).cast("long")).write.format("delta").mode("append").save(out)
    told = jobs.verify(spark, gateway.bootstrap, out, "--topics", one)
    assert [line["say"] for line in told.events("difference")] == [
        f"DIFFERS {one}-0: 1 records outside of what the archive claims"
    ]
    assert jobs.verify(spark, gateway.bootstrap, out, "--topics", two).code == 0


def test_verify_of_a_compacted_topic_proves_what_is_left_of_it(
    spark: SparkSession, gateway_factory: Any, out: str
) -> None:
    gateway = gateway_factory({"log.cleaner.backoff.ms": "100"})
    topic = topics.fresh(gateway.bootstrap, 1, cleanup_policy="compact", max_compaction_lag_ms="1", segment_ms="1")
    given = [(0, b"k%d" % (index % 5), b"v%d" % index, topics.START_MS, []) for index in range(200)]
    topics.fill(gateway.bootstrap, topic, given)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    told = jobs.verify(spark, gateway.bootstrap, out)
    assert told.code == 0
    assert "the topic is compacted" in told.words
    spark.sql(f"UPDATE delta.`{out}` SET value = X'00' WHERE offset = 199").collect()
    assert jobs.verify(spark, gateway.bootstrap, out).code != 0


def test_repair_keeps_records_that_compaction_has_removed_from_the_topic(
    spark: SparkSession, gateway_factory: Any, out: str
) -> None:
    gateway = gateway_factory({"log.cleaner.backoff.ms": "100"})
    topic = topics.fresh(gateway.bootstrap, 1, cleanup_policy="compact", max_compaction_lag_ms="1", segment_ms="1")
    # The newest segment is not compacted, so a third round removes the first.
    for _ in range(3):
        given = [(0, b"k%d" % index, b"v", topics.START_MS, []) for index in range(10)]
        topics.fill(gateway.bootstrap, topic, given)
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    deadline = time.monotonic() + topics.SECONDS
    while topics.read(gateway.bootstrap, topic, 0, 1)[0][0] == 0:
        assert time.monotonic() < deadline
    spark.sql(f"DELETE FROM delta.`{out}` WHERE offset = 29").collect()
    assert jobs.verify(spark, gateway.bootstrap, out).code == 3
    jobs.repair(spark, gateway.bootstrap, out, "--ranges", f"{topic}-0:0-29")
    assert [row.offset for row in table.read(spark, out).orderBy("offset").collect()] == list(range(30))
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_repair_beside_an_archive_of_the_same_day_keeps_the_records_of_both(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, whole = topics.fresh(gateway.bootstrap, 1), table.replace
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    spark.sql(f"DELETE FROM delta.`{out}` WHERE offset = 5").collect()

    def overtaken(*given: Any) -> None:
        topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
        whole(*given)

    with patch.object(table, "replace", overtaken):
        jobs.repair(spark, gateway.bootstrap, out, "--ranges", f"{topic}-0:5")
    assert [row.offset for row in table.read(spark, out).orderBy("offset").collect()] == list(range(40))


def test_small_files_are_merged_and_the_archive_stays_what_it_was(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    for _ in range(3):
        topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
        jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    before = table.files(spark, out).count()
    jobs.compact(spark, out)
    assert before >= 6
    assert table.files(spark, out).count() == 1
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_a_replay_writes_every_record_once_in_order_with_its_source(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 3)
    given = topics.records(90, 3)
    topics.fill(gateway.bootstrap, topic, given)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    target = f"{topic}-again"
    options = ("--topic-map", f"{topic}={target}", "--partition-map", "2:0", "--max-batch-records", "50")
    dry = jobs.replay(spark, gateway.bootstrap, out, *options, "--dry-run")
    assert dry.events("end")[0]["records"] == 90
    assert target not in Cluster(gateway.bootstrap).existing()
    jobs.replay(spark, gateway.bootstrap, out, *options, "--create-topics")
    jobs.replay(spark, gateway.bootstrap, out, *options)  # no work is left
    ends = {log.partition: log.end for log in Cluster(gateway.bootstrap).logs([target])}
    assert ends == {0: 60, 1: 30}
    offset_map = spark.read.format("delta").load(f"{out}_replay_map").collect()
    for partition, sources in ((0, (0, 2)), (1, (1,))):
        found = topics.read(gateway.bootstrap, target, partition, ends[partition])
        marks = [record[4][-1] for _, record in found]
        assert all(name == MARK for name, _ in marks)
        came = [tuple(int(each) for each in (value or b"").split(b"/")[1:]) for _, value in marks]
        for source in sources:
            kept = topics.per_partition(given, source)
            own = [(where, record) for where, record in zip(came, found, strict=True) if where[0] == source]
            assert [where[1] for where, _ in own] == list(range(30))
            assert [where[2] for where, _ in own] == [record[3] for record in kept]
            assert [(key, value, at, headers[:-1]) for _, (_, (_, key, value, at, headers)) in own] == [
                (key, value, at, headers) for _, key, value, at, headers in kept
            ]
            mapped = {
                row.source_from + index: row.target_from + index
                for row in offset_map
                if row.source_partition == source
                for index in range(row.records)
            }
            assert mapped == {where[1]: offset for where, (offset, _) in own}


def test_a_replay_by_key_puts_each_key_where_the_java_client_would(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    given = topics.records(200, 2)
    topics.fill(gateway.bootstrap, topic, given)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    target = f"{topic}-again"
    options = ("--topic-map", f"{topic}={target}", "--max-batch-records", "70")
    dry = jobs.replay(spark, gateway.bootstrap, out, *options, "--partition-map", "key:5", "--dry-run")
    assert dry.events("end")[0]["records"] == 200
    # The third batch's records are stored, but the map of their offsets is not. The next start recognises them,
    # partition by partition.
    by_five = (*options, "--partition-map", "key:5")
    with jobs.dying_before_the_commit_of(f"{out}_replay_map", at=3), pytest.raises(jobs.DiedError):
        jobs.replay(spark, gateway.bootstrap, out, *by_five, "--create-topics")
    jobs.replay(spark, gateway.bootstrap, out, *by_five)
    came: Counter[tuple[int, int]] = Counter()
    for log in Cluster(gateway.bootstrap).logs([target]):
        before: dict[int, int] = {}
        for _, (partition, key, _, _, headers) in topics.read(gateway.bootstrap, target, log.partition, log.end):
            source, offset = (int(each) for each in (headers[-1][1] or b"").split(b"/")[1:3])
            assert partition == (source if key is None else murmur2(key)) % 5
            assert before.get(source, -1) < offset
            before[source] = offset
            came[source, offset] += 1
    assert came == Counter({(source, offset): 1 for source in (0, 1) for offset in range(100)})
    with pytest.raises(PipelineError, match=f"{target} has 5 partitions, not 4"):
        jobs.replay(spark, gateway.bootstrap, out, *options, "--partition-map", "key:4", "--name", "other")


def test_a_replay_is_refused_when_it_would_not_be_the_same_or_not_alone(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(40, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    target = topics.fresh(gateway.bootstrap, 1)
    options = ("--topic-map", f"{topic}={target}", "--max-batch-records", "20")
    topics.fill(gateway.bootstrap, target, topics.records(5, 1))
    with jobs.dying_before_the_commit_of(f"{out}_replay_map", at=1), pytest.raises(jobs.DiedError):
        jobs.replay(spark, gateway.bootstrap, out, *options)
    with pytest.raises(PipelineError, match="another condition"):
        jobs.replay(spark, gateway.bootstrap, out, *options, "--filter", "offset > 3")
    # The first batch is written but not committed, and another producer has written since.
    assert len(topics.read(gateway.bootstrap, target, 0, 25)) == 25
    topics.fill(gateway.bootstrap, target, topics.records(1, 1))
    with pytest.raises(Exception, match="ForeignWriterError"):
        jobs.replay(spark, gateway.bootstrap, out, *options)


def test_replay_is_not_continued_with_other_offsets_or_with_a_filter_that_changes(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(40, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    options = ("--topic-map", f"{topic}={topic}-again", "--create-topics")
    for condition in ("timestamp < now()", "date < current_date", "rand() < 0.5", "date < DATE 'today'"):
        with pytest.raises(PipelineError, match="depends on the time or on chance"):
            jobs.replay(spark, gateway.bootstrap, out, *options, "--filter", condition)
    until = ("--filter", "topic <> 'now()'", "--until", f'{{"{topic}": {{"0": 20}}}}')
    jobs.replay(spark, gateway.bootstrap, out, *options, *until)
    jobs.replay(spark, gateway.bootstrap, out, *options, *until)
    with pytest.raises(PipelineError, match="was begun with another span"):
        jobs.replay(spark, gateway.bootstrap, out, *options, *until[:3], f'{{"{topic}": {{"0": 30}}}}')


@pytest.fixture
def interpreted_plans(spark: SparkSession) -> Iterator[None]:
    with interpreting(spark):
        yield


@pytest.mark.usefixtures("interpreted_plans")
@pytest.mark.parametrize("partition_map", ["same", "key:3"])
def test_a_replay_is_compared_with_its_archive_at_the_end(
    spark: SparkSession, gateway: GatewayProcess, out: str, partition_map: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    topics.fill(gateway.bootstrap, topic, topics.records(80, 2))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    options = ("--partition-map", partition_map, "--create-topics", "--max-batch-records", "50")
    again = ("--topic-map", f"{topic}={topic}-again", *options)
    told = jobs.replay(spark, gateway.bootstrap, out, *again)
    assert [line["rows"] for line in told.events("compared")] == [80]
    now = ("--topic-map", f"{topic}={topic}-now", "--timestamps", "now", "--name", "now", *options)
    assert len(jobs.replay(spark, gateway.bootstrap, out, *now).events("compared")) == 1

    # The replay is complete, so the same command only compares the records.
    spark.sql(f"UPDATE delta.`{out}` SET value = X'00' WHERE partition = 1 AND offset = 17").collect()
    with pytest.raises(PipelineError, match=rf"the record of {topic}/1/17/\d+: its value is another in the target"):
        jobs.replay(spark, gateway.bootstrap, out, *again)
    assert jobs.replay(spark, gateway.bootstrap, out, *again, "--no-compare").events("compared") == []
    spark.sql(f"DELETE FROM delta.`{out}` WHERE partition = 1 AND offset = 17").collect()
    with pytest.raises(PipelineError, match=rf"{topic}/1/17/\d+: the archive does not hold it, the target does"):
        jobs.replay(spark, gateway.bootstrap, out, *again)
    spark.sql(f"INSERT INTO delta.`{out}` SELECT * FROM delta.`{out}` WHERE partition = 0 AND offset = 3").collect()
    with pytest.raises(PipelineError, match="The targets are not what the archive holds"):
        jobs.replay(spark, gateway.bootstrap, out, *again)


def test_groups_read_on_at_the_record_they_would_have_read(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    given = [(0, None, b"%d" % index, topics.START_MS + index, []) for index in range(60)]
    topics.fill(gateway.bootstrap, topic, given)
    group = f"readers-of-{topic}"
    Cluster(gateway.bootstrap).commit(group, {(topic, 0): 31})
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    target = topics.fresh(gateway.bootstrap, 1)
    options = ("--topic-map", f"{topic}={target}", "--filter", "offset % 2 = 0")
    jobs.replay(spark, gateway.bootstrap, out, *options)
    settings = {"bootstrap.servers": gateway.bootstrap, "auto.offset.reset": "earliest"}
    busy = Consumer({**settings, "group.id": f"busy-{topic}"})
    busy.subscribe([topic])
    assert busy.poll(30) is not None
    busy.commit(asynchronous=False)
    before = Cluster(gateway.bootstrap).group_offsets(f"busy-{topic}")
    told = jobs.replay(spark, gateway.bootstrap, out, *options, "--translate-groups", f"{group},nobody,busy-{topic}")
    assert [line["say"] for line in told.events("skipped")] == [
        "group nobody is left as it is: it does not exist",
        f"group busy-{topic} is left as it is: it is stable, not empty: stop its consumers first",
    ]
    assert Cluster(gateway.bootstrap).group_offsets(f"busy-{topic}") == before
    close(busy)
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": group})
    at = consumer.committed([TopicPartition(target, 0)], 30)[0].offset
    consumer.close()
    assert topics.read(gateway.bootstrap, target, 0, at + 1)[-1][1][2] == b"32"


def test_another_archive_into_the_same_table_is_found_out(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    first = jobs.archive_job_of(spark, gateway.bootstrap, out, "--topics", topic)
    first.open()
    first.step_once()
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    with pytest.raises(PipelineError, match="Another archive job writes"):
        first.step_once()
    assert held(spark, out) == 40
    progress = last_progress(spark, out)
    assert progress is not None
    assert progress.batch == 2
