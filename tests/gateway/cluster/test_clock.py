"""The cluster's time: it follows Postgres' clock, regardless of this machine's clock. Postgres is simulated."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from gateway.apis.data.produce import produce
from gateway.cluster.clock import ClusterClock
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.topic import effective
from gateway.coordinator.classic.model import Group
from gateway.groups.kinds import MACHINES
from gateway.groups.records import CLOCK, GroupRecords
from gateway.groups.slot import Unstored
from gateway.log.validator import BatchValidator
from gateway.net.context import ConnectionInfo
from gateway.net.places import NO_PLACE
from gateway.operate import maintenance
from gateway.operate.maintenance import Maintenance
from protocol.api_keys import ApiKey
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.records import Record, build_batch
from storage.types import CoordinatorLease, NewBatch, NodeId, Partition, PartitionKey, Saved, Topic

DAY_MS = 24 * 3_600_000
TRUE_MS = 1_700_000_000_000


class Machine:
    """A machine that has been up for a while, and whose clock is wrong."""

    def __init__(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms
        self.elapsed_s = 1_000.0

    def own_ms(self) -> int:
        return self.true_ms() + self.ahead_ms

    def true_ms(self) -> int:
        return TRUE_MS + int((self.elapsed_s - 1_000.0) * 1000)

    def clock(self) -> ClusterClock:
        return ClusterClock(own_ms=self.own_ms, elapsed_s=lambda: self.elapsed_s)

    def asking(self, took_s: float, error_ms: int = 0) -> Any:
        """Return a query in the middle of which Postgres reads its clock."""

        async def ask() -> int:
            self.elapsed_s += took_s / 2
            read_ms = self.true_ms() + error_ms
            self.elapsed_s += took_s / 2
            return read_ms

        return ask


@pytest.mark.parametrize("ahead_ms", [-8 * DAY_MS, -100, 0, 100, 8 * DAY_MS])
async def test_clock_follows_postgres_and_advances_by_itself(ahead_ms: int) -> None:
    machine = Machine(ahead_ms)
    clock = machine.clock()
    assert clock.now_ms() == machine.own_ms()
    await clock.compare(machine.asking(took_s=0.01))
    assert abs(clock.now_ms() - machine.true_ms()) <= 10
    machine.ahead_ms += 3_600_000  # an administrator sets the machine's clock
    machine.elapsed_s += 60
    assert abs(clock.now_ms() - machine.true_ms()) <= 10


async def test_slow_network_does_not_move_the_clock() -> None:
    machine = Machine(0)
    clock = machine.clock()
    await clock.compare(machine.asking(took_s=0.0))
    for took_s, error_ms in ((2.0, 900), (2.0, -900), (0.5, 0)):
        await clock.compare(machine.asking(took_s, error_ms))
        assert abs(clock.now_ms() - machine.true_ms()) <= 1


async def test_clock_follows_a_change_of_postgres_clock() -> None:
    machine = Machine(0)
    clock = machine.clock()
    await clock.compare(machine.asking(took_s=0.01))
    await clock.compare(machine.asking(took_s=0.01, error_ms=-DAY_MS))
    assert abs(clock.now_ms() - (machine.true_ms() - DAY_MS)) <= 10


async def test_clock_pass_corrects_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(8 * DAY_MS)
    clock = machine.clock()
    monkeypatch.setattr(maintenance, "Monitor", lambda database: SimpleNamespace(now_ms=machine.asking(0.01)))
    monkeypatch.setattr(maintenance, "wall_ms", machine.own_ms)
    node: Any = SimpleNamespace(database=None, clock=clock)
    await Maintenance.compare_clocks(node)
    assert abs(clock.now_ms() - machine.true_ms()) <= 10


async def test_stored_groups_are_dated_by_the_clusters_clock() -> None:
    machine = Machine(8 * DAY_MS)
    clock = machine.clock()
    await clock.compare(machine.asking(0.0))
    saved: list[Any] = []

    async def save(changes: Any) -> Any:
        saved.extend(changes)
        return [Saved.SAVED for _ in changes]

    store: Any = SimpleNamespace(save=save)
    records = GroupRecords(store, MACHINES, 1_000, clock.now_ms)
    await records.write("g", Group("g"), Unstored(), CoordinatorLease(0, NodeId(1), 1), lambda: True)
    loop_ms = asyncio.get_running_loop().time() * 1000
    assert saved[0].document[CLOCK] + loop_ms == pytest.approx(machine.true_ms(), abs=5_000)


class _SubmittedError(Exception):
    pass


@pytest.mark.parametrize("partitions", [1, 2])
async def test_append_time_is_by_the_clusters_clock(partitions: int) -> None:
    """If the node dated records by its own clock, eight days behind, retention by Postgres' clock would delete them at
    once.
    """
    machine = Machine(-8 * DAY_MS)
    clock = machine.clock()
    await clock.compare(machine.asking(0.0))
    submitted: list[NewBatch] = []

    def submit(batch: NewBatch, place: object) -> None:
        submitted.append(batch)
        raise _SubmittedError

    broker = parse_broker_configs({})
    stamped = effective({"message.timestamp.type": "LogAppendTime"}, broker)
    topic = Topic(
        UUID(int=1),
        "t",
        internal=False,
        configs={},
        partitions=tuple(
            Partition(index, PartitionKey(index), 0, None, UUID(int=1), partitions) for index in range(partitions)
        ),
    )
    validator = BatchValidator()
    services = SimpleNamespace(
        authorizer=None,
        appender=SimpleNamespace(submit=submit),
        catalog=SimpleNamespace(get={"t": topic}.get, config=lambda topic: stamped, broker=broker),
        clock=clock,
        recompressor=SimpleNamespace(give_back=lambda room_bytes: None),
        validator=validator,
    )
    context: Any = SimpleNamespace(
        api_key=ApiKey.PRODUCE,
        connection=ConnectionInfo("connection", "/127.0.0.1"),
        place=NO_PLACE,
        services=services,
        version=9,
    )
    records = build_batch([Record(0, 5, None, b"v")])
    data = tuple(PartitionProduceData(index=index, records=records) for index in range(partitions))
    request = ProduceRequest(acks=-1, timeout_ms=1_000, topic_data=(TopicProduceData(name="t", partition_data=data),))
    try:
        with pytest.raises(_SubmittedError):
            await produce(request, context)
    finally:
        await validator.close()
    assert submitted[0].max_timestamp_ms == pytest.approx(machine.true_ms(), abs=5)
