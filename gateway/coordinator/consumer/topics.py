"""The cluster's topics as the coordinator is given them, and what a group's subscriptions make of them.

The one idea: topics are a value with a version, handed to every step. Names and patterns are turned into topic ids once
per distinct subscription, and a pattern is matched only against names it has not seen, so that a new topic costs one
match per pattern and a thousand members with the same subscription cost as much as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import re2

MAX_PATTERN_BYTES = 16_384
MAX_PATTERN_MEMORY_BYTES = 1 << 20
"""What one compiled pattern may take. RE2 matches in time linear in the name, whatever the pattern."""


class ClusterTopic(NamedTuple):
    topic_id: UUID
    name: str
    partition_count: int


@dataclass(frozen=True, slots=True)
class ClusterTopics:
    """All topics at one moment. Equal versions mean equal topics; −1 is the version of no topics at all."""

    version: int = -1
    by_name: Mapping[str, ClusterTopic] = field(default_factory=dict[str, ClusterTopic])
    by_id: Mapping[UUID, ClusterTopic] = field(default_factory=dict[UUID, ClusterTopic])


def cluster_topics(version: int, topics: Iterable[ClusterTopic]) -> ClusterTopics:
    by_name = {topic.name: topic for topic in topics}
    return ClusterTopics(version, by_name, {topic.topic_id: topic for topic in by_name.values()})


NO_TOPICS = ClusterTopics()


class InvalidPatternError(ValueError):
    """The pattern is no RE2 expression, or too large a one."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A subscription by regular expression, resolved against the names known at `version` of the topics."""

    text: str
    matched: frozenset[str]
    version: int
    names: frozenset[str]
    """All names that were looked at, matching or not."""


def compile_pattern(text: str) -> re2.Pattern:
    """Raises InvalidPatternError. The library keeps the last few hundred it compiled."""
    if len(text) > MAX_PATTERN_BYTES or len(text.encode()) > MAX_PATTERN_BYTES:
        raise InvalidPatternError(f"longer than {MAX_PATTERN_BYTES} bytes")
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(text, options)
    except re2.error as invalid:
        raise InvalidPatternError(str(invalid)) from invalid


def resolve_pattern(text: str, topics: ClusterTopics, known: Pattern | None) -> Pattern:
    """The pattern matched against every topic's whole name; only names that `known` has not seen are tried."""
    if known is not None and known.version == topics.version:
        return known
    names = frozenset(topics.by_name)
    if known is None:
        unseen, still = names, frozenset[str]()
    else:
        unseen, still = names - known.names, known.matched & names
    if unseen:
        compiled = compile_pattern(text)
        still = still.union(name for name in unseen if compiled.fullmatch(name))
    return Pattern(text, still, topics.version, names)


def metadata_hash(names: Iterable[str], topics: ClusterTopics) -> int:
    """Changes when one of the named topics appears, goes, is another one of the same name, or gains partitions.

    The same in every process, for it is stored with the group; 0 if none of the topics exists.
    """
    found = sorted(name for name in names if name in topics.by_name)
    if not found:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for name in found:
        topic = topics.by_name[name]
        digest.update(topic.topic_id.bytes)
        digest.update(topic.partition_count.to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)
