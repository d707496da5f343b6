"""Records that Kafka's coordinators write into `__consumer_offsets` and `__transaction_state`, as of 4.2.

The one idea: a record's key names its kind, by an int16 before its fields, and its value names its version. Both are
declared as messages are, and encoded by the same grammar. Names and numbers are those of upstream's files of type
`coordinator-key` and `coordinator-value`. A null value removes the entry that the key names. Kinds of both topics are
numbered apart.

It declares only the records that this gateway has.
"""

from __future__ import annotations

import struct as structs
from functools import cache
from typing import Any, NamedTuple, TypeVar

from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.grammar import struct_grammar
from protocol.schema import array, binary, int8, int16, int32, int64, nested, string, struct, uint16, uuid
from protocol.specialise import Decoder, Encoder, specialise_decoder, specialise_encoder

T = TypeVar("T")

_INT16 = structs.Struct(">h")

# --- __consumer_offsets: offsets and classic groups ---------------------------------------------------------------


@struct
class OffsetCommitKey:
    group: str = string()
    topic: str = string()
    partition: int = int32()


@struct
class OffsetCommitValue:
    """Value of a committed offset: version 1 if the offset has an expiry time of its own, otherwise 4."""

    offset: int = int64()
    leader_epoch: int = int32(versions="3+", default=-1)
    metadata: str = string()
    commit_timestamp: int = int64()
    expire_timestamp: int = int64(versions="1", default=-1)
    topic_id: Any = uuid(versions="4+", tag=0)


@struct
class GroupMetadataKey:
    group: str = string()


@struct
class MemberMetadata:
    member_id: str = string()
    group_instance_id: str | None = string(versions="3+", nullable="3+", default=None)
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout: int = int32(versions="1+", default=-1)
    session_timeout: int = int32()
    subscription: bytes = binary()
    assignment: bytes = binary()


@struct
class GroupMetadataValue:
    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable="0+")
    leader: str | None = string(nullable="0+")
    current_state_timestamp: int = int64(versions="2+", default=-1)
    members: tuple[MemberMetadata, ...] = array(MemberMetadata)


# --- groups whose members have epochs: consumer, share, streams ---------------------------------------------------


@struct
class GroupKey:
    group_id: str = string()


@struct
class MemberKey:
    group_id: str = string()
    member_id: str = string()


@struct
class TopicPartitions:
    topic_id: Any = uuid()
    partitions: tuple[int, ...] = array(int32)


@struct
class ConsumerEpochValue:
    """ConsumerGroupMetadataValue."""

    epoch: int = int32()
    metadata_hash: int = int64(tag=0)


@struct
class AssignmentEpochValue:
    """ConsumerGroup-, ShareGroup- and StreamsGroupTargetAssignmentMetadataValue."""

    assignment_epoch: int = int32()


@struct
class TargetAssignmentValue:
    """ConsumerGroup- and ShareGroupTargetAssignmentMemberValue."""

    topic_partitions: tuple[TopicPartitions, ...] = array(TopicPartitions)


@struct
class ClassicProtocol:
    name: str = string()
    metadata: bytes = binary()


@struct
class ClassicMemberMetadata:
    session_timeout_ms: int = int32()
    supported_protocols: tuple[ClassicProtocol, ...] = array(ClassicProtocol)


@struct
class ConsumerMemberValue:
    """ConsumerGroupMemberMetadataValue."""

    instance_id: str | None = string(nullable="0+")
    rack_id: str | None = string(nullable="0+")
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: tuple[str, ...] = array(string)
    subscribed_topic_regex: str | None = string(nullable="0+")
    rebalance_timeout_ms: int = int32(default=-1)
    server_assignor: str | None = string(nullable="0+")
    classic_member_metadata: ClassicMemberMetadata | None = nested(
        ClassicMemberMetadata, nullable="0+", tag=0, default=None
    )


@struct
class ConsumerAssignmentValue:
    """ConsumerGroupCurrentMemberAssignmentValue."""

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    assigned_partitions: tuple[TopicPartitions, ...] = array(TopicPartitions)
    partitions_pending_revocation: tuple[TopicPartitions, ...] = array(TopicPartitions)


@struct
class ShareEpochValue:
    """ShareGroupMetadataValue."""

    epoch: int = int32()
    metadata_hash: int = int64()


@struct
class ShareMemberValue:
    """ShareGroupMemberMetadataValue."""

    rack_id: str | None = string(nullable="0+")
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: tuple[str, ...] = array(string)


@struct
class ShareAssignmentValue:
    """ShareGroupCurrentMemberAssignmentValue."""

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    assigned_partitions: tuple[TopicPartitions, ...] = array(TopicPartitions)


