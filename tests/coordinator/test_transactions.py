"""What a transactional producer may do next, by the tables of upstream's TransactionCoordinator, and by property."""

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
    SentMarker,
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


def itself(producer_id: int = ID, epoch: int = EPOCH) -> InitProducer:
    return InitProducer(30_000, producer_id, epoch)


# --- InitProducerId -----------------------------------------------------------------------------------------------


def test_an_id_that_nobody_has_used_begins_at_epoch_0() -> None:
    assert needs_producer_id(None)
    for asked in (ASKED, itself()):
        assert initialize(None, asked, FRESH) == Decision(after=Producer(FRESH, 0, 30_000))


@pytest.mark.parametrize("producer", SETTLED)
def test_whoever_comes_gets_the_next_epoch(producer: Producer) -> None:
    assert initialize(producer, ASKED, NO_ID) == Decision(after=Producer(ID, EPOCH + 1, 30_000))


@pytest.mark.parametrize("producer", SETTLED)
def test_who_names_itself_gets_the_next_epoch_and_is_answered_again(producer: Producer) -> None:
    after = Producer(ID, EPOCH + 1, 30_000, last_producer_epoch=EPOCH)
    assert initialize(producer, itself(), NO_ID) == Decision(after=after)
    assert initialize(after, itself(), NO_ID) == Decision(after=after)
    assert initialize(after, itself(epoch=EPOCH + 1), NO_ID).after == replace(
        after, producer_epoch=EPOCH + 2, last_producer_epoch=EPOCH + 1
    )


