"""A replay's plan, fixed when it begins: source and target of each offset, and the end of each target.

The one idea: the plan and the number of a batch determine the exact sequence of records that each target partition
gets. So after a crash the end of a target partition shows how much of its sequence was written, and the replay writes
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pipeline.archive.plan import Progress, Range, share
from pipeline.errors import PipelineError
from pipeline.kafka import Partition

MARK = "sluice-source"


@dataclass(frozen=True, slots=True)
class Plan:
    """Sources and targets of a replay.

    `partitions` maps source partitions to target partitions; a partition that it lacks keeps its number. If `by_key`
    is set, a record goes where Java's default partitioner puts its key: murmur2 over the partitions that the target has
    (0) or must have (any other number). A record without a key goes to the partition of its source's number.
    """

    name: str
    archive: str
    topics: Mapping[str, str]
    partitions: Mapping[int, int]
    condition: str | None
    from_ms: int | None
    until_ms: int | None
    timestamps: str
    ranges: tuple[Range, ...]
    batch_records: int
    target_ids: Mapping[str, str]
    bases: Mapping[Partition, int]
    """The end of each target partition before the first record."""
    by_key: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """With `by_key`, the partition count of each target topic. Partitions that are added later receive no records."""
    span: str | None = None
    """The offsets in --from and --until, as JSON. None in plans of earlier releases."""

    def target(self, topic: str, partition: int) -> Partition:
        return self.topics[topic], self.partitions.get(partition, partition)

    def batch(self, following: Mapping[Partition, int]) -> list[Range]:
        """Return the ranges of the batch that begins at `following`, which has an offset per source partition. The list
        is empty after the last batch.
        """
        backlog = [
            Range(each.topic, each.partition, following[each.topic, each.partition], each.end)
            for each in self.ranges
            if following[each.topic, each.partition] < each.end
        ]
        return share(backlog, self.batch_records)

    def asked(self) -> dict[str, object]:
        """Return the user's options. They must be the same when a replay is continued."""
        told = asdict(self)
        # JSON has only texts as names, so both sides of the comparison use texts.
        told["partitions"] = {str(source): target for source, target in self.partitions.items()}
        for found in ("ranges", "batch_records", "target_ids", "bases", "counts"):
            del told[found]
        return told


@dataclass(frozen=True, slots=True)
class Done:
    """Progress of a replay: the number of committed batches, and the next offset per source partition."""

    plan: Plan
    batch: int
    following: Mapping[Partition, int]

    def to_json(self) -> str:
        told = asdict(self.plan)
        told["ranges"] = [[each.topic, each.partition, each.start, each.end] for each in self.plan.ranges]
        told["bases"] = _pairs(self.plan.bases)
        told["partitions"] = list(self.plan.partitions.items())
        return json.dumps(
            {"sluice_replay": {"plan": told, "batch": self.batch, "following": _pairs(self.following)}},
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Done | None:
        """Return the progress in a commit's metadata, None if another job wrote the metadata."""
        try:
            told = json.loads(text)["sluice_replay"]
        except (ValueError, KeyError, TypeError):
            return None
        plan = told["plan"]
        plan["ranges"] = tuple(Range(*each) for each in plan["ranges"])
        plan["bases"] = {(topic, partition): offset for topic, partition, offset in plan["bases"]}
        plan["partitions"] = dict(plan["partitions"])
        following = {(topic, partition): offset for topic, partition, offset in told["following"]}
        return Done(Plan(**plan), told["batch"], following)


def source_ranges(
    progress: Progress, topics: Collection[str], first: Mapping[Partition, int], until: Mapping[Partition, int]
) -> list[Range]:
    """Return the archived offsets of `topics` from `first` up to and without `until`.

    Raise PipelineError if `first` or `until` names a partition that the archive lacks.
    """
    for option, offsets in (("--from", first), ("--until", until)):
        unknown = sorted(offsets.keys() - progress.next.keys())
        if unknown:
            topic, partition = unknown[0]
            raise PipelineError(
                f"{option} names {topic}-{partition}, which the archive does not hold.",
                "Check its topics and partitions.",
            )
    found: list[Range] = []
    for (topic, partition), end in sorted(progress.next.items()):
        key = (topic, partition)
        start, stop = max(progress.first[key], first.get(key, 0)), min(end, until.get(key, end))
        if topic in topics and start < stop:
            found.append(Range(topic, partition, start, stop))
    return found


def topic_map(text: str, topics: Sequence[str]) -> dict[str, str]:
    """Return source and target topics of `a=b,c=d`. Raise PipelineError if a source is unknown, or if two sources have
    the same target.
    """
    found: dict[str, str] = {}
    for pair in text.split(","):
        source, separator, target = pair.strip().partition("=")
        if not separator or not source or not target:
            raise PipelineError(f"--topic-map {text} is not SOURCE=TARGET,….", "Write it like orders=orders-again.")
        if source not in topics:
            raise PipelineError(
                f"The archive does not hold the topic {source}.", f"It holds {', '.join(sorted(topics)) or 'none'}."
            )
        found[source] = target
    if len(set(found.values())) < len(found):
        raise PipelineError(
            "Two archived topics have the same target.", "Give each its own target, or replay one at a time."
        )
    return found


def partition_map(text: str) -> dict[int, int]:
    """Return the map of `0:1,1:1`. It is empty for `same` and for `key`."""
    if text == "same" or by_key(text) is not None:
        return {}
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return {int(source): int(target) for source, target in pairs}
    except ValueError as error:
        raise PipelineError(
            f"--partition-map {text} is neither `same` nor `key` nor SOURCE:TARGET,….", "Write it like 0:0,1:0,2:1."
        ) from error


def by_key(text: str) -> int | None:
    """Return 12 for `key:12`, 0 for `key` (the target's own partition count), and None for a map by number."""
    word, separator, count = text.partition(":")
    if word != "key":
        return None
    if separator and not (count.isdecimal() and int(count)):
        raise PipelineError(f"--partition-map {text} names no number of partitions.", "Write it like key or key:12.")
    return int(count) if separator else 0


def _pairs(offsets: Mapping[Partition, int]) -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for (topic, partition), offset in offsets.items()]
