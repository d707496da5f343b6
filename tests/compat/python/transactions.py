"""Transactional scenarios: which records a reader of committed records sees, and read, write and commit in one
transaction."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from tests.compat.python.client import (
    Client,
    GroupReader,
    ProducerFencedError,
    Record,
    TransactionalProducer,
    UnsupportedError,
    wait_until,
)
from tests.compat.python.journal import Partition
from tests.compat.python.scenario import Run, T, scenario

NOTHING_SECONDS = 1.5
"""Seconds for which the scenario watches a reader that must not receive any record."""
TIMEOUT_MS = 2000
ABORTED_SECONDS = 20.0
"""Seconds until an overdue transaction is aborted. Kafka looks for such transactions every ten seconds."""
STEP = 5
LIVES = 6


@scenario("transactions.commit-abort")
def commit_abort(run: Run) -> None:
    client = _transactional(run)
    topic = run.topic(2)
    with run.closing(client.transactional_producer(_id())) as producer:
        for name in ("committed", "aborted", "committed-again"):
            producer.begin()
            producer.send(topic, _records(name, [0, 1]))
            if name == "aborted":
                producer.abort()
            else:
                producer.commit()
    # A marker takes one offset after every five records.
    whole = [
        (start + index, f"{name} {index}")
        for start, name in ((0, "committed"), (STEP + 1, "aborted"), (2 * STEP + 2, "committed-again"))
        for index in range(STEP)
    ]
    committed = [(offset, value) for offset, value in whole if not value.startswith("aborted")]
    end = 3 * STEP + 3
    for partition in (0, 1):
        for read_committed, expected in ((True, committed), (False, whole)):
            with run.closing(client.reader(topic, partition, read_committed=read_committed)) as reader:
                _reads(reader.read(len(expected)), expected, f"partition {partition}, {read_committed=}")
                _reads(reader.read(1, NOTHING_SECONDS), [], f"partition {partition}, {read_committed=}, behind all")
                wait_until(lambda: reader.bounds() == (0, end), f"the log of partition {partition} ends at {end}")


@scenario("transactions.open")
def open_transaction(run: Run) -> None:
    client = _transactional(run)
    topic = run.topic(1)
    with (
        run.closing(client.producer()) as other,
        run.closing(client.transactional_producer(_id())) as producer,
        run.closing(client.reader(topic, 0, read_committed=True)) as committed,
        run.closing(client.reader(topic, 0)) as uncommitted,
    ):
        other.send(topic, [(0, Record(b"before"))])
        producer.begin()
        producer.send(topic, _records("open", [0]))
        other.send(topic, [(0, Record(b"behind")), (0, Record(b"behind"))])
        before = [(0, "before")]
        rest = [*((1 + index, f"open {index}") for index in range(STEP)), (STEP + 1, "behind"), (STEP + 2, "behind")]
        _reads(uncommitted.read(1 + len(rest)), before + rest, "uncommitted")
        _reads(committed.read(1), before, "committed")
        _reads(committed.read(1, NOTHING_SECONDS), [], "committed, while the transaction is open")
        assert uncommitted.bounds() == (0, STEP + 3)
        if client.lists_stable_offsets:
            assert committed.bounds() == (0, 1), f"the last stable offset: {committed.bounds()}"
        producer.commit()
        _reads(committed.read(len(rest)), rest, "committed, once the transaction has ended")
        wait_until(lambda: committed.bounds() == (0, STEP + 4), "the last stable offset goes on")
    if not client.lists_stable_offsets:
        run.detail = "its ListOffsets knows no read_committed"


@scenario("transactions.fencing")
def fencing(run: Run) -> None:
    client = _transactional(run)
    topic = run.topic(1)
    transactional_id = _id()
    with run.closing(client.transactional_producer(transactional_id)) as first:
        first.begin()
        first.send(topic, [(0, Record(b"fenced"))])
        with run.closing(client.transactional_producer(transactional_id)) as second:
            _fenced(first.commit)
            _in_one(second, topic, "second")
            with run.closing(client.transactional_producer(transactional_id)) as third:
                # The producer has no open transaction, so the first request of its next transaction is fenced.
                _fenced(lambda: _in_one(second, topic, "fenced, too"))
                _in_one(third, topic, "third")
    with run.closing(client.reader(topic, 0, read_committed=True)) as reader:
        # Offset 1 is the marker of the first, aborted transaction.
        _reads(reader.read(2), [(2, "second"), (4, "third")], "committed")
        _reads(reader.read(1, NOTHING_SECONDS), [], "committed, behind all")


@scenario("transactions.consume-transform-produce")
def consume_transform_produce(run: Run) -> None:
    client = _transactional(run)
    source, target, group = run.topic(2, "source"), run.topic(2, "target"), run.group()
    expected = _fill(run, source)
    with run.closing(client.transactional_producer(_id())) as producer:
        with run.closing(client.group_reader(group, source)) as reader:
            _transform(producer, reader, source, target, group, 2 * STEP)
            producer.abort()
        assert _committed(client, group, source) == {}, "offsets of an aborted transaction are committed"
        with run.closing(client.group_reader(group, source)) as reader:
            for _ in range(0, len(expected), STEP):
                _transform(producer, reader, source, target, group, STEP)
                producer.commit()
    half = len(expected) // 2
    wait_until(lambda: _committed(client, group, source) == {0: half, 1: half}, "all is committed")
    _exactly_once(run, source, target, group, expected)


@scenario("transactions.gateway-kill")
def gateway_kill(run: Run) -> None:
    """Kill the gateway between a transaction's records and its offsets.

    After an error the producer starts again with the same transactional id, from the committed offsets, as Kafka's
    documentation says.
    """
    client = _transactional(run)
    source, target, group, transactional_id = run.topic(2, "source"), run.topic(2, "target"), run.group(), _id()
    expected = _fill(run, source)
    killed, lives, done = False, 0, 0
    while done < len(expected):
        lives += 1
        assert lives <= LIVES, f"{done} of {len(expected)} records are known to be committed: {run.detail}"
        with contextlib.ExitStack() as stack:
            producer = stack.enter_context(_quietly(client.transactional_producer(transactional_id)))
            reader = stack.enter_context(_quietly(client.group_reader(group, source)))
            try:
                while done < len(expected):
                    found = reader.read(STEP)
                    if not found:
                        # Either the transaction of unknown outcome was committed, or records are only late.
                        if sum(_committed(client, group, source).values()) == len(expected):
                            done = len(expected)
                        continue
                    producer.begin()
                    producer.send(target, _transformed(found))
                    if not killed and done >= 2 * STEP:
                        killed = True
                        run.kill_gateway()
                    producer.send_offsets(reader, group, _positions(source, found))
                    producer.commit()
                    done += len(found)
            except Exception as error:  # During an outage each library raises errors of its own.
                print(f"life {lives} ended with {error!r}", file=sys.stderr, flush=True)
                run.detail = f"{run.detail}; " * bool(run.detail) + f"life {lives} ended with {error!r}"[:200]
    assert killed, "it was all read before the gateway was killed"
    _exactly_once(run, source, target, group, expected)


@scenario("transactions.timeout")
def timeout(run: Run) -> None:
    client = _transactional(run)
    topic, transactional_id = run.topic(1), _id()
    with (
        run.closing(client.transactional_producer(transactional_id, timeout_ms=TIMEOUT_MS)) as producer,
        run.closing(client.producer()) as other,
        run.closing(client.reader(topic, 0, read_committed=True)) as reader,
    ):
        producer.begin()
        producer.send(topic, [(0, Record(b"left open"))])
        started = time.monotonic()
        other.send(topic, [(0, Record(b"behind"))])
        _reads(reader.read(1, TIMEOUT_MS / 2000), [], "committed, before the time is over")
        _reads(reader.read(1, ABORTED_SECONDS), [(1, "behind")], "committed, once the time is over")
        run.detail = f"aborted after {time.monotonic() - started:.1f} s"
        refused = None
        try:
            producer.commit()
        except Exception as error:  # Each library raises another error for this.
            refused = error
        assert refused is not None, "it could commit what had been aborted"
        with run.closing(client.transactional_producer(transactional_id)) as heir:
            _in_one(heir, topic, "heir")
        _reads(reader.read(1), [(3, "heir")], "committed, by the next producer of the id")


def _transactional(run: Run) -> Client:
    if run.client.no_transactions:
        raise UnsupportedError(run.client.no_transactions)
    return run.client


def _id() -> str:
    return f"x-{uuid.uuid4().hex[:10]}"


def _records(name: str, partitions: Sequence[int]) -> list[tuple[int, Record]]:
    """Make `STEP` records for each partition."""
    return [(partition, Record(f"{name} {index}".encode())) for index in range(STEP) for partition in partitions]


def _reads(read: Sequence[tuple[int, Record]], expected: Sequence[tuple[int, str]], what: str) -> None:
    found = [(offset, (record.value or b"").decode()) for offset, record in read]
    assert found == list(expected), f"{what}: read {found}, not {list(expected)}"


def _in_one(producer: TransactionalProducer, topic: str, value: str) -> None:
    """Send one record in a transaction of its own."""
    producer.begin()
    producer.send(topic, [(0, Record(value.encode()))])
    producer.commit()


def _fenced(attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except ProducerFencedError:
        return
    raise AssertionError("a producer that another one of its id has followed was not fenced")


@contextlib.contextmanager
def _quietly(thing: T) -> Iterator[T]:
    """At the end close the client and ignore errors, because its connections may be gone."""
    try:
        yield thing
    finally:
        with contextlib.suppress(Exception):
            thing.close()


def _fill(run: Run, topic: str) -> list[str]:
    """Produce forty records in two partitions, and return their values."""
    values = [f"v{index}" for index in range(8 * STEP)]
    with run.closing(run.client.producer()) as producer:
        producer.send(topic, [(index % 2, Record(value.encode())) for index, value in enumerate(values)])
    return values


def _transform(
    producer: TransactionalProducer, reader: GroupReader, source: str, target: str, group: str, count: int
) -> None:
    """Do all steps of a transaction except its end."""
    found = reader.read(count)
    assert len(found) == count, f"{len(found)} records were read, not {count}"
    producer.begin()
    producer.send(target, _transformed(found))
    producer.send_offsets(reader, group, _positions(source, found))


def _transformed(found: Sequence[tuple[int, int, Record]]) -> list[tuple[int, Record]]:
    return [(partition, Record(b"made of " + (record.value or b""))) for partition, _, record in found]


def _positions(topic: str, found: Sequence[tuple[int, int, Record]]) -> dict[Partition, int]:
    return {(topic, partition): offset + 1 for partition, offset, _ in found}


def _committed(client: Client, group: str, topic: str) -> dict[int, int]:
    found = {partition: client.committed(group, topic, partition) for partition in (0, 1)}
    return {partition: offset for partition, offset in found.items() if offset is not None}


def _exactly_once(run: Run, source: str, target: str, group: str, values: Sequence[str]) -> None:
    """Assert that each record is in the target once, in its partition's order, and that the group has read them all."""
    for partition in (0, 1):
        expected = [f"made of {value}" for value in values[partition::2]]
        with run.closing(run.client.reader(target, partition, read_committed=True)) as reader:
            found = [(record.value or b"").decode() for _, record in reader.read(len(expected))]
            assert found == expected, f"partition {partition} holds {found}, not {expected}"
            assert reader.read(1, NOTHING_SECONDS) == [], f"partition {partition} holds more"
    with run.closing(run.client.group_reader(group, source)) as reader:
        assert reader.read(1, 3 * NOTHING_SECONDS) == [], "what was committed is read again"
