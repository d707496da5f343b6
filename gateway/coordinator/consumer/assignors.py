"""The server-side assignors `uniform` and `range`: they compute the target from the subscriptions of the members.

The one idea: pure functions of the members, the topics and the last target, so that two nodes compute the same. Both
give every partition of a subscribed topic to exactly one subscriber. `uniform` evens out how many partitions each
member has, and moves as few as possible. `range` gives each member the same stretch of every topic; previous owners do
not matter. The caller decides which topics exist and what each subscription contains.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.consumer.partitions import Partitions, nothing, size
from gateway.coordinator.facts import MemberId

MAX_BALANCING_ROUNDS = 64
"""Limit over all topics. A round moves partitions only if that evens out the loads. Upstream stops after 16."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One member from an assignor's view. Members with equal subscriptions share one set."""

    topic_ids: frozenset[UUID]
    """Existing topics to which the member subscribes."""
    instance_id: str | None = None
    last: Partitions = field(default_factory=nothing)
    """The member's part of the last target assignment."""


Subscribers = Mapping[MemberId, Subscriber]
PartitionCounts = Mapping[UUID, int]
Assignor = Callable[[Subscribers, PartitionCounts], dict[MemberId, Partitions]]


def range_(subscribers: Subscribers, partition_counts: PartitionCounts) -> dict[MemberId, Partitions]:
    """Give each member one range of consecutive partitions of each topic. The first ranges may be one longer. Static
    members come first, by instance id.
    """
    ordered = sorted(subscribers.items(), key=lambda each: _range_order(*each))
    by_topic: dict[UUID, list[MemberId]] = {}
    for member_id, subscriber in ordered:
        for topic_id in subscriber.topic_ids:
            by_topic.setdefault(topic_id, []).append(member_id)
    given: dict[MemberId, dict[UUID, frozenset[int]]] = {member_id: {} for member_id in subscribers}
    for topic_id, members in by_topic.items():
        each, longer = divmod(partition_counts.get(topic_id, 0), len(members))
        start = 0
        for position, member_id in enumerate(members):
            end = start + each + (position < longer)
            if end == start:
                break
            given[member_id][topic_id] = frozenset(range(start, end))
            start = end
    return {member_id: _same(subscribers[member_id].last, partitions) for member_id, partitions in given.items()}


def _range_order(member_id: MemberId, subscriber: Subscriber) -> tuple[bool, str, MemberId]:
    return subscriber.instance_id is None, subscriber.instance_id or "", member_id


def uniform(subscribers: Subscribers, partition_counts: PartitionCounts) -> dict[MemberId, Partitions]:
    """Balance the number of partitions per member. If all members subscribe to the same topics, sizes differ by at
    most one and no more partitions move than necessary. Otherwise, no partition could go to a subscriber that has
    two fewer."""
    if not subscribers:
        return {}
    first = next(iter(subscribers.values())).topic_ids
    if all(each.topic_ids is first or each.topic_ids == first for each in subscribers.values()):
        return _homogeneous(subscribers, first, partition_counts)
    return _heterogeneous(subscribers, partition_counts)


UNIFORM = "uniform"
ASSIGNORS: Mapping[str, Assignor] = {UNIFORM: uniform, "range": range_}


def _kept(subscribers: Subscribers, partition_counts: PartitionCounts) -> dict[MemberId, Partitions]:
    """Return the part of the last target that may stay: existing partitions of topics still subscribed to, each with
    one owner."""
    taken: dict[UUID, set[int]] = {topic_id: set() for topic_id in partition_counts}
    kept: dict[MemberId, Partitions] = {}
    for member_id in sorted(subscribers):
        subscriber = subscribers[member_id]
        valid = subscriber.last
        for topic_id, indexes in subscriber.last.items():
            others = taken.get(topic_id)
            if others is None or topic_id not in subscriber.topic_ids:
                stays = frozenset[int]()
            elif max(indexes) < partition_counts[topic_id] and others.isdisjoint(indexes):
                stays = indexes
            else:
                count = partition_counts[topic_id]
                stays = frozenset(index for index in indexes if index < count and index not in others)
            if stays is not indexes:
                valid = {each: held for each, held in valid.items() if each != topic_id}
                if stays:
                    valid[topic_id] = stays
            if others is not None:
                others.update(stays)
        kept[member_id] = valid
    return kept


def _homogeneous(
    subscribers: Subscribers, topic_ids: frozenset[UUID], partition_counts: PartitionCounts
) -> dict[MemberId, Partitions]:
    """Assign equal sizes. Members that have more than their share keep the larger sizes, so that as few partitions
    as possible move. Surplus is cut from the end of what they have."""
    counts = {topic_id: partition_counts[topic_id] for topic_id in sorted(topic_ids) if topic_id in partition_counts}
    share, larger_shares = divmod(sum(counts.values()), len(subscribers))
    kept = _kept(subscribers, counts)
    free: dict[UUID, set[int]] = {topic_id: set(range(count)) for topic_id, count in counts.items()}
    missing: dict[MemberId, int] = {}
    for member_id, held in kept.items():
        count = size(held)
        quota = share
        if count > share and larger_shares:
            quota += 1
            larger_shares -= 1
        if count > quota:
            held = kept[member_id] = first(held, quota)
        elif count <= share:
            missing[member_id] = share - count
        for topic_id, indexes in held.items():
            free[topic_id] -= indexes
    for member_id in missing:
        if not larger_shares:
            break
        missing[member_id] += 1
        larger_shares -= 1
    return deal(kept, {member_id: count for member_id, count in missing.items() if count}, free)


