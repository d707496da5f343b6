"""The catalog: topics, their partitions and configs, and the cluster-wide settings.

The one idea: every change takes the next revision under one lock. So a node that remembers the catalog of one revision
asks for the changes since then, in one query whose cost follows the changes. Deleting hides a topic at once. Its
name is free when no other node serves it any more, and its rows go later (`storage/deletion.py`).

It does not check names and config values; the gateway does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import cast
from uuid import UUID

from storage.errors import StorageError, StorageUnavailable
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.text import loaded, stored
from storage.turns import in_turns, json_elements
from storage.types import (
    DEFAULT_NAME,
    Acl,
    Assignment,
    CatalogChanges,
    ClientQuota,
    NewTopic,
    Partition,
    PartitionKey,
    Refusal,
    Registration,
    Topic,
    unregistered,
)

NAME_PATIENCE_S = 15.0
"""Longer than a node that is cut off from Postgres stays registered by default."""

FIRST_LOOK_S = 0.01
LAST_LOOK_S = 0.5
"""First and longest interval between two attempts of such a creation. The interval doubles."""

_PARTITIONS_PER_STEP = 2_000
"""Partitions built without yielding to the event loop: a few milliseconds."""

_TOPIC_AS_PARTITIONS = 4
"""Number of partitions that take as long to build as a topic."""

_ACLS_PER_STEP = 500
"""ACLs created or deleted by one statement: some milliseconds of Python."""

_TOPICS_PER_STEP = 100
"""Topics created by one statement; other requests have their turn behind each."""


def _topic(row: Row) -> Topic:
    configs = cast(dict[str, str], json.loads(row["configs"]))
    named = cast(dict[str, tuple[int | None, list[int]]], json.loads(row["assignments"] or "{}"))
    assigned = {int(index): Assignment(tuple(replicas), leader) for index, (leader, replicas) in named.items()}
    topic_id, count = cast(UUID, row["topic_id"]), len(row["partition_keys"])
    return Topic(
        topic_id=topic_id,
        name=row["name"],
        internal=row["internal"],
        configs={name: loaded(value) for name, value in configs.items()},
        partitions=tuple(
            Partition(index, PartitionKey(key), leader_epoch, assigned.get(index), topic_id, count)
            for index, (key, leader_epoch) in enumerate(
                zip(cast(list[int], row["partition_keys"]), cast(list[int], row["leader_epochs"]), strict=True)
            )
        ),
        created_revision=row["created_revision"],
        changed_revision=row["changed_revision"],
    )


async def _built(row: Row) -> Topic:
    """Build the topic from its row, in a thread if it has many assignments to parse."""
    if row["assignments"] is None or len(row["partition_keys"]) <= _PARTITIONS_PER_STEP:
        return _topic(row)
    return await asyncio.to_thread(_topic, row)


def _steps(topics: Sequence[NewTopic]) -> Iterator[list[NewTopic]]:
    """Split the topics, in order, into pieces of a bounded number of topics and partitions (or one topic of more)."""
    step: list[NewTopic] = []
    partitions = 0
    for topic in topics:
        partitions += topic.partition_count
        if step and (len(step) == _TOPICS_PER_STEP or partitions > _PARTITIONS_PER_STEP):
            yield step
            step, partitions = [], topic.partition_count
        step.append(topic)
    if step:
        yield step


def _configs_text(configs: Mapping[str, str]) -> str:
    return json.dumps({stored(name): stored(value) for name, value in configs.items()})


ALL_BROKERS = ""
"""Key that stands for every broker, like the default resource upstream."""


class TopicStore:
    """Reads and changes the catalog."""

    def __init__(
        self,
        database: Database,
        registration: Callable[[], Registration | None] = unregistered,
        *,
        name_patience_s: float = NAME_PATIENCE_S,
    ) -> None:
        """`registration` returns the registration of this process' node, if it runs one. A creation waits at most
        `name_patience_s` until no other node serves a deleted topic of the same name."""
        self._registration = registration
        self._name_patience_s = name_patience_s
        self._pool = database.hot
        self._control = database.control
        self._guard = database.guard

    async def changes(self, since: int) -> CatalogChanges:
        """Return the changes since the catalog of revision `since`, from one snapshot; everything since 0.

        A large answer is built in steps, so that nothing else on the event loop waits for it.
        """
        asked = self._guard.history
        rows = await self._control.fetch(statement("catalog_changes"), since)
        first = rows[0]
        self._guard.catalog_read(asked, first["revision"])
        topics: list[Topic] = []
        deleted: list[UUID] = []
        built = 0
        for row in rows:
            if row["topic_id"] is None:
                continue
            if row["deleted"]:
                deleted.append(row["topic_id"])
                continue
            topics.append(await _built(row))
            built += _TOPIC_AS_PARTITIONS + len(topics[-1].partitions)
            if built >= _PARTITIONS_PER_STEP:
                built = 0
                await asyncio.sleep(0)
        broker_configs, group_configs = first["broker_configs"], first["group_configs"]
        return CatalogChanges(
            revision=first["revision"],
            whole=first["whole"],
            topics=tuple(topics),
            deleted=tuple(deleted),
            broker_configs=None
            if broker_configs is None
            else {
                broker: {loaded(name): loaded(value) for name, value in configs.items()}
                for broker, configs in json.loads(broker_configs).items()
            },
            group_configs=None if group_configs is None else await _configs_by_name(group_configs),
            client_quotas=None if first["client_quotas"] is None else await _client_quotas(first["client_quotas"]),
            acls=await self._acls() if first["acls_changed"] else None,
        )

    async def _acls(self) -> list[Acl]:
        """Read the ACLs as rows of their own, not one text: a text would be parsed in one go, however many there
        are."""
        rows = await self._control.fetch(statement("acls"))
        return [
            Acl(
                row["resource_type"],
                row["pattern_type"],
                loaded(row["resource_name"]),
                loaded(row["principal"]),
                loaded(row["host"]),
                row["operation"],
                row["permission"],
            )
            async for row in in_turns(rows)
        ]

    async def revision(self) -> int:
        return int(await self._control.fetch_value(statement("catalog_revision")))

    async def find(self, name: str) -> Topic | None:
        row = await self._pool.fetch_row(statement("topic_by_name"), stored(name))
        return None if row is None else await _built(row)

    async def find_by_id(self, topic_id: UUID) -> Topic | None:
        row = await self._pool.fetch_row(statement("topic_by_id"), topic_id)
        return None if row is None else await _built(row)

    async def create(self, topics: Sequence[NewTopic]) -> list[Topic | Refusal]:
        """Create each topic with all its partitions, in one transaction.

        TOPIC_EXISTS and INVALID_PARTITIONS (fewer than one) refuse one topic and leave the others. If a deleted topic
        had the name, wait until no other node serves that topic from memory. If that takes too long, or if Postgres
        fails in the meantime, NAME_IN_USE refuses the topic. If no other topic was created, raise StorageError instead.
        """

        wanted: dict[str, NewTopic] = {}
        for topic in topics:
            if topic.partition_count >= 1:
                wanted.setdefault(topic.name, topic)
        made: dict[str, Topic] = {}
        missing, deadline_s, look_s = list(wanted.values()), time.monotonic() + self._name_patience_s, FIRST_LOOK_S
        while missing:
            try:
                created, served = await self._create(missing)
            except StorageError:
                if made:
                    break  # These topics exist. An error for the whole call would say that they do not.
                raise
            made |= created
            missing = [topic for topic in missing if stored(topic.name) in served]
            if not missing:
                break
            if time.monotonic() > deadline_s:
                if made:
                    break
                raise StorageUnavailable(
                    f"topic {missing[0].name} was deleted, and a live node that does not know it may still serve its"
                    ' records: try again when "sluice nodes" shows that every node follows the catalog'
                )
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, LAST_LOOK_S)
        in_use = {topic.name for topic in missing}
        outcomes: list[Topic | Refusal] = []
        for topic in topics:
            if topic.partition_count < 1:
                outcomes.append(Refusal.INVALID_PARTITIONS)
            elif wanted[topic.name] is topic:
                refusal = Refusal.NAME_IN_USE if topic.name in in_use else Refusal.TOPIC_EXISTS
                outcomes.append(made.get(stored(topic.name), refusal))
            else:
                outcomes.append(Refusal.TOPIC_EXISTS)
        return outcomes

    async def _create(self, wanted: Sequence[NewTopic]) -> tuple[dict[str, Topic], set[str]]:
        """Return the created topics by their stored names, and the stored names that another node may still serve."""
        registration = self._registration()
        node_id = None if registration is None else registration.node_id

        async def create_all(connection: Connection) -> tuple[dict[str, Topic], set[str]]:
            made: dict[str, Topic] = {}
            served = set[str]()
            for some in _steps(wanted):
                rows = await connection.fetch(
                    statement("create_topics"),
                    node_id,
                    [stored(topic.name) for topic in some],
                    [topic.partition_count for topic in some],
                    [_configs_text(topic.configs) for topic in some],
                    [topic.internal for topic in some],
                    [None if topic.replicas is None else json.dumps(topic.replicas) for topic in some],
                )
                for row in rows:
                    if row["topic_id"] is None:
                        served.add(row["name"])
                        continue
                    topic = await _built(row)
                    made[topic.name] = topic
            return made, served

        asked = self._guard.history
        created, served = await self._pool.transact(create_all)
        self._guard.catalog_read(asked, max((topic.created_revision for topic in created.values()), default=0))
        return created, served

    async def delete(self, topic_id: UUID) -> bool:
        """Hide the topic and close its log, at a cost that does not depend on its size. Return False if no live
        topic has the id."""
        return bool(await self._pool.fetch_value(statement("delete_topic"), topic_id))

    async def create_partitions(
        self, topic_id: UUID, new_total: int, replicas: Sequence[Sequence[int]] | None = None
    ) -> Topic | Refusal:
        """Extend the topic to `new_total` partitions and return it.

        `replicas` are the nodes that are to lead each new partition. INVALID_PARTITIONS if the topic already has that
        many or more, or if `replicas` is not given for as many as are new.
        """
        named = None if replicas is None else json.dumps([list(each) for each in replicas])

        async def add(connection: Connection) -> Topic | Refusal:
            refusal = await connection.fetchval(statement("add_partitions"), topic_id, new_total, named)
            if refusal is not None:
                return Refusal(refusal)
            row = await connection.fetchrow(statement("topic_by_id"), topic_id)
            return Refusal.UNKNOWN_TOPIC if row is None else await _built(row)

        return await self._pool.transact(add)

    async def assign(self, assignments: Mapping[tuple[UUID, int], Assignment]) -> list[Topic]:
        """Assign partitions (topic and index) to nodes, all at once; return the topics with the change, without deleted
        ones.

        If an assignment names no replicas, the partition keeps its replicas.
        """
        if not assignments:
            return []
        return await self._changed(
            "assign_replicas",
            [topic_id for topic_id, _ in assignments],
            [index for _, index in assignments],
            [assignment.leader for assignment in assignments.values()],
            [json.dumps(each.replicas) if each.replicas else None for each in assignments.values()],
        )

    async def _changed(self, how: str, *asked: object) -> list[Topic]:
        """Change partitions and return their topics as they are after it.

        The topics are built after the transaction, in steps, because the transaction delays changes of the catalog, and
        appends.
        """

        async def change(connection: Connection) -> list[Row]:
            rows = await connection.fetch(statement(how), *asked)
            if not rows:
                return []
            return list(await connection.fetch(statement("topics_by_id"), [row["topic_id"] for row in rows]))

        topics: list[Topic] = []
        built = 0
        for row in await self._pool.transact(change):
            topics.append(await _built(row))
            built += _TOPIC_AS_PARTITIONS + len(topics[-1].partitions)
            if built >= _PARTITIONS_PER_STEP:
                built = 0
                await asyncio.sleep(0)
        return topics

    async def set_configs(self, topic_id: UUID, set: Mapping[str, str], unset: Collection[str] = ()) -> Topic | Refusal:
        """Remove `unset`, then set `set`; configs that neither names stay."""

        async def change(connection: Connection) -> Topic | Refusal:
            await connection.execute(
                statement("set_topic_configs"), topic_id, _configs_text(set), [stored(name) for name in unset]
            )
            row = await connection.fetchrow(statement("topic_by_id"), topic_id)
            return Refusal.UNKNOWN_TOPIC if row is None else await _built(row)

        return await self._pool.transact(change)

    async def load_broker_configs(self, broker: str = ALL_BROKERS) -> dict[str, str]:
        """Load the configs of the broker with this id; by default those of all brokers."""
        rows = await self._pool.fetch(statement("broker_configs"), broker)
        return {loaded(row["name"]): loaded(row["value"]) for row in rows}

    async def set_broker_configs(
        self, set: Mapping[str, str], unset: Collection[str] = (), *, broker: str = ALL_BROKERS
    ) -> None:
        """Remove `unset`, then set `set`: on one broker, or on all. The change raises the catalog's revision."""
        await self._set_configs("set_broker_configs", broker, set, unset)

    async def set_group_configs(self, group_id: str, set: Mapping[str, str], unset: Collection[str] = ()) -> None:
        """Remove `unset`, then set `set` in one group."""
        await self._set_configs("set_group_configs", group_id, set, unset)

    async def _set_configs(self, how: str, of: str, set: Mapping[str, str], unset: Collection[str]) -> None:
        await self._pool.fetch(
            statement(how),
            stored(of),
            [stored(name) for name in set],
            [stored(value) for value in set.values()],
            [stored(name) for name in unset],
        )

    async def set_client_quotas(self, quotas: Collection[ClientQuota]) -> None:
        """Set client quotas, each given once. A change of the catalog, with its revision."""
        await self._pool.fetch(
            statement("set_client_quotas"),
            [_stored_name(quota.user_name) for quota in quotas],
            [_stored_name(quota.client_id) for quota in quotas],
            [_stored_name(quota.address) for quota in quotas],
            [stored(quota.name) for quota in quotas],
            [quota.value for quota in quotas],
        )

    async def create_acls(self, acls: Sequence[Acl]) -> None:
        """Create all of the ACLs or none; existing ones stay. A change of the catalog, with its revision."""

        async def create_all(connection: Connection) -> None:
            for some in _pieces_of(acls):
                await connection.execute(
                    statement("create_acls"),
                    [_acl_key(acl) for acl in some],
                    [acl.resource_type for acl in some],
                    [acl.pattern_type for acl in some],
                    [stored(acl.resource_name) for acl in some],
                    [stored(acl.principal) for acl in some],
                    [stored(acl.host) for acl in some],
                    [acl.operation for acl in some],
                    [acl.permission for acl in some],
                )

        await self._pool.transact(create_all)

    async def delete_acls(self, acls: Sequence[Acl]) -> list[Acl]:
        """Delete all of the ACLs or none; return those that existed. A change of the catalog, with its revision."""

        async def delete_all(connection: Connection) -> list[Acl]:
            gone: list[Acl] = []
            for some in _pieces_of(acls):
                keys = {_acl_key(acl): acl for acl in some}
                rows = await connection.fetch(statement("delete_acls"), list(keys))
                gone += [keys[row["acl_key"]] for row in rows]
            return gone

        return await self._pool.transact(delete_all)

    async def cluster_id(self) -> str:
        """Return the cluster's id: 22 characters of URL-safe base64, as upstream renders it; constant for the
        database's life."""
        return str(await self._pool.fetch_value(statement("cluster_id")))


