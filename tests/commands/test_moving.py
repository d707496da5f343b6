"""A move from the embedded Postgres to a Postgres of the user's own, as the README describes it."""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
import pytest

from gateway.cli import main
from tests.chaos.load import read_all
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory
from tests.postgres import EMPTY, Databases
from tests.steps.command import interpreted, output_of

RECORDS = 200
COMMITTED = 30


def produce(bootstrap: str, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "batch.size": 20_000})
    for number in range(RECORDS):
        producer.produce(topic, b"%06d" % number * 200)
    assert producer.flush(60) == 0


def committed(bootstrap: str, topic: str, offset: int | None = None) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "movers"})
    try:
        if offset is not None:
            place = confluent_kafka.TopicPartition(topic, 0, offset)
            consumer.commit(offsets=[place], asynchronous=False)
        (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], 30)
        return found.offset
    finally:
        consumer.close()


def test_a_move_from_the_embedded_postgres_keeps_records_and_offsets(
    gateway_factory: GatewayFactory, postgres: Databases, tmp_path: Path
) -> None:
    old = gateway_factory(embedded=True)
    topic = create_topic(old.bootstrap, 1)
    produce(old.bootstrap, topic)
    committed(old.bootstrap, topic, COMMITTED)
    expected = read_all(old.bootstrap, topic, 1)
    old.stop()
    url = postgres.create(EMPTY)
    backup, records = str(tmp_path / "backup"), str(tmp_path / "records")
    try:
        output_of("backup", backup, "--data-dir", str(old.data_dir), run=interpreted)
        said = output_of("restore", backup, "--database-url", url, "--log-store", records, run=interpreted)
        assert "its delegation tokens have ended" in said
        output_of("check", "--database-url", url, "--log-store", records, run=interpreted)
        new = gateway_factory(database_url=url, environment={"SLUICE_LOG_STORE": records})
        assert read_all(new.bootstrap, topic, 1) == expected
        assert len(expected) == RECORDS
        assert committed(new.bootstrap, topic) == COMMITTED
        new.stop()
    finally:
        postgres.drop(url)


@pytest.mark.parametrize("name", ["postgres", "postgres.from-65534"])
def test_an_empty_database_beside_an_embedded_one_is_refused_with_the_next_step(
    name: str,
    empty_database_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.serve.logs.configure", lambda log_format, level, node: None)
    (tmp_path / name).mkdir()
    words = ("--database-url", empty_database_url, "--data-dir", str(tmp_path))
    assert main(["serve", "--listen", "127.0.0.1:0", "--metrics-listen", "off", *words]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sluice: ")]
    assert line.startswith(
        f"sluice: the database is empty, and {tmp_path} holds the embedded Postgres of an earlier run"
    )
    assert "sluice backup" in line
    assert main(["users", "list", "--database-url", empty_database_url]) == 1, "no tables were made"
