"""The partitions that are known to be enlisted in transactions, so that not every batch asks Postgres.

The one idea: this memory may be out of date and never decides. The log looks for itself, under the partition's lock. If
it refuses a batch, the entry is forgotten here and Postgres is asked again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from storage.types import PartitionKey

MAX_PARTITIONS = 100_000
"""Partitions of all producers together. Those mentioned least recently are forgotten."""

_NOTHING: tuple[int, set[PartitionKey]] = -1, set()


class TakenIn:
    """For each producer, its last known epoch and the partitions enlisted at that epoch."""

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
