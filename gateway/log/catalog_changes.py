"""The operations that lead a node from the topics it holds to the committed ones: values in, operations out.

The one idea: compare states, not events. A topic is known by its id and its revisions. So a topic that was deleted and
created again under its name is another topic, and changes that are read twice, late or in another order have no effect.
This module knows neither Postgres nor the event loop. `Catalog.perform` carries operations out one by one, and checks
each against the state of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from storage.types import CatalogChanges, Partition, Topic


@dataclass(frozen=True, slots=True)
class InstallRouted:
    """A topic not held here, or held in an earlier state: its name, id, partitions and their routing become known."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class InstallOwned:
    """Clients of these partitions, and of no others of the topic, are directed to this node from now on."""

    topic: Topic
    owned: frozenset[int]


@dataclass(frozen=True, slots=True)
class RemoveRouted:
    """A topic held here but no longer committed: the node refuses it from now on, and ends what waits for its
    partitions."""

    topic_id: UUID


@dataclass(frozen=True, slots=True)
class ConfirmRemove:
    """A removed topic for which no work in progress can reach its partitions any more: its last state is dropped."""

    topic_id: UUID


Operation = InstallRouted | InstallOwned | RemoveRouted | ConfirmRemove


@dataclass(frozen=True, slots=True)
class Held:
    """A topic with the state that this node holds."""

    topic: Topic
    owned: frozenset[int] | None = None
    """Indexes of partitions whose clients are directed here; None: not decided for this state of the topic."""


def decide(held: Mapping[UUID, Held], changes: CatalogChanges) -> Iterator[RemoveRouted | InstallRouted]:
    """Yield removals first, so that a name is free for the topic that has it now."""
    if changes.whole:
        committed = {topic.topic_id for topic in changes.topics}
        for each in held.values():
            # While the answer was read, this node has created a topic that is newer than the answer.
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
    """Decide which partitions of the topic this node owns. `leads` tells if clients of a partition are directed to
    this node, judged by the present live nodes."""
    topic = held.topic
    owned = frozenset(part.partition_index for part in topic.partitions if leads(part))
    return None if owned == held.owned else InstallOwned(topic, owned)


def decide_confirmed(removed: Collection[UUID], busy: Collection[UUID]) -> Iterator[ConfirmRemove]:
    """Yield a confirmation for each topic of `removed`, by an earlier pass, except the `busy` ones, for which work
    that began before is still in progress."""
    for topic_id in removed:
        if topic_id not in busy:
            yield ConfirmRemove(topic_id)
