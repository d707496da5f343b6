"""A scene for example tests: one group, a clock that the test moves, and requests whose replies a test can inspect. A
test reads like a client's exchange with the coordinator. Every step is checked against the table of transitions, the
invariants, and the rule that each request gets one reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.coordinator.classic.machine import next_deadline, step
from gateway.coordinator.classic.model import Event, Group, GroupState, Member
from gateway.coordinator.classic.table import TABLE
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionClosed, ConnectionId, Reply, RequestId, Step, Tick
from gateway.coordinator.requests import (
    DeleteGroup,
    Heartbeat,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    LeavingMember,
    OffsetCommit,
    Protocols,
    SyncGroup,
    SyncReply,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings
from protocol.consumer import Subscription, encode_subscription
from protocol.errors import ErrorCode

from .invariants import broken_by, held_requests, must_store

if TYPE_CHECKING:
    from collections.abc import Sequence

NONE = ErrorCode.NONE
SESSION_MS = 10_000
REBALANCE_MS = 60_000


def subscription(*topics: str, user_data: bytes = b"") -> bytes:
    return encode_subscription(Subscription(1, topics, user_data))


def protocols(*names: str, topics: Sequence[str] = ("t",), user_data: bytes = b"") -> Protocols:
    return tuple((name, subscription(*topics, user_data=user_data)) for name in names)


RANGE = protocols("range")


@dataclass
class Asked:
    """A request and its outcome."""

    event: Event
    reply: Reply | None = None

    @property
    def parked(self) -> bool:
        return self.reply is None

    @property
    def error(self) -> ErrorCode | None:
        return None if self.reply is None else self.reply.error

    @property
    def join(self) -> JoinReply:
        assert isinstance(self.reply, JoinReply), "no answer to the join yet"
        return self.reply

    @property
    def sync(self) -> SyncReply:
        assert isinstance(self.reply, SyncReply), "no answer to the sync yet"
        return self.reply

    @property
    def codes(self) -> list[ErrorCode]:
        assert isinstance(self.reply, LeaveReply), "no answer to the leave yet"
        return [member.error for member in self.reply.members]


class Scene:
    def __init__(self, group: Group | None = None, *, delay_ms: int = 0, **settings: Any) -> None:
        self.settings = Settings(group_initial_rebalance_delay_ms=delay_ms, **settings)
        self.group: Group = group if group is not None else Group("g")
        self.now_ms = 1_000_000
        self.cluster = NO_TOPICS
        self.last = Step(self.group)
        self._before_last = self.group
        self._asked: dict[RequestId, Asked] = {}
        self.last_id = 0

    # --- events ------------------------------------------------------------------------------------------------------

    def join(
        self,
        connection: str,
        member_id: str = "",
        *,
        instance: str | None = None,
        version: int = 3,
        offer: Protocols = RANGE,
        protocol_type: str = "consumer",
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        client_id: str = "client",
        reason: str | None = None,
    ) -> Asked:
        self.last_id += 1
        return self.send(
            JoinGroup(
                RequestId(self.last_id),
                ConnectionId(connection),
                version,
                client_id,
                "/127.0.0.1",
                MemberId(member_id),
                instance,
                protocol_type,
                offer,
                session_ms,
                rebalance_ms,
                MemberId(f"{instance or client_id}-{self.last_id}"),
                reason,
            )
        )

    def sync(
        self,
        connection: str,
        member_id: str,
        assignments: dict[str, bytes] | None = None,
        *,
        generation: int | None = None,
        instance: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> Asked:
        self.last_id += 1
        return self.send(
            SyncGroup(
                RequestId(self.last_id),
                ConnectionId(connection),
                MemberId(member_id),
                instance,
                self.group.generation_id if generation is None else generation,
                protocol_type,
                protocol_name,
                tuple((MemberId(key), value) for key, value in (assignments or {}).items()),
            )
        )

    def heartbeat(
        self, connection: str, member_id: str, *, generation: int | None = None, instance: str | None = None
    ) -> Asked:
        self.last_id += 1
        asked: int = self.group.generation_id if generation is None else generation
        return self.send(
            Heartbeat(RequestId(self.last_id), ConnectionId(connection), MemberId(member_id), instance, asked)
        )

    def commit(
        self,
        connection: str,
        member_id: str = "",
        *,
        generation: int | None = None,
        instance: str | None = None,
        version: int = 8,
    ) -> Asked:
        self.last_id += 1
        return self.send(
            OffsetCommit(
                RequestId(self.last_id),
                ConnectionId(connection),
                version,
                MemberId(member_id),
                instance,
                self.group.generation_id if generation is None else generation,
            )
        )

    def txn_commit(
        self, connection: str, member_id: str = "", *, generation: int | None = None, instance: str | None = None
    ) -> Asked:
        self.last_id += 1
        asked: int = self.group.generation_id if generation is None else generation
        return self.send(
            TxnOffsetCommit(RequestId(self.last_id), ConnectionId(connection), MemberId(member_id), instance, asked)
        )

    def leave(self, connection: str, *leaving: str | tuple[str, str | None]) -> Asked:
        """Send LeaveGroup. Each leaver is a member id, or a member id with an instance id."""
        self.last_id += 1
        pairs = [(each, None) if isinstance(each, str) else each for each in leaving]
        members = tuple(LeavingMember(MemberId(member_id), instance) for member_id, instance in pairs)
        return self.send(LeaveGroup(RequestId(self.last_id), ConnectionId(connection), members))

    def delete(self) -> Asked:
        self.last_id += 1
        return self.send(DeleteGroup(RequestId(self.last_id)))

    def close(self, connection: str) -> Step:
        """Close the connection. The requests that are held on it are dropped, as the gateway drops them."""
        for request_id in [
            request_id
            for request_id, asked in self._asked.items()
            if asked.parked and getattr(asked.event, "connection_id", None) == connection
        ]:
            del self._asked[request_id]
        return self.send_silent(ConnectionClosed(ConnectionId(connection)))

    def tick(self) -> Step:
        return self.send_silent(Tick())

    def advance(self, ms: int) -> None:
        """Advance the clock, and send a Tick exactly at each deadline on the way."""
        until_ms = self.now_ms + ms
        while True:
            deadline_ms = next_deadline(self.group)
            if deadline_ms is None or deadline_ms > until_ms:
                break
            self.now_ms = max(deadline_ms, self.now_ms)
            self.tick()
        self.now_ms = until_ms

    def send(self, event: Event) -> Asked:
        asked = Asked(event)
        self._asked[event.request_id] = asked  # type: ignore[union-attr]
        self.send_silent(event)
        return asked

    def send_silent(self, event: Event) -> Step:
        before = self.group
        taken = step(before, event, self.now_ms, self.settings, self.cluster)
        assert taken.group.state in TABLE[type(event)][before.state].leads_to
        assert not broken_by(taken), broken_by(taken)
        for request_id, reply in taken.replies:
            asked = self._asked[request_id]
            assert asked.parked, f"two replies to {asked.event}"
            asked.reply = reply
        held = {request_id for request_id, asked in self._asked.items() if asked.parked}
        assert held == held_requests(taken.group)
        self.last = taken
        self._before_last = before
        assert isinstance(taken.group, Group)
        self.group = taken.group
        return taken

    def fail_to_store(self) -> None:
        """Undo the last step because it could not be stored: its replies were never sent.

        The request that caused the step is gone, because the gateway has answered it with an error.
        """
        assert must_store(self.last)
        self.group = self._before_last
        held = held_requests(self.group)
        for request_id, _ in self.last.replies:
            if request_id in held:
                self._asked[request_id].reply = None

    # --- what tests ask ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> GroupState:
        return self.group.state

    @property
    def generation(self) -> int:
        return self.group.generation_id

    def member(self, member_id: str) -> Member:
        return self.group.members[MemberId(member_id)]

    # --- ready-made groups -------------------------------------------------------------------------------------------

    def completing(
        self, *connections: str, instances: dict[str, str] | None = None, offer: Protocols = RANGE
    ) -> list[str]:
        """Build a generation with one member per connection, in state CompletingRebalance. The first member leads.
        Return the member ids.
        """
        instances = instances or {}
        joins: list[Asked] = []
        for connection in connections:
            joins.append(self.join(connection, instance=instances.get(connection), offer=offer))
            self._rejoin(joins)
        self.advance(self.settings.group_initial_rebalance_delay_ms)
        assert self.state is GroupState.COMPLETING_REBALANCE
        return [asked.join.member_id for asked in joins]

    def _rejoin(self, joins: list[Asked]) -> None:
        """Let every member without a held join rejoin, so that the join phase can end."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            return
        for index, asked in enumerate(joins):
            event = asked.event
            assert isinstance(event, JoinGroup)
            if not asked.parked:
                joins[index] = self.join(
                    event.connection_id,
                    asked.join.member_id,
                    instance=event.group_instance_id,
                    version=event.version,
                    offer=event.protocols,
                )

    def stable(self, *connections: str, instances: dict[str, str] | None = None, offer: Protocols = RANGE) -> list[str]:
        """Build `completing`, then let every member sync. Each is assigned `b"for <connection>"`."""
        instances = instances or {}
        ids = self.completing(*connections, instances=instances, offer=offer)
        self.sync_all(connections, ids, instances)
        return ids

    def sync_all(
        self, connections: Sequence[str], ids: Sequence[str], instances: dict[str, str] | None = None
    ) -> list[Asked]:
        instances = instances or {}
        assignments = {key: f"for {connection}".encode() for connection, key in zip(connections, ids, strict=True)}
        syncs = [
            self.sync(
                connection,
                member_id,
                assignments if member_id == self.group.leader_id else None,
                instance=instances.get(connection),
            )
            for connection, member_id in zip(connections, ids, strict=True)
        ]
        assert [asked.error for asked in syncs] == [NONE] * len(syncs)
        assert self.state is GroupState.STABLE
        assert not self.group.pending_sync
        return syncs
