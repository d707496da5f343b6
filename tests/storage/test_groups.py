"""Groups: stored whole, fenced by the lease."""

from __future__ import annotations

import asyncio
import dataclasses

import asyncpg
import pytest

from storage.errors import StorageConflict
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.types import CoordinatorLease, GroupRecord, MemberRecord, OffsetCommit
from tests.storage.batches import until_blocked
from tests.storage.conftest import MakeTopic


def member(member_id: str, **changes: object) -> MemberRecord:
    return dataclasses.replace(
        MemberRecord(
            member_id=member_id,
            group_instance_id=None,
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=45_000,
            rebalance_timeout_ms=300_000,
            protocols=(("range", b"\0\1meta"), ("roundrobin", b"")),
            assignment=b"assigned",
        ),
        **changes,  # type: ignore[arg-type]
    )


def group(group_id: str = "g", **changes: object) -> GroupRecord:
    return dataclasses.replace(
        GroupRecord(
            group_id=group_id,
            state="Stable",
            state_timestamp_ms=1_700_000_000_000,
            protocol_type="consumer",
            protocol_name="range",
            generation_id=3,
            leader_id="m2",
            members=(member("m2"), member("m1", group_instance_id="instance-1")),
        ),
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def groups(database: Database) -> GroupStore:
    return GroupStore(database)


@pytest.mark.parametrize(
    "record",
    [
        group(),
        group(members=(), state="Empty", leader_id=None, protocol_name=None),
        group(members=(), state="Empty", leader_id=None, protocol_name=None, protocol_type=None, generation_id=0),
        group("", members=(member("m1", protocols=(), assignment=b""),)),
        group("nul\0and\u241b\u241b0\0", leader_id="\0", members=(member("\0", client_id="\0\u241b", client_host=""),)),
        group(members=tuple(member(f"m{i}", assignment=bytes([i % 256]) * 300) for i in range(300))),
    ],
    ids=["two members", "empty", "simple", "bare member", "odd strings", "many members"],
)
async def test_a_group_comes_back_as_it_was_saved(
    groups: GroupStore, leases: list[CoordinatorLease], record: GroupRecord
) -> None:
    await groups.save(record, leases[1])
    assert await groups.load(record.group_id) == record
    assert await groups.load_shard(1) == [record]
    assert await groups.load_shard(0) == []


async def test_saving_again_replaces_members_and_keeps_their_new_order(
    groups: GroupStore, leases: list[CoordinatorLease]
) -> None:
    await groups.save(group(), leases[0])
    changed = group(
        generation_id=4,
        leader_id="m3",
        members=(member("m3"), member("m2", assignment=b"other"), member("m4", protocols=())),
    )
    await groups.save(changed, leases[0])
    assert await groups.load("g") == changed


async def test_saving_what_is_stored_writes_no_member(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    await groups.save(group(), leases[0])
    before = await sql.fetch("select member_id, xmin::text from group_member order by 1")
    await groups.save(group(state_timestamp_ms=5), leases[0])
    assert await sql.fetch("select member_id, xmin::text from group_member order by 1") == before


async def test_listing_and_loading_by_shard(groups: GroupStore, leases: list[CoordinatorLease]) -> None:
    one, two = group("one"), group("two", members=(), state="Empty", protocol_type=None)
    await groups.save(two, leases[2])
    await groups.save(one, leases[2])
    assert await groups.load_shard(2) == [one, two]
    assert await groups.list() == [("one", "consumer", "Stable"), ("two", None, "Empty")]
    assert await groups.load("three") is None


async def test_a_lease_that_is_not_current_writes_nothing(groups: GroupStore, leases: list[CoordinatorLease]) -> None:
    await groups.save(group(), leases[0])
    lost = [
        dataclasses.replace(leases[0], lease_epoch=leases[0].lease_epoch - 1),
        dataclasses.replace(leases[0], lease_epoch=leases[0].lease_epoch + 1),
        dataclasses.replace(leases[0], node_id=99),
        dataclasses.replace(leases[0], shard=77),
    ]
    for lease in lost:
        with pytest.raises(StorageConflict):
            await groups.save(group(generation_id=9, members=()), lease)
        with pytest.raises(StorageConflict):
            await groups.delete("g", lease)
    assert await groups.load("g") == group()


async def test_a_former_coordinator_is_fenced_by_the_next(
    database: Database, groups: GroupStore, leases: list[CoordinatorLease]
) -> None:
    await groups.save(group(), leases[0])
    other = NodeStore(database)
    # The first node, in another process.
    await NodeStore(database).register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
    node_id = await other.register("localhost:9093", {"PLAINTEXT": ("localhost", 9093)}, None, 60_000)
    assert await other.acquire_leases(node_id, [0], 60_000) == [], "still held"
    await _expire_leases(database)
    (taken,) = await other.acquire_leases(node_id, [0], 60_000)
    assert taken.lease_epoch == leases[0].lease_epoch + 1
    with pytest.raises(StorageConflict):
        await groups.save(group(generation_id=4), leases[0])
    await groups.save(group(generation_id=4), taken)


async def _expire_leases(database: Database) -> None:
    await database.hot.fetch("update coordinator_lease set expires_at = clock_timestamp() - interval '1 s'")


async def test_deleting_a_group_takes_its_members_and_offsets(
    database: Database, groups: GroupStore, leases: list[CoordinatorLease], make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    for group_id in ("g", "h"):
        await groups.save(group(group_id), leases[0])
        assert await offsets.commit([OffsetCommit(leases[0], group_id, 3, topic.topic_id, 0, 7, -1, "", 1)]) == [None]
    assert await groups.delete("g", leases[0])
    assert not await groups.delete("g", leases[0])
    assert await groups.load("g") is None
    assert await offsets.fetch("g") == []
    assert len(await offsets.fetch("h")) == 1


async def test_a_new_generation_waits_for_commits_of_the_old_one_under_way(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    await groups.save(group(generation_id=1), leases[0])
    commit = OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 5, -1, "", 1)

    # A commit of generation 1 that has been judged and has not ended yet.
    async with database.hot.connection() as connection:
        transaction = connection.transaction()
        await transaction.__aenter__()
        await connection.fetchval(
            "select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
            [0], [leases[0].node_id], [leases[0].lease_epoch], ["g"], [1], [1], [topic.topic_id], [0], [5], [-1],
            [""], [1], [None],
        )  # fmt: skip
        save = asyncio.create_task(groups.save(group(generation_id=2), leases[0]))
        await until_blocked(sql, 1)
        assert not save.done()
        await transaction.__aexit__(None, None, None)
    await save
    assert [offset.committed_offset for offset in await offsets.fetch("g")] == [5]
    assert [str(refusal) for refusal in await offsets.commit([commit])] == ["Refusal.ILLEGAL_GENERATION"]


async def test_a_commit_that_comes_during_a_new_generations_save_is_refused(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    await groups.save(group(generation_id=1), leases[0])
    async with database.hot.connection() as connection, connection.transaction():
        await connection.execute("update consumer_group set generation_id = 2 where group_id = 'g'")
        commit = asyncio.create_task(offsets.commit([OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 5, -1, "", 1)]))
        await until_blocked(sql, 1)
    assert [str(refusal) for refusal in await commit] == ["Refusal.ILLEGAL_GENERATION"]
    assert await offsets.fetch("g") == []


async def test_people_see_members_and_lag_in_sql(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic("orders")
    await groups.save(group(), leases[0])
    await OffsetStore(database).commit([OffsetCommit(leases[0], "g", 3, topic.topic_id, 0, 5, -1, "", 1)])
    await sql.execute("update partition set next_offset = 12")
    assert await sql.fetch("select group_id, topic, partition, committed_offset, lag from consumer_lag") == [
        ("g", "orders", 0, 5, 7)
    ]
    assert await sql.fetch("select member_id, leader from consumer_group_member order by 1") == [
        ("m1", False),
        ("m2", True),
    ]
