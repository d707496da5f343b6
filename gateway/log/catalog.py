"""The node's copy of the topics, so that no produce or fetch asks Postgres what it knows already.

The one idea: the catalog of one revision, brought to the next by what changed between them. Postgres gives every change
a revision in the order of commits; this copy asks for what is newer than it knows, is filled by a read-through when a
name is missing, and is told at once of what this node's own admin requests did. News may arrive twice and in any order:
of two states of a topic the one with the greater revision stands, and an id that is gone never comes back.

It does not create topics, and does not decide which configs are legal.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import structlog

from gateway.config import topic as topic_configs
from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_stored
from gateway.config.topic import TopicConfig
from gateway.log.catalog_changes import (
    ConfirmRemove,
    Held,
    InstallOwned,
    InstallRouted,
    Operation,
    RemoveRouted,
    decide,
    decide_confirmed,
    decide_owned,
)
from gateway.log.tail import Tail
from gateway.log.topic_names import RenderedNames, rendered, why_illegal
from gateway.net.pieces import in_pieces
from gateway.quotas.limits import Quotas
from gateway.security.acls import Acls
from storage.topics import ALL_BROKERS, TopicStore
from storage.types import Assignment, Partition, PartitionKey, Topic

logger = structlog.get_logger(__name__)

UNKNOWN_FOR_S = 1.0
"""How long a name that Postgres did not know is not looked up again by itself."""

MAX_UNKNOWN = 10_000
"""Bound on remembered unknown names: clients choose them."""

MAX_LOOKUPS = 16
"""Unknown topics of one request that are looked up one by one; more cost one look at what has changed."""

MAX_GONE = 10_000
"""Ids of deleted topics that are remembered, against news that was read before the deletion and arrives after it."""

Key = TypeVar("Key", str, UUID)

Leads = Callable[[Partition], bool]

NAMES: Mapping[type[Operation], str] = {
    InstallRouted: "install_routed",
    InstallOwned: "install_owned",
    RemoveRouted: "remove_routed",
    ConfirmRemove: "confirm_remove",
}
DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A topic that this node refuses by now, and what may still come to its partitions."""

    keys: Sequence[PartitionKey]
    owned: int
    settled: Sequence[Callable[[], bool]]


def _leads_all(partition: Partition) -> bool:
    return True


def _at_once() -> bool:
    return True


def _assignments(topic: Topic) -> list[tuple[int, Assignment]]:
    return [(part.partition_index, part.assignment) for part in topic.partitions if part.assignment is not None]


