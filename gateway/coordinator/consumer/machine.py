"""The consumer group coordinator (KIP-848), whole: one function from a group and an event to what becomes of both.

The one idea: values in, values out, as in `gateway.coordinator.classic`; besides the time and the settings a step is
given the cluster's topics, for here it is the coordinator who assigns partitions.
"""

from __future__ import annotations

from gateway.coordinator.consumer.deadlines import next_deadline, tick
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.heartbeat import heartbeat
from gateway.coordinator.consumer.model import (
    ConsumerGroup,
    ConsumerGroupHeartbeat,
    ConsumerSettings,
    ConsumerStep,
    TopicsChanged,
)
from gateway.coordinator.consumer.restore import restore
from gateway.coordinator.consumer.topics import ClusterTopics
from gateway.coordinator.model import Tick

__all__ = ["ConsumerEvent", "next_deadline", "restore", "step"]

ConsumerEvent = ConsumerGroupHeartbeat | TopicsChanged | Tick


def step(
    group: ConsumerGroup, event: ConsumerEvent, now_ms: int, settings: ConsumerSettings, topics: ClusterTopics
) -> ConsumerStep:
    """What `event` does to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group)."""
    match event:
        case ConsumerGroupHeartbeat():
            return heartbeat(group, event, now_ms, settings, topics)
        case Tick():
            return tick(group, now_ms, settings, topics)
        case TopicsChanged():
            return _see_topics(group, now_ms, settings, topics)


def _see_topics(group: ConsumerGroup, now_ms: int, settings: ConsumerSettings, topics: ClusterTopics) -> ConsumerStep:
    """Members learn what follows with their next heartbeats, as of any other change."""
    if not group.members or group.topics_version == topics.version:
        return ConsumerStep(group)
    draft = Draft(group, now_ms, settings, topics)
    if draft.see_topics():
        draft.group_epoch += 1
        draft.say("subscribed topics changed")
        draft.compute_target()
    return draft.seal()
