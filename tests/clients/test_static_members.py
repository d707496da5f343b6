"""Static members of stock clients when their node does not answer for longer than their session."""

from __future__ import annotations

import signal
import time
import uuid

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import wait_for

SESSION_S = 6
"""The shortest session timeout that Kafka permits."""
STOPPED_S = SESSION_S + 2
"""When a stopped node continues, it notices that it was stopped, and does not end the session because of the pause."""


def test_static_member_goes_on_after_a_commit_without_a_member_id(gateway: GatewayProcess) -> None:
    """librdkafka drops its member id when its session ends without an answer, and still commits with its instance id.
    Kafka answers FENCED_INSTANCE_ID, although no other process uses the instance id. Then librdkafka stops for good.
    """
    topic = create_topic(gateway.bootstrap, 1)
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    consumer = Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": f"g-{uuid.uuid4().hex[:8]}",
            "group.instance.id": "one",
            "session.timeout.ms": SESSION_S * 1000,
            "heartbeat.interval.ms": 500,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )

    def produce(value: bytes) -> None:
        producer.produce(topic, value)
        assert producer.flush(30) == 0

    def has_read(value: bytes) -> bool:
        message = consumer.poll(0.1)
        if message is None:
            return False
        assert message.error() is None, message.error()
        return message.value() == value

    try:
        consumer.subscribe([topic])
        produce(b"before")
        wait_for(lambda: has_read(b"before"))
        assert consumer.memberid()
        gateway.send_signal(signal.SIGSTOP)
        try:
            continues_s = time.monotonic() + STOPPED_S
            wait_for(lambda: not consumer.memberid() and time.monotonic() > continues_s)
            consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=True)
        finally:
            gateway.send_signal(signal.SIGCONT)
        produce(b"after")
        wait_for(lambda: has_read(b"after"))
    finally:
        consumer.close()
