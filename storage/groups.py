"""Consumer groups as they are stored.

The one idea: the coordinator that holds a shard's lease is the only writer of its groups. Every write checks that lease
in its own transaction, so a coordinator that lost its lease without knowing is refused. A write contains only the
changes, of many groups at once. This module does not know the content of a group's documents. A write of a group waits
for offset commits under way in the old generation; commits that come after the write see the new one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence, Sized
from typing import Any, cast

from storage.errors import StorageConflict
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.text import loaded, loaded_or_none, stored
from storage.turns import in_turns
from storage.types import CoordinatorLease, Document, GroupChange, GroupRecord, MemberRecord, Saved

DELETED_AT_A_TIME = 10_000
_ROWS_PER_TURN = 250
"""Number of rows of members whose documents are parsed without yielding to the event loop. This takes some
milliseconds.
"""


class GroupStore:
    """Reads and writes groups."""

    def __init__(self, database: Database, *, deleted_at_a_time: int = DELETED_AT_A_TIME) -> None:
        """Use `database`; one statement deletes at most `deleted_at_a_time` offsets."""
        self._pool = database.hot
        self._deleted_at_a_time = deleted_at_a_time

    async def load(self, group_ids: Sequence[str]) -> dict[str, GroupRecord]:
        """Load those of the groups that exist. From now on the caller waits for their members (see
        `GroupRecord.silent_ms`).
        """
        rows = await self._pool.fetch(statement("load_groups"), [stored(group_id) for group_id in group_ids])
        return {record.group_id: record async for record in _groups(rows)}

    async def shards_with_groups(self, shards: Sequence[int]) -> set[int]:
        """Return those of the shards that have a group."""
        return {row["shard"] for row in await self._pool.fetch(statement("shards_with_groups"), list(shards))}

    async def load_shard(self, shard: int) -> list[GroupRecord]:
        """Load all groups of the shard that have members; otherwise as `load`."""
        return [record async for record in _groups(await self._pool.fetch(statement("load_shard"), shard))]

    async def save(self, changes: Sequence[GroupChange], *, wait: bool = False) -> list[Saved]:
        """Write the changes of many groups, each given once, in one transaction; return the outcome of each.

        With `wait` the write waits for groups that another transaction has locked, until the statement times out. A
        write that was abandoned cannot take effect behind a later one. Its COMMIT is a message of its own, sent only
        while the group's row is locked. So either Postgres never received the COMMIT, or the later write waited for it.
        """
        large = any(_is_large(member.document) for change in changes for member in change.changed)
        rows = await asyncio.to_thread(_member_rows, changes) if large else _member_rows(changes)

        async def write(connection: Connection) -> list[str]:
            return await connection.fetchval(
                statement("save_groups"),
                wait,
                [change.lease.shard for change in changes],
                [change.lease.node_id for change in changes],
                [change.lease.lease_epoch for change in changes],
                [stored(change.group_id) for change in changes],
                [change.group_type for change in changes],
                [change.state for change in changes],
                [stored(change.protocol_type) for change in changes],
                [change.generation_id for change in changes],
                [_to_json(change.document) for change in changes],
                [change.all_heard for change in changes],
                [change.replaced for change in changes],
                [position for position, _, _, _ in rows],
                [member_id for _, member_id, _, _ in rows],
                [member_epoch for _, _, member_epoch, _ in rows],
                [document for _, _, _, document in rows],
            )

        return [Saved(outcome) for outcome in await self._pool.transact(write)]

    async def delete(self, group_id: str, lease: CoordinatorLease) -> bool:
        """Remove the group with its members and offsets, in bounded steps; after a failure the caller calls again.

        Return False if no such group exists. Raise StorageConflict if the lease is not current.
        """
        while True:
            outcome = await self._pool.fetch_value(
                statement("delete_group"),
                stored(group_id),
                lease.shard,
                lease.node_id,
                lease.lease_epoch,
                self._deleted_at_a_time,
            )
            if outcome == "fenced":
                raise StorageConflict(f"the lease of shard {lease.shard} has left epoch {lease.lease_epoch}")
            if outcome != "more":
                return outcome == "deleted"

    async def any(self) -> bool:
        """Return whether any group exists."""
        return await self._pool.fetch_value(statement("any_group"))

    async def ids_behind(self, shard: int, group_id: str, limit: int) -> Sequence[str]:
        """Return the shard's next groups behind an id, ordered by id."""
        rows = await self._pool.fetch(statement("group_ids_of_shard"), shard, stored(group_id), limit)
        return [loaded(row["group_id"]) for row in rows]

    async def as_stored(self, group_ids: Sequence[str]) -> Sequence[tuple[GroupRecord, int]]:
        """Read those of the groups that exist, each with the time of its last change of state (Unix ms).

        This is for read-only callers: the read does not start to wait for any member.
        """
        rows = await self._pool.fetch(statement("groups_as_stored"), [stored(group_id) for group_id in group_ids])
        changed_ms = {loaded(row["group_id"]): row["state_timestamp_ms"] for row in rows}
        return [(record, changed_ms[record.group_id]) async for record in _groups(rows)]

    async def list(self) -> list[tuple[str, str, str | None, str]]:
        """List (group id, group type, protocol type, state) of every group, ordered by id."""
        rows = await self._pool.fetch(statement("list_groups"))
        return [
            (loaded(row["group_id"]), row["group_type"], loaded_or_none(row["protocol_type"]), row["state"])
            async for row in in_turns(rows)
        ]


