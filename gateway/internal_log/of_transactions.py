"""A transactional id as the record that Kafka keeps in `__transaction_state`.

The one idea: one key, and the value of the present state. Kafka also writes the states in which markers are pending;
here only large transactions have them (`gateway/coordinator/transactions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.coordinator.transactions import NO_EPOCH, NO_ID
from gateway.internal_log.record import Entry
from protocol import coordinator_records as log
from protocol.coordinator_records import encode_key, encode_value
from storage.transactions import ProducerRecord, RecordedProducer

EMPTY = "Empty"
_STATUS = {
    EMPTY: 0,
    "Ongoing": 1,
    "PrepareCommit": 2,
    "PrepareAbort": 3,
    "CompleteCommit": 4,
    "CompleteAbort": 5,
}
"""Kafka's codes of TransactionState."""
_COMPLETE = frozenset({"CompleteCommit", "CompleteAbort"})
_NOT_BEGUN = -1
VERSION = 1
"""Version of the record's value if transaction.version is 1 or higher."""


def record_of(read: RecordedProducer, taken_in: Mapping[str, Sequence[int]]) -> Iterator[Entry]:
    """Yield the record of the id. `taken_in` maps each topic to the partitions of the open transaction."""
    started_ms = read.last_started_ms if read.started_ms is None else read.started_ms
    partitions = tuple(
        log.TransactionPartitions(topic=topic, partition_ids=tuple(indexes)) for topic, indexes in taken_in.items()
    )
    yield _entry(
        read,
        producer_epoch=read.record.producer_epoch,
        state=read.record.state,
        partitions=None if read.record.state == EMPTY else partitions,
        started_ms=_NOT_BEGUN if started_ms is None else started_ms,
    )


def beginning_of(read: RecordedProducer) -> Iterator[Entry]:
    """Yield what Kafka wrote when the id received its producer id, if that differs from the present state. A log that
    contains the id must begin with this record."""
    if read.record.state != EMPTY or read.record.producer_epoch > 0:
        yield _entry(read, producer_epoch=0, state=EMPTY, partitions=None, started_ms=_NOT_BEGUN)


def _entry(
    read: RecordedProducer,
    *,
    producer_epoch: int,
    state: str,
    partitions: tuple[log.TransactionPartitions, ...] | None,
    started_ms: int,
) -> Entry:
    record: ProducerRecord = read.record
    # As in Kafka, this is the id that the transactional id had before the record: usually the same.
    is_new = state == EMPTY or (record.last_producer_epoch != NO_EPOCH and state in _COMPLETE)
    replaced = is_new and record.previous_producer_id != NO_ID
    value = log.TransactionLogValue(
        producer_id=record.producer_id,
        previous_producer_id=record.previous_producer_id if replaced else record.producer_id,
        producer_epoch=producer_epoch,
        transaction_timeout_ms=record.timeout_ms,
        transaction_status=_STATUS[state],
        transaction_partitions=partitions,
        transaction_last_update_timestamp_ms=read.updated_ms,
        transaction_start_timestamp_ms=started_ms,
    )
    key = log.TransactionLogKey(transactional_id=read.transactional_id)
    return encode_key(log.TRANSACTION, key), encode_value(log.TRANSACTION, VERSION, value)
