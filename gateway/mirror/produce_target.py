"""A broker as the target: append by Produce.

The one idea: the position lies in the target as the commit of a group. Its offset is the target's end, and its metadata
says where the source continues and which offsets belong together. A mirror that is killed between an append and the
commit finds more records than that. It compares these with the source, and goes on behind them.

A broker chooses offsets itself and leaves none out. So offsets stay the same only as long as the source has a record at
each of them; behind a gap or a marker they are smaller in the target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from gateway.commands import log
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError, PassingError
from gateway.commands.groups import Commit, commit_offsets, committed
from gateway.commands.log import Bounds, TopicPartition
from gateway.commands.produce import append
from gateway.commands.topic_changes import settings
from gateway.mirror.groups import GROUP_PREFIX
from gateway.mirror.offsets import OffsetRuns
from gateway.mirror.source import SourceTopic
from gateway.mirror.verify import compare, records_between
from protocol.records import TimestampType, build_batch, iter_records, read_head
from storage.chunks import write_head
from storage.mirror import MirroredBatch

COMPARED_OFFSETS = 1_000
"""Number of offsets at the end of both logs that must agree before the mirror continues behind them."""

_ALL_REPLICAS = -1


class ProduceTarget:
    """Appends to the topics of a cluster. `source_cluster_id` identifies the source in later runs."""

    def __init__(self, source: Cluster, target: Cluster, source_cluster_id: str) -> None:
        self._source = source
        self._target = target
        self._group_id = f"{GROUP_PREFIX}{source_cluster_id}"
        self._commits: dict[TopicPartition, Commit] | None = None
        self._topic_ids: dict[str, UUID] = {}
        self._runs: dict[TopicPartition, OffsetRuns] = {}

    async def begin(self, key: TopicPartition, topic: SourceTopic, log_start_offset: int) -> int:
        self._topic_ids[topic.name] = topic.topic_id
        runs = await asyncio.to_thread(self._begin, key, topic, log_start_offset)
        self._runs[key] = runs
        return runs.next_source

    def _begin(self, key: TopicPartition, topic: SourceTopic, log_start_offset: int) -> OffsetRuns:
        if self._commits is None:
            self._commits = committed(self._target, self._group_id)
        bounds = self._target.until_shown(
            lambda: log.bounds(self._target, [key]).get(key), lambda found: found is not None
        )
        if bounds is None:
            raise PassingError(f"{_shown(key)} of the target does not answer now: run this again")
        commit = self._commits.get(key)
        topic_id, _, text = ("", "", "") if commit is None else commit.metadata.partition(" ")
        try:
            runs = None if commit is None else OffsetRuns.parse(text, commit.offset)
        except ValueError as error:
            raise CommandError(f"group {self._group_id} has a commit that no mirror made for {_shown(key)}") from error
        if runs is None or topic_id != str(topic.topic_id):
            # The source's topic may be a copy of the target's that was made anew. Then both logs agree.
            runs = self._adopt(key, bounds, log_start_offset)
            self._commit(key, runs)
            return runs
        if bounds.end < runs.next_target:
            raise CommandError(
                f"{_shown(key)} of the target ends at {bounds.end} and was mirrored to {runs.next_target}: the target "
                "has lost records. Delete the topic there and mirror it anew"
            )
        self._find_again(key, runs, bounds.end)
        return runs

    def _adopt(self, key: TopicPartition, bounds: Bounds, log_start_offset: int) -> OffsetRuns:
        """Return the runs of a partition that has no commit for this topic of the source. The partition is empty, or it
        agrees with the source."""
        if bounds.start == bounds.end:
            return OffsetRuns.begin(log_start_offset, bounds.end)
        source = log.bounds(self._source, [key]).get(key)
        if source is not None and source.end >= bounds.end:
            start = max(bounds.end - COMPARED_OFFSETS, 0)
            found = compare(self._source, self._target, key, bounds.end, compacted=False, start=start)
            if found.records and found.first_difference is None:
                runs = OffsetRuns.begin(bounds.start, bounds.start)
                runs.copied(bounds.start, bounds.end - bounds.start, bounds.end)
                return runs
        raise CommandError(
            f"{_shown(key)} has records in the target that are not those of the source: delete the topic there, or "
            "mirror to a topic that is new"
        )

    def _find_again(self, key: TopicPartition, runs: OffsetRuns, end: int) -> None:
        """Continue behind records that were appended without a commit."""
        if runs.next_target == end:
            return
        bounds = log.bounds(self._source, [key])
        log.demand_answers([key], bounds)
        originals = records_between(self._source, key, runs.next_source, bounds[key].end)
        stamps = any(each.value == "LogAppendTime" for each in settings(self._target, key[0]))
        for found in records_between(self._target, key, runs.next_target, end):
            original = next(originals, None)
            if original is None:
                raise _written(key)
            timestamp = found.timestamp if stamps else original.timestamp
            if found != replace(original, offset=runs.next_target, timestamp=timestamp):
                raise _written(key)
            runs.copied(original.offset, 1, original.offset + 1)

    async def append(self, key: TopicPartition, batches: Sequence[MirroredBatch]) -> None:
        await asyncio.to_thread(self._append, key, batches)

    def _append(self, key: TopicPartition, batches: Sequence[MirroredBatch]) -> None:
        topic, partition = key
        runs = self._runs[key]
        for batch in batches:
            head = read_head(batch.records)
            if head.is_control or not head.records_count:
                runs.copied(batch.base_offset, 0, batch.last_offset + 1)
                continue
            without_gap = head.records_count == head.last_offset_delta + 1
            offsets = None if without_gap else [record.offset for record in iter_records(batch.records)]
            if without_gap and head.timestamp_type is TimestampType.CREATE_TIME:
                write_head(batch.records, 0, -1)  # brokers refuse a produced batch whose base offset is not 0
                data = bytes(batch.records)
            else:
                data = _closed(batch)
            # Not repeated here: the next run compares the target's end with the source (`_find_again`).
            first = append(self._target, topic, partition, data, acks=_ALL_REPLICAS, repeats=False)
            if first != runs.next_target:
                raise _written(key)
            if offsets is None:
                runs.copied(batch.base_offset, head.records_count, batch.last_offset + 1)
            for offset in offsets or ():
                runs.copied(offset, 1, batch.last_offset + 1)
        self._commit(key, runs)

    def _commit(self, key: TopicPartition, runs: OffsetRuns) -> None:
        text = f"{self._topic_ids[key[0]]} {runs.text()}"
        commit_offsets(self._target, self._group_id, {key: Commit(runs.next_target, text)})

    def keeps_offsets(self, key: TopicPartition) -> bool:
        return self._runs[key].are_equal

    def translate(self, key: TopicPartition, offset: int) -> int | None:
        runs = self._runs.get(key)
        return None if runs is None else runs.translate(offset)


def _closed(batch: MirroredBatch) -> bytes:
    """Return the records of a batch as a broker demands: at offsets that follow each other, with the timestamp type
    CreateTime."""
    return build_batch(
        [replace(record, offset=number) for number, record in enumerate(iter_records(batch.records))],
        compression=read_head(batch.records).compression,
    )


def _shown(key: TopicPartition) -> str:
    return f"{key[0]}[{key[1]}]"


def _written(key: TopicPartition) -> CommandError:
    return CommandError(
        f"{_shown(key)} was written to in the target while it is mirrored, by a client or by another mirror. Stop the "
        "producers, delete the topic in the target and mirror it anew"
    )
