"""The live node that leads each partition, and the node that should hold each shard, as functions of ids alone.

The one idea: rendezvous hashing. Every node weighs every key, and the heaviest node gets it. Each process derives the
same answer from the same list of nodes, and a node that starts or stops moves only its own share: one part in n. A
topic's partitions are spread over the nodes as evenly as their number allows: a node with its full share leaves a
partition to the heaviest node with room (`spread`). If an administrator has named a partition's nodes, the first live
one leads. The weight decides only if none is alive. This module knows no clock, no lease and no Postgres.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from uuid import UUID

from storage.types import Assignment, Partition

NO_LEADER = -1

MAX_REMEMBERED = 500_000
"""Partitions whose leaders are kept in memory, more than any cluster of this kind is expected to have."""

_MASK = 2**64 - 1


def weight(node_id: int, key: int) -> int:
    """Return a node's weight for a key: 64 bits without a pattern (splitmix64's finisher over both numbers)."""
    mixed = (node_id * 0x9E3779B97F4A7C15 ^ (key + 1) * 0xD1342543DE82EF95) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


_WEIGHT_BYTES = 8
_NODE = 0xFFFF
"""Mask of a weight's lowest bits, which hold the node's position in `node_ids`."""


def spread(topic_id: UUID, node_ids: Sequence[int], partition_count: int) -> tuple[int, ...]:
    """Return the leader of each partition of a topic, by index. The numbers of partitions of two nodes differ by one at
    most. If one of n nodes comes or goes, one partition in n moves, and a few more to keep the numbers even. In topics
    with a few partitions per node, twice as many move.

    The weights of a node are a stream of bytes, so the weights of 10,000 partitions take a fraction of a millisecond. A
    topic that gains partitions keeps its weights, and most of its leaders.
    """
    weights: list[array[int]] = []
    for number, node_id in enumerate(node_ids):
        seed = topic_id.bytes + node_id.to_bytes(8, "big", signed=True)
        stream = bytearray(hashlib.shake_128(seed).digest(_WEIGHT_BYTES * partition_count))
        low, high = number.to_bytes(2, "little")
        stream[0::_WEIGHT_BYTES] = bytes((low,)) * partition_count
        stream[1::_WEIGHT_BYTES] = bytes((high,)) * partition_count
        of_node = array("Q", stream)
        if sys.byteorder == "big":
            of_node.byteswap()
        weights.append(of_node)
    least, more = divmod(partition_count, len(node_ids))
    room = [least] * len(node_ids)
    leaders: list[int] = []
    for index, heaviest in enumerate(map(max, zip(*weights, strict=True))):
        number = heaviest & _NODE
        least_room = 0 if more else 1
        if room[number] < least_room:
            number = max(each[index] for each, left in zip(weights, room, strict=True) if left >= least_room) & _NODE
        if room[number] == 0:
            # The number of partitions may not divide evenly: `more` of the nodes get one more.
            more -= 1
        room[number] -= 1
        leaders.append(node_ids[number])
    return tuple(leaders)


class Leaders:
    """The leaders that one set of live brokers yields. Each set has an object of its own."""

    __slots__ = ("_alive", "_remembered", "_spreads", "node_ids")

    def __init__(self, node_ids: Iterable[int]) -> None:
        self.node_ids = tuple(sorted(node_ids))
        self._alive = frozenset(self.node_ids)
        self._spreads: dict[tuple[UUID, int], tuple[int, ...]] = {}
        self._remembered = 0

    def leader(self, partition: Partition) -> int:
        """Return the node that clients of a partition are sent to. Each node could serve it, so this spreads the
        load. Return NO_LEADER if no broker is alive."""
        assignment = partition.assignment
        if assignment is not None:
            if assignment.leader in self._alive and assignment.leader in assignment.replicas:
                return assignment.leader
            for node_id in assignment.replicas:
                if node_id in self._alive:
                    return node_id
        if len(self.node_ids) < 2:
            return self.node_ids[0] if self.node_ids else NO_LEADER
        topic = partition.topic_id, partition.partition_count
        leaders = self._spreads.get(topic)
        if leaders is None:
            if self._remembered >= MAX_REMEMBERED:
                self._spreads.clear()
                self._remembered = 0
            leaders = self._spreads[topic] = spread(partition.topic_id, self.node_ids, partition.partition_count)
            self._remembered += partition.partition_count
        return leaders[partition.partition_index]

    def heaviest(self, key: int) -> int:
        """Return the node for a key that is not a partition; NO_LEADER if no broker is alive."""
        return max(self.node_ids, key=lambda node_id: weight(node_id, key), default=NO_LEADER)

    def in_sync(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the named nodes that are alive. All of them are in sync, because every node reads every record from
        Postgres."""
        return tuple(node_id for node_id in assignment.replicas if node_id in self._alive)


def shares(shards: Sequence[int], node_ids: Sequence[int]) -> dict[int, int]:
    """Return the node that should hold each shard: the node with the greatest weight that does not have its even share
    yet. The numbers of shards of two nodes differ by one at most."""
    if not node_ids:
        return {}
    least, more = divmod(len(shards), len(node_ids))
    room = dict.fromkeys(node_ids, least)
    placed: dict[int, int] = {}
    offers = sorted(((weight(node, shard), shard, node) for shard in shards for node in node_ids), reverse=True)
    for _, shard, node in offers:
        if shard in placed or room[node] < 0:
            continue
        if room[node] == 0:
            # The number of shards may not divide evenly: `more` of the nodes get one more.
            if not more:
                continue
            more -= 1
        room[node] -= 1
        placed[shard] = node
    return placed
