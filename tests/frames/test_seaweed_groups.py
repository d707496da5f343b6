"""What went wrong with consumer groups of another gateway (SeaweedFS #9143 and its follow-ups), on the wire."""

from __future__ import annotations

import asyncio
import re

import pytest

from protocol.errors import ErrorCode
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from tests.frames.members import Member, create_topic, describe, fresh, in_state, join_all, leader_of, member, settle
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import encode_frame, read_frame

NONE = ErrorCode.NONE
UUID4 = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
UNANSWERED_SECONDS = 0.2
"""How long a request must go without an answer to count as held."""


async def is_held(answer: asyncio.Future[object]) -> bool:
    return not (await asyncio.wait([answer], timeout=UNANSWERED_SECONDS))[0]


async def test_one_client_id_on_two_connections_is_two_members(gateway: GatewayProcess) -> None:
    group_id = fresh("row1")
    async with (
        member(gateway.bootstrap, group_id, client_id="sarama") as first,
        member(gateway.bootstrap, group_id, client_id="sarama") as second,
    ):
        await settle(first, second)
        assert first.member_id != second.member_id
        for one in (first, second):
            assert re.fullmatch(f"sarama-{UUID4}", one.member_id)
        described = await describe(first.client, group_id)
        assert {(one.member_id, one.client_id) for one in described.members} == {
            (first.member_id, "sarama"),
            (second.member_id, "sarama"),
        }


async def test_a_reconnected_client_leaves_no_phantom_when_it_names_itself(gateway: GatewayProcess) -> None:
    group_id = fresh("row1")
    async with member(gateway.bootstrap, group_id, version=3) as first:
        await settle(first)
        async with member(gateway.bootstrap, group_id, version=3) as again:
            again.member_id, again.generation_id = first.member_id, first.generation_id
            assert await again.heartbeat() == NONE
            # The id has moved to this connection, so an empty id here is that member, and on the old one a new member.
            again.member_id = ""
            assert (await again.join_nowait()).member_id == first.member_id
            first.member_id = ""
            newcomer = first.join_nowait()
            assert await again.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
            rejoined = await again.join_nowait()
            assert (await newcomer).member_id != rejoined.member_id
            assert len(rejoined.members) == 2


async def test_a_rejoining_follower_keeps_what_the_leader_gave_it(gateway: GatewayProcess) -> None:
    group_id = fresh("row2")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as c,
    ):
        assignments = await settle(a, b, c)
        follower = next(one for one in (a, b, c) if not one.members)
        generation_id = follower.generation_id
        assert (await follower.join_nowait()).generation_id == generation_id
        again = await follower.sync()
        assert (again.error_code, again.assignment) == (NONE, assignments[follower.member_id])
        # What belongs to an older generation is not given in a newer one: it waits for the leader.
        follower.protocols = (("range", b"other topics"),)
        await join_all(follower, *[one for one in (a, b, c) if one is not follower])
        assert follower.generation_id == generation_id + 1
        held = follower.sync_nowait()
        assert await is_held(held)
        leader = leader_of(a, b, c)
        await leader.sync({follower.member_id: b"fresh"})
        assert (await held).assignment == b"fresh"


async def test_a_follower_that_syncs_first_waits_for_the_leader(gateway: GatewayProcess) -> None:
    group_id = fresh("row3")
    async with member(gateway.bootstrap, group_id) as a, member(gateway.bootstrap, group_id) as b:
        await join_all(a, b)
        leader = leader_of(a, b)
        follower = b if leader is a else a
        held = follower.sync_nowait()
        assert await is_held(held)
        await leader.sync({follower.member_id: b"\x00\x01 exactly these", leader.member_id: b""})
        answer = await held
        assert (answer.error_code, answer.assignment) == (NONE, b"\x00\x01 exactly these")


