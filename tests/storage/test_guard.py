"""What a new connection must show, by values."""

from __future__ import annotations

import pytest

from storage.errors import StorageUnavailable
from storage.guard import HistoryGuard


@pytest.fixture
def guard() -> HistoryGuard:
    made = HistoryGuard()
    made.accept(3, "one", 100)
    return made


def test_a_log_that_is_as_long_as_was_known_when_it_was_asked_is_let_in(guard: HistoryGuard) -> None:
    known_lsn = guard.flushed_lsn
    guard.seen(3, 500)  # said by another connection while the question was on its way
    guard.check("one", 100, 3, known_lsn)
    assert not guard.broken.is_set()
    assert guard.flushed_lsn == 500


@pytest.mark.parametrize(
    ("identity", "flushed_lsn", "history"), [("one", 99, 3), ("two", 100, 3), ("one", 100, 4), ("one", 100, 2)]
)
def test_another_history_is_refused(guard: HistoryGuard, identity: str, flushed_lsn: int, history: int) -> None:
    with pytest.raises(StorageUnavailable, match="another history"):
        guard.check(identity, flushed_lsn, history, guard.flushed_lsn)
    assert guard.broken.is_set()


def test_a_number_that_another_node_gave_is_noticed(guard: HistoryGuard) -> None:
    guard.seen(4, 100)
    assert guard.broken.is_set()


def test_a_standby_is_no_other_history(guard: HistoryGuard) -> None:
    with pytest.raises(StorageUnavailable, match="standby"):
        guard.check(None, None, None, guard.flushed_lsn)
    assert not guard.broken.is_set()


def test_before_anything_was_accepted_everything_is_let_in() -> None:
    guard = HistoryGuard()
    guard.check("any", 5, None, 0)
    guard.seen(9, 5)
    assert not guard.broken.is_set()
