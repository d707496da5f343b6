"""The worst legal requests: large requests of every API, and requests with costly content.

For every served API, each of its arrays, at every depth, is filled up to the largest legal request: once with short
strings and once with the longest legal strings. The declarations of the messages yield both. `bench/worst.py` measures
how long they block the event loop, and how much memory they take.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

import crc32c

from bench.librdkafka import create_topic
from gateway.apis import SERVED
from gateway.apis.admin.delegation_tokens import MAX_RENEWERS
from gateway.apis.transactions.lifecycle import MAX_TRANSACTIONS
from gateway.coordinator.consumer.topics import MAX_PATTERN_BYTES, MAX_UNICODE_CLASSES
from gateway.net.ids import ID_NAMES, MAX_ID_BYTES
from protocol.api_keys import ApiKey
from protocol.codec import encode, has_more_elements, request_class
from protocol.compression import Compression, compress
from protocol.consumer import Subscription, encode_subscription
from protocol.grammar import MAX_STRING_BYTES
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from protocol.messages.alter_client_quotas import AlterClientQuotasRequest, EntityData, EntryData, OpData
from protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
)
from protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.create_delegation_token import CreatableRenewers, CreateDelegationTokenRequest
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.describe_delegation_token import DescribeDelegationTokenOwner, DescribeDelegationTokenRequest
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from protocol.messages.describe_transactions import DescribeTransactionsRequest
from protocol.messages.describe_user_scram_credentials import DescribeUserScramCredentialsRequest, UserName
from protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from protocol.messages.end_txn import EndTxnRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.init_producer_id import InitProducerIdResponse
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.list_transactions import ListTransactionsRequest
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.messages.renew_delegation_token import RenewDelegationTokenRequest
from protocol.messages.share_acknowledge import AcknowledgePartition, AcknowledgeTopic, ShareAcknowledgeRequest
from protocol.messages.share_fetch import AcknowledgementBatch, ShareFetchRequest
from protocol.messages.share_fetch import FetchPartition as ShareFetchPartition
from protocol.messages.share_fetch import FetchTopic as ShareFetchTopic
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.messages.write_txn_markers import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from protocol.records import HEAD_BYTES, Record, build_batch
from protocol.schema import Field, struct_schema

MAX_FRAME_BYTES = 8 * 1024 * 1024 - 1024
ELEMENTS = 100_000
WIDE, WIDE_PARTITIONS = "wide", 5_000
GROUP, IDLE_SHARE_GROUP = "worst", "worst-share-idle"
MEMBER = "AAAAAAAAAAAAAAAAAAAACQ"
TRANSACTIONAL_ID, IN_MANY = "worst", "worst-in-many"
MANY, MANY_PARTITIONS = ("many-0", "many-1"), 10_000
"""Topics, and the partitions of each: as many as one request may create."""
ALL_OF_MANY = f"{len(MANY) * MANY_PARTITIONS} partitions"
ADMINISTERED = 5_000
USERS = 9_990
TOKENS = 1_000
ABORTED, ABORTED_TRANSACTIONS = "aborted", 50_000
READ_ABORTED = f"fetch: a batch within {ABORTED_TRANSACTIONS} aborted transactions"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    api_key: ApiKey
    version: int
    requests: list[Any]
    known: bool = False
    """True if an authenticated client must send the request."""


State = TypeVar("State")


# --- requests as large as they may be, from the declarations ---------------------------------------------------------


def array_paths(struct_type: type[Any], version: int) -> Iterator[tuple[Field, ...]]:
    """Return every array of a struct at a version. Each is given as the path of fields that leads to it."""
    for field in struct_schema(struct_type).fields:
        if version not in field.versions or field.tag is not None:
            continue
        if field.is_array:
            yield (field,)
        if isinstance(field.kind, type):
            for path in array_paths(field.kind, version):
                yield (field, *path)


def filled(
    struct_type: type[Any], version: int, path: tuple[Field, ...], count: int, number: int = 0, *, longest: bool = False
) -> Any:
    """Return a struct in which the array at the end of `path` has `count` elements and every other array has one."""
    values: dict[str, Any] = {}
    for field in struct_schema(struct_type).fields:
        if version not in field.versions or field.tag is not None:
            continue
        on_path = bool(path) and field is path[0]
        if field.is_array:
            times = count if on_path and len(path) == 1 else 1
            rest = path[1:] if on_path else ()
            values[field.name] = tuple(
                value_of(field, version, rest, count, index, longest=longest) for index in range(times)
            )
        elif isinstance(field.kind, type):
            values[field.name] = filled(
                field.kind, version, path[1:] if on_path else (), count, number, longest=longest
            )
        else:
            values[field.name] = value_of(field, version, (), count, number, longest=longest)
    return struct_type(**values)


def value_of(
    field: Field, version: int, path: tuple[Field, ...], count: int, number: int, *, longest: bool = False
) -> Any:
    if isinstance(field.kind, type):
        return filled(field.kind, version, path, count, number, longest=longest)
    match field.kind.name:
        case "string" if longest:
            return longest_string_of(field.name, number)
        case "string":
            return string_of(field.name, number)
        case "bytes":
            return b""
        case "records":
            return None
        case "uuid":
            return UUID(int=number)
        case "bool":
            return False
        case "float64":
            return 0.0
        case "int8" | "int16" as narrow:
            return (
                int_of(field.name, number) % {"int8": 2**7, "int16": 2**15}[narrow] if number else int_of(field.name, 0)
            )
        case _:
            return int_of(field.name, number)


def string_of(name: str, number: int) -> str:
    if name in ("topic", "name", "topic_name", "resource_name", "topic_names", "topics") and number == 0:
        return WIDE
    if name in ("group_id", "key") and number == 0:
        return GROUP
    if name == "principal":
        return "User:*"
    return f"{name[:1]}{number}"


def longest_string_of(name: str, number: int) -> str:
    """Return the longest legal id. A longer one is refused before it can cost anything."""
    head = f"User:{number}" if name == "principal" else f"{name[:1]}{number}"
    return head.ljust(MAX_ID_BYTES if name in ID_NAMES or name == "key" else MAX_STRING_BYTES, "x")


def int_of(name: str, number: int) -> int:
    match name:
        case "timeout_ms" | "session_timeout_ms" | "rebalance_timeout_ms":
            return 10_000
        case "max_wait_ms" | "min_bytes":
            return 0
        case "partition_max_bytes" | "max_bytes":
            return 2**20
        case "generation_id_or_member_epoch" | "session_epoch" | "acks" | "current_leader_epoch":
            return -1
        case "resource_type" | "resource_type_filter" | "operation":
            return 2
        case "resource_pattern_type" | "pattern_type_filter" | "permission_type":
            return 3
        case "num_partitions" | "replication_factor":
            return 1
        case _ if "partition" in name or name == "index":
            return number
    return 0


def whole_apis(chosen: Callable[[str], bool]) -> Iterator[Case]:
    for line in SERVED:
        struct_type = request_class(line.api_key)
        for path in list(array_paths(struct_type, line.max_version)) or [()]:
            name = f"{line.api_key.name.lower()}: {'.'.join(field.name for field in path) or 'as it is'}"
            if not chosen(name):
                continue
            request = None
            # A longer array than its API accepts is refused before it costs anything.
            most = min(line.max_elements, ELEMENTS)
            for part in (1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 10):
                request = addressed(filled(struct_type, line.max_version, path, int(most * part) - 8), line.api_key)
                body = b"".join(bytes(chunk) for chunk in encode(request, line.max_version))
                if len(body) <= MAX_FRAME_BYTES and not has_more_elements(request, most):
                    break
            yield Case(name, line.api_key, line.max_version, [request])


def longest_strings(chosen: Callable[[str], bool]) -> Iterator[Case]:
    """Build the same requests as `whole_apis`, but with the longest strings. Fewer of these fit into a request."""
    for line in SERVED:
        struct_type, version = request_class(line.api_key), line.max_version
        for path in list(array_paths(struct_type, version)) or [()]:
            name = f"{line.api_key.name.lower()}: {'.'.join(field.name for field in path) or 'as it is'}, longest"
            if not chosen(name):
                continue
            small, larger = (
                sum(map(len, encode(filled(struct_type, version, path, count, longest=True), version)))
                for count in (1, 9)
            )
            each = max((larger - small) // 8, 1)
            most = min(line.max_elements, ELEMENTS) // max(len(path), 1)
            count = max(min(most - 100, (MAX_FRAME_BYTES - small) // each - 8), 1)
            request = filled(struct_type, version, path, count, longest=True)
            yield Case(name, line.api_key, version, [request])


def addressed(request: Any, api_key: ApiKey) -> Any:
    """Address the request to a group of the API's own type, because a group of another type is refused at once. Name a
    member as Kafka does.
    """
    kind, _, _ = api_key.name.lower().partition("_")
    given: dict[str, Any] = {}
    if kind in ("share", "streams", "consumer") and isinstance(getattr(request, "group_id", None), str):
        given["group_id"] = f"{GROUP}-{kind}"
    if api_key in (ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS):
        given["group_id"] = IDLE_SHARE_GROUP
    if kind == "share" and hasattr(request, "member_id"):
        given["member_id"] = MEMBER
    if api_key is ApiKey.SHARE_FETCH:
        given["share_session_epoch"] = 0
    elif api_key is ApiKey.SHARE_ACKNOWLEDGE:
        given["share_session_epoch"] = -1
    return replace(request, **given) if given else request


# --- requests whose content is what costs ----------------------------------------------------------------------------


def batch(count: int, value: bytes = b"", *, timestamp: int, codec: Compression = Compression.ZSTD) -> bytes:
    return recoded(build_batch([Record(offset, timestamp, None, value) for offset in range(count)]), codec)


def recoded(plain: bytes, codec: Compression) -> bytes:
    """Return the same records in another codec. Building a million records again would take seconds."""
    batch = bytearray(plain[:HEAD_BYTES] + compress(codec, plain[HEAD_BYTES:]))
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">h", batch, 21, codec)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(memoryview(batch)[21:]))
    return bytes(batch)


def crowded_headers(timestamp: int) -> bytes:
    """Return as many headers as fit into one window of the parser."""
    return build_batch([Record(offset, timestamp, None, b"", (("", None),) * 31_000) for offset in range(16)])


def usual(timestamp: int) -> bytes:
    return batch(1000, os.urandom(1000), timestamp=timestamp, codec=Compression.NONE)


def produce_of(topic: str, batches: list[bytes]) -> ProduceRequest:
    return ProduceRequest(
        acks=-1,
        timeout_ms=60_000,
        topic_data=(
            TopicProduceData(
                name=topic,
                partition_data=tuple(
                    PartitionProduceData(index=index, records=records) for index, records in enumerate(batches)
                ),
            ),
        ),
    )


@cache
def a_million(timestamp: int) -> bytes:
    return batch(1_000_000, timestamp=timestamp, codec=Compression.NONE)


def costly_contents(chosen: Callable[[str], bool]) -> Iterator[Case]:
    """Yield the chosen cases only, because building a case takes longer than sending it."""
    now_ms = time.time_ns() // 1_000_000
    contents: list[tuple[str, str, Callable[[], bytes]]] = [
        ("plain", "a million records in zstd", lambda: recoded(a_million(now_ms), Compression.ZSTD)),
        ("plain", "a million records of the future", lambda: recoded(a_million(now_ms + 10**9), Compression.ZSTD)),
        ("compacted", "a million records on a compacted topic", lambda: recoded(a_million(now_ms), Compression.ZSTD)),
        ("plain", "one record of 100 MB in zstd", lambda: batch(1, bytes(100_000_000), timestamp=now_ms)),
        ("plain", "half a million headers", lambda: crowded_headers(now_ms)),
        ("plain", "1 MB of usual records", lambda: usual(now_ms)),
        ("stamped", "1 MB of usual records, append time", lambda: usual(now_ms)),
    ]
    for topic, what, content in contents:
        if chosen(name := f"produce: 8 × {what}"):
            yield Case(name, ApiKey.PRODUCE, 9, [produce_of(topic, [content()] * 8)] * 4)
    for codec in (Compression.GZIP, Compression.SNAPPY, Compression.LZ4):
        if chosen(name := f"produce: a million records in {codec.name.lower()}"):
            yield Case(name, ApiKey.PRODUCE, 9, [produce_of("plain", [recoded(a_million(now_ms), codec)])])
    many = ListOffsetsRequest(
        replica_id=-1,
        topics=(
            ListOffsetsTopic(
                name="plain",
                partitions=tuple(
                    ListOffsetsPartition(partition_index=index, timestamp=timestamp, current_leader_epoch=-1)
                    for index, timestamp in ((0, now_ms), (1, now_ms), (2, -3), (3, -3))
                ),
            ),
        ),
    )
    yield Case("list_offsets: by time among a million records", ApiKey.LIST_OFFSETS, 7, [many] * 4)
    yield Case("metadata: every topic", ApiKey.METADATA, 12, [MetadataRequest(topics=None)] * 3)
    everything = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=GROUP, topics=None),))
    yield Case("offset_fetch: all of a group", ApiKey.OFFSET_FETCH, 8, [everything] * 3)
    # Name no member, because a request with an unknown member is refused before its topics are read.
    topics = tuple(
        OffsetFetchRequestTopics(name=WIDE if not number else f"t{number}", partition_indexes=(0,))
        for number in range(ELEMENTS // 2 - 1)
    )
    partitions = (OffsetFetchRequestTopics(name=WIDE, partition_indexes=tuple(range(ELEMENTS - 2))),)
    for what, asked in (("topics", topics), ("partitions", partitions)):
        request = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=GROUP, topics=asked),))
        yield Case(f"offset_fetch: many {what} of one group", ApiKey.OFFSET_FETCH, 8, [request])


def in_transactions(producer: InitProducerIdResponse) -> Iterator[Case]:
    """Yield requests to send one after another. Each ends the transaction that the previous one left open."""
    producer_id, epoch = producer.producer_id, producer.producer_epoch

    def add(partitions: Sequence[int], transactional_id: str = TRANSACTIONAL_ID) -> AddPartitionsToTxnRequest:
        return AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=(AddPartitionsToTxnTopic(name=WIDE, partitions=tuple(partitions)),),
        )

    def batch(partitions: Sequence[int], count: int, *, verify_only: bool = True) -> AddPartitionsToTxnRequest:
        return AddPartitionsToTxnRequest(
            transactions=tuple(
                AddPartitionsToTxnTransaction(
                    transactional_id=TRANSACTIONAL_ID if number == 0 else f"nobody-{number}",
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    verify_only=verify_only,
                    topics=(AddPartitionsToTxnTopic(name=WIDE, partitions=tuple(partitions)),),
                )
                for number in range(count)
            )
        )

    def end(*, committed: bool) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=TRANSACTIONAL_ID, producer_id=producer_id, producer_epoch=epoch, committed=committed
        )

    whole, often = range(WIDE_PARTITIONS), (0,) * (ELEMENTS - 2)
    adding = ApiKey.ADD_PARTITIONS_TO_TXN
    yield Case("add_partitions_to_txn: one partition often, refused", adding, 3, [add(often, "nobody")])
    yield Case("add_partitions_to_txn: one partition often", adding, 3, [add(often)])
    yield Case("add_partitions_to_txn: a wide topic", adding, 3, [add(whole)] * 3)
    yield Case("add_partitions_to_txn: by brokers, whether a wide topic is in", adding, 5, [batch(whole, 1)] * 3)
    yield Case("add_partitions_to_txn: by brokers, many transactions", adding, 5, [batch((0,), MAX_TRANSACTIONS)])
    many = batch((0,), MAX_TRANSACTIONS, verify_only=False)
    yield Case("add_partitions_to_txn: by brokers, to many transactions", adding, 5, [many])
    same = DescribeTransactionsRequest(transactional_ids=(TRANSACTIONAL_ID,) * (ELEMENTS - 1))
    yield Case("describe_transactions: a wide one often", ApiKey.DESCRIBE_TRANSACTIONS, 0, [same])
    yield Case("end_txn: commit of a wide topic", ApiKey.END_TXN, 3, [end(committed=True)])
    yield Case("add_partitions_to_txn: a wide topic, again", adding, 3, [add(whole)])
    yield Case("end_txn: abort of a wide topic", ApiKey.END_TXN, 3, [end(committed=False)])


def in_many_partitions(
    chosen: Callable[[str], bool], bootstrap: str, producer: InitProducerIdResponse
) -> Iterator[Case]:
    """Yield requests to send one after another, with records in every partition.

    Their topics are created only for these requests, because the state of each partition makes every full garbage
    collection longer.
    """
    if not chosen(ALL_OF_MANY):
        return
    for topic in MANY:
        create_topic(bootstrap, topic, MANY_PARTITIONS)
    producer_id, epoch = producer.producer_id, producer.producer_epoch
    add = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=IN_MANY,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=tuple(
            AddPartitionsToTxnTopic(name=topic, partitions=tuple(range(MANY_PARTITIONS))) for topic in MANY
        ),
    )

    def produce(sequence: int) -> ProduceRequest:
        records = build_batch(
            [Record(0, time.time_ns() // 1_000_000, None, b"")],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        data = tuple(PartitionProduceData(index=index, records=records) for index in range(MANY_PARTITIONS))
        return ProduceRequest(
            transactional_id=IN_MANY,
            acks=-1,
            timeout_ms=60_000,
            topic_data=tuple(TopicProduceData(name=topic, partition_data=data) for topic in MANY),
        )

    def end(*, committed: bool) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=IN_MANY, producer_id=producer_id, producer_epoch=epoch, committed=committed
        )

    def marked() -> WriteTxnMarkersRequest:
        topic = WritableTxnMarkerTopic(name=MANY[0], partition_indexes=(0,))
        marker = WritableTxnMarker(
            producer_id=producer_id, producer_epoch=epoch, transaction_result=False, topics=(topic,)
        )
        return WriteTxnMarkersRequest(markers=(marker,))

    described = DescribeTransactionsRequest(transactional_ids=(IN_MANY,))
    adding, describing = ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.DESCRIBE_TRANSACTIONS
    yield Case(f"add_partitions_to_txn: {ALL_OF_MANY}", adding, 3, [add])
    yield Case(f"produce: a transaction's records to {ALL_OF_MANY}", ApiKey.PRODUCE, 9, [produce(0)])
    yield Case(f"describe_transactions: {ALL_OF_MANY}", describing, 0, [described] * 3)
    yield Case(f"end_txn: abort of {ALL_OF_MANY}", ApiKey.END_TXN, 3, [end(committed=False)])
    yield Case(f"add_partitions_to_txn: {ALL_OF_MANY}, again", adding, 3, [add])
    yield Case(f"produce: a transaction's records to {ALL_OF_MANY}, again", ApiKey.PRODUCE, 9, [produce(1)])
    yield Case(f"end_txn: commit of {ALL_OF_MANY}", ApiKey.END_TXN, 3, [end(committed=True)])
    yield Case(f"add_partitions_to_txn: {ALL_OF_MANY}, at last", adding, 3, [add])
    marking = ApiKey.WRITE_TXN_MARKERS
    yield Case(f"write_txn_markers: one of {ALL_OF_MANY}", marking, 1, [marked()])


def costly_patterns() -> Iterator[Case]:
    """Yield regular expressions to compile. Compiling blocks the event loop, whether or not it succeeds."""
    classes = r"\pL" * MAX_UNICODE_CLASSES
    repeated = (".{1000}" * MAX_PATTERN_BYTES)[:MAX_PATTERN_BYTES]
    folded = "(?i)" + "k" * (MAX_PATTERN_BYTES - 4)
    for what, pattern in (
        ("unicode", classes),
        ("repeated", repeated),
        ("folded", folded),
        ("too many", classes * 100),
    ):
        subscribed = ConsumerGroupHeartbeatRequest(
            group_id="patterns",
            member_id=f"member-{what}",
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_regex=pattern,
            topic_partitions=(),
        )
        yield Case(f"consumer_group_heartbeat: {what} pattern", ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, [subscribed])
        listed = ListTransactionsRequest(transactional_id_pattern=pattern)
        yield Case(f"list_transactions: {what} pattern", ApiKey.LIST_TRANSACTIONS, 2, [listed])
    entries = tuple(
        EntryData(
            entity=(EntityData(entity_type="client-id", entity_name=f"client-{number}"),),
            ops=(OpData(key="producer_byte_rate", value=1e15),),
        )
        for number in range(2_000)
    )
    quotas = AlterClientQuotasRequest(entries=entries)
    yield Case("alter_client_quotas: of many clients", ApiKey.ALTER_CLIENT_QUOTAS, 1, [quotas])
    yield from many_users()
    yield from many_tokens()


def many_users() -> Iterator[Case]:
    """Yield requests to send one after another: create users, describe them, delete them."""
    names = [f"user-{number:05}" for number in range(USERS)]
    upserted = AlterUserScramCredentialsRequest(
        upsertions=tuple(
            ScramCredentialUpsertion(
                name=name, mechanism=2, iterations=4096, salt=bytes(24), salted_password=name.encode() * 6
            )
            for name in names
        )
    )
    deleted = AlterUserScramCredentialsRequest(
        deletions=tuple(ScramCredentialDeletion(name=name, mechanism=2) for name in names)
    )
    named = DescribeUserScramCredentialsRequest(users=tuple(UserName(name=name) for name in names))
    altering, describing = ApiKey.ALTER_USER_SCRAM_CREDENTIALS, ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS
    yield Case("alter_user_scram_credentials: many users", altering, 0, [upserted] * 2)
    yield Case("describe_user_scram_credentials: all of many", describing, 0, [replace(named, users=None)] * 2)
    yield Case("describe_user_scram_credentials: many by name", describing, 0, [named])
    yield Case("alter_user_scram_credentials: many users taken away", altering, 0, [deleted])


def many_tokens() -> Iterator[Case]:
    """Yield requests for tokens, each with the maximum number of renewers."""
    names = [f"renewer-{number:02}" for number in range(MAX_RENEWERS)]
    renewers = tuple(CreatableRenewers(principal_type="User", principal_name=name) for name in names)
    creating, describing = ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN
    create = CreateDelegationTokenRequest(renewers=renewers, max_lifetime_ms=-1)
    yield Case("create_delegation_token: many", creating, 3, [create] * TOKENS, known=True)
    owners = tuple(DescribeDelegationTokenOwner(principal_type="User", principal_name=name) for name in names)
    every, named = DescribeDelegationTokenRequest(owners=None), DescribeDelegationTokenRequest(owners=owners)
    yield Case("describe_delegation_token: all of many", describing, 3, [every] * 3, known=True)
    yield Case("describe_delegation_token: many by name", describing, 3, [named] * 3, known=True)
    unknown = RenewDelegationTokenRequest(hmac=bytes(2**20), renew_period_ms=-1)
    yield Case("renew_delegation_token: by a megabyte", ApiKey.RENEW_DELEGATION_TOKEN, 2, [unknown] * 3, known=True)


def administration() -> Iterator[Case]:
    """Yield requests to send one after another, as large as can succeed. (The requests of `whole_apis` have an error in
    every element.)
    """
    names = [f"administered-{number}" for number in range(ADMINISTERED)]
    what = f"{ADMINISTERED} topics"
    create = CreateTopicsRequest(
        topics=tuple(CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in names),
        timeout_ms=60_000,
    )
    alter = IncrementalAlterConfigsRequest(
        resources=tuple(
            AlterConfigsResource(
                resource_type=2, resource_name=name, configs=(AlterableConfig(name="retention.ms", value="86400000"),)
            )
            for name in names
        )
    )
    describe = DescribeConfigsRequest(
        resources=tuple(DescribeConfigsResource(resource_type=2, resource_name=name) for name in names),
        include_synonyms=True,
        include_documentation=True,
    )
    grow = CreatePartitionsRequest(
        topics=tuple(CreatePartitionsTopic(name=name, count=2, assignments=None) for name in names), timeout_ms=60_000
    )
    delete = DeleteTopicsRequest(topics=tuple(DeleteTopicState(name=name) for name in names), timeout_ms=60_000)
    yield Case(f"create_topics: {what}", ApiKey.CREATE_TOPICS, 7, [create])
    consumer = ConsumerGroupHeartbeatRequest(
        group_id="administered",
        member_id="member",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=tuple(names),
        topic_partitions=(),
    )
    sharing = ShareGroupHeartbeatRequest(
        group_id="administered-share", member_id=MEMBER, member_epoch=0, subscribed_topic_names=tuple(names)
    )
    yield Case(f"consumer_group_heartbeat: {what}", ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, [consumer])
    yield Case(f"share_group_heartbeat: {what}", ApiKey.SHARE_GROUP_HEARTBEAT, 1, [sharing])
    # The leader's assignment is opaque to the gateway, which forwards megabytes of it.
    told = encode_subscription(Subscription(1, tuple(f"t{number}" for number in range(ELEMENTS))))
    join = JoinGroupRequest(
        group_id="administered-classic",
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        group_instance_id="instance",
        protocol_type="consumer",
        protocols=(JoinGroupRequestProtocol(name="range", metadata=told),),
    )
    yield Case(f"join_group: {ELEMENTS} names in one subscription", ApiKey.JOIN_GROUP, 9, [join])
    yield Case(f"incremental_alter_configs: {what}", ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, [alter])
    yield Case(f"describe_configs: {what}", ApiKey.DESCRIBE_CONFIGS, 4, [describe])
    node = DescribeConfigsRequest(
        resources=tuple(DescribeConfigsResource(resource_type=kind, resource_name="1") for kind in (4, 8)),
        include_synonyms=True,
        include_documentation=True,
    )
    yield Case("describe_configs: a node and its loggers", ApiKey.DESCRIBE_CONFIGS, 4, [node])
    yield Case(f"create_partitions: {what}", ApiKey.CREATE_PARTITIONS, 3, [grow])
    yield Case(f"delete_topics: {what}", ApiKey.DELETE_TOPICS, 6, [delete])
    groups = IncrementalAlterConfigsRequest(
        resources=tuple(
            AlterConfigsResource(
                resource_type=32,
                resource_name=f"administered-{number}",
                configs=(AlterableConfig(name="consumer.session.timeout.ms", value="50000"),),
            )
            for number in range(ADMINISTERED)
        )
    )
    yield Case(f"incremental_alter_configs: {ADMINISTERED} groups", ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, [groups])
    reassign = AlterPartitionReassignmentsRequest(
        topics=(
            ReassignableTopic(
                name=WIDE,
                partitions=tuple(
                    ReassignablePartition(partition_index=index, replicas=(1,)) for index in range(WIDE_PARTITIONS)
                ),
            ),
        )
    )
    what = f"{WIDE_PARTITIONS} partitions"
    yield Case(f"alter_partition_reassignments: {what}", ApiKey.ALTER_PARTITION_REASSIGNMENTS, 1, [reassign])
    elect = ElectLeadersRequest(
        topic_partitions=(TopicPartitions(topic=WIDE, partitions=tuple(range(WIDE_PARTITIONS))),)
    )
    yield Case(f"elect_leaders: {what}", ApiKey.ELECT_LEADERS, 2, [elect])
    stay = AlterReplicaLogDirsRequest(
        dirs=(
            AlterReplicaLogDir(
                path="postgres", topics=(AlterReplicaLogDirTopic(name=WIDE, partitions=tuple(range(WIDE_PARTITIONS))),)
            ),
        )
    )
    yield Case(f"alter_replica_log_dirs: {what}", ApiKey.ALTER_REPLICA_LOG_DIRS, 2, [stay])


def of_share_groups(topic_id: UUID) -> Iterator[Case]:
    """Yield requests to send one after another for a group that has positions in every partition of the topic with very
    many partitions.
    """
    indexes = range(WIDE_PARTITIONS)
    begin = AlterShareGroupOffsetsRequest(
        group_id=IDLE_SHARE_GROUP,
        topics=(
            AlterShareGroupOffsetsRequestTopic(
                topic_name=WIDE,
                partitions=tuple(
                    AlterShareGroupOffsetsRequestPartition(partition_index=index, start_offset=0) for index in indexes
                ),
            ),
        ),
    )
    where = DescribeShareGroupOffsetsRequest(
        groups=(DescribeShareGroupOffsetsRequestGroup(group_id=IDLE_SHARE_GROUP, topics=None),)
    )
    fetch = ShareFetchRequest(
        group_id=IDLE_SHARE_GROUP,
        member_id=MEMBER,
        share_session_epoch=0,
        max_records=500,
        batch_size=500,
        topics=(
            ShareFetchTopic(
                topic_id=topic_id,
                partitions=tuple(ShareFetchPartition(partition_index=index) for index in indexes),
            ),
        ),
    )
    released = (AcknowledgementBatch(first_offset=0, last_offset=0, acknowledge_types=(2,)),)
    acknowledge = ShareAcknowledgeRequest(
        group_id=IDLE_SHARE_GROUP,
        member_id=MEMBER,
        share_session_epoch=-1,
        topics=(
            AcknowledgeTopic(
                topic_id=topic_id,
                partitions=tuple(
                    AcknowledgePartition(partition_index=index, acknowledgement_batches=released) for index in indexes
                ),
            ),
        ),
    )
    altering, describing = ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS
    yield Case("alter_share_group_offsets: a wide topic", altering, 0, [begin])
    yield Case("describe_share_group_offsets: a wide topic", describing, 1, [where])
    yield Case("share_fetch: a wide topic", ApiKey.SHARE_FETCH, 2, [fetch])
    yield Case("share_acknowledge: a wide topic", ApiKey.SHARE_ACKNOWLEDGE, 2, [acknowledge])


def behind_aborted() -> Iterator[Case]:
    part = FetchPartition(partition=0, fetch_offset=ABORTED_TRANSACTIONS - 1, partition_max_bytes=1 << 20)
    asked = FetchRequest(
        max_wait_ms=0, min_bytes=1, isolation_level=1, topics=(FetchTopic(topic=ABORTED, partitions=(part,)),)
    )
    yield Case(READ_ABORTED, ApiKey.FETCH, 12, [asked])