async def test_the_old_generation_is_told_to_rejoin_while_the_group_rebalances(gateway: GatewayProcess) -> None:
    group_id = fresh("row4")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first)
        await second.knock()
        held = second.join_nowait()
        await in_state(first.client, group_id, "PreparingRebalance")
        assert await first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        old_generation = first.generation_id
        await first.join_nowait()
        await held
        assert await first.heartbeat(generation_id=old_generation) == ErrorCode.ILLEGAL_GENERATION
        assert await first.heartbeat() == NONE


async def test_a_member_that_leaves_in_a_list_is_gone_at_once(gateway: GatewayProcess) -> None:
    group_id = fresh("row5")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first, second)
        left = await second.leave(version=3)
        assert (left.error_code, left.members[0].error_code) == (NONE, NONE)
        assert await first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        assert [one.member_id for one in (await first.join_nowait()).members] == [first.member_id]


async def test_a_refused_rejoin_leaves_the_member_as_it_was(gateway: GatewayProcess) -> None:
    group_id = fresh("r1")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        assignments = await settle(first, second)
        before = await describe(first.client, group_id)
        follower = second if first.members else first
        follower.protocols = (("something else", b""),)
        refused = await follower.join_nowait()
        assert refused.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert await follower.heartbeat() == NONE
        assert (await follower.sync()).assignment == assignments[follower.member_id]
        async with member(gateway.bootstrap, group_id, group_instance_id="i") as stranger:
            stranger.protocols = (("something else", b""),)
            assert (await stranger.join_nowait()).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert await describe(first.client, group_id) == before


async def test_every_entry_of_a_batch_is_processed_in_one_rebalance(gateway: GatewayProcess) -> None:
    group_id = fresh("r2")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id, group_instance_id="static") as c,
        member(gateway.bootstrap, group_id) as d,
    ):
        await settle(a, b, c, d)
        leader = leader_of(a, b, c, d)
        stays = next(one for one in (d, a, b) if one is not leader)
        leavers = [one for one in (a, b, d) if one not in (leader, stays)]
        generation_id = stays.generation_id
        answer = await stays.client.send(
            LeaveGroupRequest(
                group_id=group_id,
                members=(
                    MemberIdentity(member_id="nobody"),
                    MemberIdentity(member_id="not its id", group_instance_id="static"),
                    *(MemberIdentity(member_id=one.member_id) for one in leavers),
                    MemberIdentity(member_id=leader.member_id, group_instance_id=leader.group_instance_id),
                ),
            ),
            5,
        )
        assert answer.error_code == NONE
        assert [one.error_code for one in answer.members] == [
            ErrorCode.UNKNOWN_MEMBER_ID,
            ErrorCode.FENCED_INSTANCE_ID,
            *[NONE] * len(leavers),
            NONE,
        ]
        stayed = [one for one in (c, stays) if one is not leader]
        answers = await asyncio.gather(*[one.join_nowait() for one in stayed])
        assert {one.generation_id for one in answers} == {generation_id + 1}
        assert {one.leader for one in answers} <= {one.member_id for one in stayed}


async def test_the_leader_stays_if_it_did_not_leave(gateway: GatewayProcess) -> None:
    group_id = fresh("r2")
    async with (
        member(gateway.bootstrap, group_id) as a,
        member(gateway.bootstrap, group_id) as b,
        member(gateway.bootstrap, group_id) as c,
    ):
        await settle(a, b, c)
        leader = leader_of(a, b, c)
        leaver, stays = [one for one in (a, b, c) if one is not leader]
        await leaver.leave()
        answers = await asyncio.gather(stays.join_nowait(), leader.join_nowait())
        assert [one.leader for one in answers] == [leader.member_id] * 2


LEAVE_ANSWERS = {
    0: "0019",
    1: "00000000 0019",
    2: "00000000 0019",
    3: "00000000 0000 00000001 0001 6d ffff 0019",
    4: "00 00000000 0000 02 02 6d 00 0019 00 00",
    5: "00 00000000 0000 02 02 6d 00 0019 00 00",
}
"""The bytes after the correlation id when member `m`, without instance id, is unknown."""


