"""Copy partitions, round by round, from a source into a target.

The one idea: the target knows its position and moves it together with the records. The copier reads ahead by one
answer while the target writes, and holds nothing that a restart would miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from uuid import UUID

from gateway.commands import log
from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.mirror.batches import mirrored_batches
from gateway.mirror.source import Source, SourceTopic
from gateway.mirror.topics import Warn
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages.fetch import PartitionData
from storage.mirror import MirroredBatch

WAIT_MS = 500
"""How long a broker waits for new records if the last round found none."""

MAX_EMPTY_ROUNDS = 60
"""Number of consecutive rounds without records after which a copy with a known end gives up."""


class Target(Protocol):
    """The log that receives the copied records."""

    async def begin(self, key: TopicPartition, topic: SourceTopic, log_start_offset: int) -> int:
        """Return the source's offset at which the copy continues. Raise CommandError if the partition cannot be a
        target.
        """
        ...

    async def append(self, key: TopicPartition, batches: Sequence[MirroredBatch]) -> None:
        """Append one or more batches together with the new position, durably."""
        ...

    def keeps_offsets(self, key: TopicPartition) -> bool:
        """Return whether each record of a partition has the offset that it has in the source."""
        ...

    def translate(self, key: TopicPartition, offset: int) -> int | None:
        """Return the target's offset for a source's offset; None if the partition is not copied."""
        ...


@dataclass(slots=True)
class Progress:
    """Progress of one partition in this run."""

    begun_at: int
    """Offset of the source at which this run began."""
    next_offset: int
    """Offset of the source that is read next."""
    size_bytes: int = 0
    """Bytes of the batches appended in this run."""


class Copier:
    """Copies the partitions for which `begin` has been called."""

    def __init__(self, source: Source, target: Target, warn: Warn) -> None:
        self._source = source
        self._target = target
        self._warn = warn
        self.progress: dict[TopicPartition, Progress] = {}
        self.is_held_back = False
        """True if `ends` found records that cannot be copied yet."""
        self._topic_ids: dict[str, UUID] = {}

    async def begin(self, topics: Sequence[SourceTopic], *, demands_all: bool) -> None:
        """Take up the partitions of these topics that are not copied yet. Raise CommandError if a topic was replaced by
        another topic of the same name. If a partition does not answer, raise PassingError if `demands_all` is true.
        Otherwise warn, and let the next call take it up."""
        for topic in topics:
            if self._topic_ids.setdefault(topic.name, topic.topic_id) != topic.topic_id:
                raise CommandError(
                    f"{topic.name} is another topic than the one that was copied: the source's topic was made anew. "
                    "Delete the topic in the target and mirror it anew"
                )
        new = {
            (topic.name, partition): topic
            for topic in topics
            for partition in topic.partitions
            if (topic.name, partition) not in self.progress
        }
        if not new:
            return
        bounds = await asyncio.to_thread(log.bounds, self._source.cluster, sorted(new))
        if demands_all:
            log.demand_answers(sorted(new), bounds)
        for key, topic in new.items():
            if key not in bounds:
                self._warn(f"{key[0]}[{key[1]}] of the source does not answer now and is not copied yet")
                continue
            position = await self._target.begin(key, topic, bounds[key].start)
            self.progress[key] = Progress(position, position)

    async def ends(self) -> dict[TopicPartition, int]:
        """Return the present end of each partition. Warn of records behind it that wait for an open transaction. Raise
        PassingError if a partition does not answer, because a copy without it would look complete."""
        keys = sorted(self.progress)
        # Asked for first: what arrives after this answer must not look like a record behind a transaction.
        newest = await asyncio.to_thread(log.high_watermarks, self._source.cluster, keys)
        ends = {key: found.end for key, found in (await self._bounds(keys)).items()}
        for (topic, partition), end in ends.items():
            if end < (position := self.progress[topic, partition].next_offset):
                raise _lost_records((topic, partition), end, position)
            if newest.get((topic, partition), end) > end:
                self.is_held_back = True
                self._warn(
                    f"{topic}[{partition}]: records from offset {end} on wait for an open transaction and are not "
                    "copied: run this again when the transaction has ended"
                )
        return ends

    async def _bounds(self, keys: Sequence[TopicPartition]) -> dict[TopicPartition, log.Bounds]:
        found = await asyncio.to_thread(log.bounds, self._source.cluster, keys)
        log.demand_answers(keys, found)
        return found

    async def copy_to(self, ends: Mapping[TopicPartition, int]) -> None:
        """Copy until each partition has reached its end. Raise CommandError if a partition makes no progress."""
        empty_rounds = 0
        while left := [key for key, end in ends.items() if self.progress[key].next_offset < end]:
            if await self._round(left, wait=empty_rounds > 0):
                empty_rounds = 0
                continue
            empty_rounds += 1
            if empty_rounds >= MAX_EMPTY_ROUNDS:
                topic, partition = left[0]
                raise CommandError(
                    f"{topic}[{partition}] of the source gives no records from offset "
                    f"{self.progress[left[0]].next_offset} on, though it ends at {ends[left[0]]}"
                )

    async def follow(self, seconds: float) -> None:
        """Copy the records that arrive in about `seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        found = True
        while loop.time() < until:
            found = await self._round(list(self.progress), wait=not found)

    async def _round(self, keys: Sequence[TopicPartition], *, wait: bool) -> bool:
        """Read once and append the records. Return whether a position moved."""
        positions = {key: self.progress[key].next_offset for key in keys}
        answers = await asyncio.to_thread(self._source.read, positions, max_wait_ms=WAIT_MS if wait else 0)
        if wait and not answers:
            await asyncio.sleep(WAIT_MS / 1000)  # partitions are moving to other leaders now
        moved = False
        for key, answer in answers:
            progress = self.progress[key]
            if answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                await self._jump(key, progress)
                moved = True
                continue
            batches, next_offset = self._batches(key, answer, progress.next_offset)
            if batches:
                await self._target.append(key, batches)
                progress.size_bytes += sum(len(batch.records) for batch in batches)
            moved = moved or next_offset > progress.next_offset
            progress.next_offset = next_offset
        return moved

    def _batches(self, key: TopicPartition, answer: PartitionData, from_offset: int) -> tuple[list[MirroredBatch], int]:
        try:
            return mirrored_batches(
                cast("Buffer", answer.records or b""), answer.aborted_transactions or (), from_offset
            )
        except ProtocolError as error:
            raise CommandError(f"{key[0]}[{key[1]}] of the source: {error}") from error

    async def _jump(self, key: TopicPartition, progress: Progress) -> None:
        """Continue at the start of a source log that no longer has the records at the position, because retention
        removed them.
        """
        topic, partition = key
        found = (await self._bounds([key]))[key]
        if found.start <= progress.next_offset:
            raise _lost_records(key, found.end, progress.next_offset)
        lost = f"offsets {progress.next_offset} to {found.start - 1}"
        self._warn(f"{topic}[{partition}]: {lost} were removed from the source before they were copied")
        progress.next_offset = found.start


def _lost_records(key: TopicPartition, end: int, position: int) -> CommandError:
    return CommandError(
        f"{key[0]}[{key[1]}] of the source ends at {end}, before offset {position} that was copied: the source has "
        "lost records. Delete the topic in the target and mirror it anew"
    )
