"""`sluice.testing.Kafka` with stock clients: topics, groups, faults, and the end of the server."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from sluice.testing import Kafka, KafkaTestError
from tests.steps.waiting import wait_for

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
TRANSPORT_FAILED = -195  # librdkafka has no public name for this error
DATA = f"{tempfile.gettempdir()}/sluice-test-{os.geteuid()}-*"


@pytest.fixture(scope="module")
def server() -> Iterator[Kafka]:
    with Kafka() as kafka:
        yield kafka


@pytest.fixture
def kafka(server: Kafka) -> Iterator[Kafka]:
    server.reset()
    yield server
    server.heal()


def produce(kafka: Kafka, topic: str, *values: str, **settings: object) -> list[KafkaError | None]:
    """Produce records and return the error of each."""
    errors: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": kafka.bootstrap, **settings})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    return errors


class Member:
    """A consumer that polls in a thread and records what happens to its partitions."""

    def __init__(self, kafka: Kafka, topic: str, group: str, client_id: str, **settings: object) -> None:
        self.assigned, self.revoked, self.lost = 0, 0, 0
        self.partitions = 0
        self.values: list[str] = []
        consumer_settings = {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": group,
            "client.id": client_id,
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 200,
            **settings,
        }
        if settings.get("group.protocol") == "consumer":
            del consumer_settings["heartbeat.interval.ms"]  # the broker chooses this value
        self._consumer = Consumer(consumer_settings)
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned += 1

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.revoked += 1

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += 1

    def _poll(self) -> None:
        while not self._ended.is_set():
            message: Message | None = self._consumer.poll(0.05)
            self.partitions = len(self._consumer.assignment())
            if message is not None and message.error() is None:
                value = message.value()
                assert isinstance(value, bytes)
                self.values.append(value.decode())

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_S)
        self._consumer.close()


# --- topics and settings ----------------------------------------------------------------------------------------------


def test_records_come_back_through_a_stock_client(kafka: Kafka) -> None:
    topic = kafka.create_topic(partitions=3)
    assert produce(kafka, topic, "a", "b") == [None, None]
    with Member(kafka, topic, "readers", "one") as member:
        wait_for(lambda: sorted(member.values) == ["a", "b"], "the records were not read")


def test_reset_leaves_neither_topics_nor_groups_nor_faults(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    produce(kafka, topic, "a")
    with Member(kafka, topic, "readers", "one") as member:
        wait_for(lambda: member.values == ["a"], "the record was not read")
        kafka.fail_next("Produce", times=100)
        kafka.reset()
    kafka.reset()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    assert admin.list_consumer_groups(request_timeout=PATIENCE_S).result().valid == []
    assert not [name for name in admin.list_topics(timeout=PATIENCE_S).topics if not name.startswith("__")]
    again = kafka.create_topic(topic)
    assert produce(kafka, again, "b") == [None]
    with Member(kafka, again, "readers", "two") as member:
        wait_for(lambda: member.values == ["b"], "the group's offsets or the old record are still there")


def test_settings_reach_the_broker_and_a_wrong_one_is_one_sentence() -> None:
    with Kafka({"num.partitions": "7"}) as kafka:
        produce(kafka, "made-on-first-use", "a")
        topics = AdminClient({"bootstrap.servers": kafka.bootstrap}).list_topics(timeout=PATIENCE_S).topics
        assert len(topics["made-on-first-use"].partitions) == 7
    with pytest.raises(KafkaTestError, match=r"num\.partition: .*num\.partitions"), Kafka({"num.partition": "7"}):
        pass


def test_a_gateways_own_settings_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("SLUICE_NONSENSE", "1")
    with Kafka() as kafka:
        assert produce(kafka, "greetings", "a") == [None]


def test_a_restart_keeps_records_groups_and_address(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    with Member(kafka, topic, "readers", "one") as member:
        produce(kafka, topic, "a")
        wait_for(lambda: member.values == ["a"], "the record was not read")
        before = kafka.bootstrap, kafka.members("readers")
        kafka.restart()
        assert (kafka.bootstrap, kafka.members("readers")) == before
        produce(kafka, topic, "b")
        wait_for(lambda: member.values == ["a", "b"], "the second record was not read")
        assert member.revoked == 0


# --- groups -----------------------------------------------------------------------------------------------------------

PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@PROTOCOLS
def test_a_lost_member_hears_of_it_and_joins_again(kafka: Kafka, protocol: str) -> None:
    topic = kafka.create_topic(partitions=4)
    with (
        Member(kafka, topic, "readers", "one", **{"group.protocol": protocol}) as one,
        Member(kafka, topic, "readers", "two", **{"group.protocol": protocol}) as two,
    ):
        wait_for(lambda: (one.partitions, two.partitions) == (2, 2), "the members do not share the topic")
        ids = {client_id: member_id for member_id, client_id in kafka.members("readers").items()}
        assert kafka.lose_member("readers", ids["one"]) == ids["one"]
        wait_for(lambda: one.lost == 1, "the lost member was not told")
        wait_for(lambda: (one.partitions, two.partitions) == (2, 2), "the lost member did not come back")
        assert ids["one"] not in kafka.members("readers") or protocol == "consumer"
        assert two.lost == 0


@PROTOCOLS
def test_a_rebalance_takes_partitions_away_and_gives_them_back(kafka: Kafka, protocol: str) -> None:
    topic = kafka.create_topic(partitions=4)
    with Member(kafka, topic, "readers", "one", **{"group.protocol": protocol}) as member:
        wait_for(lambda: member.partitions == 4, "the member has not all partitions")
        assigned = member.assigned
        kafka.rebalance("readers")
        wait_for(lambda: member.revoked > 0 and member.assigned > assigned, "no partition moved")
        wait_for(lambda: member.partitions == 4, "the member did not get its partitions back")
        assert list(kafka.members("readers").values()) == ["one"]
        assert member.lost == 0


def test_a_group_of_a_server_that_no_client_has_used_has_no_members() -> None:
    with Kafka() as kafka:
        assert kafka.members("nobody") == {}
        with pytest.raises(KafkaTestError, match="group nobody has no members"):
            kafka.lose_member("nobody")


def test_a_group_or_member_that_does_not_exist_is_refused_by_name(kafka: Kafka) -> None:
    for action in (kafka.lose_member, kafka.rebalance):
        with pytest.raises(KafkaTestError, match="group nobody has no members"):
            action("nobody")
    topic = kafka.create_topic()
    with Member(kafka, topic, "readers", "one") as member:
        wait_for(lambda: member.partitions == 1, "the member has not joined")
        with pytest.raises(KafkaTestError, match="has no member nobody, but one-"):
            kafka.lose_member("readers", "nobody")


# --- faults -----------------------------------------------------------------------------------------------------------


def test_the_next_requests_fail_with_the_error_and_change_nothing(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    kafka.fail_next("Produce", "TOPIC_AUTHORIZATION_FAILED", times=2)
    for _ in range(2):
        (error,) = produce(kafka, topic, "refused")
        assert error is not None
        assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert produce(kafka, topic, "stored") == [None]
    with Member(kafka, topic, "readers", "one") as member:
        wait_for(lambda: member.values == ["stored"], "a refused record was stored")


def test_a_retriable_error_is_retried_by_the_client(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    kafka.fail_next("Produce", "NOT_LEADER_OR_FOLLOWER")
    assert produce(kafka, topic, "a") == [None]


def test_a_failure_without_an_error_closes_the_connection(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    kafka.fail_next("Produce", None)
    (error,) = produce(kafka, topic, "a", retries=0)
    assert error is not None
    assert error.code() == TRANSPORT_FAILED


def test_a_slow_api_is_slow_until_it_is_healed(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    kafka.slow("Produce", ms=2000)
    began = time.monotonic()
    produce(kafka, topic, "a")
    assert time.monotonic() - began >= 2.0
    kafka.heal()
    quickest_s = min(_timed(lambda: produce(kafka, topic, "b")) for _ in range(5))
    assert quickest_s < 2.0


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda kafka: kafka.fail_next("Produced"), "Kafka has no API Produced"),
        (lambda kafka: kafka.fail_next("Produce", "OOPS"), "Kafka has no error OOPS"),
        (lambda kafka: kafka.fail_next("Produce", "NONE"), "Kafka has no error NONE"),
        (lambda kafka: kafka.fail_next("Produce", times=0), "times is 0, and must be from 1 to 10000"),
        (lambda kafka: kafka.slow("Fetch", -1), "ms is -1, and must be from 0 to 600000"),
        (lambda kafka: kafka.create_topic("a b"), "topic a b: INVALID_TOPIC_EXCEPTION"),
    ],
)
def test_a_wrong_action_is_refused_in_words(kafka: Kafka, ask: Callable[[Kafka], object], message: str) -> None:
    with pytest.raises(KafkaTestError, match=message):
        ask(kafka)
    assert kafka.create_topic()


# --- the end of a server ----------------------------------------------------------------------------------------------


def data_of(processes: Sequence[psutil.Process]) -> str:
    """Return the data directory in the command line of a server's Postgres. Servers of parallel tests have other
    directories.
    """
    commands = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # Postgres ends some of its processes soon.
            commands.append(" ".join(process.cmdline()))
    (data,) = [path for path in glob.glob(DATA) if any(f"{path}/" in command for command in commands)]
    return data


def test_the_answer_to_an_interrupted_action_is_not_taken_for_the_next_one(kafka: Kafka) -> None:
    """Ctrl-C, or a timeout of the test, interrupts an action. The fixture's teardown asks for the next one."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kafka.slow("CreateTopics", ms=2000)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            kafka.create_topic()
    finally:
        signal.signal(signal.SIGALRM, before)
    kafka.heal()
    with pytest.raises(KafkaTestError, match="Kafka has no API Produced"):
        kafka.fail_next("Produced")


