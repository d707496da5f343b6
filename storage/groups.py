"""Consumer groups as they are stored.

The one idea: the coordinator that holds a shard's lease is the only writer of its groups, and every write checks that
lease in its own transaction, so a coordinator that lost it without knowing is refused, not believed. A write of the
group waits for offset commits under way in the old generation; commits that come after it see the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import cast

from storage.errors import StorageConflict
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.text import loaded, loaded_or_none, stored
from storage.types import CoordinatorLease, GroupRecord, MemberRecord


def _member(row: Row) -> MemberRecord:
    return MemberRecord(
        member_id=loaded(row["member_id"]),
        group_instance_id=loaded_or_none(row["group_instance_id"]),
        client_id=loaded(row["client_id"]),
        client_host=loaded(row["client_host"]),
        session_timeout_ms=row["session_timeout_ms"],
        rebalance_timeout_ms=row["rebalance_timeout_ms"],
        protocols=tuple(
            (loaded(name), metadata)
            for name, metadata in zip(
                cast(list[str], row["protocol_names"]), cast(list[bytes], row["protocol_metadata"]), strict=True
            )
        ),
        assignment=row["assignment"],
    )


def _group(rows: Iterable[Row]) -> GroupRecord:
    """From the rows of one group, of which there is at least one."""
    members = list(rows)
    group = members[0]
    return GroupRecord(
        group_id=loaded(group["group_id"]),
        state=group["state"],
        state_timestamp_ms=group["state_timestamp_ms"],
        protocol_type=loaded_or_none(group["protocol_type"]),
        protocol_name=loaded_or_none(group["protocol_name"]),
        generation_id=group["generation_id"],
        leader_id=loaded_or_none(group["leader_id"]),
        members=tuple(_member(row) for row in members if row["member_id"] is not None),
    )


class GroupStore:
    """Reads and writes groups; writes raise StorageConflict if the lease given is not current."""

    def __init__(self, database: Database) -> None:
        self._pool = database.hot

    async def load(self, group_id: str) -> GroupRecord | None:
        rows = await self._pool.fetch(statement("load_group"), stored(group_id))
        return _group(rows) if rows else None

    async def load_shard(self, shard: int) -> list[GroupRecord]:
        rows = await self._pool.fetch(statement("load_shard"), shard)
        return [_group(group_rows) for _, group_rows in groupby(rows, key=_group_id)]

    async def save(self, record: GroupRecord, lease: CoordinatorLease) -> None:
        """Stores the group with exactly the members of `record`, in one transaction.

        A write that was given up cannot take effect behind a later one: its COMMIT is a message of its own, sent only
        while the group's row is locked, so either it never came or the later write waited for it.
        """
        group_id = stored(record.group_id)
        members = [
            (
                group_id,
                stored(member.member_id),
                position,
                stored(member.group_instance_id),
                stored(member.client_id),
                stored(member.client_host),
                member.session_timeout_ms,
                member.rebalance_timeout_ms,
                [stored(name) for name, _ in member.protocols],
                [metadata for _, metadata in member.protocols],
                member.assignment,
            )
            for position, member in enumerate(record.members)
        ]

        async def write(connection: Connection) -> None:
            written = await connection.fetchval(
                statement("save_group"),
                lease.shard,
                lease.node_id,
                lease.lease_epoch,
                group_id,
                record.state,
                record.state_timestamp_ms,
                stored(record.protocol_type),
                stored(record.protocol_name),
                record.generation_id,
                stored(record.leader_id),
                [member[1] for member in members],
            )
            if not written:
                raise StorageConflict(f"the lease of shard {lease.shard} is no more at epoch {lease.lease_epoch}")
            if members:
                await connection.executemany(statement("save_member"), members)

        await self._pool.transact(write)

    async def delete(self, group_id: str, lease: CoordinatorLease) -> bool:
        """Removes the group with its members and offsets. False if there is none."""
        outcome = await self._pool.fetch_value(
            statement("delete_group"), stored(group_id), lease.shard, lease.node_id, lease.lease_epoch
        )
        if outcome == "fenced":
            raise StorageConflict(f"the lease of shard {lease.shard} is no more at epoch {lease.lease_epoch}")
        return outcome == "deleted"

    async def list(self) -> list[tuple[str, str | None, str]]:
        """(group id, protocol type, state) of every group, ordered by id."""
        rows = await self._pool.fetch(statement("list_groups"))
        return [(loaded(row["group_id"]), loaded_or_none(row["protocol_type"]), row["state"]) for row in rows]


def _group_id(row: Row) -> str:
    return row["group_id"]
