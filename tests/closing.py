"""Close a librdkafka consumer that may be in the middle of a rebalance.

`rd_kafka_consumer_close` serves a rebalance event that is still queued. The (un)assign that answers the event then
waits for ever, and holds the interpreter's lock (confluentinc/librdkafka#4884, in 2.16.0). This happens against any
broker. A consumer that has left its group before it closes has no such event. An empty assignment does not prove that
the consumer has left: librdkafka postpones an unsubscribe until the current rebalance is over, and the consumer may
receive partitions from that rebalance. In the classic protocol the member id is the proof, because librdkafka drops the
id when the consumer leaves. In the consumer protocol the consumer makes its own id and keeps it, but librdkafka
postpones nothing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import confluent_kafka
from confluent_kafka import KafkaError

PATIENCE_S = 30.0
OWN_ID_LENGTH = 22
"""Length of the ids that librdkafka makes itself for the consumer protocol: a UUID in base 64. The broker makes other
ids, which begin with the client's id."""


def close(
    consumer: confluent_kafka.Consumer, poll: Callable[[], object] | None = None, *, patience_s: float = PATIENCE_S
) -> None:
    """Leave the group, then close the consumer. Raise AssertionError if it has not left after `patience_s`.

    `poll` is called until the partitions are revoked, and receives the records that still arrive. The default discards
    them. A static member leaves too, although closing alone would not make it leave.
    """
    consumer.unsubscribe()
    deadline = time.monotonic() + patience_s
    while not _has_left(consumer):
        assert time.monotonic() < deadline, "the consumer does not leave its group"
        if poll is None:
            consumer.poll(0.05)
        else:
            poll()
    consumer.poll(0)
    consumer.close()


def responds(consumer: confluent_kafka.Consumer, partition: confluent_kafka.TopicPartition, patience_s: float) -> bool:
    """Return whether the consumer's thread in librdkafka answers. `unsubscribe` waits for this thread without a limit,
    and holds the interpreter's lock while it waits. The thread stands still for ever if a broker leaves the cluster
    while it owes the answer to an OffsetForLeaderEpoch (confluentinc/librdkafka#5476, in 2.16.0).
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            consumer.committed([partition], max(left_s, 0.1))
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() in (KafkaError._TIMED_OUT, KafkaError._WAIT_COORD):  # noqa: SLF001 - public names
                if left_s > 0:
                    continue
                return False
        return True


def _has_left(consumer: confluent_kafka.Consumer) -> bool:
    member_id = consumer.memberid() or ""
    return not consumer.assignment() and len(member_id) in (0, OWN_ID_LENGTH)
