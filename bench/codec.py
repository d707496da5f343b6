"""Measure microseconds per message of the specialised functions, of kafka-python's codec and of the construct grammar.

Run as `python -m bench.codec`. All three must agree on the bytes before anything is timed. The command prints one table
and the ratio that is the target: decode + encode of a JoinGroup response of 50 members within 1.5 times kafka-python's.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.protocol.consumer import group as their_groups
from kafka.protocol.consumer.fetch import FetchRequest as TheirFetchRequest
from kafka.protocol.metadata.metadata import MetadataResponse as TheirMetadataResponse
from kafka.protocol.producer.produce import ProduceRequest as TheirProduceRequest

from protocol import codec, grammar
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from protocol.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData

ROUNDS = 5
SECONDS_PER_ROUND = 0.04
TARGET_RATIO = 1.5

MEMBER_ID = "consumer-payments-{}-6f1c2d8e-51a7-4a8f-9f6d-0c2b1e7a9d34"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    version: int
    message: Any
    theirs: Any


JOIN_GROUP_RESPONSE = Case(
    "JoinGroupResponse, 50 members",
    9,
    JoinGroupResponse(
        generation_id=7,
        protocol_type="consumer",
        protocol_name="range",
        leader=MEMBER_ID.format(0),
        member_id=MEMBER_ID.format(0),
        members=tuple(
            JoinGroupResponseMember(member_id=MEMBER_ID.format(member), metadata=bytes(180)) for member in range(50)
        ),
    ),
    their_groups.JoinGroupResponse,
)

CASES = (
    Case(
        "JoinGroupRequest",
        9,
        JoinGroupRequest(
            group_id="payments",
            session_timeout_ms=45_000,
            rebalance_timeout_ms=300_000,
            member_id=MEMBER_ID.format(1),
            protocol_type="consumer",
            protocols=(
                JoinGroupRequestProtocol(name="range", metadata=bytes(80)),
                JoinGroupRequestProtocol(name="cooperative-sticky", metadata=bytes(100)),
            ),
        ),
        their_groups.JoinGroupRequest,
    ),
    JOIN_GROUP_RESPONSE,
    Case(
        "OffsetCommitRequest, 100 partitions",
        8,
        OffsetCommitRequest(
            group_id="payments",
            generation_id_or_member_epoch=7,
            member_id=MEMBER_ID.format(1),
            topics=tuple(
                OffsetCommitRequestTopic(
                    name=f"orders-{topic}",
                    partitions=tuple(
                        OffsetCommitRequestPartition(
                            partition_index=partition, committed_offset=123_456_789, committed_metadata=""
                        )
                        for partition in range(10)
                    ),
                )
                for topic in range(10)
            ),
        ),
        their_groups.OffsetCommitRequest,
    ),
    Case(
        "MetadataResponse, 50 topics of 6",
        12,
        MetadataResponse(
            brokers=tuple(
                MetadataResponseBroker(node_id=node, host=f"broker-{node}.kafka", port=9092) for node in range(3)
            ),
            cluster_id="Kx0rJtBPQdq7YhXl2Z5v9A",
            controller_id=1,
            topics=tuple(
                MetadataResponseTopic(
                    name=f"orders-{topic}",
                    topic_id=UUID(int=topic + 1),
                    partitions=tuple(
                        MetadataResponsePartition(
                            partition_index=partition,
                            leader_id=1,
                            leader_epoch=3,
                            replica_nodes=(0, 1, 2),
                            isr_nodes=(1,),
                        )
                        for partition in range(6)
                    ),
                )
                for topic in range(50)
            ),
        ),
        TheirMetadataResponse,
    ),
    Case(
        "ProduceRequest, 16 KiB",
        9,
        ProduceRequest(
            acks=-1,
            timeout_ms=30_000,
            topic_data=(
                TopicProduceData(
                    name="orders", partition_data=(PartitionProduceData(index=3, records=bytes(16 * 1024)),)
                ),
            ),
        ),
        TheirProduceRequest,
    ),
    Case(
        "FetchRequest, 50 partitions",
        12,
        FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            session_epoch=0,
            topics=tuple(
                FetchTopic(
                    topic=f"orders-{topic}",
                    partitions=tuple(
                        FetchPartition(partition=partition, fetch_offset=123_456, partition_max_bytes=1 << 20)
                        for partition in range(10)
                    ),
                )
                for topic in range(5)
            ),
        ),
        TheirFetchRequest,
    ),
    Case(
        "HeartbeatRequest",
        4,
        HeartbeatRequest(group_id="payments", generation_id=7, member_id=MEMBER_ID.format(1)),
        their_groups.HeartbeatRequest,
    ),
)


def microseconds(action: Callable[[], Any]) -> float:
    """Return the time per call of the fastest of several rounds."""
    timer = timeit.Timer(action)
    once = max(timer.timeit(1), 1e-7)
    number = max(1, int(SECONDS_PER_ROUND / once))
    return min(timer.repeat(ROUNDS, number)) / number * 1e6


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds to decode and to encode."""

    ours: tuple[float, float]
    kafka_python: tuple[float, float]
    construct: tuple[float, float]

    @property
    def ratio(self) -> float:
        return sum(self.ours) / sum(self.kafka_python)


def measure(case: Case) -> Timing:
    message, version, theirs = case.message, case.version, case.theirs
    encoded = b"".join(codec.encode(message, version))
    their_message = theirs.decode(encoded, version=version)
    their_message._header = None  # noqa: SLF001 - kafka-python cannot otherwise encode again what it decoded
    if not encoded == bytes(their_message.encode(version=version)) == grammar.build(message, version):
        raise AssertionError(f"{case.name}: the codecs produce different bytes")
    return Timing(
        (
            microseconds(lambda: codec.decode(type(message), version, encoded)),
            microseconds(lambda: codec.encode(message, version)),
        ),
        (
            microseconds(lambda: theirs.decode(encoded, version=version)),
            microseconds(lambda: their_message.encode(version=version)),
        ),
        (
            microseconds(lambda: grammar.parse(type(message), version, encoded)),
            microseconds(lambda: grammar.build(message, version)),
        ),
    )


def join_group_response_us() -> tuple[float, float]:
    """Return the microseconds of decode + encode of the JoinGroup response, ours and kafka-python's."""
    timing = measure(JOIN_GROUP_RESPONSE)
    return sum(timing.ours), sum(timing.kafka_python)


def main() -> None:
    columns = ("ours", "kafka-python", "construct")
    print("us per message, decode / encode".ljust(48) + "".join(column.rjust(20) for column in columns) + "   ratio")
    for case in CASES:
        size_bytes = sum(map(len, codec.encode(case.message, case.version)))
        timing = measure(case)
        cells = (
            f"{decode:.1f} / {encode:.1f}" for decode, encode in (timing.ours, timing.kafka_python, timing.construct)
        )
        label = f"{case.name} v{case.version} ({size_bytes} B)"
        print(label.ljust(48) + "".join(cell.rjust(20) for cell in cells) + f"{timing.ratio:8.2f}")
    print(f"\nratio: ours to kafka-python's, decode and encode together; target of JoinGroupResponse: {TARGET_RATIO}")


if __name__ == "__main__":
    main()
