"""What a node must do to get from the topics it holds to those that are committed: values in, operations out.

The one idea: compared is what stands, not what happened. A topic is known by its id and its revisions, so one that was
deleted and created again under its name is another, and news that is read twice, late or in another order changes
nothing. It knows neither Postgres nor the event loop; `Catalog.perform` carries operations out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from storage.types import CatalogChanges, Topic


@dataclass(frozen=True, slots=True)
class InstallTopic:
    """Not held here, or an earlier state of it."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class RemoveTopic:
    """Held here, and committed no more: what waits for its partitions ends, what is cached of them goes."""

    topic_id: UUID


Operation = InstallTopic | RemoveTopic


def decide(held: Mapping[UUID, Topic], changes: CatalogChanges) -> Iterator[Operation]:
    """Removals first, so that a name is free for the topic that has it now."""
    if changes.whole:
        committed = {topic.topic_id for topic in changes.topics}
        for topic in held.values():
            # What is newer than the answer was created here while it was read.
            if topic.topic_id not in committed and topic.changed_revision <= changes.revision:
                yield RemoveTopic(topic.topic_id)
    for topic_id in changes.deleted:
        if topic_id in held:
            yield RemoveTopic(topic_id)
    for topic in changes.topics:
        known = held.get(topic.topic_id)
        if known is None or known.changed_revision < topic.changed_revision:
            yield InstallTopic(topic)
