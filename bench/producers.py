"""`python -m bench.producers CLIENT BOOTSTRAP TOPIC WARM_UP_S SECONDS RECORDS_PER_S`: one stock producer of Python that
keeps its client's default settings.

`bench/Produce.java` and `tests/compat/franz_go/produce` do the same in their languages. Each sends different records of
1 KiB, RECORDS_PER_S of them a second, or as fast as the client allows if that is 0. After WARM_UP_S it prints `warm`.
After SECONDS more it prints `done`, the number of records that were acknowledged in between, and the seconds. At the
end it prints, in one line, the milliseconds from send to acknowledgement of each record sent in between. At full speed
that line is empty, because such a latency shows only how long the client's buffer is. A failed record ends the program
with an error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import kafka
from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as Librdkafka

RECORD_BYTES = 1024
PAYLOADS = 1000
"""Number of different payloads. The producer uses them in turn."""
FLUSH_S = 60.0
POLL_S = 0.001
RECORDS_PER_POLL = 200

Acknowledge = Callable[[Exception | None], None]


class Producer(Protocol):
    """A stock client behind the interface that the measurement uses."""

    def send(self, value: bytes, acknowledge: Acknowledge) -> None:
        """Send a record. Wait while the client's buffer is full."""
        ...

    def wait(self, seconds: float) -> None:
        """Let the client run for about this long."""
        ...

    def close(self) -> None:
        """Wait until each record is acknowledged or has failed."""
        ...


class LibrdkafkaProducer:
    def __init__(self, bootstrap: str, topic: str, *, idempotent: bool) -> None:
        # The value without idempotence is librdkafka's default.
        self._producer = Librdkafka({"bootstrap.servers": bootstrap, "enable.idempotence": idempotent})
        self._topic = topic
        self._sent = 0

    def send(self, value: bytes, acknowledge: Acknowledge) -> None:
        def on_delivery(error: KafkaError | None, _message: Message) -> None:
            acknowledge(None if error is None else RuntimeError(str(error)))

        while True:
            try:
                self._producer.produce(self._topic, value, on_delivery=on_delivery)
                break
            except BufferError:
                self._producer.poll(10 * POLL_S)
        self._sent += 1
        if self._sent % RECORDS_PER_POLL == 0:
            self._producer.poll(0)

    def wait(self, seconds: float) -> None:
        self._producer.poll(max(seconds, POLL_S))

    def close(self) -> None:
        if left := self._producer.flush(FLUSH_S):
            raise RuntimeError(f"{left} records were not acknowledged within {FLUSH_S:.0f} s")


class KafkaPythonProducer:
    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = kafka.KafkaProducer(bootstrap_servers=bootstrap)
        self._topic = topic

    def send(self, value: bytes, acknowledge: Acknowledge) -> None:
        sent = self._producer.send(self._topic, value)
        sent.add_callback(lambda _: acknowledge(None))
        sent.add_errback(acknowledge)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._producer.flush(FLUSH_S)
        self._producer.close(FLUSH_S)


CLIENTS: dict[str, Callable[[str, str], Producer]] = {
    "kafka-python": KafkaPythonProducer,
    "librdkafka": lambda bootstrap, topic: LibrdkafkaProducer(bootstrap, topic, idempotent=False),
    "librdkafka-idempotent": lambda bootstrap, topic: LibrdkafkaProducer(bootstrap, topic, idempotent=True),
}


class Run:
    """One producer's run, from its warm-up to the last acknowledgement."""

    def __init__(self, producer: Producer, records_per_s: int) -> None:
        self._producer, self._records_per_s = producer, records_per_s
        self._payloads = [os.urandom(RECORD_BYTES) for _ in range(PAYLOADS)]
        self._failure: Exception | None = None
        self._sent = self._acknowledged = 0
        self.latencies_ms: list[float] = []

    def send_for(self, seconds: float, *, measured: bool) -> tuple[int, float]:
        """Send for this long, or until a record fails. Return the number of records acknowledged in this time, and the
        actual seconds. The call may last longer, because the last send waits if the client's buffer is full.
        """
        began_s, before, first = time.perf_counter(), self._acknowledged, self._sent
        ends_s = began_s + seconds
        while (now_s := time.perf_counter()) < ends_s and self._failure is None:
            if self._records_per_s:
                # Each call computes its pace from its own start, so that it does not send faster to make up for a slow
                # start before.
                early_s = began_s + (self._sent - first) / self._records_per_s - now_s
                if early_s > 0:
                    self._producer.wait(min(early_s, ends_s - now_s))
                    continue
            self._send(now_s, timed=measured and self._records_per_s > 0)
        return self._acknowledged - before, time.perf_counter() - began_s

    def _send(self, sent_s: float, *, timed: bool) -> None:
        def acknowledge(error: Exception | None) -> None:
            if error is not None:
                self._failure = error
                return
            self._acknowledged += 1
            if timed:
                self.latencies_ms.append((time.perf_counter() - sent_s) * 1000)

        self._producer.send(self._payloads[self._sent % PAYLOADS], acknowledge)
        self._sent += 1

    def close(self) -> None:
        """Wait for the last acknowledgement. Raise the error of a record that failed."""
        self._producer.close()
        if self._failure is not None:
            raise self._failure


def main() -> None:
    client, bootstrap, topic, warm_up_s, seconds, records_per_s = sys.argv[1:]
    run = Run(CLIENTS[client](bootstrap, topic), int(records_per_s))
    run.send_for(float(warm_up_s), measured=False)
    print("warm", flush=True)
    records, took_s = run.send_for(float(seconds), measured=True)
    print("done", records, f"{took_s:.6f}", flush=True)
    run.close()
    print(*(f"{latency_ms:.3f}" for latency_ms in run.latencies_ms))


if __name__ == "__main__":
    main()
