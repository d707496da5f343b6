"""Group commit of offsets.

The one idea: commits from all groups of the node are merged, in order of arrival (`gatherer.py`). Of two commits of one
partition the later one must win. One queue and one transaction at a time keep that order. A commit that was fenced and
is tried again comes late. It keeps the number of its first try, and does not overwrite an offset that a commit with a
higher number has stored in the meantime.

This module does not decide whether a commit is valid. The coordinator has decided before, and Postgres checks every row
once more by the shard's lease and the group's generation or the member's epoch.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from gateway.groups.gatherer import Gatherer
from protocol.errors import ErrorCode, KafkaError
from storage.offsets import OffsetStore
from storage.types import OffsetCommit, Refusal

Results = list[Refusal | None]

MAX_ROWS_PER_TRANSACTION = 1_000
MAX_ROWS_QUEUED = 200_000
MAX_REMEMBERED = 20_000
"""Partitions whose last commit is remembered, for a second try that follows within milliseconds."""


class _Request(NamedTuple):
    number: int
    again: bool
    commits: Sequence[OffsetCommit]


class OffsetCommitter:
    """Commit at once if no transaction runs. Otherwise the next transaction takes the queue, up to `max_rows` rows.

    A request is never split: a request of more than `max_rows` rows gets a transaction of its own.
    """

    def __init__(
        self,
        store: OffsetStore,
        *,
        max_rows: int = MAX_ROWS_PER_TRANSACTION,
        max_rows_queued: int = MAX_ROWS_QUEUED,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self._store = store
        self._max_rows_queued = max_rows_queued
        self._max_remembered = max_remembered
        self._last_number = 0
        self._stored: OrderedDict[tuple[str, UUID, int], int] = OrderedDict()
        """Number of the commit that last stored the offset of a partition."""
        self._requests: Gatherer[_Request, Results] = Gatherer(
            "offset committer", self._commit, max_size=max_rows, size=lambda request: len(request.commits)
        )

    def next_number(self) -> int:
        """Return the number for a commit that is about to be submitted."""
        self._last_number += 1
        return self._last_number

    def submit(
        self, commits: Sequence[OffsetCommit], number: int | None = None, *, again: bool = False
    ) -> asyncio.Future[Results]:
        """Return a future of one element per commit, in order: the refusal, or None if the commit is durable.

        The commits are in the queue when this returns, so transactions follow the order of the calls. `again`: the
        commit was submitted with this `number` before and was fenced. Then partitions that a later commit has stored
        are left alone. The future raises StorageUnavailable if the outcome is unknown, and other StorageErrors as the
        store raises them.

        Raise KafkaError(COORDINATOR_NOT_AVAILABLE) if too many rows wait already.
        """
        queued = self._requests.queued_size
        if queued and queued + len(commits) > self._max_rows_queued:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many offset commits wait for Postgres")
        return self._requests.submit(_Request(self.next_number() if number is None else number, again, commits))

    async def drain(self) -> None:
        """Wait until nothing is queued or in progress. The caller limits the wait."""
        await self._requests.drain()

    async def _commit(self, requests: Sequence[_Request]) -> list[Results]:
        results: dict[int, Results] = {}
        sent: list[tuple[int, int, OffsetCommit]] = []
        # If several commits name one partition, the store keeps the last of them.
        for position, request in sorted(enumerate(requests), key=lambda each: each[1].number):
            results[position] = [None] * len(request.commits)
            for index, commit in enumerate(request.commits):
                if not request.again or self._stored.get(_partition(commit), 0) < request.number:
                    sent.append((position, index, commit))
        for (position, index, commit), refusal in zip(
            sent, await self._store.commit([commit for *_, commit in sent]), strict=True
        ):
            results[position][index] = refusal
            if refusal is None:
                self._remember(_partition(commit), requests[position].number)
        return [results[position] for position in range(len(requests))]

    def _remember(self, partition: tuple[str, UUID, int], number: int) -> None:
        self._stored[partition] = number
        self._stored.move_to_end(partition)
        if len(self._stored) > self._max_remembered:
            self._stored.popitem(last=False)


def _partition(commit: OffsetCommit) -> tuple[str, UUID, int]:
    return commit.group_id, commit.topic_id, commit.partition_index
