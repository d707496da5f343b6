"""The coordinator's node in the simulation. It runs `step` as the gateway does, and can fail. It has one group and one
stored record. A change is stored before it is answered. If storing fails, the step has not happened. If the outcome is
unknown, the group is read again and every waiting client gets an error.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from gateway.coordinator.classic.handoff import awaited_by
from gateway.coordinator.classic.model import Event, Group, GroupState
from gateway.coordinator.machine import ConnectionClosed, ConnectionId, Reply, RequestId, Step, Tick
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    HandoffProgress,
    Heartbeat,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    OffsetCommit,
    OffsetCommitReply,
    SyncGroup,
    SyncReply,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode
from tests.coordinator.invariants import must_store

from .referee import Referee, frozen_copy
from .world import Connection, World

UNAVAILABLE = ErrorCode.COORDINATOR_NOT_AVAILABLE


class Server:
    def __init__(self, world: World, coordinator: ModuleType, settings: Settings) -> None:
        self.group = Group("g")
        self.settings = settings
        self.referee = Referee(coordinator, settings)
        self.up = True
        self._world = world
        self._coordinator = coordinator
        self._open: dict[RequestId, tuple[Event, Connection]] = {}
        self._connections: dict[ConnectionId, Connection] = {}
        self._tick_at_ms: int | None = None
        self._asleep_until_ms = 0

    # --- what arrives -------------------------------------------------------------------------------------------------

    def receive(self, event: Event, connection: Connection) -> None:
        if not self.up:
            connection.cut()
            return
        assert not isinstance(event, ConnectionClosed | Tick | HandoffProgress)
        self._connections[connection.connection_id] = connection
        self._open[event.request_id] = (event, connection)
        self._apply(event)

    def disconnected(self, connection_id: ConnectionId) -> None:
        self._connections.pop(connection_id, None)
        for request_id, (_, connection) in list(self._open.items()):
            if connection.connection_id == connection_id:
                del self._open[request_id]
        if self.up:
            self._apply(ConnectionClosed(connection_id))

    def unsettled_for(self, connection_id: ConnectionId) -> frozenset[int] | None:
        """Answer OffsetFetch with RequireStable: return the partitions whose committed offset may still change, or None
        for no answer.
        """
        if not self.up:
            return None
        return frozenset(index for _, index in awaited_by(self.group, connection_id, "everyone", "/127.0.0.1"))

    def hear(self, event: HandoffProgress) -> None:
        if self.up:
            self._apply(event)

    def tick(self) -> None:
        if self.up:
            self._apply(Tick())

    # --- how it fails -------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose everything in memory and every connection. The node restarts a moment later."""
        if not self.up:
            return
        self._world.tell("the node crashes")
        self.up = False
        self._open.clear()
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.cut()
        self._world.after(self._world.random.randint(10, 3_000), self._come_up)

    def _come_up(self) -> None:
        self._world.tell("the node is up again")
        self.up = True
        self._restore()

    def oversleep(self) -> None:
        """Stop timers for a while. Afterwards everything that became due is due at once."""
        self._world.tell("timers stand still")
        self._asleep_until_ms = self._world.now_ms + self._world.random.randint(2_000, 20_000)

    def evict(self) -> None:
        """Move the group to another node and back at once. Waiting clients get an error, and connections stay open."""
        if not self.up:
            return
        self._world.tell("the group is evicted")
        self._send_away(ErrorCode.NOT_COORDINATOR)
        self._restore()

    def _restore(self) -> None:
        stored = self.referee.stored
        if stored is None:
            self.group = Group("g")
        else:
            group, members = replace(stored[0], clock_lead_ms=0), stored[1]
            self.group = self._coordinator.restore("g", group, members, None, self._world.now_ms, self.settings)
        self.referee.restored(self.group, set(self._open), self._world.now_ms)
        self._arm()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        world = self._world
        before = self.group
        copy = frozen_copy(before)
        taken: Step = self._coordinator.step(before, event, world.now_ms, self.settings)
        world.tell(_line(event, before, taken))
        self.referee.require(before == copy, f"the group that was given has been mutated by {event}")
        if must_store(taken) and world.chance(world.weather.store_failure):
            self._fail_to_store(before, event, taken)
            return
        self.referee.judge(before, event, taken, world.now_ms)
        self.group = Group("g") if taken.group.state is GroupState.DEAD else taken.group
        for request_id, reply in taken.replies:
            self._reply(request_id, reply)
        self.referee.check_held(self.group, set(self._open))
        self._arm()

    def _fail_to_store(self, before: Group, event: Event, taken: Step) -> None:
        world = self._world
        if world.chance(0.5):
            world.tell("  ... could not be stored")
            if not isinstance(event, ConnectionClosed | Tick | HandoffProgress):
                self._reply(event.request_id, refuse(event, UNAVAILABLE))
            self.referee.check_held(before, set(self._open))
            self._arm(retry_ms=200)
            return
        written = world.chance(0.5)
        world.tell(f"  ... nobody knows whether it was stored; it was{'' if written else ' not'}")
        if written:
            self.referee.judge(before, event, taken, world.now_ms)
        self._send_away(UNAVAILABLE)
        self._restore()

    def _send_away(self, error: ErrorCode) -> None:
        for request_id, (waiting, _) in list(self._open.items()):
            self._reply(request_id, refuse(waiting, error))

    def _reply(self, request_id: RequestId, reply: Reply) -> None:
        self.referee.require(request_id in self._open, f"{reply} answers a request that does not wait")
        event, connection = self._open.pop(request_id)
        connection.reply(event, reply)

    def _arm(self, retry_ms: int = 0) -> None:
        world = self._world
        deadline_ms = self._coordinator.next_deadline(self.group)
        if deadline_ms is None:
            return
        at_ms = max(deadline_ms, world.now_ms + retry_ms)
        if world.chance(world.weather.late_tick):
            at_ms += world.random.randint(1, 4_000)
        if self._tick_at_ms is not None and world.now_ms <= self._tick_at_ms <= at_ms:
            return
        self._tick_at_ms = at_ms
        world.after(max(at_ms - world.now_ms, 0), lambda: self._timer(at_ms))

    def _timer(self, at_ms: int) -> None:
        if self._tick_at_ms != at_ms:
            return
        self._tick_at_ms = None
        if self._world.now_ms >= self._asleep_until_ms:
            self.tick()
        else:
            self._arm(retry_ms=self._asleep_until_ms - self._world.now_ms)


