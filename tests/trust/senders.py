"""Producers of several kinds behind one interface, for the workload `Producing`.

The one idea: a record has an outcome once, by the callback of its own client. A client that reports an error may have
sent the record, so the outcome is unknown then.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import threading
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import aiokafka
import confluent_kafka
import kafka
from aiokafka.errors import KafkaError as AiokafkaError
from kafka.errors import KafkaError as KafkaPythonError

from tests.postgres import LoopThread
from tests.trust.foreign import ForeignProcess
from tests.trust.patience import CALL_S, DELIVERY_S, FINISH_S, PATIENT

Delivered = Callable[[int], None]
"""Callback for an acknowledged record. It receives the record's offset, -1 if the client reports none, or `FAILED`."""
FAILED = -2
POLL_S = 0.05


class SenderError(Exception):
    """The client cannot send any more. A new client can."""


@dataclass(frozen=True)
class Sending:
    """Settings of a producer, in terms that apply to all kinds of clients."""

    bootstrap: str
    client_id: str
    idempotent: bool
    linger_ms: int
    compression: str


class Sender(Protocol):
    def send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> bool:
        """Send a record; return False if the client's buffer is full. Raise SenderError if the client has failed."""
        ...

    def poll(self, seconds: float) -> None:
        """Let callbacks run for about this many seconds."""
        ...

    def flush(self) -> int:
        """Wait until every record has its outcome, at most FINISH_S, and close the client. Return the number of records
        without an outcome.
        """
        ...


class LibrdkafkaSender:
    def __init__(self, settings: Sending) -> None:
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": settings.bootstrap,
                "client.id": settings.client_id,
                "enable.idempotence": settings.idempotent,
                "acks": "all",
                "linger.ms": settings.linger_ms,
                "compression.type": settings.compression,
                "delivery.timeout.ms": int(DELIVERY_S * 1_000),
                "request.timeout.ms": 5_000,
                **PATIENT,
            }
        )

    def send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> bool:
        def heard(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
            # librdkafka reports "purged" or "timed out" for records that it may have sent.
            offset = message.offset()
            delivered(FAILED if error is not None else -1 if offset is None else offset)

        try:
            self._producer.produce(topic, str(value).encode(), key=key, partition=partition, on_delivery=heard)
        except BufferError:
            return False
        except confluent_kafka.KafkaException as error:
            raise SenderError(str(error)) from error
        return True

    def poll(self, seconds: float) -> None:
        self._producer.poll(seconds)

    def flush(self) -> int:
        return self._producer.flush(FINISH_S)


class _Counted:
    """Counts records without an outcome, for clients that call back on another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 0

    def sent(self) -> None:
        with self._changed:
            self._open += 1

    def done(self, delivered: Delivered, offset: int) -> None:
        delivered(offset)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, FINISH_S)
            return self._open


class KafkaPythonSender:
    def __init__(self, settings: Sending) -> None:
        self._counted = _Counted()
        try:
            self._producer = kafka.KafkaProducer(
                bootstrap_servers=settings.bootstrap,
                client_id=settings.client_id,
                acks="all",
                enable_idempotence=settings.idempotent,
                linger_ms=settings.linger_ms,
                compression_type="gzip" if settings.compression != "none" else None,
                delivery_timeout_ms=int(DELIVERY_S * 1_000),
                request_timeout_ms=6_000,
                max_block_ms=int(DELIVERY_S * 1_000),
                reconnect_backoff_max_ms=500,
            )
        except KafkaPythonError as error:  # no node answers for half a minute
            raise SenderError(repr(error)) from error

    def send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> bool:
        try:
            future: Any = self._producer.send(
                topic, str(value).encode(), key=None if key is None else key.encode(), partition=partition
            )
        except KafkaPythonError as error:
            raise SenderError(repr(error)) from error
        self._counted.sent()
        future.add_callback(lambda found: self._counted.done(delivered, found.offset))
        future.add_errback(lambda _: self._counted.done(delivered, FAILED))
        return True

    def poll(self, seconds: float) -> None:
        time.sleep(seconds)  # a pause between two records; callbacks run on the client's own thread

    def flush(self) -> int:
        left = self._counted.wait()
        self._producer.close(CALL_S)
        return left


class AiokafkaSender:
    def __init__(self, settings: Sending) -> None:
        self._counted = _Counted()
        self._loop = LoopThread()
        self._producer = self._loop.submit(self._started(settings)).result(DELIVERY_S)

    @staticmethod
    async def _started(settings: Sending) -> aiokafka.AIOKafkaProducer:
        while True:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=settings.bootstrap,
                client_id=settings.client_id,
                acks="all",
                enable_idempotence=settings.idempotent,
                linger_ms=settings.linger_ms,
                compression_type="gzip" if settings.compression != "none" else None,
                request_timeout_ms=40_000,  # this is also the time after which a batch fails
            )
            try:
                await producer.start()
            except AiokafkaError:  # no node answers; `result` limits the attempts
                await producer.stop()
            else:
                return producer

    def send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> bool:
        try:
            self._loop.submit(self._send(topic, partition, key, value, delivered)).result(DELIVERY_S)
        except (AiokafkaError, TimeoutError) as error:
            raise SenderError(repr(error)) from error
        return True

    async def _send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> None:
        found = await self._producer.send(
            topic, str(value).encode(), key=None if key is None else key.encode(), partition=partition
        )
        self._counted.sent()
        found.add_done_callback(partial(self._heard, delivered))

    def _heard(self, delivered: Delivered, found: Future[Any]) -> None:
        failed = found.cancelled() or found.exception() is not None
        self._counted.done(delivered, FAILED if failed else found.result().offset)

    def poll(self, seconds: float) -> None:
        time.sleep(seconds)  # a pause between two records; callbacks run on the client's own thread

    def flush(self) -> int:
        left = self._counted.wait()
        # aiokafka raises the error that ended the producer a second time.
        with contextlib.suppress(AiokafkaError, TimeoutError):
            self._loop.submit(self._producer.stop()).result(CALL_S)
        self._loop.close()
        return left


class ForeignSender:
    def __init__(self, settings: Sending, process: ForeignProcess) -> None:
        self._counted = _Counted()
        self._open: dict[str, Delivered] = {}
        self._client = process.start(
            *("producer", settings.client_id, str(settings.idempotent).lower(), settings.linger_ms),
            settings.compression,
            on_event=self._heard,
        )

    def _heard(self, event: Sequence[str]) -> None:
        _, _, value, outcome, offset = event
        self._counted.done(self._open.pop(value), int(offset) if outcome == "ok" else FAILED)

    def send(self, topic: str, partition: int, key: str | None, value: int, delivered: Delivered) -> bool:
        if self._client.ended:
            raise SenderError(self._client.error)
        self._open[str(value)] = delivered
        self._counted.sent()
        self._client.command("send", topic, partition, key or "", value)
        return True

    def poll(self, seconds: float) -> None:
        time.sleep(seconds)  # a pause between two records; callbacks run on another thread

    def flush(self) -> int:
        left = self._counted.wait()
        self._client.stop()
        return left