def first(held: Partitions, count: int) -> Partitions:
    """Return the first `count` partitions, in the order of topic id and index."""
    first: dict[UUID, frozenset[int]] = {}
    for topic_id in sorted(held):
        if count <= 0:
            break
        indexes = held[topic_id]
        first[topic_id] = indexes if len(indexes) <= count else frozenset(sorted(indexes)[:count])
        count -= len(indexes)
    return first


def deal(
    kept: dict[MemberId, Partitions], missing: dict[MemberId, int], free: dict[UUID, set[int]]
) -> dict[MemberId, Partitions]:
    """Deal the free partitions in turn to the members that lack some, so that every topic is spread. There must not be
    more free partitions than lacking ones. Change `kept` and return it.
    """
    dealt: dict[MemberId, dict[UUID, set[int]]] = {member_id: {} for member_id in missing}
    turn = list(missing)
    position = 0
    for topic_id, indexes in free.items():
        for index in sorted(indexes):
            position %= len(turn)
            member_id = turn[position]
            dealt[member_id].setdefault(topic_id, set()).add(index)
            missing[member_id] -= 1
            if missing[member_id]:
                position += 1
            else:
                turn.pop(position)
    for member_id, gained in dealt.items():
        kept[member_id] = _with(kept[member_id], gained)
    return kept


def _with(held: Partitions, gained: Mapping[UUID, set[int]]) -> Partitions:
    joined = dict(held)
    for topic_id, indexes in gained.items():
        joined[topic_id] = joined.get(topic_id, frozenset[int]()).union(indexes)
    return joined


def _heterogeneous(subscribers: Subscribers, partition_counts: PartitionCounts) -> dict[MemberId, Partitions]:
    """Give free partitions to the subscriber that has the fewest, topics with few subscribers first. Then move
    partitions one by one from the fullest owner of a topic to its emptiest subscriber, until no move evens out the
    loads."""
    kept = _kept(subscribers, partition_counts)
    owned = {member_id: {topic: set(indexes) for topic, indexes in held.items()} for member_id, held in kept.items()}
    load = {member_id: size(held) for member_id, held in kept.items()}
    by_topic: dict[UUID, list[MemberId]] = {}
    for member_id in sorted(subscribers):
        for topic_id in subscribers[member_id].topic_ids:
            if topic_id in partition_counts:
                by_topic.setdefault(topic_id, []).append(member_id)
    topics = sorted(by_topic, key=lambda topic_id: (len(by_topic[topic_id]), topic_id))
    for topic_id in topics:
        held = {index for member_id in by_topic[topic_id] for index in owned[member_id].get(topic_id, ())}
        free = [index for index in range(partition_counts[topic_id]) if index not in held]
        if not free:
            continue
        least = [(load[member_id], member_id) for member_id in by_topic[topic_id]]
        heapq.heapify(least)
        for index in free:
            count, member_id = least[0]
            heapq.heapreplace(least, (count + 1, member_id))
            owned[member_id].setdefault(topic_id, set()).add(index)
            load[member_id] += 1
    for _ in range(MAX_BALANCING_ROUNDS):
        moved = [_balance(topic_id, by_topic[topic_id], owned, load) for topic_id in topics]
        if not any(moved):
            break
    return {
        member_id: _same(
            subscribers[member_id].last,
            {topic_id: frozenset(indexes) for topic_id, indexes in owned[member_id].items() if indexes},
        )
        for member_id in subscribers
    }


def _balance(
    topic_id: UUID, members: list[MemberId], owned: dict[MemberId, dict[UUID, set[int]]], load: dict[MemberId, int]
) -> bool:
    """Move this topic's partitions from the fullest owner to the emptiest subscriber while the two differ by more
    than one. Return whether any moved."""
    least = [(load[member_id], member_id) for member_id in members]
    most = [(-load[member_id], member_id) for member_id in members if owned[member_id].get(topic_id)]
    heapq.heapify(least)
    heapq.heapify(most)
    moved = False
    while most:
        above, giver = most[0]
        if load[giver] != -above or not owned[giver].get(topic_id):
            heapq.heappop(most)
            if owned[giver].get(topic_id):
                heapq.heappush(most, (-load[giver], giver))
            continue
        below, taker = least[0]
        if load[taker] != below:
            heapq.heapreplace(least, (load[taker], taker))
            continue
        if load[giver] - load[taker] < 2:
            break
        index = max(owned[giver][topic_id])
        owned[giver][topic_id].remove(index)
        owned[taker].setdefault(topic_id, set()).add(index)
        load[giver] -= 1
        load[taker] += 1
        heapq.heapreplace(least, (load[taker], taker))
        heapq.heappush(least, (load[giver], giver))
        heapq.heappush(most, (-load[taker], taker))
        moved = True
    return moved


def _same(last: Partitions, now: Partitions) -> Partitions:
    """Return `last` itself if nothing has changed, because targets are compared by identity first."""
    return last if last == now else now