def refuse(event: Event, error: ErrorCode) -> Reply:
    match event:
        case JoinGroup():
            return JoinReply(error, event.member_id)
        case SyncGroup():
            return SyncReply(error)
        case Heartbeat():
            return HeartbeatReply(error)
        case LeaveGroup():
            return LeaveReply(error)
        case OffsetCommit() | TxnOffsetCommit():
            return OffsetCommitReply(error)
        case DeleteGroup():
            return DeleteReply(error)
        case ConnectionClosed() | Tick() | HandoffProgress():
            raise AssertionError(event)


def _line(event: Event, before: Group, taken: Step) -> str:
    """Describe one step in a line, for a person who replays a seed."""
    who = getattr(event, "member_id", None)
    words = [type(event).__name__]
    if who is not None:
        words.append(repr(who))
    for name, what in (("connection_id", "on"), ("generation_id", "generation")):
        if hasattr(event, name):
            words.append(f"{what} {getattr(event, name)}")
    after = taken.group
    words.append(f"| {before.state.value} {before.generation_id} -> {after.state.value} {after.generation_id}")
    words.append(f"({len(after.members)} members, {len(after.pending)} pending)")
    words.extend(f"| {request_id}: {type(reply).__name__} {reply.error.name}" for request_id, reply in taken.replies)
    words.extend(f"| {fact}" for fact in taken.facts)
    return " ".join(words)
