"""Requirements of consumer groups: members, held requests, generations, leaving, dying."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from protocol.errors import ErrorCode
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from tests.frames.members import Member, create_topic, describe, fresh, in_state, join_all, leader_of, member, settle
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient, encode_frame

NONE = ErrorCode.NONE
REBALANCE_IN_PROGRESS = ErrorCode.REBALANCE_IN_PROGRESS


@pytest.mark.parametrize("version", range(10))
async def test_two_sockets_with_one_client_id_are_two_members(gateway: GatewayProcess, version: int) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id, client_id="same", version=version) as first,
        member(gateway.bootstrap, group_id, client_id="same", version=version) as second,
    ):
        await join_all(first, second)
        assert first.member_id != second.member_id
        described = await describe(first.client, group_id)
        assert sorted(one.member_id for one in described.members) == sorted([first.member_id, second.member_id])
        assert [one.client_id for one in described.members] == ["same", "same"]


async def test_two_nameless_joins_on_one_socket_are_one_member(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id, version=3) as one:
        first, second = Member(one.client, group_id, version=3), Member(one.client, group_id, version=3)
        answers = await asyncio.gather(first.join_nowait(), second.join_nowait())
        assert answers[0].member_id == answers[1].member_id
        assert len((await describe(one.client, group_id)).members) == 1


async def test_the_id_handed_out_is_the_sockets_until_it_is_used(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as one, member(gateway.bootstrap, group_id) as other:
        await one.knock()
        handed_out, one.member_id = one.member_id, ""
        await one.knock()
        assert one.member_id == handed_out
        await other.knock()
        assert other.member_id != handed_out
        other.member_id = handed_out
        joined = await other.join_nowait()
        assert (joined.error_code, joined.member_id) == (NONE, handed_out)


async def test_an_unused_id_is_gone_after_the_session_timeout(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"group.min.session.timeout.ms": "100"})
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id, session_timeout_ms=200) as one:
        await one.knock()
        assert (await describe(one.client, group_id)).group_state == "Empty"
        await in_state(one.client, group_id, "Dead")
        assert (await one.join_nowait()).error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_new_connection_from_an_old_address_is_not_the_old_member(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    host, _, port = gateway.bootstrap.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        local = probe.getsockname()
    members: list[Member] = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
        one = Member(WireClient(reader, writer, "wire"), group_id, version=3)
        if members:
            held = one.join_nowait()
            async with member(gateway.bootstrap, group_id) as witness:
                described = await in_state(witness.client, group_id, "PreparingRebalance")
                assert len(described.members) == 2
            held.cancel()
        else:
            await settle(one)
        members.append(one)
        await one.client.abort()


async def test_the_follower_gets_exactly_the_leaders_bytes(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as c,
    ):
        await join_all(a, b, c)
        leader = leader_of(a, b, c)
        followers = [one for one in (a, b, c) if one is not leader]
        held = [one.sync_nowait() for one in followers]
        done, _ = await asyncio.wait(held, timeout=0.2)
        assert not done
        payloads = {one.member_id: bytes(range(256)) * (index + 1) for index, one in enumerate((a, b, c))}
        own = await leader.sync(payloads)
        assert own.assignment == payloads[leader.member_id]
        for one, answer in zip(followers, await asyncio.gather(*held), strict=True):
            assert answer.assignment == payloads[one.member_id]


async def test_a_held_sync_is_answered_when_a_third_member_joins(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as c,
    ):
        await join_all(a, b)
        follower = b if a.members else a
        held = follower.sync_nowait()
        await c.knock()
        third = c.join_nowait()
        answer = await asyncio.wait_for(held, 5)
        assert (answer.error_code, answer.assignment) == (REBALANCE_IN_PROGRESS, b"")
        assert not third.done()


@pytest.mark.parametrize("version", range(5))
async def test_heartbeat_is_answered_by_the_groups_phase(gateway: GatewayProcess, version: int) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first)
        old = first.generation_id
        await second.knock()
        held = second.join_nowait()
        await in_state(first.client, group_id, "PreparingRebalance")
        assert await first.heartbeat(version=version) == REBALANCE_IN_PROGRESS
        await first.join_nowait()
        await held
        assert (await describe(first.client, group_id)).group_state == "CompletingRebalance"
        assert await first.heartbeat(version=version) == NONE
        assert await first.heartbeat(version=version, generation_id=old) == ErrorCode.ILLEGAL_GENERATION
        assert await first.heartbeat(version=version, generation_id=old + 2) == ErrorCode.ILLEGAL_GENERATION


async def test_a_follower_that_rejoins_gets_its_assignment_and_never_an_older_one(
    gateway: GatewayProcess,
) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first, second)
        follower, leader = (second, first) if first.members else (first, second)
        generation_id = follower.generation_id
        rejoined = await follower.join_nowait()
        assert (rejoined.generation_id, rejoined.members) == (generation_id, ())
        assert (await follower.sync()).assignment == f"assignment of {follower.member_id}".encode()

        await join_all(leader, follower)
        assert follower.generation_id == generation_id + 1
        held = follower.sync_nowait()
        await leader.sync({leader.member_id: b"all"})
        assert (await held).assignment == b""


@pytest.mark.parametrize("version", range(6))
async def test_leaving_member_causes_a_rebalance(gateway: GatewayProcess, version: int) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as c,
    ):
        await settle(a, b, c)
        leader = leader_of(a, b, c)
        leaver, stays = [one for one in (a, b, c) if one is not leader]
        generation_id = stays.generation_id

        unknown = await stays.client.send(
            LeaveGroupRequest(group_id=group_id, member_id="nobody", members=(MemberIdentity(member_id="nobody"),)),
            version,
        )
        assert await stays.heartbeat() == NONE
        left = await leaver.leave(version=version)
        if version < 3:
            assert (unknown.error_code, unknown.members) == (ErrorCode.UNKNOWN_MEMBER_ID, ())
            assert (left.error_code, left.members) == (NONE, ())
        else:
            assert [one.error_code for one in unknown.members] == [ErrorCode.UNKNOWN_MEMBER_ID]
            assert [(one.member_id, one.error_code) for one in left.members] == [(leaver.member_id, NONE)]
        assert await stays.heartbeat() == REBALANCE_IN_PROGRESS
        await asyncio.gather(stays.join_nowait(), leader.join_nowait())
        assert leader.generation_id == generation_id + 1
        assert len(leader.members) == 2

        await leader.leave(version=version)
        assert (await stays.join_nowait()).leader == stays.member_id


@pytest.mark.parametrize("version", [3, 4, 5])
async def test_static_members_leave_by_instance_id_alone(gateway: GatewayProcess, version: int) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id, group_instance_id="i") as static,
        member(gateway.bootstrap, group_id) as admin,
    ):
        await settle(static)
        fenced, gone, again = [
            (await admin.client.send(LeaveGroupRequest(group_id=group_id, members=(identity,)), version)).members[0]
            for identity in (
                MemberIdentity(member_id="not its id", group_instance_id="i"),
                MemberIdentity(member_id="", group_instance_id="i"),
                MemberIdentity(member_id="", group_instance_id="i"),
            )
        ]
        assert fenced.error_code == ErrorCode.FENCED_INSTANCE_ID
        assert (gone.error_code, gone.member_id, gone.group_instance_id) == (NONE, "", "i")
        assert again.error_code == ErrorCode.UNKNOWN_MEMBER_ID
        assert (await describe(admin.client, group_id)).group_state == "Empty"


async def test_an_incompatible_rejoin_changes_nothing(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as one:
        await settle(one)
        one.protocols = (("sticky", b""),)
        assert (await one.join_nowait()).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert await one.heartbeat() == NONE
        one.protocols = (("range", b"subscription"),)
        assert (await one.join_nowait()).error_code == NONE


async def test_no_member_ends_with_an_empty_assignment_after_a_late_join(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as late,
    ):
        await join_all(a, b)
        leader, follower = (a, b) if a.members else (b, a)
        waiting = follower.sync_nowait()
        await late.knock()
        held = late.join_nowait()
        assert (await waiting).error_code == REBALANCE_IN_PROGRESS
        overtaken = await leader.sync({leader.member_id: b"x", follower.member_id: b"y"})
        assert overtaken.error_code == REBALANCE_IN_PROGRESS
        await asyncio.gather(leader.join_nowait(), follower.join_nowait(), held)
        assert set(leader_of(a, b, late).members) == {a.member_id, b.member_id, late.member_id}
        assignments = {one.member_id: one.member_id.encode() for one in (a, b, late)}
        syncs = [one.sync_nowait(assignments if one.members else None) for one in (a, b, late)]
        assert [answer.assignment for answer in await asyncio.gather(*syncs)] == list(assignments.values())


async def test_unknown_protocol_types_are_opaque(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    protocols = (("v1", b"\x00\x01\xff"), ("v0", b""))
    async with (
        member(gateway.bootstrap, group_id, protocol_type="sr", protocols=protocols) as a,
        member(gateway.bootstrap, group_id, protocol_type="sr", protocols=protocols) as b,
    ):
        await join_all(a, b)
        assert (await a.sync_nowait(protocol_name="v0")).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        leader, follower = (a, b) if a.members else (b, a)
        held = follower.sync_nowait(protocol_name="v1")
        own = await leader.sync_nowait({follower.member_id: b"\xff\xfe"}, protocol_name="v1")
        assert (own.error_code, own.assignment) == (NONE, b"")
        assert (await held).assignment == b"\xff\xfe"


async def test_four_members_join_and_leave_one_after_another(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    clients = [await WireClient.connect(gateway.bootstrap) for _ in range(4)]
    members = [Member(client, group_id) for client in clients]
    generations: list[int] = []
    for count in (1, 2, 3, 4):
        assert len(set((await settle(*members[:count])).values())) == count
        generations.append(members[0].generation_id)
    for count in (3, 2, 1):
        await members[count].leave()
        assert len(await settle(*members[:count])) == count
        generations.append(members[0].generation_id)
    assert generations == sorted(set(generations))
    for client in clients:
        await client.close()


@pytest.mark.parametrize("vanish", ["abort", "close"])
async def test_partitions_of_a_vanished_client_move_after_the_grace_period(
    gateway_factory: GatewayFactory, vanish: str
) -> None:
    gateway = gateway_factory({"group.connection.grace.ms": "100"})
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as stays:
        killed = Member(await WireClient.connect(gateway.bootstrap), group_id, session_timeout_ms=60_000)
        await settle(stays, killed)
        await getattr(killed.client, vanish)()
        await in_state(stays.client, group_id, "PreparingRebalance")
        assert await stays.heartbeat() == REBALANCE_IN_PROGRESS
        assert (await stays.join_nowait()).leader == stays.member_id
        assert stays.members == (stays.member_id,)


async def test_a_static_member_may_come_back_within_its_session(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"group.connection.grace.ms": "50"})
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as stays:
        static = Member(await WireClient.connect(gateway.bootstrap), group_id, group_instance_id="i")
        dynamic = Member(await WireClient.connect(gateway.bootstrap), group_id)
        await settle(stays, static, dynamic)
        await static.client.abort()
        await dynamic.client.abort()
        await in_state(stays.client, group_id, "PreparingRebalance")
        described = await describe(stays.client, group_id)
        assert {one.member_id for one in described.members} == {stays.member_id, static.member_id}


@pytest.mark.parametrize(("version", "said", "null"), [(7, b"\0\1?", b"\xff\xff"), (9, b"\2?", b"\0")])
async def test_a_commit_of_a_member_without_even_an_empty_id_closes_the_connection(
    gateway: GatewayProcess, version: int, said: bytes, null: bytes
) -> None:
    """@platformatic/kafka commits with a null member id after it has left its group. The field is not nullable, and
    Kafka closes the connection, too.
    """
    topic, group_id = fresh("topic"), fresh("group")
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=7, committed_metadata="")
    commit = OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=-1,
        member_id="?",
        topics=(OffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
    )
    frame = encode_frame(commit, version, 1)
    assert frame.count(said) == 1
    without = frame[4:].replace(said, null)
    asked = OffsetFetchRequestGroup(group_id=group_id, topics=None)
    async with await WireClient.connect(gateway.bootstrap) as other:
        await create_topic(other, topic)
        async with await WireClient.connect(gateway.bootstrap) as client:
            client.send_bytes(struct.pack(">i", len(without)) + without)
            await client.closed_by_peer()
        fetched = await other.send(OffsetFetchRequest(groups=(asked,)), 8)
        assert fetched.groups[0].topics == ()
