"""Run machines: one queue per id; store each change, then send the replies.

The one idea: a group is a value in a slot. If an event finds the slot idle, the machine steps at once, in the caller's
own call. So a heartbeat costs neither a task nor a future. A step that must be stored makes the slot busy until
Postgres has stored it, and later events wait in the slot's mailbox. A step over very many partitions makes the slot
busy too. It runs in a thread, which is safe because a step is a pure function, and the event loop stays free.

Memory is a cache under a lease. The slot is dropped and the group read again if the slot's lease has moved, or if the
outcome of its last write stays unknown for too long. Time stands still for a group while it is stored, and while this
process does not run: deadlines count from the reply, and from the moment at which a member could be heard.

The machine decides what a group does (`gateway/coordinator/machine.py`). `gateway/cluster/leases.py` decides which node
coordinates it, and `gateway/groups/records.py` reads and writes it. `gateway/groups/connections.py` remembers which
connections spoke for it. Settled facts go to `tell`. This module knows no sockets, no messages, and no particular kind
of group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import structlog

from gateway.coordinator.cluster import NO_TOPICS, Cluster
from gateway.coordinator.facts import Fact
from gateway.coordinator.machine import (
    ClusterChanged,
    ConnectionClosed,
    ConnectionId,
    Event,
    GroupT,
    Machines,
    Reply,
    ReplyT,
    Request,
    RequestId,
    SettingsT,
    SettingsT_contra,
    Step,
    Tick,
)
from gateway.groups.connections import GroupsOfConnections, NewestConnections
from gateway.groups.records import Wanted
from gateway.groups.slot import Slot, Turn, Unstored
from gateway.net.pieces import PIECE, in_pieces
from gateway.operate.logs import NO_REQUEST
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageConflict, StorageError, StorageUnavailable
from storage.types import CoordinatorLease

logger = structlog.stdlib.get_logger(__name__)

STEPS_TOGETHER_S = 0.002
"""How long a group takes more events from the mailbox before it is written. Later events wait for the next write."""
VIEWED_AT_ONCE = 100
"""Groups that `views` reads together. It takes a few milliseconds of the event loop if none of them is in memory."""
SHORTEST_TIMER_MS = 5
"""Shortest delay of a timer, so that a deadline that a Tick did not clear cannot block the event loop."""
STALL_MS = 100
"""If a timer fires later than this, the process was delayed, and requests of members may be unread."""
REPRIEVE_MS = 1_000
"""Extra time after such a delay, to read these messages, and for clients that were delayed too."""


class Record(Protocol):
    @property
    def group_id(self) -> str: ...


RecordT = TypeVar("RecordT", bound=Record)


class Records(Protocol[GroupT, SettingsT_contra, RecordT]):
    """The storage of one kind of id. See `GroupRecords`."""

    async def write(
        self,
        group_id: str,
        group: GroupT,
        unstored: Unstored,
        lease: CoordinatorLease,
        wanted: Wanted,
        *,
        apart: Executor | None = None,
    ) -> None: ...

    async def read(self, group_id: str, wanted: Wanted) -> RecordT | None: ...

    async def read_shard(self, shard: int, wanted: Wanted) -> Sequence[RecordT]: ...

    def is_large(self, record: RecordT) -> bool:
        """Return whether `restored` may take more than a few milliseconds."""
        ...

    def restored(self, record: RecordT, now_ms: int, settings: SettingsT_contra) -> GroupT: ...


class LeaseHolder(Protocol):
    """The holder of leases of one kind: `gateway.cluster.leases.Leases`."""

    def lease_for(self, group_id: str) -> CoordinatorLease | None: ...


Tell = Callable[[GroupT, GroupT, tuple[Fact, ...]], None]
"""Receives a group before and after a settled step, and the step's facts. Without facts the group was read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the state that clients can make a node keep."""

    groups: int = 200_000
    """Groups in memory. Beyond it unknown groups are refused, so that an id per request cannot fill the node."""
    mailbox: int = 20_000
    """Maximal number of requests that wait in one group."""
    spoken_for: int = 200_000
    """Groups for which open connections have sent requests, counted for each connection, even if no such group exists.
    If there are more, the end of a connection is not noticed in the others: members there expire by their sessions."""
    remembered: int = 100_000
    """Number of members of dropped groups whose newest connection numbers are remembered."""


BOUNDS = Bounds()