@struct
class StreamsEpochValue:
    """StreamsGroupMetadataValue."""

    epoch: int = int32()
    metadata_hash: int = int64()
    validated_topology_epoch: int = int32(tag=0, default=-1)


@struct
class StreamsEndpoint:
    host: str = string()
    port: int = uint16()


@struct
class KeyValue:
    key: str = string()
    value: str = string()


@struct
class StreamsMemberValue:
    """StreamsGroupMemberMetadataValue."""

    instance_id: str | None = string(nullable="0+")
    rack_id: str | None = string(nullable="0+")
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout_ms: int = int32(default=-1)
    topology_epoch: int = int32()
    process_id: str = string()
    user_endpoint: StreamsEndpoint | None = nested(StreamsEndpoint, nullable="0+", default=None)
    client_tags: tuple[KeyValue, ...] = array(KeyValue)


@struct
class TargetTasks:
    subtopology_id: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class StreamsTargetValue:
    """StreamsGroupTargetAssignmentMemberValue."""

    active_tasks: tuple[TargetTasks, ...] = array(TargetTasks)
    standby_tasks: tuple[TargetTasks, ...] = array(TargetTasks)
    warmup_tasks: tuple[TargetTasks, ...] = array(TargetTasks)


@struct
class HeldTasks:
    subtopology_id: str = string()
    partitions: tuple[int, ...] = array(int32)
    assignment_epochs: tuple[int, ...] | None = array(int32, nullable="0+", tag=0, default=None)


@struct
class StreamsAssignmentValue:
    """StreamsGroupCurrentMemberAssignmentValue."""

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    active_tasks: tuple[HeldTasks, ...] = array(HeldTasks)
    standby_tasks: tuple[HeldTasks, ...] = array(HeldTasks)
    warmup_tasks: tuple[HeldTasks, ...] = array(HeldTasks)
    active_tasks_pending_revocation: tuple[HeldTasks, ...] = array(HeldTasks)
    standby_tasks_pending_revocation: tuple[HeldTasks, ...] = array(HeldTasks)
    warmup_tasks_pending_revocation: tuple[HeldTasks, ...] = array(HeldTasks)


@struct
class InternalTopic:
    name: str = string()
    partitions: int = int32()
    replication_factor: int = int16()
    topic_configs: tuple[KeyValue, ...] = array(KeyValue)


@struct
class CopartitionGroup:
    """Positions in the subtopology's lists of topics."""

    source_topics: tuple[int, ...] = array(int16)
    source_topic_regex: tuple[int, ...] = array(int16)
    repartition_source_topics: tuple[int, ...] = array(int16)


@struct
class StreamsSubtopology:
    subtopology_id: str = string()
    source_topics: tuple[str, ...] = array(string)
    source_topic_regex: tuple[str, ...] = array(string)
    state_changelog_topics: tuple[InternalTopic, ...] = array(InternalTopic)
    repartition_sink_topics: tuple[str, ...] = array(string)
    repartition_source_topics: tuple[InternalTopic, ...] = array(InternalTopic)
    copartition_groups: tuple[CopartitionGroup, ...] = array(CopartitionGroup)


@struct
class StreamsTopologyValue:
    """StreamsGroupTopologyValue."""

    epoch: int = int32()
    subtopologies: tuple[StreamsSubtopology, ...] = array(StreamsSubtopology)


# --- __transaction_state ------------------------------------------------------------------------------------------


@struct
class TransactionLogKey:
    transactional_id: str = string()


@struct
class TransactionPartitions:
    topic: str = string()
    partition_ids: tuple[int, ...] = array(int32)


@struct
class TransactionLogValue:
    producer_id: int = int64()
    previous_producer_id: int = int64(versions="1+", tag=0, default=-1)
    next_producer_id: int = int64(versions="1+", tag=1, default=-1)
    producer_epoch: int = int16()
    next_producer_epoch: int = int16(versions="1+", tag=3, default=-1)
    transaction_timeout_ms: int = int32()
    transaction_status: int = int8()
    transaction_partitions: tuple[TransactionPartitions, ...] | None = array(TransactionPartitions, nullable="0+")
    transaction_last_update_timestamp_ms: int = int64()
    transaction_start_timestamp_ms: int = int64()
    client_transaction_version: int = int16(versions="1+", tag=2)


# --- kinds --------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of record: its number, its key, its value, and from which version on the value is flexible."""

    number: int
    key: type[Any]
    value: type[Any]
    flexible_from: int = 0


