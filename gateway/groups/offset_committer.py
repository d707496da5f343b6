"""Group commit of offsets.

The one idea: commits from all groups of the node are merged, in order of arrival (`gatherer.py`). Order matters: of two
commits of one partition the later one must win, which one queue and one transaction at a time give for free.

Whether a commit may stand is not decided here: the coordinator was asked before, and Postgres fences every row once
more with the shard's lease and the group's generation or the member's epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.groups.gatherer import Gatherer
from protocol.errors import ErrorCode, KafkaError
from storage.offsets import OffsetStore
from storage.types import OffsetCommit, Refusal

Results = list[Refusal | None]

MAX_ROWS_PER_TRANSACTION = 1_000
MAX_ROWS_QUEUED = 200_000


class OffsetCommitter:
    """Commits at once when idle; otherwise the next transaction takes all that queued, up to `max_rows` rows.

    One request is never split: a request of more than `max_rows` rows is a transaction of its own.
    """

    def __init__(
        self,
        store: OffsetStore,
        *,
        max_rows: int = MAX_ROWS_PER_TRANSACTION,
        max_rows_queued: int = MAX_ROWS_QUEUED,
    ) -> None:
        self._store = store
        self._max_rows_queued = max_rows_queued
        self._requests: Gatherer[Sequence[OffsetCommit], Results] = Gatherer(
            "offset committer", self._commit, max_size=max_rows, size=len
        )

    def submit(self, commits: Sequence[OffsetCommit]) -> asyncio.Future[Results]:
        """One refusal, or None for a durable commit, per element of `commits`, in its order.

        Queues before it returns, so the order of calls is the order of commits. The future raises StorageUnavailable
        when the outcome is unknown, and other StorageErrors as the store gives them.

        Raises KafkaError(COORDINATOR_NOT_AVAILABLE) when too many rows wait already.
        """
        queued = self._requests.queued_size
        if queued and queued + len(commits) > self._max_rows_queued:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many offset commits are waiting")
        return self._requests.submit(commits)

    async def drain(self) -> None:
        """Waits until nothing is queued or in flight; the caller bounds the wait."""
        await self._requests.drain()

    async def _commit(self, requests: Sequence[Sequence[OffsetCommit]]) -> list[Results]:
        refusals = iter(await self._store.commit([commit for commits in requests for commit in commits]))
        return [[next(refusals) for _ in commits] for commits in requests]
