"""The node's copy of the topics, so that no produce or fetch asks Postgres for what the node knows already.

The one idea: the catalog holds one revision and moves to the next by applying the changes between them. Postgres gives
every change a revision in the order of commits. This copy asks for changes newer than its revision, reads a missing
name through, and applies this node's own admin requests at once. Changes may arrive twice and in any order: of two
states of a topic, the one with the greater revision stands, and a removed id never comes back.

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
from gateway.net.shared_read import SharedRead, retrieve_error
from gateway.quotas.limits import Quotas
from gateway.security.acls import Acls
from storage.errors import StorageUnavailable
from storage.topics import ALL_BROKERS, TopicStore
from storage.types import Assignment, Partition, PartitionKey, Topic

logger = structlog.get_logger(__name__)

MAX_LOOKUPS = 16
"""If one request has more unknown topics than this, one query for all changes replaces the single look-ups."""

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
    """A topic that this node already refuses, and what may still arrive for its partitions."""

    keys: Sequence[PartitionKey]
    owned: int
    settled: Sequence[Callable[[], bool]]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Limits on the names and ids that are remembered because Postgres did not know them."""

    for_s: float = 1.0
    """For how long a missing name is not looked up again."""
    count: int = 10_000
    """Maximal number of remembered names and ids. There is a limit because clients choose them."""


UNKNOWN = Unknown()


def _leads_all(_partition: Partition) -> bool:
    return True


def _at_once() -> bool:
    return True


def _assignments(topic: Topic) -> list[tuple[int, Assignment]]:
    return [(part.partition_index, part.assignment) for part in topic.partitions if part.assignment is not None]


