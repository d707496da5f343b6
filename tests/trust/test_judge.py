"""The judge reads the final state as the checks need it, the observer misses nothing, and a client's error counts."""

from __future__ import annotations

import asyncio
import uuid

import asyncpg
import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.gateway_process import GatewayProcess
from tests.steps.waiting import wait_for
from tests.trust.checks import Entry, Part, Place, numbers_never_fall
from tests.trust.direct import read_node
from tests.trust.history import History, Observed, Quantity
from tests.trust.patience import ClientError, WorkloadError
from tests.trust.run import EVERY_WORKLOAD_FINISHES, NO_CLIENT_FAILS, Verdict, read_log
from tests.trust.workloads import Observer, Workload, asking, create_topics

READ_S = 3.0
CALL_S = 30.0


@pytest.fixture
def topic(gateway: GatewayProcess) -> str:
    name = f"topic-{uuid.uuid4().hex[:6]}"
    create_topics(gateway.bootstrap, {name: 1}, {})
    return name


def transactional(gateway: GatewayProcess) -> confluent_kafka.Producer:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": gateway.bootstrap, "transactional.id": uuid.uuid4().hex, "linger.ms": 0}
    )
    producer.init_transactions(CALL_S)
    return producer


def transact(producer: confluent_kafka.Producer, topic: str, *values: int) -> None:
    """Begin a transaction, and wait until its records are acknowledged."""
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, str(value), key="k", partition=0)
    assert producer.flush(CALL_S) == 0


def test_transaction_that_stays_open_keeps_a_partition_from_being_read_to_its_end(
    gateway: GatewayProcess, topic: str
) -> None:
    producer = transactional(gateway)
    transact(producer, topic, 1, 2)
    assert read_log(gateway.bootstrap, {topic: 1}, READ_S) == (
        {},
        [f"{topic}-0 cannot be read to its end: 0 of 2 was reached"],
    )
    producer.commit_transaction(CALL_S)
    log, unread = read_log(gateway.bootstrap, {topic: 1}, READ_S)
    assert ([entry.value for entry in log.values()], unread) == ([1, 2], [])


def test_one_node_is_read_as_a_consumer_of_committed_records_reads(gateway: GatewayProcess, topic: str) -> None:
    producer = transactional(gateway)
    transact(producer, topic, 1, 2)
    producer.commit_transaction(CALL_S)
    transact(producer, topic, 3, 4)
    producer.abort_transaction(CALL_S)
    transact(producer, topic, 5)
    producer.commit_transaction(CALL_S)
    end = 8  # five records and three markers
    wanted = {Place(topic, 0, offset): Entry("k", value) for offset, value in ((0, 1), (1, 2), (6, 5))}
    assert asyncio.run(read_node(gateway.bootstrap, {Part(topic, 0): end}, READ_S)) == (wanted, [])
    assert read_log(gateway.bootstrap, {topic: 1}, READ_S) == (wanted, [])
    transact(producer, topic, 6)
    _, (sentence,) = asyncio.run(read_node(gateway.bootstrap, {Part(topic, 0): end + 1}, READ_S))
    assert sentence == f"{topic}-0 is read to offset 8 of 9 (NONE, high watermark 9)"
    producer.abort_transaction(CALL_S)


def test_value_that_is_no_number_is_read_as_one_that_no_producer_sends(gateway: GatewayProcess, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": gateway.bootstrap})
    producer.produce(topic, b"\xff", key=b"\xff", partition=0)
    assert producer.flush(CALL_S) == 0
    log, unread = read_log(gateway.bootstrap, {topic: 1}, READ_S)
    assert (log, unread) == ({Place(topic, 0, 0): Entry("\ufffd", -1)}, [])


def test_committed_offset_that_is_gone_is_observed(gateway: GatewayProcess, topic: str) -> None:
    history, group = History(), f"group-{uuid.uuid4().hex[:6]}"
    member = asking(gateway.bootstrap, group)
    member.commit(offsets=[TopicPartition(topic, 0, 5)], asynchronous=False)
    observer = Observer(history, gateway.bootstrap, {topic: 1}, {group: topic})
    observer.start()

    def last() -> int | None:
        seen = [each.value for each in history.of(Observed) if each.quantity is Quantity.COMMITTED]
        return seen[-1] if seen else None

    wait_for(last, "the offset", holds=lambda value: value == 5)
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    admin.delete_consumer_groups([group], request_timeout=CALL_S)[group].result(CALL_S)
    wait_for(last, "the lack of the offset", holds=lambda value: value == -1)
    observer.stop()
    observer.finish()
    member.close()
    assert numbers_never_fall(history.of(Observed), [], []) != []


class Fails(Workload):
    """A workload whose only thread raises an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__("fails")

        def fail() -> None:
            raise error

        self._thread(fail, "fails")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (asyncpg.UndefinedFunctionError("no such function"), ClientError),
        (KafkaException(KafkaError(KafkaError.INVALID_RECORD)), ClientError),
        (WorkloadError("not in time"), WorkloadError),
        (BrokenPipeError(), WorkloadError),
    ],
)
def test_error_of_a_client_does_not_count_as_unfinished(error: Exception, raised: type[Exception]) -> None:
    workload = Fails(error)
    workload.start()
    with pytest.raises(raised):
        workload.finish()


def test_run_with_an_error_of_a_client_is_more_than_unfinished() -> None:
    late = {EVERY_WORKLOAD_FINISHES: ["late"]}
    assert Verdict(1, 1.0, {**late, NO_CLIENT_FAILS: []}, {}, History(), {}).only_unfinished
    assert not Verdict(1, 1.0, {**late, NO_CLIENT_FAILS: ["no number"]}, {}, History(), {}).only_unfinished
