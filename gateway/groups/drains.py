"""Looks how far old owners have committed, for groups in which new owners wait for that.

The one idea: nothing here decides. A group that waits says what for (`Draining`); this looks up the mark of each and
what is committed in Postgres, and tells the group, which compares it with what it awaits by then. One look at a time
per group, begun by what happens to the group, by its commits, and by the clock while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from uuid import UUID

import structlog

from gateway.coordinator import classic_handoff
from gateway.coordinator.consumer import handoff as consumer_handoff
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import Fact, OffsetsCommitted, TransactionCommitted
from gateway.coordinator.handoff import (
    Drained,
    Draining,
    HandoffAcknowledged,
    HandoffBegun,
    HandoffEnd,
    HandoffsChanged,
)
from gateway.coordinator.machine import Value
from gateway.coordinator.model import Group, HandoffProgress
from gateway.groups.groups import Groups
from gateway.groups.marks import Marks
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST
from storage.errors import StorageError
from storage.offsets import OffsetStore
from storage.types import Partition, PartitionKey, PartitionState

logger = structlog.stdlib.get_logger(__name__)

POLL_S = 1.0
"""What a commit that came by another way, a transaction that another node has ended, or a topic that is gone, waits
for at most."""
MAX_LOOKS = 4
"""At a time; they must not take all connections."""
_NEWS = (HandoffBegun, HandoffAcknowledged, HandoffsChanged)
_COMMITTED = (OffsetsCommitted, TransactionCommitted)

States = Callable[[Iterable[PartitionKey]], Awaitable[Mapping[PartitionKey, PartitionState]]]


def draining(group: Value) -> tuple[Draining, ...]:
    if isinstance(group, Group):
        return classic_handoff.draining(group)
    return consumer_handoff.draining(group) if isinstance(group, ConsumerGroup) else ()


class Drains:
    """Of one node's groups. Reads what is told of them from its making on."""

    def __init__(
        self,
        groups: Groups,
        offsets: OffsetStore,
        catalog: Catalog,
        states: States,
        marks: Marks,
        leads: Callable[[Partition], bool],
    ) -> None:
        """`leads`: whether clients of a partition are pointed to this node."""
        self._groups = groups
        self._offsets = offsets
        self._catalog = catalog
        self._states = states
        self._marks = marks
        self._leads = leads
        self._looking: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = asyncio.Semaphore(MAX_LOOKS)
        self._loop = asyncio.get_running_loop()
        groups.readers.append(self.told)

    def told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        """Without facts: the group was read."""
        news = self._looking.get(group_id)
        if news is not None:
            if not facts or any(isinstance(fact, (*_NEWS, *_COMMITTED)) for fact in facts):
                news.set()
        elif not facts or any(isinstance(fact, _NEWS) for fact in facts):
            # The step is told of before its value is what the group shows.
            self._loop.call_soon(self._begin, group_id, context=NO_REQUEST.copy())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, group_id: str) -> None:
        if group_id in self._looking or not draining(self._groups.settled(group_id)):
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
                try:
                    async with self._looks:
                        found = await self._found(group_id, awaited)
                    self._groups.tell_group(group_id, HandoffProgress(found))
                except StorageError as error:
                    logger.warning("committed offsets cannot be looked up", group_id=group_id, error=str(error))
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), POLL_S)
        finally:
            del self._looking[group_id]

    async def _found(self, group_id: str, awaited: Sequence[Draining]) -> tuple[Drained, ...]:
        named = [(each, self._named(each)) for each in awaited]
        wanted = [partition for _, partition in named if partition is not None]
        committed = {
            (one.topic_id, one.partition_index): one.committed_offset
            for one in (await self._offsets.fetch(group_id, wanted) if wanted else ())
        }
        found: list[Drained] = []
        for each, partition in named:
            if partition is None:
                gone = HandoffEnd.PARTITION_DELETED
                found.append(Drained(each.topic, each.partition, each.source, None, -1, gone))
                continue
            reached = committed.get(partition, -1)
            mark = each.mark if each.mark is not None else await self._mark(each, partition, reached)
            found.append(Drained(each.topic, each.partition, each.source, mark, reached))
        return tuple(found)

    def _named(self, each: Draining) -> tuple[UUID, int] | None:
        """None: there is no such partition."""
        named = each.topic
        topic = self._catalog.get_by_id(named) if isinstance(named, UUID) else self._catalog.get(named)
        return None if topic is None or each.partition >= len(topic.partitions) else (topic.topic_id, each.partition)

    async def _mark(self, each: Draining, partition: tuple[UUID, int], committed: int) -> int | None:
        """What the source was served; where that cannot be known, all that it may have been; None: nothing. One that
        began where its group has never committed, and got no further, was served nothing."""
        topic = self._catalog.get_by_id(partition[0])
        if topic is None or partition[1] >= len(topic.partitions):
            return None
        key = topic.partitions[partition[1]].partition_key
        mark = self._marks.of(each.connection_id, each.client_id, each.client_host, partition)
        if mark is None and self._marks.are_complete:
            return None
        if mark is not None and self._marks.is_whole(mark, leads=self._leads(topic.partitions[partition[1]])):
            nothing = mark.offset == mark.start and mark.began_here and committed < 0
            return None if nothing else mark.offset
        state = (await self._states((key,))).get(key)
        return None if state is None or not state.high_watermark else state.high_watermark
