"""Plan an archive's next batch: compute ranges from positions and logs, or the reason why the archive must not
continue.

The one idea: the plan is a pure function. The table's last commit holds a `Progress`, which is committed together with
its batch. So the table itself records how far it is, and a batch that was not committed is planned again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import PipelineError
from pipeline.kafka import Log, Partition

MAX_LOST_TOLD = 1000


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The offsets of a partition from `start` up to and without `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def records(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offsets {self.start:,} to {self.end - 1:,}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an archive is.

    `first` and `next` are the first archived offset and the next one to archive, by partition. `lost` are ranges that
    the topic had removed before the job read them.
    """

    batch: int = 0
    run: str = ""
    topic_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    first: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    next: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    lost: tuple[Range, ...] = ()
    skipped: tuple[Range, ...] = ()
    """Records that the table cannot hold. The table of dead letters holds them."""
    erased: tuple[Range, ...] = ()
    """Tombstones of erased keys. The topic may still have them, but the archive leaves them out."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Each topic's own settings, so that a restore can create the topic as it was."""

    @property
    def left_out(self) -> tuple[Range, ...]:
        """Offsets that the topic may have and the archive does not."""
        return (*self.skipped, *self.erased)

    def to_json(self) -> str:
        topics: dict[str, Any] = {
            topic: {"id": topic_id, "first": {}, "next": {}} for topic, topic_id in self.topic_ids.items()
        }
        for name, offsets in (("first", self.first), ("next", self.next)):
            for (topic, partition), offset in offsets.items():
                topics[topic][name][str(partition)] = offset
        for topic, settings in self.settings.items():
            topics[topic]["settings"] = dict(settings)
        told = {"batch": self.batch, "run": self.run, "topics": topics, "lost": _lists(self.lost)}
        if self.skipped:
            told["skipped"] = _lists(self.skipped)
        if self.erased:
            told["erased"] = _lists(self.erased)
        return json.dumps({"sluice_archive": told}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Progress | None:
        """Return the progress in a commit's metadata, None if another job wrote the metadata."""
        try:
            told = json.loads(text)["sluice_archive"]
        except (ValueError, KeyError, TypeError):
            return None
        offsets: dict[str, dict[Partition, int]] = {"first": {}, "next": {}}
        for topic, of_topic in told["topics"].items():
            for name, found in offsets.items():
                found |= {(topic, int(partition)): offset for partition, offset in of_topic[name].items()}
        return Progress(
            batch=told["batch"],
            run=told["run"],
            topic_ids={topic: of_topic["id"] for topic, of_topic in told["topics"].items()},
            first=offsets["first"],
            next=offsets["next"],
            lost=tuple(Range(*each) for each in told["lost"]),
            skipped=tuple(Range(*each) for each in told.get("skipped", ())),
            erased=tuple(Range(*each) for each in told.get("erased", ())),
            # Archives of earlier releases do not have these fields.
            settings={topic: of["settings"] for topic, of in told["topics"].items() if "settings" in of},
        )


def _lists(ranges: Iterable[Range]) -> list[list[Any]]:
    return [[each.topic, each.partition, each.start, each.end] for each in ranges]


@dataclass(frozen=True, slots=True)
class Batch:
    """The ranges to read, the ranges lost before them, and the progress once the batch is committed."""

    ranges: tuple[Range, ...]
    lost: tuple[Range, ...]
    after: Progress
    left: int
    """Number of records that the logs still have after this batch."""

    @property
    def records(self) -> int:
        return sum(each.records for each in self.ranges)


def plan(
    progress: Progress,
    logs: Sequence[Log],
    starting: Mapping[Partition, int],
    run: str,
    max_records: int,
    until: Mapping[Partition, int] | None = None,
) -> Batch:
    """Return the next batch, of about `max_records` at most.

    `starting` has the first offset of each new partition. A partition that was added to an archived topic starts at its
    first record. `until` ends each partition early. Raise PipelineError if a topic was truncated, or created again.
    """
    _check_identity(progress, logs)
    backlog: list[Range] = []
    lost: list[Range] = []
    first, following = dict(progress.first), dict(progress.next)
    for log in logs:
        key = (log.topic, log.partition)
        if key in following:
            position = following[key]
        else:
            position = log.start if log.topic in progress.topic_ids else starting.get(key, log.start)
            first[key] = position
            following[key] = position
        if position > log.end and key in progress.next:
            raise PipelineError(
                f"{log.topic}-{log.partition} ends at offset {log.end:,}, but the archive already holds it up to "
                f"{position:,}: the topic was truncated, or deleted and created again.",
                "Archive the topic into another table; this table keeps its records.",
            )
        end = log.end if until is None else min(log.end, until.get(key, log.end))
        if position < log.start:
            lost.append(Range(log.topic, log.partition, position, log.start))
            position = following[key] = log.start
        if position < end:
            backlog.append(Range(log.topic, log.partition, position, end))
    ranges = share(backlog, max_records)
    following |= {(each.topic, each.partition): each.end for each in ranges}
    after = replace(
        progress,
        batch=progress.batch + 1,
        run=run,
        topic_ids={**progress.topic_ids, **{log.topic: log.topic_id for log in logs}},
        first=first,
        next=following,
        lost=(*progress.lost, *lost)[-MAX_LOST_TOLD:],
    )
    left = sum(each.records for each in backlog) - sum(each.records for each in ranges)
    return Batch(tuple(ranges), tuple(lost), after, left)


def plan_again(progress: Progress, planned: Progress, logs: Sequence[Log], left: int) -> Batch:
    """Return the batch that leads from `progress` to `planned`, without the records that the logs no longer have.

    Raise PipelineError if a topic was created again.
    """
    _check_identity(planned, logs)
    starts = {(log.topic, log.partition): log.start for log in logs}
    ranges: list[Range] = []
    lost = [each for each in planned.lost if each not in progress.lost]
    for key, end in sorted(planned.next.items()):
        behind = [each.end for each in planned.lost if (each.topic, each.partition) == key]
        position = max([progress.next.get(key, planned.first[key]), *behind])
        # A deleted topic has no log.
        start = min(max(position, starts.get(key, end)), end)
        if position < start:
            lost.append(Range(*key, position, start))
        if start < end:
            ranges.append(Range(*key, start, end))
    kept = (*planned.lost, *(each for each in lost if each not in planned.lost))
    return Batch(tuple(ranges), tuple(lost), replace(planned, lost=kept[-MAX_LOST_TOLD:]), left)


def share(backlog: Sequence[Range], max_records: int) -> list[Range]:
    """Cut ranges to about `max_records` records in total. Each partition gets its share, and at least one record."""
    total = sum(each.records for each in backlog)
    if total <= max_records:
        return list(backlog)
    return [
        replace(each, end=each.start + max(1, min(each.records, each.records * max_records // total)))
        for each in backlog
    ]


def without(whole: Range, holes: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of `whole` that are outside the `holes`. Holes of other partitions are ignored."""
    position = whole.start
    for hole in sorted(each for each in holes if (each.topic, each.partition) == (whole.topic, whole.partition)):
        if hole.start > position:
            yield Range(whole.topic, whole.partition, position, min(hole.start, whole.end))
        position = max(position, hole.end)
        if position >= whole.end:
            return
    if position < whole.end:
        yield Range(whole.topic, whole.partition, position, whole.end)


def _check_identity(progress: Progress, logs: Sequence[Log]) -> None:
    for topic, topic_id in {log.topic: log.topic_id for log in logs}.items():
        before = progress.topic_ids.get(topic)
        if before is not None and before != topic_id:
            raise PipelineError(
                f"The topic {topic} was deleted and created again: its id is {topic_id}, the archive holds {before}.",
                "Archive the new topic into another table, because offsets of both would be mixed up in this one.",
            )
