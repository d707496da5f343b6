"""`python -m bench.worst`: the worst that is legal on every API, and how long each held the gateway's event loop.

    python -m bench.worst                 everything, some minutes
    python -m bench.worst produce fetch   cases whose name contains one of these

For every served API each of its arrays, at whatever depth, is filled as far as a request may be; beside these stand
requests made to be costly by their content. Held is CPU time of the loop's thread between two turns of the loop
(`bench/probe.py`), so other processes on the machine do not matter; late is by the wall clock and they do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import crc32c

from bench.depth import FILL
from bench.frames import Connection, frame
from bench.librdkafka import create_topic
from gateway.apis import SERVED
from gateway.apis.delegation_tokens import MAX_RENEWERS
from gateway.apis.transactions import MAX_TRANSACTIONS
from gateway.config.broker import STANDARD_AUTHORIZER
from gateway.config.jaas import PLAIN_MODULE
from gateway.coordinator.consumer.topics import MAX_PATTERN_BYTES, MAX_UNICODE_CLASSES
from protocol.api_keys import ApiKey
from protocol.codec import encode, has_more_elements, request_class
from protocol.compression import Compression, compress
from protocol.consumer import Subscription, encode_subscription
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
from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.list_transactions import ListTransactionsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.messages.renew_delegation_token import RenewDelegationTokenRequest
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from protocol.messages.share_acknowledge import AcknowledgePartition, AcknowledgeTopic, ShareAcknowledgeRequest
from protocol.messages.share_fetch import AcknowledgementBatch, ShareFetchRequest
from protocol.messages.share_fetch import FetchPartition as ShareFetchPartition
from protocol.messages.share_fetch import FetchTopic as ShareFetchTopic
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.messages.write_txn_markers import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from protocol.records import HEAD_BYTES, Record, build_batch
from protocol.schema import Field, struct_schema
from storage.embedded import EmbeddedPostgres
from tests.gateway_process import GatewayProcess, find_coordinator, free_ports
from tests.wire import WireClient

LIMIT_MS = 20.0
MAX_FRAME_BYTES = 8 * 1024 * 1024 - 1024
ELEMENTS = 100_000
WIDE, WIDE_PARTITIONS = "wide", 5_000
ANSWER_TIMEOUT_S = 120.0
GROUP, IDLE_SHARE_GROUP = "worst", "worst-share-idle"
MEMBER = "AAAAAAAAAAAAAAAAAAAACQ"
TRANSACTIONAL_ID, IN_MANY = "worst", "worst-in-many"
MANY, MANY_PARTITIONS = ("many-0", "many-1"), 10_000
"""Topics, and the partitions of each: as many as one request may make."""
ALL_OF_MANY = f"{len(MANY) * MANY_PARTITIONS} partitions"
ADMINISTERED = 5_000
USERS = 9_990
TOKENS = 1_000
ABORTED, ABORTED_TRANSACTIONS = "aborted", 50_000
READ_ABORTED = f"fetch: a batch within {ABORTED_TRANSACTIONS} aborted transactions"

ABORT = """
insert into sluice.aborted_transaction (partition_key, producer_id, first_offset, last_offset, last_stable_offset)
select p.partition_key, 1000000 + n, n, $2 + n, case when n < $2 - 1 then n + 1 else 2 * $2 end
from sluice.partition p join sluice.topic t using (topic_id), generate_series(0, $2::bigint - 1) n
where t.name = $1
"""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    api_key: ApiKey
    version: int
    requests: list[Any]
    known: bool = False
    """Whether it is sent by somebody who has said who they are."""


@dataclass(frozen=True, slots=True)
class Held:
    case: str
    held_ms: float
    collected_ms: float
    late_ms: float
    took_s: float
    note: str


State = TypeVar("State")


# --- requests as large as they may be, from the declarations ---------------------------------------------------------


def array_paths(struct_type: type[Any], version: int) -> Iterator[tuple[Field, ...]]:
    """Every array of a struct at a version, as the fields that lead to it."""
    for field in struct_schema(struct_type).fields:
        if version not in field.versions or field.tag is not None:
            continue
        if field.is_array:
            yield (field,)
        if isinstance(field.kind, type):
            for path in array_paths(field.kind, version):
                yield (field, *path)


def filled(struct_type: type[Any], version: int, path: tuple[Field, ...], count: int, number: int = 0) -> Any:
    """A struct in which the array at the end of `path` has `count` elements and every other array one."""
    values: dict[str, Any] = {}
    for field in struct_schema(struct_type).fields:
        if version not in field.versions or field.tag is not None:
            continue
        on_path = bool(path) and field is path[0]
        if field.is_array:
            times = count if on_path and len(path) == 1 else 1
            rest = path[1:] if on_path else ()
            values[field.name] = tuple(value_of(field, version, rest, count, index) for index in range(times))
        elif isinstance(field.kind, type):
            values[field.name] = filled(field.kind, version, path[1:] if on_path else (), count, number)
        else:
            values[field.name] = value_of(field, version, (), count, number)
    return struct_type(**values)


def value_of(field: Field, version: int, path: tuple[Field, ...], count: int, number: int) -> Any:
    if isinstance(field.kind, type):
        return filled(field.kind, version, path, count, number)
    match field.kind.name:
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
            # One of more than its API takes is refused before it costs anything.
            most = min(line.max_elements, ELEMENTS)
            for part in (1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 10):
                request = addressed(filled(struct_type, line.max_version, path, int(most * part) - 8), line.api_key)
                body = b"".join(bytes(chunk) for chunk in encode(request, line.max_version))
                if len(body) <= MAX_FRAME_BYTES and not has_more_elements(request, most):
                    break
            yield Case(name, line.api_key, line.max_version, [request])


def addressed(request: Any, api_key: ApiKey) -> Any:
    """To a group of the API's own, for of another type it is refused at once, and from a member as Kafka names them."""
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
    """The same records in another codec: building a million anew takes seconds."""
    batch = bytearray(plain[:HEAD_BYTES] + compress(codec, plain[HEAD_BYTES:]))
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">h", batch, 21, codec)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(memoryview(batch)[21:]))
    return bytes(batch)


