"""What transactions are known to have taken in, so that not every batch asks Postgres.

The one idea: what is remembered may be out of date, and never decides. The log looks for itself, under the partition's
lock; what it refuses is forgotten here, and asked anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from storage.types import PartitionKey

MAX_PARTITIONS = 100_000
"""Of all producers together; those that were heard of least recently are forgotten."""

_NOTHING: tuple[int, set[PartitionKey]] = -1, set()


class TakenIn:
    """By producer: the epoch that was heard of last, and the partitions that it has taken in at it."""

    def __init__(self, max_partitions: int = MAX_PARTITIONS) -> None:
        self._max_partitions = max_partitions
        self._count = 0
        self._producers: OrderedDict[int, tuple[int, set[PartitionKey]]] = OrderedDict()

    def __len__(self) -> int:
        """Partitions that are remembered."""
        return self._count

    def has(self, producer_id: int, producer_epoch: int, partition_key: PartitionKey) -> bool:
        epoch, keys = self._producers.get(producer_id, _NOTHING)
        return epoch == producer_epoch and partition_key in keys

    def note(self, producer_id: int, producer_epoch: int, partition_keys: Iterable[PartitionKey]) -> None:
        epoch, keys = self._producers.get(producer_id, _NOTHING)
        if epoch != producer_epoch:
            self.forget(producer_id)
            keys = set[PartitionKey]()
        before = len(keys)
        keys.update(partition_keys)
        if not keys:
            return
        self._count += len(keys) - before
        self._producers[producer_id] = producer_epoch, keys
        self._producers.move_to_end(producer_id)
        while self._count > self._max_partitions:
            self.forget(next(iter(self._producers)))

    def forget(self, producer_id: int) -> None:
        _, keys = self._producers.pop(producer_id, _NOTHING)
        self._count -= len(keys)
