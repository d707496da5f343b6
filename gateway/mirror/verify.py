"""Compare the records of a copied partition with its source.

The one idea: both logs are read as consumers read them, and walked side by side by offset. So the comparison trusts
nothing that the copy used. Compaction runs in each cluster by itself, so in a compacted topic one log may lack a record
that the other still has. That is no difference if a later record has the same key. A missing tombstone is none either,
unless its log has an older record of the same key: compaction removes these first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.commands import log
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.commands.reader import Reader
from protocol.records import Record

WAIT_MS = 500
MAX_DIFFERENCES = 100_000
"""Number of offsets that are remembered until a later record explains them. With more, the comparison stops."""
MAX_EMPTY_READS = 60


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for one partition, from `start` to before `end`."""

    start: int
    end: int
    records: int
    """Records that are in both logs."""
    checksum: str
    """Hexadecimal digest of their offsets, timestamps, keys, values and headers."""
    first_difference: int | None
    """The smallest offset at which the logs differ."""


def compare(
    source: Cluster, target: Cluster, key: TopicPartition, end: int, *, compacted: bool, start: int = 0
) -> Comparison:
    """Compare a partition from `start`, or the later log start, to `end`. Raise CommandError if a log cannot be
    read."""
    start = max(_later_start(source, target, key), start)
    walk = _Walk(compacted)
    left, right = records_between(source, key, start, end), records_between(target, key, start, end)
    one, other = next(left, None), next(right, None)
    while (one is not None or other is not None) and len(walk.differences) < MAX_DIFFERENCES:
        if one is not None and other is not None and one.offset == other.offset:
            walk.both(one, other)
            one, other = next(left, None), next(right, None)
        elif other is None or (one is not None and one.offset < other.offset):
            assert one is not None
            walk.alone(one, target)
            one = next(left, None)
        else:
            walk.alone(other, source)
            other = next(right, None)
        if len(walk.tombstones) == MAX_DIFFERENCES:
            _look_for_deleted(walk, key, start)
    _look_for_deleted(walk, key, start)
    if walk.differences:
        # Retention may have removed the oldest records of one log in the meantime.
        removed_below = _later_start(source, target, key)
        walk.differences = {offset for offset in walk.differences if offset >= removed_below}
    return Comparison(start, end, walk.records, walk.digest.hexdigest(), min(walk.differences, default=None))


def _look_for_deleted(walk: _Walk, key: TopicPartition, start: int) -> None:
    """Read each log that lacks tombstones again, for the records that these delete."""
    tombstones, walk.tombstones = walk.tombstones, {}
    for cluster in {lacking for _, lacking in tombstones.values()}:
        offsets = {name: offset for name, (offset, lacking) in tombstones.items() if lacking is cluster}
        for record in records_between(cluster, key, start, max(offsets.values())):
            if record.key is not None and record.offset < offsets.get(record.key, -1):
                walk.differs(record.key, offsets[record.key])


class _Walk:
    """The state of a comparison between two records."""

    def __init__(self, compacted: bool) -> None:
        self._compacted = compacted
        self._unexplained: dict[bytes, int] = {}
        """Maps keys to offsets, for records of a compacted topic that only one of the two logs has."""
        self.tombstones: dict[bytes, tuple[int, Cluster]] = {}
        """Maps keys to the offsets of tombstones that one log lacks, and to that log, until they are looked at."""
        self.differences: set[int] = set()
        self.records = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def both(self, one: Record, other: Record) -> None:
        self._explain(one)
        if one != other:
            self.differences.add(one.offset)
            return
        self.records += 1
        self.digest.update(repr(one).encode())

    def alone(self, record: Record, lacking: Cluster) -> None:
        """Note a record that only one of the two logs has."""
        self._explain(record)
        if not self._compacted or record.key is None:
            self.differences.add(record.offset)
        elif record.value is None:
            self.tombstones[record.key] = record.offset, lacking
        else:
            self.differs(record.key, record.offset)

    def differs(self, key: bytes, offset: int) -> None:
        """Add a difference that a later record of the same key explains."""
        self._unexplained[key] = offset
        self.differences.add(offset)

    def _explain(self, later: Record) -> None:
        if later.key is not None:
            self.tombstones.pop(later.key, None)
            self.differences.discard(self._unexplained.pop(later.key, -1))


def _later_start(source: Cluster, target: Cluster, key: TopicPartition) -> int:
    starts: list[int] = []
    for name, cluster in (("source", source), ("target", target)):
        found = log.bounds(cluster, [key])
        if key not in found:
            raise CommandError(f"{key[0]}[{key[1]}] of the {name} does not answer now: run this again")
        starts.append(found[key].start)
    return max(starts)


def records_between(cluster: Cluster, key: TopicPartition, start: int, end: int) -> Iterator[Record]:
    """Yield the committed records from `start` to before `end`."""
    topic, partition = key
    reader = Reader(cluster, topic, {partition: start})
    empty_reads = 0
    while reader.positions[partition] < end:
        before = reader.positions[partition]
        for _, record in reader.read([partition], max_wait_ms=WAIT_MS):
            if record.offset >= end:
                return
            yield record
        empty_reads = 0 if reader.positions[partition] > before else empty_reads + 1
        if empty_reads == MAX_EMPTY_READS:
            raise CommandError(f"{topic}[{partition}] gives no records from offset {before} on, and ends at {end}")
