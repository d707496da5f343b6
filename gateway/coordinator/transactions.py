"""Decisions about transactional producers: functions from a producer's row and a request to a decision.

The one idea: a transaction usually ends in one step, so a producer is either in a transaction or not. A large one is in
PrepareCommit or PrepareAbort until every partition has its marker, and nothing else is decided in the meantime. Kafka
answers an end before its markers are written; here the answer comes after they are written.

Mirrors upstream's TransactionCoordinator and TransactionMetadata (KIP-98, KIP-360, KIP-588), also for clients whose
epoch rises with every transaction (KIP-890). It reads and writes nothing, and knows neither partitions nor time:
`gateway/transactions/coordinator.py` asks, and writes what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from protocol.errors import ErrorCode

NO_ID, NO_EPOCH = -1, -1
MAX_EPOCH = 2**15 - 1
EXHAUSTED_FROM_EPOCH = MAX_EPOCH - 1
"""A producer at this epoch gets another id with its next one. The last epoch of all is left for fencing."""
FIRST_VERSION_THAT_RAISES_EPOCHS = 2
"""First `transaction.version` whose epochs rise with every transaction."""


class TransactionState(StrEnum):
    """States of a producer, by the names that DescribeTransactions uses."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_ENDING = frozenset((TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT))


@dataclass(frozen=True, slots=True)
class Producer:
    """The owner of a transactional id, and the state of its transaction."""

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    last_producer_epoch: int = NO_EPOCH
    """The last epoch of the present owner, if the coordinator has raised it since. The owner may not know: its answer
    was lost, or its transaction was aborted. −1 if another owner has taken over."""
    previous_producer_id: int = NO_ID
    """The id that `last_producer_epoch` belongs to, if its epochs were used up. −1: the present id."""

    @property
    def owner_epoch(self) -> int:
        """The epoch that the owner of an open transaction knows. A new history raises epochs by more than one, because
        the lost history may have assigned the epochs in between."""
        skipped = self.previous_producer_id == NO_ID and NO_EPOCH < self.last_producer_epoch < self.producer_epoch - 1
        return self.last_producer_epoch if skipped else self.producer_epoch

    def is_adopted_from(self, producer_id: int, producer_epoch: int) -> bool:
        """Return True if this owner began the open transaction in a lost history. The coordinator soon aborts it, and
        then the owner may continue."""
        if self.state is not TransactionState.ONGOING or self.owner_epoch == self.producer_epoch:
            return False
        return (producer_id, producer_epoch) == (self.producer_id, self.owner_epoch)


@dataclass(frozen=True, slots=True)
class InitProducer:
    """InitProducerId. A producer that names its id and epoch continues as itself (KIP-360); both are −1 otherwise."""

    timeout_ms: int
    producer_id: int = NO_ID
    producer_epoch: int = NO_EPOCH

    @property
    def names_itself(self) -> bool:
        return self.producer_id != NO_ID


