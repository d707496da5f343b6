"""Close librdkafka consumers in the middle of rebalances: `python -m tests.clients.closers BOOTSTRAP ROUNDS THREADS`.

This is a program of its own, because a close that hangs blocks the whole interpreter. It prints `closed ROUNDS` at the
end.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid

import confluent_kafka

from tests.clients.topics import create_topic

PARTITIONS = 4
PATIENCE_S = 30.0


def member(bootstrap: str, group: str, topic: str) -> confluent_kafka.Consumer:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 200,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    consumer.subscribe([topic])
    return consumer


def poll_until_owned(consumer: confluent_kafka.Consumer, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(consumer.assignment()) != count:
        assert time.monotonic() < deadline, f"{len(consumer.assignment())} of {count} partitions"
        consumer.poll(0.05)


def rebalance_and_close(bootstrap: str, chance: random.Random) -> None:
    group = topic = f"closers-{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, PARTITIONS, topic)
    first = member(bootstrap, group, topic)
    poll_until_owned(first, PARTITIONS)
    second = member(bootstrap, group, topic)
    # Close at a random moment of the rebalance, or when both consumers own their share. One of them may not know yet
    # that a rebalance has begun.
    at, linger_s = chance.choice((time.monotonic() + 0.6 * chance.random(), None)), chance.choice((0.001, 0.05))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < (deadline if at is None else at):
        first.poll(linger_s)
        second.poll(linger_s)
        if len(second.assignment()) == len(first.assignment()) == PARTITIONS // 2:
            break
    time.sleep(chance.random() * 0.004)
    first.close()
    poll_until_owned(second, PARTITIONS)
    second.close()


def main() -> None:
    bootstrap, rounds, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for each in range(rounds // threads):
                rebalance_and_close(bootstrap, random.Random(f"{number}/{each}"))
        except BaseException as error:
            failed.append(error)
            raise

    working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    if failed:
        raise SystemExit(1)
    print(f"closed {rounds}")


if __name__ == "__main__":
    main()
