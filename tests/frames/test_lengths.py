"""Requests with few elements and very long strings: each is refused or answered briefly, and delays no other client.

Every request is sent raw, because a client library would refuse to write it. Another client on a connection of its own
measures the longest time without an answer. The bound on this time leaves room for a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from bench.attacks import resident
from protocol.errors import ErrorCode
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.list_transactions import ListTransactionsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.conftest import gateways
from tests.frames.members import fresh
from tests.gateway_process import GatewayProcess
from tests.postgres import Databases
from tests.steps.waiting import until
from tests.wire import WireClient, encode_frame

pytestmark = pytest.mark.timeout(120)

LONGEST = 32_767
"""Maximal length of a string in bytes. A request with a longer string ends the connection."""
SILENCE_S = 1.0
"""Longest time for which the other client may receive no answer. The attacks once took five seconds and more."""
ANSWER_BYTES = 8 * 1024 * 1024


@dataclass
class Bystander:
    longest_s: float = 0.0


@asynccontextmanager
async def bystander(gateway: GatewayProcess) -> AsyncIterator[Bystander]:
    """Send ApiVersions repeatedly, and record the longest time until an answer."""
    seen = Bystander()
    ending = asyncio.Event()

    async def ask() -> None:
        async with await WireClient.connect(gateway.bootstrap) as client:
            while not ending.is_set():
                began_s = time.monotonic()
                await client.send(ApiVersionsRequest(), 0)
                seen.longest_s = max(seen.longest_s, time.monotonic() - began_s)
                await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask())
        yield seen
        # Send one more request, so that a still blocked event loop is noticed.
        ending.set()
        await asking
    assert seen.longest_s <= SILENCE_S, f"the gateway answered nobody for {seen.longest_s:.1f} s"


async def answer_bytes(gateway: GatewayProcess, frame: bytes) -> int | None:
    """Send one frame and return the size of the answer in bytes, None if the gateway closes the connection."""
    host, _, port = gateway.bootstrap.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(frame)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 30), "big")
        assert size <= ANSWER_BYTES, f"{len(frame):,} bytes are answered with {size:,}"
        await asyncio.wait_for(reader.readexactly(size), 30)
        return size
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        writer.close()


async def ask(gateway: GatewayProcess, request: Any, version: int) -> Any:
    async with await WireClient.connect(gateway.bootstrap) as client:
        return await client.send(request, version)


@pytest.fixture(scope="module")
def guarded(postgres: Databases) -> Iterator[GatewayProcess]:
    """A gateway with an authorizer and a log in plain text (not JSON). Its one client has no permissions."""
    with gateways(postgres) as start:
        authorizer = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
        yield start(authorizer, environment={"SLUICE_LOG_FORMAT": "console"}, coordinated=False)


# --- a string above what the protocol allows ends the connection ------------------------------------------------------

LONG = "x" * 1_000_000


def produced(name: str, partitions: int) -> ProduceRequest:
    parts = tuple(PartitionProduceData(index=index, records=None) for index in range(partitions))
    return ProduceRequest(acks=-1, timeout_ms=1_000, topic_data=(TopicProduceData(name=name, partition_data=parts),))


def joined(name: str, metadata: bytes = b"", **given: Any) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=fresh("long"),
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type=given.pop("protocol_type", "consumer"),
        protocols=(JoinGroupRequestProtocol(name=name, metadata=metadata),),
        **given,
    )


TOO_LONG = {
    "topic": (produced(LONG, 300), 9),
    "topic of producers": (DescribeProducersRequest(topics=(TopicRequest(name=LONG, partition_indexes=(0,)),)), 0),
    "key": (FindCoordinatorRequest(key="g" * 4_000_000), 3),
    "group": (OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id="g" * 4_000_000, topics=None),)), 8),
    "protocol": (joined("p" * 6_291_456), 9),
    "reason": (joined("range", reason=LONG), 9),
    "software": (ApiVersionsRequest(client_software_name="s" * 7_000_000, client_software_version="1"), 3),
    "transactional id": (InitProducerIdRequest(transactional_id="t" * 150_000, transaction_timeout_ms=10_000), 4),
    "just too long": (FindCoordinatorRequest(key="g" * (LONGEST + 1)), 3),
}


@pytest.mark.parametrize("what", TOO_LONG)
async def test_a_string_above_the_protocols_limit_closes_the_connection(gateway: GatewayProcess, what: str) -> None:
    request, version = TOO_LONG[what]
    async with bystander(gateway):
        assert await answer_bytes(gateway, encode_frame(request, version, 1)) is None


# --- a name is not repeated for each of its partitions ----------------------------------------------------------------

NAME = "n" * 32_000


async def test_produce_to_a_long_name_is_answered_briefly(gateway: GatewayProcess) -> None:
    frame = encode_frame(produced(NAME, 20_000), 9, 1)
    before = resident(gateway)
    async with bystander(gateway):
        assert await answer_bytes(gateway, frame) is not None
    assert resident(gateway) - before <= 64 * 1024 * 1024


async def test_refused_produce_requests_leave_short_lines_in_the_log(gateway: GatewayProcess) -> None:
    written = gateway.log_path.stat().st_size
    for _ in range(3):
        await answer_bytes(gateway, encode_frame(produced(NAME, 20), 9, 1))
    assert gateway.log_path.stat().st_size - written <= 64 * 1024


async def test_elections_and_reassignments_of_a_long_name_are_answered_briefly(gateway: GatewayProcess) -> None:
    indexes = tuple(range(19_000))
    elect = ElectLeadersRequest(topic_partitions=(TopicPartitions(topic=NAME, partitions=indexes),))
    parts = tuple(ReassignablePartition(partition_index=index, replicas=None) for index in indexes[:9_000])
    reassign = AlterPartitionReassignmentsRequest(topics=(ReassignableTopic(name=NAME, partitions=parts),))
    async with bystander(gateway):
        assert await answer_bytes(gateway, encode_frame(elect, 2, 1)) is not None
        assert await answer_bytes(gateway, encode_frame(reassign, 0, 1)) is not None


async def test_producers_of_an_illegal_name_are_not_described_to_a_stranger(guarded: GatewayProcess) -> None:
    request = DescribeProducersRequest(topics=(TopicRequest(name=NAME, partition_indexes=tuple(range(6_000))),))
    async with bystander(guarded):
        answer = await ask(guarded, request, 0)
    parts = answer.topics[0].partitions
    assert {(part.error_code, part.error_message) for part in parts} == {(ErrorCode.TOPIC_AUTHORIZATION_FAILED, None)}


# --- ids above a kilobyte are refused before they cost anything -----------------------------------------------------

ID = "i" * 1_025
OTHER = "ok"
NO_GROUP, INVALID = ErrorCode.INVALID_GROUP_ID, ErrorCode.INVALID_REQUEST


def committed(**given: Any) -> OffsetCommitRequest:
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=0)
    topic = OffsetCommitRequestTopic(name="absent", partitions=(part,))
    return OffsetCommitRequest(**{"group_id": OTHER, "topics": (topic,), **given})


REFUSED_IDS: dict[str, tuple[Any, int, Any]] = {
    "FindCoordinator of a group": (FindCoordinatorRequest(key=ID), 3, lambda a: (a.error_code, NO_GROUP)),
    "FindCoordinator of a transaction": (
        FindCoordinatorRequest(key_type=1, coordinator_keys=(ID,)),
        4,
        lambda a: (a.coordinators[0].error_code, INVALID),
    ),
    "OffsetCommit": (committed(group_id=ID), 8, lambda a: (a.topics[0].partitions[0].error_code, NO_GROUP)),
    "OffsetCommit of a member": (
        committed(member_id=ID, generation_id_or_member_epoch=1),
        8,
        lambda a: (a.topics[0].partitions[0].error_code, INVALID),
    ),
    "OffsetFetch": (
        OffsetFetchRequest(
            groups=(OffsetFetchRequestGroup(group_id=ID, topics=(OffsetFetchRequestTopics(name="t"),)),)
        ),
        8,
        lambda a: (a.groups[0].error_code, NO_GROUP),
    ),
    "JoinGroup": (joined("range", group_instance_id=ID), 9, lambda a: (a.error_code, INVALID)),
    "Heartbeat": (
        HeartbeatRequest(group_id=OTHER, member_id=ID, generation_id=1),
        4,
        lambda a: (a.error_code, INVALID),
    ),
    "LeaveGroup": (
        LeaveGroupRequest(group_id=OTHER, members=(MemberIdentity(member_id="", group_instance_id=ID),)),
        5,
        lambda a: (a.error_code, INVALID),
    ),
    "InitProducerId": (
        InitProducerIdRequest(transactional_id=ID, transaction_timeout_ms=10_000),
        4,
        lambda a: (a.error_code, INVALID),
    ),
    "AddPartitionsToTxn": (
        AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=ID,
            v3_and_below_producer_id=1,
            v3_and_below_producer_epoch=0,
            v3_and_below_topics=(AddPartitionsToTxnTopic(name="absent", partitions=(0,)),),
        ),
        3,
        lambda a: (a.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code, INVALID),
    ),
}


@pytest.mark.parametrize("what", REFUSED_IDS)
async def test_an_id_above_a_kilobyte_is_refused_in_the_shape_of_its_api(gateway: GatewayProcess, what: str) -> None:
    request, version, codes = REFUSED_IDS[what]
    answered, expected = codes(await ask(gateway, request, version))
    assert answered == expected


async def test_an_id_of_a_kilobyte_is_taken(gateway: GatewayProcess) -> None:
    answer = await ask(gateway, FindCoordinatorRequest(key="i" * 1_024), 3)
    assert answer.error_code == ErrorCode.NONE
    answer = await ask(gateway, InitProducerIdRequest(transactional_id="é" * 512, transaction_timeout_ms=10_000), 4)
    assert answer.error_code == ErrorCode.NONE


async def test_a_refused_transactional_id_is_not_kept(gateway: GatewayProcess) -> None:
    long_id = fresh("kept-") + "k" * 2_000
    await ask(gateway, InitProducerIdRequest(transactional_id=long_id, transaction_timeout_ms=10_000), 4)
    listed = await ask(gateway, ListTransactionsRequest(), 1)
    assert long_id not in {each.transactional_id for each in listed.transaction_states}


async def test_many_long_keys_delay_no_other_client(gateway: GatewayProcess) -> None:
    """Send one request of eight megabytes with as many different keys as fit."""
    keys = tuple(f"{number:05}" + "k" * (LONGEST - 5) for number in range(240))
    async with bystander(gateway):
        answer = await ask(gateway, FindCoordinatorRequest(coordinator_keys=keys), 4)
    assert {each.error_code for each in answer.coordinators} == {NO_GROUP}


# --- a member's metadata counts as a whole ----------------------------------------------------------------------------


async def test_a_member_whose_protocol_names_are_megabytes_is_refused(gateway: GatewayProcess) -> None:
    names = tuple(f"{number:03}" + "p" * 32_000 for number in range(200))
    request = JoinGroupRequest(
        group_id=fresh("bulky"),
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=tuple(JoinGroupRequestProtocol(name=name, metadata=b"") for name in names),
    )
    async with bystander(gateway):
        answer = await ask(gateway, request, 4 - 1)
    assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR


# --- the journal does not repeat a client's names for each partition --------------------------------------------------


async def test_commits_for_a_topic_that_does_not_exist_are_one_row_of_the_journal(gateway: GatewayProcess) -> None:
    group_id, partitions = fresh("refused"), 5_000
    parts = tuple(
        OffsetCommitRequestPartition(partition_index=index, committed_offset=1) for index in range(partitions)
    )
    topics = (OffsetCommitRequestTopic(name=NAME, partitions=parts),)
    answer = await ask(gateway, OffsetCommitRequest(group_id=group_id, topics=topics), 8)
    assert {each.error_code for each in answer.topics[0].partitions} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert gateway.database_url is not None
    observer = await asyncpg.connect(gateway.database_url, server_settings={"search_path": "sluice"})
    try:
        question = "select commit_count, length(topic) from journal_offset where group_id = $1"
        rows: list[Any] = await until(lambda: observer.fetch(question, group_id), "the refusal is in the journal")
    finally:
        await observer.close()
    ((count, length),) = rows
    assert count == partitions
    assert length < 300


# --- no control character reaches a terminal --------------------------------------------------------------------------


async def test_a_topic_named_with_an_escape_sequence_is_escaped_in_the_log(guarded: GatewayProcess) -> None:
    owned = "\x1b]0;owned\x07"
    async with await WireClient.connect(guarded.bootstrap, client_id=f"client{owned}") as client:
        await client.send(produced(owned, 1), 9)
        await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=owned),)), 9)
        await client.send(ApiVersionsRequest(client_software_name=owned, client_software_version="1"), 3)
    async with await WireClient.connect(guarded.bootstrap) as client:
        client.send_bytes(encode_frame(ApiVersionsRequest(), 0, 1, client_id=owned)[:10] + b"\x7f")
    log = guarded.log_path.read_bytes()
    assert b"\x1b]" not in log
    assert b"\x07" not in log
