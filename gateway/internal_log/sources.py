"""The owners whose records belong in each internal topic: groups in `__consumer_offsets`, producers in
`__transaction_state`.

The one idea: state is read from the tables and never remembered. Each owner belongs to one node: a group to its
coordinator, a transactional id to the node that clients are sent to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import structlog

from gateway.cluster.leases import Leases, partition_of
from gateway.coordinator.facts import Fact
from gateway.groups.groups import Groups
from gateway.internal_log import of_groups, of_transactions
from gateway.internal_log.record import Entry
from gateway.log.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from gateway.net.pieces import in_pieces
from gateway.transactions.coordinator import Transactions
from storage.groups import GroupStore
from storage.offsets import OffsetStore
from storage.transactions import TransactionPartition
from storage.types import GroupRecord, OffsetAsStored

logger = structlog.get_logger(__name__)

IDS_AT_A_TIME = 1_000
MANY_MEMBERS = 20
"""If a group has more members than this, a thread converts it to records."""


@dataclass(frozen=True, slots=True)
class OffsetPages:
    """How many offsets are read at once. The metadata of one offset may have 4 KiB."""

    batch: int = 10_000
    """If the groups of a batch have more offsets together, each group is read separately."""
    group: int = 1_000
    """Number of offsets of a large group that one step reads."""


OFFSET_PAGES = OffsetPages()


@dataclass(frozen=True, slots=True)
class Owned:
    """One owner: its first and its present records. Without present records the owner does not exist any more."""

    owner: str
    beginning: Iterable[Entry] = ()
    now: AsyncIterator[Entry] | None = None


class Source(Protocol):
    """The source of one internal topic. Reading raises StorageError."""

    @property
    def topic(self) -> str: ...

    def is_own(self, owner: str) -> bool:
        """True if this node writes the records of the owner."""
        ...

    def owners(self) -> AsyncGenerator[str]:
        """Yield every existing owner that belongs to this node."""
        ...

    def read(self, owners: Sequence[str]) -> AsyncGenerator[Owned]:
        """Yield each owner, even if it does not exist. Skip owners that this release cannot read."""
        ...

    def follow(self, changed: Callable[[str], None]) -> None:
        """From now on, call `changed` with each owner that may have changed."""
        ...

    def leave(self) -> None: ...


class GroupSource:
    """The groups that this node coordinates."""

    topic = CONSUMER_OFFSETS

    def __init__(
        self,
        groups: Groups,
        leases: Leases,
        store: GroupStore,
        offsets: OffsetStore,
        offset_pages: OffsetPages = OFFSET_PAGES,
    ) -> None:
        self._groups = groups
        self._leases = leases
        self._store = store
        self._offsets = offsets
        self._offset_pages = offset_pages
        self._changed: Callable[[str], None] | None = None

    def is_own(self, owner: str) -> bool:
        return self._groups.lease_for(owner) is not None

    async def owners(self) -> AsyncGenerator[str]:
        for lease in self._leases.current():
            behind = ""
            while ids := await self._store.ids_behind(lease.shard, behind, IDS_AT_A_TIME):
                behind = ids[-1]
                for group_id in ids:
                    if self.is_own(group_id):
                        yield group_id

    async def read(self, owners: Sequence[str]) -> AsyncGenerator[Owned]:
        groups = {record.group_id: (record, ms) for record, ms in await self._store.as_stored(owners)}
        offsets = await self._offsets.as_stored(owners, self._offset_pages.batch)
        async for group_id in in_pieces(owners):
            found = groups.get(group_id)
            if found is None:
                yield Owned(group_id)
                continue
            record, changed_ms = found
            try:
                if len(record.members) > MANY_MEMBERS:
                    beginning, now = await asyncio.to_thread(self._records, record, changed_ms)
                else:
                    beginning, now = self._records(record, changed_ms)
            except Exception as error:
                # A newer release may have stored the group. The records of the other groups must go on.
                logger.error("records of a group not written: it cannot be read", group_id=group_id, exc_info=error)
                continue
            if offsets is None:
                committed = self._offsets.walk(group_id, self._offset_pages.group)
            else:
                committed = in_pieces(offsets.get(group_id, ()))
            yield Owned(group_id, beginning, _with_offsets(group_id, now, committed))

    def _records(self, record: GroupRecord, changed_ms: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
        group = self._groups.as_stored(record)
        return list(of_groups.beginning_of(group, changed_ms)), list(of_groups.records_of(group, changed_ms))

    def follow(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._groups.readers.append(self._told)

    def leave(self) -> None:
        self._groups.readers.remove(self._told)
        self._changed = None

    def _told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        """Report the group as changed. Without facts the group was only read, so it has not changed."""
        if facts and self._changed is not None:
            self._changed(group_id)


async def _with_offsets(
    group_id: str, entries: Iterable[Entry], offsets: AsyncIterable[OffsetAsStored]
) -> AsyncGenerator[Entry]:
    for entry in entries:
        yield entry
    async for offset in offsets:
        yield of_groups.offset_entry(group_id, offset)


class TransactionSource:
    """The transactional ids whose clients are sent to this node."""

    topic = TRANSACTION_STATE

    def __init__(self, transactions: Transactions, offsets_partitions: Callable[[], int]) -> None:
        """`offsets_partitions` returns the number of partitions of CONSUMER_OFFSETS, which holds the groups of a
        transaction."""
        self._transactions = transactions
        self._offsets_partitions = offsets_partitions

    def is_own(self, owner: str) -> bool:
        return self._transactions.coordinates(owner)

    async def owners(self) -> AsyncGenerator[str]:
        behind = ""
        while listed := await self._transactions.store.list_behind(behind, IDS_AT_A_TIME):
            behind = listed[-1].transactional_id
            for each in listed:
                if self.is_own(each.transactional_id):
                    yield each.transactional_id

    async def read(self, owners: Sequence[str]) -> AsyncGenerator[Owned]:
        store = self._transactions.store
        found = {each.transactional_id: each for each in await store.recorded(owners)}
        open_ids = [each.enlisted_id for each in found.values() if each.enlisted_id is not None]
        partitions = await store.partitions(open_ids)
        groups = await store.groups(open_ids)
        async for owner in in_pieces(owners):
            read = found.get(owner)
            if read is None:
                yield Owned(owner)
                continue
            open_id = -1 if read.enlisted_id is None else read.enlisted_id
            taken_in = self._taken_in(partitions.get(open_id, ()), groups.get(open_id, ()))
            now = of_transactions.record_of(read, taken_in)
            yield Owned(owner, list(of_transactions.beginning_of(read)), aiter(in_pieces(now)))

    def _taken_in(
        self, partitions: Sequence[TransactionPartition], group_ids: Sequence[str]
    ) -> Mapping[str, Sequence[int]]:
        topics = {
            name: [part.partition_index for part in some]
            for name, some in groupby(partitions, key=lambda part: part.topic)
        }
        if group_ids:
            count = self._offsets_partitions()
            topics[CONSUMER_OFFSETS] = sorted({partition_of(group_id, count) for group_id in group_ids})
        return topics

    def follow(self, changed: Callable[[str], None]) -> None:
        self._transactions.follow(changed)

    def leave(self) -> None:
        self._transactions.follow(None)
