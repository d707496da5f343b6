"""The epoch by which Postgres fences a commit, and when a commit is tried again. These tests use no Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from uuid import UUID

import pytest

from gateway.apis.groups.committing import Commit, Committer, commit
from gateway.config.broker import BrokerConfig
from gateway.coordinator.requests import OffsetCommitReply
from gateway.net.context import RequestContext
from gateway.net.places import NO_PLACE
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from storage.types import OffsetCommit, Refusal

TOPIC = UUID(int=1)


class Partition(NamedTuple):
    partition_index: int = 0
    committed_offset: int = 7
    committed_leader_epoch: int = -1
    committed_metadata: str | None = None


class Coordinator:
    """Returns `replies` one after another. In Postgres the member has `stored_epoch`."""

    def __init__(self, stored_epoch: int, *replies: OffsetCommitReply) -> None:
        self.replies = list(replies)
        self.stored_epoch = stored_epoch
        self.asked: list[Any] = []
        self.fences: list[int | None] = []
        groups = SimpleNamespace(
            next_request_id=lambda: 1,
            submit=self._submit,
            lease_for=lambda _group_id: SimpleNamespace(),
            offset_committer=SimpleNamespace(submit=self._store, next_number=lambda: 1),
            readers=(),
        )
        services = SimpleNamespace(groups=groups, settings=SimpleNamespace(broker=BrokerConfig()))
        connection = SimpleNamespace(connection_id="c")
        found = SimpleNamespace(
            services=services, connection=connection, version=9, api_key=ApiKey.OFFSET_COMMIT, place=NO_PLACE
        )
        self.context = cast(RequestContext, found)

    def _submit(self, _group_id: str, event: Any) -> OffsetCommitReply:
        self.asked.append(event)
        return self.replies.pop(0)

    async def _store(self, rows: Sequence[OffsetCommit], number: int, *, again: bool) -> list[Refusal | None]:
        self.fences += [row.generation_id for row in rows]
        return [None if row.generation_id == self.stored_epoch else Refusal.STALE_MEMBER_EPOCH for row in rows]

    async def commit_at(self, epoch: int) -> ErrorCode | None:
        one = Commit(Partition(), TOPIC, None)
        await commit([one], Committer("g", "m", None, epoch, {}), self.context)
        return one.error


def taken(member_epoch: int | None) -> OffsetCommitReply:
    return OffsetCommitReply(ErrorCode.NONE, by_member_epoch=True, member_epoch=member_epoch)


@pytest.mark.asyncio
async def test_accepted_older_epoch_is_fenced_by_the_members_epoch() -> None:
    coordinator = Coordinator(3, taken(3))
    assert await coordinator.commit_at(2) is ErrorCode.NONE
    assert coordinator.fences == [3]
    assert [event.partitions for event in coordinator.asked] == [((TOPIC, 0),)]


@pytest.mark.asyncio
async def test_commit_is_retried_if_the_members_epoch_moved() -> None:
    coordinator = Coordinator(3, taken(2), taken(3))
    assert await coordinator.commit_at(2) is ErrorCode.NONE
    assert coordinator.fences == [2, 3]
    coordinator = Coordinator(3, taken(2), OffsetCommitReply(ErrorCode.STALE_MEMBER_EPOCH, by_member_epoch=True))
    assert await coordinator.commit_at(2) is ErrorCode.STALE_MEMBER_EPOCH
    assert coordinator.fences == [2]


@pytest.mark.asyncio
async def test_commit_is_fenced_by_its_own_epoch_by_default() -> None:
    coordinator = Coordinator(3, taken(None), taken(None))
    assert await coordinator.commit_at(2) is ErrorCode.STALE_MEMBER_EPOCH
    assert coordinator.fences == [2]
