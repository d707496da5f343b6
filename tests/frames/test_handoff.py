"""Handing partitions over, frame by frame: which member is held, for how long, and what OffsetFetch
answers in between.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.cli import main
from protocol.errors import ErrorCode
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from tests.frames.handoff import (
    MOVED,
    NONE,
    REBALANCING,
    RECORDS,
    UNSTABLE,
    Scene,
    committed,
    configure,
    fetch,
    given,
    joining,
    moving,
    owning,
    produce,
)
from tests.frames.members import Member, create_topic, fresh, join_all, member
from tests.frames.transactions import Transactional
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient


async def told_to_join_again(one: Member) -> None:
    await until(one.heartbeat, "a rebalance is announced", holds=lambda code: code == REBALANCING)


async def test_sync_of_the_target_is_held_and_of_the_source_is_not(gateway: GatewayProcess) -> None:
    """The source commits in the generation that revoked the partition. The target then fetches the offset again."""
    async with moving(gateway, "ack", keeps_the_rule=False) as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, 3, partition=MOVED) == NONE
        assert await a.heartbeat() == NONE
        assert await committed(a.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        assert not held.done()
        a.protocols = owning(scene.topic, 0)
        rejoined = a.join_nowait()
        assert (await asyncio.wait_for(held, 30)).error_code == REBALANCING
        assert (await b.join_nowait()).error_code == NONE
        assert (await rejoined).error_code == NONE
        for sync in await scene.assign((0,), (1,), "cooperative-sticky"):
            assert (await asyncio.wait_for(sync, 30)).error_code == NONE
        assert await committed(b.client, b.group_id, scene.topic, stable=True) == (NONE, 3)


async def test_a_held_sync_is_answered_within_half_a_session_and_offsets_are_not_settled(
    gateway: GatewayProcess,
) -> None:
    async with moving(gateway, "ack", keeps_the_rule=False) as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, 3, partition=MOVED) == NONE
        while not held.done():
            assert await a.heartbeat() == NONE
            await asyncio.wait((held,), timeout=0.5)
        assert (await held).assignment == given(scene.topic, MOVED)
        assert await committed(b.client, b.group_id, scene.topic, stable=True) == (UNSTABLE, 3)
        assert await committed(a.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        async with member(gateway.bootstrap, a.group_id, client_id="admin") as admin:
            assert await committed(admin.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        assert await committed(b.client, b.group_id, scene.topic, stable=False) == (NONE, 3)
        async with asyncio.timeout(10):
            # The offset is stored as soon as the target may continue from it.
            while await committed(b.client, b.group_id, scene.topic, stable=True) != (NONE, 3):
                pass


async def test_commit_up_to_the_mark_releases_the_target(gateway: GatewayProcess) -> None:
    """The source was served two records."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        assert await scene.a.commit(scene.topic, RECORDS - 1, partition=MOVED) == NONE
        assert not held.done()
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)