def test_a_stopped_server_leaves_nothing_and_can_be_started_again() -> None:
    kafka = Kafka()
    for _ in range(2):
        kafka.start()
        assert kafka.pid is not None
        processes = [psutil.Process(kafka.pid), *psutil.Process(kafka.pid).children(recursive=True)]
        data = data_of(processes)
        kafka.stop()
        assert not os.path.exists(data)
        assert not [process for process in processes if process.is_running()]
    with pytest.raises(KafkaTestError, match="has not been started"):
        _ = kafka.bootstrap


HOLDER = """
import os, sys, time
from sluice.testing import Kafka
kafka = Kafka()
kafka.start()
if os.fork() == 0:
    time.sleep(600)  # a child that still holds the control socket
print(kafka.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_when_its_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        server = psutil.Process(pid)
        processes = [server, *server.children(recursive=True)]
        (orphan,) = [each for each in psutil.Process(holder.pid).children() if each.pid != pid]
        data = data_of(processes)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    try:
        wait_for(lambda: not any(process.is_running() for process in processes), "the server has not ended")
        wait_for(lambda: not os.path.exists(data), "its data are still there")
    finally:
        orphan.kill()


def test_the_leftovers_of_a_killed_server_are_removed_by_the_next_one() -> None:
    kafka = Kafka()
    kafka.start()
    assert kafka.pid is not None
    children = psutil.Process(kafka.pid).children(recursive=True)
    data = data_of(children)
    os.kill(kafka.pid, signal.SIGKILL)
    with pytest.raises(KafkaTestError, match="has ended with exit code -9"):
        kafka.reset()
    kafka.stop()
    wait_for(lambda: not any(process.is_running() for process in children), "Postgres outlived its server")
    os.utime(data, (0, 0))
    with Kafka():
        pass
    assert not os.path.exists(data)


def test_a_damaged_kept_cluster_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Kafka():
        (control,) = tmp_path.glob("sluice/cluster-*/global/pg_control")
        # A machine that loses its power may leave a file that was not synced without its bytes.
        os.truncate(control, 0)
    with Kafka() as kafka:
        assert produce(kafka, kafka.create_topic(), "a") == [None]
    assert control.stat().st_size > 0


CP = """#!/bin/sh
# Another server removes clusters of a week ago while this one begins to copy.
find "${2%/*}" -maxdepth 1 -name 'cluster-*' -mtime +7 -exec rm -r {} +
PATH=/usr/bin:/bin exec cp "$@"
"""


def test_a_kept_cluster_that_is_being_copied_is_not_removed_for_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "cp"
    program.write_text(CP)
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Kafka():
        (kept,) = tmp_path.glob("sluice/cluster-*")
    before = kept.stat().st_ino
    os.utime(kept, (0, 0))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Kafka():
        assert kept.stat().st_ino == before


# --- the command ------------------------------------------------------------------------------------------------------


def run_test_server(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", "test-server", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_command_runs_beside_a_server_and_gives_its_exit_code() -> None:
    program = "printf %s $KAFKA_BOOTSTRAP_SERVERS; test $SLUICE_BOOTSTRAP = $KAFKA_BOOTSTRAP_SERVERS; exit 7"
    done = run_test_server("--print-bootstrap", "--", "sh", "-c", program)
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("127.0.0.1:")
    assert done.returncode == 7, done.stderr


def test_a_command_that_a_signal_ends_gives_the_exit_code_of_a_shell() -> None:
    assert run_test_server("--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist_is_one_sentence() -> None:
    done = run_test_server("--", "/no/such/program")
    assert (done.returncode, done.stderr) == (127, "sluice: cannot run /no/such/program: No such file or directory\n")


def test_a_machine_without_postgres_is_one_sentence(tmp_path: Path) -> None:
    done = run_test_server("--postgres-bin", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"sluice: {tmp_path} has no postgres: give --postgres-bin")
    with pytest.raises(KafkaTestError, match="has no postgres"), Kafka(postgres_bin=tmp_path):
        pass


def test_a_production_gateway_has_no_faults() -> None:
    program = "import sys, gateway.serve; print([name for name in sys.modules if name.startswith('gateway.testing')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    refused = subprocess.run(
        [sys.executable, "-m", "sluice", "serve", "--control-fd", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "unrecognized arguments: --control-fd" in refused.stderr


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_server_with_a_thousand_records_takes_less_than_200_megabytes() -> None:
    with Kafka() as kafka:
        produce(kafka, "greetings", *(["x" * 1000] * 1000))
        assert kafka.pid is not None
        processes = [psutil.Process(kafka.pid), *psutil.Process(kafka.pid).children(recursive=True)]
        assert sum(process.memory_full_info().pss for process in processes) < 200e6
