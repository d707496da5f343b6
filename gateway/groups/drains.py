"""Read how far previous owners have committed, for groups in which new owners wait for that.

The one idea: nothing here decides. A group says what it waits for (`Draining`). This module reads the mark of each such
partition and its committed offset in Postgres, and reports both to the group. The group compares them with what it
waits for by then. At most one such read per group runs at a time. Facts about the group, its commits, and a timer start
one while the group waits. The paces of all commits are noted all the time, so that a member's pace is known when it
revokes a partition.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import structlog

from gateway.coordinator.classic import handoff as classic_handoff
from gateway.coordinator.classic.model import Group
from gateway.coordinator.consumer import handoff as consumer_handoff
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import Fact, OffsetsCommitted, RebalanceBegun, TransactionCommitted
from gateway.coordinator.handoff import (
    Drained,
    Draining,
    HandoffAcknowledged,
    HandoffBegun,
    HandoffEnd,
    HandoffsChanged,
)
from gateway.coordinator.requests import HandoffProgress
from gateway.groups.commit_pace import CommitPaces
from gateway.groups.groups import Groups
from gateway.groups.kinds import AnyGroup
from gateway.groups.marks import Mark, Marks
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST
from storage.errors import StorageError
from storage.offsets import OffsetStore
from storage.types import Partition, PartitionKey, PartitionState

logger = structlog.stdlib.get_logger(__name__)

POLL_S = 1.0
"""Longest delay until the group notices a commit by another path, a transaction that another node has ended, or a
deleted topic."""
SHORTEST_POLL_S = 0.01
MAX_REBALANCING = 10_000
"""Number of groups for which the start of the last rebalance is remembered."""
MAX_RELEASED = 20_000
MAX_LOOKS = 4
"""Maximal number of reads at a time, because they must not occupy all connections to Postgres."""
_NEWS = (HandoffBegun, HandoffAcknowledged, HandoffsChanged)
_COMMITTED = (OffsetsCommitted, TransactionCommitted)

States = Callable[[Iterable[PartitionKey]], Awaitable[Mapping[PartitionKey, PartitionState]]]


def draining(group: AnyGroup | None) -> tuple[Draining, ...]:
    if isinstance(group, Group):
        return classic_handoff.draining(group)
    return consumer_handoff.draining(group) if isinstance(group, ConsumerGroup) else ()


class Drains:
    """The drains of one node's groups. It receives the groups' facts as soon as it is made."""

    def __init__(
        self,
        groups: Groups,
        offsets: OffsetStore,
        catalog: Catalog,
        states: States,
        marks: Marks,
        leads: Callable[[Partition], bool],
    ) -> None:
        """`leads` returns whether clients of a partition are sent to this node."""
        self._groups = groups
        self._offsets = offsets
        self._catalog = catalog
        self._states = states
        self._marks = marks
        self._leads = leads
        self._paces = CommitPaces()
        self._rebalanced_s: OrderedDict[str, float] = OrderedDict()
        """The start of each group's last rebalance."""
        self._released_s: OrderedDict[tuple[str, Draining], float] = OrderedDict()
        """Time at which the coordinator first saw that the source had released the partition, for each partition to be
        drained.
        """
        self._looking: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = asyncio.Semaphore(MAX_LOOKS)
        self._loop = asyncio.get_running_loop()
        groups.readers.append(self.told)

    def told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        """Receive the facts of a group's step. Without facts the group was read from Postgres."""
        if facts and self._marks.wanted:
            self._note(group_id, facts)
        news = self._looking.get(group_id)
        if news is not None and (not facts or any(isinstance(fact, (*_NEWS, *_COMMITTED)) for fact in facts)):
            news.set()
        if not facts or any(isinstance(fact, _NEWS) for fact in facts):
            # The facts arrive before the group has its new value.
            self._loop.call_soon(self._begin, group_id, context=NO_REQUEST.copy())

    def _note(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        for fact in facts:
            if isinstance(fact, OffsetsCommitted):
                self._note_commit(group_id, fact)
            elif isinstance(fact, RebalanceBegun):
                self._rebalanced_s[group_id] = self._loop.time()
                self._rebalanced_s.move_to_end(group_id)
                if len(self._rebalanced_s) > MAX_REBALANCING:
                    self._rebalanced_s.popitem(last=False)

    def _note_commit(self, group_id: str, fact: OffsetsCommitted) -> None:
        group = self._groups.settled(group_id)
        member = group.members.get(fact.member_id) if isinstance(group, Group | ConsumerGroup) else None
        if member is None:
            return
        now_s = self._loop.time()
        for topic_id, index, offset in fact.offsets:
            partition = topic_id, index
            mark = self._marks.of(member.connection_id, member.client_id, member.client_host, partition)
            served_s = None if mark is None else mark.served_s(offset - 1)
            self._paces.committed(group_id, partition, fact.member_id, offset, served_s, now_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, group_id: str) -> None:
        awaited = draining(self._groups.settled(group_id))
        for each in awaited:
            self._release_of(group_id, each)
        if group_id in self._looking or not awaited:
            return
        self._looking[group_id] = asyncio.Event()
        task = self._loop.create_task(self._look_while_waiting(group_id), name=f"drains of {group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_while_waiting(self, group_id: str) -> None:
        news = self._looking[group_id]
        try:
            while awaited := draining(self._groups.settled(group_id)):
                news.clear()
                look_again_s = self._loop.time() + POLL_S
                try:
                    async with self._looks:
                        found, stops_s = await self._found(group_id, awaited)
                    look_again_s = min(look_again_s, stops_s)
                    self._groups.tell_group(group_id, HandoffProgress(found))
                except StorageError as error:
                    logger.warning(
                        "committed offsets cannot be read: the drain looks again", group_id=group_id, error=str(error)
                    )
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), max(look_again_s - self._loop.time(), SHORTEST_POLL_S))
        finally:
            del self._looking[group_id]

    async def _found(self, group_id: str, awaited: Sequence[Draining]) -> tuple[tuple[Drained, ...], float]:
        """Return the present findings, and the time at which they will change without any further event."""
        await self._look_up(each for each in awaited if self._named(each) is None)
        named = [(each, self._named(each)) for each in awaited]
        wanted = [partition for _, partition in named if partition is not None]
        committed = {
            (one.topic_id, one.partition_index): one.committed_offset
            for one in (await self._offsets.fetch(group_id, wanted) if wanted else ())
        }
        found: list[Drained] = []
        next_s = float("inf")
        for each, partition in named:
            if partition is None:
                gone = HandoffEnd.PARTITION_DELETED
                found.append(Drained(each.topic, each.partition, each.source, None, -1, gone))
                continue
            reached = committed.get(partition, -1)
            mark = each.mark if each.mark is not None else await self._mark(each, partition, reached)
            stops_s = self._stops_s(group_id, each, partition, reached)
            stopped = stops_s is not None and stops_s <= self._loop.time()
            if stops_s is not None and not stopped:
                next_s = min(next_s, stops_s)
            found.append(
                Drained(each.topic, each.partition, each.source, mark, reached, stopped=stopped, topic_id=partition[0])
            )
        return tuple(found), next_s

    def _stops_s(self, group_id: str, each: Draining, partition: tuple[UUID, int], committed: int) -> float | None:
        """Return the time from which the source counts as done with the partition, unless it commits again before; None
        if that is unknown."""
        pace = self._paces.of(group_id, partition, each.source)
        released_s = self._release_of(group_id, each)
        if pace is None or pace.offset != committed:
            # The commit was stored by another component, or it has not been reported yet.
            return None
        mark = self._whole_mark(each, partition)
        next_served_s = None if mark is None else mark.served_s(committed)
        if next_served_s is None:
            return None
        asked_s = None if each.asked_ms is None else each.asked_ms / 1000
        if asked_s is not None and each.asked_by_rebalance:
            asked_s = min(asked_s, self._rebalanced_s.get(group_id, asked_s))
        return pace.overdue_s(next_served_s, asked_s, released_s)

    def _release_of(self, group_id: str, each: Draining) -> float:
        key = group_id, replace(each, mark=None, connection_id=None)
        released_s = self._released_s.setdefault(key, self._loop.time())
        if len(self._released_s) > MAX_RELEASED:
            self._released_s.popitem(last=False)
        return released_s

    async def _look_up(self, unknown: Iterable[Draining]) -> None:
        """Read these partitions from Postgres. The group's last coordinator may have known topics or partitions that
        this node has not read yet, and they count as deleted only if Postgres does not have them."""
        for each in unknown:
            named = each.topic
            topic = await (self._catalog.resolve_id(named) if isinstance(named, UUID) else self._catalog.resolve(named))
            if topic is not None and each.partition >= len(topic.partitions):
                await self._catalog.catch_up()
                return

    def _named(self, each: Draining) -> tuple[UUID, int] | None:
        """Return topic id and index of the partition; None if it does not exist."""
        named = each.topic
        topic = self._catalog.get_by_id(named) if isinstance(named, UUID) else self._catalog.get(named)
        if topic is None or not 0 <= each.partition < len(topic.partitions):
            return None
        return topic.topic_id, each.partition

    async def _mark(self, each: Draining, partition: tuple[UUID, int], committed: int) -> int | None:
        """Return the offset up to which the source was served records; None if it was served none. If the offset is
        unknown, return the end of the log. A source was served none if it began at the start of a partition without
        commits and got no further."""
        topic = self._catalog.get_by_id(partition[0])
        if topic is None or partition[1] >= len(topic.partitions):
            return None
        if self._marks.of(each.connection_id, each.client_id, each.client_host, partition) is None:
            if self._marks.are_complete:
                return None
        elif (mark := self._whole_mark(each, partition)) is not None:
            nothing = mark.offset == mark.start and mark.began_here and committed < 0
            return None if nothing else mark.offset
        key = topic.partitions[partition[1]].partition_key
        state = (await self._states((key,))).get(key)
        return None if state is None or not state.high_watermark else state.high_watermark

    def _whole_mark(self, each: Draining, partition: tuple[UUID, int]) -> Mark | None:
        """Return the source's mark. Return None if another node may have served records beyond it."""
        topic = self._catalog.get_by_id(partition[0])
        mark = self._marks.of(each.connection_id, each.client_id, each.client_host, partition)
        if mark is None or topic is None or partition[1] >= len(topic.partitions):
            return None
        return mark if self._marks.is_whole(mark, leads=self._leads(topic.partitions[partition[1]])) else None
