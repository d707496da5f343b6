"""eligible.leader.replicas.version 0 on a real Postgres: which replicas are stored as in sync, and what clients see of
that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import pytest

from gateway.apis.delete_records import delete_records
from gateway.apis.offset_for_leader_epoch import offset_for_leader_epoch
from gateway.cluster.in_sync import FEATURE
from gateway.cluster.jobs import Job
from gateway.operate import in_sync_replicas as module
from gateway.operate.in_sync_replicas import InSyncReplicas
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from storage.nodes import NodeStore
from storage.types import Assignment, CoordinatorLease, LeaseKind
from tests.gateway.admin import AdminNode
from tests.gateway.apis.test_replicas import (
    NOT_NEEDED,
    PREFERRED,
    UNCLEAN,
    assigned,
    back,
    elect,
    gone,
    reassign,
    see_each_other,
    shown,
    three,
)
from tests.gateway.data_plane import batch_of, data_plane

TTL_MS = 60_000
NONE = (ErrorCode.NONE, None)
NOBODY = (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "Eligible topic partition leaders are not available.")
UNAVAILABLE = (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
LAST = DeleteRecordsPartition(partition_index=0, offset=-1)


async def lease_of(node: AdminNode) -> CoordinatorLease:
    """Acquire the job's lease, which no other node may have."""
    store: NodeStore = node.membership._store  # noqa: SLF001
    (lease,) = await store.acquire_leases(node.membership.node_id, [Job.METADATA], TTL_MS, LeaseKind.JOBS)
    return lease


async def job(node: AdminNode) -> InSyncReplicas:
    lease = await lease_of(node)
    return InSyncReplicas(node.topics, node.catalog, lambda: node.membership.leaders, lambda: lease)


async def level(node: AdminNode, level: int, *others: AdminNode) -> None:
    """Set the level by UpdateFeatures, and wait until all nodes know it."""
    update = FeatureUpdateKey(feature=FEATURE, max_version_level=level, upgrade_type=1 if level else 2)
    answer = await node.ask(ApiKey.UPDATE_FEATURES, UpdateFeaturesRequest(feature_updates=(update,)), 1)
    assert answer.error_code == ErrorCode.NONE, answer
    await see_each_other(others)


@asynccontextmanager
async def three_at_0(url: str) -> AsyncIterator[tuple[list[AdminNode], InSyncReplicas]]:
    """Start nodes 1 to 3 at level 0, and the job, which node 1 runs."""
    async with three(url) as nodes:
        await level(nodes[0], 0, *nodes)
        yield nodes, await job(nodes[0])


async def after(run: InSyncReplicas, *nodes: AdminNode, topic: str = "named") -> list[tuple[object, ...]]:
    """Run a pass; return what every node shows of the topic: leaders, replicas, in sync, offline."""
    await run.run()
    seen = [await shown(node, topic) for node in nodes]
    assert all(each == seen[0] for each in seen)
    return list(seen[0])


async def test_dead_node_leaves_the_in_sync_set_and_rejoins_it(database_url: str) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await one.create("placed", 3)
        assert await after(run, one, two, three_) == [(3, (3, 2), (3, 2), ())]
        await gone(three_, one, two)
        assert await shown(two, "named") == [(2, (3, 2), (3, 2), (3,))], "nobody has written it down yet"
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))]
        await back(three_, one, two)
        assert (await shown(two, "named"))[0][0] == 2, "who is not in sync does not lead"
        assert await after(run, one, two, three_) == [(3, (3, 2), (3, 2), ())]
        assert all(each[0] > 0 for each in await shown(one, "placed"))


async def test_partition_has_no_leader_until_an_in_sync_replica_returns(database_url: str) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await gone(two, one, three_)
        assert await after(run, one, three_) == [(3, (3, 2), (3,), (2,))]
        await gone(three_, one)
        assert await after(run, one) == [(-1, (3, 2), (3,), (3, 2))], "the last one stays in sync"
        metadata = MetadataRequest(topics=(MetadataRequestTopic(name="named"),))
        for version in (1, 5, 6, 12):
            (topic,) = (await one.ask(ApiKey.METADATA, metadata, version)).topics
            assert topic.partitions[0].error_code == ErrorCode.LEADER_NOT_AVAILABLE
        asked = DescribeTopicPartitionsRequest(topics=(TopicRequest(name="named"),))
        (topic,) = (await one.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, asked, 0)).topics
        assert topic.partitions[0].error_code == ErrorCode.NONE, "as upstream's"
        await back(two, one)
        assert await after(run, one, two) == [(-1, (3, 2), (3,), (3,))]
        await back(three_, one, two)
        assert await after(run, one, two, three_) == [(3, (3, 2), (3, 2), ())]


