"""What a transactional producer may do next: functions from its row and a request to a decision.

The one idea: a transaction ends in one step, so a producer is either in a transaction or not, and none of upstream's
states between (PrepareCommit, PrepareAbort, PrepareEpochFence) is ever seen. Where upstream answers
CONCURRENT_TRANSACTIONS until markers are written, the answer here comes when they are.

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
NO_TIMEOUT_MS = 2**31 - 1
"""Of a producer whose transactions never time out (KIP-939)."""
EXHAUSTED_FROM_EPOCH = MAX_EPOCH - 1
"""A producer at this epoch gets another id with its next one. The last epoch of all is left for fencing."""
FIRST_VERSION_THAT_RAISES_EPOCHS = 2
"""Of `transaction.version`."""


class TransactionState(StrEnum):
    """By the names that DescribeTransactions gives them."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


@dataclass(frozen=True, slots=True)
class Producer:
    """A transactional id's owner, and how far it has come."""

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    last_producer_epoch: int = NO_EPOCH
    """The epoch before, where its owner got this one by a request with it: asked again, the answer is given again."""
    previous_producer_id: int = NO_ID
    """Whose epochs were used up."""


@dataclass(frozen=True, slots=True)
class InitProducer:
    """InitProducerId. Who names its id and epoch goes on as itself (KIP-360); both are −1 otherwise."""

    timeout_ms: int
    producer_id: int = NO_ID
    producer_epoch: int = NO_EPOCH

    @property
    def names_itself(self) -> bool:
        return self.producer_id != NO_ID


@dataclass(frozen=True, slots=True)
class End:
    """The transaction that is under way ends by this, with markers of `marker_epoch`."""

    committed: bool
    marker_epoch: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`error`, or what the row becomes (as it was: nothing is written) and how its transaction ends."""

    error: ErrorCode = ErrorCode.NONE
    after: Producer | None = None
    end: End | None = None


@dataclass(frozen=True, slots=True)
class SentMarker:
    """WriteTxnMarkers, for one partition."""

    producer_epoch: int
    committed: bool
    coordinator_epoch: int = 0
    transaction_version: int = 0


def needs_producer_id(producer: Producer | None) -> bool:
    """Whether the next epoch may be one of an id that nobody has had."""
    return producer is None or producer.producer_epoch >= EXHAUSTED_FROM_EPOCH


def initialize(producer: Producer | None, asked: InitProducer, fresh_id: int) -> Decision:
    """A new epoch, which fences everybody who has an earlier one; what they left open is aborted."""
    if producer is None:
        return Decision(after=Producer(fresh_id, 0, asked.timeout_ms))
    ongoing = producer.state is TransactionState.ONGOING
    if asked.names_itself:
        if not ongoing and _came_of(producer, asked.producer_id, asked.producer_epoch):
            return Decision(after=producer)
        if (asked.producer_id, asked.producer_epoch) != (producer.producer_id, producer.producer_epoch):
            return Decision(ErrorCode.PRODUCER_FENCED)
    after = replace(_at_next_epoch(producer, fresh_id), timeout_ms=asked.timeout_ms, state=TransactionState.EMPTY)
    if not asked.names_itself:
        after = replace(after, last_producer_epoch=NO_EPOCH)
    return Decision(after=after, end=End(committed=False, marker_epoch=_fencing(producer)) if ongoing else None)


def add(producer: Producer | None, producer_id: int, producer_epoch: int) -> Decision:
    """Whether partitions or groups may be taken in (AddPartitionsToTxn, AddOffsetsToTxn); the first begins the
    transaction."""
    if error := _judge(producer, producer_id, producer_epoch):
        return Decision(error)
    assert producer is not None
    return Decision(after=replace(producer, state=TransactionState.ONGOING))


def verify(producer: Producer | None, producer_id: int, producer_epoch: int) -> ErrorCode:
    """Whether may be told what the producer's transaction has taken in (AddPartitionsToTxn that only asks)."""
    return _judge(producer, producer_id, producer_epoch)


def end(producer: Producer | None, producer_id: int, producer_epoch: int, *, committed: bool) -> Decision:
    """EndTxn below version 5. Asked again for what was done, it is answered again."""
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
    """EndTxn from version 5 on: who is answered goes on at the next epoch, so that nothing it sent before counts later.

    Its producer may not know whether any of it has arrived, so it may abort what has not begun."""
    ended = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
    if producer is not None and _came_of(producer, producer_id, producer_epoch):
        if producer.state is ended:
            return Decision(after=producer)
        over = producer.state in (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)
        return Decision(ErrorCode.INVALID_TXN_STATE if over else ErrorCode.PRODUCER_FENCED)
    if error := _judge(producer, producer_id, producer_epoch):
        return Decision(error)
    assert producer is not None
    after = replace(_at_next_epoch(producer, fresh_id), state=ended)
    if producer.state is TransactionState.ONGOING:
        return Decision(after=after, end=End(committed, _fencing(producer)))
    return Decision(ErrorCode.INVALID_TXN_STATE) if committed else Decision(after=after)


def time_out(producer: Producer | None) -> Decision:
    """Aborts the transaction that was under way for too long, and fences its producer."""
    if producer is None or producer.state is not TransactionState.ONGOING:
        return Decision(ErrorCode.INVALID_TXN_STATE)
    epoch = _fencing(producer)
    after = replace(producer, producer_epoch=epoch, last_producer_epoch=NO_EPOCH, state=TransactionState.COMPLETE_ABORT)
    return Decision(after=after, end=End(committed=False, marker_epoch=epoch))


def judge_marker(sent: SentMarker, known_epoch: int, known_coordinator_epoch: int, *, is_open: bool) -> ErrorCode:
    """Whether a partition takes a marker, by the latest epochs that it knows of the producer and of who sent markers;
    `is_open`: whether there is anything that it would end (upstream: ProducerAppendInfo).

    From `transaction.version` 2 on a marker's epoch is later than that of what it ends; one that comes again does no
    harm (KIP-1228)."""
    raised = sent.transaction_version >= FIRST_VERSION_THAT_RAISES_EPOCHS
    too_early = sent.producer_epoch < known_epoch
    if too_early or (raised and is_open and sent.producer_epoch == known_epoch):
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if sent.coordinator_epoch < known_coordinator_epoch:
        return ErrorCode.TRANSACTION_COORDINATOR_FENCED
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
    """As its owner has it from now on, which it had by its present epoch."""
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


def _came_of(producer: Producer, producer_id: int, producer_epoch: int) -> bool:
    """Whether `producer` is what a request with this id and epoch has made of it: its answer was lost."""
    before = producer.producer_id if producer.previous_producer_id == NO_ID else producer.previous_producer_id
    return producer.last_producer_epoch != NO_EPOCH and (producer_id, producer_epoch) == (
        before,
        producer.last_producer_epoch,
    )
