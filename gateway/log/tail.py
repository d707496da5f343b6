"""The recent end of every partition's log in memory, the known offsets of each partition, and the parked fetches.

The one idea: this cache only ever holds what is durable. The appender records a batch after its commit, so a consumer
at the tail is served and woken without a query. Everything else is read from Postgres. A restart or another node's
append costs a query, never a wrong answer.

It does not decide offsets, does not read Postgres, and knows no topic names.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from gateway.net.pieces import in_pieces
from protocol.buffer import Buffer
from storage.types import AbortedTransaction, PartitionKey, PartitionState

ENTRY_OVERHEAD_BYTES = 512
"""Memory of one held batch besides its bytes. It is counted, so that a million tiny batches cannot exceed the bound."""

DOUBT_S = 30.0
"""After some events a Postgres backend may still commit records without an announcement, for at most this long. The
events are a commit of unknown outcome, here or on another node, and the end of another node.
"""

DOUBTFUL_AGE_S = 1.5
"""Maximum age of a known high watermark while another node may append without announcing it. Watched partitions are
read more often than that."""

START_AGE_S = 10.0
"""Maximum age of a known log start while there are other nodes: DeleteRecords or retention may move it there."""

MAX_ABORTED_LOOKED_AT = 5_000
"""Aborted transactions that a read looks through. If there are more, Postgres does it."""

SMALL_SHARE = 2
"""A batch of less than half its frame is copied out of it, so that what is held is at most twice what is counted."""


class KnownOffsets(NamedTuple):
    """The last known offsets of a partition. The high watermark may have moved since through another node."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    """Records below it belong to no open transaction. A consumer with `read_committed` reads up to here."""
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class TailRead:
    """Batches in offset order, from the one that contains the requested offset on. Empty at the high watermark and
    outside the log.
    """

    known: KnownOffsets
    batches: Sequence[Buffer]
    size_bytes: int
    aborted: Sequence[AbortedTransaction] = ()
    """Aborted transactions with records in `batches`, if only committed records were asked for."""
    excess: Buffer | None = None
    """The batch that follows `batches` but is too large for the limit. None if there is no such batch, or if no batch
    fitted at all.
    """


@dataclass(slots=True)
class _Entry:
    partition: _PartitionTail
    base_offset: int
    last_offset: int
    records: Buffer
    size_bytes: int
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class _Aborted:
    """A transaction whose marker is in memory."""

    transaction: AbortedTransaction
    last_offset: int
    """Offset of the marker."""
    last_stable_offset: int
    """Last stable offset after the transaction ended. No transaction that ended later began below this offset."""


_last_offset = attrgetter("last_offset")
_first_offset = attrgetter("first_offset")


class _PartitionTail:
    """The batches of one partition. `entries[first:]` are contiguous; entries before `first` have been evicted and will
    be removed.
    """

    __slots__ = (
        *("aborted", "announced", "announced_at", "entries", "first", "held_stable_offset", "known", "verified_at"),
        "watches",
    )

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.aborted: list[_Aborted] = []
        """Aborted transactions, ordered by the offset of their markers. They include all whose markers are in
        `entries`.
        """
        self.held_stable_offset = 0
        """The last stable offset where `entries` end. Records between it and a later known one belong to
        transactions whose markers are not held: Postgres knows how they ended."""
        self.first = 0
        self.known: KnownOffsets | None = None
        self.verified_at = float("-inf")
        self.announced = -1
        """Log end that another node has announced. It may be beyond the appends that this node knows."""
        self.announced_at = float("-inf")
        self.watches: dict[Watch, None] = {}

    def is_verified(self, now_s: float, max_age_s: float) -> bool:
        """Return True if the known end was read or appended recently enough, and no node has announced a later one."""
        known = self.known
        return known is not None and self.announced <= known.high_watermark and now_s - self.verified_at <= max_age_s

    def pop_first(self) -> None:
        self.first += 1
        if self.first == len(self.entries) or (self.first >= 64 and self.first * 2 >= len(self.entries)):
            del self.entries[: self.first]
            self.first = 0
            # Transactions that ended below the first held batch do not matter to a reader of held batches.
            ended = self.entries[0].base_offset if self.entries else None
            del self.aborted[: None if ended is None else bisect_left(self.aborted, ended, key=_last_offset)]

    def aborted_between(self, offset: int, end_offset: int) -> Sequence[AbortedTransaction] | None:
        """Return the aborted transactions with records between the offsets, ordered by their first offset; None if
        finding them takes long."""
        found: list[AbortedTransaction] = []
        begin = bisect_left(self.aborted, offset, key=_last_offset)
        for index in range(begin, len(self.aborted)):
            each = self.aborted[index]
            if each.transaction.first_offset < end_offset:
                found.append(each.transaction)
            if each.last_stable_offset >= end_offset:
                break
            if index - begin >= MAX_ABORTED_LOOKED_AT:
                return None
        found.sort(key=_first_offset)
        return found


class Watch:
    """One parked fetch: registered on its partitions from `Tail.watch` until `close`.

    Bytes appended since `rearm` are counted. So an append between looking and waiting is never missed, and a fetch that
    wants many bytes is not woken for each batch. For a `committed` watch only stable bytes count. If a transaction's
    end makes earlier appends stable, the watch wakes and looks again.
    """

    __slots__ = ("_appended_bytes", "_keys", "_missing_bytes", "_tail", "_urgent", "_waiter", "committed")

    def __init__(self, tail: Tail, *, committed: bool = False) -> None:
        self.committed = committed
        self._tail = tail
        self._keys: dict[PartitionKey, None] = {}
        self._appended_bytes = 0
        self._missing_bytes = 0
        self._urgent = False
        self._waiter: asyncio.Future[None] | None = None

    def add(self, key: PartitionKey) -> None:
        """Add a partition. Appends to it count from now on."""
        self._keys[key] = None
        self._tail.watched_by(key, self)

    def rearm(self) -> None:
        """Forget earlier appends. The caller is about to read the partitions again, and appends
        during that read count.
        """
        self._appended_bytes = 0
        self._urgent = False

    async def wait(self, missing_bytes: int, timeout_s: float) -> None:
        """Wait until `missing_bytes` have been appended, a partition has gone or moved, or the time is over."""
        if self._urgent or self._appended_bytes >= missing_bytes or timeout_s <= 0:
            return
        loop = asyncio.get_running_loop()
        self._missing_bytes = missing_bytes
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake)
        self._tail.count_parked(1)
        try:
            await self._waiter
        finally:
            self._tail.count_parked(-1)
            timer.cancel()
            self._waiter = None

    def count(self, appended_bytes: int) -> None:
        self._appended_bytes += appended_bytes
        if self._appended_bytes >= self._missing_bytes:
            self._resolve()

    def wake(self) -> None:
        self._urgent = True
        self._resolve()

    def _resolve(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Stop watching the partitions."""
        self._tail.unwatch(self, self._keys)
        self._keys = {}

    async def leave(self) -> None:
        """Do the same as `close`, but yield to other tasks in between, for a watch over very many partitions."""
        async for key in in_pieces(list(self._keys)):
            self._tail.unwatch(self, (key,))
        self._keys = {}


