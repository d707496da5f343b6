"""The offset handlers at every version, on a real Postgres: what is stored, and what a reader gets back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from gateway.apis.groups.offset_fetch import MANY_GROUPS_FROM
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.groups.offset_committer import OffsetCommitter
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from storage.errors import StorageError, StorageUnavailable
from storage.pool import Pool
from storage.types import OffsetCommit, Refusal, Topic
from tests.gateway.apis.groups.offsets import NONE, G, codes, commit_request, fetched, partition
from tests.gateway.group_node import (
    QUICK,
    GroupNode,
    forget_everything,
    group_node,
    locked_group,
    lose_lease,
    reply_of,
    settle,
    write_is_waiting,
)
from tests.postgres import Databases

COMMIT_VERSIONS = range(2, 11)
FETCH_VERSIONS = range(1, 11)


@pytest.fixture(scope="module")
def database_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    await forget_everything(database_url)
    async with group_node(database_url) as started:
        yield started


# --- OffsetCommit and OffsetFetch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", COMMIT_VERSIONS)
async def test_committed_offset_is_fetched_unchanged(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t", 3)
    request = commit_request(
        topic, partition(0, 42), partition(1, -1, metadata=None), partition(2, 2**63 - 1, metadata="\0 ü")
    )
    answer = await node.ask(request, version)
    assert codes(answer) == [(0, NONE), (1, NONE), (2, NONE)]
    (echoed,) = answer.topics
    assert (echoed.name, echoed.topic_id) == (("", topic.topic_id) if version >= 10 else ("t", uuid.UUID(int=0)))
    epoch = 3 if version >= 6 else -1
    assert await fetched(node, 9, [(topic, (0, 1, 2))]) == {
        ("t", 0): (42, epoch, "m", NONE),
        ("t", 1): (-1, epoch, "", NONE),
        ("t", 2): (2**63 - 1, epoch, "\0 ü", NONE),
    }


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_offset_never_committed_is_minus_one_without_error(node: GroupNode, version: int) -> None:
    topic, missing = await node.create_topic("t", 2), Topic(uuid.uuid4(), "missing", False, {}, ())
    await node.ask(commit_request(topic, partition(0, 42)), 9)
    epoch = 3 if version >= 5 else -1
    key: Any = topic.topic_id if version >= 10 else "t"
    absent: Any = missing.topic_id if version >= 10 else "missing"
    assert await fetched(node, version, [(topic, (0, 1, 7, -1)), (missing, (0,))]) == {
        (key, 0): (42, epoch, "m", NONE),
        (key, 1): (-1, -1, "", NONE),
        (key, 7): (-1, -1, "", NONE),
        (key, -1): (-1, -1, "", NONE),
        (absent, 0): (-1, -1, "", ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else NONE),
    }
    # In the answer, unknown ids come last; names come in the order of the request.
    in_order = [topic for topic, _ in await fetched(node, version, [(missing, (0,)), (topic, (0,))])]
    assert in_order == ([key, absent] if version >= 10 else [absent, key])
    assert await fetched(node, version, [(topic, (0,))], group_id="") == {(key, 0): (-1, -1, "", NONE)}


@pytest.mark.parametrize("version", range(2, 11))
async def test_null_topics_fetch_all_offsets(node: GroupNode, version: int) -> None:
    first, second = await node.create_topic("a", 2), await node.create_topic("b")
    await node.ask(commit_request(first, partition(0, 1), partition(1, 2)), 9)
    await node.ask(commit_request(second, partition(0, 3)), 9)
    got = await fetched(node, version, None)
    keys: list[Any] = [first.topic_id, second.topic_id] if version >= 10 else ["a", "b"]
    assert {key: offset for key, (offset, *_) in got.items()} == {(keys[0], 0): 1, (keys[0], 1): 2, (keys[1], 0): 3}
    assert await fetched(node, version, None, group_id="unknown") == {}
    assert await fetched(node, version, []) == {}


async def test_many_groups_are_fetched_at_once_and_fail_alone(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    other = next(name for name in "abcdef" if node.leases.shard_of(name) != node.leases.shard_of(G))
    await node.ask(commit_request(topic, partition(0, 5)), 9)
    await lose_lease(node, other)
    groups = tuple(
        OffsetFetchRequestGroup(group_id=group_id, topics=(OffsetFetchRequestTopics(name="t", partition_indexes=(0,)),))
        for group_id in (other, G)
    )
    answer = await node.ask(OffsetFetchRequest(groups=groups), 8)
    assert [(group.group_id, group.error_code) for group in answer.groups] == [
        (other, ErrorCode.NOT_COORDINATOR),
        (G, NONE),
    ]
    assert answer.groups[1].topics[0].partitions[0].committed_offset == 5


async def test_all_offsets_of_a_group_are_answered_once(node: GroupNode) -> None:
    """The group may have very many offsets, and a request may name it very many times."""
    topic = await node.create_topic("t", 2)
    await node.ask(commit_request(topic, partition(0, 5), partition(1, 6)), 8)
    everything = OffsetFetchRequestGroup(group_id=G, topics=None)
    asked = (OffsetFetchRequestTopics(name="t", partition_indexes=(1,)),)
    one = OffsetFetchRequestGroup(group_id=G, topics=asked)
    answer = await node.ask(OffsetFetchRequest(groups=(everything, one, everything, one)), 8)
    found = [{part.committed_offset for topic in group.topics for part in topic.partitions} for group in answer.groups]
    assert found == [{5, 6}, {6}, {6}]


@pytest.mark.parametrize(("member_id", "epoch"), [("nobody", -1), ("nobody", 3), ("", 3)])
async def test_offset_fetch_of_a_classic_group_ignores_the_member(node: GroupNode, member_id: str, epoch: int) -> None:
    """@platformatic/kafka names its member with epoch -1 in OffsetFetch."""
    topic = await node.create_topic("t")
    await node.ask(commit_request(topic, partition(0, 5)), 9)
    asked = OffsetFetchRequestGroup(
        group_id=G,
        member_id=member_id,
        member_epoch=epoch,
        topics=(OffsetFetchRequestTopics(name="t", partition_indexes=(0,)),),
    )
    (group,) = (await node.ask(OffsetFetchRequest(groups=(asked,)), 9)).groups
    assert group.error_code == NONE
    assert group.topics[0].partitions[0].committed_offset == 5


DRAIN = replace(QUICK, handoff=HandoffSettings(HandoffMode.DRAIN, 30_000))


async def hand_over(node: GroupNode, *partitions: int) -> Topic:
    """Let the leader assign all partitions of a topic to one member, and then to the member on connection c2, which
    waits for them."""
    topic = await node.create_topic("t", len(partitions))
    told = encode_subscription(Subscription(1, ("t",)))
    share, nothing = (encode_assignment(Assignment(1, each)) for each in ((TopicPartition("t", partitions),), ()))
    one, two = (node.member(G, name, metadata=told) for name in ("c1", "c2"))
    await settle(one, two)
    for first, second in ((share, nothing), (nothing, share)):
        await asyncio.gather(one.join(), two.join())
        leader, follower = (one, two) if one.members else (two, one)
        follower.sync()
        await reply_of(leader.sync({one.member_id: first, two.member_id: second}))
    return topic


@pytest.mark.parametrize("version", [9, 10])
async def test_new_owner_waits_also_for_a_group_that_is_not_in_memory(database_url: str, version: int) -> None:
    """A waiting member asks again and again. After a change of the coordinator its OffsetFetch is often the first
    request for the group there. From version 10 on, it names topics by their ids."""
    await forget_everything(database_url)
    async with group_node(database_url, settings=DRAIN) as node:
        topic = await hand_over(node, 0)
        named = topic.topic_id if version >= 10 else "t"
        unsettled = {(named, 0): (-1, -1, "", ErrorCode.UNSTABLE_OFFSET_COMMIT)}
        assert await fetched(node, version, [(topic, (0,))]) == unsettled
        node.groups.shard_lost(node.leases.shard_of(G))
        assert G not in node.groups.group_ids()
        assert await fetched(node, version, [(topic, (0,))]) == unsettled


@pytest.mark.parametrize("version", [7, 10])
async def test_read_without_require_stable_ends_the_wait_for_the_requested_partition_alone(
    database_url: str, version: int
) -> None:
    await forget_everything(database_url)
    async with group_node(database_url, settings=DRAIN) as node:
        topic = await hand_over(node, 0, 1)
        if version >= MANY_GROUPS_FROM:
            named = OffsetFetchRequestTopics(name="t", topic_id=topic.topic_id, partition_indexes=(1,))
            request = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=G, topics=(named,)),))
        else:
            only = OffsetFetchRequestTopic(name="t", partition_indexes=(1,))
            request = OffsetFetchRequest(group_id=G, topics=(only,))
        await node.ask(request, version, connection="c2")
        await node.groups.view(G)
        assert await fetched(node, 9, [(topic, (0, 1))]) == {
            ("t", 0): (-1, -1, "", ErrorCode.UNSTABLE_OFFSET_COMMIT),
            ("t", 1): (-1, -1, "", NONE),
        }


@pytest.mark.parametrize("version", range(1, 8))
async def test_refused_offset_fetch_places_its_code_by_version(node: GroupNode, version: int) -> None:
    node.lease_clock.seconds += 3600
    request = OffsetFetchRequest(group_id=G, topics=(OffsetFetchRequestTopic(name="t", partition_indexes=(0, 1)),))
    answer = await node.ask(request, version)
    if version >= 2:
        assert answer.error_code == ErrorCode.NOT_COORDINATOR
    # aiokafka ignores the code at the top level, and librdkafka asks again only for partitions that are named.
    code = ErrorCode.NOT_COORDINATOR if version < 7 else ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert codes(answer) == [(0, code), (1, code)]


@pytest.mark.parametrize("version", COMMIT_VERSIONS)
async def test_unknown_topics_and_partitions_are_refused_one_by_one(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t")
    request = OffsetCommitRequest(
        group_id=G,
        topics=(
            OffsetCommitRequestTopic(name="missing", topic_id=uuid.uuid4(), partitions=(partition(0, 1),)),
            OffsetCommitRequestTopic(
                name="t", topic_id=topic.topic_id, partitions=(partition(0, 7), partition(1, 8), partition(-1, 9))
            ),
        ),
    )
    missing = ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert codes(await node.ask(request, version)) == [(0, missing), (0, NONE), (1, unknown), (-1, unknown)]
    assert {key: offset for key, (offset, *_) in (await fetched(node, 9, None)).items()} == {("t", 0): 7}


async def test_partitions_that_another_node_has_just_added_are_known(node: GroupNode) -> None:
    """This node has not heard of them. A partition that it took for unknown would have no committed offset."""
    topic = await node.create_topic("t")
    assert codes(await node.ask(commit_request(topic, partition(0, 5)), 9)) == [(0, NONE)]
    grown = await node.topics.create_partitions(topic.topic_id, 2)
    assert isinstance(grown, Topic)
    assert codes(await node.ask(commit_request(topic, partition(1, 6)), 9)) == [(1, NONE)]
    again = await node.topics.create_partitions(topic.topic_id, 3)
    assert isinstance(again, Topic)
    lease = node.leases.lease_for(G)
    assert lease is not None
    commit = OffsetCommit(lease, G, -1, topic.topic_id, 2, 7, -1, "")
    assert await node.offsets.commit([commit]) == [None]
    assert (await fetched(node, 9, [(topic, (2,))]))["t", 2][0] == 7


async def test_commit_of_no_partition_does_not_reach_the_group(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(node.groups, "submit", lambda *request: asked.append(request))
    missing = Topic(uuid.uuid4(), "missing", False, {}, ())
    request = commit_request(missing, partition(0, 1), generation_id_or_member_epoch=5, member_id="nobody")
    assert codes(await node.ask(request, 9)) == [(0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]
    assert (await node.ask(OffsetCommitRequest(group_id=G), 9)).topics == ()
    assert asked == []


async def test_metadata_is_counted_in_utf_16_units(node: GroupNode) -> None:
    topic = await node.create_topic("t", 3)
    request = commit_request(
        topic,
        partition(0, 1, metadata="\U0001f600" * 2049),
        partition(1, 2, metadata="\U0001f600" * 2048),
        partition(2, 3, metadata="ä" * 4096),
    )
    assert codes(await node.ask(request, 9)) == [(0, ErrorCode.OFFSET_METADATA_TOO_LARGE), (1, NONE), (2, NONE)]


async def test_too_long_metadata_fails_its_partition_alone(node: GroupNode) -> None:
    topic = await node.create_topic("t", 3)
    request = commit_request(
        topic, partition(0, 1, metadata="x" * 4097), partition(1, 2, metadata="y" * 4096), partition(2, 3)
    )
    assert codes(await node.ask(request, 9)) == [(0, ErrorCode.OFFSET_METADATA_TOO_LARGE), (1, NONE), (2, NONE)]
    got = await fetched(node, 9, None)
    assert set(got) == {("t", 1), ("t", 2)}
    assert got["t", 1][2] == "y" * 4096


@pytest.mark.parametrize(
    ("given", "version", "code"),
    [
        ({"generation_id_or_member_epoch": 3, "member_id": "m"}, 8, ErrorCode.ILLEGAL_GENERATION),
        ({"generation_id_or_member_epoch": 3, "member_id": "m"}, 9, ErrorCode.GROUP_ID_NOT_FOUND),
        ({}, 8, NONE),
        ({"generation_id_or_member_epoch": -1, "member_id": "m"}, 8, NONE),
        ({"generation_id_or_member_epoch": -7}, 8, NONE),
    ],
)
async def test_commits_to_a_missing_group(
    node: GroupNode, given: dict[str, Any], version: int, code: ErrorCode
) -> None:
    topic = await node.create_topic("t", 2)
    answer = await node.ask(commit_request(topic, partition(0, 1), partition(1, 2), **given), version)
    assert codes(answer) == [(0, code), (1, code)]
    stored = await node.stored(G)
    assert (stored is not None and stored.state.value == "Empty" and stored.protocol_type is None) is (code is NONE)


async def test_commit_of_an_unknown_member_is_refused(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    member = node.member(G, "c1")
    await settle(member)

    async def commit(offset: int, **given: Any) -> int:
        return codes(await node.ask(commit_request(topic, partition(0, offset), **given), 9))[0][1]

    mine: dict[str, Any] = {"member_id": member.member_id, "generation_id_or_member_epoch": 1}
    assert await commit(1, **mine) == NONE
    assert await commit(2, **{**mine, "generation_id_or_member_epoch": 0}) == ErrorCode.ILLEGAL_GENERATION
    assert await commit(3, **{**mine, "member_id": "nobody"}) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit(4) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit(5, **{**mine, "group_instance_id": "i"}) == ErrorCode.UNKNOWN_MEMBER_ID
    assert (await fetched(node, 9, None))["t", 0][0] == 1

    assert (await member.join()).generation_id == 2
    mine["generation_id_or_member_epoch"] = 2
    assert await commit(6, **mine) == ErrorCode.REBALANCE_IN_PROGRESS
    assert (await reply_of(member.sync({}))).error is NONE
    held = node.member(G, "c2").join()
    assert await commit(7, **mine) == NONE
    held.cancel()
    assert (await fetched(node, 9, None))["t", 0][0] == 7


async def test_commit_overtaken_by_the_next_generation_is_fenced_by_postgres(
    node: GroupNode, database_url: str
) -> None:
    topic = await node.create_topic("t")
    first = node.member(G, "c1")
    await settle(first)
    request = commit_request(topic, partition(0, 9), member_id=first.member_id, generation_id_or_member_epoch=1)
    async with locked_group(database_url, G) as lock:
        committing = asyncio.create_task(node.ask(request, 9))
        await write_is_waiting(lock)
        await lock.execute("update consumer_group set generation_id = 2 where group_id = $1", G)
    assert codes(await committing) == [(0, ErrorCode.ILLEGAL_GENERATION)]
    assert await fetched(node, 9, None) == {}


async def test_commit_without_identity_is_refused_after_members_joined(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    await node.ask(commit_request(topic, partition(0, 1)), 9)
    async with locked_group(database_url, G) as lock:
        committing = asyncio.create_task(node.ask(commit_request(topic, partition(0, 9)), 9))
        await write_is_waiting(lock)
        await lock.execute(
            "insert into group_member (group_id, member_id, member_epoch, document) values ($1, 'm', 0, '{}')", G
        )
    assert codes(await committing) == [(0, ErrorCode.UNKNOWN_MEMBER_ID)]


@pytest.mark.parametrize("version", COMMIT_VERSIONS)
async def test_clients_retention_time_is_kept_if_the_version_has_it(node: GroupNode, version: int) -> None:
    topic = await node.create_topic("t", 3)
    await node.ask(commit_request(topic, partition(0, 1), retention_time_ms=1_000), version)
    await node.ask(commit_request(topic, partition(1, 1), retention_time_ms=2**63 - 1), version)
    await node.ask(commit_request(topic, partition(2, 1), retention_time_ms=0), version)
    rows = await node.database.hot.fetch(
        "select expire_timestamp_ms - commit_timestamp_ms as ms, expire_timestamp_ms from committed_offset"
        " order by partition_index"
    )
    if version <= 4:
        assert rows[0]["ms"] == 1_000
        assert rows[1]["expire_timestamp_ms"] == 2**63 - 1
        assert rows[2]["ms"] == 0
    else:
        assert [row["expire_timestamp_ms"] for row in rows] == [None] * 3


async def test_recreated_topic_does_not_inherit_offsets(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    await node.ask(commit_request(topic, partition(0, 5)), 9)
    await node.topics.delete(topic.topic_id)
    node.services.catalog.remove(topic.topic_id)
    successor = await node.create_topic("t")
    node.services.catalog.apply(successor)
    assert await fetched(node, 9, [(successor, (0,))]) == {("t", 0): (-1, -1, "", NONE)}
    assert await fetched(node, 10, [(topic, (0,))]) == {(topic.topic_id, 0): (-1, -1, "", ErrorCode.UNKNOWN_TOPIC_ID)}
    assert await fetched(node, 9, None) == {}


async def test_commit_without_postgres_is_answered_as_retriable(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    await node.ask(commit_request(topic, partition(0, 5)), 9)

    async def gone(_: object) -> object:
        raise StorageUnavailable("gone")

    monkeypatch.setattr(node.offsets, "commit", gone)
    answer = await node.ask(commit_request(topic, partition(0, 6), partition(7, 1)), 9)
    assert codes(answer) == [(0, ErrorCode.COORDINATOR_NOT_AVAILABLE), (7, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which every query to Postgres is added, of any pool."""
    asked: list[object] = []
    run = Pool.run

    async def counted(pool: Pool, work: Any) -> Any:
        asked.append(work)
        return await run(pool, work)

    monkeypatch.setattr(Pool, "run", counted)
    return asked


