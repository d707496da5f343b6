"""The history checker of the SQL door: its comparison, and a short attack."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tests.gateway_process import GatewayProcess
from tests.postgres import LoopThread
from tests.sql import history
from tests.sql.conftest import create_topic
from tests.sql.history import Findings, Record, Summing, compare, sums_of

FIRST: Record = ("t", "k", "a", 1)
SECOND: Record = ("t", "k", "b", 2)
EXPECTED = {("t", "k"): [("a", 1), ("b", 2)]}


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ([SECOND, FIRST], "the order differs"),
        ([FIRST], "1 records are missing and 0 are too many"),
        ([FIRST, SECOND, SECOND], "0 records are missing and 1 are too many"),
        ([FIRST, ("t", "k", "b", 3)], "1 records are missing and 1 are too many"),
    ],
)
def test_a_log_that_differs_from_the_tables_is_reported(log: list[Record], sentence: str) -> None:
    (found,) = compare(log, EXPECTED)
    assert sentence in found


def test_a_log_that_equals_the_tables_is_accepted() -> None:
    assert compare([FIRST, ("t", "other", "c", 5), SECOND], {**EXPECTED, ("t", "other"): [("c", 5)]}) == []
    assert sums_of([FIRST, SECOND]) == {("t", "k"): (2, 3)}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_attack_breaks_no_promise() -> None:
    assert history.run(1, 15).violations == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_longer_attack_breaks_no_promise() -> None:
    assert history.run(2, 180).violations == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_consumer_that_ends_by_an_error_is_reported(gateway: GatewayProcess) -> None:
    assert gateway.database_url is not None
    for topic, partitions in history.TOPICS.items():
        create_topic(gateway, topic, partitions)
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    producer.produce("door-0", b"no JSON", b"key")
    assert producer.flush(30) == 0
    findings, loop = Findings(), LoopThread()
    try:
        consumer = Summing(gateway.bootstrap, gateway.database_url, loop, findings, seed=1)
        consumer.finish()
    finally:
        loop.close()
    assert list(findings.violations) == ["every consumer works until it is stopped"]
