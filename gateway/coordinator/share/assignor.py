"""The simple assignor of share groups: every partition has a reader, and every member something to read.

The one idea: a partition may have several readers, so no member has to wait. Members keep the partitions that they read
already, up to an even share. Partitions without a reader go to the member that has the fewest, and members with nothing
join a partition that has the fewest readers. Members and partitions are processed in order, so equal input has equal
output.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from uuid import UUID

from gateway.coordinator.consumer.partitions import NOTHING, Partitions, size
from gateway.coordinator.facts import MemberId

TopicPartition = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class Reader:
    topic_ids: frozenset[UUID]
    """Existing topics to which the member subscribes."""
    last: Partitions


class _Draft:
    """The partitions assigned so far, with the number of members that read each of them."""

    def __init__(self, readers: Mapping[MemberId, Reader], counts: Mapping[UUID, int]) -> None:
        self.readers, self.counts = readers, counts
        self.order = sorted(readers)
        self.by_topic: dict[UUID, list[MemberId]] = defaultdict(list)
        for member_id in self.order:
            for topic_id in readers[member_id].topic_ids:
                self.by_topic[topic_id].append(member_id)
        self.topics = sorted(topic_id for topic_id in self.by_topic if counts.get(topic_id))
        self.given: dict[MemberId, list[TopicPartition]] = {member_id: [] for member_id in self.order}
        self.readers_of: dict[TopicPartition, int] = {
            (topic_id, index): 0 for topic_id in self.topics for index in range(counts[topic_id])
        }

    def give(self, member_id: MemberId, partition: TopicPartition) -> None:
        self.given[member_id].append(partition)
        self.readers_of[partition] += 1


def assign(readers: Mapping[MemberId, Reader], counts: Mapping[UUID, int]) -> dict[MemberId, Partitions]:
    """Return the partitions that each member should read. `counts`: partitions of every topic that some member
    subscribes to."""
    draft = _Draft(readers, counts)
    _keep(draft)
    _spread(draft)
    _double(draft)
    return {member_id: _partitions(partitions) for member_id, partitions in draft.given.items()}


def _keep(draft: _Draft) -> None:
    """Let each member keep partitions of its last assignment, up to the size of its share."""
    counts, by_topic, readers_of = draft.counts, draft.by_topic, draft.readers_of
    alike = Counter(reader.topic_ids for reader in draft.readers.values())
    # Shares are fractions of one denominator, since fractions of many take ten times as long to add up.
    whole = lcm(*(len(wanting) for wanting in by_topic.values()))
    parts = {topic_id: counts.get(topic_id, 0) * whole // len(wanting) for topic_id, wanting in by_topic.items()}
    shares = {wanted: sum(map(parts.__getitem__, wanted)) for wanted in alike}
    # Several members may want the same topics, and their even share may not be a whole number. Then this many of them
    # keep one partition more.
    extras = {
        wanted: share % whole * alike[wanted] // whole if share > whole else 0 for wanted, share in shares.items()
    }
    for member_id in draft.order:
        reader, given = draft.readers[member_id], draft.given[member_id]
        quota = max(1, shares[reader.topic_ids] // whole)
        if extras[reader.topic_ids] and size(reader.last) > quota:
            extras[reader.topic_ids] -= 1
            quota += 1
        for topic_id in sorted(reader.last):
            if topic_id not in reader.topic_ids:
                continue
            most_readers = -(-len(by_topic[topic_id]) // max(counts.get(topic_id, 0), 1))
            for index in sorted(reader.last[topic_id]):
                partition = (topic_id, index)
                if len(given) < quota and readers_of.get(partition, most_readers) < most_readers:
                    draft.give(member_id, partition)


def _spread(draft: _Draft) -> None:
    """Give each partition that no member reads to a member with the fewest partitions."""
    given, counts = draft.given, draft.counts
    heaps: dict[tuple[MemberId, ...], list[tuple[int, MemberId]]] = {}
    for topic_id in draft.topics:
        candidates = tuple(draft.by_topic[topic_id])
        if candidates not in heaps:
            heaps[candidates] = [(len(given[member_id]), member_id) for member_id in candidates]
            heapq.heapify(heaps[candidates])
        heap = heaps[candidates]
        for index in range(counts[topic_id]):
            if draft.readers_of[topic_id, index]:
                continue
            # A member may have received partitions of other topics since its entry was made. Then the entry returns to
            # the heap with the present number.
            while heap[0][0] != len(given[heap[0][1]]):
                heapq.heapreplace(heap, (len(given[heap[0][1]]), heap[0][1]))
            member_id = heap[0][1]
            draft.give(member_id, (topic_id, index))
            heapq.heapreplace(heap, (len(given[member_id]), member_id))


def _double(draft: _Draft) -> None:
    """Give each member that still has no partition one with the fewest readers."""
    counts, readers_of = draft.counts, draft.readers_of
    crowds: dict[frozenset[UUID], list[tuple[int, UUID, int]]] = {}
    for member_id in draft.order:
        wanted_topics = draft.readers[member_id].topic_ids
        if draft.given[member_id] or not any(counts.get(topic_id) for topic_id in wanted_topics):
            continue
        if wanted_topics not in crowds:
            crowds[wanted_topics] = [
                (readers_of[topic_id, index], topic_id, index)
                for topic_id in wanted_topics
                for index in range(counts.get(topic_id, 0))
            ]
            heapq.heapify(crowds[wanted_topics])
        crowd = crowds[wanted_topics]
        while crowd[0][0] != readers_of[crowd[0][1:]]:
            heapq.heapreplace(crowd, (readers_of[crowd[0][1:]], *crowd[0][1:]))
        _, topic_id, index = crowd[0]
        draft.give(member_id, (topic_id, index))


def _partitions(given: list[TopicPartition]) -> Partitions:
    if not given:
        return NOTHING
    by_topic: dict[UUID, set[int]] = defaultdict(set)
    for topic_id, index in given:
        by_topic[topic_id].add(index)
    return {topic_id: frozenset(indexes) for topic_id, indexes in by_topic.items()}