_MemberRow = tuple[int, str, int, str | None]


def _member_rows(changes: Sequence[GroupChange]) -> list[_MemberRow]:
    members: list[_MemberRow] = [
        (position, stored(member.member_id), member.member_epoch, _to_json(member.document))
        for position, change in enumerate(changes, 1)
        for member in change.changed
    ]
    gone: list[_MemberRow] = [
        (position, stored(member_id), 0, None)
        for position, change in enumerate(changes, 1)
        for member_id in change.gone
    ]
    return [*members, *gone]


_LARGE = 500
"""Number of elements above which writing them as text takes more than half a millisecond."""


def _is_large(document: Document) -> bool:
    return any(isinstance(value, list | dict) and len(cast(Sized, value)) > _LARGE for value in document.values())


async def _groups(rows: Sequence[Row]) -> AsyncGenerator[GroupRecord]:
    """Build groups from rows in the order of groups, yielding to the event loop now and then."""
    group: Row | None = None
    members: list[MemberRecord] = []
    async for row in in_turns(rows, _ROWS_PER_TURN):
        if group is None or row["group_id"] != group["group_id"]:
            if group is not None:
                yield _group(group, members)
            group, members = row, []
        if row["member_id"] is not None:
            members.append(
                MemberRecord(loaded(row["member_id"]), _from_json(row["member_document"]), row["member_epoch"])
            )
    if group is not None:
        yield _group(group, members)


def _group(row: Row, members: Sequence[MemberRecord]) -> GroupRecord:
    return GroupRecord(
        group_id=loaded(row["group_id"]),
        group_type=row["group_type"],
        state=row["state"],
        protocol_type=loaded_or_none(row["protocol_type"]),
        generation_id=row["generation_id"],
        document=_from_json(row["document"]),
        members=tuple(members),
        silent_ms=row["silent_ms"],
    )


_NUL = "\\u0000"
"""The escape by which JSON represents the character NUL. Postgres' jsonb cannot hold this character."""
_ESCAPE = stored("\0")[0]


def _to_json(document: Document) -> str:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    if _NUL in text or _ESCAPE in text:
        text = json.dumps(_strings(document, stored), ensure_ascii=False, separators=(",", ":"))
    return text


def _from_json(text: str) -> Document:
    document = json.loads(text)
    return _strings(document, loaded) if _ESCAPE in text else document


def _strings(value: Any, change: Any) -> Any:
    """Return the JSON value with `change` applied to every string, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {change(name): _strings(item, change) for name, item in items}
    if isinstance(value, list | tuple):
        return [_strings(item, change) for item in cast(list[Any], value)]
    return value
