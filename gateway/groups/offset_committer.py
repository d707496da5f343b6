"""Group commit of offsets: while one transaction runs, everything that arrives is gathered for the next.

The one idea: commits from all groups of the node are merged, in order of arrival, so that a thousand consumers that
commit at once cost a few transactions instead of a thousand. Order matters: of two commits of one partition the later
one must win, which one queue and one transaction at a time give for free.

Whether a commit may stand is not decided here: the coordinator was asked before, and Postgres fences every row once
more with the shard's lease and the group's generation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from gateway.operate.logs import NO_REQUEST
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError, StorageUnavailable
from storage.offsets import OffsetStore
from storage.types import OffsetCommit, Refusal

Results = list[Refusal | None]
_Queued = tuple[Sequence[OffsetCommit], asyncio.Future[Results]]

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
        self._max_rows = max_rows
        self._max_rows_queued = max_rows_queued
        self._queue: deque[_Queued] = deque()
        self._rows_queued = 0
        self._running: asyncio.Task[None] | None = None

    def submit(self, commits: Sequence[OffsetCommit]) -> asyncio.Future[Results]:
        """One refusal, or None for a durable commit, per element of `commits`, in its order.

        Queues before it returns, so the order of calls is the order of commits. The future raises StorageUnavailable
        when the outcome is unknown, and other StorageErrors as the store gives them.

        Raises KafkaError(COORDINATOR_NOT_AVAILABLE) when too many rows wait already.
        """
        if self._rows_queued + len(commits) > self._max_rows_queued and self._queue:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many offset commits are waiting")
        future: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self._queue.append((commits, future))
        self._rows_queued += len(commits)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="offset-committer", context=NO_REQUEST.copy())
        return future

    async def drain(self) -> None:
        """Waits until nothing is queued or in flight; the caller bounds the wait."""
        while self._running is not None:
            await asyncio.wait((self._running,))

    async def _run(self) -> None:
        taken: list[_Queued] = []
        try:
            while self._queue:
                taken = self._take()
                await self._commit(taken)
        finally:
            self._running = None
            # Only an unforeseen error or a cancelled task leaves anything here; nobody may wait for ever because of it.
            _fail((*taken, *self._queue), StorageError("the offset committer has stopped"))
            self._queue.clear()
            self._rows_queued = 0

    def _take(self) -> list[_Queued]:
        taken = [self._queue.popleft()]
        rows = len(taken[0][0])
        while self._queue and rows + len(self._queue[0][0]) <= self._max_rows:
            taken.append(self._queue.popleft())
            rows += len(taken[-1][0])
        self._rows_queued -= rows
        return taken

    async def _commit(self, taken: Sequence[_Queued]) -> None:
        try:
            results = await self._store.commit([commit for commits, _ in taken for commit in commits])
        except StorageUnavailable as error:
            _fail(taken, error)
            return
        except StorageError as error:
            if len(taken) == 1:
                _fail(taken, error)
                return
            # A row that Postgres cannot take must not cost the requests it happened to be merged with.
            for one in taken:
                await self._commit((one,))
            return
        position = 0
        for commits, future in taken:
            if not future.done():
                future.set_result(results[position : position + len(commits)])
            position += len(commits)


def _fail(taken: Sequence[_Queued], error: StorageError) -> None:
    for _, future in taken:
        if not future.done():
            future.set_exception(error)
