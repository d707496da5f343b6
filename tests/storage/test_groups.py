"""Groups: changes are stored, many in one transaction, fenced by the lease."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from storage.errors import StorageConflict
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.queries import statement
from storage.types import CoordinatorLease, GroupRecord, MemberRecord, OffsetCommit, Saved
from tests.steps.waiting import until_blocked
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, load, member, save, whole


async def row_versions(sql: asyncpg.Connection) -> dict[str, str]:
    return {row[0]: row[1] for row in await sql.fetch("select member_id, xmin::text from group_member")}


@pytest.fixture
def groups(database: Database) -> GroupStore:
    return GroupStore(database)


@pytest.mark.parametrize(
    "record",
    [
        group(),
        group(members=(), state="Empty", document={}),
        group(members=(), state="Empty", protocol_type=None, generation_id=0, document={"a": [1, None, {"b": True}]}),
        group("", members=(MemberRecord("m1", {}),)),
        group("nul\0and\u241b\u241b0\0", document={"\0": ["\0\u241b"]}, members=(member("\0", client_id="\u241b0\0"),)),
        group(document={"looks like one": "\\u0000"}),
        group(members=tuple(member(f"m{i:03}", i, assignment="x" * 300) for i in range(300))),
    ],
    ids=["two members", "empty", "simple", "bare member", "odd strings", "escape", "many members"],
)
async def test_a_group_loads_as_it_was_saved(
    groups: GroupStore, leases: list[CoordinatorLease], record: GroupRecord
) -> None:
    await save(groups, record, leases[1])
    loaded = await load(groups, record.group_id)
    assert loaded is not None
    assert dataclasses.replace(loaded, members=_by_id(loaded.members)) == record
    shard = await groups.load_shard(1)
    assert [each.group_id for each in shard] == ([record.group_id] if record.members else [])
    assert await groups.load_shard(0) == []


def _by_id(members: Sequence[MemberRecord]) -> tuple[MemberRecord, ...]:
    return tuple(sorted(members, key=lambda each: each.member_id))


async def test_the_change_of_one_member_writes_one_row(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    """If N members acknowledge one after the other, N rows are written, not N times N."""
    record = group(members=tuple(member(f"m{i}") for i in range(20)))
    await save(groups, record, leases[0])
    before = await row_versions(sql)
    change = whole(record, leases[0], replaced=False, changed=(member("m7", 4),), gone=("m3", "never there"))
    assert await groups.save([change]) == [Saved.SAVED]
    after = await row_versions(sql)
    assert before.keys() - after.keys() == {"m3"}
    assert {key for key, version in after.items() if before[key] != version} == {"m7"}
    loaded = await load(groups, "g")
    assert loaded is not None
    assert next(each for each in loaded.members if each.member_id == "m7") == member("m7", 4)


async def test_replacing_members_removes_the_others(groups: GroupStore, leases: list[CoordinatorLease]) -> None:
    await save(groups, group(), leases[0])
    await save(groups, group("other"), leases[0])
    changed = group(generation_id=4, group_type="consumer", members=(member("m2", 7), member("m3")))
    await save(groups, changed, leases[0])
    loaded = await load(groups, "g")
    assert loaded is not None
    assert dataclasses.replace(loaded, members=_by_id(loaded.members)) == changed
    other = await load(groups, "other")
    assert other is not None
    assert len(other.members) == 2


async def test_saving_an_unchanged_group_writes_no_member(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    await save(groups, group(), leases[0])
    before = await row_versions(sql)
    await save(groups, group(), leases[0])
    assert await row_versions(sql) == before


async def test_many_groups_are_saved_in_one_transaction_with_an_outcome_each(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    records = [group(f"g{i}", members=(member(f"m{i}"),)) for i in range(6)]
    stale = dataclasses.replace(leases[1], lease_epoch=99)
    changes = [whole(record, stale if i == 2 else leases[i % 3]) for i, record in enumerate(records)]
    outcomes = [Saved.FENCED if i == 2 else Saved.SAVED for i in range(6)]
    assert await groups.save(changes) == outcomes
    assert set(await groups.load([f"g{i}" for i in range(6)])) == {"g0", "g1", "g3", "g4", "g5"}
    assert len(set((await row_versions(sql)).values())) == 1


async def test_a_locked_group_does_not_delay_the_others(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    for group_id in ("g", "held"):
        await save(groups, group(group_id), leases[0])
    changes = [whole(group(group_id, generation_id=4), leases[0]) for group_id in ("g", "held")]
    async with sql.transaction():
        await sql.execute("select from consumer_group where group_id = 'held' for share")
        assert await groups.save(changes) == [Saved.SAVED, Saved.BUSY]
    loaded = await groups.load(["g", "held"])
    assert {key: record.generation_id for key, record in loaded.items()} == {"g": 4, "held": 3}


async def test_postgres_dates_each_change_of_state_or_generation(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    await save(groups, group(), leases[0])
    tried: list[tuple[dict[str, Any], bool]] = [
        ({"document": {"leader_id": "m1"}}, False),
        ({"generation_id": 4}, True),
        ({"generation_id": 4, "state": "Empty", "members": ()}, True),
        ({"generation_id": 4, "state": "Empty", "members": (), "group_type": "consumer"}, True),
    ]
    for changes, moves in tried:
        await sql.execute("update consumer_group set state_timestamp_ms = 1")
        await save(groups, group(**changes), leases[0])
        age_ms = await sql.fetchval(
            "select extract(epoch from clock_timestamp()) * 1000 - state_timestamp_ms from consumer_group"
        )
        assert age_ms is not None
        assert (age_ms < 60_000) == moves, changes


async def test_the_time_since_which_members_are_awaited_is_stored(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    await save(groups, group(), leases[0])
    await save(groups, group("nobody", members=()), leases[0])
    first = await groups.load(["g", "nobody"])
    assert {key: record.silent_ms for key, record in first.items()} == {"g": None, "nobody": None}
    await sql.execute("update consumer_group set restored_at_ms = restored_at_ms - 5000")
    (again,) = await groups.load_shard(0)
    assert again.silent_ms is not None
    assert 5_000 <= again.silent_ms < 60_000
    assert await groups.save([whole(group(), leases[0], all_heard=False)]) == [Saved.SAVED]
    (still,) = await groups.load_shard(0)
    assert still.silent_ms is not None
    assert still.silent_ms >= again.silent_ms
    await save(groups, group(), leases[0])
    (anew,) = await groups.load_shard(0)
    assert anew.silent_ms is None
    assert (await groups.load(["nobody"]))["nobody"].silent_ms is None


async def test_members_are_awaited_from_now_on_after_the_clock_was_set_back(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    """Otherwise a dead member would get the hour by which the clock was set back on top of its session."""
    await save(groups, group(), leases[0])
    await groups.load_shard(0)
    for by_shard in (True, False):
        await sql.execute("update consumer_group set restored_at_ms = restored_at_ms + 3600000")
        found = await groups.load_shard(0) if by_shard else (await groups.load(["g"])).values()
        assert [record.silent_ms for record in found] == [0]
        set_back = await sql.fetchval(
            "select restored_at_ms <= ceil(extract(epoch from clock_timestamp()) * 1000) from consumer_group"
        )
        assert set_back, "the next coordinator goes on from here"


async def test_groups_are_listed_and_loaded_by_shard(groups: GroupStore, leases: list[CoordinatorLease]) -> None:
    one, two = group("one"), group("two", members=(), state="Empty", protocol_type=None, group_type="consumer")
    await save(groups, two, leases[2])
    await save(groups, one, leases[2])
    assert [record.group_id for record in await groups.load_shard(2)] == ["one"], "those with members"
    assert await groups.shards_with_groups([0, 1, 2]) == {2}
    assert await groups.list() == [("one", "classic", "consumer", "Stable"), ("two", "consumer", None, "Empty")]
    assert await groups.load(["three"]) == {}


async def test_a_lease_that_is_not_current_writes_nothing(groups: GroupStore, leases: list[CoordinatorLease]) -> None:
    await save(groups, group(), leases[0])
    lost = [
        dataclasses.replace(leases[0], lease_epoch=leases[0].lease_epoch - 1),
        dataclasses.replace(leases[0], lease_epoch=leases[0].lease_epoch + 1),
        dataclasses.replace(leases[0], node_id=99),
        dataclasses.replace(leases[0], shard=77),
    ]
    for lease in lost:
        assert await groups.save([whole(group(generation_id=9, members=()), lease)]) == [Saved.FENCED]
        with pytest.raises(StorageConflict):
            await groups.delete("g", lease)
    loaded = await load(groups, "g")
    assert loaded is not None
    assert dataclasses.replace(loaded, members=_by_id(loaded.members)) == group()


async def test_a_lease_of_another_kind_writes_nothing(
    groups: GroupStore, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    await sql.execute("update coordinator_lease set kind = 'jobs'")
    assert await groups.save([whole(group(), leases[0])]) == [Saved.FENCED]


async def test_a_former_coordinator_is_fenced_by_the_next(
    database: Database, groups: GroupStore, leases: list[CoordinatorLease]
) -> None:
    await save(groups, group(), leases[0])
    other = NodeStore(database)
    # The first node registers again, in another process.
    await NodeStore(database).register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
    node_id = await other.register("localhost:9093", {"PLAINTEXT": ("localhost", 9093)}, None, 60_000)
    assert await other.acquire_leases(node_id, [0], 60_000) == [], "still held"
    await _expire_leases(database)
    (taken,) = await other.acquire_leases(node_id, [0], 60_000)
    assert taken.lease_epoch == leases[0].lease_epoch + 1
    assert await groups.save([whole(group(generation_id=4), leases[0])]) == [Saved.FENCED]
    await save(groups, group(generation_id=4), taken)


async def _expire_leases(database: Database) -> None:
    await database.hot.fetch("update coordinator_lease set expires_at = clock_timestamp() - interval '1 s'")


async def test_deleting_a_group_takes_its_members_and_offsets(
    database: Database, groups: GroupStore, leases: list[CoordinatorLease], make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    for group_id in ("g", "h"):
        await save(groups, group(group_id), leases[0])
        assert await offsets.commit([OffsetCommit(leases[0], group_id, 3, topic.topic_id, 0, 7, -1, "")]) == [None]
    assert await groups.delete("g", leases[0])
    assert not await groups.delete("g", leases[0])
    assert await load(groups, "g") is None
    assert await offsets.fetch("g") == []
    assert len(await offsets.fetch("h")) == 1


async def test_a_new_generation_waits_for_running_commits_of_the_old_one(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    await save(groups, group(generation_id=1), leases[0])
    commit = OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 5, -1, "")

    # A commit of generation 1 that has been accepted and has not ended yet.
    async with database.hot.connection() as connection:
        transaction = connection.transaction()
        await transaction.__aenter__()
        await connection.fetchval(
            "select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
            [0], [leases[0].node_id], [leases[0].lease_epoch], ["g"], [None], [1], [1], [topic.topic_id], [0], [5],
            [-1], [""], [None],
        )  # fmt: skip
        saving = asyncio.create_task(save(groups, group(generation_id=2), leases[0]))
        await until_blocked(sql, 1)
        assert not saving.done()
        await transaction.__aexit__(None, None, None)
    await saving
    assert [offset.committed_offset for offset in await offsets.fetch("g")] == [5]
    assert [str(refusal) for refusal in await offsets.commit([commit])] == ["Refusal.ILLEGAL_GENERATION"]


async def test_a_commit_during_the_save_of_a_new_generation_is_refused(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic()
    offsets = OffsetStore(database)
    await save(groups, group(generation_id=1), leases[0])
    async with database.hot.connection() as connection, connection.transaction():
        await connection.execute("update consumer_group set generation_id = 2 where group_id = 'g'")
        commit = asyncio.create_task(offsets.commit([OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 5, -1, "")]))
        await until_blocked(sql, 1)
    assert [str(refusal) for refusal in await commit] == ["Refusal.ILLEGAL_GENERATION"]
    assert await offsets.fetch("g") == []


async def test_a_commit_from_outside_during_the_removal_of_its_group_begins_the_group_anew(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    """A refusal would name a member id, which the consumer never had, and it is final for Java's consumer."""
    topic = await make_topic()
    offsets = OffsetStore(database)
    await save(groups, group(state="Empty", members=()), leases[0])
    async with database.hot.connection() as connection, connection.transaction():
        await connection.fetchrow(
            statement("expire_offsets"), 0, leases[0].node_id, leases[0].lease_epoch, 1, [], [], [], [], 500, 10_000
        )
        commit = asyncio.create_task(offsets.commit([OffsetCommit(leases[0], "g", -1, topic.topic_id, 0, 5, -1, "")]))
        await until_blocked(sql, 1)
    assert await commit == [None]
    assert [offset.committed_offset for offset in await offsets.fetch("g")] == [5]


async def test_the_views_show_members_and_lag(
    groups: GroupStore,
    leases: list[CoordinatorLease],
    database: Database,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    topic = await make_topic("orders")
    await save(groups, group(), leases[0])
    await OffsetStore(database).commit([OffsetCommit(leases[0], "g", 3, topic.topic_id, 0, 5, -1, "")])
    await sql.execute("update partition set next_offset = 12")
    assert await sql.fetch("select group_id, topic, partition, committed_offset, lag from consumer_lag") == [
        ("g", "orders", 0, 5, 7)
    ]
    assert await sql.fetch("select member_id, leader from consumer_group_member order by 1") == [
        ("m1", False),
        ("m2", True),
    ]
