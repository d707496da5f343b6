"""Defects of consumer groups of another gateway (SeaweedFS #9143 and its follow-ups) that show on the wire.

The others are in `tests/coordinator/test_seaweed.py`, and with stock clients in `tests/clients/`.
"""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import ErrorCode
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from tests.frames.members import Member, create_topic, fresh, in_state, leader_of, member, settle
from tests.gateway_process import GatewayProcess
from tests.wire import encode_frame, read_frame

NONE = ErrorCode.NONE


async def test_a_reconnected_client_leaves_no_phantom_when_it_names_itself(gateway: GatewayProcess) -> None:
    group_id = fresh("returned")
    async with member(gateway.bootstrap, group_id, version=3) as first:
        await settle(first)
        async with member(gateway.bootstrap, group_id, version=3) as again:
            again.member_id, again.generation_id = first.member_id, first.generation_id
            assert await again.heartbeat() == NONE
            # The id now belongs to the new connection. So an empty member id on the new connection means that member.
            # On the old connection it means a new member.
            again.member_id = ""
            assert (await again.join_nowait()).member_id == first.member_id
            first.member_id = ""
            newcomer = first.join_nowait()
            assert await again.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
            rejoined = await again.join_nowait()
            assert (await newcomer).member_id != rejoined.member_id
            assert len(rejoined.members) == 2


async def test_a_member_that_leaves_in_a_list_is_gone_at_once(gateway: GatewayProcess) -> None:
    group_id = fresh("left")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first, second)
        left = await second.leave(version=3)
        assert (left.error_code, left.members[0].error_code) == (NONE, NONE)
        assert await first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        assert [one.member_id for one in (await first.join_nowait()).members] == [first.member_id]


async def test_every_entry_of_a_batch_is_processed_in_one_rebalance(gateway: GatewayProcess) -> None:
    group_id = fresh("leavers")
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


LEAVE_ANSWERS = {
    0: "0019",
    1: "00000000 0019",
    2: "00000000 0019",
    3: "00000000 0000 00000001 0001 6d ffff 0019",
    4: "00 00000000 0000 02 02 6d 00 0019 00 00",
    5: "00 00000000 0000 02 02 6d 00 0019 00 00",
}
"""Bytes after the correlation id of a LeaveGroup answer. Member `m` has no instance id and is unknown."""


@pytest.mark.parametrize("version", range(6))
async def test_leave_answers_to_the_byte(gateway: GatewayProcess, version: int) -> None:
    request = LeaveGroupRequest(group_id=fresh("nobody"), member_id="m", members=(MemberIdentity(member_id="m"),))
    host, _, port = gateway.bootstrap.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(encode_frame(request, version, 77))
        frame = await asyncio.wait_for(read_frame(reader), 10)
    finally:
        writer.close()
    assert bytes(frame) == (77).to_bytes(4) + bytes.fromhex(LEAVE_ANSWERS[version])


async def test_held_requests_of_one_member_do_not_delay_another(gateway: GatewayProcess) -> None:
    """One connection's request is held for minutes. Requests on all other connections are answered."""
    group_id, topic = fresh("held"), fresh("topic")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await create_topic(first.client, topic)
        await settle(first)
        await second.knock()
        held = second.join_nowait()
        await in_state(first.client, group_id, "PreparingRebalance")
        assert await first.commit(topic, 5) == NONE
        other = Member(first.client, fresh("held"), version=3)
        await settle(other)
        assert not held.done()