async def test_source_that_commits_in_transactions_drains_when_one_commits(gateway: GatewayProcess) -> None:
    """Aborted offsets do not count. A target that continues must wait until no offset is pending."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        a, b, group_id = scene.a, scene.b, scene.a.group_id
        producer = Transactional(a.client, fresh("producer"))
        assert await producer.initialize() is NONE
        mine = {"member_id": a.member_id, "generation_id_or_member_epoch": a.generation_id}
        for is_committed in (False, True):
            assert await producer.add_offsets(group_id) is NONE
            assert await producer.commit_offset(group_id, (scene.topic, MOVED), RECORDS, **mine) is NONE
            assert await committed(a.client, group_id, scene.topic, stable=True) == (UNSTABLE, -1)
            assert await committed(a.client, group_id, scene.topic, stable=False) == (NONE, -1)
            assert not held.done()
            assert await producer.end(committed=is_committed) is NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)
        # The partition has drained; the target was not merely held for the maximum time.
        assert await committed(b.client, group_id, scene.topic, stable=True) == (NONE, RECORDS)


@pytest.mark.parametrize("as_java", [False, True])
async def test_drain_does_not_wait_for_markers_behind_the_served_records(
    gateway: GatewayProcess, as_java: bool
) -> None:
    """Applications commit the offset behind the last record they received."""
    async with moving(gateway, "drain", keeps_the_rule=True, as_java=as_java, in_a_transaction=True) as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, RECORDS - 1, partition=MOVED) == NONE
        done, _ = await asyncio.wait((held,), timeout=1)
        assert not done
        assert await a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)
        assert await committed(b.client, b.group_id, scene.topic, stable=True) == (NONE, RECORDS)


async def test_parked_fetch_shows_which_records_the_application_has(gateway: GatewayProcess) -> None:
    """The consumer fetches from the next offset as soon as the application has the records, and that fetch waits for
    0.5 s.
    """
    async with moving(gateway, "drain", keeps_the_rule=True, as_java=True) as (scene, held):
        done, _ = await asyncio.wait((held,), timeout=1)
        assert not done
        assert await scene.a.commit(scene.topic, RECORDS - 1, partition=MOVED) == NONE
        assert not held.done()
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)


async def test_drain_does_not_wait_for_records_committed_before(gateway: GatewayProcess) -> None:
    """Without that commit the sync would be held for five seconds, and the offset would stay unstable."""
    async with moving(gateway, "drain", keeps_the_rule=True, committed_before=RECORDS) as (scene, held):
        assert (await asyncio.wait_for(held, 30)).assignment == given(scene.topic, MOVED)
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, RECORDS)


async def test_members_that_swap_partitions_are_not_held(gateway: GatewayProcess) -> None:
    """Each member commits in the generation that revoked its partition, and neither waits for the other's sync."""
    group_id, topic = fresh("swap"), fresh("topic")
    async with (
        joining(gateway, group_id, "a", topic, "range") as a,
        joining(gateway, group_id, "b", topic, "range") as b,
    ):
        assert await configure(a.client, group_id, group_handoff_mode="drain") == [NONE]
        await create_topic(a.client, topic, 2)
        produce(gateway.bootstrap, topic, 0, 1)
        scene = Scene(topic, a, b)
        await join_all(a, b)
        for first, second in (((0,), (1,)), ((1,), (0,))):
            for sync in await scene.assign(first, second, "range"):
                assert (await asyncio.wait_for(sync, 4)).error_code == NONE
            if first == (0,):
                await fetch(a.client, topic, 0, 0)
                await fetch(b.client, topic, 0, 1)
                await scene.generation({a: owning(topic, name="range"), b: owning(topic, name="range")})
        for one, other, partition in ((a, b, 1), (b, a, 0)):
            assert await committed(one.client, group_id, topic, stable=True, partition=partition) == (UNSTABLE, -1)
            assert await other.commit(topic, RECORDS, partition=partition) == NONE
            async with asyncio.timeout(10):
                while await committed(one.client, group_id, topic, stable=True, partition=partition) != (NONE, RECORDS):
                    pass


async def test_member_with_heartbeats_queued_behind_a_held_sync_stays_alive(gateway: GatewayProcess) -> None:
    """A client's requests share a connection, so a held member can send no heartbeat."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        beats = [asyncio.create_task(scene.b.heartbeat()) for _ in range(3)]
        done, _ = await asyncio.wait((held, *beats), timeout=1)
        assert not done
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)
        assert await asyncio.gather(*beats) == [NONE] * 3
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, RECORDS)


async def test_another_group_of_the_same_clients_neither_waits_nor_releases(gateway: GatewayProcess) -> None:
    """Both groups have members on the same host, with the same client ids and topic."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        other = fresh("other")
        async with (
            joining(gateway, other, "a", scene.topic, "range") as a,
            joining(gateway, other, "b", scene.topic, "range") as b,
        ):
            await join_all(a, b)
            for sync in await Scene(scene.topic, a, b).assign((0,), (1,), "range"):
                assert (await asyncio.wait_for(sync, 30)).error_code == NONE
            await fetch(b.client, scene.topic, RECORDS)
            for each in (a, b):
                assert await committed(each.client, other, scene.topic, stable=True) == (NONE, -1)
            assert await b.commit(scene.topic, RECORDS, partition=MOVED) == NONE
            done, _ = await asyncio.wait((held,), timeout=1)
            assert not done, "it is another group's commit"
            assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
            assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)
            mine = await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True)
            assert mine == (NONE, RECORDS)


async def test_drain_does_not_wait_for_a_restarted_static_source(gateway: GatewayProcess) -> None:
    """The process that owned the partition is gone, and later requests with its old member id are fenced."""
    async with (
        moving(gateway, "drain", keeps_the_rule=True, static=True) as (scene, held),
        joining(gateway, scene.a.group_id, "a", scene.topic, "range", "instance a") as restarted,
    ):
        assert (await restarted.join_nowait()).error_code == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, -1)
        assert await scene.a.heartbeat() == ErrorCode.FENCED_INSTANCE_ID
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == ErrorCode.FENCED_INSTANCE_ID


