"""The group runner on a real Postgres: what is stored before it is answered, and what survives."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.cluster.leases import SHARDS
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerGroupHeartbeatReply
from gateway.coordinator.facts import (
    AssignmentGiven,
    Fact,
    GenerationAssigned,
    GenerationStarted,
    MemberId,
    MemberJoined,
    MemberRejoined,
    MemberSynced,
    ProtocolViolated,
    RebalanceBegun,
)
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.machine import ConnectionId, Machines
from gateway.coordinator.requests import DeleteGroup, HeartbeatReply, LeaveGroup, LeavingMember
from gateway.coordinator.streams.model import StreamsGroupHeartbeat
from gateway.coordinator.streams.topology import Subtopology, Topology
from gateway.groups.groups import logger as groups_log
from gateway.groups.runtime import Bounds
from gateway.operate.logs import REQUEST
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode, KafkaError
from storage.nodes import NodeStore
from storage.types import GroupChange, GroupRecord, Saved
from tests.gateway.group_node import QUICK, GroupNode, group_node, locked_group, reply_of, settle, write_is_waiting
from tests.steps.waiting import until

G = "g"


class Gate:
    """A gate in front of `GroupStore.save`. Writes to Postgres wait until it opens."""

    def __init__(self, node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = 0
        self._save, self._open = node.store.save, asyncio.Event()
        monkeypatch.setattr(node.store, "save", self._save_once_open)

    async def _save_once_open(self, changes: Sequence[GroupChange], *, wait: bool = False) -> list[Saved]:
        self.waiting += 1
        await self._open.wait()
        return await self._save(changes, wait=wait)

    def open(self) -> None:
        self._open.set()


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


async def classic_group(node: GroupNode) -> Group:
    group = await node.groups.view(G)
    assert isinstance(group, Group)
    return group


async def test_answers_of_a_new_generation_wait_until_it_is_stored(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        assert not any(join.done() for join in joins)
        stored = await node.stored(G)
        assert stored is not None
        assert stored.generation_id == 1
    replies = await asyncio.gather(*joins)
    assert [(reply.error, reply.generation_id) for reply in replies] == [(ErrorCode.NONE, 2)] * 2
    stored = await node.stored(G)
    assert stored is not None
    assert (stored.generation_id, stored.state, len(stored.members)) == (2, GroupState.COMPLETING_REBALANCE, 2)


async def test_assignments_wait_until_they_are_stored(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first, second)
    await asyncio.gather(first.join(), second.join())
    follower = second.sync()
    async with locked_group(database_url, G) as lock:
        leader = first.sync({first.member_id: b"new 1", second.member_id: b"new 2"})
        await write_is_waiting(lock)
        assert isinstance(leader, asyncio.Future)
        assert isinstance(follower, asyncio.Future)
        assert not leader.done()
        assert not follower.done()
    assert [(await reply_of(sync)).assignment for sync in (leader, follower)] == [b"new 1", b"new 2"]
    stored = await node.stored(G)
    assert stored is not None
    assert {member.assignment for member in stored.members.values()} == {b"new 1", b"new 2"}


async def test_a_heartbeat_to_an_idle_group_is_answered_in_the_call_and_without_postgres(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    await node.database.close()
    reply = member.heartbeat()
    assert reply == HeartbeatReply(ErrorCode.NONE)
    assert member.may_commit().error is ErrorCode.NONE


async def test_requests_during_a_write_are_answered_after_it_in_order(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first, second)
    order: list[str] = []
    async with locked_group(database_url, G) as lock:
        joins = [first.join(), second.join()]
        await write_is_waiting(lock)
        old_generation = first.heartbeat()
        leaving = second.leave()
        late = first.heartbeat()
        for name, answer in (("old", old_generation), ("leave", leaving), ("late", late)):
            assert isinstance(answer, asyncio.Future)
            answer.add_done_callback(lambda _, name=name: order.append(name))
        assert not old_generation.done()
    await asyncio.gather(*joins)
    assert (await old_generation).error is ErrorCode.ILLEGAL_GENERATION
    assert (await leaving).error is ErrorCode.NONE
    assert (await late).error is ErrorCode.ILLEGAL_GENERATION
    await asyncio.sleep(0)
    assert order == ["old", "leave", "late"]


async def test_one_load_serves_all_first_requests(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await settle(node.member(G, "c1"))
    node.groups.shard_lost(node.leases.shard_of(G))
    loads: list[str] = []
    load = node.store.load

    async def counted(group_ids: Sequence[str]) -> object:
        loads.extend(group_ids)
        return await load(group_ids)

    monkeypatch.setattr(node.store, "load", counted)
    member = node.member(G, "c1")
    member.member_id, member.generation_id = "member-c1", 1  # type: ignore[assignment]
    beats = [member.heartbeat() for _ in range(20)]
    assert {(await beat).error for beat in beats} == {ErrorCode.NONE}
    assert loads == [G]


async def test_a_stable_group_survives_a_kill_without_a_rebalance(database_url: str) -> None:
    async with group_node(database_url) as before:
        old = [before.member(G, f"c{index}") for index in range(3)]
        await settle(*old)
    async with group_node(database_url) as after:
        members = [after.member(G, f"d{index}") for index in range(3)]
        for member, was in zip(members, old, strict=True):
            member.member_id, member.generation_id = was.member_id, was.generation_id
            assert await member.beat() is ErrorCode.NONE
            sync = await reply_of(member.sync())
            assert (sync.error, sync.assignment) == (ErrorCode.NONE, was.member_id.encode())
        group = await classic_group(after)
        assert (group.state, group.generation_id) == (GroupState.STABLE, 2)


async def test_silent_group_still_expires_after_a_kill(database_url: str) -> None:
    async with group_node(database_url) as before:
        await settle(before.member(G, "c1", session_timeout_ms=200))
    async with group_node(database_url) as after:

        async def emptied() -> bool:
            stored = await after.stored(G)
            return stored is not None and stored.state is GroupState.EMPTY and not stored.members

        await until(emptied)


async def test_each_restart_continues_the_sessions_of_the_previous_one(database_url: str) -> None:
    """A member that died together with the first coordinator must not get a new full session from each later
    coordinator.
    """
    async with group_node(database_url) as before:
        dead = before.member(G, "c1", session_timeout_ms=60_000)
        await settle(dead)
    left_ms: list[float] = []
    for _ in range(3):
        async with group_node(database_url) as after:
            now_ms = asyncio.get_running_loop().time() * 1000
            group = await classic_group(after)
            left_ms.append(min(group.session_deadlines.values()) - now_ms)
            await after.database.hot.fetch("update consumer_group set restored_at_ms = restored_at_ms - 20000")
    assert [round(ms / 10_000) for ms in left_ms] == [6, 4, 2]


async def test_once_all_members_were_heard_a_restart_gives_whole_sessions_again(database_url: str) -> None:
    async with group_node(database_url) as before:
        first, second = (before.member(G, name, session_timeout_ms=60_000) for name in ("c1", "c2"))
        await settle(first, second)
    for _ in range(2):
        async with group_node(database_url) as after:
            group = await classic_group(after)
            now_ms = asyncio.get_running_loop().time() * 1000
            assert min(group.session_deadlines.values()) > now_ms + 50_000
            for was in (first, second):
                member = after.member(G, f"d-{was.connection_id}")
                member.member_id, member.generation_id = was.member_id, was.generation_id
                assert await member.beat() is ErrorCode.NONE
            await after.database.hot.fetch("update consumer_group set restored_at_ms = restored_at_ms - 50000")


async def test_begin_of_a_wait_survives_its_coordinator(database_url: str) -> None:
    """The begin is stored as wall-clock time, because the monotonic clock of the next node began at another time."""
    drain = dataclasses.replace(QUICK, handoff=HandoffSettings(HandoffMode.DRAIN, 30_000))
    told = encode_subscription(Subscription(1, ("t",)))
    share, nothing = (
        encode_assignment(Assignment(1, (TopicPartition("t", (0,)),))),
        encode_assignment(Assignment(1, ())),
    )
    async with group_node(database_url, settings=drain) as before:
        one, two = (before.member(G, name, metadata=told) for name in ("c1", "c2"))
        await settle(one, two)
        for first, second in ((share, nothing), (nothing, share)):
            await asyncio.gather(one.join(), two.join())
            leader, follower = (one, two) if one.members else (two, one)
            held = follower.sync()
            await reply_of(leader.sync({one.member_id: first, two.member_id: second}))
        assert isinstance(held, asyncio.Future)
    for change, since_s, left_s in (
        ("document", 0, 30),
        ("jsonb_set(document, '{clock_ms}', to_jsonb((document ->> 'clock_ms')::bigint - 16000))", 16, 14),
        ("document - 'clock_ms'", 0, 30),
    ):
        async with group_node(database_url, settings=drain) as after:
            await after.database.hot.fetch(f"update consumer_group set document = {change}")
        async with group_node(database_url, settings=drain) as after:
            group = await classic_group(after)
            now_ms = asyncio.get_running_loop().time() * 1000
            (handoff,) = group.handoffs
            found = (now_ms - handoff.since_ms) / 1000, (handoff.deadline_ms - now_ms) / 1000
            assert found == (pytest.approx(since_s, abs=6), pytest.approx(left_s, abs=6)), change


async def test_news_of_topics_that_waited_until_the_group_became_a_streams_group_are_ignored(database_url: str) -> None:
    drain = dataclasses.replace(QUICK, handoff=HandoffSettings(HandoffMode.DRAIN, 30_000))
    told = encode_subscription(Subscription(1, ("t",)))
    share, nothing = (encode_assignment(Assignment(1, each)) for each in ((TopicPartition("t", (0,)),), ()))
    async with group_node(database_url, settings=drain) as node:
        one, two = (node.member(G, name, metadata=told) for name in ("c1", "c2"))
        await settle(one, two)
        for first, second in ((share, nothing), (nothing, share)):
            await asyncio.gather(one.join(), two.join())
            leader, follower = (one, two) if one.members else (two, one)
            follower.sync()
            await reply_of(leader.sync({one.member_id: first, two.member_id: second}))
        assert (await classic_group(node)).handoffs, "it watches the topics"
        async with locked_group(database_url, G) as lock:
            both = tuple(LeavingMember(each.member_id, None) for each in (one, two))
            node.groups.submit(G, LeaveGroup(node.groups.next_request_id(), one.connection_id, both))
            await write_is_waiting(lock)
            joined = node.groups.submit(G, streams_heartbeat(node, "a"))
            node.groups.cluster_changed(Cluster(revision=1))
        assert (await reply_of(joined)).error is ErrorCode.NONE


def streams_heartbeat(node: GroupNode, member_id: str) -> StreamsGroupHeartbeat:
    """Return the heartbeat by which a member joins."""
    return StreamsGroupHeartbeat(
        request_id=node.groups.next_request_id(),
        connection_id=ConnectionId("c"),
        connection_number=1,
        client_id="client",
        client_host="/127.0.0.1",
        member_id=MemberId(member_id),
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        topology=Topology(0, (Subtopology("0", ("t",)),)),
        active=frozenset(),
        standby=frozenset(),
        warmup=frozenset(),
    )


async def test_writes_of_many_groups_share_transactions(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    save = node.store.save

    async def counted(changes: Sequence[GroupChange], *, wait: bool = False) -> list[Saved]:
        calls.append(len(changes))
        return await save(changes, wait=wait)

    monkeypatch.setattr(node.store, "save", counted)
    replies = await asyncio.gather(*(node.member(f"g{index}", f"c{index}").join() for index in range(300)))
    assert {reply.error for reply in replies} == {ErrorCode.NONE}
    assert sum(calls) == 300
    assert len(calls) <= 20


async def test_locked_group_delays_no_other(node: GroupNode, database_url: str) -> None:
    first, second, other = node.member(G, "c1"), node.member(G, "c2"), node.member("other", "c3")
    await settle(first)
    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        await asyncio.wait_for(settle(other), 60)
        assert not any(join.done() for join in joins)
    assert {(await join).error for join in joins} == {ErrorCode.NONE}


async def test_readers_receive_facts_after_the_write_and_before_the_answers(node: GroupNode, database_url: str) -> None:
    heard: list[tuple[str, tuple[Fact, ...]]] = []

    def hear(group_id: str, facts: tuple[Fact, ...]) -> None:
        # The observer also reports that these members' metadata is not a consumer's.
        heard.append((group_id, tuple(fact for fact in facts if not isinstance(fact, ProtocolViolated))))

    node.groups.readers.append(hear)
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    assert [type(fact) for _, facts in heard for fact in facts] == [
        MemberJoined,
        RebalanceBegun,
        GenerationStarted,
        GenerationAssigned,
        AssignmentGiven,
        MemberSynced,
    ]
    heard.clear()
    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        assert [type(fact) for _, facts in heard for fact in facts] == [MemberJoined, RebalanceBegun]
    await asyncio.gather(*joins)
    assert heard[-1] == (
        G,
        (MemberRejoined(first.member_id), GenerationStarted(2, "range", (first.member_id, second.member_id))),
    )


# --- leases ---------------------------------------------------------------------------------------------------------


async def test_without_a_lease_nothing_is_coordinated(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    node.lease_clock.seconds += 3600
    assert member.heartbeat().error is ErrorCode.NOT_COORDINATOR
    assert (await member.join()).error is ErrorCode.NOT_COORDINATOR
    with pytest.raises(KafkaError) as refused:
        await classic_group(node)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR


async def test_fenced_write_sends_all_clients_of_the_shard_away(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    for table in ("node", "coordinator_lease"):
        await node.database.hot.fetch(f"update {table} set expires_at = now() - interval '1 second'")
    async with group_node(database_url, port=9093) as successor:
        taken_over = successor.member(G, "d1")
        taken_over.member_id, taken_over.generation_id = first.member_id, first.generation_id
        assert await taken_over.beat() is ErrorCode.NONE

        waits = second.join()
        assert first.heartbeat().error is ErrorCode.REBALANCE_IN_PROGRESS
        rejoin = first.join()
        assert [(await join).error for join in (waits, rejoin)] == [ErrorCode.NOT_COORDINATOR] * 2
        assert await taken_over.beat() is ErrorCode.NONE
        stored = await node.stored(G)
        assert stored is not None
        assert (stored.generation_id, len(stored.members)) == (1, 1)


async def test_loss_of_a_shard_answers_its_held_requests_alone(node: GroupNode) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    held = second.join()
    elsewhere = next(name for name in "abcdef" if node.leases.shard_of(name) != node.leases.shard_of(G))
    other = node.member(elsewhere, "c3")
    await settle(other)
    other_held = node.member(elsewhere, "c4").join()
    node.groups.shard_lost(node.leases.shard_of(G))
    assert (await held).error is ErrorCode.NOT_COORDINATOR
    assert not other_held.done()
    other_held.cancel()


async def test_a_held_sync_is_answered_when_its_shard_is_lost(node: GroupNode) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first, second)
    await asyncio.gather(first.join(), second.join())
    held = second.sync()
    node.groups.shard_lost(node.leases.shard_of(G))
    assert (await reply_of(held)).error is ErrorCode.NOT_COORDINATOR


async def test_state_of_a_former_lease_is_not_used_under_a_new_one(node: GroupNode) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    held = second.join()
    node.lease_news.is_cut = True
    await node.database.hot.fetch("update coordinator_lease set lease_epoch = lease_epoch + 1")
    await node.leases.renew()
    assert node.leases.lease_for(G) is not None
    assert await first.beat() is ErrorCode.NONE
    assert (await held).error is ErrorCode.NOT_COORDINATOR


def consumer_heartbeat(node: GroupNode, member_id: str, epoch: int, connection_number: int) -> ConsumerGroupHeartbeat:
    return ConsumerGroupHeartbeat(
        request_id=node.groups.next_request_id(),
        connection_id=ConnectionId(f"c{connection_number}"),
        connection_number=connection_number,
        version=1,
        new_member_id=MemberId("new"),
        client_id="client",
        client_host="/127.0.0.1",
        member_id=MemberId(member_id),
        member_epoch=epoch,
        rebalance_timeout_ms=60_000 if epoch == 0 else -1,
        subscribed_topic_names=("t",) if epoch == 0 else None,
        owned={} if epoch == 0 else None,
    )


async def test_request_on_an_older_connection_is_stale_after_a_reload(node: GroupNode) -> None:
    """A late join would undo what the member has received on its newer connection."""

    async def says(epoch: int, connection_number: int) -> ConsumerGroupHeartbeatReply:
        return await reply_of(node.groups.submit(G, consumer_heartbeat(node, "a", epoch, connection_number)))

    assert (await says(0, 2)).error is ErrorCode.NONE
    for _ in range(2):
        node.groups.shard_lost(node.leases.shard_of(G))
        assert (await says(0, 1)).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert (await says(1, 2)).error is ErrorCode.NONE
    assert (await says(1, 3)).error is ErrorCode.NONE, "a newer one is believed"
    node.groups.shard_acquired(node.leases.lease_for(G) or pytest.fail("no lease"))
    node.groups.shard_lost(node.leases.shard_of(G))
    node.groups.shard_acquired(node.leases.lease_for(G) or pytest.fail("no lease"))
    await until(lambda: not node.groups.shards_loading)
    assert (await says(1, 2)).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "its shard was read"


async def test_request_on_an_older_connection_is_stale_in_a_classic_group(node: GroupNode) -> None:
    """The group may become a consumer group, in which late joins do harm."""
    member = node.member(G, "c2", connection_number=2)
    await settle(member)
    node.groups.shard_lost(node.leases.shard_of(G))
    group = await classic_group(node)
    assert isinstance(group, Group)
    assert group.members[member.member_id].connection_number == 2


async def test_remembered_connections_are_bounded(database_url: str) -> None:
    ids = ("g1", "g2", "g3")
    async with group_node(database_url, bounds=Bounds(remembered=2)) as node:
        for group_id in ids:
            joined = node.groups.submit(group_id, consumer_heartbeat(node, "a", 0, 2))
            assert (await reply_of(joined)).error is ErrorCode.NONE
        for group_id in ids:
            node.groups.shard_lost(node.leases.shard_of(group_id))
        late = [
            (await reply_of(node.groups.submit(group_id, consumer_heartbeat(node, "a", 1, 1)))).error
            for group_id in ids
        ]
    assert sorted(late) == sorted([ErrorCode.NONE, *[ErrorCode.COORDINATOR_LOAD_IN_PROGRESS] * 2])


async def test_no_session_ends_under_a_lapsed_lease(node: GroupNode) -> None:
    member = node.member(G, "c1", session_timeout_ms=20)
    await settle(member)
    node.lease_clock.seconds += 3600
    await until(lambda: G not in node.groups.group_ids())
    stored = await node.stored(G)
    assert stored is not None
    assert (stored.state, len(stored.members)) == (GroupState.STABLE, 1)


async def test_waiter_for_a_held_group_is_sent_away_with_its_shard(node: GroupNode) -> None:
    await settle(node.member(G, "c1"))
    async with node.groups.holding(G):
        behind = asyncio.create_task(classic_group(node))
        await asyncio.sleep(0)
        node.groups.shard_lost(node.leases.shard_of(G))
        with pytest.raises(KafkaError) as refused:
            await asyncio.wait_for(behind, 10)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR


async def test_write_of_a_lapsed_lease_is_seen_by_the_next_read(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease returns at its former epoch, so the write is not fenced: a later reader must see it."""
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    gate = Gate(node, monkeypatch)
    joins = [second.join(), first.join()]
    await until(lambda: gate.waiting)
    node.lease_clock.seconds += 3600
    await node.leases.renew()
    assert {(await join).error for join in joins} == {ErrorCode.NOT_COORDINATOR}
    read_again = asyncio.create_task(classic_group(node))
    await until(lambda: node.groups.shards_loading <= {node.leases.shard_of(G)})
    gate.open()
    group, stored = await read_again, await node.stored(G)
    assert stored is not None
    assert (group.generation_id, len(group.members)) == (stored.generation_id, len(stored.members)) == (2, 2)


