"""The journal's writer: writes what happened to groups to Postgres in batches, asynchronously.

The one idea: no request waits for the journal. The coordinator puts what happened into a bounded queue and continues.
One task turns it into rows on another thread and writes a batch per transaction. Entries that find the queue full, and
rows that Postgres refuses, are counted and dropped, and the next batch begins with the number of missing rows.

`journal_rows.py` decides which rows exist; docs/journal.md says what they mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import NamedTuple
from uuid import UUID

import structlog

from gateway.cluster.clock import wall_ms
from gateway.coordinator.facts import Fact, MemberSilent
from gateway.coordinator.machine import Machines, Summary
from gateway.coordinator.settings import Settings
from gateway.groups.journal_rows import DEAD, EMPTY, Rows
from gateway.groups.journal_sheet import Happened
from gateway.groups.kinds import AnyGroup
from gateway.log.catalog import Catalog
from gateway.net.pieces import in_pieces
from gateway.operate.logs import NO_REQUEST
from gateway.operate.metrics import Metrics
from protocol.shown import shown
from storage.errors import StorageError, StorageUnavailable
from storage.journal import (
    JournalEvent,
    JournalHandoff,
    JournalMember,
    JournalOffset,
    JournalOwnership,
    JournalRow,
    JournalStore,
)

logger = structlog.stdlib.get_logger(__name__)

MAX_QUEUED = 100_000
"""Maximal weight of the queue, in rows. A step weighs as much as its facts and members, because it keeps the members in
memory. A commit weighs as much as its partitions."""
MAX_BATCH = 5_000
LINGER_S = 0.1
"""Time for which entries are gathered, so that a quiet node writes seldom."""
HASTE_S = 0.01
"""Shorter time for which entries gather if one of them reports what happened to members. A node that is killed loses
unwritten entries.
"""
MAX_REFUSALS = 100
"""Refused statements of one batch after which the rest of the batch counts as refused. Finding five bad rows among
5,000 takes some 70 statements.
"""
PAUSE_S = 1.0
"""Pause after Postgres has not accepted a batch."""
COMMITS_PER_S = 2_000
"""Commits of one group that get a row each, per second. If there are more, each request gets one row with a count."""
BURST_S = 10
"""Seconds of unused commits for which a group may catch up."""
MAX_PACED_GROUPS = 10_000
"""Groups whose recent commits are remembered. The group without a commit for the longest time is forgotten first."""

_IDS = frozenset({"group_id", "member_id", "source_member_id", "target_member_id"})
"""Fields by which operators look up a history. They are never shortened."""
_NAMES: dict[type[JournalRow], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if str(field.type).startswith("str") and field.name not in _IDS)
    for kind in (JournalEvent, JournalMember, JournalOwnership, JournalOffset, JournalHandoff)
}
"""Text columns whose values may have been chosen by clients."""


class JournaledCommit(NamedTuple):
    topic_id: UUID | None
    topic: str
    partition: int
    offset: int
    log_start_offset: int | None
    log_end_offset: int | None
    error_code: int
    commit_count: int = 1
    """Number of commits that this entry stands for, if several partitions of one request got the same error."""


@dataclass(frozen=True, slots=True)
class _Commits:
    group_id: str
    generation_id: int
    member_id: str
    commits: Sequence[JournaledCommit]
    at_ms: int
    node_id: int


@dataclass(frozen=True, slots=True)
class _Expired:
    group_ids: Sequence[str]
    at_ms: int
    node_id: int


@dataclass(frozen=True, slots=True)
class _Silent:
    """A silence of one member. It holds no group, so a thousand members that are late at once cost little memory."""

    group: Summary
    fact: MemberSilent
    at_ms: int
    node_id: int


@dataclass(slots=True)
class _Dropped:
    """A mark that rows are missing at this position."""

    row_count: int
    at_ms: int
    node_id: int


_Item = Happened | _Commits | _Expired | _Silent | _Dropped


class Journal:
    """The journal of one node. Call `close` after the last event."""

    def __init__(
        self,
        store: JournalStore,
        machines: Machines[AnyGroup, Settings],
        catalog: Catalog,
        node_id: Callable[[], int],
        metrics: Metrics,
        *,
        max_queued: int = MAX_QUEUED,
        linger_s: float = LINGER_S,
        pause_s: float = PAUSE_S,
        commits_per_s: int = COMMITS_PER_S,
        now_ms: Callable[[], int] = wall_ms,
        notice: Callable[[Sequence[JournalRow]], None] | None = None,
    ) -> None:
        """`now_ms` dates the events. `notice` receives the rows in their order, before they are written."""
        self._now_ms = now_ms
        self._notice = notice
        self._store = store
        self._machines = machines
        self._rows = Rows(machines, _Topics(catalog))
        self._node_id = node_id
        self._metrics = metrics
        self._max_queued = max_queued
        self._linger_s = linger_s
        self._pause_s = pause_s
        self._queue: deque[tuple[_Item, int]] = deque()
        self._queued = 0
        self._lost = 0
        """Rows of failed batches since the last batch that was written."""
        self._has_partitions = False
        self._paces = _Paces(commits_per_s)
        self._writer: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._hasty = asyncio.Event()
        """Set while an entry in the queue must be written soon."""
        self._loop = asyncio.get_running_loop()

    # --- events -------------------------------------------------------------------------------------------------

    def happened(self, before: AnyGroup, after: AnyGroup, facts: tuple[Fact, ...]) -> None:
        """Note a settled step. Without facts the group was read."""
        if any(isinstance(fact, MemberSilent) for fact in facts):
            facts = self._silent(before, facts)
            if not facts:
                return
        summary = self._machines.of(after).summary(after)
        if not facts and not summary.member_count:
            return
        step = Happened(before, after, facts, self._now_ms(), int(self._loop.time() * 1000), self._node_id())
        self._put(step, 1 + len(facts) + summary.member_count, max(len(facts), 1))
        self._hasty.set()

    def _silent(self, before: AnyGroup, facts: tuple[Fact, ...]) -> tuple[Fact, ...]:
        """Queue an entry for each member that was silent until this step. Return the other facts."""
        summary = self._machines.of(before).summary(before)
        for fact in facts:
            if isinstance(fact, MemberSilent):
                self._put(_Silent(summary, fact, self._now_ms(), self._node_id()), 1, 1)
        return tuple(fact for fact in facts if not isinstance(fact, MemberSilent))

    async def committed(
        self, group_id: str, generation_id: int, member_id: str, commits: Sequence[JournaledCommit]
    ) -> None:
        """Note an OffsetCommit that is about to be answered, with a row per partition. If the group has committed more
        than COMMITS_PER_S, one row for each error stands for the whole request.
        """
        now_ms = self._now_ms()
        if not self._paces.allows(group_id, len(commits), self._loop.time()):
            commits = await summed_up(commits)
        for first in range(0, len(commits), MAX_BATCH):
            some = commits[first : first + MAX_BATCH]
            asked = _Commits(group_id, generation_id, member_id, some, now_ms, self._node_id())
            self._put(asked, len(some), len(some))

    def expired(self, group_ids: Sequence[str]) -> None:
        """Note that empty groups without offsets were removed."""
        self._put(_Expired(group_ids, self._now_ms(), self._node_id()), len(group_ids), len(group_ids))

    def _put(self, item: _Item, weight: int, row_count: int) -> None:
        if self._queued + weight > self._max_queued and self._queue:
            self._metrics.journal_dropped.inc(row_count)
            last = self._queue[-1][0]
            if isinstance(last, _Dropped):
                last.row_count += row_count
            else:
                self._queue.append((_Dropped(row_count, self._now_ms(), self._node_id()), 0))
        else:
            self._queue.append((item, weight))
            self._queued += weight
        if self._writer is None:
            self._writer = self._loop.create_task(self._write_all(), name="journal", context=NO_REQUEST.copy())

    # --- the writer ---------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Write the queue without waiting for more entries. The caller bounds the wait."""
        self._closing.set()
        self._hasty.set()
        while self._writer is not None:
            await asyncio.wait((self._writer,))

    async def _write_all(self) -> None:
        try:
            while self._queue:
                await self._linger()
                if not await self._write(self._take()):
                    if self._closing.is_set():
                        self._count_queue()
                    await _within(self._pause_s, self._closing)
        finally:
            self._writer = None

    async def _linger(self) -> None:
        """Let entries gather, unless the node stops."""
        if self._closing.is_set():
            return
        await _within(self._linger_s, self._hasty)
        if self._hasty.is_set():
            self._hasty.clear()
            await _within(min(HASTE_S, self._linger_s), self._closing)

    def _take(self) -> list[_Item]:
        taken: list[_Item] = []
        size = 0
        while self._queue and (not taken or size + self._queue[0][1] <= MAX_BATCH):
            item, weight = self._queue.popleft()
            taken.append(item)
            size += weight
        self._queued -= size
        return taken

    async def _write(self, items: Sequence[_Item]) -> bool:
        """Write the items and return True. If that fails, count them as missing rows."""
        rows: list[JournalRow] = []
        try:
            rows = await asyncio.to_thread(self._make, items)
            if not rows:
                return True
            if self._notice is not None:
                self._notice(rows)
            if not self._has_partitions:
                await self._store.make_partitions()
                self._has_partitions = True
            refused = await self._write_around(rows)
        except StorageError as error:
            logger.warning("journal not written", rows=len(rows), error=str(error))
        except Exception as error:
            # If a bug prevents the rows from being made, only these rows are lost. Groups continue, and the journal
            # records that rows are missing.
            logger.error("journal not written", items=len(items), exc_info=error)
        else:
            if len(refused) < len(rows):
                self._lost = sum(not _says_missing(row) for row in refused)
                self._metrics.journal_rows.inc(len(rows) - len(refused))
                self._metrics.journal_dropped.inc(self._lost)
                return True
        known_lost = sum(item.row_count for item in items if isinstance(item, _Dropped))
        dropped = sum(not _says_missing(row) for row in rows) if rows else len(items)
        self._metrics.journal_dropped.inc(dropped)
        self._lost += dropped + known_lost
        self._has_partitions = False
        return False

    async def _write_around(self, rows: Sequence[JournalRow]) -> list[JournalRow]:
        """Write all rows except those that Postgres refuses, and return the refused rows. A refused batch is halved
        until the bad row is alone. After many refusals the rest counts as refused too, because then no single row is to
        blame. Raise StorageUnavailable; then it is unknown which rows were written."""
        refused: list[JournalRow] = []
        refusals = 0
        pending = [rows]
        while pending:
            some = pending.pop()
            try:
                if refusals < MAX_REFUSALS:
                    await self._store.write(some)
                    continue
            except StorageUnavailable:
                raise
            except StorageError as error:
                refusals += 1
                if len(some) == 1:
                    row = some[0]
                    logger.warning(
                        "journal row dropped",
                        group_id=shown(row.group_id),
                        row=type(row).__name__,
                        error=str(error),
                    )
                else:
                    if refusals == 1:
                        await self._store.make_partitions()
                    pending += [some[len(some) // 2 :], some[: len(some) // 2]]
                    continue
            refused += some
        return refused

    def _count_queue(self) -> None:
        """Drop the queue, because Postgres is away while the node stops."""
        self._metrics.journal_dropped.inc(sum(1 for item, _ in self._queue if not isinstance(item, _Dropped)))
        self._queue.clear()
        self._queued = 0

    # --- on another thread --------------------------------------------------------------------------------------

    def _make(self, items: Sequence[_Item]) -> list[JournalRow]:
        rows: list[JournalRow] = []
        if self._lost:
            self._rows.forget()
            rows.append(_missing(self._lost, self._now_ms(), self._node_id()))
        for item in items:
            match item:
                case Happened():
                    rows += self._rows.of(item)
                case _Commits():
                    rows += _offsets(item)
                case _Silent():
                    rows.append(_heartbeat_gap(item))
                case _Expired():
                    rows += [_expired(group_id, item) for group_id in item.group_ids]
                case _Dropped():
                    self._rows.forget()
                    rows.append(_missing(item.row_count, item.at_ms, item.node_id))
        return [_legible(row) for row in rows]


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event for at most `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


class _Paces:
    """A token bucket per group, which limits the commits with a row of their own."""

    def __init__(self, commits_per_s: int) -> None:
        self._commits_per_s = commits_per_s
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """For each group, the tokens that are left and the time at which they were counted."""

    def allows(self, group_id: str, commits: int, now_s: float) -> bool:
        most = float(self._commits_per_s * BURST_S)
        left, counted_s = self._left.pop(group_id, (most, now_s))
        left = min(most, left + (now_s - counted_s) * self._commits_per_s)
        allowed = commits <= left
        self._left[group_id] = (left - commits if allowed else left, now_s)
        if len(self._left) > MAX_PACED_GROUPS:
            self._left.popitem(last=False)
        return allowed


async def summed_up(commits: Iterable[JournaledCommit]) -> list[JournaledCommit]:
    """Return one commit for each error, with the number of commits that it stands for."""
    firsts: dict[int, JournaledCommit] = {}
    counts: Counter[int] = Counter()
    async for one in in_pieces(commits):
        firsts.setdefault(one.error_code, one)
        counts[one.error_code] += one.commit_count
    return [first._replace(commit_count=counts[error_code]) for error_code, first in firsts.items()]


class _Topics:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def name_of(self, topic_id: UUID) -> str:
        topic = self._catalog.get_by_id(topic_id)
        return str(topic_id) if topic is None else topic.name

    def id_of(self, name: str) -> UUID | None:
        topic = self._catalog.get(name)
        return None if topic is None else topic.topic_id

    def partition_count_of(self, name: str) -> int:
        topic = self._catalog.get(name)
        return 0 if topic is None else len(topic.partitions)


def _legible(row: JournalRow) -> JournalRow:
    """Return the row with client-chosen texts shortened and printable. Ids stay whole."""
    texts = {name: text for name in _NAMES[type(row)] if (text := getattr(row, name)) is not None}
    changed = {name: fit for name, text in texts.items() if (fit := shown(text)) != text}
    return row if not changed else replace(row, **changed)


def _says_missing(row: JournalRow) -> bool:
    return isinstance(row, JournalEvent) and row.kind == "rows_dropped"


def _missing(row_count: int, at_ms: int, node_id: int) -> JournalEvent:
    return JournalEvent(
        at_ms=at_ms,
        node_id=node_id,
        group_id="",
        generation_id=-1,
        group_type="",
        kind="rows_dropped",
        row_count=row_count,
    )


def _expired(group_id: str, item: _Expired) -> JournalEvent:
    return JournalEvent(
        at_ms=item.at_ms,
        node_id=item.node_id,
        group_id=group_id,
        generation_id=-1,
        group_type="classic",
        kind="deleted",
        reason="expired",
        state_before=EMPTY,
        state_after=DEAD,
    )


def _heartbeat_gap(item: _Silent) -> JournalEvent:
    return JournalEvent(
        at_ms=item.at_ms,
        node_id=item.node_id,
        group_id=item.group.group_id,
        generation_id=item.group.generation_id,
        group_type=item.group.group_type,
        kind="heartbeat_gap",
        member_id=item.fact.member_id,
        wait_ms=item.fact.silent_ms,
        state_before=item.group.state,
        state_after=item.group.state,
    )


def _offsets(item: _Commits) -> list[JournalRow]:
    return [
        JournalOffset(
            at_ms=item.at_ms,
            node_id=item.node_id,
            group_id=item.group_id,
            generation_id=max(item.generation_id, -1),
            kind="commit",
            member_id=item.member_id or None,
            topic_id=commit.topic_id,
            topic=commit.topic,
            partition=commit.partition,
            offset=commit.offset,
            log_start_offset=commit.log_start_offset,
            log_end_offset=commit.log_end_offset,
            error_code=commit.error_code,
            commit_count=commit.commit_count,
        )
        for commit in item.commits
    ]
