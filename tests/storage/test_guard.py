"""Conditions under which a new connection is accepted, by values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.errors import StorageUnavailable
from storage.guard import REMEMBERED_TRANSACTIONS, HistoryGuard, Known, Witness

SAME = Witness("one", 100, 3, has_all=True)


@pytest.fixture
def guard() -> HistoryGuard:
    made = HistoryGuard()
    made.accept(3, "one", 100)
    return made


def test_a_log_as_long_as_known_at_the_question_is_accepted(guard: HistoryGuard) -> None:
    known = guard.known()
    guard.seen(3, 3, 500)  # Another connection reported this while the question was on its way.
    guard.check(SAME, known)
    assert not guard.broken.is_set()
    assert guard.known().flushed_lsn == 500


@pytest.mark.parametrize(
    "witness",
    [
        replace(SAME, flushed_lsn=99),
        replace(SAME, identity="two"),
        replace(SAME, history=4),
        replace(SAME, history=2),
        replace(SAME, flushed_lsn=10**9, has_all=False),
    ],
)
def test_another_history_is_refused(guard: HistoryGuard, witness: Witness) -> None:
    with pytest.raises(StorageUnavailable, match="another history"):
        guard.check(witness, guard.known())
    assert guard.broken.is_set()


def test_an_acknowledged_transaction_raises_the_known_log_end_and_is_asked_for(guard: HistoryGuard) -> None:
    guard.acknowledged(3, 77, 300)
    guard.acknowledged(3, 76, 200)
    assert guard.known() == Known(3, 300, (77, 76))
    with pytest.raises(StorageUnavailable, match="another history"):
        guard.check(replace(SAME, flushed_lsn=299), guard.known())


def test_remembered_transactions_are_bounded(guard: HistoryGuard) -> None:
    for transaction_id in range(10 * REMEMBERED_TRANSACTIONS):
        guard.acknowledged(3, transaction_id, 300)
    assert len(guard.known().transactions) == REMEMBERED_TRANSACTIONS
    assert guard.known().transactions[-1] == 10 * REMEMBERED_TRANSACTIONS - 1


def test_a_late_answer_of_the_previous_history_is_ignored(guard: HistoryGuard) -> None:
    asked = guard.history
    guard.accept(4, "one", 50)
    guard.acknowledged(asked, 77, 300)
    guard.seen(asked, 3, 300)
    assert not guard.broken.is_set()
    assert guard.known() == Known(4, 50, ())


def test_a_connection_checked_under_the_previous_history_is_checked_again(guard: HistoryGuard) -> None:
    known = guard.known()
    guard.accept(4, "one", 100)
    with pytest.raises(StorageUnavailable, match="while this connection was opened"):
        guard.check(SAME, known)
    assert not guard.broken.is_set()


def test_a_transaction_number_from_another_node_is_noticed(guard: HistoryGuard) -> None:
    guard.seen(3, 4, 100)
    assert guard.broken.is_set()


def test_a_standby_is_refused_but_is_no_other_history(guard: HistoryGuard) -> None:
    with pytest.raises(StorageUnavailable, match="standby"):
        guard.check(Witness(None, None, None, has_all=False), guard.known())
    assert not guard.broken.is_set()


def test_the_first_connection_is_accepted_with_any_history() -> None:
    guard = HistoryGuard()
    guard.check(Witness("any", 5, None, has_all=False), guard.known())
    guard.seen(0, 9, 5)
    assert not guard.broken.is_set()
