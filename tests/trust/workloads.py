"""Workloads: clients that run while faults are injected. Each workload is threads that write into the history.

The one idea: a workload never gives up a call. It repeats a failed call, or records its outcome as unknown. So every
workload can finish after the faults, and the checks can demand every promise.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import asyncpg
import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from kafka.errors import KafkaError as KafkaPythonError

from tests.closing import close
from tests.trust.checks import topic_has_its_records
from tests.trust.foreign import ForeignProcess
from tests.trust.franz import FranzGo
from tests.trust.history import History, Observed, Outcome, Produced, Quantity, Transferred, number_in
from tests.trust.java import Java
from tests.trust.members import (
    FRANZ_GO,
    JAVA,
    KAFKA_PYTHON,
    LIBRDKAFKA,
    AiokafkaMember,
    ForeignMember,
    Isolation,
    KafkaPythonMember,
    LibrdkafkaMember,
    Life,
    Membership,
    draw,
)
from tests.trust.patience import CALL_S, FINISH_S, LEAVE_S, PATIENT, ClientError, WorkloadError
from tests.trust.senders import (
    FAILED,
    AiokafkaSender,
    ForeignSender,
    KafkaPythonSender,
    LibrdkafkaSender,
    Sender,
    SenderError,
    Sending,
)

STUCK_S = 75.0
"""How long a call of a transactional client may take. After this time the worker abandons the client and continues with
a new one.
"""
LIFE_S = 30.0
"""How long one transactional client of another language may run."""
NONE_COMMITTED = -1
"""The observed number of a partition without a committed offset."""
ABORTED = 0.03
"""Share of its transactions that a worker aborts after it has sent everything."""


class Workload:
    """Threads that run until `stop`. `finish` waits until every call that was begun has an outcome."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def _thread(self, run: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                self._failure = self._failure or error
                raise

        self._threads.append(threading.Thread(target=guarded, name=name, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()

    @property
    def failed(self) -> bool:
        """Return whether a thread has failed."""
        return self._failure is not None

    def finish(self) -> None:
        """Raise ClientError if the cluster or Postgres refused a request for good. Raise WorkloadError if a thread
        failed in another way, or does not end within FINISH_S.
        """
        deadline_s = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if isinstance(self._failure, (KafkaException, asyncpg.PostgresError)):
            raise ClientError(f"{self.name}: {self._failure!r}") from self._failure
        if self._failure is not None:
            raise WorkloadError(f"{self.name}: {self._failure!r}") from self._failure
        for thread in self._threads:
            if thread.is_alive():
                raise WorkloadError(f"{self.name}: {thread.name} does not end")


@dataclass(frozen=True)
class Clients:
    """The kinds of clients of a run, and the processes for clients in other languages, if `kinds` names any."""

    bootstrap: str
    kinds: Sequence[str] = (LIBRDKAFKA,)
    java: Java | None = None
    franz_go: FranzGo | None = None

    @property
    def foreign(self) -> Mapping[str, ForeignProcess]:
        """Return the processes for clients in other languages by the kind of their clients."""
        processes = ((JAVA, self.java), (FRANZ_GO, self.franz_go))
        return {kind: process for kind, process in processes if process is not None}

    def sender(self, kind: str, settings: Sending) -> Sender:
        match kind:
            case "kafka-python":
                return KafkaPythonSender(settings)
            case "aiokafka":
                return AiokafkaSender(settings)
            case "Java" | "franz-go":
                return ForeignSender(settings, self.foreign[kind])
            case _:
                return LibrdkafkaSender(settings)

    def live(self, kind: str, life: Life, membership: Membership) -> None:
        """Let one client join the group, read and commit until it leaves."""
        match kind:
            case "kafka-python":
                KafkaPythonMember(life, membership).live()
            case "aiokafka":
                AiokafkaMember(life, membership).live()
            case "Java" | "franz-go":
                ForeignMember(life, membership, self.foreign[kind]).live()
            case _:
                LibrdkafkaMember(life, membership).live()


class Producing(Workload):
    """One producer that sends rising values, some of them with keys, at a bounded rate.

    If its client fails for good, a client of the same kind continues with the next value. The new client counts as
    another producer, because no client promises an order across its failure.
    """

    def __init__(
        self,
        history: History,
        clients: Clients,
        topic: str,
        partitions: int,
        *,
        idempotent: bool = True,
        keys: int = 0,
        rate: float = 150.0,
        seed: int = 0,
    ) -> None:
        """With `keys` above 0, so many keys receive values in turn, and each key belongs to one partition. With 0,
        records have no key. `rate` is in records per second.
        """
        self._chance = random.Random(seed)
        linger_ms, compression = self._chance.choice([0, 2, 10]), self._chance.choice(["none", "lz4", "zstd"])
        self.kind = self._chance.choice(clients.kinds)
        name = f"producer-{self.kind}-{uuid.uuid4().hex[:6]}"
        super().__init__(name)
        self.topic = topic
        self._clients = clients
        self._history, self._partitions, self._keys = history, partitions, keys
        self._pause_s = 1 / rate
        self._settings = Sending(clients.bootstrap, name, idempotent, linger_ms, compression)
        self._thread(self._produce, name)

    def _produce(self) -> None:
        value = left = 0
        while not self._stopping.is_set():
            settings = dataclasses.replace(self._settings, client_id=f"{self.name}.{value}")
            try:
                sender = self._clients.sender(self.kind, settings)
            except SenderError:
                continue  # no node answers, so try again
            try:
                while not self._stopping.is_set():
                    if self._send(sender, settings.client_id, value):
                        value += 1
                    sender.poll(self._pause_s)
            except SenderError:
                value += 1  # the outcome of this record is unknown; values are unique, so do not send it again
            left += sender.flush()
        if left:
            raise WorkloadError(f"{left} records were never answered")

    def _send(self, sender: Sender, client: str, value: int) -> bool:
        invoked_s = time.monotonic()
        key = f"k{value % self._keys}" if self._keys else None
        partition = (value % self._keys if self._keys else value) % self._partitions

        def delivered(offset: int) -> None:
            outcome = Outcome.UNKNOWN if offset == FAILED else Outcome.OK
            self._history.add(
                Produced(
                    *(client, self.topic, partition, key, value, invoked_s, time.monotonic(), outcome),
                    max(offset, -1),
                )
            )

        try:
            return sender.send(self.topic, partition, key, value, delivered)
        except SenderError:
            delivered(FAILED)
            raise


class Group(Workload):
    """A consumer group whose members join and leave. Each new member may be a client of another kind."""

    def __init__(
        self,
        history: History,
        clients: Clients,
        topic: str,
        *,
        protocol: str,
        members: int,
        seed: int,
        session_ms: int = 45_000,
        isolation: Isolation = "read_uncommitted",
    ) -> None:
        """`protocol` is eager, cooperative, static (cooperative with instance ids), consumer (KIP-848) or simple
        (without members).
        """
        self.group = f"{protocol}-{uuid.uuid4().hex[:6]}"
        super().__init__(self.group)
        self.protocol, self.topic = protocol, topic
        self._history, self._clients = history, clients
        self._session_ms = session_ms
        self._isolation: Isolation = isolation
        self._seed = seed
        self._draining = threading.Event()
        for number in range(members):
            self._thread(lambda number=number: self._consume(number), f"{self.group}-m{number}")

    def drain(self) -> None:
        """Let members stay in the group from now on: they only read, until `stop`."""
        self._draining.set()

    def _consume(self, number: int) -> None:
        chance = random.Random(self._seed * 100 + number)
        count = 0
        while not self._stopping.is_set():
            # The first member stays, so that the group never empties; the others live for 5 to 30 seconds.
            ends_s = time.monotonic() + (float("inf") if number == 0 else chance.uniform(5, 30))
            release_s = chance.choice((0.0, 0.0, 0.5, 2.0))
            kind = draw(self._clients.kinds, self.protocol, chance)
            if kind == KAFKA_PYTHON:
                # A member of kafka-python may stay silent for ever after a lost answer, so do not use it now.
                ends_s = min(ends_s, time.monotonic() + chance.uniform(5, 30))
            stays = kind != KAFKA_PYTHON
            life = Life(
                *(self._clients.bootstrap, self.group, self.topic, self.protocol, self._isolation),
                f"instance-{number}" if self.protocol == "static" else None,
                self._session_ms,
                f"m{number}.{count}-{kind}",
                release_s,
                lambda stays=stays, ends_s=ends_s: (
                    self._stopping.is_set() or (not (stays and self._draining.is_set()) and time.monotonic() >= ends_s)
                ),
            )
            count += 1
            # kafka-python's constructor raises this if no node answers for half a minute. The next client tries again.
            with contextlib.suppress(KafkaPythonError):
                self._clients.live(kind, life, Membership(self._history, life))


class Transfers(Workload):
    """Consume-process-produce: each source record becomes one result, in one transaction with the offsets."""

    def __init__(
        self,
        history: History,
        clients: Clients,
        source: str,
        target: str,
        *,
        workers: int,
        partitions: int,
        seed: int,
    ) -> None:
        self.history, self.chance = history, random.Random(seed)
        self.group = f"transfer-{uuid.uuid4().hex[:6]}"
        super().__init__(self.group)
        self.source, self.target, self.bootstrap = source, target, clients.bootstrap
        self._clients, self._partitions = clients, partitions
        self.transferred: Counter[str] = Counter()
        """Number of source records whose transaction a client of this kind of another language committed."""
        for number in range(workers):
            self._thread(lambda number=number: self._run(number), f"{self.group}-w{number}")

    def _run(self, number: int) -> None:
        """Run a worker, and start another one whenever it ends. Abandon a worker whose client does not return from a
        call.

        librdkafka 2.16 loses the FindCoordinator of send_offsets_to_transaction if its connection breaks, and waits far
        beyond the timeout of the call. The next worker has the same transactional id and fences the abandoned one.
        """
        while not self._stopping.is_set():
            foreign = list(self._clients.foreign)
            if foreign and (number % 2 or LIBRDKAFKA not in self._clients.kinds):
                self._live_elsewhere(self.chance.choice(foreign), number)
                continue
            worker = _Worker(self, number, self._partitions)
            life = threading.Thread(target=worker.work, args=(self._stopping,), name=self.group, daemon=True)
            life.start()
            while life.is_alive() and time.monotonic() < worker.returned_s + STUCK_S:
                life.join(0.5)
            if not life.is_alive() and worker.failure is not None:
                raise worker.failure

    def _live_elsewhere(self, kind: str, number: int) -> None:
        """Run a worker of another language for at most LIFE_S. An error ends the worker, and the next one follows."""

        def transferred(event: Sequence[str]) -> None:
            self.transferred[kind] += int(event[2])

        worker = self._clients.foreign[kind].start(
            *("transfer", self.group, self.source, self.target, f"{self.group}-{number}", self._partitions),
            *(self.chance.randrange(2**31), ABORTED),
            on_event=transferred,
        )
        ends_s = time.monotonic() + self.chance.uniform(5, LIFE_S)
        while not (self._stopping.is_set() or time.monotonic() > ends_s) and not worker.wait(0.5):
            pass
        worker.stop()
        if not worker.wait(FINISH_S):
            raise WorkloadError(f"{self.group}: the worker {number} of {kind} does not end")


class _Worker:
    """A worker with one transactional producer. It ends when its producer cannot continue. Another worker follows."""

    def __init__(self, transfers: Transfers, number: int, partitions: int) -> None:
        self._transfers, self._partitions = transfers, partitions
        self._name = f"w{number}.{uuid.uuid4().hex[:6]}"
        self.returned_s = time.monotonic()
        """The time at which the client last returned from a call."""
        self.failure: BaseException | None = None
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": transfers.bootstrap,
                "transactional.id": f"{transfers.group}-{number}",
                "transaction.timeout.ms": 30_000,
                "request.timeout.ms": 5_000,
                "linger.ms": 1,
                **PATIENT,
            }
        )
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": transfers.bootstrap,
                "group.id": transfers.group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 15_000,
                "max.poll.interval.ms": 20_000,  # leave the group at the end, also if this worker was abandoned
                "heartbeat.interval.ms": 500,
                **PATIENT,
            }
        )

    def work(self, stopping: threading.Event) -> None:
        # A batch that was already consumed is sent with the group's metadata. So the coordinator refuses the
        # transaction if the partition has moved.
        self._consumer.subscribe([self._transfers.source])
        try:
            self._producer.init_transactions(CALL_S * 3)
            while not stopping.is_set():
                messages = [message for message in self._consumer.consume(50, 0.2) if message.error() is None]
                self.returned_s = time.monotonic()
                if messages and not self._transfer(messages):
                    return
        except KafkaException:
            return  # fenced, timed out or fatal: the next worker begins at the committed offsets
        except BaseException as error:
            self.failure = error
            raise
        finally:
            close(self._consumer, lambda: self._consumer.poll(0.1), patience_s=LEAVE_S)

    def _transfer(self, messages: Sequence[confluent_kafka.Message]) -> bool:
        """Return False if this worker cannot continue. The next worker reads the same records again, from the committed
        offsets.
        """
        places: list[tuple[int, int, int]] = []
        for message in messages:
            partition, offset, value = message.partition(), message.offset(), message.value()
            assert partition is not None
            assert offset is not None
            places.append((partition, offset, number_in(value)))
        invoked_s = time.monotonic()
        outcome, detail = Outcome.UNKNOWN, ""
        try:
            committed, detail = self._transact(places)
            outcome = Outcome.OK if committed else Outcome.FAILED
        except KafkaException as error:
            detail = str(error)
            raise
        finally:
            self._transfers.history.add(
                Transferred(*(self._name, self._transfers.source, places, invoked_s, time.monotonic(), outcome, detail))
            )
        return committed

    def _transact(self, places: Sequence[tuple[int, int, int]]) -> tuple[bool, str]:
        """Return whether the transaction was committed, and else why not. Raise KafkaException if its outcome is
        unknown.
        """
        self._producer.begin_transaction()
        try:
            for _, _, value in places:
                self._producer.produce(self._transfers.target, str(value), partition=value % self._partitions)
            ends: dict[int, int] = {}
            for partition, offset, _ in places:
                ends[partition] = max(ends.get(partition, 0), offset + 1)
            offsets = [TopicPartition(self._transfers.source, part, at) for part, at in ends.items()]
            self._producer.send_offsets_to_transaction(offsets, self._consumer.consumer_group_metadata(), CALL_S)
            if self._transfers.chance.random() < ABORTED:
                self._producer.abort_transaction(CALL_S * 3)
                return False, ""
            self._commit()
        except KafkaException as error:
            # The consumer's position is past records that are not committed, so only a new worker reads them again.
            self._producer.abort_transaction(CALL_S * 3)
            return False, str(error)
        return True, ""

    def _commit(self) -> None:
        deadline_s = time.monotonic() + CALL_S * 3
        while True:
            try:
                self._producer.commit_transaction(CALL_S)
                return
            except KafkaException as raised:
                error = raised.args[0]
                if not error.retriable() or time.monotonic() > deadline_s:
                    raise


