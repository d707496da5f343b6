"""Runs the pure coordinator: one queue per group, store what changed, then send the replies.

The one idea: a group is a value in a slot. An event that finds the slot idle is stepped at once, in the caller's own
call, so a heartbeat costs neither a task nor a future; a step that must be stored makes the slot busy until Postgres
has it, and everything that arrives meanwhile waits in the slot's mailbox. Memory is a cache under a lease: a slot whose
lease has moved, or whose last write has an unknown outcome for too long, is dropped and read again.

What a group does is decided in `gateway/coordinator`; who may coordinate it in `gateway/cluster/leases.py`; how it is
read and written in `gateway/groups/records.py`; nothing here knows about sockets or messages. Offsets never pass
through a slot: see `gateway/groups/offset_committer.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, overload

import structlog

from gateway.cluster.leases import Leases
from gateway.coordinator.classic import next_deadline, step
from gateway.coordinator.model import (
    ConnectionClosed,
    ConnectionId,
    DeleteGroup,
    DeleteReply,
    Event,
    Group,
    GroupState,
    Heartbeat,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    OffsetCommit,
    OffsetCommitReply,
    Reply,
    RequestId,
    Settings,
    Step,
    SyncGroup,
    SyncReply,
    Tick,
)
from gateway.groups.offset_committer import OffsetCommitter
from gateway.groups.records import GroupRecords, restored
from gateway.groups.slot import Hold, Request, Slot, refuse
from gateway.operate.logs import NO_REQUEST
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageConflict, StorageError, StorageUnavailable
from storage.groups import GroupStore
from storage.offsets import OffsetStore
from storage.types import CoordinatorLease, GroupRecord, Node

log = structlog.stdlib.get_logger(__name__)

MAX_GROUPS = 200_000
"""Groups in memory; beyond it unknown groups are refused, so that an id per request cannot fill the node."""
MAX_GROUP_ID_BYTES = 1_024
"""In UTF-8. With the longest member id still what a B-tree entry of Postgres can hold."""
MAX_MAILBOX = 20_000
MAX_GROUPS_PER_CONNECTION = 10_000
"""Groups told when a connection closes; members of any further ones count on their session timeout alone."""
STORE_PATIENCE_MS = 15_000
"""How long one write or load is tried again before those who wait for it are sent away."""
SHORTEST_TIMER_MS = 5
"""A deadline that a Tick did not clear cannot spin the loop."""


class Groups:
    """The classic groups this node coordinates.

    `settings` may be replaced while running: the next event uses it. Times are ms on the loop's monotonic clock;
    only `GroupRecord.state_timestamp_ms` is wall-clock.
    """

    def __init__(
        self,
        store: GroupStore,
        offsets: OffsetStore,
        leases: Leases,
        settings: Settings,
        *,
        store_patience_ms: int = STORE_PATIENCE_MS,
        count_rebalance: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.offset_committer = OffsetCommitter(offsets)
        self._records = GroupRecords(store, store_patience_ms)
        self._leases = leases
        self._count_rebalance = count_rebalance
        self._slots: dict[str, Slot] = {}
        self._connections: dict[ConnectionId, set[str]] = {}
        self._shards_loading: dict[int, CoordinatorLease] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_request_id = 0
        self._draining = False
        self._loop = asyncio.get_running_loop()

    # --- what handlers call -------------------------------------------------------------------------------------

    def next_request_id(self) -> RequestId:
        self._last_request_id += 1
        return RequestId(self._last_request_id)

    @overload
    def submit(self, group_id: str, request: JoinGroup) -> JoinReply | asyncio.Future[JoinReply]: ...
    @overload
    def submit(self, group_id: str, request: SyncGroup) -> SyncReply | asyncio.Future[SyncReply]: ...
    @overload
    def submit(self, group_id: str, request: Heartbeat) -> HeartbeatReply | asyncio.Future[HeartbeatReply]: ...
    @overload
    def submit(self, group_id: str, request: LeaveGroup) -> LeaveReply | asyncio.Future[LeaveReply]: ...
    @overload
    def submit(self, group_id: str, request: OffsetCommit) -> OffsetCommitReply | asyncio.Future[OffsetCommitReply]: ...
    @overload
    def submit(self, group_id: str, request: DeleteGroup) -> DeleteReply | asyncio.Future[DeleteReply]: ...
    def submit(self, group_id: str, request: Request) -> Any:
        """The reply, or a future of it where the group must be read or stored first or holds the request.

        A refusal is a reply, never raised: NOT_COORDINATOR without the lease or while draining,
        COORDINATOR_NOT_AVAILABLE when Postgres stays away or too much waits already.
        """
        slot = self._slot(group_id)
        if isinstance(slot, ErrorCode):
            return refuse(request, slot)
        if slot.busy:
            if len(slot.mailbox) >= MAX_MAILBOX:
                return refuse(request, ErrorCode.COORDINATOR_NOT_AVAILABLE)
            slot.mailbox.append(request)
            return self._park(slot, request)
        taken = step(slot.group, request, self._now_ms(), self.settings)
        if taken.persist:
            future = self._park(slot, request)
            self._store_then_settle(slot, taken, request)
            return future
        reply = self._settle(slot, taken, request)
        if reply is None:
            return self._park(slot, request)
        if slot.group.members or slot.group.pending:
            self._remember(slot, request)
        self._retire_if_idle(slot)
        return reply

    async def view(self, group_id: str) -> Group:
        """The group as it was last settled: what a step that is still being stored will say is not in it.

        Raises KafkaError: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE.
        """
        async with self.holding(group_id) as (group, _):
            return group

    @asynccontextmanager
    async def holding(self, group_id: str) -> AsyncGenerator[tuple[Group, CoordinatorLease], None]:
        """The settled group and its lease; nothing else happens to the group until the block ends.

        For work in Postgres that is right only while the group stays as it is (OffsetDelete). Raises KafkaError as
        `view` does.
        """
        slot = self._slot(group_id)
        if isinstance(slot, ErrorCode):
            raise KafkaError(slot)
        if not slot.busy:
            slot.busy = True
        else:
            if len(slot.mailbox) >= MAX_MAILBOX:
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            hold = Hold(self._loop.create_future())
            slot.mailbox.append(hold)
            try:
                await hold.turn
            except asyncio.CancelledError:
                # Cancelled between the turn's coming and our hearing of it: nobody else would end the hold.
                if hold.turn.done() and not hold.turn.cancelled():
                    self._resume(slot)
                raise
        try:
            yield slot.group, slot.lease
        finally:
            self._resume(slot)

    async def list(self) -> dict[str, tuple[str, str]]:
        """Protocol type ("" if none) and state of every group this node coordinates, by id.

        Raises StorageUnavailable.
        """
        listed = {
            group_id: (protocol_type or "", state)
            for group_id, protocol_type, state in await self._records.list()
            if self.lease_for(group_id) is not None
        }
        for group_id, slot in self._slots.items():
            if slot.group.exists:
                listed[group_id] = (slot.group.protocol_type or "", slot.group.state.value)
        return listed

    def in_memory(self) -> list[Group]:
        """Groups with members or pending ids that this node coordinates, as last settled: what offset expiry must know
        beyond what is stored (which topics a Stable group reads, that a rebalance is under way)."""
        return [slot.group for slot in self._slots.values() if slot.group.members or slot.group.pending]

    async def coordinators_of(self, group_ids: Sequence[str]) -> list[Node | KafkaError]:
        """The nodes to ask, as Postgres has it now; COORDINATOR_NOT_AVAILABLE where none holds the group's shard."""
        await self._leases.look_up(group_ids)
        found: list[Node | KafkaError] = []
        for group_id in group_ids:
            try:
                found.append(self._leases.coordinator_of(group_id))
            except KafkaError as refused:
                found.append(refused)
        return found

    def lease_for(self, group_id: str) -> CoordinatorLease | None:
        """This node's leave to coordinate the group; None also while draining."""
        return None if self._draining else self._leases.lease_for(group_id)

    def connection_closed(self, connection_id: str, by_peer: bool = True) -> None:
        """A connection has ended. If its peer closed it or failed, every group it spoke for is told; for a close of our
        own no member is to blame."""
        event = ConnectionClosed(ConnectionId(connection_id))
        group_ids = self._connections.pop(event.connection_id, set[str]())
        for group_id in group_ids if by_peer else ():
            slot = self._slots.get(group_id)
            if slot is None:
                continue
            if slot.busy:
                slot.mailbox.append(event)
            else:
                with self._or_dropped(slot):
                    self._process(slot, event)
                    self._after_events(slot)

    # --- what the cluster calls ---------------------------------------------------------------------------------

    def shard_acquired(self, lease: CoordinatorLease) -> None:
        """Reads the shard's groups with members in the background, so that members who died with the last
        coordinator expire even if nobody ever speaks for their group again."""
        self._shards_loading[lease.shard] = lease
        self._spawn(self._load_shard(lease), f"load shard {lease.shard}")

    def shard_lost(self, shard: int) -> None:
        """Another node may coordinate these groups already: whoever waits here is sent there."""
        self._shards_loading.pop(shard, None)
        for slot in [slot for slot in self._slots.values() if slot.lease.shard == shard]:
            self._drop(slot, ErrorCode.NOT_COORDINATOR)

    def shards_in_unrest(self) -> set[int]:
        """Shards with a group that is being rebalanced, stored or read: handed over last."""
        return {
            slot.lease.shard
            for slot in self._slots.values()
            if slot.busy or slot.group.state in (GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE)
        }

    async def drain(self, timeout_s: float = 3.0) -> None:
        """Answers every held request with NOT_COORDINATOR after letting writes in flight finish; stores nothing new.

        From the call on everything is refused, and closing connections say nothing about members any more: they stay
        members in Postgres, where the group's next coordinator finds them, so a restart is not a rebalance.
        """
        self._draining = True
        for slot in list(self._slots.values()):
            if not slot.busy:
                self._drop(slot, ErrorCode.NOT_COORDINATOR)
        writes = {*self._tasks, self._loop.create_task(self.offset_committer.drain())}
        _, late = await asyncio.wait(writes, timeout=timeout_s)
        for slot in list(self._slots.values()):
            self._drop(slot, ErrorCode.NOT_COORDINATOR)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    # --- one slot -----------------------------------------------------------------------------------------------

    def _slot(self, group_id: str) -> Slot | ErrorCode:
        if len(group_id) > MAX_GROUP_ID_BYTES // 4 and len(group_id.encode()) > MAX_GROUP_ID_BYTES:
            return ErrorCode.INVALID_GROUP_ID
        lease = self.lease_for(group_id)
        slot = self._slots.get(group_id)
        if slot is not None:
            # Asked on every event: a lease lapses by the clock, before anyone is told.
            if lease is not None and (lease is slot.lease or lease.lease_epoch == slot.lease.lease_epoch):
                return slot
            if not self._draining:
                self._drop(slot, ErrorCode.NOT_COORDINATOR)
        if lease is None:
            return ErrorCode.NOT_COORDINATOR
        if len(self._slots) >= MAX_GROUPS:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        slot = self._slots[group_id] = Slot(group_id, lease)
        slot.busy = True
        self._spawn(self._load(slot), f"load group {group_id}")
        return slot

    def _process(self, slot: Slot, event: Event) -> None:
        """One event of an idle slot; its requester, if it has one, is parked already."""
        taken = step(slot.group, event, self._now_ms(), self.settings)
        if taken.persist:
            self._store_then_settle(slot, taken, event)
        else:
            self._settle(slot, taken, event)
        if isinstance(event, ConnectionClosed):
            slot.refuse_parked_on(event.connection_id)

    def _settle(self, slot: Slot, taken: Step, event: Event) -> Reply | None:
        """Takes over the step's group and sends its replies. Gives back the reply to `event` if it is not parked."""
        before, group = slot.group, taken.group
        slot.group = group
        if before.state is not group.state:
            slot.state_timestamp_ms = _wall_ms()
            if group.state is GroupState.PREPARING_REBALANCE:
                self._count_rebalance()
        if taken.reasons:
            moved = before.state is not group.state or before.generation_id != group.generation_id
            log.log(
                logging.INFO if moved else logging.DEBUG,
                "group moved" if moved else "group changed",
                group_id=slot.group_id,
                state=group.state.value,
                generation_id=group.generation_id,
                members=len(group.members),
                reasons=taken.reasons,
            )
        own: Reply | None = None
        for request_id, reply in taken.replies:
            if not slot.answer(request_id, reply):
                own = reply
        # Heartbeats and commits only move a deadline away (or give a held member one, which means nothing): the
        # timer finds that out when it fires.
        if slot.timer is None or not isinstance(event, Heartbeat | OffsetCommit):
            self._arm(slot)
        return own

    def _park(self, slot: Slot, request: Request) -> asyncio.Future[Any]:
        self._remember(slot, request)
        return slot.park(request, self._loop)

    def _remember(self, slot: Slot, request: Request) -> None:
        """The group is to hear when the request's connection closes. Done as the request arrives: once the connection
        has closed, nobody would forget it again."""
        if isinstance(request, DeleteGroup):
            return
        group_ids = self._connections.get(request.connection_id)
        if group_ids is None:
            self._connections[request.connection_id] = {slot.group_id}
        elif len(group_ids) < MAX_GROUPS_PER_CONNECTION:
            group_ids.add(slot.group_id)

    def _resume(self, slot: Slot) -> None:
        """The slot is no longer busy: works off what came meanwhile."""
        if slot.dropped:
            return
        slot.busy = False
        with self._or_dropped(slot):
            while slot.mailbox and not slot.busy:
                item = slot.mailbox.popleft()
                if not isinstance(item, Hold):
                    self._process(slot, item)
                elif not item.turn.done():
                    slot.busy = True
                    item.turn.set_result(None)
            self._after_events(slot)

    def _after_events(self, slot: Slot) -> None:
        if not slot.busy and not slot.dropped:
            self._arm(slot)
            self._retire_if_idle(slot)

    def _retire_if_idle(self, slot: Slot) -> None:
        """A group without members is all in Postgres."""
        if slot.busy or slot.parked or slot.group.members or slot.group.pending:
            return
        # A shard that is being read may hold an older state of this group, which must not come back.
        if slot.lease.shard not in self._shards_loading:
            self._drop(slot, ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def _drop(self, slot: Slot, error: ErrorCode) -> None:
        """Forgets the group; whoever waits for it gets `error`."""
        if self._slots.get(slot.group_id) is slot:
            del self._slots[slot.group_id]
        slot.let_go(error)

    @contextmanager
    def _or_dropped(self, slot: Slot) -> Generator[None, None, None]:
        """Drops the slot if the block raises: a bug in one group must not leave its clients hanging."""
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole:
                self._drop(slot, ErrorCode.UNKNOWN_SERVER_ERROR)

    # --- time ---------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _arm(self, slot: Slot) -> None:
        """One timer per group, never later than the next deadline; one that fires early looks again."""
        deadline_ms = next_deadline(slot.group)
        if deadline_ms is None:
            slot.disarm()
            return
        when = max(deadline_ms, self._now_ms() + SHORTEST_TIMER_MS) / 1000
        if slot.timer is not None:
            if slot.timer.when() <= when:
                return
            slot.disarm()
        slot.timer = self._loop.call_at(when, self._on_timer, slot, context=NO_REQUEST)

    def _on_timer(self, slot: Slot) -> None:
        slot.timer = None
        # A busy slot arms its timer when it resumes, after the heartbeats that waited: a write that took long must not
        # cost the members who spoke meanwhile their sessions.
        if slot.busy or slot.dropped:
            return
        lease = self.lease_for(slot.group_id)
        if lease is None or lease.lease_epoch != slot.lease.lease_epoch:
            self._drop(slot, ErrorCode.NOT_COORDINATOR)
            return
        with self._or_dropped(slot):
            deadline_ms = next_deadline(slot.group)
            if deadline_ms is not None and deadline_ms <= self._now_ms():
                self._process(slot, Tick())
            self._after_events(slot)

    # --- Postgres -----------------------------------------------------------------------------------------------

    def _store_then_settle(self, slot: Slot, taken: Step, event: Event) -> None:
        slot.busy = True
        self._spawn(self._persist(slot, taken, event), f"store group {slot.group_id}")

    async def _persist(self, slot: Slot, taken: Step, event: Event) -> None:
        unmoved = taken.group.state is slot.group.state
        state_timestamp_ms = slot.state_timestamp_ms if unmoved else _wall_ms()
        async with self._resuming(slot):
            await self._records.write(taken.group, state_timestamp_ms, slot.lease, self._wanted(slot))
            if not slot.dropped:
                self._settle(slot, taken, event)
                slot.state_timestamp_ms = state_timestamp_ms
                if slot.group.state is GroupState.DEAD:
                    slot.group = Group(slot.group_id)

    async def _load(self, slot: Slot) -> None:
        async with self._resuming(slot):
            record = await self._records.read(slot.group_id, self._wanted(slot))
            if record is not None and not slot.dropped:
                self._take_over(slot, record)
            slot.loaded = True

    def _take_over(self, slot: Slot, record: GroupRecord) -> None:
        slot.loaded = True
        slot.group = restored(record, self._now_ms(), self.settings)
        slot.state_timestamp_ms = record.state_timestamp_ms

    async def _load_shard(self, lease: CoordinatorLease) -> None:
        def wanted() -> bool:
            return self._shards_loading.get(lease.shard) is lease and not self._draining

        try:
            records = await self._records.read_shard(lease.shard, wanted)
        except StorageUnavailable:
            records = ()
        finally:
            in_vain = not wanted()
            if self._shards_loading.get(lease.shard) is lease:
                del self._shards_loading[lease.shard]
        if in_vain:
            return
        for record in records:
            # A group that somebody has spoken for meanwhile is in memory already, and newer than this.
            if record.members and record.group_id not in self._slots and len(self._slots) < MAX_GROUPS:
                slot = self._slots[record.group_id] = Slot(record.group_id, lease)
                self._take_over(slot, record)
        for slot in [slot for slot in self._slots.values() if slot.lease.shard == lease.shard]:
            self._after_events(slot)

    def _wanted(self, slot: Slot) -> Callable[[], bool]:
        return lambda: not slot.dropped and not self._draining

    @asynccontextmanager
    async def _resuming(self, slot: Slot) -> AsyncGenerator[None, None]:
        """Resumes the slot when the block succeeds; otherwise drops it, so that whatever goes wrong nobody hangs."""
        error = ErrorCode.UNKNOWN_SERVER_ERROR
        try:
            yield
            error = ErrorCode.NOT_COORDINATOR if self._draining else ErrorCode.NONE
        except StorageConflict:
            log.info("shard is coordinated elsewhere", group_id=slot.group_id, shard=slot.lease.shard)
            # A slot dropped before this knows nothing of the lease that the shard may be held under since.
            if not slot.dropped:
                self.shard_lost(slot.lease.shard)
        except StorageUnavailable as gone:
            log.error("group given up: Postgres stays away", group_id=slot.group_id, error=str(gone))
            error = ErrorCode.NOT_COORDINATOR if self._draining else ErrorCode.COORDINATOR_NOT_AVAILABLE
        except StorageError as refused:
            log.error("group could not be read or stored", group_id=slot.group_id, error=str(refused))
        finally:
            if error is ErrorCode.NONE:
                self._resume(slot)
            else:
                self._drop(slot, error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("group task failed", task=task.get_name(), exc_info=error)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
