"""`python -m bench.paced_requests`: Produce requests at a steady pace over bare sockets, as a program of its own.

It reads one JSON object from standard input (`Load`) and prints `warm` after its warm-up, then `done`, then one JSON
object (`Paced`). Each producer has a connection and an id of its own, is idempotent, and pipelines its requests as a
client does. Requests go to the producers in turn, and each producer's to the partitions in turn. A request has one
record of 100 bytes for one partition of each of `topics_per_request` topics.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.frames import Connection, frame
from protocol.api_keys import ApiKey
from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from protocol.records import Record, build_batch

RECORD_BYTES = 100
VERSION = 9
INIT_VERSION = 4
CONNECTED_AT_ONCE = 100
_ASKED = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
MAX_UNANSWERED = 20_000
"""If this many requests are unanswered, the next one waits. Otherwise a very slow server would fill this program's
memory.
"""


@dataclass(frozen=True, slots=True)
class Load:
    bootstraps: Sequence[str]
    """Addresses of the nodes. The producers are divided among them."""
    topics: Sequence[str]
    partitions: int
    """Partitions of each topic."""
    producers: int
    topics_per_request: int
    requests_per_s: float
    """Requests of all producers together."""
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Paced:
    offered_per_s: float
    answered_per_s: float
    """Requests that were answered in the measured time."""
    p50_ms: float
    p99_ms: float
    """Milliseconds from send to answer. A request is sent when it is due, even if earlier ones are unanswered."""


class _Producer:
    def __init__(self, connection: Connection, producer_id: int, load: Load, first: int) -> None:
        self._connection, self._producer_id, self._load = connection, producer_id, load
        self._partitions = itertools.cycle(range(load.partitions))
        for _ in range(first % load.partitions):
            next(self._partitions)
        self._topics: Iterator[str] = itertools.cycle(load.topics)
        self._sequences: dict[tuple[str, int], int] = {}
        self._payload = os.urandom(RECORD_BYTES)
        self._sent_s: deque[float] = deque()
        """Times at which the unanswered requests were sent, in order. `run` limits their number."""

    def close(self) -> None:
        self._connection.writer.close()

    def send(self, now_s: float) -> None:
        partition = next(self._partitions)
        now_ms = time.time_ns() // 1_000_000
        topic_data: list[TopicProduceData] = []
        for topic in itertools.islice(self._topics, self._load.topics_per_request):
            sequence = self._sequences.get((topic, partition), 0)
            self._sequences[topic, partition] = sequence + 1
            batch = build_batch(
                [Record(0, now_ms, None, self._payload)],
                producer_id=self._producer_id,
                producer_epoch=0,
                base_sequence=sequence,
            )
            topic_data.append(
                TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=partition, records=batch),))
            )
        request = ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=tuple(topic_data))
        self._sent_s.append(now_s)
        self._connection.writer.write(frame(ApiKey.PRODUCE, VERSION, 1, request))

    async def receive(self) -> float:
        """Handle an answer. Return when the oldest unanswered request, to which it belongs, was sent. Raise
        RuntimeError if one of its records was refused.
        """
        answer = await self._connection.receive(ApiKey.PRODUCE, VERSION, ProduceResponse)
        assert isinstance(answer, ProduceResponse)
        errors = {each.error_code for topic in answer.responses for each in topic.partition_responses}
        if errors != {0}:
            raise RuntimeError(f"Produce answered {errors}")
        return self._sent_s.popleft()


async def _open(load: Load, number: int) -> _Producer:
    host, _, port = load.bootstraps[number % len(load.bootstraps)].rpartition(":")
    connection = await Connection.open(host, int(port))
    given = await connection.ask(ApiKey.INIT_PRODUCER_ID, INIT_VERSION, _ASKED, InitProducerIdResponse)
    assert isinstance(given, InitProducerIdResponse)
    if given.error_code:
        raise RuntimeError(f"InitProducerId answered {given.error_code}")
    return _Producer(connection, given.producer_id, load, number)


async def run(load: Load) -> Paced:
    """Offer the load. Print when the measured time begins and when it ends."""
    producers: list[_Producer] = []
    for first in range(0, load.producers, CONNECTED_AT_ONCE):
        some = range(first, min(first + CONNECTED_AT_ONCE, load.producers))
        producers += await asyncio.gather(*(_open(load, number) for number in some))
    began_s = time.perf_counter()
    warm_s = began_s + load.warm_up_s
    ends_s = warm_s + load.seconds
    room = asyncio.Semaphore(MAX_UNANSWERED)
    times_ms: list[float] = []
    answered = 0

    async def receive(producer: _Producer) -> None:
        nonlocal answered
        while True:
            sent_s = await producer.receive()
            now_s = time.perf_counter()
            room.release()
            answered += warm_s <= now_s < ends_s
            if warm_s <= sent_s < ends_s:
                times_ms.append((now_s - sent_s) * 1000)

    async def offer() -> None:
        told = False
        for number in itertools.count():
            due_s = began_s + number / load.requests_per_s
            if due_s >= warm_s and not told:
                told = True
                print("warm", flush=True)
            if due_s >= ends_s:
                break
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            await room.acquire()
            producers[number % load.producers].send(time.perf_counter())
        await asyncio.sleep(max(0.0, ends_s - time.perf_counter()))
        print("done", flush=True)
        for _ in range(MAX_UNANSWERED):
            await room.acquire()

    try:
        async with asyncio.TaskGroup() as group:
            receivers = [group.create_task(receive(each)) for each in producers]
            await offer()
            for task in receivers:
                task.cancel()
    finally:
        for producer in producers:
            producer.close()
    quantiles = statistics.quantiles(times_ms, n=100, method="inclusive")
    return Paced(load.requests_per_s, answered / load.seconds, quantiles[49], quantiles[98])


def main() -> None:
    load = Load(**json.load(sys.stdin))
    print(json.dumps(asdict(asyncio.run(run(load)))))


if __name__ == "__main__":
    main()