def crowded_headers(timestamp: int) -> bytes:
    """As many as go into what the parser gets at a time."""
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
    """Those chosen alone: they take longer to make than to send."""
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
    # Of no member: whoever names one that is unknown is refused before its topics are looked at.
    topics = tuple(
        OffsetFetchRequestTopics(name=WIDE if not number else f"t{number}", partition_indexes=(0,))
        for number in range(ELEMENTS // 2 - 1)
    )
    partitions = (OffsetFetchRequestTopics(name=WIDE, partition_indexes=tuple(range(ELEMENTS - 2))),)
    for what, asked in (("topics", topics), ("partitions", partitions)):
        request = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=GROUP, topics=asked),))
        yield Case(f"offset_fetch: many {what} of one group", ApiKey.OFFSET_FETCH, 8, [request])


def in_transactions(producer: InitProducerIdResponse) -> Iterator[Case]:
    """One after the other: what each leaves open the next ends."""
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


async def abort_around_one_batch(gateway: Gateway) -> None:
    """So many transactions in one partition, all under way at once, and then aborted: who reads the last batch before
    their markers is told of each. They are written down as what is left of them, for to begin and end them takes
    minutes."""
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    try:
        a_batch = build_batch([Record(0, 0, None, b"aborted", ())])
        await connection.execute(FILL, ABORTED, 2 * ABORTED_TRANSACTIONS, a_batch)
        await connection.execute(ABORT, ABORTED, ABORTED_TRANSACTIONS)
    finally:
        await connection.close()


