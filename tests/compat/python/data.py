"""Data scenarios: what is produced comes back, from wherever one starts to read."""

from __future__ import annotations

import time

from tests.compat.python.client import Client, Record, wait_until
from tests.compat.python.scenario import Run, scenario

BIG_BYTES = 900_000


def _codec(run: Run, compression: str) -> None:
    topic = run.topic(1)
    nothing: tuple[tuple[str, None], ...] = (("nothing", None),) if run.client.null_headers else ()
    sent = [
        Record(b"plain"),
        Record(b"keyed", key=b"k", headers=(("h", b"v"), ("h", b"w"), ("ünï", b""), *nothing)),
        Record(None, key=b"tombstone"),
        Record(b"", key=b""),
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
    """Five batches in flight at once, then a second producer; all stored once, in order."""
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
    with run.closing(run.client.producer()) as producer:
        for index in range(10):
            producer.send(topic, [(0, Record(str(index).encode(), timestamp_ms=base_ms + index * 1000))])
        with run.closing(run.client.reader(topic, 0)) as reader:
            assert reader.bounds() == (0, 10)
            for timestamp_ms, expected in ((0, 0), (base_ms + 3000, 3), (base_ms + 3001, 4), (base_ms + 9001, None)):
                found = reader.offset_at(timestamp_ms)
                assert found == expected, f"the offset at {timestamp_ms - base_ms:+} ms is {found}, not {expected}"
            reader.seek(7)
            assert [offset for offset, _ in reader.read(3)] == [7, 8, 9]
            reader.seek_to_beginning()
            assert [record.timestamp_ms for _, record in reader.read(2)] == [base_ms, base_ms + 1000]
            reader.seek_to_end()
            producer.send(topic, [(0, Record(b"after the end"))])
            assert [(offset, record.value) for offset, record in reader.read(1)] == [(10, b"after the end")]


@scenario("data.delete_records")
def delete_records(run: Run) -> None:
    client: Client = run.client
    topic = run.topic(1)
    with run.closing(client.producer()) as producer:
        producer.send(topic, [(0, Record(str(index).encode())) for index in range(10)])
    client.delete_records(topic, 0, 6)
    with run.closing(client.reader(topic, 0)) as reader:
        wait_until(lambda: reader.bounds() == (6, 10), "the log starts at 6")
        reader.seek_to_beginning()
        assert [offset for offset, _ in reader.read(4)] == [6, 7, 8, 9]
