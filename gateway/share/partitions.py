"""The share partitions that this node leads: values in memory. A change that must not be lost is stored before any
client sees it.

The one idea: a share partition is a value (`gateway/coordinator/share/partition.py`) in a slot, and its row in Postgres
belongs to the node that read it last. Steps of a slot follow each other without an await. Their results are stored with
those of all other slots in one statement, and waiting callers continue when they are stored. If another node has taken
over a slot, or its write fails for too long, the slot is dropped and read again. Records acquired in it are then
available, so a record may be delivered twice, and none is lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import islice
from typing import Final

import structlog

from gateway.coordinator.facts import MemberId
from gateway.coordinator.share.partition import (
    Acknowledge,
    LocksExpire,
    PartitionEvent,
    PartitionSettings,
    PartitionStep,
    Range,
    RecordState,
    Release,
    SharePartition,
    dead_letters,
    durable,
    next_deadline,
    step,
)
from gateway.net.pieces import PIECE, in_pieces
from gateway.operate.logs import NO_REQUEST
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError, StorageUnavailable
from storage.share import WRITTEN_AT_A_TIME, ShareKey, ShareRow, ShareStore, StoredRange

logger = structlog.stdlib.get_logger(__name__)

MAX_PARTITIONS = 20_000
"""Maximal number of share partitions in memory. Beyond it, those without acquired records are dropped, the least
recently used first."""
PATIENCE_S = 15.0
"""How long a write is tried again before its callers get an error."""
PAUSE_S = 0.25
VERIFIED_AT_A_TIME = 2_000
RANGES_AT_A_TIME = 5_000
"""Ranges of one write besides those of its first partition. They become JSON in one go, about a millisecond per
thousand."""

Start = Callable[[], Awaitable[int]]
Wake = Callable[[], None]


class _Slot:
    __slots__ = (
        "dead_letters",
        "deadline",
        "key",
        "partition",
        "settings",
        "state_epoch",
        "storing",
        "waiting",
        "watches",
        "write_number",
    )

    def __init__(self, key: ShareKey, row: ShareRow, settings: PartitionSettings) -> None:
        self.key = key
        self.state_epoch = row.state_epoch
        self.write_number = row.write_number
        self.partition: SharePartition = _restored(row)
        self.settings = settings
        self.dead_letters = _stored_dead_letters(row)
        """First and last offsets of the stored dead letters that wait to be written."""
        self.waiting: list[asyncio.Future[None]] = []
        """Callers that wait until the present value is stored."""
        self.storing: list[asyncio.Future[None]] | None = None
        """Callers that wait for the slot's write in progress, if one is in progress."""
        self.watches: dict[ShareWatch, None] = {}
        self.deadline: asyncio.TimerHandle | None = None
        """Timer for the end of the next lock."""


class ShareWatch:
    """Wakes its owner whenever more records of its partitions may have become available."""

    __slots__ = ("_keys", "_partitions", "wake")

    def __init__(self, partitions: SharePartitions, wake: Wake) -> None:
        self._partitions = partitions
        self._keys: dict[ShareKey, None] = {}
        self.wake: Final = wake

    def add(self, key: ShareKey) -> None:
        self._keys[key] = None
        self._partitions.watched(key, self)

    def close(self) -> None:
        self._partitions.unwatched(self._keys, self)
        self._keys = {}

    async def leave(self) -> None:
        """Do the same as `close`, and give way to other tasks."""
        async for key in in_pieces(list(self._keys)):
            self._partitions.unwatched((key,), self)
        self._keys = {}


