"""Committed offsets.

The one idea: the transaction that writes a commit also decides whether it is valid, by the shard's lease and the
group's stored generation or its member's epoch (`judge_commits` in functions/groups.sql). So neither a former
coordinator nor a former generation can write after its successor has begun. Many commits, of many groups, go in one
call. The commits of a producer's transaction are judged alike, and are pending until the transaction ends
(`end_transaction`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast
from uuid import UUID

from storage.errors import StorageConflict
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.text import loaded, stored
from storage.turns import in_turns
from storage.types import CommittedOffset, CoordinatorLease, OffsetAsStored, OffsetCommit, Refusal


class KnownGroups(NamedTuple):
    """The groups of a shard, as their coordinator knows them."""

    subscriptions: Mapping[str, Collection[str]] = {}
    """Topic names per Stable group of type "consumer" whose subscriptions are known."""
    unsettled: Collection[str] = ()
    """Groups that the coordinator holds in another state than Empty; none of their offsets may expire."""
    generation_ids: Mapping[str, int] = {}
    """Generation or group epoch per group in `subscriptions`. A group that has got another one keeps its offsets."""


@dataclass(frozen=True, slots=True)
class ExpiredOffsets:
    """Numbers of offsets and groups that one pass removed. If a limit was reached, more may be due."""

    offset_count: int
    deleted_groups: tuple[str, ...]
    """Empty groups that had no offsets left."""


def _committed_offset(row: Row) -> CommittedOffset:
    return CommittedOffset(
        topic_id=row["topic_id"],
        partition_index=row["partition_index"],
        committed_offset=row["committed_offset"],
        leader_epoch=row["leader_epoch"],
        metadata=loaded(row["metadata"]),
        commit_timestamp_ms=row["commit_timestamp_ms"],
        is_pending=row["is_pending"],
    )


def _as_stored(row: Row) -> OffsetAsStored:
    return OffsetAsStored(
        topic=loaded(row["topic"]),
        topic_id=row["topic_id"],
        partition_index=row["partition_index"],
        committed_offset=row["committed_offset"],
        leader_epoch=row["leader_epoch"],
        metadata=loaded(row["metadata"]),
        commit_timestamp_ms=row["commit_timestamp_ms"],
        expire_timestamp_ms=row["expire_timestamp_ms"],
    )


DELETED_AT_A_TIME = 10_000
MAX_PENDING = 50_000
"""Maximal number of pending offsets of one transaction. One statement settles them when the transaction ends."""


class OffsetStore:
    """Commits, reads, deletes and expires offsets."""

    def __init__(
        self, database: Database, *, max_pending: int = MAX_PENDING, deleted_at_a_time: int = DELETED_AT_A_TIME
    ) -> None:
        """Use `database`; `max_pending` limits the offsets of one transaction. One statement deletes at most
        `deleted_at_a_time` offsets."""
        self._hot = database.hot
        self._cold = database.cold
        self._max_pending = max_pending
        self._deleted_at_a_time = deleted_at_a_time

    async def commit(self, commits: Sequence[OffsetCommit]) -> list[Refusal | None]:
        """Write all valid commits in one durable transaction; return None or the refusal per commit.

        NOT_COORDINATOR: the lease is not current. ILLEGAL_GENERATION: the stored group has another generation, is
        missing, or (generation −1) has members. UNKNOWN_MEMBER, STALE_MEMBER_EPOCH: the member that the commit names is
        not in the group, or is at another epoch. UNKNOWN_TOPIC: no live topic has the id; UNKNOWN_PARTITION: the topic
        has no such partition. Of several commits of one partition the last accepted one is kept.
        """
        if not commits:
            return []
        refusals = await self._hot.fetch_value(
            statement("commit_offsets"), *_columns(commits), [commit.retention_ms for commit in commits]
        )
        return _refusals(refusals)

    async def commit_in_transaction(
        self, commits: Sequence[OffsetCommit], transactional_id: str, producer_id: int, producer_epoch: int
    ) -> list[Refusal | None]:
        """Write all valid commits, to be committed with the transaction; return None or the refusal per commit.

        All are refused alike by the first of these that holds: INVALID_PRODUCER_ID_MAPPING; INVALID_PRODUCER_EPOCH;
        NOT_IN_TRANSACTION (no transaction is under way, or one of the groups is not in it); TRANSACTION_TOO_LARGE.
        Otherwise each commit is judged as in `commit`. The retention of these commits is ignored.
        """
        if not commits:
            return []
        refusals = await self._hot.fetch_value(
            statement("commit_offsets_in_transaction"),
            stored(transactional_id),
            producer_id,
            producer_epoch,
            *_columns(commits),
            self._max_pending,
        )
        return _refusals(refusals)

    async def fetch(self, group_id: str, partitions: Sequence[tuple[UUID, int]] | None = None) -> list[CommittedOffset]:
        """Return the group's committed offsets of `partitions` (None: of all), live topics only. Partitions without
        a commit are absent."""
        wanted = [(group_id, *partition) for partition in partitions or ()]
        whole = (group_id,) if partitions is None else ()
        return [committed for _, committed in await self.fetch_together(wanted, whole)]

    async def fetch_together(
        self, wanted: Sequence[tuple[str, UUID, int]], whole: Sequence[str], *, require_stable: bool = False
    ) -> Iterator[tuple[str, CommittedOffset]]:
        """Return pairs of group and committed offset: of the `wanted` partitions, and all of the groups in `whole`.

        With `require_stable` a partition with a pending commit appears a second time, behind its committed offset, as
        `is_pending` without an offset. Postgres is asked once for each kind. Rows become values as the caller consumes
        them, so the caller may yield to the event loop in between.
        """
        rows: list[Sequence[Row]] = []
        if wanted:
            rows.append(
                await self._hot.fetch(
                    statement("fetch_offsets"),
                    [stored(group_id) for group_id, _, _ in wanted],
                    [topic_id for _, topic_id, _ in wanted],
                    [partition_index for _, _, partition_index in wanted],
                    require_stable,
                )
            )
        if whole:
            group_ids = [stored(group_id) for group_id in whole]
            rows.append(await self._hot.fetch(statement("fetch_all_offsets"), group_ids, require_stable))
        return ((loaded(row["group_id"]), _committed_offset(row)) for row in chain.from_iterable(rows))

    async def as_stored(self, group_ids: Sequence[str], at_most: int) -> Mapping[str, list[OffsetAsStored]] | None:
        """Return all committed offsets of live topics, by group, ordered by topic and partition; None if there are
        more than `at_most`."""
        ids = [stored(group_id) for group_id in group_ids]
        rows = await self._cold.fetch(statement("offsets_as_stored"), ids, at_most + 1)
        if len(rows) > at_most:
            return None
        found: dict[str, list[OffsetAsStored]] = {}
        async for row in in_turns(rows):
            found.setdefault(loaded(row["group_id"]), []).append(_as_stored(row))
        return found

    async def walk(self, group_id: str, page: int) -> AsyncGenerator[OffsetAsStored]:
        """Iterate over all committed offsets of a group, of live topics, `page` at a time, ordered by topic id and
        partition."""
        behind, given = (UUID(int=0), -1), page
        while given == page:
            rows = await self._cold.fetch(statement("offsets_behind"), stored(group_id), *behind, page)
            given = len(rows)
            async for row in in_turns(rows):
                behind = row["topic_id"], row["partition_index"]
                if row["topic"] is not None:
                    yield _as_stored(row)

    async def delete(self, group_id: str, partitions: Sequence[tuple[UUID, int]], lease: CoordinatorLease) -> None:
        """Remove the group's offsets of `partitions`, pending ones included, a bounded number at a time.

        Raise StorageConflict if the lease is not current.
        """
        for first in range(0, len(partitions), self._deleted_at_a_time):
            some = partitions[first : first + self._deleted_at_a_time]
            current = await self._hot.fetch_value(
                statement("delete_offsets"),
                stored(group_id),
                [topic_id for topic_id, _ in some],
                [partition_index for _, partition_index in some],
                lease.shard,
                lease.node_id,
                lease.lease_epoch,
            )
            if not current:
                raise _conflict(lease)

    async def expire(
        self,
        lease: CoordinatorLease,
        retention_ms: int,
        known: Callable[[], KnownGroups],
        *,
        group_limit: int = 500,
        offset_limit: int = 10_000,
    ) -> ExpiredOffsets:
        """Expire offsets of the lease's shard in one bounded pass, by the rules of upstream's
        OffsetExpirationCondition.

        `known` returns the groups that the coordinator holds. It is called once a connection is free, because a member
        may join during the wait. Every other group is taken to be as stored. A member that joins later is not heard
        yet, but it cannot read offsets before its assignment is stored, and that waits for the end of this pass. Raise
        StorageConflict if the lease is not current.
        """

        async def run(connection: Connection) -> Row | None:
            subscriptions, unsettled, generation_ids = known()
            return await connection.fetchrow(
                statement("expire_offsets"),
                lease.shard,
                lease.node_id,
                lease.lease_epoch,
                retention_ms,
                [stored(group_id) for group_id in subscriptions],
                [f"{stored(each)}/{stored(topic)}" for each, topics in subscriptions.items() for topic in topics],
                [stored(group_id) for group_id in unsettled],
                [generation_ids.get(group_id) for group_id in subscriptions],
                group_limit,
                offset_limit,
            )

        row = await self._cold.run(run)
        assert row is not None
        if row["fenced"]:
            raise _conflict(lease)
        deleted_groups = cast(list[str], row["deleted_groups"])
        return ExpiredOffsets(row["expired_offsets"], tuple(loaded(group_id) for group_id in deleted_groups))


def _columns(commits: Sequence[OffsetCommit]) -> Iterator[Sequence[object]]:
    """Columns that both commit functions take: fences, each once, then commits, each with the position of its fence."""
    fences: dict[tuple[CoordinatorLease, str, str | None, int | None], int] = {}
    fence_positions = [
        fences.setdefault((commit.lease, commit.group_id, commit.member_id, commit.generation_id), len(fences) + 1)
        for commit in commits
    ]
    yield [lease.shard for lease, _, _, _ in fences]
    yield [lease.node_id for lease, _, _, _ in fences]
    yield [lease.lease_epoch for lease, _, _, _ in fences]
    yield [stored(group_id) for _, group_id, _, _ in fences]
    yield [stored(member_id) for _, _, member_id, _ in fences]
    yield [generation_id for _, _, _, generation_id in fences]
    yield fence_positions
    yield [commit.topic_id for commit in commits]
    yield [commit.partition_index for commit in commits]
    yield [commit.committed_offset for commit in commits]
    yield [commit.leader_epoch for commit in commits]
    yield [stored(commit.metadata) for commit in commits]


def _refusals(refusals: Any) -> list[Refusal | None]:
    return [None if refusal is None else Refusal(refusal) for refusal in cast(list[Any], refusals)]


def _conflict(lease: CoordinatorLease) -> StorageConflict:
    return StorageConflict(f"the lease of shard {lease.shard} is no more at epoch {lease.lease_epoch}")
