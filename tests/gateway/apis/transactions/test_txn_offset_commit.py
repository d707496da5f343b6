"""TxnOffsetCommit at every version, on a real Postgres, and the answers of OffsetFetch during a transaction."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from gateway.apis.transactions.txn_offset_commit import refuse_txn_offset_commit
from gateway.coordinator.classic.model import GroupState
from gateway.coordinator.facts import Fact, OffsetsCommitted, TransactionCommitted
from gateway.coordinator.requests import OffsetCommitReply, TxnOffsetCommit
from protocol.errors import ErrorCode
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from protocol.records import ControlType, end_marker
from storage.errors import StorageUnavailable
from storage.transactions import ProducerRecord, TransactionStore
from storage.types import Topic
from tests.gateway.apis.groups.offsets import codes, commit_request, fetched, partition
from tests.gateway.group_node import (
    GroupNode,
    forget_everything,
    group_node,
    locked_group,
    lose_lease,
    settle,
    write_is_waiting,
)
from tests.postgres import Databases

G, T = "g", "transactional"
EPOCH_FIELD = "generation_id_or_member_epoch"
PRODUCER, EPOCH = 4_000, 7
VERSIONS = range(5)
NONE, UNSTABLE = ErrorCode.NONE, ErrorCode.UNSTABLE_OFFSET_COMMIT
FORGET = "truncate transactional_producer, open_transaction, aborted_transaction, transaction_group, pending_offset"


@pytest.fixture(scope="module")
def database_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    await forget_everything(database_url)
    connection = await asyncpg.connect(database_url, server_settings={"search_path": "sluice"})
    await connection.execute(FORGET)
    await connection.close()
    async with group_node(database_url) as started:
        yield started


async def begun(node: GroupNode, *group_ids: str, transactional_id: str = T, producer_id: int = PRODUCER) -> None:
    transactions = TransactionStore(node.database)
    read = await transactions.read(transactional_id)
    if not read.revision:
        assert await transactions.save(read, ProducerRecord(producer_id, EPOCH, -1, -1, 60_000, "Empty"))
    assert await transactions.add(await transactions.read(transactional_id), [], group_ids)


async def ended(node: GroupNode, *, committed: bool = True, transactional_id: str = T) -> tuple[str, ...]:
    """Return the groups whose offsets were committed."""
    transactions = TransactionStore(node.database)
    read = await transactions.read(transactional_id)
    assert read.record is not None
    record = dataclasses.replace(read.record, state="CompleteCommit" if committed else "CompleteAbort")
    control = ControlType.COMMIT if committed else ControlType.ABORT
    marker = end_marker(control, producer_id=PRODUCER, producer_epoch=EPOCH, timestamp_ms=1)
    outcome = await transactions.end(read, record, marker, committed=committed, timestamp_ms=1)
    assert outcome is not None
    return outcome.group_ids


def asked(index: int, offset: int, *, epoch: int = 3, metadata: str | None = "m") -> TxnOffsetCommitRequestPartition:
    return TxnOffsetCommitRequestPartition(
        partition_index=index, committed_offset=offset, committed_leader_epoch=epoch, committed_metadata=metadata
    )


def request_for(topic: Topic, *partitions: TxnOffsetCommitRequestPartition, **given: Any) -> TxnOffsetCommitRequest:
    named = {"transactional_id": T, "group_id": G, "producer_id": PRODUCER, "producer_epoch": EPOCH, **given}
    return TxnOffsetCommitRequest(
        topics=(TxnOffsetCommitRequestTopic(name=topic.name, partitions=partitions),), **named
    )


async def code_of(node: GroupNode, topic: Topic, offset: int = 1, *, version: int = 4, **given: Any) -> int:
    return codes(await node.ask(request_for(topic, asked(0, offset), **given), version))[0][1]


def by_id(topic_id: uuid.UUID, *partitions: TxnOffsetCommitRequestPartition) -> TxnOffsetCommitRequest:
    named: dict[str, Any] = {
        "transactional_id": T,
        "group_id": G,
        "producer_id": PRODUCER,
        "producer_epoch": EPOCH,
    }
    return TxnOffsetCommitRequest(
        topics=(TxnOffsetCommitRequestTopic(topic_id=topic_id, partitions=partitions),), **named
    )


def elsewhere(node: GroupNode) -> str:
    """Return a group in another shard than the groups of all other tests, so that a test may lose this shard."""
    return next(name for name in "abcdef" if node.leases.shard_of(name) != node.leases.shard_of(G))


# --- what is stored -----------------------------------------------------------------------------------------------


async def test_topic_is_identified_by_id_from_version_6(node: GroupNode) -> None:
    topic = await node.create_topic("t", 1)
    await begun(node, G)
    answer = await node.ask(by_id(topic.topic_id, asked(0, 42), asked(7, 1)), 6)
    assert [(echoed.name, echoed.topic_id) for echoed in answer.topics] == [("", topic.topic_id)]
    assert codes(answer) == [(0, NONE), (7, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]
    unknown = uuid.uuid4()
    answer = await node.ask(by_id(unknown, asked(0, 43)), 6)
    assert [echoed.topic_id for echoed in answer.topics] == [unknown]
    assert codes(answer) == [(0, ErrorCode.UNKNOWN_TOPIC_ID)]
    assert await ended(node) == (G,)
    assert await fetched(node, 9, None) == {("t", 0): (42, 3, "m", NONE)}


@pytest.mark.parametrize("version", VERSIONS)
async def test_offsets_are_fetched_once_the_transaction_is_committed(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t", 3)
    await begun(node, G)
    partitions = asked(0, 42), asked(1, -1, metadata=None), asked(2, 2**63 - 1, metadata="\0 ü")
    answer = await node.ask(request_for(topic, *partitions), version)
    assert [echoed.name for echoed in answer.topics] == ["t"]
    assert codes(answer) == [(0, NONE), (1, NONE), (2, NONE)]
    assert await fetched(node, 6, None) == {}
    assert await ended(node) == (G,)
    epoch = 3 if version >= 2 else -1
    assert await fetched(node, 9, None) == {
        ("t", 0): (42, epoch, "m", NONE),
        ("t", 1): (-1, epoch, "", NONE),
        ("t", 2): (2**63 - 1, epoch, "\0 ü", NONE),
    }


@pytest.mark.parametrize("version", VERSIONS)
async def test_unknown_partition_or_long_metadata_fails_alone(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t", 2)
    await begun(node, G)
    known = request_for(topic, asked(0, 7), asked(2, 8), asked(-1, 9), asked(1, 1, metadata="x" * 4097))
    missing = TxnOffsetCommitRequestTopic(name="missing", partitions=(asked(0, 1),))
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    answer = await node.ask(dataclasses.replace(known, topics=(missing, *known.topics)), version)
    long = ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert codes(answer) == [(0, unknown), (0, NONE), (2, unknown), (-1, unknown), (1, long)]
    await ended(node)
    assert set(await fetched(node, 9, None)) == {("t", 0)}


async def test_commit_of_no_partition_does_not_reach_the_group(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.create_topic("t")
    questions: list[object] = []
    monkeypatch.setattr(node.groups, "submit", lambda *request: questions.append(request))
    missing = Topic(uuid.uuid4(), "missing", False, {}, ())
    assert await code_of(node, missing) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert questions == []


# --- who may ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
async def test_wrong_producer_id_or_epoch_is_refused(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t")
    await begun(node, G)
    mapping = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert await code_of(node, topic, version=version, transactional_id="another") == mapping
    assert await code_of(node, topic, version=version, producer_id=PRODUCER + 1) == mapping
    assert await code_of(node, topic, version=version, producer_epoch=EPOCH - 1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert await code_of(node, topic, version=version) == NONE


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_group_must_have_been_added_to_the_transaction(node: GroupNode, version: int) -> None:
    """Producers know from version 4 on that they can continue after an abort."""
    topic = await node.create_topic("t")
    await begun(node, "another")
    code = ErrorCode.TRANSACTION_ABORTABLE if version >= 4 else ErrorCode.INVALID_TXN_STATE
    assert await code_of(node, topic, version=version) == code
    await begun(node, G)
    assert await code_of(node, topic, version=version) == NONE
    await ended(node)
    assert await code_of(node, topic, version=version) == code


async def test_transactional_commit_without_a_group_is_refused(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    await begun(node, "")
    answer = await node.ask(request_for(topic, asked(0, 1), asked(5, 1), group_id=""), 4)
    assert codes(answer) == [(0, ErrorCode.INVALID_GROUP_ID), (5, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]


async def test_commit_of_an_unknown_member_is_refused(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    await begun(node, G)
    member = node.member(G, "c1")
    await settle(member)
    mine: dict[str, Any] = {"member_id": member.member_id, EPOCH_FIELD: 1}
    assert await code_of(node, topic, 1, **mine) == NONE
    assert await code_of(node, topic, 2, **{**mine, EPOCH_FIELD: 0}) == ErrorCode.ILLEGAL_GENERATION
    assert await code_of(node, topic, 3, **{**mine, EPOCH_FIELD: -1}) == ErrorCode.ILLEGAL_GENERATION
    assert await code_of(node, topic, 4, **{**mine, "member_id": "nobody"}) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await code_of(node, topic, 5, **{**mine, "group_instance_id": "i"}) == ErrorCode.UNKNOWN_MEMBER_ID
    await begun(node, G)
    await ended(node)
    assert (await fetched(node, 9, None))["t", 0][0] == 1

    # A producer may end its transaction during a rebalance of its group. Then the commit arrives before the member has
    # synced.
    await begun(node, G)
    assert (await member.join()).generation_id == 2
    assert await code_of(node, topic, 6, **{**mine, EPOCH_FIELD: 2}) == NONE
    assert await code_of(node, topic, 7, **mine) == ErrorCode.ILLEGAL_GENERATION
    await ended(node)
    assert (await fetched(node, 9, None))["t", 0][0] == 6


@pytest.mark.parametrize("version", VERSIONS)
async def test_transactional_commit_without_a_member_is_accepted_beside_members(node: GroupNode, version: int) -> None:
    """The request has no member fields before version 3."""
    topic = await node.create_topic("t")
    await settle(node.member(G, "c1"))
    await begun(node, G)
    assert await code_of(node, topic, 5, version=version) == NONE
    await ended(node)
    assert (await fetched(node, 9, None))["t", 0][0] == 5


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({EPOCH_FIELD: 3, "member_id": "m"}, ErrorCode.ILLEGAL_GENERATION),
        ({}, NONE),
        ({"member_id": "m"}, NONE),
        ({EPOCH_FIELD: -7}, NONE),
    ],
)
async def test_commits_to_a_missing_group(node: GroupNode, given: dict[str, Any], code: ErrorCode) -> None:
    topic = await node.create_topic("t")
    await begun(node, G)
    assert await code_of(node, topic, **given) == code
    stored = await node.stored(G)
    assert (stored is not None) is (code is NONE)
    if stored is not None:
        assert (stored.state, stored.protocol_type) == (GroupState.EMPTY, None)


async def test_commit_overtaken_by_the_next_generation_is_fenced_by_postgres(
    node: GroupNode, database_url: str
) -> None:
    topic = await node.create_topic("t")
    member = node.member(G, "c1")
    await settle(member)
    await begun(node, G)
    async with locked_group(database_url, G) as lock:
        named: dict[str, Any] = {"member_id": member.member_id, EPOCH_FIELD: 1}
        committing = asyncio.create_task(code_of(node, topic, 9, **named))
        await write_is_waiting(lock)
        await lock.execute("update consumer_group set generation_id = 2 where group_id = $1", G)
    assert await committing == ErrorCode.ILLEGAL_GENERATION
    await ended(node)
    assert await fetched(node, 9, None) == {}


async def test_only_the_coordinator_commits(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    lost = elsewhere(node)
    await begun(node, lost)
    await lose_lease(node, lost)
    assert await code_of(node, topic, group_id=lost) == ErrorCode.NOT_COORDINATOR


async def test_transactional_commit_during_an_outage_asks_for_a_new_coordinator(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    await begun(node, G)

    async def away(*arguments: object) -> None:
        raise StorageUnavailable("away")

    monkeypatch.setattr(node.offsets, "commit_in_transaction", away)
    assert await code_of(node, topic) == ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("version", VERSIONS)
async def test_old_producers_receive_another_code_for_a_loading_coordinator(
    node: GroupNode, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    code = loading if version >= 2 else ErrorCode.COORDINATOR_NOT_AVAILABLE
    refused = refuse_txn_offset_commit(request_for(topic, asked(0, 1), asked(1, 1)), version, loading, None)
    assert codes(refused) == [(0, code), (1, code)]

    def submit(group_id: str, event: object) -> OffsetCommitReply:
        assert isinstance(event, TxnOffsetCommit)
        return OffsetCommitReply(loading)

    monkeypatch.setattr(node.groups, "submit", submit)
    assert await code_of(node, topic, version=version) == code


# --- what readers see ---------------------------------------------------------------------------------------------


async def test_readers_learn_only_of_the_end_of_a_transaction(node: GroupNode) -> None:
    """A pending offset may never be committed. If another node coordinates the group, that node informs the readers."""
    topic = await node.create_topic("t")
    other = elsewhere(node)
    told: list[tuple[str, Fact]] = []
    node.groups.readers.append(lambda group_id, facts: told.extend((group_id, fact) for fact in facts))
    await node.ask(commit_request(topic, partition(0, 1)), 9)
    assert [(group_id, type(fact)) for group_id, fact in told] == [(G, OffsetsCommitted)]
    told.clear()
    await begun(node, G)
    assert await code_of(node, topic) == NONE
    assert told == []
    await lose_lease(node, other)
    for group_id in (*(await ended(node)), other):
        node.groups.transaction_committed(group_id)
    assert told == [(G, TransactionCommitted())]


async def stable(node: GroupNode, topic: Topic, version: int, *, whole: bool) -> dict[int, tuple[int, int, str, int]]:
    """Return, by partition, the answer to OffsetFetch with RequireStable."""
    indexes = (0, 1, 2)
    if version >= 8:
        topics = (OffsetFetchRequestTopics(name=topic.name, topic_id=topic.topic_id, partition_indexes=indexes),)
        groups = (OffsetFetchRequestGroup(group_id=G, topics=None if whole else topics),)
        answer = (await node.ask(OffsetFetchRequest(groups=groups, require_stable=True), version)).groups[0]
    else:
        only = None if whole else (OffsetFetchRequestTopic(name=topic.name, partition_indexes=indexes),)
        answer = await node.ask(OffsetFetchRequest(group_id=G, topics=only, require_stable=True), version)
    assert answer.error_code == NONE
    return {
        part.partition_index: (
            part.committed_offset,
            part.committed_leader_epoch,
            part.metadata or "",
            part.error_code,
        )
        for each in answer.topics
        for part in each.partitions
    }


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("version", [7, 8, 9, 10])
async def test_pending_offset_is_unstable_for_readers_that_require_stable(
    node: GroupNode, version: int, whole: bool
) -> None:
    """Upstream's test: WithPendingTransactionalOffsets."""
    topic = await node.create_topic("t", 3)
    await node.ask(commit_request(topic, partition(0, 5), partition(1, 5)), 9)
    await begun(node, G)
    await node.ask(request_for(topic, asked(1, 42), asked(2, 42)), 4)
    five, unstable = (5, 3, "m", NONE), (-1, -1, "", UNSTABLE)
    assert await stable(node, topic, version, whole=whole) == {0: five, 1: unstable, 2: unstable}
    asked_for = None if whole else [(topic, (0, 1, 2))]
    told = {index: offset for (_, index), (offset, *_) in (await fetched(node, 7, asked_for)).items()}
    assert told == {0: 5, 1: 5} | ({} if whole else {2: -1})
    await ended(node)
    new = (42, 3, "m", NONE)
    assert await stable(node, topic, version, whole=whole) == {0: five, 1: new, 2: new}


async def test_aborted_transaction_keeps_the_committed_offset(node: GroupNode) -> None:
    topic = await node.create_topic("t", 3)
    await node.ask(commit_request(topic, partition(0, 5)), 9)
    await begun(node, G)
    await node.ask(request_for(topic, asked(0, 42)), 4)
    assert await ended(node, committed=False) == ()
    assert (await stable(node, topic, 9, whole=True)) == {0: (5, 3, "m", NONE)}
