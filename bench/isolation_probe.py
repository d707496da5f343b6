"""`python -m bench.isolation_probe`: the client whose latency is watched, and the reader of a cold log, as programs.

    follow BOOTSTRAP TOPIC FILE            produce 1,000 records a second and read them, until standard input ends
    read BOOTSTRAP TOPIC RECORDS LOG       read that many records again and again, each time without LOG's page cache

`follow` writes one line to FILE for each acknowledged record (`a`) and each record read (`r`): the moment at which it
was sent, and the milliseconds since then. The clock is that of `time.perf_counter`, which all processes of a Linux
machine share.
`read` prints how many records it has read so far, whenever it has read some more.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

PARTITIONS = 6
PACE = 1000
RECORD_BYTES = 100
POLL_S = 0.001
FLUSH_S = 60.0
READ_AT_ONCE = 10_000
_MOMENT = struct.Struct(">d")


def follow(bootstrap: str, topic: str, path: Path) -> None:
    """Produce with an idempotent producer without linger. A consumer in another thread reads the records."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "isolation", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    failures: list[Exception] = []
    done, writing = threading.Event(), threading.Lock()
    padding = bytes(RECORD_BYTES - _MOMENT.size)
    with path.open("w") as file:

        def note(kind: str, sent_s: float) -> None:
            waited_ms = (time.perf_counter() - sent_s) * 1000
            with writing:
                file.write(f"{kind} {sent_s:.6f} {waited_ms:.3f}\n")

        def on_delivery(sent_s: float, error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                failures.append(RuntimeError(str(error)))
            else:
                note("a", sent_s)

        def read() -> None:
            try:
                while not done.is_set():
                    if (message := consumer.poll(0.1)) is None:
                        continue
                    if (error := message.error()) is not None:
                        raise RuntimeError(str(error))
                    note("r", _MOMENT.unpack_from(message.value() or b"")[0])
            except Exception as error:
                failures.append(error)

        reader = threading.Thread(target=read, name="reader")
        reader.start()
        producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
        began_s, number = time.perf_counter(), 0
        while not failures and not select.select([sys.stdin], [], [], 0)[0]:
            while (now_s := time.perf_counter()) >= began_s + number / PACE:
                producer.produce(topic, _MOMENT.pack(now_s) + padding, on_delivery=partial(on_delivery, now_s))
                number += 1
            producer.poll(POLL_S)
        producer.flush(FLUSH_S)
        done.set()
        reader.join()
    consumer.close()
    if failures:
        raise failures[0]


def read(bootstrap: str, topic: str, records: int, log: Path) -> None:
    """Read the topic from its start again and again."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "isolation-cold",
            "enable.auto.commit": False,
            "queued.max.messages.kbytes": 131072,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
        }
    )
    total = 0
    while True:
        _forget(log)
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        seen = 0
        while seen < records:
            messages = consumer.consume(min(READ_AT_ONCE, records - seen), timeout=1)
            for message in messages:
                if (error := message.error()) is not None:
                    raise RuntimeError(str(error))
            seen += len(messages)
            print(total + seen, flush=True)
        total += seen


def _forget(log: Path) -> None:
    """Drop the log's files from the page cache. Pages that are not on disk yet stay in the cache."""
    for path in log.iterdir():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> None:
    what, bootstrap, topic, *rest = sys.argv[1:]
    if what == "follow":
        follow(bootstrap, topic, Path(rest[0]))
    else:
        read(bootstrap, topic, int(rest[0]), Path(rest[1]))


if __name__ == "__main__":
    main()
