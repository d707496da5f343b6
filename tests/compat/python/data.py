"""Data scenarios: produced records are read back, from any starting point."""

from __future__ import annotations

import time

from tests.compat.python.client import Record, UnsupportedError, wait_until
from tests.compat.python.scenario import Run, scenario

BIG_BYTES = 900_000


def _codec(run: Run, compression: str) -> None:
    topic = run.topic(1)
    nothing: tuple[tuple[str, None], ...] = (("nothing", None),) if run.client.null_headers else ()
    sent = [
        Record(b"plain"),
        Record(b"keyed", key=b"k", headers=(("h", b"v"), ("h", b"w"), ("ünï", b""), *nothing)),
        Record(None, key=b"tombstone"),
        *([Record(b"", key=b"")] if run.client.empty_values else []),
        *(Record(f"value {index}".encode() * 20, key=str(index).encode()) for index in range(50)),
        Record(bytes(index * 7919 % 251 for index in range(BIG_BYTES)), key=b"big"),
    ]
    with run.closing(run.client.producer(compression=compression)) as producer:
        offsets = producer.send(topic, [(0, record) for record in sent])
    assert offsets == list(range(len(sent))), f"offsets {offsets[:5]} …"
    with run.closing(run.client.reader(topic, 0)) as reader:
        received = reader.read(len(sent))
    assert [offset for offset, _ in received] == offsets
    for (offset, record), original in zip(received, sent, strict=True):
        same = (record.value, record.key, record.headers) == (original.value, original.key, original.headers)
        assert same, f"offset {offset}: {str(original)[:200]} came back as {str(record)[:200]}"


for _compression in ("none", "gzip", "snappy", "lz4", "zstd"):

    def _bound(run: Run, compression: str = _compression) -> None:
        _codec(run, compression)

    scenario(f"data.codec.{_compression}")(_bound)


@scenario("data.idempotent")
def idempotent(run: Run) -> None:
    """Keep five batches in flight, then use a second producer. All records must be stored once and in order."""
    topic = run.topic(2)
    for start in (0, 500):
        with run.closing(run.client.producer(idempotent=True)) as producer:
            records = [(index % 2, Record(str(index).encode())) for index in range(start, start + 500)]
            producer.send(topic, records)
    for partition in range(2):
        with run.closing(run.client.reader(topic, partition)) as reader:
            values = [int(record.value or b"-1") for _, record in reader.read(500)]
            assert values == list(range(partition, 1000, 2))
            assert reader.bounds() == (0, 500)


@scenario("data.seek_and_times")
def seek_and_times(run: Run) -> None:
    topic = run.topic(1)
    base_ms = int(time.time() * 1000) - 100_000
    given = run.client.sets_timestamps
    with run.closing(run.client.producer()) as producer:
        for index in range(10):
            record = Record(str(index).encode(), timestamp_ms=base_ms + index * 1000 if given else None)
            producer.send(topic, [(0, record)])
        with run.closing(run.client.reader(topic, 0)) as reader:
            assert reader.bounds() == (0, 10)
            times = [record.timestamp_ms or -1 for _, record in reader.read(10)]
            if given:
                assert times == [base_ms + index * 1000 for index in range(10)]
            for timestamp_ms in (0, times[3], times[3] + 1, times[9] + 1):
                expected = next((offset for offset, stored in enumerate(times) if stored >= timestamp_ms), None)
                found = reader.offset_at(timestamp_ms)
                assert found == expected, f"the offset at {timestamp_ms} is {found}, not {expected}: {times}"
            reader.seek(7)
            assert [offset for offset, _ in reader.read(3)] == [7, 8, 9]
            reader.seek_to_beginning()
            assert [offset for offset, _ in reader.read(2)] == [0, 1]
            reader.seek_to_end()
            producer.send(topic, [(0, Record(b"after the end"))])
            assert [(offset, record.value) for offset, record in reader.read(1)] == [(10, b"after the end")]


@scenario("data.delete_records")
def delete_records(run: Run) -> None:
    client = run.client
    if client.no_admin:
        raise UnsupportedError(client.no_admin)
    topic = run.topic(1)
    with run.closing(client.producer()) as producer:
        producer.send(topic, [(0, Record(str(index).encode())) for index in range(10)])
    client.delete_records(topic, 0, 6)
    with run.closing(client.reader(topic, 0)) as reader:
        wait_until(lambda: reader.bounds() == (6, 10), "the log starts at 6")
        reader.seek_to_beginning()
        assert [offset for offset, _ in reader.read(4)] == [6, 7, 8, 9]
