"""Maintenance passes over very many partitions, and their queries about very many groups. They must not delay other
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.topic import effective
from gateway.coordinator.classic.model import Group, GroupState
from gateway.groups.groups import Groups
from gateway.groups.kinds import MACHINES
from gateway.groups.slot import Slot
from gateway.operate import maintenance
from gateway.operate.maintenance import Compaction, Maintenance
from storage.retention import RetentionPass
from storage.types import CoordinatorLease, NodeId, Partition, PartitionKey, Topic
from tests.turns import HELD_MS, watched

TOPICS, PARTITIONS = 5_000, 25
COMPACTED = effective({"cleanup.policy": "compact"}, parse_broker_configs({}))


def catalog() -> Any:
    topics = [
        Topic(
            UUID(int=number),
            f"t{number}",
            internal=False,
            configs={},
            partitions=tuple(
                Partition(index, PartitionKey(number * 100 + index), 0, None, UUID(int=number), PARTITIONS)
                for index in range(PARTITIONS)
            ),
        )
        for number in range(TOPICS)
    ]
    broker = SimpleNamespace(log_cleaner_backoff_ms=1)
    return SimpleNamespace(topics=lambda: topics, config=lambda topic: COMPACTED, broker=broker)


async def retain(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def apply(database: object, policies: list[object], moved: object) -> RetentionPass:
        seen.append(len(policies))
        return RetentionPass(0, 0, complete=True)

    monkeypatch.setattr(maintenance.retention, "apply", apply)
    node: Any = SimpleNamespace(catalog=catalog(), database=None, tail=SimpleNamespace(log_start_moved=None))
    async with watched() as turns:
        await Maintenance.retain(node)
    assert turns.longest_ms < HELD_MS


async def drop_compacted(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(key: PartitionKey) -> bool:
        seen[:] = [(len(seen) and seen[0] + 1) or 1]
        return False

    node: Any = SimpleNamespace(catalog=catalog(), database=None, log=None, tail=SimpleNamespace(holds=holds))
    async with watched() as turns:
        await Maintenance.drop_compacted(node)
    assert turns.longest_ms < HELD_MS


async def compact(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def dirty_ranges(policies: list[object], limit: int) -> list[object]:
        seen[:] = [len(policies)]
        return []

    database: Any = SimpleNamespace(cold=None)
    log: Any = SimpleNamespace()
    compaction = Compaction(database, log, catalog())
    monkeypatch.setattr(compaction, "_store", SimpleNamespace(dirty_ranges=dirty_ranges))
    async with watched() as turns:
        await compaction.run()
    assert turns.longest_ms < HELD_MS


@pytest.mark.parametrize("run", [retain, drop_compacted, compact])
async def test_a_pass_over_very_many_partitions_gives_way(
    run: Callable[[list[int], pytest.MonkeyPatch], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    await run(seen, monkeypatch)
    assert seen == [TOPICS * PARTITIONS]


def test_subscriptions_are_read_for_one_shards_groups_alone() -> None:
    def slot(shard: int) -> Slot:
        pending: Any = {"m": None}
        group = Group(f"g{shard}", state=GroupState.STABLE, protocol_type="consumer", pending=pending)
        return Slot(group.group_id, CoordinatorLease(shard, NodeId(1), 1), group)

    groups: Any = SimpleNamespace(_slots={shard: slot(shard) for shard in range(50)}, _machines=MACHINES)
    assert [summary.group_id for summary in Groups.in_use(groups, 7)] == ["g7"]