async def test_restarted_static_target_waits_in_its_own_place(gateway: GatewayProcess) -> None:
    async with (
        moving(gateway, "drain", keeps_the_rule=True, static=True) as (scene, held),
        joining(gateway, scene.b.group_id, "b", scene.topic, "range", "instance b") as restarted,
    ):
        assert (await restarted.join_nowait()).error_code == NONE
        assert (await asyncio.wait_for(held, 10)).error_code == ErrorCode.FENCED_INSTANCE_ID
        waiting = restarted.sync_nowait()
        assert await committed(scene.a.client, scene.a.group_id, scene.topic, stable=True) == (NONE, -1)
        assert not waiting.done()
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(waiting, 10)).assignment == given(scene.topic, MOVED)
        assert await committed(restarted.client, scene.b.group_id, scene.topic, stable=True) == (NONE, RECORDS)
        assert await scene.b.heartbeat() == ErrorCode.FENCED_INSTANCE_ID


async def test_describe_marks_partitions_that_owners_may_not_read_yet(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):

        async def marked() -> dict[int, str | None]:
            words = ["groups", "describe", scene.a.group_id, "--json", "-b", gateway.bootstrap]
            assert await asyncio.to_thread(main, words) == 0
            (described,) = json.loads(capsys.readouterr().out)
            return {row["partition"]: row["handoff"] for row in described["partitions"]}

        assert await marked() == {0: None, MOVED: "pending"}
        assert not held.done(), "it only looks"
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).error_code == NONE
        assert await marked() == {0: None, MOVED: None}


async def test_commit_of_a_false_offset_releases_nothing(gateway: GatewayProcess) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        for offset in (-5, 0, 1):
            await fetch(scene.a.client, scene.topic, offset)
        assert await scene.a.commit(scene.topic, 1, partition=MOVED) == NONE
        done, _ = await asyncio.wait((held,), timeout=2)
        assert not done
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).error_code == NONE


async def test_drain_does_not_wait_for_a_source_that_left(gateway: GatewayProcess) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        await scene.a.leave()
        assert (await asyncio.wait_for(held, 10)).error_code == REBALANCING


async def test_drain_does_not_wait_for_a_killed_source(gateway: GatewayProcess) -> None:
    """The source is killed, so its connection ends and no other connection replaces it."""
    async with moving(gateway, "drain", keeps_the_rule=True, timeout_ms="120000") as (scene, held):
        await scene.a.client.close()
        sync = await asyncio.wait_for(held, 20)
        if sync.error_code == NONE:
            # The gateway holds the target's SyncGroup as long as a client tolerates. Then the target must repeat
            # OffsetFetch until the source is gone.
            assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (UNSTABLE, -1)
        await told_to_join_again(scene.b)
        assert (await scene.b.join_nowait()).error_code == NONE
        assert (await scene.b.sync({scene.b.member_id: given(scene.topic, 0, MOVED)})).error_code == NONE
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, -1)


async def test_held_sync_of_a_removed_target_is_answered(gateway: GatewayProcess) -> None:
    """An administrator removes the target, because the target's own connection is blocked by its held SyncGroup."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        scene.a.member_id, mine = scene.b.member_id, scene.a.member_id
        await scene.a.leave()
        scene.a.member_id = mine
        assert (await asyncio.wait_for(held, 10)).error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_drain_ends_after_its_timeout(gateway: GatewayProcess) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True, timeout_ms="1000") as (scene, held):
        assert (await asyncio.wait_for(held, 20)).assignment == given(scene.topic, MOVED)
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, -1)


async def test_drain_does_not_wait_for_a_deleted_topic(gateway: GatewayProcess) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        await scene.a.client.send(
            DeleteTopicsRequest(topics=(DeleteTopicState(name=scene.topic),), timeout_ms=10_000), 6
        )
        assert (await asyncio.wait_for(held, 20)).error_code == NONE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_handoff_mode", "never"),
        ("group_handoff_timeout_ms", "0"),
        ("group_handoff_timeout_ms", "soon"),
        ("group_handoff_patience", "1"),
    ],
)
async def test_wrong_settings_are_refused(gateway: GatewayProcess, name: str, value: str) -> None:
    client = await WireClient.connect(gateway.bootstrap)
    try:
        assert await configure(client, fresh("settings"), **{name: value}) == [ErrorCode.INVALID_CONFIG]
    finally:
        await client.close()