async def _client_quotas(text: str) -> list[ClientQuota]:
    # JSON has no infinite numbers, so an infinite quota arrives as a string.
    return [
        ClientQuota(_name(user_name), _name(client_id), _name(address), loaded(name), float(value))
        async for user_name, client_id, address, name, value in in_turns(json_elements(text))
    ]


def _pieces_of(acls: Sequence[Acl]) -> Iterator[Sequence[Acl]]:
    return (acls[start : start + _ACLS_PER_STEP] for start in range(0, len(acls), _ACLS_PER_STEP))


def _acl_key(acl: Acl) -> bytes:
    return hashlib.sha256(json.dumps(acl).encode()).digest()


async def _configs_by_name(text: str) -> dict[str, dict[str, str]]:
    configs: dict[str, dict[str, str]] = {}
    async for of, name, value in in_turns(json_elements(text)):
        configs.setdefault(loaded(of), {})[loaded(name)] = loaded(value)
    return configs


_ANY, _DEFAULT, _NAMED = "", "*", "="
"""Markers in `client_quota` for the entity of a quota."""


def _stored_name(name: str | None) -> str:
    if name is None:
        return _ANY
    return _DEFAULT if name == DEFAULT_NAME else _NAMED + stored(name)


def _name(said: str) -> str | None:
    if said == _ANY:
        return None
    return DEFAULT_NAME if said == _DEFAULT else loaded(said.removeprefix(_NAMED))