async def test_unclean_election_takes_any_live_replica(database_url: str) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2), (3, 1))
        await gone(two, one, three_)
        await run.run()
        await gone(three_, one)
        assert [each[0] for each in await after(run, one)] == [-1, 1]
        assert await elect(one, {"named": (0, 1, 2)}, UNCLEAN) == {
            "named": {
                0: NOBODY,
                1: NOT_NEEDED,
                2: (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "No such partition."),
            }
        }
        await back(two)
        # Node 1 does not know yet that node 2 is back, and checks.
        assert await elect(one, {"named": (0,)}, PREFERRED) == {"named": {0: UNAVAILABLE}}
        assert await elect(one, None, UNCLEAN) == {"named": {0: NONE}}
        assert await shown(one, "named") == [(2, (3, 2), (2,), (3,)), (1, (3, 1), (1,), (3,))]
        await back(three_, one, two)
        assert await elect(one, {"named": (0,)}, PREFERRED) == {"named": {0: UNAVAILABLE}}, "it is not in sync yet"
        assert await after(run, one, two, three_) == [(2, (3, 2), (3, 2), ()), (3, (3, 1), (3, 1), ())]
        assert await elect(one, {"named": (0,)}, PREFERRED) == {"named": {0: NONE}}
        assert [each[0] for each in await shown(two, "named")] == [3, 3]


@pytest.mark.parametrize("broker", [False, True], ids=["topic", "broker"])
async def test_a_topic_may_have_any_leader_rather_than_none(database_url: str, broker: bool) -> None:
    setting = {"unclean.leader.election.enable": "true"}
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await gone(two, one, three_)
        await run.run()
        await gone(three_, one)
        await back(two, one)
        assert await after(run, one, two) == [(-1, (3, 2), (3,), (3,))]
        if broker:
            await one.topics.set_broker_configs(setting)
        else:
            topic = one.catalog.get("named")
            assert topic is not None
            await one.topics.set_configs(topic.topic_id, setting)
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))]


async def test_a_reassignment_has_its_replicas_in_sync(database_url: str) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await gone(two, one, three_)
        await run.run()
        await gone(three_, one)
        await back(two, one)
        assert await after(run, one, two) == [(-1, (3, 2), (3,), (3,))]
        assert await reassign(one, "named", (0, (3, 1, 2))) == [NONE]
        assert await after(run, one, two) == [(1, (3, 1, 2), (1, 2), (3,))]


async def test_level_1_has_no_out_of_sync_replicas(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOWED_AT_ONCE", 2)
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", *[(3, 2)] * 5)
        await gone(two, one, three_)
        assert await after(run, one, three_) == [(3, (3, 2), (3,), (2,))] * 5
        await gone(three_, one)
        await back(two, one)
        await level(one, 1, two)
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))] * 5
        revision = await one.topics.revision()
        await run.run()
        assert await one.topics.revision() == revision, "there was nothing to do"
        await level(two, 0, one)
        assert await shown(two, "named") == [(2, (3, 2), (3, 2), (3,))] * 5, "it begins with all"
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))] * 5


async def test_pass_writes_only_changes(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2), (1, 2))
        await gone(three_, one, two)
        before = await one.topics.revision()
        await run.run()
        assert await one.topics.revision() == before + 1
        await run.run()
        with monkeypatch.context() as patched:
            patched.setattr(one.catalog, "topics", None)
            await run.run()  # the pass reads nothing, because nothing has changed
        assert await one.topics.revision() == before + 1
        await assigned(one, "later", (2, 1))
        await gone(two, one)
        assert await after(run, one, topic="later") == [(1, (2, 1), (1,), (2,))]


