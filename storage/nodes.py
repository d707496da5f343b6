"""Nodes of the cluster and the leases under which they coordinate groups.

The one idea: time is the database's, and authority is a number. Postgres' clock alone decides whether a registration or
lease has run out. The lease's epoch decides whether a write is allowed, and it rises with every change of owner. So a
node that was asleep while its lease ran out is refused even if its clock says otherwise. A process that registers under
a name in use supersedes the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import cast

from storage.errors import StorageConflict
from storage.pool import Database, Row
from storage.queries import statement
from storage.schema import FUNCTION_SCHEMA
from storage.types import (
    BOTH,
    Address,
    CoordinatorLease,
    Follower,
    LeaseKind,
    MetadataLog,
    Node,
    NodeId,
    NodeReport,
    Registration,
    Roles,
)


def _roles(row: Row) -> Roles:
    return Roles(row["is_broker"], row["is_controller"], tuple(row["controller_listeners"]))


def _lease(row: Row) -> CoordinatorLease:
    return CoordinatorLease(row["shard"], NodeId(row["node_id"]), row["lease_epoch"], LeaseKind(row["kind"]))


class Unregistered(Enum):
    """Outcome of unregistering a node. Nothing changes unless it is DONE."""

    DONE = "done"
    UNKNOWN = "unknown"
    ALIVE = "alive"


class NodeStore:
    """Registrations and leases of this process. It remembers which incarnation of a node it registered, so calls for a
    node that another process has since taken over raise StorageConflict."""

    def __init__(self, database: Database) -> None:
        self._pool = database.control
        self._guard = database.guard
        self._incarnations: dict[NodeId, int] = {}
        self._last: Registration | None = None

    def registration(self) -> Registration | None:
        """Return the last registration that this process has made, or None before the first one."""
        return self._last

    def incarnation(self, node_id: NodeId) -> int:
        """Return the incarnation of the registration that this process has made. Raise StorageConflict if it has
        made none."""
        incarnation = self._incarnations.get(node_id)
        if incarnation is None:
            raise StorageConflict(f"node {node_id} has not been registered by this process")
        return incarnation

    async def register(
        self,
        name: str,
        listeners: Mapping[str, Address],
        rack: str | None,
        ttl_ms: int,
        wanted: int | None = None,
        authorizer: str = "",
        roles: Roles = BOTH,
    ) -> NodeId:
        """Register the node for `ttl_ms` from now and return its id.

        The id is the `wanted` one; StorageConflict if a live node has it. Otherwise it is the one that its name had
        before, else the lowest (>= 1) that no live node has.
        """
        row = await self._pool.fetch_row(
            statement("register_node"),
            name,
            json.dumps(listeners),
            rack,
            ttl_ms,
            FUNCTION_SCHEMA,
            wanted,
            authorizer,
            roles.is_broker,
            roles.is_controller,
            list(roles.controller_listeners),
        )
        if row is None:
            raise StorageConflict(f"a node with node.id {wanted} is alive")
        node_id = NodeId(row["node_id"])
        self._incarnations[node_id] = row["incarnation"]
        self._last = Registration(node_id, row["incarnation"])
        return node_id

    async def rivals(self, name: str, listeners: Mapping[str, Address], node_id: int | None = None) -> list[Node]:
        """List live nodes with the name, the id or one of the addresses, whose process still has a session to stand for
        them (see `notify.Listener`).

        A process that was killed has no session, so its successor finds no rival.
        """
        rows = await self._pool.fetch(statement("rival_nodes"), name, json.dumps(listeners), node_id)
        return [_node(row) for row in rows]

    async def reports(self) -> list[NodeReport]:
        """Report on each live node, ordered by id. This is for people: it counts leases, which a serving node never
        does.
        """
        rows = await self._pool.fetch(statement("node_reports"))
        return [
            NodeReport(
                replace(_node(row), roles=_roles(row)),
                row["registered_ms_ago"],
                cast(dict[str, int], json.loads(row["leases"])),
                row["revision_lag"],
            )
            for row in rows
        ]

    async def renew(self, node_id: NodeId, ttl_ms: int, announced: int = 0, catalog_revision: int = 0) -> bool:
        """Prolong the registration; return whether it had run out. Raise StorageConflict if another process has it.

        `announced` is how many announcements of appends this node has sent. Other nodes see by it whether they missed
        any.
        """
        asked = self._guard.history
        row = await self._pool.fetch_row(
            statement("renew_node"), node_id, self.incarnation(node_id), ttl_ms, announced, catalog_revision
        )
        if row is None:
            raise StorageConflict(f"node {node_id} has been taken over by another process")
        self._guard.seen(asked, row["history"], row["flushed_lsn"])
        return bool(row["lapsed"])

    async def alive(self) -> list[Node]:
        """List nodes whose registration has not run out, ordered by id."""
        rows = await self._pool.fetch(statement("alive_nodes"))
        return [
            replace(
                _node(row),
                levels=cast(dict[str, int], json.loads(row["levels"])),
                read_ms=row["read_ms"],
                authorizer=row["authorizer"],
                roles=_roles(row),
            )
            for row in rows
        ]

    async def fenced(self) -> list[Node]:
        """List brokers whose registration has run out and that have not been unregistered, ordered by id."""
        return [_node(row) for row in await self._pool.fetch(statement("fenced_nodes"))]

    async def metadata_log(self, kind: LeaseKind, shard: int) -> MetadataLog:
        """Return the catalog's revision, and the live nodes that follow it. One of these nodes may hold the lease of
        this kind and shard.
        """
        rows = await self._pool.fetch(statement("metadata_log"), kind.value, shard)
        return MetadataLog(
            max((row["revision"] for row in rows), default=0),
            max((row["read_ms"] for row in rows), default=0),
            tuple(
                Follower(
                    replace(_node(row), roles=_roles(row)), row["node_revision"], row["heard_ms"], row["lease_epoch"]
                )
                for row in rows
            ),
        )

    async def finalize(self, levels: Mapping[str, int]) -> None:
        """Set the finalized levels of features, by which all nodes go from then on."""
        await self._pool.fetch(statement("finalize_features"), list(levels), list(levels.values()))

    async def announce(self, payloads: Sequence[str]) -> None:
        """Notify the other nodes of appends. Nothing durable depends on the notification, so the call does not wait for
        the disk.
        """
        await self._pool.fetch(statement("announce"), list(payloads))

    async def tell_followed(self, topic_name: str) -> None:
        """Notify every node that a client reads an internal topic. Nothing durable depends on the notification."""
        await self._pool.fetch(statement("tell_followed"), topic_name)

    async def ask_for_figures(self) -> None:
        """Notify every node that a console requests its metrics. Nothing durable depends on the notification."""
        await self._pool.fetch(statement("ask_for_figures"))

    async def tell_figures(self, payload: str) -> None:
        """Notify every node of one node's metrics. Nothing durable depends on the notification."""
        await self._pool.fetch(statement("tell_figures"), payload)

    async def withdraw(self, node_id: NodeId) -> None:
        """End the registration. Do nothing if another process has replaced it."""
        await self._pool.fetch(statement("withdraw_node"), node_id, self.incarnation(node_id))

    async def unregister(self, node_id: NodeId) -> Unregistered:
        """Remove a node that is not alive. If its process returns, it is a new node."""
        row = await self._pool.fetch_row(statement("unregister_node"), node_id)
        if row is None:
            return Unregistered.UNKNOWN
        return Unregistered.ALIVE if row["alive"] else Unregistered.DONE

    async def acquire_leases(
        self,
        node_id: NodeId,
        shards: Sequence[int],
        ttl_ms: int,
        kind: LeaseKind = LeaseKind.GROUPS,
        *,
        spare: Sequence[int] = (),
        grace_ms: int = 0,
    ) -> list[CoordinatorLease]:
        """Acquire those of `shards` that no other node holds, for `ttl_ms` from now, and those of `spare` that no node
        has held for `grace_ms`.

        A lease that was handed over to another node counts as held for as long. The epoch rises unless this process had
        the lease already. If a former owner has a write under way, the acquisition waits a moment for it; a lease whose
        write takes longer is left to a later call. The result is empty if the node was taken over.
        """
        rows = await self._pool.fetch(
            statement("acquire_leases"),
            node_id,
            self.incarnation(node_id),
            kind.value,
            list(shards),
            list(spare),
            grace_ms,
            ttl_ms,
        )
        return [_lease(row) for row in rows]

    async def renew_leases(
        self, node_id: NodeId, leases: Sequence[CoordinatorLease], ttl_ms: int
    ) -> list[CoordinatorLease]:
        """Prolong `leases`, all of one kind; return those that are still this node's, at the same epoch."""
        if not leases:
            return []
        rows = await self._pool.fetch(
            statement("renew_leases"),
            node_id,
            self.incarnation(node_id),
            leases[0].kind.value,
            [lease.shard for lease in leases],
            [lease.lease_epoch for lease in leases],
            ttl_ms,
        )
        return [_lease(row) for row in rows]

    async def release_leases(
        self, node_id: NodeId, successors: Mapping[int, NodeId | None], kind: LeaseKind = LeaseKind.GROUPS
    ) -> None:
        """Release shards, so that each shard's successor can take it at once. None stands for the node that should
        have it."""
        await self._pool.fetch(
            statement("release_leases"),
            node_id,
            self.incarnation(node_id),
            kind.value,
            list(successors),
            list(successors.values()),
        )

    async def lease_owners(self, kind: LeaseKind = LeaseKind.GROUPS) -> dict[int, Node]:
        """Return the node that holds each shard, for leases that have not run out."""
        rows = await self._pool.fetch(statement("lease_owners"), kind.value)
        return {row["shard"]: _node(row) for row in rows}


def _node(row: Row) -> Node:
    listeners = cast(dict[str, tuple[str, int]], json.loads(row["listeners"]))
    return Node(
        NodeId(row["node_id"]),
        {name: (host, port) for name, (host, port) in listeners.items()},
        row["rack"],
        row["incarnation"],
        row["announced"],
    )