class Observer(Workload):
    """Reads committed offsets and both ends of logs repeatedly, and records the answers."""

    def __init__(self, history: History, bootstrap: str, topics: Mapping[str, int], groups: Mapping[str, str]) -> None:
        """`topics` maps each topic to its number of partitions, and `groups` maps each group to its topic."""
        super().__init__(f"observer-{uuid.uuid4().hex[:6]}")
        self._history, self._bootstrap = history, bootstrap
        self._topics, self._groups = topics, groups
        self._thread(self._observe_logs, f"{self.name}-logs")
        for group in groups:
            # Each group has its own thread, because a coordinator that does not answer must only delay the reads of its
            # group.
            self._thread(lambda group=group: self._observe_group(group), f"{self.name}-{group}")

    def _observe_logs(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._bootstrap, **PATIENT})
        while not self._stopping.is_set():
            for topic, partitions in self._topics.items():
                parts = [TopicPartition(topic, index) for index in range(partitions)]
                self._log_bounds(admin, parts, OffsetSpec.earliest(), Quantity.LOG_START)
                self._log_bounds(admin, parts, OffsetSpec.latest(), Quantity.LOG_END)
            self._stopping.wait(0.5)

    def _observe_group(self, group: str) -> None:
        """Read committed offsets more often than members commit, because the next commit hides that an offset fell."""
        consumer = asking(self._bootstrap, group)
        while not self._stopping.is_set():
            self._committed(consumer, group, self._groups[group])
            self._stopping.wait(0.1)
        consumer.close()

    def _log_bounds(
        self, admin: AdminClient, parts: Sequence[TopicPartition], spec: OffsetSpec | None, quantity: Quantity
    ) -> None:
        invoked_s = time.monotonic()
        assert spec is not None
        answers = admin.list_offsets(dict.fromkeys(parts, spec), request_timeout=CALL_S)
        for part, answer in answers.items():
            try:
                value = answer.result(CALL_S * 2).offset
            except (KafkaException, TimeoutError):
                continue  # no answer came, so nothing was observed
            if value < 0:
                continue  # librdkafka reports this for a partition if one of its requests got no answer
            self._history.add(Observed(quantity, "", part.topic, part.partition, value, invoked_s, time.monotonic()))

    def _committed(self, consumer: confluent_kafka.Consumer, group: str, topic: str) -> None:
        invoked_s = time.monotonic()
        found = committed(consumer, topic, self._topics[topic])
        if found is None:
            return
        for partition in range(self._topics[topic]):
            # An answer without an offset is a number, too: an offset that was committed before is lost.
            value = found.get(partition, NONE_COMMITTED)
            self._history.add(
                Observed(*(Quantity.COMMITTED, group, topic, partition, value, invoked_s), time.monotonic())
            )


