"""Where share groups stand, on a real Postgres: fences, what is refused, and what goes with groups and topics."""

from __future__ import annotations

from uuid import UUID

import pytest

from storage.deletion import DeletionStore
from storage.groups import GroupStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.share import ShareKey, ShareRow, ShareStore, StoredRange
from storage.topics import TopicStore
from storage.types import CoordinatorLease, Topic
from tests.storage.conftest import MakeTopic
from tests.storage.test_groups import group, member, save

RANGES = (StoredRange(1, 0, 2), StoredRange(3, 2, 1), StoredRange(1, 4, 5), StoredRange(1, 0, 1))


@pytest.fixture
def share(database: Database) -> ShareStore:
    return ShareStore(database)


@pytest.fixture
async def topic(make_topic: MakeTopic) -> Topic:
    return await make_topic("shared", 2)


@pytest.fixture
async def key(leases: list[CoordinatorLease], database: Database, topic: Topic) -> ShareKey:
    """Of the share group "s", which has no members."""
    await save(
        GroupStore(database), group("s", group_type="share", state="Empty", generation_id=1, members=()), leases[0]
    )
    return ShareKey("s", topic.topic_id, 0)


async def test_who_reads_last_may_write(share: ShareStore, key: ShareKey) -> None:
    assert await share.lead(key) is None
    assert await share.begin(key, 7) == ShareRow(1, 7)
    assert await share.begin(key, 9) == ShareRow(2, 7)
    assert await share.write([(key, ShareRow(1, 8))]) == [False]
    assert await share.write([(key, ShareRow(2, 8, RANGES))]) == [True]
    assert await share.lead(key) == ShareRow(3, 8, RANGES)
    assert await share.write([(key, ShareRow(2, 9))]) == [False]
    assert await share.offsets("s") == {(key.topic_id, 0): ShareRow(0, 8, RANGES)}


async def test_each_of_many_is_written_or_not(share: ShareStore, key: ShareKey) -> None:
    other, missing = key._replace(partition_index=1), key._replace(group_id="nobody")
    await share.begin(key, 0)
    await share.begin(other, 0)
    rows = [(missing, ShareRow(1, 1)), (other, ShareRow(1, 5)), (key, ShareRow(4, 1))]
    assert await share.write(rows) == [False, True, False]
    assert {index: row.start_offset for (_, index), row in (await share.offsets("s")).items()} == {0: 0, 1: 5}


@pytest.mark.parametrize("change", [{"group_id": "nobody"}, {"topic_id": UUID(int=1)}, {"partition_index": 2}])
async def test_nothing_begins_where_there_is_nothing(
    share: ShareStore, key: ShareKey, change: dict[str, object]
) -> None:
    assert await share.begin(key._replace(**change), 0) is None  # type: ignore[arg-type]


async def test_groups_of_other_types_stand_nowhere(
    share: ShareStore, key: ShareKey, database: Database, leases: list[CoordinatorLease]
) -> None:
    await save(GroupStore(database), group("g", generation_id=3), leases[0])
    assert await share.begin(key._replace(group_id="g"), 0) is None
    assert not await share.alter("g", {(key.topic_id, 0): 1})


async def test_who_stood_there_is_fenced_by_what_comes_from_outside(share: ShareStore, key: ShareKey) -> None:
    await share.begin(key, 0)
    await share.write([(key, ShareRow(1, 2, RANGES))])
    assert await share.alter("s", {(key.topic_id, 0): 5, (key.topic_id, 1): 6})
    assert await share.write([(key, ShareRow(1, 3))]) == [False]
    assert await share.lead(key) == ShareRow(3, 5)
    assert await share.delete("s", [key.topic_id, UUID(int=1)]) == {key.topic_id}
    assert await share.write([(key, ShareRow(3, 6))]) == [False]
    assert await share.lead(key) is None


async def test_with_members_nothing_is_changed_from_outside(
    share: ShareStore, key: ShareKey, database: Database, leases: list[CoordinatorLease]
) -> None:
    await share.begin(key, 3)
    change = group("s", group_type="share", state="Stable", generation_id=2, members=(member("m"),))
    await save(GroupStore(database), change, leases[0])
    assert not await share.alter("s", {(key.topic_id, 0): 0})
    assert await share.delete("s", [key.topic_id]) == set()
    assert await share.lead(key) == ShareRow(2, 3)


async def test_what_is_gone_takes_it_along(share: ShareStore, key: ShareKey, database: Database, topic: Topic) -> None:
    await share.begin(key, 0)
    assert await TopicStore(database).delete(topic.topic_id)
    assert await share.offsets("s") == {}
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
    expired = await OffsetStore(database).expire(leases[0], 1, subscriptions={}, unsettled=[])
    assert expired.deleted_groups == ("g",)
    assert await share.lead(key) == ShareRow(2, 4)
