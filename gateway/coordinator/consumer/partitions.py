"""Sets of partitions, by topic id, and their algebra.

The one idea: `Partitions` is an immutable mapping from topic id to the set of its partition indexes, and no set is
empty. So two of them are equal if they hold the same partitions, and "nothing" is the empty mapping. Hashing a UUID
costs more than a set operation on integers, so no function here works on pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from uuid import UUID

Partitions = Mapping[UUID, frozenset[int]]

NOTHING: Partitions = MappingProxyType({})


def nothing() -> Partitions:
    """Return the default of fields that hold no partitions."""
    return NOTHING


def partitions_of(pairs: Iterable[tuple[UUID, Iterable[int]]]) -> Partitions:
    """Return the set of all these partitions. A topic may occur several times."""
    found: dict[UUID, frozenset[int]] = {}
    for topic_id, indexes in pairs:
        held = found.get(topic_id, frozenset()).union(indexes)
        if held:
            found[topic_id] = held
    return found


def union(left: Partitions, right: Partitions) -> Partitions:
    if not right:
        return left
    if not left:
        return right
    joined = dict(left)
    for topic_id, indexes in right.items():
        held = joined.get(topic_id)
        joined[topic_id] = indexes if held is None else held | indexes
    return joined


def difference(left: Partitions, right: Partitions) -> Partitions:
    """Return the partitions of `left` that are not in `right`; `left` itself if they do not meet."""
    if not meet(left, right):
        return left
    rest: dict[UUID, frozenset[int]] = {}
    for topic_id, indexes in left.items():
        taken = right.get(topic_id)
        kept = indexes if taken is None else indexes - taken
        if kept:
            rest[topic_id] = kept
    return rest


def intersection(left: Partitions, right: Partitions) -> Partitions:
    """Return the partitions that are in both; return `left` itself if `right` has all of its partitions."""
    if contains(right, left):
        return left
    common: dict[UUID, frozenset[int]] = {}
    for topic_id, indexes in left.items():
        shared = indexes & right.get(topic_id, frozenset[int]())
        if shared:
            common[topic_id] = shared
    return common


def meet(left: Partitions, right: Partitions) -> bool:
    """Return whether a partition is in both sets."""
    return any(topic_id in right and not indexes.isdisjoint(right[topic_id]) for topic_id, indexes in left.items())


def contains(whole: Partitions, part: Partitions) -> bool:
    """Return whether `whole` contains all of `part`."""
    return all(topic_id in whole and indexes <= whole[topic_id] for topic_id, indexes in part.items())


def only_topics(held: Partitions, topic_ids: frozenset[UUID]) -> Partitions:
    """Return those of the partitions that belong to the topics; return `held` itself if all of them do."""
    if topic_ids.issuperset(held):
        return held
    return {topic_id: indexes for topic_id, indexes in held.items() if topic_id in topic_ids}


def size(held: Partitions) -> int:
    return sum(map(len, held.values()))