def asking(bootstrap: str, group: str) -> confluent_kafka.Consumer:
    """Return a consumer that does not join `group`, to fetch the group's committed offsets.

    librdkafka's admin client (2.16) would crash with SIGSEGV if the asked node is no longer the coordinator. The client
    then refreshes the coordinator of a consumer, and it has no consumer.
    """
    return confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False, **PATIENT}
    )


def committed(consumer: confluent_kafka.Consumer, topic: str, partitions: int) -> dict[int, int] | None:
    """Return the committed offsets by partition, without partitions that have none. Return None if the answer lacks any
    partition.
    """
    try:
        found = consumer.committed([TopicPartition(topic, index) for index in range(partitions)], CALL_S)
    except KafkaException:
        return None
    if any(part.error is not None for part in found):
        return None
    return {part.partition: part.offset for part in found if part.offset >= 0}


class TopicChurn(Workload):
    """Creates, writes, reads and deletes topics over and over, always under the same few names.

    A topic that is created again must begin empty at offset 0. An acknowledged record must exist as long as its topic
    does. This workload judges by itself, because the final log does not hold its topics.
    """

    def __init__(self, bootstrap: str, *, seed: int) -> None:
        super().__init__(f"churn-{uuid.uuid4().hex[:6]}")
        self._bootstrap = bootstrap
        self._chance = random.Random(seed)
        self.rounds = 0
        self.violations: list[str] = []
        self._thread(self._churn, self.name)

    def _churn(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._bootstrap, **PATIENT})
        while not self._stopping.is_set():
            topic = f"{self.name}-{self._chance.randrange(3)}"
            partitions = self._chance.randint(1, 4)
            insist(lambda topic=topic, partitions=partitions: _create(admin, topic, partitions))
            sent, unsure = self._write(topic, partitions)
            read = self._read(topic, partitions)
            self.violations += topic_has_its_records(topic, sent, read, unsure)
            insist(lambda topic=topic: _delete(admin, topic))
            self.rounds += 1

    def _write(self, topic: str, partitions: int) -> tuple[dict[int, list[bytes]], set[bytes]]:
        """Write values.

        Return the acknowledged values by partition, and the values whose outcome is unknown. A node with old metadata
        may still describe the deleted topic of that name. If that topic had fewer partitions, the client drops the
        record.
        """
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self._bootstrap, "enable.idempotence": True, "linger.ms": 1, **PATIENT}
        )
        failed: list[str] = []
        unsure: set[bytes] = set()
        sent: dict[int, list[bytes]] = {index: [] for index in range(partitions)}

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                return
            value = message.value()
            if error.code() == KafkaError._UNKNOWN_PARTITION and value is not None:  # noqa: SLF001
                unsure.add(value)
            else:
                failed.append(str(error))

        self._until_known(producer, topic, partitions)
        for number in range(self._chance.randint(1, 50)):
            index, value = number % partitions, f"{self.rounds}-{number}".encode()
            sent[index].append(value)
            producer.produce(topic, value, partition=index, on_delivery=delivered)
        if producer.flush(FINISH_S) or failed:
            raise WorkloadError(f"{topic}: records were not acknowledged: {failed[:3]}")
        return {index: [value for value in values if value not in unsure] for index, values in sent.items()}, unsure

    @staticmethod
    def _until_known(producer: confluent_kafka.Producer, topic: str, partitions: int) -> None:
        """Wait until the producer knows the topic's partitions. The producer refuses an unknown partition, and a node
        may still describe the deleted topic of that name.
        """
        deadline_s = time.monotonic() + FINISH_S
        while time.monotonic() < deadline_s:
            try:
                if len(producer.list_topics(topic, CALL_S).topics[topic].partitions) == partitions:
                    return
            except KafkaException:
                continue
        raise WorkloadError(f"{topic} does not get its {partitions} partitions within {FINISH_S:.0f} s")

    def _read(self, topic: str, partitions: int) -> dict[int, list[tuple[int, bytes]]]:
        """Return the offset and the value of each record, by partition."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": uuid.uuid4().hex,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                **PATIENT,
            }
        )
        found: dict[int, list[tuple[int, bytes]]] = {index: [] for index in range(partitions)}
        try:
            consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
            ended: set[int] = set()
            deadline_s = time.monotonic() + FINISH_S
            while len(ended) < partitions:
                if time.monotonic() > deadline_s:
                    raise WorkloadError(f"{topic}: not read to its end within {FINISH_S:.0f} s")
                message = consumer.poll(0.5)
                if message is None:
                    continue
                error, index, offset, value = message.error(), message.partition(), message.offset(), message.value()
                assert index is not None
                if error is None and offset is not None and value is not None:
                    found[index].append((offset, value))
                elif error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                    ended.add(index)
        finally:
            consumer.close()
        return found


def create_topics(bootstrap: str, topics: Mapping[str, int], configs: Mapping[str, Mapping[str, str]]) -> None:
    """Create `topics`, which maps names to numbers of partitions, with the settings in `configs`. Wait until every node
    lists them.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap, **PATIENT})
    for topic, partitions in topics.items():
        insist(lambda topic=topic, partitions=partitions: _create(admin, topic, partitions, configs.get(topic, {})))


def _create(admin: AdminClient, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
    new = NewTopic(topic, partitions, 1, config=dict(config or {}))
    try:
        admin.create_topics([new], operation_timeout=CALL_S, request_timeout=CALL_S)[topic].result(CALL_S * 2)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def _delete(admin: AdminClient, topic: str) -> None:
    try:
        admin.delete_topics([topic], operation_timeout=CALL_S, request_timeout=CALL_S)[topic].result(CALL_S * 2)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise


def insist(call: Callable[[], None]) -> None:
    """Repeat the call until it succeeds. Raise WorkloadError after FINISH_S."""
    deadline_s = time.monotonic() + FINISH_S
    while True:
        try:
            call()
            return
        except (KafkaException, TimeoutError) as error:
            if time.monotonic() > deadline_s:
                raise WorkloadError(f"no success within {FINISH_S:.0f} s: {error}") from error