async def test_concurrent_change_is_not_overwritten(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await gone(three_, one, two)
        write = one.topics.set_in_sync

        async def later(followed: module.Followed, lease: CoordinatorLease) -> Sequence[object]:
            assert await reassign(two, "named", (0, (3, 2, 1))) == [NONE]
            return await write(followed, lease)

        with monkeypatch.context() as patched:
            patched.setattr(one.topics, "set_in_sync", later)
            await run.run()
        assert await shown(two, "named") == [(2, (3, 2, 1), (3, 2, 1), (3,))]
        assert await after(run, one, two) == [(2, (3, 2, 1), (2, 1), (3,))], "the next pass looks again"


async def test_pass_without_its_lease_writes_nothing(database_url: str) -> None:
    async with three_at_0(database_url) as ((one, two, three_), run):
        await assigned(one, "named", (3, 2))
        await gone(three_, one, two)
        store: NodeStore = one.membership._store  # noqa: SLF001
        await store.release_leases(one.membership.node_id, {Job.METADATA: two.membership.node_id}, LeaseKind.JOBS)
        by_two = await job(two)
        await run.run()
        assert await shown(one, "named") == [(2, (3, 2), (3, 2), (3,))]
        assert await after(by_two, one, two) == [(2, (3, 2), (2,), (3,))]
        await level(two, 1, one)
        await run.run()
        (known,) = [part.assignment for part in (await one.topics.changes(0)).topics[0].partitions]
        assert known == Assignment((3, 2), None, (2,))


async def test_pass_without_a_lease_runs_again_later(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await level(one, 0, two, three_)
        await assigned(one, "named", (3, 2))
        await gone(three_, one, two)
        held: list[CoordinatorLease] = []
        run = InSyncReplicas(one.topics, one.catalog, lambda: one.membership.leaders, lambda: held[0] if held else None)
        assert await after(run, one, two) == [(2, (3, 2), (3, 2), (3,))]
        held.append(await lease_of(one))
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))]


async def test_first_node_after_a_full_outage_removes_no_replica_from_the_in_sync_set(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three_at_0(database_url) as ((one, two, three_), _):
        await assigned(one, "named", (3, 2))
        lease = await lease_of(one)
        knows = lambda: one.membership.knows_who_is_gone  # noqa: E731
        run = InSyncReplicas(one.topics, one.catalog, lambda: one.membership.leaders, lambda: lease, knows)
        sql = await asyncpg.connect(database_url)
        try:
            await sql.execute("update sluice.node set expires_at = '-infinity'")
        finally:
            await sql.close()
        await one.membership.renew()
        assert [node.node_id for node in one.membership.alive()] == [1]
        await run.run()
        assert await shown(one, "named") == [(-1, (3, 2), (3, 2), (3, 2))], "it only sees that they are not there"
        await back(two, one)
        await back(three_, one, two)
        assert await after(run, one, two, three_) == [(3, (3, 2), (3, 2), ())]
        await gone(three_, one, two)
        await run.run()
        assert await shown(two, "named") == [(2, (3, 2), (3, 2), (3,))], "three may be late"
        later_s = asyncio.get_running_loop().time() + TTL_MS / 1000
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later_s)
        assert await after(run, one, two) == [(2, (3, 2), (2,), (3,))]


async def test_partition_without_a_leader_is_not_served(database_url: str) -> None:
    async with data_plane(database_url) as node:
        topic, other = await node.create_topic("named"), await node.create_topic("placed")
        for each in (topic, other):
            assert (await node.send(each, batch_of(b"one"))).error_code == ErrorCode.NONE
        for found in await node.topics.assign({(topic.topic_id, 0): Assignment((7,))}):
            node.catalog.apply(found)

        async def answers(name: str) -> set[int]:
            asked = node.catalog.get(name)
            assert asked is not None
            epoch = OffsetForLeaderEpochRequest(
                topics=(OffsetForLeaderTopic(topic=name, partitions=(OffsetForLeaderPartition(partition=0),)),)
            )
            ended = await offset_for_leader_epoch(epoch, node.context(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4))
            deletion = DeleteRecordsRequest(topics=(DeleteRecordsTopic(name=name, partitions=(LAST,)),))
            deleted = await delete_records(deletion, node.context(ApiKey.DELETE_RECORDS, 2))
            return {
                (await node.send(asked, batch_of(b"two"))).error_code,
                (await node.fetch_one(asked, 0)).error_code,
                (await node.list_offset(asked, -1)).error_code,
                ended.topics[0].partitions[0].error_code,
                deleted.topics[0].partitions[0].error_code,
            }

        assert await node.list_offset(topic, -1) == await node.list_offset(other, -1)
        await node.membership.finalize({FEATURE: 0})
        assert await answers("named") == {ErrorCode.NOT_LEADER_OR_FOLLOWER}
        assert not node.membership.leads(node.catalog.topics()[0].partitions[0])
        assert (await node.send(other, batch_of(b"two"))).base_offset == 1
        await node.membership.finalize({FEATURE: 1})
        assert (await node.send(topic, batch_of(b"two"))).base_offset == 1, "nothing was lost, and nothing written"
