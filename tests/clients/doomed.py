"""Run a consumer in a process that a test will kill: `python -m tests.clients.doomed BOOTSTRAP TOPIC GROUP
[KEY=VALUE]`.

At each assignment it prints the assigned partitions, comma-separated. For partitions that it lost, the line begins with
`lost`. Further arguments are librdkafka's settings.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, TopicPartition


def print_assigned(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
    print(",".join(str(partition.partition) for partition in partitions), flush=True)


def print_lost(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
    print("lost", ",".join(str(partition.partition) for partition in partitions), flush=True)


def main() -> None:
    bootstrap, topic, group, *settings = sys.argv[1:]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 500,
            **dict(setting.split("=", 1) for setting in settings),
        }
    )
    consumer.subscribe([topic], on_assign=print_assigned, on_lost=print_lost)
    while True:
        consumer.poll(0.1)


if __name__ == "__main__":
    main()
