"""A key is erased from the topic, the archive and the tables, and no other key is. The test reads everything again to
check the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from pyspark.sql import SparkSession

from pipeline import catalog, iceberg, table
from pipeline.archive import job as archive_job
from pipeline.archive.plan import Range
from pipeline.erase.job import MAX_ERASED
from pipeline.erase.proof import Proof, places, sha256_of, spans
from pipeline.erase.topic import TopicOfKey
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.conftest import INTERPRETED
from tests.pipeline.jobs import DiedError, Record
from tests.pipeline.keys import ed25519_keys

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]
ANNA = b"anna@example.org"
ERASED = ("--key", ANNA.decode())
COMPACTED = {"cleanup_policy": "compact", "delete_retention_ms": "86400000"}


@dataclass(frozen=True, slots=True)
class Lake:
    """An archive in one table format."""

    spark: SparkSession
    folder: Path
    archive: str
    given: tuple[str, ...]

    def rows(self, name: str = "") -> list[Any]:
        where = table.location(f"{self.archive}{name}", "iceberg" if self.given else "delta")
        return [tuple(row) for row in table.read(self.spark, where).orderBy("topic", "partition", "offset").collect()]

    def keys_in_files(self) -> set[bytes | None]:
        """Return the keys in all existing Parquet files, including files that no table refers to any more."""
        found: set[bytes | None] = set()
        for path in self.folder.rglob("*.parquet"):
            if "_delta_log" not in path.parts:
                found |= set(pyarrow.parquet.ParquetFile(path).read(["key"]).column("key").to_pylist())
        return found


@pytest.fixture(params=["delta", "iceberg"])
def lake(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    folder = tmp_path / "lake"
    if request.param == "delta":
        yield Lake(spark, folder, str(folder / "events"), ())
        return
    given = ("--format", "iceberg", "--catalog", str(folder))
    session = spark.newSession()
    settings = catalog.settings_of(jobs.parse(archive_job, ["--bootstrap", "x", "--out", "x", *given]))
    for name, value in {**settings, **INTERPRETED, "spark.sql.shuffle.partitions": "2"}.items():
        session.conf.set(name, value)
    yield Lake(session, folder, "events", given)


only_delta = pytest.mark.parametrize("lake", ["delta"], indirect=True)


def changes(count: int) -> list[Record]:
    """Return JSON records of ten keys over two partitions. Anna's key is in both, and one of her records is not
    JSON."""
    found: list[Record] = []
    for number in range(count):
        key = ANNA if number % 5 == 0 else b"key %d" % (number % 10)
        value = b"no JSON" if number == 5 else b'{"n":%d}' % number
        found.append((number % 2, key, value, topics.START_MS + number, []))
    return found


def values_in(bootstrap: str, topic: str, partitions: int, key: bytes) -> list[tuple[int, int, bytes | None]]:
    """Return partition, offset and value of a key's records, as a consumer reads them."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
    found: list[tuple[int, int, bytes | None]] = []
    ended: set[int] = set()
    try:
        while len(ended) < partitions:
            for message in consumer.consume(1000, 1.0):
                error = message.error()
                if error is not None:
                    assert error.name() == "_PARTITION_EOF", error
                    ended.add(message.partition())
                elif message.key() == key:
                    found.append((message.partition(), message.offset(), message.value()))
    finally:
        consumer.close()
    return sorted(found)


def archived(lake: Lake, bootstrap: str, count: int = 60) -> str:
    topic = topics.fresh(bootstrap, 2, **COMPACTED)
    topics.fill(bootstrap, topic, changes(count))
    jobs.archive(lake.spark, bootstrap, lake.archive, "--topics", topic, "--value", "json", *lake.given)
    return topic


