"""Members that a test loses, and a member that joins only to cause a rebalance.

The one idea: nothing here invents a way for a group to change. A lost member is one whose session ends now. A rebalance
is the arrival and the departure of a real member.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from gateway.coordinator.classic.model import Group
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerGroupHeartbeatReply
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Request
from gateway.coordinator.requests import JoinGroup, JoinReply, LeaveGroup, LeavingMember, SyncGroup
from gateway.groups.groups import Groups
from gateway.groups.kinds import AnyGroup
from gateway.groups.runtime import ReplyT
from protocol.consumer import decode_subscription, encode_subscription
from protocol.errors import ErrorCode, KafkaError, ProtocolError

CLIENT_ID = "sluice-testing"
CONNECTION = ConnectionId("sluice-testing")
POLL_S = 0.01
TIMEOUT_MS = 30_000
LEAVE_EPOCH, JOIN_EPOCH = -1, 0
PASSING = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NON_EMPTY_GROUP,
    }
)
"""Refusals that end by themselves: the node's lease has lapsed, the group is being read, a client has joined again."""

DeleteGroups = Callable[[Sequence[str]], Awaitable[Mapping[str, ErrorCode]]]
"""Sends DeleteGroups, and returns the error code of each group."""


class Members:
    """Actions of a test on the members of one node's groups. Every wait is bounded by `timeout_s`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    async def of(self, group_id: str) -> dict[str, str]:
        """Return the client id of each member by member id, in the order of joining."""
        members = _members(await self._view(group_id))
        return {str(member_id): client_id for member_id, client_id in members.items()}

    async def lose(self, group_id: str, member_id: str | None, timeout_s: float) -> str:
        """End the session of a member, by default the oldest's, and return its id once the group has dropped
        it. Raise KafkaError, or TimeoutError if the group does not drop it in time."""
        members = _members(await self._view(group_id))
        if not members:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group_id} has no members")
        lost = next(iter(members)) if member_id is None else MemberId(member_id)
        if lost not in members:
            known = ", ".join(members)
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group_id} has no member {lost}, but {known}")
        await self._drop(group_id, [lost], timeout_s)
        return str(lost)

    async def delete_groups(self, delete: DeleteGroups, timeout_s: float) -> None:
        """Drop the members of each group that exists or is being joined, and delete the group.

        The ids do not come from `Groups.list`: it omits a group whose lease has lapsed on a slow machine, and a group
        that a client joins while the node still reads it. Either would be there again a moment later. Raise KafkaError
        if a group cannot be deleted in time.
        """
        if not self._groups.begun:
            return  # No client has looked for a coordinator, so no client has joined a group.
        deadline = time.monotonic() + timeout_s
        left = sorted(await self._groups.ids())
        while left:
            await asyncio.gather(*(self._clear(group_id, timeout_s) for group_id in left))
            answers = await delete(left)
            for group_id, error in answers.items():
                is_late = error in PASSING and time.monotonic() > deadline
                if is_late or error not in PASSING | {ErrorCode.NONE, ErrorCode.GROUP_ID_NOT_FOUND}:
                    raise KafkaError(error, f"group {group_id} cannot be deleted")
            left = [group_id for group_id, error in answers.items() if error in PASSING]
            if left:
                await asyncio.sleep(POLL_S)

    async def _clear(self, group_id: str, timeout_s: float) -> None:
        """Drop all members of a group. Leave a group that cannot be read now to the next attempt."""
        try:
            members = _members(await self._view(group_id))
            if members:
                await self._drop(group_id, members, timeout_s)
        except KafkaError as refused:
            if refused.code not in PASSING:
                raise

    async def _drop(self, group_id: str, lost: Collection[MemberId], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := [each for each in lost if each in _members(await self._view(group_id))]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"group {group_id} has not dropped {', '.join(left)} in {timeout_s:g} s")

            # A member whose request the group holds back counts as alive, so its session ends after the answer.
            def ended(group: AnyGroup, now_ms: int, left: Collection[MemberId] = left) -> AnyGroup:
                return _sessions_ended(group, left, now_ms)

            await self._groups.change_volatile(group_id, ended)
            await asyncio.sleep(POLL_S)

    async def rebalance(self, group_id: str, timeout_s: float) -> None:
        """Let a member join, receive its share and leave. Return once the other members have their partitions back.

        Raise KafkaError for a group without members or of a type without rebalances, and TimeoutError.
        """
        group = await self._view(group_id)
        if not _members(group):
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group_id} has no members")
        async with asyncio.timeout(timeout_s):
            match group:
                case Group():
                    await self._rebalance_classic(group)
                case ConsumerGroup():
                    await self._rebalance_consumer(group)
                case _:
                    raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id} is neither classic nor consumer")
            while True:
                if await self._is_stable(group_id):
                    return
                await asyncio.sleep(POLL_S)

    async def _rebalance_classic(self, group: Group) -> None:
        model = next(iter(group.members.values()))
        protocols = tuple((name, _as_new(metadata)) for name, metadata in model.protocols)
        member_id = MemberId(f"{CLIENT_ID}-{uuid.uuid4()}")
        try:
            joined = await self._join(group, protocols, member_id)
            # If an old member did not join again in time, the newcomer may have become the leader. Then it assigns
            # nothing.
            sync = SyncGroup(
                self._groups.next_request_id(),
                CONNECTION,
                joined.member_id,
                None,
                joined.generation_id,
                joined.protocol_type,
                joined.protocol_name,
                (),
            )
            await self._ask(group.group_id, sync)
        finally:
            leave = LeaveGroup(
                self._groups.next_request_id(), CONNECTION, (LeavingMember(member_id, None, "a test's rebalance"),)
            )
            await self._ask(group.group_id, leave)

    async def _join(self, group: Group, protocols: tuple[tuple[str, bytes], ...], member_id: MemberId) -> JoinReply:
        reply = await self._ask(
            group.group_id,
            JoinGroup(
                self._groups.next_request_id(),
                CONNECTION,
                version=3,  # version 3 joins at once; from version 4 on the coordinator first returns a member id
                client_id=CLIENT_ID,
                client_host="",
                member_id=MemberId(""),
                group_instance_id=None,
                protocol_type=group.protocol_type or "consumer",
                protocols=protocols,
                session_timeout_ms=TIMEOUT_MS,
                rebalance_timeout_ms=TIMEOUT_MS,
                new_member_id=member_id,
                reason="a test's rebalance",
            ),
        )
        if reply.error is not ErrorCode.NONE:
            raise KafkaError(reply.error, f"no member can join group {group.group_id}")
        return reply

    async def _rebalance_consumer(self, group: ConsumerGroup) -> None:
        member_id = MemberId(str(uuid.uuid4()))
        model = next(iter(group.members.values()))
        group_id = group.group_id
        joining = self._heartbeat(member_id, JOIN_EPOCH)
        reply = await self._beat(
            group_id,
            replace(
                joining,
                rebalance_timeout_ms=TIMEOUT_MS,
                subscribed_topic_names=model.subscribed_topic_names,
                subscribed_topic_regex=model.subscribed_topic_regex or None,
                owned={},
            ),
        )
        try:
            while not await self._is_stable(group_id):
                await asyncio.sleep(POLL_S)
                owned = reply.assignment
                reply = await self._beat(group_id, replace(self._heartbeat(member_id, reply.member_epoch), owned=owned))
        finally:
            await self._ask(group_id, self._heartbeat(member_id, LEAVE_EPOCH))

    def _heartbeat(self, member_id: MemberId, epoch: int) -> ConsumerGroupHeartbeat:
        return ConsumerGroupHeartbeat(
            request_id=self._groups.next_request_id(),
            connection_id=CONNECTION,
            connection_number=-1,
            version=1,
            client_id=CLIENT_ID,
            client_host="",
            new_member_id=member_id,
            member_id=member_id,
            member_epoch=epoch,
        )

    async def _beat(self, group_id: str, heartbeat: ConsumerGroupHeartbeat) -> ConsumerGroupHeartbeatReply:
        reply = await self._ask(group_id, heartbeat)
        if reply.error is not ErrorCode.NONE:
            raise KafkaError(reply.error, reply.message or f"no member can join group {group_id}")
        return reply

    async def _is_stable(self, group_id: str) -> bool:
        group = await self._view(group_id)
        return not _members(group) or self._groups.summary(group).is_stable

    async def _ask(self, group_id: str, request: Request[ReplyT]) -> ReplyT:
        reply = self._groups.submit(group_id, request)
        return await reply if isinstance(reply, asyncio.Future) else reply

    async def _view(self, group_id: str) -> AnyGroup:
        if not self._groups.begun:
            return Group(group_id)  # No client has looked for a coordinator, so no client has joined a group.
        return await self._groups.view(group_id)


def _members(group: AnyGroup) -> dict[MemberId, str]:
    """Return the client id of each member."""
    return {member_id: member.client_id for member_id, member in group.members.items()}


def _sessions_ended(group: AnyGroup, lost: Collection[MemberId], now_ms: int) -> AnyGroup:
    """Return the group with the sessions of some members over."""
    if isinstance(group, Group):
        ended = {member_id: now_ms for member_id in lost if member_id in group.session_deadlines}
        return replace(group, session_deadlines={**group.session_deadlines, **ended})
    deadlines = group.session_deadlines
    for member_id in lost:
        if member_id in group.members:
            deadlines = deadlines.moved(member_id, now_ms)
    return replace(group, session_deadlines=deadlines)


def _as_new(metadata: bytes) -> bytes:
    """Return a member's subscription without owned partitions. Metadata of other protocol types is returned
    unchanged."""
    try:
        subscription = decode_subscription(metadata)
    except ProtocolError:
        return metadata
    return encode_subscription(replace(subscription, owned_partitions=(), user_data=None, generation_id=-1))