OFFSET_COMMIT = Kind(1, OffsetCommitKey, OffsetCommitValue, 4)
GROUP_METADATA = Kind(2, GroupMetadataKey, GroupMetadataValue, 4)
CONSUMER_GROUP = Kind(3, GroupKey, ConsumerEpochValue)
CONSUMER_MEMBER = Kind(5, MemberKey, ConsumerMemberValue)
CONSUMER_TARGET_EPOCH = Kind(6, GroupKey, AssignmentEpochValue)
CONSUMER_TARGET = Kind(7, MemberKey, TargetAssignmentValue)
CONSUMER_ASSIGNMENT = Kind(8, MemberKey, ConsumerAssignmentValue)
SHARE_MEMBER = Kind(10, MemberKey, ShareMemberValue)
SHARE_GROUP = Kind(11, GroupKey, ShareEpochValue)
SHARE_TARGET_EPOCH = Kind(12, GroupKey, AssignmentEpochValue)
SHARE_TARGET = Kind(13, MemberKey, TargetAssignmentValue)
SHARE_ASSIGNMENT = Kind(14, MemberKey, ShareAssignmentValue)
STREAMS_GROUP = Kind(17, GroupKey, StreamsEpochValue)
STREAMS_MEMBER = Kind(19, MemberKey, StreamsMemberValue)
STREAMS_TARGET_EPOCH = Kind(20, GroupKey, AssignmentEpochValue)
STREAMS_TARGET = Kind(21, MemberKey, StreamsTargetValue)
STREAMS_ASSIGNMENT = Kind(22, MemberKey, StreamsAssignmentValue)
STREAMS_TOPOLOGY = Kind(23, GroupKey, StreamsTopologyValue)
TRANSACTION = Kind(0, TransactionLogKey, TransactionLogValue, 1)

NEVER = 2**15


def encode_key(kind: Kind, key: Any) -> bytes:
    """Encode a key. Raise ValueError if the wire format cannot hold a value."""
    return _INT16.pack(kind.number) + _encode(kind.key, 0, NEVER, key)


def encode_value(kind: Kind, version: int, value: Any) -> bytes:
    """Encode a value. Raise ValueError if the wire format cannot hold a part of it."""
    return _INT16.pack(version) + _encode(kind.value, version, kind.flexible_from, value)


def decode_key(kind: Kind, buffer: Buffer) -> Any:
    """Decode a key of this kind. Raise ProtocolError for a key of another kind, or for bytes that are not a key."""
    if _int16(buffer) != kind.number:
        raise ProtocolError(f"the key is not of kind {kind.number}")
    return _decode(kind.key, 0, NEVER, buffer)


def decode_value(kind: Kind, buffer: Buffer) -> tuple[int, Any]:
    """Return version and value. Raise ProtocolError for bytes that are not a value."""
    version = _int16(buffer)
    return version, _decode(kind.value, version, kind.flexible_from, buffer)


def owner_of(key: Buffer) -> str:
    """Return the group or transactional id with which the key of every kind begins. Raise ProtocolError for bytes that
    are not a key.
    """
    raw = bytes(key)
    _int16(raw)
    (length,) = _INT16.unpack_from(raw, 2) if len(raw) >= 4 else (-1,)
    if not 0 <= length <= len(raw) - 4:
        raise ProtocolError("a key without a name")
    try:
        return raw[4 : 4 + length].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a key whose name is not UTF-8") from error


def _int16(buffer: Buffer) -> int:
    if len(buffer) < 2:
        raise ProtocolError("a record that does not say its kind or version")
    return int(_INT16.unpack_from(buffer)[0])


def _encode(struct_type: type[Any], version: int, flexible_from: int, value: Any) -> bytes:
    try:
        return b"".join(_encoder(struct_type, version, version >= flexible_from)(value))
    except (AttributeError, TypeError, structs.error) as error:
        raise ValueError(f"{struct_type.__name__} v{version}: {error}") from error


def _decode(struct_type: type[Any], version: int, flexible_from: int, buffer: Buffer) -> Any:
    raw = bytes(buffer)
    try:
        value, end = _decoder(struct_type, version, version >= flexible_from)(raw, 2, len(raw))
    except (IndexError, ValueError, structs.error) as error:
        raise ProtocolError(f"{struct_type.__name__} v{version}: {error}") from error
    if end != len(raw):
        raise ProtocolError(f"{len(raw) - end} bytes after {struct_type.__name__} v{version}")
    return value


@cache
def _encoder(struct_type: type[Any], version: int, flexible: bool) -> Encoder:
    return specialise_encoder(struct_grammar(struct_type, version, flexible=flexible), version)


@cache
def _decoder(struct_type: type[Any], version: int, flexible: bool) -> Decoder:
    return specialise_decoder(struct_grammar(struct_type, version, flexible=flexible), version)
