"""The job that removes the data of deleted topics, on the node that holds its lease.

The one idea: level-triggered, like every job. A pass reads which hidden topics are due, and goes on while any is due. A
topic whose deletion fails is postponed by itself, and Postgres stores the postponement. So it keeps no other topic
waiting, and the next holder of the lease knows of it. A topic whose owner died is merely due.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from storage.deletion import DeletionStore, DueDeletion
from storage.errors import StorageError
from storage.types import CoordinatorLease

logger = structlog.stdlib.get_logger(__name__)

TOPICS_PER_LOOK = 100

REPEATED_FAILURES = 10
"""Consecutive failures of one topic after which an operator must act; logged again each time the number doubles."""


class Deletions:
    """The deletions of one node. `run` is one pass. The pass calls `count_gone` for each topic that is completely
    removed, and `count_failure` for each failure.
    """

    def __init__(
        self,
        store: DeletionStore,
        lease: Callable[[], CoordinatorLease | None],
        *,
        count_gone: Callable[[], object] = lambda: None,
        count_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._lease = lease
        self._count_gone = count_gone
        self._count_failure = count_failure

    async def run(self) -> None:
        """Delete until nothing is due or the lease is gone. Topics take turns, so that a large topic does not delay
        small ones, nor one that is deleted in the meantime. Raise StorageError if Postgres does not respond.
        """
        while waiting := await self._store.due(TOPICS_PER_LOOK):
            for topic in waiting:
                lease = self._lease()
                if lease is None:
                    return
                try:
                    turn = await self._store.advance(topic.topic_id)
                except StorageError as error:
                    if not await self._put_off(topic, str(error), lease):
                        return
                    continue
                if turn.gone:
                    self._count_gone()
                    logger.info("deleted topic's data removed", topic=topic.name, topic_id=str(topic.topic_id))

    async def _put_off(self, topic: DueDeletion, error: str, lease: CoordinatorLease) -> bool:
        """Postpone the topic. Return False if another node holds the lease by now."""
        self._count_failure()
        put_off = await self._store.failed(topic.topic_id, error, lease)
        if put_off is None:
            return False
        failures, retry_in_ms = put_off
        repeated = failures >= REPEATED_FAILURES and (failures == REPEATED_FAILURES or failures & (failures - 1) == 0)
        (logger.error if repeated else logger.warning)(
            "a deleted topic's data could not be removed",
            topic=topic.name,
            topic_id=str(topic.topic_id),
            failures=failures,
            retry_in_s=retry_in_ms / 1000,
            error=error,
        )
        return True
