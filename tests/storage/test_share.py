"""Positions of share groups on a real Postgres: fences, refusals, and removal with groups and topics."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from storage.deletion import DeletionStore
from storage.groups import GroupStore
from storage.offsets import KnownGroups, OffsetStore
from storage.pool import Database
from storage.share import ShareKey, ShareRow, ShareStand, ShareStore, StoredRange
from storage.topics import TopicStore
from storage.types import CoordinatorLease, Topic
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, member, save

SETTLED = (2, 4)
RANGES = (StoredRange(1, 0, 2), StoredRange(3, 2, 1), StoredRange(1, 4, 5), StoredRange(1, 0, 1))


@pytest.fixture
def share(database: Database) -> ShareStore:
    return ShareStore(database)


@pytest.fixture
async def topic(make_topic: MakeTopic) -> Topic:
    return await make_topic("shared", 2)


@pytest.fixture
async def key(leases: list[CoordinatorLease], database: Database, topic: Topic) -> ShareKey:
    """Key of the share group "s", which has no members."""
    await save(
        GroupStore(database), group("s", group_type="share", state="Empty", generation_id=1, members=()), leases[0]
    )
    return ShareKey("s", topic.topic_id, 0)


async def begin(share: ShareStore, key: ShareKey, start_offset: int) -> ShareRow:
    row = await share.begin(key, start_offset)
    assert row is not None
    return row


async def test_the_last_reader_of_a_position_may_write_it(share: ShareStore, key: ShareKey) -> None:
    assert await share.lead(key) is None
    first, second = await begin(share, key, 7), await begin(share, key, 9)
    assert (first.start_offset, second.start_offset) == (7, 7)
    assert first.state_epoch < second.state_epoch
    assert await share.write([(key, replace(first, start_offset=8))]) == [False]
    assert await share.write([(key, replace(second, start_offset=8, ranges=RANGES))]) == [True]
    third = await share.lead(key)
    assert third is not None
    assert third == ShareRow(third.state_epoch, 8, RANGES)
    assert third.state_epoch > second.state_epoch
    assert await share.write([(key, second)]) == [False]
    assert await share.offsets("s", SETTLED) == {(key.topic_id, 0): ShareStand(8, 4)}
    missing = key._replace(partition_index=1)
    assert await share.epochs([missing, key, key]) == [None, third.state_epoch, third.state_epoch]


async def test_a_write_that_arrives_after_its_repetition_changes_nothing(share: ShareStore, key: ShareKey) -> None:
    row = await begin(share, key, 0)
    late, repeated = replace(row, start_offset=1, write_number=1), replace(row, start_offset=2, write_number=2)
    assert await share.write([(key, repeated)]) == [True]
    assert await share.write([(key, late)]) == [False]
    assert await share.write([(key, repeated)]) == [True]
    led = await share.lead(key)
    assert led is not None
    assert (led.start_offset, led.write_number) == (2, 2)


async def test_each_of_many_positions_is_written_or_refused_by_itself(share: ShareStore, key: ShareKey) -> None:
    other, missing = key._replace(partition_index=1), key._replace(group_id="nobody")
    mine, others = await begin(share, key, 0), await begin(share, other, 0)
    stale = replace(mine, state_epoch=others.state_epoch + 1, start_offset=1)
    rows = [(missing, mine), (other, replace(others, start_offset=5)), (key, stale)]
    assert await share.write(rows) == [False, True, False]
    assert {index: row.start_offset for (_, index), row in (await share.offsets("s", SETTLED)).items()} == {0: 0, 1: 5}


@pytest.mark.parametrize("change", [{"group_id": "nobody"}, {"topic_id": UUID(int=1)}, {"partition_index": 2}])
async def test_a_position_of_an_absent_group_or_partition_is_refused(
    share: ShareStore, key: ShareKey, change: dict[str, object]
) -> None:
    assert await share.begin(key._replace(**change), 0) is None  # type: ignore[arg-type]


async def test_groups_of_other_types_have_no_position(
    share: ShareStore, key: ShareKey, database: Database, leases: list[CoordinatorLease]
) -> None:
    await save(GroupStore(database), group("g", generation_id=3), leases[0])
    assert await share.begin(key._replace(group_id="g"), 0) is None
    assert not await share.alter("g", {(key.topic_id, 0): 1})


async def test_an_administrators_change_fences_the_present_leader(share: ShareStore, key: ShareKey) -> None:
    mine = replace(await begin(share, key, 0), start_offset=2, ranges=RANGES)
    assert await share.write([(key, mine)]) == [True]
    assert await share.alter("s", {(key.topic_id, 0): 5, (key.topic_id, 1): 6})
    assert await share.write([(key, mine)]) == [False]
    altered = await share.lead(key)
    assert altered is not None
    assert (altered.start_offset, altered.ranges) == (5, ())
    assert await share.delete("s", [key.topic_id, UUID(int=1)]) == {key.topic_id}
    assert await share.write([(key, altered)]) == [False]
    assert await share.lead(key) is None
    # A new row fences every leader of the former row.
    await begin(share, key, 0)
    for former in (mine, altered):
        assert await share.write([(key, former)]) == [False]


async def test_an_administrators_change_of_a_group_with_members_is_refused(
    share: ShareStore, key: ShareKey, database: Database, leases: list[CoordinatorLease]
) -> None:
    await share.begin(key, 3)
    change = group("s", group_type="share", state="Stable", generation_id=2, members=(member("m"),))
    await save(GroupStore(database), change, leases[0])
    assert not await share.alter("s", {(key.topic_id, 0): 0})
    assert await share.delete("s", [key.topic_id]) == set()
    assert (await share.offsets("s", SETTLED))[key.topic_id, 0].start_offset == 3


async def test_a_deleted_group_or_topic_removes_its_positions(
    share: ShareStore, key: ShareKey, database: Database, topic: Topic
) -> None:
    await share.begin(key, 0)
    assert await TopicStore(database).delete(topic.topic_id)
    assert await share.offsets("s", SETTLED) == {}
    deletions = DeletionStore(database)
    while await deletions.pending(1):
        await deletions.advance(topic.topic_id)
    rows = await database.cold.fetch("select * from sluice.share_partition")
    assert len(rows) == 0


async def test_an_empty_share_group_does_not_expire(
    share: ShareStore, key: ShareKey, database: Database, leases: list[CoordinatorLease]
) -> None:
    await share.begin(key, 4)
    await save(GroupStore(database), group("g", state="Empty", generation_id=0, members=()), leases[0])
    expired = await OffsetStore(database).expire(leases[0], 1, KnownGroups)
    assert expired.deleted_groups == ("g",)
    assert (await share.offsets("s", SETTLED))[key.topic_id, 0].start_offset == 4
