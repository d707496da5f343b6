"""News about pending handoffs of classic groups: how far sources have committed, and deleted topics.

The one idea: the news comes from an observation outside the group, made a moment ago. So it is compared with the
handoffs that are pending now, source by source, and news that no longer fits is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.handoff import replace_all, tell_if_pending
from gateway.coordinator.classic.model import Group
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.handoff import Awaits, Drained, Handoff, HandoffEnd, settled
from gateway.coordinator.machine import Step
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.settings import Settings


def progress_stable(group: Group, event: HandoffProgress, now_ms: int, settings: Settings) -> Step[Group]:
    if not group.handoffs:
        return Step(group)
    draft = Draft(group, now_ms, settings)
    found = {(each.topic, each.partition): each for each in event.found}
    passed = {(topic, partition): target for target, topic, partition in event.passed}

    def each_now() -> Iterator[Handoff | None]:
        for each in draft.handoffs:
            partition = each.topic, each.partition
            if each.is_pending and partition in passed and passed[partition] == each.target:
                tell_if_pending(draft, each, HandoffEnd.CLIENT_CAP)
                yield replace(each, forced=True)
            else:
                yield _progressed(draft, each, found.get(partition))

    replace_all(draft, each_now())
    return _sealed(group, draft)


def progress_elsewhere(group: Group, _event: HandoffProgress, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Ignore the news outside Stable: no SyncGroup is held, and the next assignment asks anew."""
    return Step(group)


def _progressed(draft: Draft, handoff: Handoff, found: Drained | None) -> Handoff | None:
    if found is None or found.source != handoff.source or handoff.awaits is not Awaits.DRAIN or handoff.forced:
        return handoff
    if handoff.topic_id not in (None, found.topic_id):
        tell_if_pending(draft, handoff, HandoffEnd.PARTITION_DELETED)
        return None
    end, mark = settled(found, handoff.mark)
    if end is None:
        return handoff if mark == handoff.mark else replace(handoff, mark=mark, topic_id=found.topic_id)
    tell_if_pending(draft, replace(handoff, mark=mark), end)
    return None


def see_topics(group: Group, cluster: Cluster, now_ms: int, settings: Settings) -> Step[Group]:
    """End the handoffs of partitions that have been deleted."""
    if cluster.revision < group.watch.topics_revision:
        # The former coordinator knew topics that this node has not read yet.
        return Step(group)
    draft = Draft(group, now_ms, settings)

    def each_left() -> Iterator[Handoff | None]:
        for each in draft.handoffs:
            topic = cluster.topics.get(each.topic)
            if topic is not None and 0 <= each.partition < topic.partition_count:
                yield each
            else:
                tell_if_pending(draft, each, HandoffEnd.PARTITION_DELETED)

    replace_all(draft, each_left())
    return _sealed(group, draft)


def _sealed(before: Group, draft: Draft) -> Step[Group]:
    return Step(before) if draft.handoffs is before.handoffs else draft.seal()
