"""A commit that would release a partition to its target races with a leave, or with another rebalance.

Postgres decides the race, so the test holds the commit in Postgres. It locks a row that the commit must lock, and
performs the competing step in between. However the race ends, only a member of the current generation receives the
partition, and it begins at exactly the offset that was committed before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from protocol.consumer import decode_assignment
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse
from protocol.messages.sync_group import SyncGroupResponse
from tests.frames.handoff import (
    MOVED,
    NONE,
    REBALANCING,
    RECORDS,
    UNSTABLE,
    Scene,
    Sync,
    committed,
    given,
    joining,
    moving,
)
from tests.frames.members import Member, fresh, leader_of, member
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient

PATIENT = {"SLUICE_NODE_TTL_MS": "60000"}
"""A commit held in Postgres also blocks its shard's lease, so no lease is renewed during that time."""
QUICKLY_S = 4
"""Less time than the gateway may hold a SyncGroup."""
A_WHILE_S = 1


@asynccontextmanager
async def locked(gateway: GatewayProcess, group_id: str) -> AsyncGenerator[asyncpg.Connection]:
    """Lock the row of the group. A commit locks this row in share mode, and the next generation writes it."""
    connection = await asyncpg.connect(gateway.database_url)
    try:
        async with connection.transaction():
            row = await connection.fetchval(
                "select group_id from sluice.consumer_group where group_id = $1 for update", group_id
            )
            assert row == group_id
            yield connection
    finally:
        await connection.close()


async def until_true(connection: asyncpg.Connection, sql: str, *values: object) -> None:
    await until(lambda: connection.fetchval(sql, *values))


async def waits_for_lock(connection: asyncpg.Connection) -> None:
    """Wait until a transaction waits for a lock that this connection holds."""
    sql = "select exists (select from pg_stat_activity where pg_backend_pid() = any (pg_blocking_pids(pid)))"
    await until_true(connection, sql)


@asynccontextmanager
async def draining(gateway: GatewayProcess) -> AsyncGenerator[tuple[Scene, Sync]]:
    """Call `moving`, and yield once the offset that the source must commit is stored. By then no other change of the
    group waits to be stored.
    """
    sql = "select document -> 'handoffs' -> 0 ->> 'mark' = $2 from sluice.consumer_group where group_id = $1"
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        connection = await asyncpg.connect(gateway.database_url)
        try:
            await until_true(connection, sql, scene.a.group_id, str(RECORDS))
        finally:
            await connection.close()
        yield scene, held


async def nothing_of(*answers: Awaitable[Any]) -> None:
    done, _ = await asyncio.wait([asyncio.ensure_future(each) for each in answers], timeout=A_WHILE_S)
    assert not done, done


async def assigned(
    topic: str, shares: Mapping[Member, tuple[int, ...]]
) -> Mapping[Member, asyncio.Future[SyncGroupResponse]]:
    """Let all members send SyncGroup. The leader assigns each member its share."""
    leader = leader_of(*shares)
    by_id = {each.member_id: given(topic, *share) for each, share in shares.items()}
    return {each: each.sync_nowait(by_id if each is leader else None) for each in shares}


async def rejoined(*members: Member) -> None:
    for each in members:
        each.members = ()
    for join in [each.join_nowait() for each in members]:
        assert (await join).error_code == NONE


def on_another_connection(speaker: Member, of: Member) -> Member:
    speaker.member_id, speaker.generation_id = of.member_id, of.generation_id
    return speaker


@asynccontextmanager
async def queued_commit(
    gateway: GatewayProcess, source: Member, speaker: Member, topic: str
) -> AsyncGenerator[asyncio.Task[int]]:
    """Send a commit of all records by the source. The coordinator accepts the commit, and the commit waits in Postgres
    behind a commit of another group until the context ends.
    """
    async with member(gateway.bootstrap, fresh("busy")) as other:
        assert await other.commit(topic, 1) == NONE
        async with locked(gateway, other.group_id) as lock:
            before = asyncio.create_task(other.commit(topic, 2))
            await waits_for_lock(lock)
            commit = asyncio.create_task(on_another_connection(speaker, source).commit(topic, RECORDS, partition=MOVED))
            await nothing_of(before, commit)
            yield commit
        assert await before == NONE


