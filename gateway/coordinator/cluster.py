"""What a machine may know of the cluster: topics as values, the same for everything that one step decides.

The one idea: a step is given what it needs and asks nobody. The runner hands the snapshot that stands, and sends
`ClusterChanged` to groups whose machine watches the cluster when another has taken its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from uuid import UUID


@dataclass(frozen=True, slots=True)
class ClusterTopic:
    topic_id: UUID
    name: str
    partition_count: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Live topics by name and by id. Where `topics` is the same mapping, nothing about topics has changed."""

    topics: Mapping[str, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    by_id: Mapping[UUID, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    revision: int = 0
    """All changes up to this one are in it. Revisions are the cluster's: two nodes may compare theirs."""

    def partition_count(self, names: Iterable[str]) -> int:
        """Of those topics that there are."""
        return sum(self.topics[name].partition_count for name in names if name in self.topics)


NO_TOPICS = Cluster()
