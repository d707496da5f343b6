"""What a node must do to get from the topics it holds to those that are committed: values in, operations out.

The one idea: compared is what stands, not what happened. A topic is known by its id and its revisions, so one that was
deleted and created again under its name is another, and news that is read twice, late or in another order changes
nothing. It knows neither Postgres nor the event loop; `Catalog.perform` carries operations out, one by one, and checks
each against what is held by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from storage.types import CatalogChanges, Partition, Topic


@dataclass(frozen=True, slots=True)
class InstallRouted:
    """Not held here, or an earlier state of it: its name, id and partitions become known, and where they lead."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class InstallOwned:
    """Clients of these partitions, and of no others of the topic, are pointed to this node from now on."""

    topic: Topic
    owned: frozenset[int]


@dataclass(frozen=True, slots=True)
class RemoveRouted:
    """Held here, and committed no more: it is refused from now on, and what waits for its partitions ends."""

    topic_id: UUID


@dataclass(frozen=True, slots=True)
class ConfirmRemove:
    """Removed, and nothing that was under way for it can come to its partitions any more: the last of it goes."""

    topic_id: UUID


Operation = InstallRouted | InstallOwned | RemoveRouted | ConfirmRemove


@dataclass(frozen=True, slots=True)
class Held:
    """A topic as this node holds it."""

    topic: Topic
    owned: frozenset[int] | None = None
    """Indexes of partitions whose clients are pointed here; None: not decided for this state of the topic."""


def decide(held: Mapping[UUID, Held], changes: CatalogChanges) -> Iterator[RemoveRouted | InstallRouted]:
    """Removals first, so that a name is free for the topic that has it now."""
    if changes.whole:
        committed = {topic.topic_id for topic in changes.topics}
        for each in held.values():
            # What is newer than the answer was created here while it was read.
            if each.topic.topic_id not in committed and each.topic.changed_revision <= changes.revision:
                yield RemoveRouted(each.topic.topic_id)
    for topic_id in changes.deleted:
        if topic_id in held:
            yield RemoveRouted(topic_id)
    for topic in changes.topics:
        known = held.get(topic.topic_id)
        if known is None or known.topic.changed_revision < topic.changed_revision:
            yield InstallRouted(topic)


def decide_owned(held: Held, leads: Callable[[Partition], bool]) -> InstallOwned | None:
    """`leads`: whether this node is where clients of a partition are pointed to, by the live nodes of this moment."""
    topic = held.topic
    owned = frozenset(part.partition_index for part in topic.partitions if leads(part))
    return None if owned == held.owned else InstallOwned(topic, owned)


def decide_confirmed(removed: Collection[UUID], busy: Collection[UUID]) -> Iterator[ConfirmRemove]:
    """`removed` by an earlier pass; `busy` are those for which something that began before is still under way."""
    for topic_id in removed:
        if topic_id not in busy:
            yield ConfirmRemove(topic_id)
