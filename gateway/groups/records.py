"""Groups as they are stored: the machines' values on their way to and from Postgres.

The one idea: a write contains only the changed rows, each with its new state. So a write of unknown outcome can be
repeated, and writes of many groups share a transaction (`gatherer.py`). Only the order matters: a group is not read
while a write of it is in progress. The machine decides the contents of a row.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar, cast

import structlog

from gateway.cluster.clock import wall_ms
from gateway.cluster.leases import SHARDS, shard_of
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import LONG_BYTES, Document, Machines, StoredGroup
from gateway.coordinator.settings import Settings
from gateway.groups.gatherer import Gatherer
from gateway.groups.kinds import AnyGroup
from gateway.groups.slot import Unstored
from storage.errors import StorageConflict, StorageUnavailable
from storage.groups import GroupStore
from storage.types import CoordinatorLease, GroupChange, GroupRecord, MemberRecord, Saved

logger = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")

FIRST_RETRY_MS = 50
LAST_RETRY_MS = 1_000
MAX_ROWS_PER_TRANSACTION = 1_000
MAX_GROUPS_PER_READ = 500
MAX_WAITING_WRITES = 4
"""Transactions that may wait for a group that another transaction has locked. They must not occupy all connections."""

Wanted = Callable[[], bool]
"""Returns whether a caller still waits for the read or write. If none does, a failed one is not repeated."""


class GroupRecords:
    """Read and write the records of this node's groups, and try again while Postgres is away.

    Every method raises StorageUnavailable when it gives up. A write raises StorageConflict if the lease is not current.
    """

    def __init__(
        self,
        store: GroupStore,
        machines: Machines[AnyGroup, Settings],
        patience_ms: int,
        cluster_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._store = store
        self._machines = machines
        self._patience_ms = patience_ms
        self._cluster_ms = cluster_ms
        self._writes: dict[str, asyncio.Future[None]] = {}
        self._saves: Gatherer[GroupChange, Saved] = Gatherer(
            "group writer", self._save, max_size=MAX_ROWS_PER_TRANSACTION, size=_rows
        )
        self._loads: Gatherer[str, GroupRecord | None] = Gatherer(
            "group reader", self._load, max_size=MAX_GROUPS_PER_READ
        )
        self._shards: Gatherer[int, bool] = Gatherer("shard reader", self._have_groups, max_size=SHARDS)
        self._waiting = asyncio.Semaphore(MAX_WAITING_WRITES)
        self._loop = asyncio.get_running_loop()

    async def write(
        self,
        group_id: str,
        group: AnyGroup,
        unstored: Unstored,
        lease: CoordinatorLease,
        wanted: Wanted,
        *,
        apart: Executor | None = None,
    ) -> None:
        """Store the changes of the group, or remove a deleted one with its offsets. No other writer may write the group
        in the meantime. The changes of a group with many members are computed by the executor `apart`."""
        with self._writing(group_id):
            if self._machines.of(group).is_deleted(group):
                await self._patiently(lambda: self._store.delete(group_id, lease), wanted, group_id=group_id)
            else:
                asked = (group_id, group, unstored, lease)
                if apart is None:
                    change = self._change(*asked)
                else:
                    change = await self._loop.run_in_executor(apart, self._change, *asked)
                await self._patiently(lambda: self._write(change), wanted, group_id=group_id)

    async def read(self, group_id: str, wanted: Wanted) -> GroupRecord | None:
        await self._written((group_id,))
        return await self._patiently(lambda: self._loads.submit(group_id), wanted, group_id=group_id)

    async def read_shard(self, shard: int, wanted: Wanted) -> Sequence[GroupRecord]:
        """Read all groups of the shard that have members. Retry until no caller waits any more.

        A node acquires many shards at once, and most of them have no group. So one statement first finds the shards
        with groups.
        """

        async def load() -> Sequence[GroupRecord]:
            return await self._store.load_shard(shard) if await self._shards.submit(shard) else ()

        await self._written([group_id for group_id in self._writes if shard_of(group_id) == shard])
        return await self._patiently(load, wanted, patience_ms=math.inf, all_of_shard=shard)

    async def list(self) -> list[tuple[str, str, str | None, str]]:
        """Return group id, group type, protocol type and state of every group of the cluster. There is no second
        try."""
        return await self._store.list()

    def is_large(self, record: GroupRecord) -> bool:
        """Return whether the documents of the group's members are long."""
        chars = 0
        for member in record.members:
            chars += _chars(member.document)
            if chars > LONG_BYTES:
                return True
        return False

    def restored(self, record: GroupRecord, now_ms: int, settings: Settings) -> AnyGroup:
        """Return the group with which its machine continues. `now_ms` is monotonic."""
        return self._machines.of_type(record.group_type).restore(
            record.group_id,
            StoredGroup(
                record.state,
                record.protocol_type,
                record.generation_id,
                record.document,
                clock_lead_ms=self._lead_ms(record.document, now_ms),
            ),
            {MemberId(member.member_id): member.document for member in record.members},
            record.silent_ms,
            now_ms,
            settings,
        )

    def _clock_ms(self, now_ms: int) -> int:
        """Return the wall clock of this process at the moment when its monotonic clock shows `now_ms`."""
        return self._cluster_ms() - now_ms

    def _lead_ms(self, document: Document, now_ms: int) -> int | None:
        """Return `StoredGroup.clock_lead_ms`. Return None if the group was written by a release without this value."""
        clock_ms = document.get(CLOCK)
        return clock_ms - self._clock_ms(now_ms) if isinstance(clock_ms, int) else None

    # --- writing ------------------------------------------------------------------------------------------------

    def _change(self, group_id: str, group: AnyGroup, unstored: Unstored, lease: CoordinatorLease) -> GroupChange:
        machine = self._machines.of(group)
        stored = machine.stored(group)
        changed: list[MemberRecord] = []
        gone: list[str] = []
        for member_id in machine.member_ids(group) if unstored.whole else sorted(unstored.members):
            member = machine.stored_member(group, member_id)
            if member is None:
                gone.append(member_id)
            else:
                changed.append(MemberRecord(member_id, member.document, member.member_epoch))
        return GroupChange(
            lease=lease,
            group_id=group_id,
            group_type=machine.group_type,
            state=stored.state,
            protocol_type=stored.protocol_type,
            generation_id=stored.generation_id,
            document={**stored.document, CLOCK: self._clock_ms(int(self._loop.time() * 1000))},
            all_heard=stored.all_heard,
            changed=tuple(changed),
            gone=tuple(gone),
            replaced=unstored.whole,
        )

    async def _write(self, change: GroupChange) -> None:
        """Write the change. If another transaction has locked the group, wait for it apart from the other writes."""
        saved = await self._saves.submit(change)
        if saved is Saved.BUSY:
            async with self._waiting:
                (saved,) = await self._store.save((change,), wait=True)
        if saved is not Saved.SAVED:
            lease = change.lease
            raise StorageConflict(f"the lease of shard {lease.shard} has left epoch {lease.lease_epoch}")

    async def _save(self, changes: Sequence[GroupChange]) -> Sequence[Saved]:
        return await self._store.save(changes)

    async def _load(self, group_ids: Sequence[str]) -> Sequence[GroupRecord | None]:
        records = await self._store.load(group_ids)
        return [records.get(group_id) for group_id in group_ids]

    async def _have_groups(self, shards: Sequence[int]) -> Sequence[bool]:
        occupied = await self._store.shards_with_groups(shards)
        return [shard in occupied for shard in shards]

    # --- order and patience -------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, group_id: str) -> Generator[None, None, None]:
        ended = self._writes[group_id] = self._loop.create_future()
        try:
            yield
        finally:
            del self._writes[group_id]
            ended.set_result(None)

    async def _written(self, group_ids: Iterable[str]) -> None:
        """Wait until no write of these groups is in progress. A dropped group may have left a write behind. If its
        lease lapsed and was then renewed with the same epoch, the lease does not fence that write."""
        writes = [self._writes[group_id] for group_id in group_ids if group_id in self._writes]
        if writes:
            await asyncio.wait(writes)

    async def _patiently(
        self, work: Callable[[], Awaitable[T]], wanted: Wanted, *, patience_ms: float | None = None, **logged: object
    ) -> T:
        give_up = self._loop.time() + (self._patience_ms if patience_ms is None else patience_ms) / 1000
        pause_ms = FIRST_RETRY_MS
        while True:
            try:
                return await work()
            except StorageUnavailable as error:
                if not wanted() or self._loop.time() + pause_ms / 1000 > give_up:
                    raise
                logger.warning(
                    "group waits for Postgres and tries again", error=str(error), retry_ms=pause_ms, **logged
                )
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, LAST_RETRY_MS)


CLOCK = "clock_ms"
"""Key in a group's document: the time of the cluster's clock, in ms, at which the clock of the group's deadlines was 0.
"""


ROW_CHARS = 4_096
"""Number of characters of a document. A member with a longer document counts as several rows."""


def _rows(change: GroupChange) -> int:
    return 1 + len(change.gone) + sum(1 + _chars(member.document) // ROW_CHARS for member in change.changed)


def _chars(document: Document) -> int:
    """Return how long the strings of a document are. Clients choose only strings as long as they like."""
    chars = 0
    values: list[object] = [document]
    while values:
        value = values.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            values.extend(cast("dict[str, object]", value).values())
        elif isinstance(value, list):
            values.extend(cast("list[object]", value))
    return chars
