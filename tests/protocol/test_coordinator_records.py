"""Records of coordinators, compared with the bytes that Kafka 4.2's own classes write for the same values."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from protocol import coordinator_records as log
from protocol.coordinator_records import Kind, decode_key, decode_value, encode_key, encode_value, owner_of
from protocol.errors import ProtocolError

GROUP, MEMBER = "group", "member"
PARTITIONS = (log.TopicPartitions(topic_id=UUID(int=0x1234), partitions=(0, 2)),)
TAGS = (log.KeyValue(key="k", value="v"),)
OF_GROUP, OF_MEMBER = log.GroupKey(group_id=GROUP), log.MemberKey(group_id=GROUP, member_id=MEMBER)
HELD = (log.HeldTasks(subtopology_id="s", partitions=(0, 1), assignment_epochs=(3, 4)),)
STANDBY = (log.HeldTasks(subtopology_id="s", partitions=(2,)),)

VECTORS: list[tuple[Kind, int, Any, Any, str, str]] = [
    (
        log.OFFSET_COMMIT,
        4,
        log.OffsetCommitKey(group=GROUP, topic="t", partition=3),
        log.OffsetCommitValue(
            offset=7, leader_epoch=2, metadata="md", commit_timestamp=1000, topic_id=UUID(int=0x1234)
        ),
        "0001000567726f757000017400000003",
        "0004000000000000000700000002036d6400000000000003e801001000000000000000000000000000001234",
    ),
    (
        log.OFFSET_COMMIT,
        1,
        log.OffsetCommitKey(group=GROUP, topic="t", partition=3),
        log.OffsetCommitValue(offset=7, metadata="", commit_timestamp=1000, expire_timestamp=2000),
        "0001000567726f757000017400000003",
        "00010000000000000007000000000000000003e800000000000007d0",
    ),
    (
        log.GROUP_METADATA,
        3,
        log.GroupMetadataKey(group=GROUP),
        log.GroupMetadataValue(
            protocol_type="consumer",
            generation=5,
            protocol="range",
            leader=MEMBER,
            current_state_timestamp=99,
            members=(
                log.MemberMetadata(
                    member_id=MEMBER,
                    group_instance_id="i",
                    client_id="c",
                    client_host="/h",
                    rebalance_timeout=1,
                    session_timeout=2,
                    subscription=b"s",
                    assignment=b"a",
                ),
            ),
        ),
        "0002000567726f7570",
        (
            "00030008636f6e73756d657200000005000572616e676500066d656d6265720000000000000063000000010006"
            "6d656d62657200016900016300022f68000000010000000200000001730000000161"
        ),
    ),
    (
        log.GROUP_METADATA,
        3,
        log.GroupMetadataKey(group=GROUP),
        log.GroupMetadataValue(protocol=None, leader=None),
        "0002000567726f7570",
        "0003000000000000ffffffffffffffffffffffff00000000",
    ),
    (
        log.CONSUMER_GROUP,
        0,
        OF_GROUP,
        log.ConsumerEpochValue(epoch=4, metadata_hash=-5),
        "0003000567726f7570",
        "000000000004010008fffffffffffffffb",
    ),
    (
        log.CONSUMER_MEMBER,
        0,
        OF_MEMBER,
        log.ConsumerMemberValue(
            instance_id=None,
            rack_id="r",
            client_id="c",
            client_host="/h",
            subscribed_topic_names=("a", "b"),
            subscribed_topic_regex="",
            rebalance_timeout_ms=6,
            server_assignor=None,
            classic_member_metadata=log.ClassicMemberMetadata(
                session_timeout_ms=3, supported_protocols=(log.ClassicProtocol(name="range", metadata=b"x"),)
            ),
        ),
        "0005000567726f757000066d656d626572",
        "00000002720263032f6803026102620100000006000100100100000003020672616e676502780000",
    ),
    (
        log.CONSUMER_TARGET_EPOCH,
        0,
        OF_GROUP,
        log.AssignmentEpochValue(assignment_epoch=4),
        "0006000567726f7570",
        "00000000000400",
    ),
    (
        log.CONSUMER_TARGET,
        0,
        OF_MEMBER,
        log.TargetAssignmentValue(topic_partitions=PARTITIONS),
        "0007000567726f757000066d656d626572",
        "000002000000000000000000000000000012340300000000000000020000",
    ),
    (
        log.CONSUMER_ASSIGNMENT,
        0,
        OF_MEMBER,
        log.ConsumerAssignmentValue(
            member_epoch=4,
            previous_member_epoch=3,
            state=1,
            assigned_partitions=PARTITIONS,
            partitions_pending_revocation=PARTITIONS,
        ),
        "0008000567726f757000066d656d626572",
        (
            "000000000004000000030102000000000000000000000000000012340300000000000000020002000000000000"
            "000000000000000012340300000000000000020000"
        ),
    ),
    (
        log.SHARE_MEMBER,
        0,
        OF_MEMBER,
        log.ShareMemberValue(rack_id=None, client_id="c", client_host="/h", subscribed_topic_names=("a",)),
        "000a000567726f757000066d656d626572",
        "0000000263032f6802026100",
    ),
    (
        log.SHARE_GROUP,
        0,
        OF_GROUP,
        log.ShareEpochValue(epoch=4, metadata_hash=9),
        "000b000567726f7570",
        "000000000004000000000000000900",
    ),
    (
        log.SHARE_TARGET_EPOCH,
        0,
        OF_GROUP,
        log.AssignmentEpochValue(assignment_epoch=4),
        "000c000567726f7570",
        "00000000000400",
    ),
    (
        log.SHARE_TARGET,
        0,
        OF_MEMBER,
        log.TargetAssignmentValue(topic_partitions=PARTITIONS),
        "000d000567726f757000066d656d626572",
        "000002000000000000000000000000000012340300000000000000020000",
    ),
    (
        log.SHARE_ASSIGNMENT,
        0,
        OF_MEMBER,
        log.ShareAssignmentValue(member_epoch=4, previous_member_epoch=3, state=0, assigned_partitions=PARTITIONS),
        "000e000567726f757000066d656d626572",
        "000000000004000000030002000000000000000000000000000012340300000000000000020000",
    ),
    (
        log.STREAMS_GROUP,
        0,
        OF_GROUP,
        log.StreamsEpochValue(epoch=4, metadata_hash=9, validated_topology_epoch=1),
        "0011000567726f7570",
        "000000000004000000000000000901000400000001",
    ),
    (
        log.STREAMS_MEMBER,
        0,
        OF_MEMBER,
        log.StreamsMemberValue(
            instance_id=None,
            rack_id=None,
            client_id="c",
            client_host="/h",
            rebalance_timeout_ms=1,
            topology_epoch=2,
            process_id="p",
            user_endpoint=log.StreamsEndpoint(host="h", port=65000),
            client_tags=TAGS,
        ),
        "0013000567726f757000066d656d626572",
        "000000000263032f6800000001000000020270010268fde80002026b02760000",
    ),
    (
        log.STREAMS_TARGET_EPOCH,
        0,
        OF_GROUP,
        log.AssignmentEpochValue(assignment_epoch=4),
        "0014000567726f7570",
        "00000000000400",
    ),
    (
        log.STREAMS_TARGET,
        0,
        OF_MEMBER,
        log.StreamsTargetValue(
            active_tasks=(log.TargetTasks(subtopology_id="s", partitions=(0, 1)),), standby_tasks=()
        ),
        "0015000567726f757000066d656d626572",
        "000002027303000000000000000100010100",
    ),
    (
        log.STREAMS_ASSIGNMENT,
        0,
        OF_MEMBER,
        log.StreamsAssignmentValue(
            member_epoch=4,
            previous_member_epoch=3,
            state=2,
            active_tasks=HELD,
            standby_tasks=STANDBY,
            active_tasks_pending_revocation=HELD,
        ),
        "0016000567726f757000066d656d626572",
        (
            "000000000004000000030202027303000000000000000101000903000000030000000402027302000000020001"
            "020273030000000000000001010009030000000300000004010100"
        ),
    ),
    (
        log.STREAMS_TOPOLOGY,
        0,
        OF_GROUP,
        log.StreamsTopologyValue(
            epoch=1,
            subtopologies=(
                log.StreamsSubtopology(
                    subtopology_id="s",
                    source_topics=("a",),
                    state_changelog_topics=(
                        log.InternalTopic(name="cl", partitions=0, replication_factor=1, topic_configs=TAGS),
                    ),
                    repartition_sink_topics=("rs",),
                    repartition_source_topics=(log.InternalTopic(name="rp", partitions=4, replication_factor=0),),
                    copartition_groups=(log.CopartitionGroup(source_topics=(0,), repartition_source_topics=(0,)),),
                ),
            ),
        ),
        "0017000567726f7570",
        (
            "000000000001020273020261010203636c00000000000102026b02760000020372730203727000000004000001"
            "000202000001020000000000"
        ),
    ),
    (
        log.TRANSACTION,
        1,
        log.TransactionLogKey(transactional_id=GROUP),
        log.TransactionLogValue(
            producer_id=1,
            previous_producer_id=8,
            producer_epoch=2,
            transaction_timeout_ms=3,
            transaction_status=1,
            transaction_partitions=(log.TransactionPartitions(topic="t", partition_ids=(0, 1)),),
            transaction_last_update_timestamp_ms=5,
            transaction_start_timestamp_ms=4,
        ),
        "0000000567726f7570",
        (
            "000100000000000000010002000000030102027403000000000000000100000000000000000500000000000000"
            "040100080000000000000008"
        ),
    ),
    (
        log.TRANSACTION,
        1,
        log.TransactionLogKey(transactional_id=GROUP),
        log.TransactionLogValue(
            producer_id=1,
            producer_epoch=0,
            transaction_timeout_ms=3,
            transaction_status=0,
            transaction_partitions=None,
            transaction_last_update_timestamp_ms=5,
            transaction_start_timestamp_ms=-1,
        ),
        "0000000567726f7570",
        "0001000000000000000100000000000300000000000000000005ffffffffffffffff00",
    ),
]


@pytest.mark.parametrize(("kind", "version", "key", "value", "key_hex", "value_hex"), VECTORS)
def test_records_are_those_of_kafka(
    kind: Kind, version: int, key: Any, value: Any, key_hex: str, value_hex: str
) -> None:
    assert encode_key(kind, key).hex() == key_hex
    assert encode_value(kind, version, value).hex() == value_hex
    assert decode_key(kind, bytes.fromhex(key_hex)) == key
    assert decode_value(kind, bytes.fromhex(value_hex)) == (version, value)
    assert owner_of(bytes.fromhex(key_hex)) == GROUP


@pytest.mark.parametrize("torn", [b"", b"\0", b"\0\1", b"\0\1\0", b"\0\1\0\5grou", b"\0\1\xff\xff", b"\0\1\0\1\xff"])
def test_key_that_names_no_group_is_refused(torn: bytes) -> None:
    with pytest.raises(ProtocolError):
        owner_of(torn)


def test_a_key_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_key(log.CONSUMER_GROUP, encode_key(log.SHARE_GROUP, OF_GROUP))


def test_value_of_a_wrong_length_is_refused() -> None:
    whole = encode_value(log.SHARE_GROUP, 0, log.ShareEpochValue(epoch=1))
    for bad in (whole + b"\0", whole[:-1], b""):
        with pytest.raises(ProtocolError):
            decode_value(log.SHARE_GROUP, bad)


def test_a_value_without_a_place_on_the_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="OffsetCommitValue v4"):
        encode_value(log.OFFSET_COMMIT, 4, log.OffsetCommitValue(offset=2**63))
