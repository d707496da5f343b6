"""The assignor `uniform`, one change at a time: which members give and get partitions when a member joins or leaves.

The one idea: if all members subscribe to the same topics, the next target depends only on how many partitions each has
and which have no owner. Both are kept beside the target, so a member that joins or leaves costs as much as the
partitions that move because of it, without a look at every share. The result is what `assignors.uniform` promises:
shares that differ by at most one, and no more moves than that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.consumer.assignors import deal, first
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference, nothing, size, union
from gateway.coordinator.facts import MemberId


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a target that gives every partition of these topics to one of its members."""

    counts: Mapping[UUID, int]
    """For each topic to which all members subscribe, its number of partitions."""
    sizes: Mapping[MemberId, int]
    """Number of partitions of each member of the target."""
    free: Partitions = field(default_factory=nothing)
    """Partitions of members that have left since."""

    def without(self, member_id: MemberId, share: Partitions) -> Spread:
        sizes = dict(self.sizes)
        if sizes.pop(member_id, None) is None:
            return self
        return Spread(self.counts, sizes, union(self.free, share))


def spread_of(target: Mapping[MemberId, Partitions], counts: Mapping[UUID, int]) -> Spread:
    """Return the spread of a target that leaves no partition out."""
    return Spread(counts, {member_id: size(share) for member_id, share in target.items()})


def respread(
    spread: Spread, target: Mapping[MemberId, Partitions], members: Iterable[MemberId]
) -> tuple[Spread, dict[MemberId, Partitions]]:
    """Return the spread over these members, which are those of `spread` and new ones. Also return the shares that
    change.
    """
    sizes = dict(spread.sizes)
    for member_id in members:
        if member_id not in sizes:
            sizes[member_id] = 0
    share, larger_shares = divmod(sum(spread.counts.values()), len(sizes))
    changed: dict[MemberId, Partitions] = {}
    missing: dict[MemberId, int] = {}
    free = spread.free
    for member_id, count in sizes.items():
        if count <= share:
            missing[member_id] = share - count
            continue
        quota = share
        if larger_shares:
            quota += 1
            larger_shares -= 1
        if count > quota:
            held = target[member_id]
            changed[member_id] = kept = first(held, quota)
            free = union(free, difference(held, kept))
            sizes[member_id] = quota
    for member_id in missing:
        if not larger_shares:
            break
        missing[member_id] += 1
        larger_shares -= 1
    wanting = {member_id: count for member_id, count in missing.items() if count}
    for member_id, count in wanting.items():
        changed[member_id] = target.get(member_id, NOTHING)
        sizes[member_id] += count
    deal(changed, wanting, {topic_id: set(indexes) for topic_id, indexes in sorted(free.items())})
    for member_id, count in sizes.items():
        if not count and member_id not in target:
            changed[member_id] = NOTHING
    return Spread(spread.counts, sizes), changed
