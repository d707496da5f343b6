"""Decisions about a transactional producer's requests, compared with upstream's TransactionCoordinator: by tables, and
for random sequences.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gateway.coordinator.transactions import (
    EXHAUSTED_FROM_EPOCH,
    MAX_EPOCH,
    NO_EPOCH,
    NO_ID,
    Decision,
    End,
    InitProducer,
    Producer,
    TransactionState,
    add,
    end,
    end_and_raise_epoch,
    initialize,
    judge_marker,
    needs_producer_id,
    time_out,
)
from protocol.errors import ErrorCode

ID, EPOCH, FRESH = 7, 5, 900
EMPTY = Producer(ID, EPOCH, timeout_ms=60_000)
ONGOING = replace(EMPTY, state=TransactionState.ONGOING)
COMMITTED = replace(EMPTY, state=TransactionState.COMPLETE_COMMIT)
ABORTED = replace(EMPTY, state=TransactionState.COMPLETE_ABORT)
SETTLED = [EMPTY, COMMITTED, ABORTED]
ASKED = InitProducer(timeout_ms=30_000)
TIMED_OUT = replace(ABORTED, producer_epoch=EPOCH + 1, last_producer_epoch=EPOCH)
TAKEN_OVER = Producer(ID, EPOCH + 1, 30_000)
IN_A_NEW_HISTORY = replace(ABORTED, producer_epoch=EPOCH + 1_000, last_producer_epoch=EPOCH)


def itself(producer_id: int = ID, epoch: int = EPOCH) -> InitProducer:
    return InitProducer(30_000, producer_id, epoch)


# --- InitProducerId -----------------------------------------------------------------------------------------------


def test_unused_transactional_id_begins_at_epoch_0() -> None:
    assert needs_producer_id(None)
    for asked in (ASKED, itself()):
        assert initialize(None, asked, FRESH) == Decision(after=Producer(FRESH, 0, 30_000))


@pytest.mark.parametrize("producer", SETTLED)
def test_new_producer_gets_the_next_epoch(producer: Producer) -> None:
    assert initialize(producer, ASKED, NO_ID) == Decision(after=Producer(ID, EPOCH + 1, 30_000))


@pytest.mark.parametrize("producer", SETTLED)
def test_producer_that_names_its_epoch_gets_the_next_one_repeatably(producer: Producer) -> None:
    after = Producer(ID, EPOCH + 1, 30_000, last_producer_epoch=EPOCH)
    assert initialize(producer, itself(), NO_ID) == Decision(after=after)
    assert initialize(after, itself(), NO_ID) == Decision(after=after)
    assert initialize(replace(after, timeout_ms=1), itself(), NO_ID) == Decision(after=after), "with another timeout"
    assert initialize(after, itself(epoch=EPOCH + 1), NO_ID).after == replace(
        after, producer_epoch=EPOCH + 2, last_producer_epoch=EPOCH + 1
    )


def test_answer_is_not_repeated_after_the_epoch_was_used() -> None:
    after = initialize(EMPTY, itself(), NO_ID).after
    assert after is not None
    used = replace(after, state=TransactionState.ONGOING)
    assert initialize(used, itself(), NO_ID) == Decision(ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("producer", [*SETTLED, ONGOING])
@pytest.mark.parametrize("asked", [itself(epoch=EPOCH - 1), itself(epoch=EPOCH + 1), itself(producer_id=ID + 1)])
def test_producer_with_another_epoch_or_id_is_fenced(producer: Producer, asked: InitProducer) -> None:
    assert initialize(producer, asked, NO_ID) == Decision(ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("asked", [ASKED, itself()])
def test_open_transaction_is_aborted_by_markers_of_the_next_epoch(asked: InitProducer) -> None:
    decision = initialize(ONGOING, asked, NO_ID)
    assert decision.end == End(committed=False, marker_epoch=EPOCH + 1)
    assert decision.after is not None
    assert (decision.after.producer_epoch, decision.after.state) == (EPOCH + 1, TransactionState.EMPTY)


@pytest.mark.parametrize("state", [ONGOING.state, *(producer.state for producer in SETTLED)])
@pytest.mark.parametrize("epoch", [EXHAUSTED_FROM_EPOCH, MAX_EPOCH])
def test_exhausted_epochs_lead_to_another_producer_id(state: TransactionState, epoch: int) -> None:
    exhausted = Producer(ID, epoch, 60_000, state)
    assert needs_producer_id(exhausted)
    assert not needs_producer_id(replace(exhausted, producer_epoch=EXHAUSTED_FROM_EPOCH - 1))
    decision = initialize(exhausted, itself(epoch=epoch), FRESH)
    after = Producer(FRESH, 0, 30_000, last_producer_epoch=epoch, previous_producer_id=ID)
    assert decision.after == after
    ongoing = state is TransactionState.ONGOING
    assert decision.end == (End(committed=False, marker_epoch=MAX_EPOCH) if ongoing else None)
    assert initialize(after, itself(epoch=epoch), FRESH + 1) == Decision(after=after), "asked again"
    assert initialize(after, itself(epoch=0), FRESH + 1).error is ErrorCode.PRODUCER_FENCED, "the old id"
    assert initialize(after, itself(FRESH, 0), FRESH + 1).after == replace(
        after, producer_epoch=1, last_producer_epoch=0, previous_producer_id=NO_ID
    )


# --- AddPartitionsToTxn, AddOffsetsToTxn ------------------------------------------------------------------------------


@pytest.mark.parametrize("producer", [*SETTLED, ONGOING])
def test_first_enlisted_partition_begins_the_transaction(producer: Producer) -> None:
    assert add(producer, ID, EPOCH) == Decision(after=ONGOING)


@pytest.mark.parametrize("producer", [None, *SETTLED, ONGOING])
def test_only_the_current_producer_adds_or_ends(producer: Producer | None) -> None:
    unknown, fenced = Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING), Decision(ErrorCode.PRODUCER_FENCED)
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert add(producer, ID, epoch) == (unknown if producer is None else fenced)
        assert end(producer, ID, epoch, committed=True) == (unknown if producer is None else fenced)
    assert add(producer, ID + 1, EPOCH) == unknown
    assert end(producer, ID + 1, EPOCH, committed=False) == unknown


# --- EndTxn -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "committed", "expected"),
    [
        (EMPTY, True, Decision(ErrorCode.INVALID_TXN_STATE)),
        (EMPTY, False, Decision(ErrorCode.INVALID_TXN_STATE)),
        (ONGOING, True, Decision(after=COMMITTED, end=End(committed=True, marker_epoch=EPOCH))),
        (ONGOING, False, Decision(after=ABORTED, end=End(committed=False, marker_epoch=EPOCH))),
        (COMMITTED, True, Decision(after=COMMITTED)),
        (COMMITTED, False, Decision(ErrorCode.INVALID_TXN_STATE)),
        (ABORTED, True, Decision(ErrorCode.INVALID_TXN_STATE)),
        (ABORTED, False, Decision(after=ABORTED)),
    ],
)
def test_end_of_a_transaction_follows_its_state(producer: Producer, committed: bool, expected: Decision) -> None:
    assert end(producer, ID, EPOCH, committed=committed) == expected


def test_a_timed_out_transaction_is_aborted_at_the_next_epoch() -> None:
    assert time_out(ONGOING, NO_ID) == Decision(after=TIMED_OUT, end=End(committed=False, marker_epoch=EPOCH + 1))


@pytest.mark.parametrize("epoch", [EXHAUSTED_FROM_EPOCH, MAX_EPOCH])
def test_timeout_at_the_last_epoch_leads_to_another_id(epoch: int) -> None:
    after = Producer(FRESH, 0, 60_000, TransactionState.COMPLETE_ABORT, epoch, previous_producer_id=ID)
    decision = time_out(replace(ONGOING, producer_epoch=epoch), FRESH)
    assert decision == Decision(after=after, end=End(committed=False, marker_epoch=MAX_EPOCH))
    assert end_and_raise_epoch(after, ID, epoch, NO_ID, committed=False) == Decision(after=after)
    assert initialize(after, itself(epoch=epoch), NO_ID).after == replace(
        after, timeout_ms=30_000, state=TransactionState.EMPTY
    )


@pytest.mark.parametrize("state", [TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT])
def test_nothing_is_decided_until_every_partition_has_its_marker(state: TransactionState) -> None:
    ending = replace(TIMED_OUT, state=state)
    busy = Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    for asked in (ASKED, itself(), itself(epoch=EPOCH + 1)):
        assert initialize(ending, asked, NO_ID) == busy
    assert add(ending, ID, EPOCH + 1) == busy
    assert add(ending, ID, EPOCH) == Decision(FENCED)
    for committed in (True, False):
        assert end(ending, ID, EPOCH + 1, committed=committed) == busy
        assert end_and_raise_epoch(ending, ID, EPOCH, NO_ID, committed=committed) == busy
    assert time_out(ending, NO_ID) == Decision(INVALID)


@pytest.mark.parametrize("producer", [None, *SETTLED])
def test_ended_transaction_does_not_time_out(producer: Producer | None) -> None:
    assert time_out(producer, FRESH).error is ErrorCode.INVALID_TXN_STATE


# --- EndTxn that raises the epoch (KIP-890) ------------------------------------------------------------------------

INVALID, FENCED = ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED


def came_of_the_epoch_before(producer: Producer) -> Producer:
    """Return the producer as a request with (ID, EPOCH) leaves it."""
    return replace(producer, producer_epoch=EPOCH + 1, last_producer_epoch=EPOCH)


@pytest.mark.parametrize("committed", [True, False])
def test_a_transactions_end_raises_the_epoch_and_its_markers_have_the_new_one(committed: bool) -> None:
    state = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
    assert end_and_raise_epoch(ONGOING, ID, EPOCH, NO_ID, committed=committed) == Decision(
        after=Producer(ID, EPOCH + 1, 60_000, state, last_producer_epoch=EPOCH), end=End(committed, EPOCH + 1)
    )


@pytest.mark.parametrize("producer", SETTLED)
def test_transaction_not_begun_can_be_aborted_but_not_committed(producer: Producer) -> None:
    assert end_and_raise_epoch(producer, ID, EPOCH, NO_ID, committed=True) == Decision(INVALID)
    after = Producer(ID, EPOCH + 1, 60_000, TransactionState.COMPLETE_ABORT, last_producer_epoch=EPOCH)
    assert end_and_raise_epoch(producer, ID, EPOCH, NO_ID, committed=False) == Decision(after=after)


@pytest.mark.parametrize(
    ("producer", "of_commit", "of_abort"),
    [
        (EMPTY, FENCED, FENCED),
        (ONGOING, FENCED, FENCED),
        (COMMITTED, ErrorCode.NONE, INVALID),
        (ABORTED, INVALID, ErrorCode.NONE),
    ],
)
def test_repeated_end_is_answered_by_the_first_outcome(
    producer: Producer, of_commit: ErrorCode, of_abort: ErrorCode
) -> None:
    now = came_of_the_epoch_before(producer)
    for committed, code in ((True, of_commit), (False, of_abort)):
        answered = end_and_raise_epoch(now, ID, EPOCH, NO_ID, committed=committed)
        assert answered == (Decision(after=now) if code is ErrorCode.NONE else Decision(code))


def test_repeated_end_at_the_last_epoch_receives_the_same_new_id() -> None:
    assert [needs_producer_id(replace(ONGOING, producer_epoch=epoch)) for epoch in (32765, 32766)] == [False, True]
    last = replace(ONGOING, producer_epoch=EXHAUSTED_FROM_EPOCH)
    decision = end_and_raise_epoch(last, ID, EXHAUSTED_FROM_EPOCH, FRESH, committed=True)
    after = Producer(
        FRESH,
        0,
        60_000,
        TransactionState.COMPLETE_COMMIT,
        last_producer_epoch=EXHAUSTED_FROM_EPOCH,
        previous_producer_id=ID,
    )
    assert decision == Decision(after=after, end=End(committed=True, marker_epoch=MAX_EPOCH))
    assert end_and_raise_epoch(after, ID, EXHAUSTED_FROM_EPOCH, NO_ID, committed=True) == Decision(after=after)
    assert end_and_raise_epoch(after, ID, EXHAUSTED_FROM_EPOCH, NO_ID, committed=False) == Decision(INVALID)
    following = end_and_raise_epoch(replace(after, state=TransactionState.ONGOING), FRESH, 0, NO_ID, committed=True)
    assert following.after == replace(after, producer_epoch=1, last_producer_epoch=0, previous_producer_id=NO_ID), (
        "the id before is forgotten"
    )


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("producer", [*SETTLED, ONGOING])
def test_end_at_a_foreign_epoch_is_refused(producer: Producer, committed: bool) -> None:
    for other in (ID + 1, ID - 1):
        decision = end_and_raise_epoch(producer, other, EPOCH, NO_ID, committed=committed)
        assert decision == Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert end_and_raise_epoch(producer, ID, epoch, NO_ID, committed=committed) == Decision(FENCED)
    unknown = end_and_raise_epoch(None, ID, EPOCH, NO_ID, committed=committed)
    assert unknown == Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


def test_a_producer_that_lost_the_answer_of_its_end_continues_by_init_producer_id() -> None:
    now = came_of_the_epoch_before(COMMITTED)
    after = replace(now, timeout_ms=30_000, state=TransactionState.EMPTY)
    assert initialize(now, itself(), NO_ID) == Decision(after=after)
    assert end_and_raise_epoch(after, ID, EPOCH, NO_ID, committed=True) == Decision(FENCED), "as it has gone on"


def test_an_id_that_was_replaced_is_fenced_from_ending() -> None:
    replaced = Producer(FRESH, 0, 60_000, previous_producer_id=ID)
    assert end_and_raise_epoch(replaced, ID, EXHAUSTED_FROM_EPOCH, NO_ID, committed=False) == Decision(FENCED)
    assert end(replaced, ID, EXHAUSTED_FROM_EPOCH, committed=False) == Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


# --- answers to a producer at an earlier epoch, by what has raised the epoch since (as Apache Kafka 4.2 answers)
# -------

NONE = ErrorCode.NONE


@pytest.mark.parametrize(
    ("producer", "initialized", "added", "committed", "aborted", "committed_v5", "aborted_v5"),
    [
        pytest.param(TIMED_OUT, NONE, FENCED, FENCED, FENCED, INVALID, NONE, id="a time-out"),
        pytest.param(IN_A_NEW_HISTORY, NONE, FENCED, FENCED, FENCED, INVALID, NONE, id="a new history"),
        pytest.param(TAKEN_OVER, FENCED, FENCED, FENCED, FENCED, FENCED, FENCED, id="another producer"),
        pytest.param(
            replace(TIMED_OUT, state=TransactionState.EMPTY), NONE, FENCED, FENCED, FENCED, FENCED, FENCED, id="itself"
        ),
        pytest.param(
            replace(TIMED_OUT, state=TransactionState.ONGOING), *[FENCED] * 6, id="itself, and a transaction since"
        ),
    ],
)
def test_producer_at_the_previous_epoch_may_continue_unless_replaced(
    producer: Producer,
    initialized: ErrorCode,
    added: ErrorCode,
    committed: ErrorCode,
    aborted: ErrorCode,
    committed_v5: ErrorCode,
    aborted_v5: ErrorCode,
) -> None:
    asked = initialize(producer, itself(), NO_ID)
    assert asked.error is initialized
    if not initialized:
        assert asked.after == replace(producer, timeout_ms=30_000, state=TransactionState.EMPTY)
    assert add(producer, ID, EPOCH).error is added
    assert end(producer, ID, EPOCH, committed=True).error is committed
    assert end(producer, ID, EPOCH, committed=False).error is aborted
    assert end_and_raise_epoch(producer, ID, EPOCH, NO_ID, committed=True).error is committed_v5
    answer = end_and_raise_epoch(producer, ID, EPOCH, NO_ID, committed=False)
    learned = replace(producer, state=TransactionState.EMPTY) if producer is IN_A_NEW_HISTORY else producer
    assert answer == (Decision(aborted_v5) if aborted_v5 else Decision(after=learned))


@pytest.mark.parametrize("producer", [TIMED_OUT, IN_A_NEW_HISTORY])
def test_a_producer_that_continues_after_a_time_out_ends_its_next_transaction(producer: Producer) -> None:
    epoch = producer.producer_epoch
    began = add(producer, ID, epoch).after
    assert began is not None
    decision = end_and_raise_epoch(began, ID, epoch, NO_ID, committed=True)
    assert decision.end == End(committed=True, marker_epoch=epoch + 1)
    assert decision.after is not None
    assert (decision.after.producer_epoch, decision.after.last_producer_epoch) == (epoch + 1, epoch)


def test_a_transaction_of_a_lost_history_times_out_for_the_epoch_that_its_owner_knows() -> None:
    adopted = replace(ONGOING, producer_epoch=EPOCH + 1_000, last_producer_epoch=EPOCH)
    after = time_out(adopted, NO_ID).after
    assert after == replace(ABORTED, producer_epoch=EPOCH + 1_001, last_producer_epoch=EPOCH)
    learned = replace(EMPTY, producer_epoch=EPOCH + 1_001, last_producer_epoch=EPOCH)
    for producer in (after, learned):
        assert end_and_raise_epoch(producer, ID, EPOCH, NO_ID, committed=False) == Decision(after=learned)
    assert end_and_raise_epoch(after, ID, EPOCH + 1_000, NO_ID, committed=False) == Decision(FENCED)
    last = time_out(replace(adopted, producer_epoch=MAX_EPOCH), FRESH).after
    assert last == Producer(FRESH, 0, 60_000, TransactionState.COMPLETE_ABORT, EPOCH, previous_producer_id=ID)


def test_a_transaction_that_began_in_a_new_history_times_out_for_its_epoch() -> None:
    began = add(IN_A_NEW_HISTORY, ID, EPOCH + 1_000).after
    after = time_out(began, NO_ID).after
    assert after == replace(ABORTED, producer_epoch=EPOCH + 1_001, last_producer_epoch=EPOCH + 1_000)
    assert end_and_raise_epoch(after, ID, EPOCH + 1_000, NO_ID, committed=False) == Decision(after=after)


def test_an_owner_waits_until_its_transaction_of_a_lost_history_is_aborted() -> None:
    adopted = replace(ONGOING, producer_epoch=EPOCH + 1_000, last_producer_epoch=EPOCH)
    busy = Decision(ErrorCode.CONCURRENT_TRANSACTIONS)
    assert initialize(adopted, itself(), NO_ID) == busy
    for committed in (True, False):
        assert end_and_raise_epoch(adopted, ID, EPOCH, NO_ID, committed=committed) == busy
    assert initialize(adopted, ASKED, NO_ID).after == replace(
        TAKEN_OVER, producer_epoch=EPOCH + 1_001, last_producer_epoch=NO_EPOCH
    ), "another producer need not wait"


# --- by property --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_only_the_newest_of_many_producers_continues(seed: int) -> None:
    """The requests, their order and the timeouts are random. No two producers receive the same id and epoch. A request
    that reports the end of a transaction has ended exactly one. A replaced producer changes nothing.
    """
    chance = random.Random(seed)
    producer: Producer | None = None
    fresh = 100
    holders: dict[tuple[int, int], int] = {}
    identities: list[tuple[int, int]] = []
    newest = ends = begun = 0
    near_the_end = seed % 2 == 0
    for _ in range(400):
        asking = chance.choice((identities[-1], chance.choice(identities))) if identities else (NO_ID, NO_EPOCH)
        holder = holders.get(asking, 0)
        current = None if producer is None else (producer.producer_id, producer.producer_epoch)
        timed_out = given = False
        fresh += 1
        match chance.randrange(6):
            case 0:
                if chance.random() < 0.3:
                    asking, holder = (NO_ID, NO_EPOCH), newest + 1
                decision, given = initialize(producer, InitProducer(1_000, *asking), fresh), True
                if decision.error is ErrorCode.NONE:
                    newest = max(newest, holder)
            case 1:
                decision = add(producer, *asking)
                assert (decision.error is ErrorCode.NONE) == (asking == current)
            case 2 | 3:
                decision, given = end_and_raise_epoch(producer, *asking, fresh, committed=chance.random() < 0.5), True
                assert decision.end is None or asking == current
            case 4:
                decision = end(producer, *asking, committed=chance.random() < 0.5)
                assert decision.end is None or asking == current
            case _:
                decision, timed_out = time_out(producer, fresh), True
        if decision.error:
            assert decision.after is None
            assert decision.end is None
            continue
        assert decision.after is not None
        assert timed_out or holder == newest
        if given:
            identity = (decision.after.producer_id, decision.after.producer_epoch)
            assert holders.setdefault(identity, holder) == holder
            identities.append(identity)
        was_open = producer is not None and producer.state is TransactionState.ONGOING
        is_open = decision.after.state is TransactionState.ONGOING
        assert (decision.end is not None) == (was_open and not is_open)
        begun += is_open and not was_open
        ends += decision.end is not None
        if decision.end is not None and producer is not None:
            assert decision.end.marker_epoch >= producer.producer_epoch
        producer = decision.after
        if near_the_end and producer.producer_epoch < 3 and not is_open and chance.random() < 0.3:
            producer = replace(
                producer,
                producer_epoch=EXHAUSTED_FROM_EPOCH - 2,
                last_producer_epoch=NO_EPOCH,
                previous_producer_id=NO_ID,
            )
            identity = (producer.producer_id, producer.producer_epoch)
            holders[identity] = newest
            identities.append(identity)
    assert begun - ends == (producer is not None and producer.state is TransactionState.ONGOING)
    assert begun > 5


@pytest.mark.parametrize(
    ("epoch", "version", "is_open", "code"),
    [
        (EPOCH, 1, True, ErrorCode.NONE),
        (EPOCH + 1, 1, True, ErrorCode.NONE),
        (EPOCH - 1, 1, False, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH + 1, 2, True, ErrorCode.NONE),
        (EPOCH, 2, True, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH, 2, False, ErrorCode.NONE),
        (EPOCH - 1, 2, False, ErrorCode.INVALID_PRODUCER_EPOCH),
    ],
)
def test_marker_is_accepted_by_its_epoch(epoch: int, version: int, is_open: bool, code: ErrorCode) -> None:
    assert judge_marker(epoch, version, EPOCH, is_open=is_open) is code