@pytest.mark.parametrize("version", range(6))
async def test_leave_answers_to_the_byte(gateway: GatewayProcess, version: int) -> None:
    request = LeaveGroupRequest(group_id=fresh("r3"), member_id="m", members=(MemberIdentity(member_id="m"),))
    host, _, port = gateway.bootstrap.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(encode_frame(request, version, 77))
        frame = await asyncio.wait_for(read_frame(reader), 10)
    finally:
        writer.close()
    assert bytes(frame) == (77).to_bytes(4) + bytes.fromhex(LEAVE_ANSWERS[version])


async def test_a_late_joiner_sends_the_syncing_leader_back(gateway: GatewayProcess) -> None:
    group_id = fresh("f1")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as late:
        await first.join()
        await late.knock()
        held = late.join_nowait()
        await in_state(late.client if held.done() else first.client, group_id, "PreparingRebalance")
        sync = await first.sync({first.member_id: b"everything"})
        assert (sync.error_code, sync.assignment) == (ErrorCode.REBALANCE_IN_PROGRESS, b"")
        rejoined = await first.join_nowait()
        assert {one.member_id for one in rejoined.members} == {first.member_id, late.member_id}
        await held
        follower = late.sync_nowait()
        await first.sync({first.member_id: b"half", late.member_id: b"other half"})
        assert (await follower).assignment == b"other half"


async def test_a_sync_for_another_protocol_is_refused(gateway: GatewayProcess) -> None:
    group_id = fresh("f2")
    async with member(gateway.bootstrap, group_id) as one:
        await one.join()
        other_name = await one.sync_nowait({one.member_id: b"x"}, protocol_name="roundrobin")
        assert other_name.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert (other_name.protocol_type, other_name.protocol_name) == (None, None)
        one.protocol_type = "connect"
        other_type = await one.sync_nowait({one.member_id: b"x"})
        assert other_type.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        one.protocol_type = "consumer"
        assert (await one.sync({one.member_id: b"x"})).assignment == b"x"


async def test_a_leader_of_another_protocol_type_may_assign_nothing(gateway: GatewayProcess) -> None:
    group_id = fresh("f3")
    async with member(gateway.bootstrap, group_id, protocol_type="sr", protocols=(("v0", b"\xff\x00"),)) as one:
        joined = await one.join()
        assert joined.members[0].metadata == b"\xff\x00"
        sync = await one.sync_nowait({}, protocol_name="v0")
        assert (sync.error_code, sync.assignment, sync.protocol_type) == (NONE, b"", "sr")
        described = await describe(one.client, group_id)
        assert (described.group_state, described.protocol_type) == ("Stable", "sr")
        assert await one.heartbeat() == NONE


async def test_a_silent_leader_is_gone_after_its_session_and_not_later(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"group.min.session.timeout.ms": "100", "group.connection.grace.ms": "-1"})
    group_id = fresh("f4")
    async with (
        member(gateway.bootstrap, group_id, session_timeout_ms=300) as silent,
        member(gateway.bootstrap, group_id) as successor,
    ):
        await settle(silent)
        await in_state(successor.client, group_id, "Empty")
        joined = await successor.join()
        assert [one.member_id for one in joined.members] == [joined.leader] == [successor.member_id]
        assert joined.generation_id > silent.generation_id
        assert await silent.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


async def test_held_requests_of_one_member_do_not_hold_up_another(gateway: GatewayProcess) -> None:
    """One connection waits for minutes, every other goes on."""
    group_id, topic = fresh("f5"), fresh("topic")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await create_topic(first.client, topic)
        await settle(first)
        await second.knock()
        held = second.join_nowait()
        await in_state(first.client, group_id, "PreparingRebalance")
        assert await first.commit(topic, 5) == NONE
        other = Member(first.client, fresh("f5"), version=3)
        await settle(other)
        assert not held.done()
