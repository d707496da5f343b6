"""Groups as they are stored: the coordinator's values on their way to and from Postgres, which know nothing of it.

The one idea: a record is the group's whole surviving state. So a write whose outcome is unknown can be repeated, a read
needs nothing else, and all that is left to care for is order: a group is not read while a write of it is under way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

import structlog

from gateway.cluster.leases import shard_of
from gateway.coordinator.model import Group, GroupState, MemberId, Settings
from gateway.coordinator.restore import StoredGroup, StoredMember, restore
from storage.errors import StorageUnavailable
from storage.groups import GroupStore
from storage.types import CoordinatorLease, GroupRecord, MemberRecord

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")

FIRST_RETRY_MS = 50
LAST_RETRY_MS = 1_000

Wanted = Callable[[], bool]
"""Whether anybody still waits for a read or write that failed: one that nobody wants is not tried again."""


class GroupRecords:
    """Reads and writes the records of this node's groups; tries again while Postgres is away.

    All of it raises StorageUnavailable once it is in vain, writes StorageConflict when the lease is not current.
    """

    def __init__(self, store: GroupStore, patience_ms: int) -> None:
        self._store = store
        self._patience_ms = patience_ms
        self._writes: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()

    async def write(self, group: Group, state_timestamp_ms: int, lease: CoordinatorLease, wanted: Wanted) -> None:
        """Stores the group; a Dead one is removed, with its offsets. Nothing else may write it meanwhile."""
        with self._writing(group.group_id):
            if group.state is GroupState.DEAD:
                await self._patiently(
                    lambda: self._store.delete(group.group_id, lease), wanted, group_id=group.group_id
                )
            else:
                record = to_record(group, state_timestamp_ms)
                await self._patiently(lambda: self._store.save(record, lease), wanted, group_id=group.group_id)

    async def read(self, group_id: str, wanted: Wanted) -> GroupRecord | None:
        await self._written((group_id,))
        return await self._patiently(lambda: self._store.load(group_id), wanted, group_id=group_id)

    async def read_shard(self, shard: int, wanted: Wanted) -> Sequence[GroupRecord]:
        """Does not give up before nobody wants it."""
        await self._written([group_id for group_id in self._writes if shard_of(group_id) == shard])
        return await self._patiently(
            lambda: self._store.load_shard(shard), wanted, patience_ms=math.inf, all_of_shard=shard
        )

    async def list(self) -> list[tuple[str, str | None, str]]:
        """(group id, protocol type, state) of every group of the cluster; tried once."""
        return await self._store.list()

    @contextmanager
    def _writing(self, group_id: str) -> Generator[None, None, None]:
        ended = self._writes[group_id] = self._loop.create_future()
        try:
            yield
        finally:
            del self._writes[group_id]
            ended.set_result(None)

    async def _written(self, group_ids: Iterable[str]) -> None:
        """Returns once no write of these groups is under way. Whoever let go of a group may have left one behind, and
        a lease that lapsed and came back at its epoch does not fence it out."""
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
                log.warning("group waits for Postgres", error=str(error), retry_ms=pause_ms, **logged)
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, LAST_RETRY_MS)


def to_record(group: Group, state_timestamp_ms: int) -> GroupRecord:
    """`state_timestamp_ms` is the wall-clock time of the group's last change of state: offset expiry counts from it."""
    return GroupRecord(
        group_id=group.group_id,
        state=group.state.value,
        state_timestamp_ms=state_timestamp_ms,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        generation_id=group.generation_id,
        leader_id=group.leader_id,
        members=tuple(
            MemberRecord(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                session_timeout_ms=member.session_timeout_ms,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                protocols=member.protocols,
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )


def restored(record: GroupRecord, now_ms: int, settings: Settings) -> Group:
    """The group with every member's session beginning at `now_ms` (monotonic); see `coordinator.restore`."""
    return restore(
        StoredGroup(
            group_id=record.group_id,
            state=GroupState(record.state),
            protocol_type=record.protocol_type,
            protocol_name=record.protocol_name,
            generation_id=record.generation_id,
            leader_id=None if record.leader_id is None else MemberId(record.leader_id),
            members=tuple(
                StoredMember(
                    member_id=MemberId(member.member_id),
                    group_instance_id=member.group_instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    session_timeout_ms=member.session_timeout_ms,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                    protocols=member.protocols,
                    assignment=member.assignment,
                )
                for member in record.members
            ),
        ),
        now_ms,
        settings,
    )
