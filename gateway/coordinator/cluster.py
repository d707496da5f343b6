"""What a machine may know of the cluster: topics as values, the same for everything that one step decides.

The one idea: a step is given what it needs and asks nobody. The runner hands the snapshot that stands, and sends
`ClusterChanged` to groups whose machine watches the cluster when another has taken its place.
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
"""Principals at hosts that are all answered alike."""


class Describing(Protocol):
    """Who may describe which topic, as the ACLs of one moment have it. Any thread may ask."""

    def like(self, principal: str, host: str) -> Reader | None:
        """None: who may describe every topic."""
        ...

    def allows(self, reader: Reader, topic: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """Live topics by name and by id. Where `topics` is the same mapping, nothing about topics has changed."""

    topics: Mapping[str, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    by_id: Mapping[UUID, ClusterTopic] = field(default_factory=lambda: MappingProxyType({}))
    revision: int = 0
    """All changes up to this one are in it. Revisions are the cluster's: two nodes may compare theirs."""
    describing: Describing | None = None
    """Another object when an ACL has changed. None: everybody may describe every topic."""

    def partition_count(self, names: Iterable[str]) -> int:
        """Of those topics that there are."""
        return sum(self.topics[name].partition_count for name in names if name in self.topics)


NO_TOPICS = Cluster()