class Catalog:
    """Lookups are synchronous and O(1); `resolve` and its kin ask Postgres about what is missing, once for all."""

    def __init__(self, store: TopicStore, tail: Tail, broker: BrokerConfig) -> None:
        self._store = store
        self._tail = tail
        self._broker = broker
        self._broker_name: Callable[[], str] | None = None
        self._stored_broker_configs: Mapping[str, Mapping[str, str]] = {}
        self._followed_as: str | None = None
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[UUID, Held] = {}
        self._changed_topics: dict[UUID, None] = {}
        self._unplaced: dict[UUID, None] = {}
        self._placed_by: Leads | None = None
        self._tombstones: dict[UUID, Tombstone] = {}
        self._confirmable: Sequence[UUID] = ()
        self._configs: dict[UUID, tuple[Topic, TopicConfig]] = {}
        self._by_rendered: dict[str, str] = {}
        self.quotas = Quotas()
        """Which limit holds for whom. Another object when one has changed."""
        self.acls = Acls()
        """Another object when one has changed."""
        self.follows_acls = False
        """Whether a name that Postgres is asked about is known only with the ACLs that were made before it. Costs each
        of those a look at what has changed; for a node with an authorizer."""
        self._revision = 0
        self._gone: OrderedDict[UUID, None] = OrderedDict()
        self._look: asyncio.Task[None] | None = None
        self._next_look: asyncio.Task[None] | None = None
        self._looking_for_new: asyncio.Task[None] | None = None
        """Has not asked yet."""
        self._comparing: asyncio.Task[None] | None = None
        """Has asked."""
        self.leads: Callable[[], Leads] = lambda: _leads_all
        """Whether clients of a partition are pointed to this node; another object when the live nodes are others."""
        self.settled: Callable[[PartitionKey], Callable[[], bool]] = lambda key: _at_once
        """Of a partition: what tells whether all appends that are under way for it have ended."""
        self.removed: Callable[[Topic], object] = lambda topic: None
        """Called with each topic that is gone."""
        self.performed: Counter[str] = Counter()
        """Operations by their names, and those that found nothing to do ("discarded")."""
        self.owned = 0
        """Partitions whose clients are pointed to this node, as far as its last pass has decided."""
        self.count_materialised: Callable[[int], object] = lambda partitions: None
        """Called with the number of partitions that this node has come to own."""
        self.count_removed: Callable[[int], object] = lambda partitions: None
        """Called with the number of those that it owned and of which it has dropped the last."""
        self.assigned: object = None
        """Another object whenever other nodes are named for partitions that were known."""
        self.assigned_s = float("-inf")
        """When (loop time) this node saw that last."""
        self._lookups: dict[str | UUID, asyncio.Task[Topic | None]] = {}
        self._unknown: OrderedDict[str | UUID, float] = OrderedDict()
        self._group_configs: Mapping[str, Mapping[str, str]] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called whenever topics or settings changed, once or more often for changes that came together."""

    async def serve_as(self, broker_name: Callable[[], str]) -> None:
        """Loads everything; from here on what was set for the broker of that id alone applies too. Raises
        StorageError."""
        self._broker_name = broker_name
        await self.refresh_if_changed()
        await self.settle()

    # --- what is known --------------------------------------------------------------------------------------------

    def get(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def get_by_id(self, topic_id: UUID) -> Topic | None:
        held = self._by_id.get(topic_id)
        return None if held is None else held.topic

    def topics(self) -> list[Topic]:
        return list(self._by_name.values())

    def take_changed_topics(self) -> Iterable[UUID]:
        """Ids of those that came, changed or went since this was called last."""
        changed, self._changed_topics = self._changed_topics, {}
        return changed

    @property
    def held(self) -> Mapping[UUID, Held]:
        """Topics with the partitions of each that this node owns. Not to be changed."""
        return self._by_id

    @property
    def removed_ids(self) -> Sequence[UUID]:
        """Topics that are refused by now, and of which something may be left."""
        return list(self._tombstones)

    @property
    def revision(self) -> int:
        """All changes up to this one are known."""
        return self._revision

    def rendered_names(self) -> RenderedNames:
        """The topics' names as metrics render them."""
        return RenderedNames(self._by_rendered)

    @property
    def broker(self) -> BrokerConfig:
        """The broker's settings, which a topic's own override."""
        return self._broker

    def set_broker(self, broker: BrokerConfig) -> None:
        """Dynamic broker settings have changed; every topic's effective config follows."""
        self._broker = broker
        self._configs.clear()
        self.changed()

    @property
    def group_configs(self) -> Mapping[str, Mapping[str, str]]:
        """What was set on single groups, by group id. Never mutated."""
        return self._group_configs

    def set_group_configs(self, configs: Mapping[str, Mapping[str, str]]) -> None:
        """What is set on single groups has changed."""
        if configs != self._group_configs:
            self._group_configs = configs
            self.changed()

    def config(self, topic: Topic) -> TopicConfig:
        """The topic's effective config: what was set on it, else the broker's default."""
        cached = self._configs.get(topic.topic_id)
        if cached is not None and cached[0] is topic:
            return cached[1]
        config = topic_configs.effective(topic.configs, self._broker)
        self._configs[topic.topic_id] = (topic, config)
        return config

    # --- asking Postgres ------------------------------------------------------------------------------------------

    async def resolve(self, name: str) -> Topic | None:
        """The topic, from Postgres if it is not known here. All who miss one name at once share one query, and a name
        that does not exist is asked for at most once in UNKNOWN_FOR_S. StorageUnavailable if Postgres is away."""
        topic = self._by_name.get(name)
        if topic is not None or why_illegal(name) is not None:
            return topic
        if self._is_unknown(name):
            await self._look_for_new()
            return self._by_name.get(name)
        return await self._ask_once(name, self._store.find)

    async def resolve_id(self, topic_id: UUID) -> Topic | None:
        """The topic of an id; as `resolve`."""
        topic = self.get_by_id(topic_id)
        if topic is not None:
            return topic
        if self._is_unknown(topic_id):
            await self._look_for_new()
            return self.get_by_id(topic_id)
        return await self._ask_once(topic_id, self._store.find_by_id)

    async def resolve_all(self, names: Iterable[str]) -> None:
        """Ask Postgres about all of these that are not known here, at a cost that does not follow their number;
        `get` then has those that exist. StorageUnavailable if Postgres is away."""
        missing: set[str] = set()
        async for name in in_pieces(names):
            if name not in self._by_name and why_illegal(name) is None:
                missing.add(name)
                if len(missing) > MAX_LOOKUPS:
                    await self._look_for_new()
                    return
        for name in missing:
            await self.resolve(name)

    async def resolve_all_ids(self, topic_ids: Iterable[UUID]) -> None:
        """The topics of ids, for `get_by_id`; as `resolve_all`."""
        missing: set[UUID] = set()
        async for topic_id in in_pieces(topic_ids):
            if topic_id not in self._by_id:
                missing.add(topic_id)
                if len(missing) > MAX_LOOKUPS:
                    await self._look_for_new()
                    return
        for topic_id in missing:
            await self.resolve_id(topic_id)

    async def refresh_if_changed(self) -> None:
        """Be at least as new as the moment of the call, for one query and what has changed. Callers during a look,
        which may have read Postgres before they asked, share the one after it."""
        if self._look is None:
            self._look = self._start_look(None)
            look = self._look
        elif self._next_look is None:
            look = self._next_look = self._start_look(self._look)
        else:
            look = self._next_look
        await asyncio.shield(look)

    async def is_converged(self) -> bool:
        """Whether nothing has changed and nothing is left over: a look at the committed revision alone, a fraction of
        what it costs to ask for changes. Raises StorageError."""
        if self.deferred or self.leads() is not self._placed_by or self._own_name() != self._followed_as:
            return False
        return await self._store.revision() == self._revision

    async def settle(self) -> None:
        """What nobody who asks for the newest state has to wait for: which partitions this node owns, and the end of
        what is removed. Called by one pass at a time."""
        await self._place()
        # Of an earlier pass: whoever had looked the topic up before it was removed has had the time between the two.
        busy = {topic_id for topic_id in self._confirmable if not self._is_settled(topic_id)}
        await self._stage(list(decide_confirmed(self._confirmable, busy)))
        self._confirmable = self.removed_ids

    # --- told by this node's own admin requests -------------------------------------------------------------------

    def apply(self, topic: Topic) -> bool:
        """A state of the topic, from whoever read it: it stands unless a later one is known. Whether it does."""
        held = self._by_id.get(topic.topic_id)
        if topic.topic_id in self._gone or (held is not None and held.topic.changed_revision >= topic.changed_revision):
            return False
        former = self._by_name.get(topic.name)
        if former is not None and former.topic_id != topic.topic_id:
            if former.created_revision > topic.created_revision:
                return False
            self.remove(former.topic_id)
        if held is not None and _assignments(held.topic) != _assignments(topic):
            self.assigned, self.assigned_s = object(), asyncio.get_running_loop().time()
        self._changed_topics[topic.topic_id] = None
        self._by_name[topic.name] = topic
        # Who owned it still does: partitions are only added.
        self._by_id[topic.topic_id] = Held(topic, None if held is None else held.owned)
        self._unplaced[topic.topic_id] = None
        self._by_rendered.setdefault(rendered(topic.name), topic.name)
        self._unknown.pop(topic.name, None)
        self._unknown.pop(topic.topic_id, None)
        self.changed()
        return True

    def remove(self, topic_id: UUID) -> bool:
        """The topic is deleted: its parked fetches end. What is under way for it may still leave something behind,
        which a later pass drops. Whether it was held."""
        self._remember_gone(topic_id)
        held = self._by_id.pop(topic_id, None)
        if held is None:
            return False
        topic = held.topic
        self._changed_topics[topic_id] = None
        self.owned -= len(held.owned or ())
        self._unplaced.pop(topic_id, None)
        self._configs.pop(topic_id, None)
        if self._by_name.get(topic.name) is topic:
            del self._by_name[topic.name]
        if self._by_rendered.get(rendered(topic.name)) == topic.name:
            del self._by_rendered[rendered(topic.name)]
        keys = [partition.partition_key for partition in topic.partitions]
        self._tombstones[topic_id] = Tombstone(keys, len(held.owned or ()), [self.settled(key) for key in keys])
        self._forget_tails(keys)
        self.removed(topic)
        self.changed()
        return True

    def perform(self, operation: Operation) -> None:
        """Synchronous and idempotent, and nobody else changes what is held; checked against what is held by now, since
        the operation was decided on before the last await."""
        match operation:
            case InstallRouted(topic):
                done = self.apply(topic)
            case InstallOwned(topic, owned):
                done = self._own(topic, owned)
            case RemoveRouted(topic_id):
                done = self.remove(topic_id)
            case ConfirmRemove(topic_id):
                done = self._confirm(topic_id)
        self.performed[NAMES[type(operation)] if done else DISCARDED] += 1

    def _own(self, topic: Topic, owned: frozenset[int]) -> bool:
        held = self._by_id.get(topic.topic_id)
        if held is None or held.topic is not topic:
            return False
        before: frozenset[int] = held.owned or frozenset()
        self._by_id[topic.topic_id] = Held(topic, owned)
        self._unplaced.pop(topic.topic_id, None)
        self.owned += len(owned) - len(before)
        self.count_materialised(len(owned - before))
        return True

    def _confirm(self, topic_id: UUID) -> bool:
        tombstone = self._tombstones.pop(topic_id, None)
        if tombstone is None:
            return False
        self._forget_tails(tombstone.keys)
        self.count_removed(tombstone.owned)
        return True

    def _forget_tails(self, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            self._tail.forget(key)

    @property
    def deferred(self) -> int:
        """What the last pass has left to a later one."""
        return len(self._unplaced) + len(self._tombstones)

    def reset(self) -> None:
        """Nothing that is known is true any more; the next look reads everything."""
        for topic in self.topics():
            self.remove(topic.topic_id)
        # The same topics may come back.
        self._gone.clear()
        self._tombstones.clear()
        self._unplaced.clear()
        self._unknown.clear()
        self._revision = 0

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _look_for_new(self) -> None:
        """A topic that was unknown a moment ago may have been created since. However many ask for however many names,
        Postgres answers one question at a time: whoever asks in the meantime shares the next. While nothing has changed
        that is a look at the committed revision alone."""
        if self._looking_for_new is None:
            self._looking_for_new = asyncio.get_running_loop().create_task(self._compare_revisions(self._comparing))
            self._looking_for_new.add_done_callback(self._looked_for_new)
        await asyncio.shield(self._looking_for_new)

    async def _compare_revisions(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        # From here on nobody else may share: what Postgres reads may be older than their question.
        self._comparing, self._looking_for_new = self._looking_for_new, None
        if await self._store.revision() != self._revision:
            await self.refresh_if_changed()

    def _looked_for_new(self, task: asyncio.Task[None]) -> None:
        if self._looking_for_new is task:
            self._looking_for_new = None
        if self._comparing is task:
            self._comparing = None
        if not task.cancelled():
            task.exception()

    async def _ask_once(self, key: Key, find: Callable[[Key], Awaitable[Topic | None]]) -> Topic | None:
        """One query for all who miss `key` at this moment."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.get_running_loop().create_task(self._look_up(key, find))
            lookup.add_done_callback(lambda task: self._looked_up(key, task))
        return await asyncio.shield(lookup)

    async def _look_up(self, key: Key, find: Callable[[Key], Awaitable[Topic | None]]) -> Topic | None:
        found = await find(key)
        if found is not None and self.follows_acls:
            await self.refresh_if_changed()
        # This node may have created or deleted it during the query, and then knows better.
        known = self._by_name.get(key) if isinstance(key, str) else self.get_by_id(key)
        if known is not None or found is None:
            if known is None:
                self._remember_unknown(key)
            return known
        self.apply(found)
        return found

    def _looked_up(self, key: str | UUID, task: asyncio.Task[Topic | None]) -> None:
        del self._lookups[key]
        if not task.cancelled():
            # Whoever waited may be gone; asking keeps the loop from reporting the error as lost.
            task.exception()

    def _start_look(self, after: asyncio.Task[None] | None) -> asyncio.Task[None]:
        look = asyncio.get_running_loop().create_task(self._follow(after))
        look.add_done_callback(self._looked)
        return look

    def _looked(self, look: asyncio.Task[None]) -> None:
        self._look, self._next_look = self._next_look, None
        if not look.cancelled():
            # Whoever waited may be gone; asking keeps the loop from reporting the error as lost.
            look.exception()

    async def _follow(self, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        changes = await self._store.changes(self._revision)
        # Before topics: nobody may find one here and be allowed what was denied before it was made.
        if changes.acls is not None:
            self.acls = await Acls.read(changes.acls)
        for topic_id in changes.deleted:
            self._remember_gone(topic_id)
        await self._stage(list(decide(self._by_id, changes)))
        if changes.broker_configs is not None:
            self._stored_broker_configs = changes.broker_configs
        name = self._own_name()
        if changes.broker_configs is not None or name != self._followed_as:
            self._follow_broker(name)
        if changes.group_configs is not None:
            self.set_group_configs(changes.group_configs)
        if changes.client_quotas is not None:
            self.quotas = await Quotas.read(changes.client_quotas)
        if changes.revision != self._revision:
            self._revision = changes.revision
            self.changed()

    async def _stage(self, operations: Iterable[Operation]) -> None:
        async for operation in in_pieces(operations):
            self.perform(operation)

    async def _place(self) -> None:
        """Decides which partitions this node owns: of topics that are new to it or have changed, of all when the live
        nodes are others."""
        leads = self.leads()
        topic_ids = list(self._unplaced if leads is self._placed_by else self._by_id)
        async for topic_id in in_pieces(topic_ids):
            held = self._by_id.get(topic_id)
            if held is None:
                continue
            operation = decide_owned(held, leads)
            if operation is not None:
                self.perform(operation)
            else:
                self._unplaced.pop(topic_id, None)
        self._placed_by = leads

    def _is_settled(self, topic_id: UUID) -> bool:
        tombstone = self._tombstones.get(topic_id)
        return tombstone is None or all(settled() for settled in tombstone.settled)

    def _own_name(self) -> str | None:
        return None if self._broker_name is None else self._broker_name()

    def _follow_broker(self, name: str | None) -> None:
        self._followed_as = name
        dynamic = self._stored_broker_configs.get(ALL_BROKERS, {})
        own: Mapping[str, str] = self._stored_broker_configs.get(name, {}) if name is not None else {}
        if dynamic == self._broker.dynamic and own == self._broker.own:
            return
        broker, refused = parse_stored(self._broker.static, dynamic, own)
        for error in refused.values():
            # Stored by a node of another release: the others are in force.
            logger.error("stored broker setting refused", error=str(error))
        if (broker.dynamic, broker.own) != (self._broker.dynamic, self._broker.own):
            self.set_broker(broker)

    def _remember_gone(self, topic_id: UUID) -> None:
        self._gone[topic_id] = None
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _is_unknown(self, key: str | UUID) -> bool:
        until_s = self._unknown.get(key)
        return until_s is not None and asyncio.get_running_loop().time() < until_s

    def _remember_unknown(self, key: str | UUID) -> None:
        self._unknown[key] = asyncio.get_running_loop().time() + UNKNOWN_FOR_S
        self._unknown.move_to_end(key)
        while len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)