class Tail:
    """All partitions' tails under one bound in bytes. The oldest batch of the node is evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._partitions: dict[PartitionKey, _PartitionTail] = {}
        self._by_age: deque[_Entry] = deque()
        self._parked_count = 0
        self._draining = False
        self._doubted_until_s = float("-inf")
        self._trusted_since_s = float("-inf")
        self._trusted_until_s = float("inf")
        self._reset_s = float("-inf")

    @property
    def size_bytes(self) -> int:
        """Bytes in memory, including the overhead of each batch."""
        return self._size_bytes

    @property
    def parked_count(self) -> int:
        """Number of fetches that are waiting now."""
        return self._parked_count

    @property
    def draining(self) -> bool:
        """True if parked fetches must be answered at once with the available bytes."""
        return self._draining

    # --- what is known --------------------------------------------------------------------------------------------

    def record_append(
        self,
        key: PartitionKey,
        *,
        base_offset: int,
        last_offset: int,
        records: Buffer,
        log_start_offset: int,
        leader_epoch: int,
        now_s: float,
        last_stable_offset: int | None = None,
        aborted: AbortedTransaction | None = None,
    ) -> None:
        """Record a batch that has become durable. `records` already carries its offset and is never written again.
        `last_stable_offset`: the present one; None if no transaction is open. `aborted`: the transaction that the
        batch, a marker, has aborted.

        A gap before the batch (another node appended, or the outcome of a commit was never learnt) restarts this
        partition's tail, so that held batches are always contiguous. A batch from before a reset is ignored.
        """
        if now_s < self._reset_s:
            return
        partition = self._partition(key)
        entries = partition.entries
        if len(entries) > partition.first and entries[-1].last_offset + 1 != base_offset:
            if base_offset <= entries[-1].last_offset:
                return
            self._drop_entries(partition)
        records = _own(records)
        size_bytes = len(records)
        entry = _Entry(partition, base_offset, last_offset, records, size_bytes)
        entries.append(entry)
        self._by_age.append(entry)
        self._size_bytes += size_bytes + ENTRY_OVERHEAD_BYTES
        end_offset = last_offset + 1
        stable = end_offset if last_stable_offset is None else min(last_stable_offset, end_offset)
        partition.held_stable_offset = stable
        if aborted is not None:
            partition.aborted.append(_Aborted(aborted, last_offset, stable))
        was_stable_to = partition.known.last_stable_offset if partition.known is not None else base_offset
        self._learn(partition, log_start_offset, end_offset, stable, leader_epoch)
        partition.verified_at = now_s
        if self._size_bytes > self._max_bytes:
            self._evict()
        for watch in partition.watches:
            if not watch.committed or was_stable_to == base_offset < stable:
                watch.count(size_bytes)
            elif stable > was_stable_to:
                watch.wake()

    def observe(self, key: PartitionKey, state: PartitionState, now_s: float) -> None:
        """Apply the state read from Postgres at `now_s` (loop time). Offsets only rise: a late answer lowers
        nothing.

        Nodes announce appends that are durable, so a read that began later shows them. An end that it does not show is
        no node's: every role of the database can send a notification. A state from before a reset is ignored.
        """
        if now_s < self._reset_s:
            return
        partition = self._partition(key)
        before = partition.known
        if now_s > partition.announced_at:
            partition.announced = -1
        self._learn(
            partition, state.log_start_offset, state.high_watermark, state.last_stable_offset, state.leader_epoch
        )
        partition.verified_at = max(partition.verified_at, now_s)
        # The first read wakes watches too: another first read may be under way, and its answer may be older.
        if partition.known != before:
            for watch in partition.watches:
                watch.wake()

    def doubt(self, now_s: float) -> None:
        """Note that a commit ended without an outcome: for DOUBT_S Postgres may know more than was recorded here."""
        self._doubted_until_s = now_s + DOUBT_S

    def trust_since(self, since_s: float) -> None:
        """Set the moment (loop time) from which other nodes announce every append through `heard`. Offsets verified
        later hold until the next announcement. Infinite while no node announces."""
        self._trusted_since_s = since_s

    def trust_until(self, until_s: float) -> None:
        """Set the moment (loop time) from which other nodes may no longer announce their appends to this one."""
        self._trusted_until_s = until_s

    def doubtful(self, now_s: float) -> bool:
        """Return True if the known offsets are valid for a short time only."""
        return now_s < max(self._doubted_until_s, self._trusted_since_s) or now_s >= self._trusted_until_s

    def max_age_s(self, now_s: float) -> float:
        """Return the greatest age at which a known high watermark is believed. A watermark is believed if it was
        verified after every doubt and while other nodes announced their appends. An older one may have been
        overtaken unnoticed."""
        if now_s >= self._trusted_until_s:
            return DOUBTFUL_AGE_S
        return max(now_s - max(self._doubted_until_s, self._trusted_since_s), DOUBTFUL_AGE_S)

    def heard(self, key: PartitionKey, high_watermark: int, now_s: float) -> None:
        """Note at `now_s` (loop time) that another node has appended up to `high_watermark`. The known offsets are
        older, so parked fetches look again.

        If the first read of a watched partition is under way, Postgres may have answered it before the append. So the
        announcement counts before any offset is known.
        """
        partition = self._partitions.get(key)
        if partition is None or (partition.known is not None and partition.known.high_watermark >= high_watermark):
            return
        partition.announced = max(partition.announced, high_watermark)
        partition.announced_at = now_s
        for watch in partition.watches:
            watch.wake()

    def watched(self) -> list[PartitionKey]:
        """Return the partitions on which a fetch waits."""
        return [key for key, partition in self._partitions.items() if partition.watches]

    def log_start_moved(self, key: PartitionKey, log_start_offset: int) -> None:
        """Stop serving records below `log_start_offset`, because they are gone."""
        partition = self._partitions.get(key)
        if partition is None or partition.known is None:
            return
        self._learn(partition, log_start_offset, log_start_offset, log_start_offset, partition.known.leader_epoch)
        for watch in partition.watches:
            watch.wake()

    def holds(self, key: PartitionKey) -> bool:
        """Return True if batches of the partition are held."""
        partition = self._partitions.get(key)
        return partition is not None and len(partition.entries) > partition.first

    def compacted(self, key: PartitionKey, end_offset: int) -> None:
        """Stop serving batches below `end_offset`, because they may have been replaced in Postgres."""
        partition = self._partitions.get(key)
        if partition is not None:
            self._drop_entries(partition, end_offset)

    def known(self, key: PartitionKey, now_s: float, max_age_s: float = float("inf")) -> KnownOffsets | None:
        """Return the offsets known from an append, or from a read at most `max_age_s` ago. Return None if Postgres must
        be queried.
        """
        partition = self._partitions.get(key)
        if partition is None or not partition.is_verified(now_s, max_age_s):
            return None
        return partition.known

    def forget(self, key: PartitionKey) -> None:
        """Free a partition that no longer exists, and wake the fetches parked on it."""
        partition = self._partitions.pop(key, None)
        if partition is None:
            return
        self._drop_entries(partition)
        for watch in partition.watches:
            watch.wake()

    def reset(self) -> None:
        """Forget everything held and known, because none of it is true any more. Parked fetches look again."""
        self._reset_s = asyncio.get_running_loop().time()
        for key in list(self._partitions):
            self.forget(key)

    def drain(self) -> None:
        """Answer every parked fetch, and every later one, at once, because the node stops."""
        self._draining = True
        for partition in self._partitions.values():
            for watch in partition.watches:
                watch.wake()

    # --- reading --------------------------------------------------------------------------------------------------

    def read(
        self,
        key: PartitionKey,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        now_s: float,
        max_age_s: float = float("inf"),
        committed: bool = False,
        max_batches: int | None = None,
    ) -> TailRead | None:
        """Return whole batches from `offset` up to `max_bytes` and `max_batches`; None means that Postgres must be
        asked. `committed`: nothing from the last stable offset on.

        `at_least_one` returns the first batch even if it alone exceeds the limit (KIP-74). Above the known high
        watermark the answer is None, because another node may have appended.
        """
        partition = self._partitions.get(key)
        if partition is None or partition.known is None:
            return None
        known = partition.known
        if offset < known.log_start_offset:
            return TailRead(known, (), 0)
        end_offset = known.high_watermark
        if committed:
            if offset >= known.last_stable_offset:
                is_known = offset <= known.high_watermark and partition.is_verified(now_s, max_age_s)
                return TailRead(known, (), 0) if is_known else None
            end_offset = min(known.last_stable_offset, partition.held_stable_offset)
            if offset >= end_offset:
                return None
        entries = partition.entries
        first = partition.first
        if len(entries) == first or offset > entries[-1].last_offset:
            if offset == known.high_watermark and partition.is_verified(now_s, max_age_s):
                return TailRead(known, (), 0)
            return None
        if now_s > partition.verified_at + START_AGE_S and self._trusted_until_s != float("inf"):
            return None
        if offset < entries[first].base_offset:
            return None
        batches: list[Buffer] = []
        size_bytes = 0
        excess: Buffer | None = None
        read_to = offset
        for index in range(bisect_left(entries, offset, lo=first, key=_last_offset), len(entries)):
            entry = entries[index]
            if entry.base_offset >= end_offset:
                break
            if size_bytes + entry.size_bytes > max_bytes and (batches or not at_least_one):
                excess = entry.records if batches else None
                break
            if len(batches) == max_batches:
                break
            batches.append(entry.records)
            size_bytes += entry.size_bytes
            read_to = entry.last_offset + 1
        aborted = partition.aborted_between(offset, read_to) if committed and partition.aborted else ()
        return None if aborted is None else TailRead(known, batches, size_bytes, aborted, excess)

    def watch(self, keys: Iterable[PartitionKey], *, committed: bool = False) -> Watch:
        """Register for appends to `keys`, or for their committed ones if `committed`. The caller closes the watch."""
        watch = Watch(self, committed=committed)
        for key in keys:
            watch.add(key)
        return watch

    def watched_by(self, key: PartitionKey, watch: Watch) -> None:
        self._partition(key).watches[watch] = None

    def count_parked(self, change: int) -> None:
        self._parked_count += change

    def unwatch(self, watch: Watch, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            partition = self._partitions.get(key)
            if partition is not None:
                partition.watches.pop(watch, None)
                if partition.known is None and not partition.watches:
                    del self._partitions[key]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _partition(self, key: PartitionKey) -> _PartitionTail:
        partition = self._partitions.get(key)
        if partition is None:
            partition = self._partitions[key] = _PartitionTail()
        return partition

    def _learn(
        self,
        partition: _PartitionTail,
        log_start_offset: int,
        high_watermark: int,
        last_stable_offset: int,
        leader_epoch: int,
    ) -> None:
        known = partition.known
        if known is not None and not (
            log_start_offset >= known.log_start_offset
            and high_watermark >= known.high_watermark
            and last_stable_offset >= known.last_stable_offset
            and leader_epoch >= known.leader_epoch
        ):
            log_start_offset = max(log_start_offset, known.log_start_offset)
            high_watermark = max(high_watermark, known.high_watermark)
            last_stable_offset = max(last_stable_offset, known.last_stable_offset)
            leader_epoch = max(leader_epoch, known.leader_epoch)
        partition.known = KnownOffsets(log_start_offset, high_watermark, last_stable_offset, leader_epoch)

    def _drop_entries(self, partition: _PartitionTail, end_offset: int | None = None) -> None:
        # Dropped entries keep their places in the age queue, and stay counted there, until eviction reaches them. Their
        # bytes are freed at once.
        for index in range(partition.first, len(partition.entries)):
            entry = partition.entries[index]
            if end_offset is not None and entry.last_offset >= end_offset:
                del partition.entries[:index]
                break
            entry.dropped = True
            entry.records = b""
            self._size_bytes -= entry.size_bytes
        else:
            partition.entries.clear()
            partition.aborted.clear()
        partition.first = 0

    def _evict(self) -> None:
        while self._by_age and self._size_bytes > self._max_bytes:
            entry = self._by_age.popleft()
            self._size_bytes -= ENTRY_OVERHEAD_BYTES
            if not entry.dropped:
                self._size_bytes -= entry.size_bytes
                entry.dropped = True
                entry.records = b""
                entry.partition.pop_first()


def _own(records: Buffer) -> Buffer:
    """Return the batch as a copy of its own if it is part of a much larger frame."""
    if isinstance(records, memoryview):
        frame = records.obj
        if isinstance(frame, bytes | bytearray) and records.nbytes * SMALL_SHARE < len(frame):
            return bytes(records)
    return records