# The first test of a module runs in each continuous integration, so it is one that takes less time than the others.
@only_delta
def test_an_erasure_that_is_killed_is_continued_by_the_same_command(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = archived(lake, gateway.bootstrap, 40)
    proof = tmp_path / "proof.json"
    settings = Cluster(gateway.bootstrap).own_settings([topic])
    given = (lake.spark, gateway.bootstrap, lake.archive, "--topic", topic, "--proof", str(proof))
    # A job that is killed cannot restore the topic's settings.
    with (
        patch.object(TopicOfKey, "compact", side_effect=DiedError),
        patch.object(Cluster, "set_settings", autospec=True, side_effect=only_once(Cluster.set_settings)),
        pytest.raises(DiedError),
    ):
        jobs.erase(*given, *ERASED)
    assert Cluster(gateway.bootstrap).own_settings([topic]) != settings
    with pytest.raises(PipelineError, match="the erasure of another key has begun"):
        jobs.erase(*given, "--key", "key 1")
    with patch.object(table, "vacuum", side_effect=DiedError), pytest.raises(DiedError):
        jobs.erase(*given, *ERASED)
    assert not proof.exists()
    jobs.erase(*given, *ERASED)
    assert Cluster(gateway.bootstrap).own_settings([topic]) == settings
    found = Proof.from_json(proof.read_text(), "proof")
    assert places(found.in_topic) == places(found.in_archive) == {(n % 2, n // 2) for n in range(0, 40, 5)}
    assert ANNA not in lake.keys_in_files()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("proof")] == ["proof.json"]


@only_delta
def test_erasure_does_not_take_the_settings_of_another_one_for_the_topics_own(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = archived(lake, gateway.bootstrap, 20)
    given = (lake.spark, gateway.bootstrap, lake.archive, "--topic", topic, "--proof")
    with (
        patch.object(TopicOfKey, "compact", side_effect=DiedError),
        patch.object(Cluster, "set_settings", autospec=True, side_effect=only_once(Cluster.set_settings)),
        pytest.raises(DiedError),
    ):
        jobs.erase(*given, str(tmp_path / "first.json"), *ERASED)
    # It would restore them after the first erasure has restored the topic's own settings.
    with (
        patch.object(TopicOfKey, "compact", side_effect=DiedError),
        pytest.raises(PipelineError, match=r"has the settings of another erasure, which has not ended"),
    ):
        jobs.erase(*given, str(tmp_path / "second.json"), "--key", "key 1")


def test_a_key_is_erased_from_topic_archive_and_tables_and_nothing_else(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    bootstrap = gateway.bootstrap
    topic = archived(lake, bootstrap)
    newest = f"{lake.archive}_newest"
    jobs.latest(lake.spark, lake.archive, newest, *lake.given)
    private, public = ed25519_keys(tmp_path, "ours")
    before, after, proof = (str(tmp_path / name) for name in ("before.json", "after.json", "proof.json"))
    jobs.manifest(lake.spark, lake.archive, before, "--key", private, *lake.given)
    topics.fill(bootstrap, topic, changes(20))
    jobs.archive(lake.spark, bootstrap, lake.archive, "--topics", topic, "--value", "json", *lake.given)
    held = {name: lake.rows(name) for name in ("", "_newest", "_dead_letters")}
    settings = Cluster(bootstrap).own_settings([topic])
    assert all(any(ANNA in row for row in rows) for rows in held.values())

    renewed = ("--manifest", before, "--manifest-out", after, "--sign", private)
    jobs.erase(
        lake.spark, bootstrap, lake.archive, "--topic", topic, *ERASED, "--proof", proof, "--tables", newest, *renewed,
        *lake.given,
    )  # fmt: skip

    left = values_in(bootstrap, topic, 2, ANNA)
    assert {partition for partition, _, _ in left} == {0, 1}
    assert all(value is None for _, _, value in left)
    assert {name: lake.rows(name) for name in held} == {
        name: [row for row in rows if ANNA not in row] for name, rows in held.items()
    }
    assert ANNA not in lake.keys_in_files()
    assert b"key 1" in lake.keys_in_files()
    assert Cluster(bootstrap).own_settings([topic]) == settings

    found = Proof.from_json(Path(proof).read_text(), "proof")
    was = {(number % 2, number // 2) for number in range(60) if number % 5 == 0}
    was |= {(number % 2, 30 + number // 2) for number in range(20) if number % 5 == 0}
    assert places(found.in_topic) == places(found.in_archive) == was
    assert places(found.tombstones) == {(partition, offset) for partition, offset, _ in left}
    assert found.key_sha256 == sha256_of(ANNA)
    assert ANNA.decode() not in Path(proof).read_text()
    assert (found.rest_before, found.rest_records) == (found.rest_after, len([r for r in held[""] if ANNA not in r]))
    assert found.tables == {newest: 1, f"{lake.archive}_dead_letters": 2}

    signed = ("--public-key", public, *lake.given)
    assert jobs.verify_by_manifest(lake.spark, lake.archive, after, *signed).code == 0
    assert jobs.verify_by_manifest(lake.spark, lake.archive, before, *signed).code == 3
    assert jobs.verify(lake.spark, bootstrap, lake.archive, *lake.given).code == 0
    assert jobs.erase(lake.spark, bootstrap, lake.archive, "--check", "--proof", proof, *signed).code == 0

    # The archive continues after the tombstones and does not contain them.
    topics.fill(bootstrap, topic, [(0, b"key 1", b'{"n":1}', topics.START_MS, [])])
    jobs.archive(lake.spark, bootstrap, lake.archive, "--topics", topic, "--value", "json", *lake.given)
    assert len(lake.rows()) == found.rest_records + 1
    assert jobs.verify(lake.spark, bootstrap, lake.archive, *lake.given).code == 0
    topics.fill(bootstrap, topic, [(1, ANNA, b'{"n":1}', topics.START_MS, [])])
    again = jobs.erase(lake.spark, bootstrap, lake.archive, "--check", "--proof", proof, *lake.given)
    assert again.code == 3
    assert [line["say"].startswith(f"HOLDS {topic}-1 offset") for line in again.events("left")] == [True]


@only_delta
def test_nothing_is_erased_if_the_topic_the_key_or_the_manifest_does_not_fit(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    bootstrap, spark, archive = gateway.bootstrap, lake.spark, lake.archive
    topic = topics.fresh(bootstrap, 2)
    topics.fill(bootstrap, topic, changes(20))
    jobs.archive(spark, bootstrap, archive, "--topics", topic)
    ours, _ = ed25519_keys(tmp_path, "ours")
    theirs, _ = ed25519_keys(tmp_path, "theirs")
    manifest, proof = str(tmp_path / "manifest.json"), tmp_path / "proof.json"
    jobs.manifest(spark, archive, manifest, "--key", ours)
    rows, given = lake.rows(), ("--topic", topic, "--proof", str(proof))
    renewed = ("--manifest", manifest, "--manifest-out", f"{manifest}.new")

    def refused(words: str, *more: str) -> None:
        with pytest.raises(PipelineError, match=words):
            jobs.erase(spark, bootstrap, archive, *given, *more)
        assert lake.rows() == rows
        assert len(values_in(bootstrap, topic, 2, ANNA)) == 4
        assert not proof.exists()

    refused("is not compacted .cleanup.policy=delete., so a tombstone removes nothing", *ERASED)
    refused("has this key, neither in the topic nor in the archive", "--key", "nobody")
    refused("is not signed with the key of .*theirs.pem, so it cannot be renewed", *ERASED, *renewed, "--sign", theirs)
    refused("is signed, but no key is given", *ERASED, *renewed)
    refused("Give --manifest and --manifest-out", *ERASED, "--manifest", manifest)
    refused("is not hexadecimal", "--key-hex", "xyz")
    with pytest.raises(PipelineError, match="holds no records of the topic other"):
        jobs.erase(spark, bootstrap, archive, *ERASED, "--topic", "other", "--proof", str(proof))
    spark.sql(f"DELETE FROM delta.`{archive}` WHERE partition = 1 AND offset = 1").collect()
    rows = lake.rows()
    refused(
        "The archive is not what .*manifest.json says: .*9 records instead of 10", *ERASED, *renewed, "--sign", ours
    )

    # Retention has removed the records from the topic, so the archive alone is erased.
    for partition in (0, 1):
        topics.delete_records(bootstrap, topic, partition, 10)
    jobs.erase(spark, bootstrap, archive, *given, *ERASED)
    assert lake.rows() == [row for row in rows if ANNA not in row]
    found = Proof.from_json(proof.read_text(), "proof")
    assert (found.in_topic, len(places(found.in_archive))) == ({}, 4)
    with pytest.raises(PipelineError, match="has been changed"):
        Proof.from_json(proof.read_text().replace(found.began, "2026-01-31T12:00:00+00:00"), "proof")


@only_delta
def test_a_key_is_erased_beside_a_record_whose_timestamp_does_not_fit(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = topics.fresh(gateway.bootstrap, 3, message_timestamp_after_max_ms=str(2**63 - 1), **COMPACTED)
    # In its own partition, because a broker compacts nothing behind a record that is too new.
    late: jobs.Record = (2, b"late", b"{}", 2**62, [])
    topics.fill(gateway.bootstrap, topic, [*changes(20), late])
    jobs.archive(lake.spark, gateway.bootstrap, lake.archive, "--topics", topic)
    given = ("--topic", topic, *ERASED, "--proof", str(tmp_path / "proof.json"))
    jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)
    assert all(value is None for _, _, value in values_in(gateway.bootstrap, topic, 3, ANNA))
    assert ANNA not in lake.keys_in_files()


@only_delta
def test_an_erasure_forgets_no_tombstone_that_the_topic_still_has(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    spark, bootstrap, where = lake.spark, gateway.bootstrap, lake.archive
    topic = topics.fresh(bootstrap, 3, **{**COMPACTED, "cleanup_policy": "compact,delete"})
    earlier: list[Record] = [(2, b"gone %d" % n, None, topics.START_MS + n, []) for n in range(MAX_ERASED)]
    topics.fill(bootstrap, topic, [*changes(20), *earlier])
    jobs.archive(spark, bootstrap, where, "--topics", topic)
    progress = archive_job.last_progress(spark, where)
    assert progress is not None
    stones = [Range(topic, 2, n, n + 1) for n in range(MAX_ERASED)]
    progress = replace(progress, batch=progress.batch + 1, erased=tuple(stones))
    nothing = table.read(spark, where).limit(0)
    table.append(nothing, where, archive_job.APPLICATION, progress.batch, progress.to_json())

    given = (spark, bootstrap, where, "--topic", topic, *ERASED, "--proof", str(tmp_path / "proof.json"))
    with pytest.raises(PipelineError, match=r"its topics still hold 1,000 tombstones .* Nothing was erased"):
        jobs.erase(*given)
    assert archive_job.last_progress(spark, where) == progress
    assert len(values_in(bootstrap, topic, 3, ANNA)) == 4

    topics.delete_records(bootstrap, topic, 2, 600)
    jobs.erase(*given)
    after = archive_job.last_progress(spark, where)
    assert after is not None
    ours = {
        Range(topic, partition, offset, offset + 1) for partition, offset, _ in values_in(bootstrap, topic, 3, ANNA)
    }
    assert set(after.erased) == {*stones[600:], *ours}


@only_delta
def test_an_erasure_that_cannot_find_the_dead_letters_is_refused(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic, bad = topics.fresh(gateway.bootstrap, 2, **COMPACTED), f"{lake.archive}_bad"
    topics.fill(gateway.bootstrap, topic, changes(20))
    typed = ("--topics", topic, "--value", "json", "--dead-letters", bad)
    jobs.archive(lake.spark, gateway.bootstrap, lake.archive, *typed)
    given = ("--topic", topic, *ERASED, "--proof", str(tmp_path / "proof.json"))
    for more in ((), ("--dead-letters", f"{bad}_typo")):
        with pytest.raises(PipelineError, match=r"There is no table of dead letters at .*, which may hold the key"):
            jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given, *more)


@pytest.mark.parametrize("lake", ["iceberg"], indirect=True)
def test_erasure_fails_at_each_start_as_long_as_a_file_with_the_key_is_kept(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic, name = archived(lake, gateway.bootstrap, 20), iceberg.quoted(table.location(lake.archive, "iceberg"))
    lake.spark.sql(f"ALTER TABLE {name} CREATE TAG kept").collect()
    proof = tmp_path / "proof.json"
    given = (lake.spark, gateway.bootstrap, lake.archive, "--topic", topic, *ERASED, "--proof", str(proof), *lake.given)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"which holds the key, is still there: a tag"):
            jobs.erase(*given)
        assert not proof.exists()
    lake.spark.sql(f"ALTER TABLE {name} DROP TAG kept").collect()
    jobs.erase(*given)
    assert ANNA not in lake.keys_in_files()


@only_delta
def test_erasure_that_is_continued_refuses_an_archive_that_no_longer_fits_its_manifest(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic, manifest = archived(lake, gateway.bootstrap, 20), str(tmp_path / "manifest.json")
    jobs.manifest(lake.spark, lake.archive, manifest)
    renewed = ("--manifest", manifest, "--manifest-out", f"{manifest}.new")
    given = ("--topic", topic, *ERASED, "--proof", str(tmp_path / "proof.json"), *renewed)
    with patch.object(TopicOfKey, "compact", side_effect=DiedError), pytest.raises(DiedError):
        jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)
    changed = f"UPDATE delta.`{lake.archive}` SET value = X'00' WHERE partition = 1 AND offset = 1"
    lake.spark.sql(changed).collect()
    with pytest.raises(PipelineError, match=r"The archive is not what .*manifest.json says"):
        jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)


@only_delta
def test_manifest_that_was_not_compared_before_the_rows_were_deleted_is_not_renewed(
    lake: Lake, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic, manifest = archived(lake, gateway.bootstrap, 20), str(tmp_path / "manifest.json")
    jobs.manifest(lake.spark, lake.archive, manifest)
    renewed = ("--manifest", manifest, "--manifest-out", f"{manifest}.new")
    given = ("--topic", topic, *ERASED, "--proof", str(tmp_path / "proof.json"))
    with patch.object(table, "vacuum", side_effect=DiedError), pytest.raises(DiedError):
        jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)
    with pytest.raises(PipelineError, match=r"The archive was not compared with .*manifest.json before"):
        jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given, *renewed)
    jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)

    jobs.manifest(lake.spark, lake.archive, manifest)
    given = ("--topic", topic, "--key", "key 1", "--proof", str(tmp_path / "second.json"), *renewed)
    with patch.object(table, "vacuum", side_effect=DiedError), pytest.raises(DiedError):
        jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)
    jobs.erase(lake.spark, gateway.bootstrap, lake.archive, *given)
    assert jobs.verify_by_manifest(lake.spark, lake.archive, f"{manifest}.new").code == 0


def only_once(whole: Callable[..., None]) -> Callable[..., None]:
    """Return the function `whole`, whose second call raises `DiedError`."""
    called: list[bool] = []

    def once(*given: Any) -> None:
        called.append(True)
        if len(called) > 1:
            raise DiedError
        whole(*given)

    return once


def test_offsets_are_named_in_runs() -> None:
    assert spans([(1, 7), (0, 3), (0, 2), (0, 5), (0, 2)]) == {"0": [[2, 3], [5, 5]], "1": [[7, 7]]}
    assert places({"0": [[2, 3], [5, 5]], "1": [[7, 7]]}) == {(0, 2), (0, 3), (0, 5), (1, 7)}
