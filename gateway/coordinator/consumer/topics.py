"""The topics that a group's subscriptions select from the cluster.

The one idea: the topics are a value passed to every step, and another value once they have changed. Names and patterns
are turned into topic ids once per distinct subscription, and a pattern is matched only against names that it has not
seen. A new topic costs one match per pattern, and a thousand members with the same subscription cost as much as one. A
member sees a match of a pattern if it may describe that topic, as in TopicRegexResolver; the check runs once for all
members with equal rights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import re2

from gateway.coordinator.cluster import Cluster, ClusterTopic, Describing, Reader

MAX_PATTERN_BYTES = 2_048
MAX_UNICODE_CLASSES = 20
"""Maximal number of Unicode classes in a pattern. Each class has hundreds of ranges. Compiling a pattern blocks the
event loop, so it must take milliseconds; thousands of classes took half a second."""
MAX_PATTERN_MEMORY_BYTES = 1 << 20
"""Memory limit of one compiled pattern. RE2 matches in time linear in the name for every pattern."""


MAX_PATTERN_SHOWN = 249
"""Number of characters of a refused pattern that the refusal repeats."""


class InvalidPatternError(ValueError):
    """The pattern is no RE2 expression, or it is too large."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A subscription by regular expression, resolved."""

    text: str
    matched: frozenset[str]
    seen: Mapping[str, ClusterTopic] = field(compare=False, repr=False)
    """The topics that were tried, matching or not: the cluster's own value, which all patterns share."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a pattern's matches that some readers may describe."""

    matched: frozenset[str]
    names: frozenset[str]


def compile_pattern(text: str) -> re2.Pattern:
    """Compile a pattern from a request. Raise InvalidPatternError."""
    if len(text) > MAX_PATTERN_BYTES or len(text.encode()) > MAX_PATTERN_BYTES:
        raise InvalidPatternError(f"longer than {MAX_PATTERN_BYTES} bytes")
    if text.count("\\p") + text.count("\\P") > MAX_UNICODE_CLASSES:
        raise InvalidPatternError(f"names more than {MAX_UNICODE_CLASSES} Unicode classes")
    return _compiled(text)


def _compiled(text: str) -> re2.Pattern:
    """Compile a pattern of any size: a pattern that another release accepted goes on. The library keeps the
    last few hundred that it compiled."""
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(text, options)
    except re2.error as invalid:
        # The library returns bytes, with the pattern at the end: b"missing ): a(b".
        said: object = invalid.args[0] if invalid.args else invalid
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise InvalidPatternError(reason.removesuffix(f": {text}")) from invalid


def resolve_pattern(text: str, cluster: Cluster, known: Pattern | None) -> Pattern:
    """Match the pattern against every topic's whole name; only names that `known` has not seen are tried."""
    topics = cluster.topics
    if known is not None and known.seen is topics:
        return known
    if known is None:
        unseen, still = topics.keys(), frozenset[str]()
    else:
        unseen, still = topics.keys() - known.seen.keys(), known.matched
        if not all(name in topics for name in still):
            still = frozenset(name for name in still if name in topics)
    if unseen:
        compiled = _compiled(text)
        if matching := [name for name in unseen if compiled.fullmatch(name)]:
            still = still.union(matching)
    return Pattern(text, still, topics)


def show(pattern: Pattern, reader: Reader, describing: Describing, known: Shown | None) -> Shown:
    """Return the matches that the reader may describe. `known` is the earlier answer of the same `describing`; only
    other names are checked."""
    if known is None:
        known = Shown(frozenset(), frozenset())
    if known.matched == pattern.matched:
        return known
    unseen = pattern.matched - known.matched
    allowed = {name for name in unseen if describing.allows(reader, name)}
    return Shown(pattern.matched, (known.names & pattern.matched) | allowed)


def metadata_hash(
    names: Iterable[str], cluster: Cluster, differing: Iterable[tuple[tuple[str, ...], frozenset[str]]] = ()
) -> int:
    """Return a hash of the topics. It changes if a named topic appears, disappears, is replaced by another of the same
    name, or gains partitions. It also changes if a pattern that shows different names to different members
    (`differing`: pattern and the member's principal and host) shows other names, or the same to other members.

    The hash is the same in every process, because it is stored with the group; 0 if none of the topics exists.
    """
    found = sorted(name for name in names if name in cluster.topics)
    if not found:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for name in found:
        topic = cluster.topics[name]
        digest.update(topic.topic_id.bytes)
        digest.update(topic.partition_count.to_bytes(4, "big"))
    for who, shown in sorted((who, sorted(shown)) for who, shown in differing):
        digest.update("\0".join((*who, "", *shown, "\0")).encode())
    return int.from_bytes(digest.digest(), "big", signed=True)