async def test_commit_after_the_next_generation_counts_during_the_drain(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory(environment=PATIENT)
    async with (
        draining(gateway) as (scene, held),
        joining(gateway, scene.a.group_id, "c", scene.topic, "range") as c,
        joining(gateway, scene.a.group_id, "a", scene.topic, "range") as speaker,
    ):
        a, b, topic = scene.a, scene.b, scene.topic
        async with queued_commit(gateway, a, speaker, topic) as late:
            await c.knock()
            third = c.join_nowait()
            assert (await asyncio.wait_for(held, 10)).error_code == REBALANCING
            await rejoined(a, b)
            assert (await third).error_code == NONE
            syncs = await assigned(topic, {a: (0,), b: (), c: (MOVED,)})
            for each, share in ((a, (0,)), (b, ())):
                assert (await asyncio.wait_for(syncs[each], QUICKLY_S)).assignment == given(topic, *share)
            assert not syncs[c].done()
            assert not late.done()
        assert await asyncio.wait_for(late, 10) == NONE
        answer = await asyncio.wait_for(syncs[c], QUICKLY_S)
        assert (answer.error_code, answer.assignment) == (NONE, given(topic, MOVED))
        assert await committed(c.client, c.group_id, topic, stable=True) == (NONE, RECORDS)


async def test_commit_after_its_member_left_is_refused(gateway_factory: GatewayFactory) -> None:
    """The commit arrives after the partition has been assigned. The new owner reads from the offset that was committed
    before.
    """
    gateway = gateway_factory(environment=PATIENT)
    async with (
        draining(gateway) as (scene, held),
        joining(gateway, scene.a.group_id, "a", scene.topic, "range") as speaker,
    ):
        a, b, topic = scene.a, scene.b, scene.topic
        async with queued_commit(gateway, a, speaker, topic) as late:
            await a.leave()
            assert (await asyncio.wait_for(held, 10)).error_code == REBALANCING
            await rejoined(b)
            alone = await assigned(topic, {b: (0, MOVED)})
            assert (await asyncio.wait_for(alone[b], QUICKLY_S)).assignment == given(topic, 0, MOVED)
            assert await committed(b.client, b.group_id, topic, stable=True) == (NONE, -1)
            assert not late.done()
        assert await asyncio.wait_for(late, 10) in (ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID)
        assert await committed(b.client, b.group_id, topic, stable=True) == (NONE, -1)


async def test_target_that_leaves_during_the_commit_receives_no_partition(gateway_factory: GatewayFactory) -> None:
    """The commit also counts for the member that joins in the source's place."""
    gateway = gateway_factory(environment=PATIENT)
    async with (
        draining(gateway) as (scene, held),
        joining(gateway, scene.a.group_id, "c", scene.topic, "range") as c,
        joining(gateway, scene.a.group_id, "administrator", scene.topic, "range") as speaker,
    ):
        a, b, topic = scene.a, scene.b, scene.topic
        async with locked(gateway, a.group_id) as lock:
            commit = asyncio.create_task(a.commit(topic, RECORDS, partition=MOVED))
            await waits_for_lock(lock)
            left = await on_another_connection(speaker, b).leave()
            assert [each.error_code for each in left.members] == [NONE], left
            answer = await asyncio.wait_for(held, 10)
            assert (answer.error_code, answer.assignment) == (ErrorCode.UNKNOWN_MEMBER_ID, b"")
            assert not commit.done()
        assert await asyncio.wait_for(commit, 10) == NONE
        await c.knock()
        await rejoined(a, c)
        syncs = await assigned(topic, {a: (0,), c: (MOVED,)})
        assert (await asyncio.wait_for(syncs[c], QUICKLY_S)).assignment == given(topic, MOVED)
        assert await committed(c.client, c.group_id, topic, stable=True) == (NONE, RECORDS)


async def test_rebalance_during_the_commit_uses_the_committed_offset(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory(environment=PATIENT)
    async with (
        draining(gateway) as (scene, held),
        joining(gateway, scene.a.group_id, "c", scene.topic, "range") as c,
    ):
        a, b, topic = scene.a, scene.b, scene.topic
        await c.knock()
        async with locked(gateway, a.group_id) as lock:
            commit = asyncio.create_task(a.commit(topic, RECORDS, partition=MOVED))
            await waits_for_lock(lock)
            third = c.join_nowait()
            await nothing_of(commit, third)
        assert await asyncio.wait_for(commit, 10) == NONE
        answer = await asyncio.wait_for(held, 10)
        assert (answer.error_code, answer.assignment) == (REBALANCING, b"")
        await rejoined(a, b)
        assert (await third).error_code == NONE
        syncs = await assigned(topic, {a: (0,), b: (), c: (MOVED,)})
        assert (await asyncio.wait_for(syncs[c], QUICKLY_S)).assignment == given(topic, MOVED)
        assert (await asyncio.wait_for(syncs[b], QUICKLY_S)).assignment == given(topic)
        assert await committed(c.client, c.group_id, topic, stable=True) == (NONE, RECORDS)


async def joined_at_once(each: Member) -> set[int]:
    """Join a consumer group; such a group holds no answer back. Return the assigned partitions."""
    each.members = ()
    assert (await each.join_nowait()).error_code == NONE
    answer = await each.sync()
    assert answer.error_code == NONE, answer
    return {index for topic in decode_assignment(answer.assignment).assigned_partitions for index in topic.partitions}


async def test_drain_continues_in_the_consumer_group_after_an_upgrade(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory()
    async with draining(gateway) as (scene, held), await WireClient.connect(gateway.bootstrap, client_id="c") as c:
        a, b, topic = scene.a, scene.b, scene.topic

        async def beat(epoch: int, **more: Any) -> ConsumerGroupHeartbeatResponse:
            request = ConsumerGroupHeartbeatRequest(group_id=a.group_id, member_id="c", member_epoch=epoch, **more)
            response = await c.send(request, 1)
            assert response.error_code == NONE, response
            return response

        async def has_it() -> bool:
            """Return whether member b or member c has received the partition. The coordinator chooses which of them
            owns it.
            """
            response = await beat(epoch)
            assigned = () if response.assignment is None else response.assignment.topic_partitions
            if any(MOVED in each.partitions for each in assigned):
                return True
            return await b.heartbeat() == REBALANCING and MOVED in await joined_at_once(b)

        joined = await beat(0, rebalance_timeout_ms=60_000, subscribed_topic_names=(topic,), topic_partitions=())
        assert (await asyncio.wait_for(held, QUICKLY_S)).error_code == REBALANCING
        assert await a.commit(topic, RECORDS - 1, partition=MOVED) == NONE
        assert MOVED not in await joined_at_once(a) | await joined_at_once(b)
        epoch = joined.member_epoch
        for _ in range(20):
            assert not await has_it()
        assert await a.commit(topic, RECORDS, partition=MOVED) == NONE
        async with asyncio.timeout(QUICKLY_S):
            while not await has_it():
                pass


async def test_member_assigned_too_early_waits_after_an_upgrade(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory()
    async with draining(gateway) as (scene, held), await WireClient.connect(gateway.bootstrap, client_id="c") as c:
        a, b, topic = scene.a, scene.b, scene.topic
        assert await a.commit(topic, RECORDS - 1, partition=MOVED) == NONE
        while not held.done():
            assert await a.heartbeat() == NONE
            await asyncio.wait((held,), timeout=0.5)
        assert (await held).assignment == given(topic, MOVED)
        upgrade = ConsumerGroupHeartbeatRequest(
            group_id=a.group_id,
            member_id="c",
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        assert (await c.send(upgrade, 1)).error_code == NONE
        for _ in range(20):
            assert await committed(b.client, b.group_id, topic, stable=True) == (UNSTABLE, RECORDS - 1)
        assert await committed(a.client, a.group_id, topic, stable=True) == (NONE, RECORDS - 1)
        assert await a.commit(topic, RECORDS, partition=MOVED) == NONE
        async with asyncio.timeout(QUICKLY_S):
            while await committed(b.client, b.group_id, topic, stable=True) != (NONE, RECORDS):
                pass
