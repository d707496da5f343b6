"""The nodes that get a new topic's partitions as replicas, if replicas are counted: a function of ids and racks alone.

The one idea: nodes stand in a circle in which the racks take turns. Each partition is led by the node after the
previous partition's leader. Its followers are the nodes that come next in the circle, first those in racks without a
replica of the partition. After each full circle the followers begin one place further on, so that all other nodes share
a dead node's partitions equally. Nodes that are not alive come last and never lead (upstream: StripedReplicaPlacer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Rack = str | None


class Spread:
    """The circle of one set of nodes. The same place and number always yield the same replicas."""

    def __init__(self, alive: Mapping[int, Rack], fenced: Mapping[int, Rack]) -> None:
        """`alive` and `fenced` map node ids to racks. At least one node is alive."""
        self._circle = in_turn(alive)
        self._last = in_turn(fenced)
        self._racks = {**fenced, **alive}
        self._found: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Return the number of nodes that may lead."""
        return len(self._circle)

    def place_of(self, leader: int) -> int:
        """Return the node's position in the circle, or 0 if it has none."""
        return self._circle.index(leader) if leader in self._circle else 0

    def replicas(self, index: int, factor: int, *, start: int = 0) -> tuple[int, ...]:
        """Return the replicas of a topic's partition `index`, leader first, if the node at place `start` of the circle
        leads the first partition. There are `factor` replicas, or one on each node if there are fewer nodes. Full
        circles are counted from the topic's first partition on, so each full circle gives every node the same number,
        regardless of `start`."""
        rounds, passed = divmod(index, len(self._circle))
        at = (start + passed) % len(self._circle)
        shift = rounds % max(len(self._circle) - 1, 1)
        found = self._found.get((at, shift, factor))
        if found is None:
            others = [*self._circle[at + 1 :], *self._circle[:at]]
            candidates = [*others[shift:], *others[:shift], *self._last]
            found = self._found[at, shift, factor] = self._chosen(self._circle[at], candidates, factor)
        return found

    def _chosen(self, leader: int, candidates: Sequence[int], factor: int) -> tuple[int, ...]:
        """Choose a node of each rack, then a second node of each rack, and so on."""
        chosen, left = [leader], candidates
        taken: set[Rack] = {self._racks[leader]}
        while left and len(chosen) < factor:
            rest: list[int] = []
            for node_id in left:
                rack = self._racks[node_id]
                if rack in taken:
                    rest.append(node_id)
                    continue
                chosen.append(node_id)
                if len(chosen) == factor:
                    break
                taken.add(rack)
            left, taken = rest, set[Rack]()
        return tuple(chosen)


def in_turn(racks: Mapping[int, Rack]) -> list[int]:
    """Return the nodes in the order of the circle: racks take turns, and nodes of a rack are sorted by id."""
    by_rack: dict[Rack, list[int]] = {}
    for node_id in sorted(racks):
        by_rack.setdefault(racks[node_id], []).append(node_id)
    ordered = [by_rack[rack] for rack in sorted(by_rack, key=lambda rack: (rack is not None, rack or ""))]
    return list(_alternating(ordered))


def _alternating(rows: Sequence[Sequence[int]]) -> Iterable[int]:
    for index in range(max(map(len, rows), default=0)):
        yield from (row[index] for row in rows if index < len(row))