@dataclass(frozen=True, slots=True)
class End:
    """How the open transaction ends, with markers of `marker_epoch`."""

    committed: bool
    marker_epoch: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Either an `error`, or the new row (nothing is written if it is unchanged) and how its transaction ends."""

    error: ErrorCode = ErrorCode.NONE
    after: Producer | None = None
    end: End | None = None


def needs_producer_id(producer: Producer | None) -> bool:
    """Return True if the next epoch may belong to a producer id that was never used."""
    return producer is None or producer.producer_epoch >= EXHAUSTED_FROM_EPOCH


def initialize(producer: Producer | None, asked: InitProducer, fresh_id: int) -> Decision:
    """Assign the next epoch, which fences every earlier one, and abort the open transaction.

    An owner whose epoch the coordinator has raised gets the raised epoch (KIP-360, KIP-588). Another producer that
    takes over makes the coordinator forget the last epoch, so the owner before is fenced for good."""
    if producer is None:
        return Decision(after=Producer(fresh_id, 0, asked.timeout_ms))
    if producer.state in _ENDING:
        return Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    ongoing = producer.state is TransactionState.ONGOING
    if asked.names_itself:
        if not ongoing and _is_last(producer, asked.producer_id, asked.producer_epoch):
            return Decision(after=replace(producer, timeout_ms=asked.timeout_ms, state=TransactionState.EMPTY))
        if producer.is_adopted_from(asked.producer_id, asked.producer_epoch):
            return Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
        if (asked.producer_id, asked.producer_epoch) != (producer.producer_id, producer.producer_epoch):
            return Decision(ErrorCode.PRODUCER_FENCED)
    after = replace(_at_next_epoch(producer, fresh_id), timeout_ms=asked.timeout_ms, state=TransactionState.EMPTY)
    if not asked.names_itself:
        after = replace(after, last_producer_epoch=NO_EPOCH)
    return Decision(after=after, end=End(committed=False, marker_epoch=_fencing(producer)) if ongoing else None)


def add(producer: Producer | None, producer_id: int, producer_epoch: int) -> Decision:
    """Decide whether partitions or groups may be enlisted (AddPartitionsToTxn, AddOffsetsToTxn); the first one
    begins the transaction. Then the owner knows its epoch, so the last one is forgotten."""
    if error := verify(producer, producer_id, producer_epoch):
        return Decision(error)
    assert producer is not None
    if producer.state is TransactionState.ONGOING:
        return Decision(after=producer)
    return Decision(after=replace(producer, state=TransactionState.ONGOING, last_producer_epoch=NO_EPOCH))


def verify(producer: Producer | None, producer_id: int, producer_epoch: int) -> ErrorCode:
    """Return whether the requester may learn which partitions the producer's transaction has enlisted
    (AddPartitionsToTxn that only verifies)."""
    error = _judge(producer, producer_id, producer_epoch)
    if not error and producer is not None and producer.state in _ENDING:
        return ErrorCode.CONCURRENT_TRANSACTIONS
    return error


def end(producer: Producer | None, producer_id: int, producer_epoch: int, *, committed: bool) -> Decision:
    """Decide an EndTxn below version 5. A repeated request gets the same answer again."""
    if producer is not None and producer.state in _ENDING:
        return Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    if error := _judge(producer, producer_id, producer_epoch):
        return Decision(error)
    assert producer is not None
    ended = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
    if producer.state is TransactionState.ONGOING:
        return Decision(after=replace(producer, state=ended), end=End(committed, producer.producer_epoch))
    if producer.state is ended:
        return Decision(after=producer)
    return Decision(ErrorCode.INVALID_TXN_STATE)


def end_and_raise_epoch(
    producer: Producer | None, producer_id: int, producer_epoch: int, fresh_id: int, *, committed: bool
) -> Decision:
    """Decide an EndTxn from version 5 on: the producer continues at the next epoch, so that late batches join no later
    transaction.

    The producer may not know whether any of its batches has arrived, so it may abort a transaction that has not begun.
    At the last epoch the reply reports how its transaction ended: by an end whose answer was lost, or by a time-out.
    """
    if producer is not None and producer.state in _ENDING:
        return Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    if producer is not None and producer.is_adopted_from(producer_id, producer_epoch):
        return Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    ended = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
    if producer is not None and _is_last(producer, producer_id, producer_epoch):
        if not committed and producer.owner_epoch != producer.producer_epoch:
            # The owner learns the epoch that a new history has given it. `adopt_history` recognises this by the state.
            return Decision(after=replace(producer, state=TransactionState.EMPTY))
        if producer.state is ended:
            return Decision(after=producer)
        over = producer.state in (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)
        return Decision(ErrorCode.INVALID_TXN_STATE if over else ErrorCode.PRODUCER_FENCED)
    if producer is not None and producer.previous_producer_id == producer_id != NO_ID:
        return Decision(ErrorCode.PRODUCER_FENCED)
    if error := _judge(producer, producer_id, producer_epoch):
        return Decision(error)
    assert producer is not None
    after = replace(_at_next_epoch(producer, fresh_id), state=ended)
    if producer.state is TransactionState.ONGOING:
        return Decision(after=after, end=End(committed, _fencing(producer)))
    return Decision(ErrorCode.INVALID_TXN_STATE) if committed else Decision(after=after)


def time_out(producer: Producer | None, fresh_id: int) -> Decision:
    """Abort an open transaction that its owner did not end. Its owner may continue at the next epoch (KIP-588)."""
    if producer is None or producer.state is not TransactionState.ONGOING:
        return Decision(ErrorCode.INVALID_TXN_STATE)
    after = replace(
        _at_next_epoch(producer, fresh_id),
        last_producer_epoch=producer.owner_epoch,
        state=TransactionState.COMPLETE_ABORT,
    )
    return Decision(after=after, end=End(committed=False, marker_epoch=_fencing(producer)))


def judge_marker(marker_epoch: int, transaction_version: int, known_epoch: int, *, is_open: bool) -> ErrorCode:
    """Return whether a partition accepts an ABORT marker, by the latest epoch that it knows of the producer. `is_open`
    is true if the marker would end anything (upstream: ProducerAppendInfo).

    From `transaction.version` 2 on a marker's epoch is later than that of what it ends; a repeated marker does no harm
    (KIP-1228).
    """
    raised = transaction_version >= FIRST_VERSION_THAT_RAISES_EPOCHS
    if marker_epoch < known_epoch or (raised and is_open and marker_epoch == known_epoch):
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return ErrorCode.NONE


def _judge(producer: Producer | None, producer_id: int, producer_epoch: int) -> ErrorCode:
    if producer is None or producer.producer_id != producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if producer.producer_epoch != producer_epoch:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.NONE


def _fencing(producer: Producer) -> int:
    return min(producer.producer_epoch + 1, MAX_EPOCH)


def _at_next_epoch(producer: Producer, fresh_id: int) -> Producer:
    """Return the producer at its owner's next epoch; the present epoch becomes `last_producer_epoch`."""
    if needs_producer_id(producer):
        number, epoch, previous_id = fresh_id, 0, producer.producer_id
    else:
        number, epoch, previous_id = producer.producer_id, producer.producer_epoch + 1, NO_ID
    return replace(
        producer,
        producer_id=number,
        producer_epoch=epoch,
        last_producer_epoch=producer.producer_epoch,
        previous_producer_id=previous_id,
    )


def _is_last(producer: Producer, producer_id: int, producer_epoch: int) -> bool:
    """Return True if these are the id and epoch that the owner had before the coordinator raised its epoch."""
    before = producer.producer_id if producer.previous_producer_id == NO_ID else producer.previous_producer_id
    return producer.last_producer_epoch != NO_EPOCH and (producer_id, producer_epoch) == (
        before,
        producer.last_producer_epoch,
    )
