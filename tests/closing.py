"""Closes a librdkafka consumer that may be in the middle of a rebalance.

`rd_kafka_consumer_close` serves a rebalance event that is still queued from within, and the (un)assign which answers it
then waits for ever, with the interpreter's lock held (confluentinc/librdkafka#4884, in 2.16.0). Against any broker.
A consumer that has left its group before it closes has no such event. That it owns nothing does not say so: librdkafka
puts an unsubscribe off until the rebalance is over that it is in, and may be given partitions by that. What says so in
the classic protocol is its member id, which it drops when it leaves. In the consumer protocol the id is the consumer's
own and stays; there nothing is put off.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import confluent_kafka

PATIENCE_S = 30.0
OWN_ID_LENGTH = 22
"""Of the ids that librdkafka makes itself, for the consumer protocol: a UUID in base 64. Others come from the broker,
behind the client's id."""


def close(consumer: confluent_kafka.Consumer, poll: Callable[[], object] | None = None) -> None:
    """Leaves the group, then closes. `poll` takes what still arrives until the partitions are let go; by default it is
    thrown away. A static member leaves by this, though closing it would not."""
    consumer.unsubscribe()
    deadline = time.monotonic() + PATIENCE_S
    while not _has_left(consumer):
        assert time.monotonic() < deadline, "the consumer does not leave its group"
        if poll is None:
            consumer.poll(0.05)
        else:
            poll()
    consumer.poll(0)
    consumer.close()


def _has_left(consumer: confluent_kafka.Consumer) -> bool:
    member_id = consumer.memberid() or ""
    return not consumer.assignment() and len(member_id) in (0, OWN_ID_LENGTH)