@pytest.mark.parametrize("version", [8, 9, 10])
async def test_offset_fetch_of_many_groups_takes_few_queries(
    node: GroupNode, version: int, questions: list[object]
) -> None:
    """Topics that do not exist, and requests that name their members, also share queries."""
    topic = await node.create_topic("t", 2)
    # Another test may have moved a shard to another node.
    group_ids = [group_id for group_id in map(str, range(1000)) if node.leases.lease_for(group_id) is not None][:250]
    committed = {group_ids[number]: number for number in (0, 1, 99, 100, 249)}
    for group_id, offset in committed.items():
        await node.ask(commit_request(topic, partition(1, offset), group_id=group_id), 9)
    named = {"member_id": "m", "member_epoch": 3} if version >= 9 else {}
    asked = tuple(
        OffsetFetchRequestTopics(name=name, topic_id=topic_id, partition_indexes=(0, 1))
        for name, topic_id in (("missing", uuid.uuid4()), ("t", topic.topic_id))
    )
    groups = tuple(
        OffsetFetchRequestGroup(group_id=group_id, topics=None if number % 2 else asked, **named)
        for number, group_id in enumerate(group_ids)
    )
    questions.clear()
    answer = await node.ask(OffsetFetchRequest(groups=(*groups, groups[0])), version)
    assert len(questions) < 30
    assert [group.group_id for group in answer.groups] == [*group_ids, group_ids[0]]
    for group in answer.groups:
        offset = committed.get(group.group_id)
        found = {
            (each.topic_id if version >= 10 else each.name, part.partition_index): part.committed_offset
            for each in group.topics
            for part in each.partitions
            if not part.error_code and part.committed_offset != -1
        }
        key = topic.topic_id if version >= 10 else "t"
        assert (group.error_code, found) == (NONE, {} if offset is None else {(key, 1): offset})
        if group_ids.index(group.group_id) % 2 == 0:
            assert [len(each.partitions) for each in group.topics] == [2, 2]