def in_many_partitions(
    chosen: Callable[[str], bool], bootstrap: str, producer: InitProducerIdResponse
) -> Iterator[Case]:
    """One after the other, with records in every partition. Their topics are made for them alone: what a node holds of
    each partition makes every full collection longer."""
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

    def marked(*, committed: bool) -> WriteTxnMarkersRequest:
        topic = WritableTxnMarkerTopic(name=MANY[0], partition_indexes=(0,))
        marker = WritableTxnMarker(
            producer_id=producer_id, producer_epoch=epoch, transaction_result=committed, topics=(topic,)
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
    yield Case(f"write_txn_markers: commit of one of {ALL_OF_MANY}", marking, 1, [marked(committed=True)])
    yield Case(f"write_txn_markers: one of {ALL_OF_MANY}", marking, 1, [marked(committed=False)])


def costly_patterns() -> Iterator[Case]:
    """To compile an expression takes the event loop, whatever comes of it."""
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
    """One after the other: made, told of, taken away."""
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
    """Each with as many renewers as it may have."""
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
    """One after the other, as large as they succeed: what `whole_apis` fills has something wrong in every element."""
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
    # What a leader tells its members is theirs: megabytes of it are passed on.
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
    """One after the other, of a group that stands in every partition of the wide topic."""
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


# --- measuring -----------------------------------------------------------------------------------------------------


class Gateway(GatewayProcess):
    """A gateway with the probe in it."""

    def __init__(self, directory: Path) -> None:
        self.report = directory / "probe.json"
        opened, asking = free_ports(2)
        self.asking = f"127.0.0.1:{asking}"
        """Where clients say who they are."""
        super().__init__(
            directory,
            database_url=None,
            # With ACLs each check looks for those of its resource.
            settings={
                "listeners": f"OPEN://127.0.0.1:{opened},ASKING://127.0.0.1:{asking}",
                "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.asking.plain.sasl.jaas.config": f'{PLAIN_MODULE} required user_bench="bench";',
                "delegation.token.secret.key": "bench",
                "group.initial.rebalance.delay.ms": "0",
                "message.max.bytes": "8000000",
                "authorizer.class.name": STANDARD_AUTHORIZER,
                "allow.everyone.if.no.acl.found": "true",
            },
            environment={"BENCH_PROBE": str(self.report)},
        )
        self._arguments[self._arguments.index("gateway.cli")] = "bench.probe"

    async def probe(self) -> tuple[float, float, float]:
        """(held, longest garbage collection, late) in ms since the last call."""
        self.report.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not self.report.exists():  # noqa: ASYNC110 (another process writes it)
                await asyncio.sleep(0.01)
        figures = json.loads(self.report.read_text())
        return figures["held_ms"], figures["collected_ms"], figures["late_ms"]


@contextlib.contextmanager
def probed_gateway() -> Iterator[Gateway]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-worst-", dir=os.environ.get("SLUICE_BENCH_DIR")))
    directory.chmod(0o755)
    gateway = Gateway(directory)
    gateway.start()
    find_coordinator(gateway.bootstrap)
    try:
        yield gateway
    finally:
        gateway.close()
        shutil.rmtree(directory)


def _who() -> Iterator[bytes]:
    yield frame(ApiKey.SASL_HANDSHAKE, 1, 1, SaslHandshakeRequest(mechanism="PLAIN"))
    yield frame(ApiKey.SASL_AUTHENTICATE, 2, 1, SaslAuthenticateRequest(auth_bytes=b"\0bench\0bench"))


async def ask_all(gateway: Gateway, case: Case) -> str:
    """Send the case's requests, each when the last is answered; what became of them."""
    host, _, port = (gateway.asking if case.known else gateway.bootstrap).rpartition(":")
    connection = await Connection.open(host, int(port))
    outcome = "answered"
    frames = (frame(case.api_key, case.version, 1, request) for request in case.requests)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for sent in chain(_who() if case.known else (), frames):
                connection.writer.write(sent)
                await connection.writer.drain()
                size = int.from_bytes(await connection.reader.readexactly(4), "big")
                left = size
                while left:
                    left -= len(await connection.reader.readexactly(min(left, 2**20)))
    except asyncio.IncompleteReadError:
        outcome = "closed"
    except TimeoutError:
        outcome = "not answered in time"
    connection.writer.close()
    return outcome


async def topic_id_of(gateway: Gateway, name: str) -> UUID:
    async with await WireClient.connect(gateway.bootstrap) as client:
        answer = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 12)
        return answer.topics[0].topic_id


async def initialized(gateway: Gateway, transactional_id: str) -> InitProducerIdResponse:
    async with await WireClient.connect(gateway.bootstrap) as client:
        asked = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=600_000)
        return await client.send(asked, 4)


async def measure(chosen: Callable[[str], bool]) -> list[Held]:
    rows: list[Held] = []
    with probed_gateway() as gateway:
        make = asyncio.to_thread
        await make(create_topic, gateway.bootstrap, "plain", 8)
        await make(create_topic, gateway.bootstrap, "compacted", 8, {"cleanup.policy": "compact"})
        await make(create_topic, gateway.bootstrap, "stamped", 8, {"message.timestamp.type": "LogAppendTime"})
        await make(create_topic, gateway.bootstrap, WIDE, WIDE_PARTITIONS)
        if chosen(READ_ABORTED):
            await make(create_topic, gateway.bootstrap, ABORTED, 1)
            await abort_around_one_batch(gateway)
        cases = chain(
            costly_contents(chosen),
            in_transactions(await initialized(gateway, TRANSACTIONAL_ID)),
            behind_aborted(),
            costly_patterns(),
            of_share_groups(await topic_id_of(gateway, WIDE)),
            whole_apis(chosen),
            administration(),
            in_many_partitions(chosen, gateway.bootstrap, await initialized(gateway, IN_MANY)),
        )
        for case in cases:
            if not chosen(case.name):
                continue
            await gateway.probe()
            started = time.perf_counter()
            note = await ask_all(gateway, case)
            took_s = time.perf_counter() - started
            held_ms, collected_ms, late_ms = await gateway.probe()
            rows.append(Held(case.name, held_ms, collected_ms, late_ms, took_s, note))
            figures = f"{held_ms:7.1f} ms held, {collected_ms:7.1f} collecting, {late_ms:7.1f} late, {took_s:6.1f} s"
            line = f"  {figures}: {case.name} ({note})"
            print(line, file=sys.stderr, flush=True)
    return rows


def report(rows: list[Held]) -> str:
    lines = ["| request | held, ms | longest collection, ms | late, ms | took, s | |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -row.held_ms):
        held = f"**{row.held_ms:.1f}**" if row.held_ms > LIMIT_MS else f"{row.held_ms:.1f}"
        rest = f"{row.collected_ms:.1f} | {row.late_ms:.1f} | {row.took_s:.1f} | {row.note}"
        lines.append(f"| {row.case} | {held} | {rest} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.worst", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("names", nargs="*", help="measure cases whose name contains one of these")
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    rows = asyncio.run(measure(lambda case: not names or any(name in case for name in names)))
    print(report(rows))
    return int(any(row.held_ms > LIMIT_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
