"""Regular expressions of subscriptions: which topics of a cluster they match as topics come and go, and how much memory
the matches take.
"""

from __future__ import annotations

from random import Random
from types import MappingProxyType
from uuid import UUID

import pytest

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.topics import Pattern, resolve_pattern


def cluster(names: set[str]) -> Cluster:
    topics = {name: ClusterTopic(UUID(int=hash(name) & 0xFFFF), name, 1) for name in names}
    return Cluster(MappingProxyType(topics))


@pytest.mark.parametrize("seed", range(20))
def test_a_pattern_that_follows_the_topics_matches_what_a_new_one_does(seed: int):
    random = Random(seed)
    known: Pattern | None = None
    for _ in range(30):
        names = {f"{random.choice('ab')}{random.randrange(6)}" for _ in range(random.randrange(8))}
        now = cluster(names)
        known = resolve_pattern("a.*", now, known)
        assert known == resolve_pattern("a.*", now, None)
        assert known.matched == {name for name in names if name.startswith("a")}


def test_patterns_keep_the_clusters_own_topics_and_no_copy_of_their_names():
    now = cluster({f"topic-{number}" for number in range(1_000)})
    patterns = [resolve_pattern(f"topic-{number}", now, None) for number in range(10)]
    assert all(pattern.seen is now.topics for pattern in patterns)
    later = Cluster(MappingProxyType({**now.topics, "another": ClusterTopic(UUID(int=7), "another", 1)}))
    followed = [resolve_pattern(pattern.text, later, pattern) for pattern in patterns]
    assert all(pattern.seen is later.topics for pattern in followed)
    assert all(new.matched is old.matched for old, new in zip(patterns, followed, strict=True)), (
        "what has not changed is not made anew"
    )