async def test_a_write_of_a_lapsed_lease_is_seen_by_the_reading_of_its_shard(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    gate = Gate(node, monkeypatch)
    joins = [second.join(), first.join()]
    await until(lambda: gate.waiting)
    node.lease_clock.seconds += 3600
    await node.leases.renew()
    assert {(await join).error for join in joins} == {ErrorCode.NOT_COORDINATOR}
    await until(lambda: node.groups.shards_loading <= {node.leases.shard_of(G)})
    gate.open()
    await until(lambda: not node.groups.shards_loading)
    assert (await classic_group(node)).generation_id == 2


async def test_only_shards_that_have_groups_are_read(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await settle(node.member(G, "c1"))
    asked: list[int] = []
    load_shard = node.store.load_shard

    async def noted(shard: int) -> list[GroupRecord]:
        asked.append(shard)
        return await load_shard(shard)

    await until(lambda: not node.groups.shards_loading)  # the node began to read its shards when it started
    monkeypatch.setattr(node.store, "load_shard", noted)
    await node.database.hot.fetch("update coordinator_lease set lease_epoch = lease_epoch + 1")
    await node.leases.renew()
    assert len(node.groups.shards_loading) == SHARDS
    await until(lambda: not node.groups.shards_loading)
    assert asked == [node.leases.shard_of(G)]
    assert node.groups.group_ids() == [G]


async def test_unreadable_group_of_a_shard_stays_stored_and_delays_no_other(node: GroupNode) -> None:
    """A newer release may have stored the group in a form that this release cannot read."""
    shard = node.leases.shard_of(G)
    before, after = [
        next(name for name in (f"{first}{number}" for number in range(10_000)) if node.leases.shard_of(name) == shard)
        for first in "az"
    ]
    for name in (G, before, after):
        await settle(node.member(name, name))
    node.groups.shard_lost(shard)
    await node.database.hot.fetch("update consumer_group set group_type = 'future' where group_id = $1", G)
    await node.database.hot.fetch("update group_member set document = document || '{\"session_timeout_ms\": 20}'")
    node.groups.shard_acquired(node.leases.lease_for(G) or pytest.fail("no lease"))
    await until(lambda: not node.groups.shards_loading)
    assert G not in node.groups.group_ids()
    assert (await node.member(G, "newcomer").join()).error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert len((await node.store.load([G]))[G].members) == 1
    for name in (before, after):
        await until(lambda name=name: name not in node.groups.group_ids())
        assert (stored := await node.stored(name)) is not None
        assert stored.state is GroupState.EMPTY


async def test_late_fenced_write_does_not_affect_the_next_lease(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    gate = Gate(node, monkeypatch)
    joins = [second.join(), first.join()]
    await until(lambda: gate.waiting)
    late_write = [task for task in node.groups.under_way if G in task.get_name()]
    await node.database.hot.fetch("update coordinator_lease set lease_epoch = lease_epoch + 1")
    await node.leases.renew()
    assert {(await join).error for join in joins} == {ErrorCode.NOT_COORDINATOR}
    beat = asyncio.create_task(first.beat())
    await asyncio.sleep(0)
    gate.open()
    await asyncio.wait(late_write)
    assert await beat is ErrorCode.NONE
    await until(lambda: not node.groups.shards_loading)
    assert (await classic_group(node)).generation_id == 1


# --- Postgres away --------------------------------------------------------------------------------------------------


async def test_write_is_repeated_until_postgres_accepts_it(database_url: str) -> None:
    async with group_node(database_url, statement_timeout_ms=500) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first)
        attempts: list[GroupChange] = []
        save = node.store.save

        async def counted(changes: Sequence[GroupChange], *, wait: bool = False) -> list[Saved]:
            attempts.extend(changes)
            return await save(changes, wait=wait)

        node.store.save = counted  # type: ignore[method-assign]
        async with locked_group(database_url, G):
            joins = [second.join(), first.join()]
            await until(lambda: len(attempts) >= 3)
            assert not any(join.done() for join in joins)
        assert {(await join).error for join in joins} == {ErrorCode.NONE}
        assert len(set(map(id, attempts))) == 1


async def test_a_group_that_cannot_be_stored_for_long_is_given_up_and_read_again(database_url: str) -> None:
    async with group_node(database_url, statement_timeout_ms=1_000, store_patience_ms=2_000) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first)
        async with locked_group(database_url, G):
            joins = [second.join(), first.join()]
            behind = first.heartbeat()
            assert {(await join).error for join in joins} == {ErrorCode.COORDINATOR_NOT_AVAILABLE}
            assert (await behind).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert await first.beat() is ErrorCode.NONE
        group = await classic_group(node)
        assert (group.state, group.generation_id, list(group.members)) == (GroupState.STABLE, 1, [first.member_id])


async def test_a_group_that_cannot_be_read_keeps_its_members_alive(database_url: str) -> None:
    async with group_node(database_url, store_patience_ms=0) as node:
        await node.database.close(timeout_s=0.1)
        member = node.member(G, "c1")
        beat, join, commit = member.heartbeat(), member.join(), member.may_commit()
        assert (await beat).error is ErrorCode.NONE
        assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert (await commit).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_heartbeats_queued_behind_a_slow_write_count_before_expired_sessions(
    node: GroupNode, database_url: str
) -> None:
    first, second = node.member(G, "c1", session_timeout_ms=300), node.member(G, "c2", session_timeout_ms=300)
    await settle(first, second)
    third = node.member(G, "c3", group_instance_id="i", session_timeout_ms=300)
    joins = [third.join(), second.join(), first.join()]
    await asyncio.gather(*joins)
    waiting = [each.sync() for each in (second, third)]
    async with locked_group(database_url, G) as lock:
        sync = first.sync({})
        await write_is_waiting(lock)
        loop = asyncio.get_running_loop()
        sessions_end = loop.time() + 0.35
        beats = [each.heartbeat() for each in (first, second, third)]
        await until(lambda: loop.time() > sessions_end)
    assert {(await reply_of(answer)).error for answer in (sync, *waiting, *beats)} == {ErrorCode.NONE}
    assert len((await classic_group(node)).members) == 3


async def test_session_counts_from_the_answer_and_not_from_the_step(node: GroupNode, database_url: str) -> None:
    """Even if storing takes longer than the session timeout, the member must have its full session after the answer."""
    first, second = node.member(G, "c1", session_timeout_ms=1_500), node.member(G, "c2", session_timeout_ms=1_500)
    await settle(first)
    loop = asyncio.get_running_loop()
    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        sessions_end = loop.time() + 1.6
        await until(lambda: loop.time() > sessions_end)
    assert {(await join).error for join in joins} == {ErrorCode.NONE}
    answered_ms = loop.time() * 1000
    group = await classic_group(node)
    assert min(group.session_deadlines.values()) > answered_ms + 1_000
    assert group.phase_deadline_ms is not None
    assert group.phase_deadline_ms > answered_ms + first.rebalance_timeout_ms - 500


def stand_still() -> None:
    """Block this process for a while."""
    time.sleep(0.5)


async def test_requests_during_a_stall_count_before_expired_sessions(
    node: GroupNode,
) -> None:
    member = node.member(G, "c1", session_timeout_ms=300)
    await settle(member)
    loop = asyncio.get_running_loop()
    beats: list[asyncio.Task[ErrorCode]] = []

    def read() -> None:
        """Create a task, as a handler does. The task runs in the turn of the event loop after the turn in which the
        bytes arrived.
        """
        beats.append(loop.create_task(member.beat()))

    loop.call_soon(lambda: loop.call_soon(read))
    stand_still()
    await until(lambda: beats)
    assert await beats[0] is ErrorCode.NONE


async def test_a_member_that_stays_silent_after_a_stall_expires_all_the_same(node: GroupNode) -> None:
    await settle(node.member(G, "c1", session_timeout_ms=300))
    stand_still()
    await until(lambda: not node.groups.group_ids())
    stored = await node.stored(G)
    assert stored is not None
    assert not stored.members


async def test_sessions_end_on_a_node_whose_every_timer_is_late(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def late(when: float, *given: Any, **options: Any) -> asyncio.TimerHandle:
        return call_at(when + 0.2, *given, **options)

    monkeypatch.setattr(loop, "call_at", late)
    await settle(node.member(G, "c1", session_timeout_ms=300))
    await until(lambda: not node.groups.group_ids(), seconds=5)


async def test_bug_in_the_coordinator_answers_all_waiting_requests(
    node: GroupNode, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)

    def broken(*_: object) -> object:
        raise ZeroDivisionError

    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        behind = first.heartbeat()
        monkeypatch.setattr(Machines, "step", broken)
    assert {(await join).error for join in joins} == {ErrorCode.NONE}
    assert (await behind).error is ErrorCode.UNKNOWN_SERVER_ERROR
    monkeypatch.undo()
    first.generation_id = 2
    assert await first.beat() is ErrorCode.NONE


async def test_step_that_fails_after_a_change_of_the_cluster_hides_the_change_from_no_other_group(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group_id in ("broken", "whole"):
        joined = node.groups.submit(group_id, consumer_heartbeat(node, "a", 0, 1))
        assert (await reply_of(joined)).error is ErrorCode.NONE
    step = Machines.step

    def fails(machines: Any, group: Any, *given: Any) -> Any:
        if group.group_id == "broken":
            raise ZeroDivisionError
        return step(machines, group, *given)

    monkeypatch.setattr(Machines, "step", fails)
    changed = Cluster(revision=1)
    node.groups.cluster_changed(changed)
    whole = node.groups.settled("whole")
    assert isinstance(whole, ConsumerGroup)
    assert whole.seen is changed
    assert node.groups.group_ids() == ["whole"]


# --- connections and shutdown ---------------------------------------------------------------------------------------


async def test_connection_closed_by_this_node_does_not_fail_its_member(node: GroupNode) -> None:
    first = node.member(G, "c1")
    await settle(first)
    node.groups.connection_closed("c1", by_peer=False)
    assert not node.groups.connections
    assert not (await classic_group(node)).connection_deadlines


async def test_a_closed_connection_costs_its_member_after_the_grace(database_url: str) -> None:
    settings = dataclasses.replace(QUICK, group_connection_grace_ms=50)
    async with group_node(database_url, settings=settings) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first, second)
        node.groups.connection_closed("c2")
        assert len((await classic_group(node)).members) == 2

        async def rebalancing() -> bool:
            return await first.beat() is ErrorCode.REBALANCE_IN_PROGRESS

        await until(rebalancing)
        reply = await first.join()
        assert [member.member_id for member in reply.members] == [first.member_id]


async def test_steps_of_timers_are_logged_without_a_request(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[GroupState, object]] = []

    def log(level: int, event: str, *, state: str, **fields: object) -> None:
        if level >= logging.INFO:
            told.append((GroupState(state), REQUEST.get()))

    monkeypatch.setattr(groups_log, "log", log)
    request = ("c1", "join_group", 7)
    token = REQUEST.set(request)
    await settle(node.member(G, "c1", session_timeout_ms=50))
    REQUEST.reset(token)
    await until(lambda: told[-1][0] is GroupState.EMPTY)
    assert told[0][1] == request
    assert told[-1][1] is None


async def test_request_held_for_a_closed_connection_is_dropped(node: GroupNode) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    held = second.join()
    assert not held.done()
    node.groups.connection_closed("c2")
    await asyncio.wait_for(held, 15)  # the rebalance timeout of 20 s would answer it too
    assert not held.cancelled()
    assert "c2" not in node.groups.connections


async def test_close_during_a_write_is_processed_after_it(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first, second)
    async with locked_group(database_url, G) as lock:
        joins = [first.join(), second.join()]
        await write_is_waiting(lock)
        node.groups.connection_closed("c2")
    await asyncio.gather(*joins)
    group = await classic_group(node)
    assert group.members[second.member_id].connection_id is None
    assert second.member_id in group.connection_deadlines


async def test_close_before_the_first_join_runs_is_processed_after_it(node: GroupNode) -> None:
    member = node.member(G, "c1")
    join = member.join()
    node.groups.connection_closed("c1")
    await join
    group = await classic_group(node)
    assert list(group.connection_deadlines) == list(group.members) == ["member-c1"]
    assert not node.groups.connections


async def test_close_before_the_first_join_is_stored_is_processed_after_it(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(node, monkeypatch)
    join = node.member(G, "c1").join()
    await until(lambda: gate.waiting)
    node.groups.connection_closed("c1")
    gate.open()
    await join
    group = await classic_group(node)
    assert list(group.connection_deadlines) == list(group.members) == ["member-c1"]
    assert not node.groups.connections


async def test_drain_answers_held_requests_and_keeps_the_stored_group(database_url: str) -> None:
    async with group_node(database_url) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first)
        before = await node.stored(G)
        held = second.join()
        await node.groups.drain()
        assert (await held).error is ErrorCode.NOT_COORDINATOR
        node.groups.connection_closed("c1")
        assert first.heartbeat().error is ErrorCode.NOT_COORDINATOR
        assert await node.stored(G) == before
    async with group_node(database_url) as after:
        member = after.member(G, "d1")
        member.member_id, member.generation_id = first.member_id, first.generation_id
        assert await member.beat() is ErrorCode.NONE


async def test_drain_lets_a_write_in_flight_finish_and_answers_it(node: GroupNode, database_url: str) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    async with locked_group(database_url, G) as lock:
        joins = [second.join(), first.join()]
        await write_is_waiting(lock)
        behind = first.heartbeat()
        draining = asyncio.create_task(node.groups.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        assert await first.beat() is ErrorCode.NOT_COORDINATOR
    await draining
    assert [(await join).generation_id for join in joins] == [2, 2]
    assert (await behind).error is ErrorCode.NOT_COORDINATOR
    stored = await node.stored(G)
    assert stored is not None
    assert stored.generation_id == 2


async def test_drain_gives_up_a_write_that_does_not_end(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    gate = Gate(node, monkeypatch)
    joins = [second.join(), first.join()]
    await until(lambda: gate.waiting)
    await asyncio.wait_for(node.groups.drain(0.01), 10)
    assert {(await join).error for join in joins} == {ErrorCode.NOT_COORDINATOR}


# --- memory ---------------------------------------------------------------------------------------------------------


async def test_groups_without_members_are_not_kept_in_memory(node: GroupNode) -> None:
    member = node.member(G, "c1")
    assert await member.beat() is ErrorCode.UNKNOWN_MEMBER_ID
    await until(lambda: not node.groups.group_ids())
    await settle(member)
    assert node.groups.group_ids() == [G]
    assert (await reply_of(member.leave())).error is ErrorCode.NONE
    await until(lambda: not node.groups.group_ids())
    stored = await node.stored(G)
    assert stored is not None
    assert (stored.state, stored.generation_id, stored.members) == (GroupState.EMPTY, 2, {})


async def test_a_group_emptied_while_its_shard_is_read_does_not_come_back(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = node.member(G, "c1")
    await settle(member)
    shard = node.leases.shard_of(G)
    node.groups.shard_lost(shard)
    records = await node.store.load_shard(shard)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(_: int) -> object:
        asked.set()
        await answer.wait()
        return records

    monkeypatch.setattr(node.store, "load_shard", slow)
    lease = node.leases.lease_for(G)
    assert lease is not None
    node.groups.shard_acquired(lease)
    await asked.wait()
    assert (await reply_of(member.leave())).error is ErrorCode.NONE
    answer.set()
    await until(lambda: not node.groups.shards_loading)
    assert (await classic_group(node)).state is GroupState.EMPTY
    await until(lambda: not node.groups.group_ids())


async def test_group_dropped_while_its_shard_is_read_is_not_taken_from_the_older_record(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease lapses for a moment while its renewal is under way."""
    first, second = node.member(G, "c1"), node.member(G, "c2")
    await settle(first)
    shard = node.leases.shard_of(G)
    node.groups.shard_lost(shard)
    records = await node.store.load_shard(shard)
    asked, answer, sent, renewed = (asyncio.Event() for _ in range(4))
    renew_leases = NodeStore.renew_leases

    async def slow_read(_: int) -> object:
        asked.set()
        await answer.wait()
        return records

    async def slow_renewal(*given: Any) -> Any:
        sent.set()
        await renewed.wait()
        return await renew_leases(*given)

    monkeypatch.setattr(node.store, "load_shard", slow_read)
    monkeypatch.setattr(NodeStore, "renew_leases", slow_renewal)
    node.groups.shard_acquired(node.leases.lease_for(G) or pytest.fail("no lease"))
    await asked.wait()
    assert {(await join).generation_id for join in (second.join(), first.join())} == {2}
    node.lease_clock.seconds = 40
    renewal = asyncio.create_task(node.leases.renew())
    await sent.wait()
    node.lease_clock.seconds = 50
    assert await first.beat() is ErrorCode.NOT_COORDINATOR
    renewed.set()
    await renewal
    answer.set()
    await until(lambda: not node.groups.shards_loading)
    assert (await classic_group(node)).generation_id == 2


async def test_queue_of_one_group_is_bounded(database_url: str) -> None:
    async with group_node(database_url, bounds=Bounds(mailbox=3)) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first)
        async with locked_group(database_url, G) as lock:
            joins = [second.join(), first.join()]
            await write_is_waiting(lock)
            waiting = [first.heartbeat() for _ in range(3)]
            assert first.heartbeat().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
        await asyncio.gather(*joins, *waiting)


async def test_too_many_groups_are_refused(database_url: str) -> None:
    async with group_node(database_url, bounds=Bounds(groups=1)) as node:
        await settle(node.member(G, "c1"))
        assert (await node.member("another", "c2").join()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_held_group_does_not_change(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    async with node.groups.holding(G) as (group, lease):
        assert isinstance(group, Group)
        assert group.state is GroupState.STABLE
        assert lease == node.leases.lease_for(G)
        leaving = member.leave()
        behind = asyncio.create_task(classic_group(node))
        await asyncio.sleep(0)
        assert not leaving.done()
        assert not behind.done()
    assert (await leaving).error is ErrorCode.NONE
    assert (await behind).state is GroupState.EMPTY


async def test_cancelled_waiter_does_not_block_a_held_group(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    async with node.groups.holding(G):
        early, late = asyncio.create_task(classic_group(node)), asyncio.create_task(classic_group(node))
        await asyncio.sleep(0)
        early.cancel()
    late.cancel()  # it is this writer's turn, but it has not resumed yet
    await asyncio.wait([early, late])
    assert await member.beat() is ErrorCode.NONE


async def test_deleting_a_group_takes_its_record_away(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    refused = node.groups.submit(G, DeleteGroup(node.groups.next_request_id()))
    assert (await reply_of(refused)).error is ErrorCode.NON_EMPTY_GROUP
    await reply_of(member.leave())
    deleted = node.groups.submit(G, DeleteGroup(node.groups.next_request_id()))
    assert (await reply_of(deleted)).error is ErrorCode.NONE
    assert await node.stored(G) is None
    again = node.groups.submit(G, DeleteGroup(node.groups.next_request_id()))
    assert (await reply_of(again)).error is ErrorCode.GROUP_ID_NOT_FOUND


async def test_five_hundred_members_settle_in_one_generation(node: GroupNode) -> None:
    members = [node.member(G, f"c{index}") for index in range(500)]
    await settle(*members)
    assert {member.generation_id for member in members} == {2}
    stored = await node.stored(G)
    assert stored is not None
    assert (stored.state, len(stored.members)) == (GroupState.STABLE, 500)
    assert {await member.beat() for member in members} == {ErrorCode.NONE}


async def test_rebalances_are_counted(database_url: str) -> None:
    count = 0

    def increment() -> None:
        nonlocal count
        count += 1

    async with group_node(database_url, count_rebalance=increment) as node:
        first, second = node.member(G, "c1"), node.member(G, "c2")
        await settle(first)
        counted_alone = count
        await asyncio.gather(second.join(), first.join())
        assert count == counted_alone + 1
