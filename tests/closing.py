"""Closes a librdkafka consumer that may be in the middle of a rebalance.

`rd_kafka_consumer_close` serves a rebalance event that is still queued from within, and the (un)assign which answers it
then waits for ever, with the interpreter's lock held (confluentinc/librdkafka#4884, in 2.16.0). Against any broker.
A consumer that has let go of its partitions before it closes has no such event.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import confluent_kafka

PATIENCE_S = 30.0


def close(consumer: confluent_kafka.Consumer, poll: Callable[[], object] | None = None) -> None:
    """Leaves the group, then closes. `poll` takes what still arrives until the partitions are let go; by default it is
    thrown away. A static member leaves by this, though closing it would not."""
    consumer.unsubscribe()
    deadline = time.monotonic() + PATIENCE_S
    while consumer.assignment():
        assert time.monotonic() < deadline, "the consumer does not let go of its partitions"
        if poll is None:
            consumer.poll(0.05)
        else:
            poll()
    consumer.poll(0)
    consumer.close()
