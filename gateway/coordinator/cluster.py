"""The cluster as a machine may see it: topics as values, the same for all decisions of one step.

The one idea: a step receives what it needs and asks no other module. The runner passes the current snapshot, and sends
`ClusterChanged` to groups whose machine watches the cluster when a new snapshot replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class ClusterTopic:
    topic_id: UUID
    name: str
    partition_count: int


Reader = tuple[str, str]
"""Principals and hosts that all may describe the same topics."""


class Describing(Protocol):
    """Which principals may describe which topics, by the ACLs of one moment. Thread-safe."""

    def like(self, principal: str, host: str) -> Reader | None:
        """Return the reader, or None if it may describe every topic."""
        ...

    def allows(self, reader: Reader, topic: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """Live topics by name and by id. If `topics` is the same mapping, no topic has changed."""

    topics: Mapping[str, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    by_id: Mapping[UUID, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    revision: int = 0
    """Revision of the newest change in the snapshot, which has all earlier changes too, unless this node has made the
    newest one a moment ago. Revisions belong to the cluster, so two nodes may compare theirs."""
    describing: Describing | None = None
    """A new object after each change of an ACL. None: every client may describe every topic."""

    def partition_count(self, names: Iterable[str]) -> int:
        """Return the number of partitions of those topics that exist."""
        return sum(self.topics[name].partition_count for name in names if name in self.topics)


NO_TOPICS = Cluster()
