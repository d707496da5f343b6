"""Conversion of topic names to ids and back: the classic protocol names topics, a consumer group knows them by id.

The one idea: a member of the classic protocol carries its subscription and its assignment in the format of the embedded
consumer protocol (`protocol/consumer.py`). This module turns these bytes into partitions and back. Topics that do not
exist (any more) have no partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ClassicProtocol
from gateway.coordinator.consumer.partitions import Partitions, partitions_of
from gateway.coordinator.protocols import names
from protocol.consumer import Assignment, Subscription, TopicPartition, decode_subscription, encode_assignment


def protocol_name(classic: ClassicProtocol) -> str:
    """Return the group protocol that such a member gets in responses: the first that it offers."""
    return _first(classic)[0]


def subscription(classic: ClassicProtocol) -> Subscription:
    """Return the subscription. Raise ProtocolError if the metadata of the member's first protocol cannot be read."""
    return decode_subscription(_first(classic)[1])


def _first(classic: ClassicProtocol) -> tuple[str, bytes]:
    return next((name, metadata) for name, metadata in classic.protocols if name)


def by_id(named: Iterable[tuple[str, Iterable[int]]], cluster: Cluster) -> Partitions:
    """Return these partitions. Those with a negative number exist in no topic, and no assignor expects them."""
    return partitions_of(
        (cluster.topics[name].topic_id, (index for index in indexes if index >= 0))
        for name, indexes in named
        if name in cluster.topics
    )


def assignment(held: Partitions, version: int, cluster: Cluster) -> bytes:
    """Write the assignment in the layout of the version that the member itself writes, topics in the order of their
    names."""
    topics = [
        TopicPartition(cluster.by_id[topic_id].name, tuple(sorted(indexes)))
        for topic_id, indexes in held.items()
        if topic_id in cluster.by_id
    ]
    return encode_assignment(Assignment(version, tuple(sorted(topics))))


def compatible(offered: ClassicProtocol, others: Iterable[ClassicProtocol]) -> bool:
    """Return whether all members can speak one of the offered protocols, in case the group becomes a classic one."""
    common = names(offered.protocols)
    for other in others:
        common &= names(other.protocols)
    return bool(common)
