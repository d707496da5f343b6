"""The embedded consumer protocol, compared with the clients' own encoders, and with hostile bytes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from protocol.consumer import (
    MAX_PARTITIONS,
    MAX_TOPICS,
    Assignment,
    Subscription,
    TopicPartition,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    subscribed_topics,
)
from protocol.errors import ProtocolError

int32s = st.integers(-(2**31), 2**31 - 1)
topic_partitions = st.lists(
    st.builds(TopicPartition, st.text(max_size=8), st.lists(int32s, max_size=4).map(tuple)), max_size=4
).map(tuple)


def subscription(version: int) -> Subscription:
    return Subscription(
        version,
        ("a", "b-ü"),
        b"opaque",
        (TopicPartition("a", (0, 2)), TopicPartition("b-ü", ())) if version >= 1 else (),
        17 if version >= 2 else -1,
        "rack-1" if version >= 3 else None,
    )


@pytest.mark.parametrize("version", range(4))
def test_subscription_as_kafka_python_writes_and_reads_it(version):
    ours = subscription(version)
    theirs = ConsumerProtocolSubscription(
        topics=list(ours.topics),
        user_data=ours.user_data,
        owned_partitions=[
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=list(partitions))
            for topic, partitions in ours.owned_partitions
        ],
        generation_id=ours.generation_id,
        rack_id=ours.rack_id,
        version=version,
    )
    encoded = encode_subscription(ours)
    assert encoded == theirs.encode(header=True) == bytes(theirs.encode(header=True))
    assert decode_subscription(encoded) == ours
    assert decode_subscription(memoryview(encoded)) == ours
    assert subscribed_topics(encoded) == ours.topics


def test_subscription_as_aiokafka_writes_it():
    theirs = ConsumerProtocolMemberMetadata(0, ["t1", "t2"], b"").encode()
    assert decode_subscription(theirs) == Subscription(0, ("t1", "t2"), b"")
    assert encode_subscription(Subscription(0, ("t1", "t2"), b"")) == theirs


def test_subscription_of_the_worked_example_is_decoded():
    blob = bytes.fromhex("0001 00000001 0001 74 ffffffff 00000000")
    assert decode_subscription(blob) == Subscription(1, ("t",))
    assert encode_subscription(Subscription(1, ("t",))) == blob


@pytest.mark.parametrize("version", range(4))
def test_assignment_as_the_clients_write_it(version):
    ours = Assignment(version, (TopicPartition("a", (0, 1)), TopicPartition("b", (5,))), b"x")
    encoded = encode_assignment(ours)
    assert decode_assignment(encoded) == ours
    assert ConsumerProtocolMemberAssignment(version, [("a", [0, 1]), ("b", [5])], b"x").encode() == encoded
    theirs = ConsumerProtocolAssignment(
        assigned_partitions=[
            ConsumerProtocolAssignment.TopicPartition(topic="a", partitions=[0, 1]),
            ConsumerProtocolAssignment.TopicPartition(topic="b", partitions=[5]),
        ],
        user_data=b"x",
        version=version,
    )
    assert theirs.encode(header=True) == encoded


def test_empty_assignment_is_decoded():
    empty = bytes.fromhex("000000000000ffffffff")
    assert decode_assignment(empty) == Assignment(0, (), None)
    assert encode_assignment(Assignment(0, (), None)) == empty
    assert ConsumerProtocolMemberAssignment.decode(empty).assignment == []


@given(
    st.integers(0, 3),
    st.lists(st.text(max_size=8), max_size=4).map(tuple),
    st.none() | st.binary(max_size=20),
    topic_partitions,
    int32s,
    st.none() | st.text(max_size=8),
)
def test_subscription_round_trip(version, topics, user_data, owned, generation_id, rack_id):
    encoded = encode_subscription(Subscription(version, topics, user_data, owned, generation_id, rack_id))
    assert decode_subscription(encoded) == Subscription(
        version,
        topics,
        user_data,
        owned if version >= 1 else (),
        generation_id if version >= 2 else -1,
        rack_id if version >= 3 else None,
    )


@given(st.integers(0, 3), topic_partitions, st.none() | st.binary(max_size=20))
def test_assignment_round_trip(version, assigned, user_data):
    assignment = Assignment(version, assigned, user_data)
    assert decode_assignment(encode_assignment(assignment)) == assignment


# --- later versions, and invalid bytes -------------------------------------------------------------------------------


def test_newer_version_is_read_with_the_newest_layout_and_the_rest_ignored():
    blob = bytearray(encode_subscription(subscription(3)) + b"fields to come")
    struct.pack_into(">h", blob, 0, 9)
    read = decode_subscription(blob)
    assert (read.version, read.generation_id, read.rack_id) == (9, 17, "rack-1")
    assert decode_subscription(encode_subscription(read)).version == 3
    assigned = bytearray(encode_assignment(Assignment(3, (TopicPartition("a", (1,)),))) + b"more")
    struct.pack_into(">h", assigned, 0, 4)
    assert decode_assignment(assigned).assigned_partitions == (("a", (1,)),)


def test_topics_are_read_if_the_rest_is_missing():
    blob = encode_subscription(Subscription(0, ("a",)))
    sarama_cluster = b"\x00\x01" + blob[2:]
    with pytest.raises(ProtocolError):
        decode_subscription(sarama_cluster)
    assert subscribed_topics(sarama_cluster) == ("a",)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0",
        bytes.fromhex("ffff 00000000 ffffffff"),
        bytes.fromhex("0000 ffffffff ffffffff"),
        bytes.fromhex("0000 7fffffff ffffffff"),
        bytes.fromhex("0000 00000001 ffff ffffffff"),
        bytes.fromhex("0000 00000001 0002 74 ffffffff"),
        bytes.fromhex("0000 00000001 0001 ff ffffffff"),
        bytes.fromhex("0000 00000000 00000005 00"),
        bytes.fromhex("0000 00000000 7fffffff"),
    ],
)
def test_hostile_subscriptions(blob):
    with pytest.raises(ProtocolError):
        decode_subscription(blob)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        bytes.fromhex("8000 00000000 ffffffff"),
        bytes.fromhex("0000 00000001 0001 74 7fffffff ffffffff"),
        bytes.fromhex("0000 00000001 0001 74 ffffffff ffffffff"),
        bytes.fromhex("0000 00000000"),
    ],
)
def test_hostile_assignments(blob):
    with pytest.raises(ProtocolError):
        decode_assignment(blob)


@pytest.mark.parametrize("decode", [decode_subscription, decode_assignment, subscribed_topics])
@given(data=st.binary(max_size=120))
def test_arbitrary_bytes_raise_only_protocol_errors(decode, data):
    with contextlib.suppress(ProtocolError):
        decode(data)


@pytest.mark.parametrize("version", range(4))
def test_every_truncation_is_refused(version):
    whole = encode_subscription(subscription(version))
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode_subscription(whole[:end])


def test_assignment_of_too_many_partitions_is_refused_unread():
    for topics, partitions, fits in (
        (MAX_TOPICS, 1, True),
        (MAX_TOPICS + 1, 1, False),
        (2, MAX_PARTITIONS // 2, True),
        (2, MAX_PARTITIONS // 2 + 1, False),
    ):
        given = tuple(TopicPartition(f"t{number}", tuple(range(partitions))) for number in range(topics))
        assigned, subscribed = Assignment(1, given), Subscription(1, (), None, given)
        for decode, blob, whole in (
            (decode_assignment, encode_assignment(assigned), assigned),
            (decode_subscription, encode_subscription(subscribed), subscribed),
        ):
            assert decode(blob, bounded=False) == whole
            if fits:
                assert decode(blob) == whole
            else:
                with pytest.raises(ProtocolError, match="more than"):
                    decode(blob)
    names = tuple(f"t{number}" for number in range(MAX_TOPICS + 1))
    with pytest.raises(ProtocolError, match="more than"):
        subscribed_topics(encode_subscription(Subscription(0, names)))
