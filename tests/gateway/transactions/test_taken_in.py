"""The memory of enlisted partitions: by producer and epoch, and limited."""

from __future__ import annotations

from gateway.transactions.taken_in import TakenIn
from storage.types import PartitionKey


def keys(*numbers: int) -> list[PartitionKey]:
    return [PartitionKey(number) for number in numbers]


def test_a_partition_is_known_by_its_producers_epoch() -> None:
    taken_in = TakenIn()
    taken_in.note(1, 5, keys(10, 11))
    taken_in.note(1, 5, keys(11, 12))
    assert [taken_in.has(1, 5, key) for key in keys(10, 11, 12, 13)] == [True, True, True, False]
    assert not taken_in.has(1, 4, PartitionKey(10))
    assert not taken_in.has(2, 5, PartitionKey(10))
    assert len(taken_in) == 3


def test_latest_epoch_is_remembered() -> None:
    taken_in = TakenIn()
    taken_in.note(1, 5, keys(10, 11))
    taken_in.note(1, 6, keys(11))
    assert not taken_in.has(1, 5, PartitionKey(10))
    assert not taken_in.has(1, 6, PartitionKey(10))
    assert taken_in.has(1, 6, PartitionKey(11))
    assert len(taken_in) == 1


def test_least_recently_used_producer_is_forgotten() -> None:
    taken_in = TakenIn(max_partitions=4)
    taken_in.note(1, 0, keys(10, 11))
    taken_in.note(2, 0, keys(10, 11))
    taken_in.note(1, 0, keys(10))
    taken_in.note(3, 0, keys(10))
    assert [taken_in.has(producer, 0, PartitionKey(10)) for producer in (1, 2, 3)] == [True, False, True]
    assert len(taken_in) == 3
    taken_in.note(4, 0, keys(*range(5)))
    assert len(taken_in) == 0, "more than there is room for"


def test_forgotten_partition_no_longer_counts() -> None:
    taken_in = TakenIn()
    taken_in.note(1, 0, keys(10, 11))
    taken_in.note(2, 0, ())
    taken_in.forget(1)
    taken_in.forget(1)
    taken_in.forget(9)
    assert len(taken_in) == 0
    assert not taken_in.has(1, 0, PartitionKey(10))