class Runtime(Generic[GroupT, SettingsT, RecordT]):
    """The ids of one kind that this node coordinates.

    Settings may change while running: the next event uses the new ones. Times are ms on the loop's monotonic clock.
    """

    def __init__(
        self,
        machines: Machines[GroupT, SettingsT],
        records: Records[GroupT, SettingsT, RecordT],
        leases: LeaseHolder,
        settings: SettingsT,
        tell: Tell[GroupT],
        *,
        begun: bool = True,
        bounds: Bounds = BOUNDS,
    ) -> None:
        self.settings = settings
        self._bounds = bounds
        self._machines = machines
        self._records = records
        self._lease_holder = leases
        self._tell = tell
        self._cluster = NO_TOPICS
        self._telling: asyncio.Task[None] | None = None
        self._tell_again = False
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that inform groups of the end of a connection."""
        self._slots: dict[str, Slot[GroupT]] = {}
        self._connections = GroupsOfConnections(bounds.spoken_for)
        self._newest = NewestConnections(bounds.remembered)
        self._shards_loading: dict[int, set[str]] = {}
        """For each shard whose groups are being read, the groups that were dropped from memory since the read began."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_request_id = 0
        self._draining = False
        self.begun = begun
        """False while the node coordinates nothing yet, even if it holds leases."""
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="group steps")
        """Executor for long steps. It has one thread, because Python runs only one such step at a time anyway."""
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Coordinate groups from now on."""
        self.begun = True

    def settings_changed(self, settings: SettingsT) -> None:
        """Use the settings from the next event on."""
        self.settings = settings

    # --- what handlers call -------------------------------------------------------------------------------------

    def next_request_id(self) -> RequestId:
        self._last_request_id += 1
        return RequestId(self._last_request_id)

    def submit(self, group_id: str, request: Request[ReplyT]) -> ReplyT | asyncio.Future[ReplyT]:
        """Return the reply, or a future of it if the group must be read or stored first, or holds the request.

        A refusal is a reply and is never raised: NOT_COORDINATOR without the lease or while draining,
        COORDINATOR_NOT_AVAILABLE if Postgres stays away or too many requests wait already.
        """
        slot = self._slot(group_id)
        if isinstance(slot, ErrorCode):
            return self._machines.refuse(request, slot)
        if slot.busy:
            if len(slot.mailbox) >= self._bounds.mailbox:
                return self._machines.refuse(request, ErrorCode.COORDINATOR_NOT_AVAILABLE)
            slot.mailbox.append(request)
            return self._park(slot, request)
        if self._machines.is_long(slot.group, request, self._cluster):
            future = self._park(slot, request)
            self._step_apart(slot, request)
            return future
        taken = self._step(slot, request)
        if taken.facts and self._machines.must_store(taken):
            future = self._park(slot, request)
            self._store_then_settle(slot, taken, request)
            return future
        reply = self._settle(slot, taken, request)
        if reply is None:
            return self._park(slot, request)
        if self._machines.of(slot.group).is_idle(slot.group):
            self._retire_if_idle(slot)
        else:
            self._connections.note(slot.group_id, request)
        return cast(ReplyT, reply)

    async def view(self, group_id: str) -> GroupT:
        """Return the group as it was last settled, without a step that is still being stored.

        Raise KafkaError: NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE.
        """
        async with self.holding(group_id) as (group, _):
            return group

    async def views(self, group_ids: Sequence[str]) -> AsyncGenerator[tuple[str, GroupT | KafkaError], None]:
        """Yield each id with the result or the error of `view`. At most VIEWED_AT_ONCE groups are read together. Other
        tasks run in between."""
        for first in range(0, len(group_ids), VIEWED_AT_ONCE):
            some = group_ids[first : first + VIEWED_AT_ONCE]
            found = await asyncio.gather(*map(self._view_or_refusal, some))
            async for viewed in in_pieces(zip(some, found, strict=True)):
                yield viewed

    async def _view_or_refusal(self, group_id: str) -> GroupT | KafkaError:
        try:
            return await self.view(group_id)
        except KafkaError as refused:
            return refused

    @asynccontextmanager
    async def holding(self, group_id: str) -> AsyncGenerator[tuple[GroupT, CoordinatorLease], None]:
        """Hold the settled group: yield it and its lease, and let no event change it until the block ends.

        Use it for work in Postgres that is right only while the group stays the same (OffsetDelete). Raise KafkaError
        as `view` does.
        """
        slot = self._slot(group_id)
        if isinstance(slot, ErrorCode):
            raise KafkaError(slot)
        if not slot.busy:
            slot.busy = True
        else:
            if len(slot.mailbox) >= self._bounds.mailbox:
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            turn = Turn(self._loop.create_future())
            slot.mailbox.append(turn)
            try:
                await turn.come
            except asyncio.CancelledError:
                # The turn began, but this task was cancelled before it noticed. No other code would end the turn.
                if turn.come.done() and not turn.come.cancelled():
                    self._resume(slot)
                raise
        try:
            yield slot.group, slot.lease
        finally:
            self._resume(slot)

    async def change_volatile(self, group_id: str, change: Callable[[GroupT, int], GroupT]) -> None:
        """Replace a settled group by `change(group, now_ms)`. The new value may differ only in fields that are never
        stored, such as deadlines. Raise KafkaError as `view` does."""
        async with self.holding(group_id) as (group, _):
            slot = self._slots.get(group_id)
            if slot is not None and slot.group is group:
                slot.group = change(group, self._now_ms())

    def settled(self, group_id: str) -> GroupT | None:
        """Return the group as it was last settled; None if it is not in memory or this node does not coordinate it."""
        slot = self._slots.get(group_id)
        return None if slot is None or self.lease_for(group_id) is None else slot.group

    def is_loaded(self, group_id: str) -> bool:
        """Return whether the group is in memory. A group without members rarely is."""
        slot = self._slots.get(group_id)
        return slot is not None and slot.loaded

    def tell_group(self, group_id: str, event: Event) -> None:
        """Deliver an event that has no sender to answer to a group that is in memory."""
        slot = self._slots.get(group_id)
        if slot is not None and len(slot.mailbox) < self._bounds.mailbox:
            self._send(slot, event)

    def in_memory(self) -> list[GroupT]:
        """Return the groups in memory that hold more than Postgres has stored of them, as last settled. Any thread may
        call this."""
        slots = tuple(self._slots.values())
        return [slot.group for slot in slots if not self._machines.of(slot.group).is_idle(slot.group)]

    def group_ids(self) -> list[str]:
        """Return the ids in memory, idle or not."""
        return list(self._slots)

    @property
    def connections(self) -> frozenset[ConnectionId]:
        """Connections by which members have spoken and whose end has not been reported."""
        return self._connections.open()

    @property
    def under_way(self) -> frozenset[asyncio.Task[None]]:
        """Reads from Postgres and writes to it that are in progress."""
        return frozenset(self._tasks)

    @property
    def telling(self) -> bool:
        """True while the same event is being sent to many groups, in several turns."""
        return self._telling is not None or bool(self._closing)

    @property
    def shards_loading(self) -> frozenset[int]:
        """Shards whose groups are being read because this node has just begun to coordinate them."""
        return frozenset(self._shards_loading)

    def lease_for(self, group_id: str) -> CoordinatorLease | None:
        """Return the lease under which this node coordinates the group; None also while draining, and before
        `begin`."""
        return None if self._draining or not self.begun else self._lease_holder.lease_for(group_id)

    def connection_closed(self, connection_id: str, by_peer: bool = True) -> None:
        """Note the end of a connection. If its peer closed it or failed, every group that it spoke for is informed,
        many in turns. If this node closed it, no member is to blame."""
        event = ConnectionClosed(ConnectionId(connection_id))
        group_ids = self._connections.take(event.connection_id)
        if not by_peer:
            return
        if len(group_ids) <= PIECE:
            for group_id in group_ids:
                self._tell_of_close(group_id, event)
            return
        telling = self._loop.create_task(self._tell_all_of_close(group_ids, event), context=NO_REQUEST.copy())
        self._closing.add(telling)
        telling.add_done_callback(self._closing.discard)

    def _tell_of_close(self, group_id: str, event: ConnectionClosed) -> None:
        slot = self._slots.get(group_id)
        if slot is not None and not self._draining:
            self._send(slot, event)

    async def _tell_all_of_close(self, group_ids: Iterable[str], event: ConnectionClosed) -> None:
        async for group_id in in_pieces(group_ids):
            self._tell_of_close(group_id, event)

    # --- what the cluster calls ---------------------------------------------------------------------------------

    def shard_acquired(self, lease: CoordinatorLease) -> None:
        """Read the shard's groups with members in the background, so that members who died with the last coordinator
        expire even if no client ever speaks for their group again."""
        dropped = self._shards_loading[lease.shard] = set[str]()
        self._spawn(self._load_shard(lease, dropped), f"load shard {lease.shard}")

    def shard_lost(self, shard: int) -> None:
        """Drop the shard's groups: another node may coordinate them already, and waiting clients are sent there."""
        self._shards_loading.pop(shard, None)
        for slot in [slot for slot in self._slots.values() if slot.lease.shard == shard]:
            self._drop(slot, ErrorCode.NOT_COORDINATOR)

    def shards_where(self, unrest: Callable[[GroupT], bool]) -> set[int]:
        """Return the shards with a group that is being stored or read, or for which `unrest` returns True."""
        return {slot.lease.shard for slot in self._slots.values() if slot.busy or unrest(slot.group)}

    def cluster_changed(self, cluster: Cluster) -> None:
        """Use this cluster for later steps, and inform groups whose machine watches it, many in turns."""
        self._cluster = cluster
        if self._telling is not None:
            self._tell_again = True
        elif len(self._slots) <= PIECE:
            for slot in list(self._slots.values()):
                self._tell_of_cluster(slot)
        else:
            self._telling = self._loop.create_task(self._tell_all_of_cluster(), context=NO_REQUEST.copy())

    def _tell_of_cluster(self, slot: Slot[GroupT]) -> None:
        if not slot.dropped and self._machines.of(slot.group).watches(slot.group):
            self._send(slot, ClusterChanged())

    async def _tell_all_of_cluster(self) -> None:
        self._tell_again = True
        try:
            while self._tell_again:
                # Groups that were informed of an earlier cluster are informed of this one too.
                self._tell_again = False
                async for slot in in_pieces(list(self._slots.values())):
                    self._tell_of_cluster(slot)
        finally:
            self._telling = None

    async def drain(self, timeout_s: float = 3.0, also: Sequence[Awaitable[None]] = ()) -> None:
        """Let writes in progress, and `also`, finish. Then answer every held request with NOT_COORDINATOR.

        From the call on every request is refused, and a connection that closes has no effect on members. They stay
        members in Postgres, where the group's next coordinator finds them. So a restart does not cause a rebalance.
        """
        self._draining = True
        for slot in list(self._slots.values()):
            if not slot.busy:
                self._drop(slot, ErrorCode.NOT_COORDINATOR)
        writes = {*self._tasks, *(asyncio.ensure_future(each) for each in also)}
        late = (await asyncio.wait(writes, timeout=timeout_s))[1] if writes else set[asyncio.Future[None]]()
        for slot in list(self._slots.values()):
            self._drop(slot, ErrorCode.NOT_COORDINATOR)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        self._apart.shutdown(wait=False)

    # --- one slot -----------------------------------------------------------------------------------------------

    def _slot(self, group_id: str) -> Slot[GroupT] | ErrorCode:
        lease = self.lease_for(group_id)
        slot = self._slots.get(group_id)
        if slot is not None:
            # Checked on every event, because a lease lapses by the clock without a notice.
            if lease is not None and (lease is slot.lease or lease.lease_epoch == slot.lease.lease_epoch):
                return slot
            if not self._draining:
                self._drop(slot, ErrorCode.NOT_COORDINATOR)
        if lease is None:
            return ErrorCode.NOT_COORDINATOR
        if len(self._slots) >= self._bounds.groups:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        slot = self._slots[group_id] = Slot(group_id, lease, self._machines.missing(group_id))
        slot.busy = True
        self._spawn(self._load(slot), f"load group {group_id}")
        return slot

    def _step(self, slot: Slot[GroupT], event: Event) -> Step[GroupT]:
        return self._machines.step(slot.group, event, self._cluster, self._now_ms(), self.settings)

    def _send(self, slot: Slot[GroupT], event: Event) -> None:
        """Process an event that has no sender to answer."""
        if slot.busy:
            slot.mailbox.append(event)
            return
        with self._or_dropped(slot):
            self._process(slot, event)
            self._after_events(slot)

    def _process(self, slot: Slot[GroupT], event: Event) -> None:
        """Process an event of an idle slot. If the event is a request, it is parked already."""
        if self._machines.is_long(slot.group, event, self._cluster):
            self._step_apart(slot, event)
            return
        taken = self._step(slot, event)
        if self._machines.must_store(taken):
            self._store_then_settle(slot, taken, event)
        else:
            self._settle(slot, taken, event)
        if isinstance(event, ConnectionClosed):
            slot.refuse_parked_on(event.connection_id, self._machines.refuse)

    def _step_apart(self, slot: Slot[GroupT], event: Event) -> None:
        slot.busy = True
        self._spawn(self._stepped_apart(slot, event), f"step group {slot.group_id}")

    async def _stepped_apart(self, slot: Slot[GroupT], event: Event) -> None:
        """Process a long event in a thread. The slot is busy until that is done."""
        async with self._resuming(slot):
            since_ms = self._now_ms()
            taken = await self._loop.run_in_executor(
                self._apart, self._machines.step, slot.group, event, self._cluster, since_ms, self.settings
            )
            if slot.dropped:
                return
            lease = self.lease_for(slot.group_id)
            if lease is None or lease.lease_epoch != slot.lease.lease_epoch:
                self._drop(slot, ErrorCode.NOT_COORDINATOR)
            elif self._machines.must_store(taken):
                steps = [(taken, event), *self._steps_behind(slot, taken.group)]
                await self._store(slot, steps, since_ms, apart=self._apart)
            else:
                self._settle(slot, taken, event)

    def _settle(self, slot: Slot[GroupT], taken: Step[GroupT], event: Event) -> Reply | None:
        """Take over the step's group and send its replies. Return the reply to `event` if that request is not
        parked."""
        before, slot.group = slot.group, taken.group
        if taken.facts:
            slot.unstored.note(taken.facts)
            self._tell(before, taken.group, taken.facts)
        own: Reply | None = None
        for request_id, reply in taken.replies:
            if not slot.answer(request_id, reply):
                own = reply
        # An event that only postpones a deadline needs no new timer: the present timer fires early and is set again.
        # The same holds for an event that gives a held member a deadline without effect.
        if slot.timer is None or taken.facts or type(event) not in self._machines.of(taken.group).beats:
            self._arm(slot)
        return own

    def _park(self, slot: Slot[GroupT], request: Request[ReplyT]) -> asyncio.Future[ReplyT]:
        self._connections.note(slot.group_id, request)
        return slot.park(request, self._loop)

    def _resume(self, slot: Slot[GroupT]) -> None:
        """Mark the slot as idle, and process the events that arrived in the meantime."""
        if slot.dropped:
            return
        slot.busy = False
        with self._or_dropped(slot):
            while slot.mailbox and not slot.busy:
                item = slot.mailbox.popleft()
                if not isinstance(item, Turn):
                    self._process(slot, item)
                elif not item.come.done():
                    slot.busy = True
                    item.come.set_result(None)
            self._after_events(slot)

    def _after_events(self, slot: Slot[GroupT]) -> None:
        if not slot.busy and not slot.dropped:
            self._arm(slot)
            self._retire_if_idle(slot)

    def _retire_if_idle(self, slot: Slot[GroupT]) -> None:
        """Drop an idle group. Postgres has stored all of it."""
        if slot.busy or slot.parked or not self._machines.of(slot.group).is_idle(slot.group):
            return
        # A shard that is being read may hold an older state of this group. That state must not replace the present one.
        if slot.lease.shard not in self._shards_loading:
            self._drop(slot, ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def _drop(self, slot: Slot[GroupT], error: ErrorCode) -> None:
        """Forget the group; waiting callers get `error`."""
        if self._slots.get(slot.group_id) is slot:
            del self._slots[slot.group_id]
            if (dropped := self._shards_loading.get(slot.lease.shard)) is not None:
                dropped.add(slot.group_id)
            if slot.loaded:
                # Keep only the numbers of settled requests. A client whose request got no answer must not be treated as
                # newer.
                self._newest.keep(slot.group_id, self._machines.of(slot.group).connection_numbers(slot.group))
        slot.let_go(error, self._refuse if slot.loaded else self._refuse_unread)

    def _refuse(self, request: Request[Reply], error: ErrorCode) -> Reply:
        return self._machines.refuse(request, error)

    def _refuse_unread(self, request: Request[Reply], error: ErrorCode) -> Reply:
        return self._machines.refuse(request, error, loading=error is ErrorCode.COORDINATOR_NOT_AVAILABLE)

    @contextmanager
    def _or_dropped(self, slot: Slot[GroupT]) -> Generator[None, None, None]:
        """Drop the slot if the block raises, so that a bug in one group neither leaves its clients without an answer
        nor hides the event from other groups."""
        try:
            yield
        except Exception as error:
            logger.error("group dropped from memory: a step failed", group_id=slot.group_id, exc_info=error)
            self._drop(slot, ErrorCode.UNKNOWN_SERVER_ERROR)

    # --- time ---------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _arm(self, slot: Slot[GroupT]) -> None:
        """Set the group's one timer, to the next deadline or earlier. A timer that fires early is set again."""
        deadline_ms = self._machines.of(slot.group).next_deadline(slot.group)
        if deadline_ms is None:
            slot.disarm()
            return
        when = max(deadline_ms, self._now_ms() + SHORTEST_TIMER_MS) / 1000
        if slot.timer is not None:
            if slot.timer.when() <= when:
                return
            slot.disarm()
        slot.timer = self._loop.call_at(when, self._on_timer, slot, when, context=NO_REQUEST)

    def _on_timer(self, slot: Slot[GroupT], due_s: float) -> None:
        slot.timer = None
        # A busy slot sets its timer when it resumes, after the heartbeats that waited. Otherwise a long write would end
        # the sessions of members that sent heartbeats in the meantime.
        if slot.busy or slot.dropped:
            return
        lease = self.lease_for(slot.group_id)
        if lease is None or lease.lease_epoch != slot.lease.lease_epoch:
            self._drop(slot, ErrorCode.NOT_COORDINATOR)
            return
        late_ms = int((self._loop.time() - due_s) * 1000)
        # Not twice in a row: on a node that is always this late, sessions must still end.
        slot.reprieved = late_ms > STALL_MS and not slot.reprieved
        if slot.reprieved:
            slot.group = self._machines.of(slot.group).postponed(slot.group, late_ms + REPRIEVE_MS)
        with self._or_dropped(slot):
            deadline_ms = self._machines.of(slot.group).next_deadline(slot.group)
            if deadline_ms is not None and deadline_ms <= self._now_ms():
                self._process(slot, Tick())
            self._after_events(slot)

    # --- Postgres -----------------------------------------------------------------------------------------------

    def _store_then_settle(self, slot: Slot[GroupT], taken: Step[GroupT], event: Event) -> None:
        slot.busy = True
        steps = [(taken, event), *self._steps_behind(slot, taken.group)]
        self._spawn(self._persist(slot, steps, self._now_ms()), f"store group {slot.group_id}")

    def _steps_behind(self, slot: Slot[GroupT], group: GroupT) -> list[tuple[Step[GroupT], Event]]:
        """Step the events that arrived in the meantime, so that the same write stores them: a group that a thousand
        members join costs a few writes.

        A Turn needs the settled group, and a closed connection the parked requests. A group that has ended or changed
        its machine is settled first.
        """
        steps: list[tuple[Step[GroupT], Event]] = []
        machine, until_s = self._machines.of(group), self._loop.time() + STEPS_TOGETHER_S
        while slot.mailbox and self._loop.time() < until_s:
            event = slot.mailbox[0]
            if isinstance(event, Turn | ConnectionClosed) or machine.is_deleted(group):
                break
            if self._machines.is_long(group, event, self._cluster):
                break
            slot.mailbox.popleft()
            taken = self._machines.step(group, event, self._cluster, self._now_ms(), self.settings)
            steps.append((taken, event))
            group = taken.group
            if self._machines.of(group) is not machine:
                break
        return steps

    async def _persist(self, slot: Slot[GroupT], steps: Sequence[tuple[Step[GroupT], Event]], since_ms: int) -> None:
        async with self._resuming(slot):
            await self._store(slot, steps, since_ms)

    async def _store(
        self,
        slot: Slot[GroupT],
        steps: Sequence[tuple[Step[GroupT], Event]],
        since_ms: int,
        *,
        apart: Executor | None = None,
    ) -> None:
        for taken, _ in steps:
            slot.unstored.note(taken.facts)
        *earlier, (taken, event) = steps
        wanted = self._wanted(slot)
        await self._records.write(slot.group_id, taken.group, slot.unstored, slot.lease, wanted, apart=apart)
        if slot.dropped:
            return
        for one, its_event in earlier:
            self._settle(slot, one, its_event)
        machine = self._machines.of(taken.group)
        group = machine.postponed(taken.group, self._now_ms() - since_ms)
        self._settle(slot, Step(group, taken.replies, taken.facts), event)
        slot.unstored.clear()
        if machine.is_deleted(group):
            slot.group = self._machines.missing(slot.group_id)

    async def _load(self, slot: Slot[GroupT]) -> None:
        async with self._resuming(slot):
            record = await self._records.read(slot.group_id, self._wanted(slot))
            if record is not None:
                await self._take_over(slot, record)
            elif not slot.dropped:
                self._newest.take(slot.group_id)
                slot.loaded = True

    async def _take_over(self, slot: Slot[GroupT], record: RecordT) -> None:
        """Restore the group in its busy slot. The record may have the subscriptions of very many members; then a
        thread reads it."""
        since_ms = self._now_ms()
        if self._records.is_large(record):
            restored = self._loop.run_in_executor(self._apart, self._records.restored, record, since_ms, self.settings)
            group = await restored
            group = self._machines.of(group).postponed(group, self._now_ms() - since_ms)
        else:
            group = self._records.restored(record, since_ms, self.settings)
        if slot.dropped:
            return
        slot.loaded = True
        slot.group = group
        if numbers := self._newest.take(slot.group_id):
            slot.group = self._machines.of(slot.group).with_connection_numbers(slot.group, numbers)
        self._tell(slot.group, slot.group, ())

    async def _load_shard(self, lease: CoordinatorLease, dropped: set[str]) -> None:
        def wanted() -> bool:
            return self._shards_loading.get(lease.shard) is dropped and not self._draining

        try:
            async for record in in_pieces(await self._records.read_shard(lease.shard, wanted)):
                if not wanted():
                    break
                # A group in memory, for which a client has sent requests in the meantime, is newer than this record. So
                # is one that was in memory and has been dropped: it is read again.
                if record.group_id in dropped:
                    self._slot(record.group_id)
                elif record.group_id not in self._slots and len(self._slots) < self._bounds.groups:
                    slot = Slot(record.group_id, lease, self._machines.missing(record.group_id))
                    slot.busy = True
                    self._slots[record.group_id] = slot
                    try:
                        async with self._resuming(slot):
                            await self._take_over(slot, record)
                    except Exception as error:
                        # A newer release may have stored the group. A request for it reads it again, and is refused.
                        logger.error("group cannot be read", group_id=record.group_id, exc_info=error)
        except StorageUnavailable:
            # No caller waits any more. The code below handles this case.
            pass
        finally:
            in_vain = not wanted()
            if self._shards_loading.get(lease.shard) is dropped:
                del self._shards_loading[lease.shard]
        if in_vain:
            return
        async for slot in in_pieces([slot for slot in self._slots.values() if slot.lease.shard == lease.shard]):
            self._after_events(slot)

    def _wanted(self, slot: Slot[GroupT]) -> Wanted:
        return lambda: not slot.dropped and not self._draining

    @asynccontextmanager
    async def _resuming(self, slot: Slot[GroupT]) -> AsyncGenerator[None, None]:
        """Resume the slot when the block succeeds. Otherwise drop it, so that no error leaves a caller waiting."""
        error = ErrorCode.UNKNOWN_SERVER_ERROR
        try:
            yield
            error = ErrorCode.NOT_COORDINATOR if self._draining else ErrorCode.NONE
        except StorageConflict:
            logger.info("shard is coordinated elsewhere", group_id=slot.group_id, shard=slot.lease.shard)
            # If the slot was dropped before, the shard may have a newer lease now, which this refusal does not concern.
            if not slot.dropped:
                self.shard_lost(slot.lease.shard)
        except StorageUnavailable as gone:
            logger.error("group dropped from memory: Postgres does not answer", group_id=slot.group_id, error=str(gone))
            error = ErrorCode.NOT_COORDINATOR if self._draining else ErrorCode.COORDINATOR_NOT_AVAILABLE
        except StorageError as refused:
            logger.error("group could not be read or stored", group_id=slot.group_id, error=str(refused))
        finally:
            if error is ErrorCode.NONE:
                self._resume(slot)
            else:
                self._drop(slot, error)

    def _spawn(self, work: Coroutine[object, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("group task failed", task=task.get_name(), exc_info=error)