class SharePartitions:
    """The share partitions of one node. Times are seconds on the loop's clock. Times in the values are milliseconds on
    the same clock."""

    def __init__(
        self, store: ShareStore, *, patience_s: float = PATIENCE_S, max_partitions: int = MAX_PARTITIONS
    ) -> None:
        self._store = store
        self._patience_s = patience_s
        self._max_partitions = max_partitions
        self._slots: OrderedDict[ShareKey, _Slot] = OrderedDict()
        """The least recently used slot is first."""
        self._loading: dict[ShareKey, asyncio.Task[_Slot]] = {}
        self._dirty: dict[ShareKey, _Slot] = {}
        self._writer: asyncio.Task[None] | None = None
        self._letting_go: dict[MemberId, asyncio.Task[None]] = {}
        self._notice_dead_letters: Callable[[ShareKey], None] = lambda _key: None
        self._loop = asyncio.get_running_loop()

    def report_dead_letters(self, notice: Callable[[ShareKey], None]) -> None:
        """Call `notice` with each partition whose stored state has dead letters. The writer of dead letters applies its
        results here, so it is made after the partitions."""
        self._notice_dead_letters = notice

    @property
    def count(self) -> int:
        return len(self._slots)

    def holds(self, key: ShareKey) -> bool:
        """Return whether `load` has the partition in memory."""
        return key in self._slots

    # --- what handlers call -------------------------------------------------------------------------------------

    async def load(self, key: ShareKey, start: Start, settings: PartitionSettings) -> SharePartition:
        """Return the present value, read if necessary. A partition that was never read begins at `start`. Raise
        KafkaError."""
        slot = self._slots.get(key)
        if slot is None:
            loading = self._loading.get(key)
            if loading is None:
                loading = asyncio.create_task(self._load(key, start, settings), context=NO_REQUEST.copy())
                self._loading[key] = loading
                loading.add_done_callback(self._has_loaded(key))
            # Others wait for the same load: a caller that is cancelled must not cancel the load.
            slot = await asyncio.shield(loading)
        if key in self._slots:
            self._slots.move_to_end(key)
        slot.settings = settings
        return slot.partition

    async def apply(self, key: ShareKey, event: PartitionEvent) -> PartitionStep:
        """Apply one step to a partition that was loaded, and store it before the return if it must be durable. Raise
        KafkaError NOT_LEADER_OR_FOLLOWER if another node leads the partition now, or if it was not loaded. The client
        then repeats the request.
        """
        taken, stored = self.submit(key, event)
        if stored is not None:
            await stored
        return taken

    def submit(self, key: ShareKey, event: PartitionEvent) -> tuple[PartitionStep, asyncio.Future[None] | None]:
        """Do the same as `apply` without waiting. Return the step and, if the caller must wait before it answers,
        the future: several steps can be awaited at once."""
        slot = self._slots.get(key)
        if slot is None:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the share partition must be read again")
        taken = self._play(slot, event)
        waiting: list[asyncio.Future[None]] | None = None
        if slot.key in self._dirty:
            waiting = slot.waiting
        elif isinstance(event, Acknowledge):
            # Another request may have sent the same acknowledgement before, and its result is not stored yet.
            waiting = slot.storing
        if waiting is None or not (taken.must_store or isinstance(event, Acknowledge)) or taken.error:
            return taken, None
        stored: asyncio.Future[None] = self._loop.create_future()
        waiting.append(stored)
        return taken, stored

    def dead_letters(self, key: ShareKey) -> list[Range]:
        """Return the undeliverable records that are stored and wait to be written; none if another node leads the
        partition now."""
        slot = self._slots.get(key)
        if slot is None:
            return []
        return [each for bounds in slot.dead_letters for each in dead_letters(slot.partition, *bounds)]

    def watch(self, wake: Wake) -> ShareWatch:
        return ShareWatch(self, wake)

    def release(self, member_id: MemberId, keys: Collection[ShareKey]) -> None:
        """End the member's session: its acquired records become available. If there are very many partitions, this
        takes several turns of the event loop. No caller waits for this: if the change cannot be stored, the locks end
        by themselves."""
        if len(keys) <= PIECE:
            for key in keys:
                self._release(member_id, key)
            return
        letting_go = asyncio.create_task(
            self._release_in_turns(member_id, keys, self._letting_go.get(member_id)), context=NO_REQUEST.copy()
        )
        self._letting_go[member_id] = letting_go

    async def let_go(self, member_id: MemberId) -> None:
        """Wait until the records acquired in ended sessions of the member are released. Otherwise that release would
        also hit the records that the next session acquires."""
        letting_go = self._letting_go.get(member_id)
        if letting_go is not None:
            await asyncio.wait((letting_go,))

    async def verify(self, keys: Iterable[ShareKey]) -> None:
        """Drop partitions that another node has led in the meantime, that were changed through another node, or that
        are gone. Call this when a member begins to read them here, because it may come from another node. Raise
        StorageError."""
        slots = [slot async for key in in_pieces(keys) if (slot := self._slots.get(key)) is not None]
        for begin in range(0, len(slots), VERIFIED_AT_A_TIME):
            some = slots[begin : begin + VERIFIED_AT_A_TIME]
            epochs = await self._store.epochs([slot.key for slot in some])
            for slot, epoch in zip(some, epochs, strict=True):
                if epoch != slot.state_epoch and self._slots.get(slot.key) is slot:
                    self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def drop(self, keys: Iterable[ShareKey]) -> None:
        """Drop the partitions, because they were changed from outside, or because another node leads them now. They are
        read again, and a read in progress is discarded."""
        for key in list(keys):
            self._loading.pop(key, None)
            slot = self._slots.get(key)
            if slot is not None:
                self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def drop_group(self, group_id: str) -> None:
        """Drop the partitions of a deleted group. A group of the same name begins anew."""
        self.drop([key for key in (*self._slots, *self._loading) if key.group_id == group_id])

    def forget(self) -> None:
        """Drop every partition, because the database has another history."""
        self.drop([*self._slots, *self._loading])

    async def close(self) -> None:
        """Wait until every change is stored or has failed. The caller bounds the wait."""
        for slot in self._slots.values():
            if slot.deadline is not None:
                slot.deadline.cancel()
        if self._letting_go:
            await asyncio.wait(self._letting_go.values())
        while self._writer is not None:
            await asyncio.wait((self._writer,))

    # --- slots --------------------------------------------------------------------------------------------------

    def _release(self, member_id: MemberId, key: ShareKey) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self._play(slot, Release(member_id))

    async def _release_in_turns(
        self, member_id: MemberId, keys: Iterable[ShareKey], before: asyncio.Task[None] | None
    ) -> None:
        try:
            async for key in in_pieces(keys):
                self._release(member_id, key)
            if before is not None:
                await asyncio.wait((before,))
        finally:
            if self._letting_go.get(member_id) is asyncio.current_task():
                del self._letting_go[member_id]

    def _has_loaded(self, key: ShareKey) -> Callable[[asyncio.Task[_Slot]], None]:
        def done(loading: asyncio.Task[_Slot]) -> None:
            if self._loading.get(key) is loading:
                del self._loading[key]
            if not loading.cancelled():
                loading.exception()  # Callers that still wait receive the failure.

        return done

    async def _load(self, key: ShareKey, start: Start, settings: PartitionSettings) -> _Slot:
        self._make_room()
        try:
            row = await self._store.lead(key)
            if row is None:
                row = await self._store.begin(key, await start())
        except StorageError as error:
            logger.warning("a share partition cannot be read", group_id=key.group_id, error=str(error))
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the share partition cannot be read") from error
        if row is None:
            raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"share group {key.group_id} does not exist")
        if self._loading.get(key) is not asyncio.current_task():
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the share partition was changed while it was read")
        slot = self._slots[key] = _Slot(key, row, settings)
        if slot.dead_letters:
            self._notice_dead_letters(key)
        return slot

    def _make_room(self) -> None:
        if len(self._slots) + len(self._loading) <= self._max_partitions:
            return
        for slot in list(islice(self._slots.values(), PIECE)):
            is_in_use = slot.key in self._dirty or slot.watches or slot.dead_letters
            if not is_in_use and next_deadline(slot.partition) is None:
                self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)
                return
            # The slot is in use, so the next search begins behind it.
            self._slots.move_to_end(slot.key)
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "too many share partitions are in use")

    def _play(self, slot: _Slot, event: PartitionEvent) -> PartitionStep:
        before = slot.partition
        taken = step(before, event, self._now_ms(), slot.settings)
        slot.partition = taken.partition
        if taken.must_store:
            self._dirty[slot.key] = slot
            if self._writer is None:
                self._writer = asyncio.create_task(self._write(), name="share partitions", context=NO_REQUEST.copy())
        if taken.partition is not before:
            self._arm(slot)
            if _may_give_more(before, taken.partition):
                self._wake(slot)
        return taken

    def _arm(self, slot: _Slot) -> None:
        deadline_ms = next_deadline(slot.partition)
        if slot.deadline is not None:
            slot.deadline.cancel()
            slot.deadline = None
        if deadline_ms is not None:
            slot.deadline = self._loop.call_at(deadline_ms / 1000, self._end_locks, slot)

    def _end_locks(self, slot: _Slot) -> None:
        slot.deadline = None
        if self._slots.get(slot.key) is slot:
            self._play(slot, LocksExpire())
            if slot.deadline is None:
                self._arm(slot)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _drop(self, slot: _Slot, error: ErrorCode) -> None:
        """Drop the slot. Callers that wait for it, or watch it, look again."""
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
        if self._dirty.get(slot.key) is slot:
            del self._dirty[slot.key]
        if slot.deadline is not None:
            slot.deadline.cancel()
            slot.deadline = None
        waiting, slot.waiting = slot.waiting, []
        for each in waiting:
            if not each.done():
                each.set_exception(KafkaError(error, "the share partition was not stored"))
        self._wake(slot)

    # --- watches ------------------------------------------------------------------------------------------------

    def watched(self, key: ShareKey, watch: ShareWatch) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            slot.watches[watch] = None

    def unwatched(self, keys: Iterable[ShareKey], watch: ShareWatch) -> None:
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                slot.watches.pop(watch, None)

    def _wake(self, slot: _Slot) -> None:
        for watch in list(slot.watches):
            watch.wake()

    # --- storing ------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write as long as anything must be stored."""
        failing_since_s: float | None = None
        slots: list[_Slot] = []
        try:
            while self._dirty:
                slots = self._next_to_write()
                # Steps from here on belong to the next write.
                waiting = [slot.waiting for slot in slots]
                for slot in slots:
                    del self._dirty[slot.key]
                    slot.storing, slot.waiting = slot.waiting, []
                    # Each try gets a new number, because the previous try may still be in progress.
                    slot.write_number += 1
                rows = [(slot.key, _row(slot)) for slot in slots]
                try:
                    written = await self._store.write(rows)
                    failing_since_s = None
                except StorageError as error:
                    failing_since_s = failing_since_s or self._loop.time()
                    lasting = self._loop.time() - failing_since_s >= self._patience_s
                    if isinstance(error, StorageUnavailable) and not lasting:
                        self._put_back(slots, waiting)
                        await asyncio.sleep(PAUSE_S)
                        continue
                    logger.warning("share partitions were not stored", partitions=len(slots), error=str(error))
                    written = [False] * len(slots)
                for slot, (_, row), is_written, waiters in zip(slots, rows, written, waiting, strict=True):
                    slot.storing = None
                    if is_written:
                        self._stored(slot, row, waiters)
                    else:
                        slot.waiting = [*waiters, *slot.waiting]
                        self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        finally:
            self._writer = None
            # Callers are left here only by an unforeseen error or a cancelled task. None of them may wait for ever
            # because of that.
            for slot in {id(each): each for each in (*slots, *self._dirty.values())}.values():
                if slot.storing is not None or slot.key in self._dirty:
                    slot.waiting, slot.storing = [*(slot.storing or ()), *slot.waiting], None
                    self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def _stored(self, slot: _Slot, row: ShareRow, waiters: Iterable[asyncio.Future[None]]) -> None:
        slot.dead_letters = _stored_dead_letters(row)
        if slot.dead_letters and self._slots.get(slot.key) is slot:
            self._notice_dead_letters(slot.key)
        for each in waiters:
            if not each.done():
                each.set_result(None)

    def _next_to_write(self) -> list[_Slot]:
        slots: list[_Slot] = []
        ranges = 0
        for slot in self._dirty.values():
            ranges += len(slot.partition.ranges)
            if slots and (len(slots) == WRITTEN_AT_A_TIME or ranges > RANGES_AT_A_TIME):
                break
            slots.append(slot)
        return slots

    def _put_back(self, slots: list[_Slot], waiting: list[list[asyncio.Future[None]]]) -> None:
        """Put the slots back, except dropped slots: callers that wait for a dropped slot look it up again."""
        for slot, waiters in zip(slots, waiting, strict=True):
            slot.waiting, slot.storing = [*waiters, *slot.waiting], None
            if self._slots.get(slot.key) is slot:
                self._dirty[slot.key] = slot
            else:
                self._drop(slot, ErrorCode.NOT_LEADER_OR_FOLLOWER)


def _may_give_more(before: SharePartition, after: SharePartition) -> bool:
    """Return whether records became available, or whether the group may acquire further ahead."""
    return after.next_offset < before.next_offset or after.start_offset > before.start_offset


def _row(slot: _Slot) -> ShareRow:
    value = durable(slot.partition)
    ranges = (StoredRange(len(each), each.state.value, each.delivery_count) for each in value.ranges)
    return ShareRow(slot.state_epoch, value.start_offset, tuple(ranges), slot.write_number)


def _restored(row: ShareRow) -> SharePartition:
    ranges: list[Range] = []
    offset = row.start_offset
    for length, state, delivery_count in row.ranges:
        ranges.append(Range(offset, offset + length - 1, RecordState(state), delivery_count))
        offset += length
    return SharePartition(row.start_offset, tuple(ranges))


def _stored_dead_letters(row: ShareRow) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    offset = row.start_offset
    for each in row.ranges:
        if each.state == RecordState.ARCHIVING.value:
            found.append((offset, offset + each.length - 1))
        offset += each.length
    return tuple(found)