class Catalog:
    """The topics by name and id. Lookups are synchronous and O(1). `resolve` and its kin ask Postgres about missing
    topics, once for all callers."""

    def __init__(
        self,
        store: TopicStore,
        tail: Tail,
        broker: BrokerConfig,
        *,
        settled: Callable[[PartitionKey], Callable[[], bool]] = lambda _key: _at_once,
        removed: Sequence[Callable[[Topic], object]] = (),
        count_materialised: Callable[[int], object] = lambda _partitions: None,
        count_removed: Callable[[int], object] = lambda _partitions: None,
        unknown: Unknown = UNKNOWN,
    ) -> None:
        """`settled` returns a function that reports whether all appends in progress for a partition have ended.
        Each of `removed` is called with each removed topic. `count_materialised` receives the number of partitions that
        this node has come to own, `count_removed` the number of owned partitions whose last state it has dropped.
        `unknown` bounds what is remembered of unknown topics.
        """
        self._store = store
        self._tail = tail
        self._broker = broker
        self._unknown_bounds = unknown
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
        """The limits that apply to each client. Replaced by another object when a limit has changed."""
        self.acls = Acls()
        """ACLs of the cluster. When an ACL changes, a new object replaces this one."""
        self._revision = 0
        self._gone: OrderedDict[UUID, None] = OrderedDict()
        self._changes = SharedRead(self._follow)
        self._new_topics = SharedRead(self._compare_revisions)
        """Looks for topics and partitions that were created after they had been found unknown. While nothing has
        changed, it only reads the committed revision.
        """
        self._leads: Callable[[], Leads] = lambda: _leads_all
        self._settled = settled
        self._removed = removed
        self.performed: Counter[str] = Counter()
        """Operations by their names, and those that found nothing to do ("discarded")."""
        self.owned = 0
        """Partitions whose clients are directed to this node, as of its last pass."""
        self._count_materialised = count_materialised
        self._count_removed = count_removed
        self.assigned: object = None
        """Replaced by another object whenever other nodes are named for known partitions."""
        self.assigned_s = float("-inf")
        """Loop time at which this node last replaced `assigned`."""
        self._lookups: dict[str | UUID, asyncio.Task[Topic | None]] = {}
        self._unknown: OrderedDict[str | UUID, float] = OrderedDict()
        self._group_configs: Mapping[str, Mapping[str, str]] = {}
        self._listeners: list[Callable[[], None]] = []

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever topics or settings have changed from now on, once or more often for changes that
        arrived together."""
        self._listeners.append(changed)

    def _changed(self) -> None:
        for changed in self._listeners:
            changed()

    def place_by(self, leads: Callable[[], Leads]) -> None:
        """Own partitions by this rule from the next pass on; until then this node owns all. `leads` returns a function
        that tells if clients of a partition are directed to this node: another object when the live nodes change."""
        self._leads = leads

    async def serve_as(self, broker_name: Callable[[], str]) -> None:
        """Load everything. From here on, settings for the broker of that id alone apply too. Raise StorageError."""
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
        """Return the ids of topics that appeared, changed or disappeared since the last call."""
        changed, self._changed_topics = self._changed_topics, {}
        return changed

    @property
    def held(self) -> Mapping[UUID, Held]:
        """Topics with the partitions of each that this node owns. Not to be changed."""
        return self._by_id

    @property
    def removed_ids(self) -> Sequence[UUID]:
        """Ids of topics that are already refused and of which something may be left."""
        return list(self._tombstones)

    @property
    def revision(self) -> int:
        """Revision up to which all changes are known."""
        return self._revision

    def rendered_names(self) -> RenderedNames:
        """Names of topics in the form that metrics use."""
        return RenderedNames(self._by_rendered)

    @property
    def broker(self) -> BrokerConfig:
        """The broker's settings. A topic's own settings override them."""
        return self._broker

    def set_broker(self, broker: BrokerConfig) -> None:
        """Replace the dynamic broker settings. Every topic's effective config follows."""
        self._broker = broker
        self._configs.clear()
        self._changed()

    @property
    def group_configs(self) -> Mapping[str, Mapping[str, str]]:
        """Settings of single groups, by group id. Never mutated."""
        return self._group_configs

    def set_group_configs(self, configs: Mapping[str, Mapping[str, str]]) -> None:
        """Replace the settings of single groups."""
        if configs != self._group_configs:
            self._group_configs = configs
            self._changed()

    def config(self, topic: Topic) -> TopicConfig:
        """Return the topic's effective config: its own settings, else the broker's defaults."""
        cached = self._configs.get(topic.topic_id)
        if cached is not None and cached[0] is topic:
            return cached[1]
        config = topic_configs.effective(topic.configs, self._broker)
        self._configs[topic.topic_id] = (topic, config)
        return config

    # --- asking Postgres ------------------------------------------------------------------------------------------

    async def resolve(self, name: str) -> Topic | None:
        """Return the topic, from Postgres if it is not known here. All concurrent callers that miss one name share
        one query, and a name that does not exist is asked for at most once in `Unknown.for_s`. Raise
        StorageUnavailable if Postgres is away."""
        topic = self._by_name.get(name)
        if topic is not None or why_illegal(name) is not None:
            return topic
        if self._is_unknown(name):
            await self._new_topics.get()
            return self._by_name.get(name)
        return await self._ask_once(name, self._store.find)

    async def resolve_id(self, topic_id: UUID) -> Topic | None:
        """Return the topic with this id, in the same way as `resolve`."""
        topic = self.get_by_id(topic_id)
        if topic is not None:
            return topic
        if self._is_unknown(topic_id):
            await self._new_topics.get()
            return self.get_by_id(topic_id)
        return await self._ask_once(topic_id, self._store.find_by_id)

    async def resolve_all(self, names: Iterable[str]) -> None:
        """Ask Postgres about all of these that are not known here, at a cost independent of their number. `get` then
        returns those that exist. Raise StorageUnavailable if Postgres is away."""
        missing: set[str] = set()
        async for name in in_pieces(names):
            if name not in self._by_name and why_illegal(name) is None:
                missing.add(name)
                if len(missing) > MAX_LOOKUPS:
                    await self._new_topics.get()
                    return
        for name in missing:
            await self.resolve(name)

    async def resolve_all_ids(self, topic_ids: Iterable[UUID]) -> None:
        """Do the same as `resolve_all` for ids, for `get_by_id`."""
        missing: set[UUID] = set()
        async for topic_id in in_pieces(topic_ids):
            if topic_id not in self._by_id:
                missing.add(topic_id)
                if len(missing) > MAX_LOOKUPS:
                    await self._new_topics.get()
                    return
        for topic_id in missing:
            await self.resolve_id(topic_id)

    async def refresh_if_changed(self) -> None:
        """Become at least as new as the moment of the call, at the cost of one query and the changes."""
        await self._changes.get()

    async def catch_up(self) -> None:
        """Do the same as `refresh_if_changed`, but while nothing has changed only read the committed revision."""
        await self._new_topics.get()

    async def is_converged(self) -> bool:
        """Return True if nothing has changed and no work is left. This only reads the committed revision, at a fraction
        of the cost of reading changes. Raise StorageError.
        """
        if self.deferred or self._leads() is not self._placed_by or self._own_name() != self._followed_as:
            return False
        return await self._store.revision() == self._revision

    async def settle(self) -> None:
        """Do the part of a refresh that readers need not wait for: decide which partitions this node owns, and
        finish removals. Called by one pass at a time."""
        await self._place()
        # These are from an earlier pass. A caller that had looked the topic up before its removal has had the time
        # between the two passes.
        busy = {topic_id for topic_id in self._confirmable if not self._is_settled(topic_id)}
        await self._stage(list(decide_confirmed(self._confirmable, busy)))
        self._confirmable = self.removed_ids

    # --- told by this node's own admin requests -------------------------------------------------------------------

    def apply(self, topic: Topic) -> bool:
        """Apply a state of the topic unless a later one is known. Return True if it was applied."""
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
        # Ownership stays, because partitions are only added.
        self._by_id[topic.topic_id] = Held(topic, None if held is None else held.owned)
        self._unplaced[topic.topic_id] = None
        self._by_rendered.setdefault(rendered(topic.name), topic.name)
        self._unknown.pop(topic.name, None)
        self._unknown.pop(topic.topic_id, None)
        self._changed()
        return True

    def remove(self, topic_id: UUID) -> bool:
        """Delete the topic and end its parked fetches. Work in progress for it may still leave something behind,
        which a later pass drops. Return True if the topic was held."""
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
        self._tombstones[topic_id] = Tombstone(keys, len(held.owned or ()), [self._settled(key) for key in keys])
        self._forget_tails(keys)
        for removed in self._removed:
            removed(topic)
        self._changed()
        return True

    def perform(self, operation: Operation) -> None:
        """Carry out one operation. This is synchronous and idempotent, and the only place that changes what is held.
        It checks against the present state, because the operation was decided on before the last await."""
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
        self._count_materialised(len(owned - before))
        return True

    def _confirm(self, topic_id: UUID) -> bool:
        tombstone = self._tombstones.pop(topic_id, None)
        if tombstone is None:
            return False
        self._forget_tails(tombstone.keys)
        self._count_removed(tombstone.owned)
        return True

    def _forget_tails(self, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            self._tail.forget(key)

    @property
    def deferred(self) -> int:
        """Amount of work that the last pass has left to later passes."""
        return len(self._unplaced) + len(self._tombstones)

    def reset(self) -> None:
        """Forget everything, because none of it is true any more. The next look reads everything."""
        for topic in self.topics():
            self.remove(topic.topic_id)
        # The same topics may be returned again. Changes that were read before belong to the former object.
        self._gone = OrderedDict()
        self._tombstones.clear()
        self._unplaced.clear()
        self._unknown.clear()
        self._revision = 0

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _compare_revisions(self) -> None:
        if await self._store.revision() != self._revision:
            await self.refresh_if_changed()

    async def _ask_once(self, key: Key, find: Callable[[Key], Awaitable[Topic | None]]) -> Topic | None:
        """Run one query for all concurrent callers that miss `key`."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.get_running_loop().create_task(self._look_up(key, find))
            lookup.add_done_callback(lambda task: self._looked_up(key, task))
        return await asyncio.shield(lookup)

    async def _look_up(self, key: Key, find: Callable[[Key], Awaitable[Topic | None]]) -> Topic | None:
        if await find(key) is not None:
            # Read all changes, so that the topic becomes known together with the ACLs that were created before it. And
            # groups are stored with the revision of this node. A coordinator that knows less would revoke the topic.
            await self.refresh_if_changed()
        known = self._by_name.get(key) if isinstance(key, str) else self.get_by_id(key)
        if known is None:
            self._remember_unknown(key)
        return known

    def _looked_up(self, key: str | UUID, task: asyncio.Task[Topic | None]) -> None:
        del self._lookups[key]
        retrieve_error(task)

    async def _follow(self) -> None:
        gone = self._gone
        changes = await self._store.changes(self._revision)
        # ACLs before topics: otherwise a client could find a topic here and be allowed what was denied before the topic
        # was made.
        if changes.acls is not None:
            self.acls = await Acls.read(changes.acls)
        self._require(gone)
        for topic_id in changes.deleted:
            self._remember_gone(topic_id)
        await self._stage(list(decide(self._by_id, changes)))
        quotas = self.quotas if changes.client_quotas is None else await Quotas.read(changes.client_quotas)
        self._require(gone)
        self.quotas = quotas
        if changes.broker_configs is not None:
            self._stored_broker_configs = changes.broker_configs
        name = self._own_name()
        if changes.broker_configs is not None or name != self._followed_as:
            self._follow_broker(name)
        if changes.group_configs is not None:
            self.set_group_configs(changes.group_configs)
        if changes.revision != self._revision:
            self._revision = changes.revision
            self._changed()

    async def _stage(self, operations: Iterable[Operation]) -> None:
        gone = self._gone
        async for operation in in_pieces(operations):
            self._require(gone)
            self.perform(operation)

    def _require(self, gone: object) -> None:
        """Raise StorageUnavailable if everything was forgotten since the changes were read."""
        if gone is not self._gone:
            raise StorageUnavailable("another history of the database began while its changes were read")

    async def _place(self) -> None:
        """Decide which partitions this node owns: for new and changed topics, or for all topics if the live nodes
        have changed."""
        leads = self._leads()
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
            # A node of another release has stored this setting. The other settings apply.
            logger.error("stored broker setting refused: change it by kafka-configs", error=str(error))
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
        self._unknown[key] = asyncio.get_running_loop().time() + self._unknown_bounds.for_s
        self._unknown.move_to_end(key)
        while len(self._unknown) > self._unknown_bounds.count:
            self._unknown.popitem(last=False)