# --- OffsetDelete ---------------------------------------------------------------------------------------------------


def delete_request(*topics: tuple[str, tuple[int, ...]], group_id: str = G) -> OffsetDeleteRequest:
    return OffsetDeleteRequest(
        group_id=group_id,
        topics=tuple(
            OffsetDeleteRequestTopic(
                name=name, partitions=tuple(OffsetDeleteRequestPartition(partition_index=index) for index in indexes)
            )
            for name, indexes in topics
        ),
    )


async def test_offsets_of_an_empty_group_are_deleted(node: GroupNode) -> None:
    topic = await node.create_topic("t", 3)
    await node.ask(commit_request(topic, partition(0, 1), partition(1, 2)), 9)
    answer = await node.ask(delete_request(("t", (0, 2, 9)), ("missing", (0,))), 0)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (answer.error_code, codes(answer)) == (NONE, [(0, NONE), (2, NONE), (9, unknown), (0, unknown)])
    assert set(await fetched(node, 9, None)) == {("t", 1)}


async def test_offsets_of_subscribed_topics_stay(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    member = node.member(G, "c1", metadata=encode_subscription(Subscription(1, ("t",), b"")))
    await settle(member)
    mine = {"member_id": member.member_id, "generation_id_or_member_epoch": 1}
    await node.ask(commit_request(topic, partition(0, 1), **mine), 9)
    answer = await node.ask(delete_request(("t", (0,))), 0)
    assert (answer.error_code, codes(answer)) == (NONE, [(0, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC)])
    assert set(await fetched(node, 9, None)) == {("t", 0)}


async def test_offsets_of_unsubscribed_topics_can_be_deleted(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    member = node.member(G, "c1", metadata=encode_subscription(Subscription(1, ("another",), b"")))
    await settle(member)
    mine = {"member_id": member.member_id, "generation_id_or_member_epoch": 1}
    await node.ask(commit_request(topic, partition(0, 1), **mine), 9)
    assert codes(await node.ask(delete_request(("t", (0,))), 0)) == [(0, NONE)]
    assert await fetched(node, 9, None) == {}


async def test_subscriptions_of_other_protocol_types_are_unknown(node: GroupNode) -> None:
    await node.create_topic("t")
    await settle(node.member(G, "c1", protocol_type="connect"))
    answer = await node.ask(delete_request(("t", (0,))), 0)
    assert (answer.error_code, answer.topics) == (ErrorCode.NON_EMPTY_GROUP, ())


@pytest.mark.parametrize(
    ("group_id", "code"), [("", ErrorCode.INVALID_GROUP_ID), ("missing", ErrorCode.GROUP_ID_NOT_FOUND)]
)
async def test_offset_delete_from_a_missing_group_is_refused(node: GroupNode, group_id: str, code: ErrorCode) -> None:
    await node.create_topic("t")
    answer = await node.ask(delete_request(("t", (0,)), group_id=group_id), 0)
    assert (answer.error_code, answer.topics) == (code, ())


# --- group commit ---------------------------------------------------------------------------------------------------


def row(node: GroupNode, topic: Topic, offset: int, *, group_id: str = G, index: int = 0) -> OffsetCommit:
    lease = node.leases.lease_for(group_id)
    assert lease is not None
    return OffsetCommit(lease, group_id, -1, topic.topic_id, index, offset, -1, "")


async def test_commits_during_a_transaction_share_the_next_one(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    committer = OffsetCommitter(node.offsets)
    await committer.submit([row(node, topic, 0)])
    calls: list[int] = []
    commit = node.offsets.commit

    async def counted(commits: Any) -> Any:
        calls.append(len(commits))
        return await commit(commits)

    node.offsets.commit = counted  # type: ignore[method-assign]
    async with locked_group(database_url, G) as lock:
        first = committer.submit([row(node, topic, 1)])
        await write_is_waiting(lock)
        others = [committer.submit([row(node, topic, offset), row(node, topic, 7, index=9)]) for offset in range(2, 50)]
        assert not first.done()
    assert await first == [None]
    assert await asyncio.gather(*others) == [[None, Refusal.UNKNOWN_PARTITION]] * 48
    assert calls == [1, 96]
    assert [committed.committed_offset for committed in await node.offsets.fetch(G)] == [49]


async def test_a_transaction_takes_whole_requests_up_to_its_limit(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    committer = OffsetCommitter(node.offsets, max_rows=3, max_rows_queued=12)
    await committer.submit([row(node, topic, 0)])
    calls: list[int] = []
    commit = node.offsets.commit

    async def counted(commits: Any) -> Any:
        calls.append(len(commits))
        return await commit(commits)

    node.offsets.commit = counted  # type: ignore[method-assign]
    async with locked_group(database_url, G) as lock:
        waiting = [committer.submit([row(node, topic, 1)])]
        await write_is_waiting(lock)
        waiting += [committer.submit([row(node, topic, 2)] * count) for count in (2, 2, 1, 7)]
        with pytest.raises(KafkaError) as refused:
            committer.submit([row(node, topic, 3)])
        assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    await asyncio.gather(*waiting)
    assert calls == [1, 2, 3, 7]


async def test_a_second_try_does_not_overwrite_a_later_commit(node: GroupNode) -> None:
    topic = await node.create_topic("t", 2)
    committer = OffsetCommitter(node.offsets)
    number = committer.next_number()
    fenced = replace(row(node, topic, 1), generation_id=5)
    assert await committer.submit([fenced], number) == [Refusal.ILLEGAL_GENERATION]
    assert await committer.submit([row(node, topic, 2)]) == [None]
    again = [row(node, topic, 1), row(node, topic, 1, index=1)]
    assert await committer.submit(again, number, again=True) == [None, None]
    assert {each.partition_index: each.committed_offset for each in await node.offsets.fetch(G)} == {0: 2, 1: 1}


async def test_a_second_try_in_the_transaction_of_a_later_commit_does_not_overwrite_it(
    node: GroupNode, database_url: str
) -> None:
    topic = await node.create_topic("t", 2)
    committer = OffsetCommitter(node.offsets)
    await committer.submit([row(node, topic, 0)])
    number = committer.next_number()
    async with locked_group(database_url, G) as lock:
        blocked = committer.submit([row(node, topic, 1, index=1)])
        await write_is_waiting(lock)
        later = committer.submit([row(node, topic, 3)])
        again = committer.submit([row(node, topic, 2)], number, again=True)
    assert await asyncio.gather(blocked, later, again) == [[None]] * 3
    assert {each.partition_index: each.committed_offset for each in await node.offsets.fetch(G)} == {0: 3, 1: 1}


async def test_partitions_remembered_for_retries_are_bounded(node: GroupNode) -> None:
    topic = await node.create_topic("t", 4)
    committer = OffsetCommitter(node.offsets, max_remembered=3)
    first = committer.next_number()
    for index in range(4):
        assert await committer.submit([row(node, topic, 2, index=index)]) == [None]
    assert await committer.submit([row(node, topic, 1, index=index) for index in range(4)], first, again=True)
    offsets = {each.partition_index: each.committed_offset for each in await node.offsets.fetch(G)}
    assert offsets == {0: 1, 1: 2, 2: 2, 3: 2}, "the one stored first is forgotten"


async def test_drain_waits_for_running_and_queued_commits(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    committer = OffsetCommitter(node.offsets)
    await committer.submit([row(node, topic, 0)])
    async with locked_group(database_url, G) as lock:
        first = committer.submit([row(node, topic, 1)])
        await write_is_waiting(lock)
        second = committer.submit([row(node, topic, 2)])
        draining = asyncio.create_task(committer.drain())
        await asyncio.sleep(0)
        assert not draining.done()
    await draining
    assert (first.result(), second.result()) == ([None], [None])


async def test_a_request_beyond_every_limit_is_taken_when_nothing_waits(node: GroupNode) -> None:
    topic = await node.create_topic("t")
    committer = OffsetCommitter(node.offsets, max_rows=1, max_rows_queued=2)
    assert await committer.submit([row(node, topic, offset) for offset in range(3)]) == [None] * 3


async def test_row_that_postgres_refuses_fails_alone(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    committer = OffsetCommitter(node.offsets)
    await committer.submit([row(node, topic, 0)])
    async with locked_group(database_url, G) as lock:
        first = committer.submit([row(node, topic, 1)])
        await write_is_waiting(lock)
        bad = committer.submit([row(node, topic, 2**70)])
        good = committer.submit([row(node, topic, 3)])
    assert await first == [None]
    with pytest.raises(StorageError):
        await bad
    assert await good == [None]


async def test_outage_fails_all_waiting_commits_and_the_next_is_tried(node: GroupNode, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with group_node(database_url, port=9093, statement_timeout_ms=1_000) as impatient:
        committer = OffsetCommitter(impatient.offsets)
        await committer.submit([row(node, topic, 0)])
        async with locked_group(database_url, G):
            waiting = [committer.submit([row(node, topic, offset)]) for offset in (1, 2)]
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, StorageUnavailable)
        assert await committer.submit([row(node, topic, 3)]) == [None]
        await committer.drain()