def test_an_answer_is_not_given_again_once_the_epoch_was_used() -> None:
    after = initialize(EMPTY, itself(), NO_ID).after
    assert after is not None
    used = replace(after, state=TransactionState.ONGOING)
    assert initialize(used, itself(), NO_ID) == Decision(ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("producer", [*SETTLED, ONGOING])
@pytest.mark.parametrize("asked", [itself(epoch=EPOCH - 1), itself(epoch=EPOCH + 1), itself(producer_id=ID + 1)])
def test_who_names_another_epoch_or_id_is_fenced(producer: Producer, asked: InitProducer) -> None:
    assert initialize(producer, asked, NO_ID) == Decision(ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("asked", [ASKED, itself()])
def test_what_was_left_open_is_aborted_by_markers_of_the_next_epoch(asked: InitProducer) -> None:
    decision = initialize(ONGOING, asked, NO_ID)
    assert decision.end == End(committed=False, marker_epoch=EPOCH + 1)
    assert decision.after is not None
    assert (decision.after.producer_epoch, decision.after.state) == (EPOCH + 1, TransactionState.EMPTY)


@pytest.mark.parametrize("state", list(TransactionState))
@pytest.mark.parametrize("epoch", [EXHAUSTED_FROM_EPOCH, MAX_EPOCH])
def test_epochs_that_are_used_up_bring_another_id(state: TransactionState, epoch: int) -> None:
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
def test_a_transaction_begins_with_what_it_takes_in(producer: Producer) -> None:
    assert add(producer, ID, EPOCH) == Decision(after=ONGOING)


@pytest.mark.parametrize("producer", [None, *SETTLED, ONGOING])
def test_nobody_else_adds_or_ends(producer: Producer | None) -> None:
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
def test_how_a_transaction_ends(producer: Producer, committed: bool, expected: Decision) -> None:
    assert end(producer, ID, EPOCH, committed=committed) == expected


def test_what_takes_too_long_is_aborted_and_its_producer_fenced() -> None:
    decision = time_out(ONGOING)
    assert decision == Decision(
        after=replace(ABORTED, producer_epoch=EPOCH + 1), end=End(committed=False, marker_epoch=EPOCH + 1)
    )
    assert end(decision.after, ID, EPOCH, committed=True).error is ErrorCode.PRODUCER_FENCED
    last = time_out(replace(ONGOING, producer_epoch=MAX_EPOCH)).end
    assert last == End(committed=False, marker_epoch=MAX_EPOCH)


@pytest.mark.parametrize("producer", [None, *SETTLED])
def test_what_has_ended_meanwhile_does_not_time_out(producer: Producer | None) -> None:
    assert time_out(producer).error is ErrorCode.INVALID_TXN_STATE


# --- EndTxn that raises the epoch (KIP-890) ------------------------------------------------------------------------

INVALID, FENCED = ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED


def came_of_the_epoch_before(producer: Producer) -> Producer:
    """As a request with (ID, EPOCH) has left it."""
    return replace(producer, producer_epoch=EPOCH + 1, last_producer_epoch=EPOCH)


@pytest.mark.parametrize("committed", [True, False])
def test_a_transactions_end_raises_the_epoch_and_its_markers_have_the_new_one(committed: bool) -> None:
    state = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
    assert end_and_raise_epoch(ONGOING, ID, EPOCH, NO_ID, committed=committed) == Decision(
        after=Producer(ID, EPOCH + 1, 60_000, state, last_producer_epoch=EPOCH), end=End(committed, EPOCH + 1)
    )


@pytest.mark.parametrize("producer", SETTLED)
def test_what_has_not_begun_can_be_aborted_but_not_committed(producer: Producer) -> None:
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
def test_who_asks_again_is_answered_by_what_was_done(
    producer: Producer, of_commit: ErrorCode, of_abort: ErrorCode
) -> None:
    now = came_of_the_epoch_before(producer)
    for committed, code in ((True, of_commit), (False, of_abort)):
        answered = end_and_raise_epoch(now, ID, EPOCH, NO_ID, committed=committed)
        assert answered == (Decision(after=now) if code is ErrorCode.NONE else Decision(code))


def test_the_last_epoch_is_followed_by_another_id_also_for_who_asks_again() -> None:
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
def test_who_raises_an_epoch_that_it_does_not_have_is_refused(producer: Producer, committed: bool) -> None:
    for other in (ID + 1, ID - 1):
        decision = end_and_raise_epoch(producer, other, EPOCH, NO_ID, committed=committed)
        assert decision == Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert end_and_raise_epoch(producer, ID, epoch, NO_ID, committed=committed) == Decision(FENCED)
    unknown = end_and_raise_epoch(None, ID, EPOCH, NO_ID, committed=committed)
    assert unknown == Decision(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


@pytest.mark.parametrize("committed", [True, False])
def test_whose_transaction_timed_out_is_not_told_the_epoch_that_fenced_it(committed: bool) -> None:
    fenced = time_out(ONGOING).after
    assert end_and_raise_epoch(fenced, ID, EPOCH, NO_ID, committed=committed) == Decision(FENCED)


def test_who_lost_the_answer_of_its_end_goes_on_by_init_producer_id() -> None:
    now = came_of_the_epoch_before(COMMITTED)
    assert initialize(now, itself(), NO_ID) == Decision(after=now)


# --- by property --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_of_many_owners_only_the_newest_gets_on(seed: int) -> None:
    """Whatever the requests and their order: identities rise and are never given twice, an answer that says so ended a
    transaction exactly once, and whoever was overtaken changes nothing."""
    chance = random.Random(seed)
    producer: Producer | None = None
    fresh = 100
    owners: list[tuple[int, int]] = []
    ends = begun = 0
    near_the_end = seed % 2 == 0
    for _ in range(300):
        owner = chance.choice((owners[-1], chance.choice(owners))) if owners else (NO_ID, NO_EPOCH)
        current = None if producer is None else (producer.producer_id, producer.producer_epoch)
        match chance.randrange(5):
            case 0:
                asked = InitProducer(1_000, *owner) if chance.random() < 0.5 else ASKED
                fresh += 1
                decision = initialize(producer, asked, fresh)
                if decision.error is ErrorCode.NONE and decision.after != producer:
                    assert decision.after is not None
                    identity = (decision.after.producer_id, decision.after.producer_epoch)
                    assert identity not in owners
                    owners.append(identity)
            case 1:
                decision = add(producer, *owner)
                assert (decision.error is ErrorCode.NONE) == (owner == current)
            case 2:
                fresh += 1
                decision = end_and_raise_epoch(producer, *owner, fresh, committed=chance.random() < 0.5)
                if decision.error is ErrorCode.NONE and decision.after != producer:
                    assert owner == current
                    assert decision.after is not None
                    identity = (decision.after.producer_id, decision.after.producer_epoch)
                    assert identity not in owners
                    owners.append(identity)
            case 3:
                decision = end(producer, *owner, committed=chance.random() < 0.5)
                assert decision.end is None or owner == current
            case _:
                decision = time_out(producer)
        if decision.error:
            assert decision.after is None
            assert decision.end is None
            continue
        was_open = producer is not None and producer.state is TransactionState.ONGOING
        assert decision.after is not None
        is_open = decision.after.state is TransactionState.ONGOING
        assert (decision.end is not None) == (was_open and not is_open)
        begun += is_open and not was_open
        ends += decision.end is not None
        if decision.end is not None and producer is not None:
            assert decision.end.marker_epoch >= producer.producer_epoch
        producer = decision.after
        if near_the_end and producer.producer_epoch < 3 and not is_open:
            producer = replace(producer, producer_epoch=EXHAUSTED_FROM_EPOCH - 2)
            owners.append((producer.producer_id, producer.producer_epoch))
    assert begun - ends == (producer is not None and producer.state is TransactionState.ONGOING)
    assert begun > 5


@pytest.mark.parametrize(
    ("epoch", "coordinator_epoch", "version", "is_open", "code"),
    [
        (EPOCH, 3, 1, True, ErrorCode.NONE),
        (EPOCH + 1, 4, 1, True, ErrorCode.NONE),
        (EPOCH - 1, 3, 1, False, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH - 1, 2, 1, True, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH, 2, 1, True, ErrorCode.TRANSACTION_COORDINATOR_FENCED),
        (EPOCH + 1, 3, 2, True, ErrorCode.NONE),
        (EPOCH, 3, 2, True, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH, 3, 2, False, ErrorCode.NONE),
        (EPOCH - 1, 3, 2, False, ErrorCode.INVALID_PRODUCER_EPOCH),
        (EPOCH + 1, 2, 2, True, ErrorCode.TRANSACTION_COORDINATOR_FENCED),
    ],
)
def test_a_marker_is_taken_by_its_epochs(
    epoch: int, coordinator_epoch: int, version: int, is_open: bool, code: ErrorCode
) -> None:
    sent = SentMarker(epoch, committed=True, coordinator_epoch=coordinator_epoch, transaction_version=version)
    assert judge_marker(sent, EPOCH, 3, is_open=is_open) is code
