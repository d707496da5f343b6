"""The history checker of the SQL door: its comparison, and a short attack."""

from __future__ import annotations

import pytest

from tests.sql import history
from tests.sql.history import Record, compare, sums_of

FIRST: Record = ("t", "k", "a", 1)
SECOND: Record = ("t", "k", "b", 2)
EXPECTED = {("t", "k"): [("a", 1), ("b", 2)]}


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ([SECOND, FIRST], "the order differs"),
        ([FIRST], "1 records are missing and 0 are too many"),
        ([FIRST, SECOND, SECOND], "0 records are missing and 1 are too many"),
        ([FIRST, ("t", "k", "b", 3)], "1 records are missing and 1 are too many"),
    ],
)
def test_a_log_that_differs_from_the_tables_is_reported(log: list[Record], sentence: str) -> None:
    (found,) = compare(log, EXPECTED)
    assert sentence in found


def test_a_log_that_equals_the_tables_is_accepted() -> None:
    assert compare([FIRST, ("t", "other", "c", 5), SECOND], {**EXPECTED, ("t", "other"): [("c", 5)]}) == []
    assert sums_of([FIRST, SECOND]) == {("t", "k"): (2, 3)}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_attack_breaks_no_promise() -> None:
    assert history.run(1, 15).violations == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_longer_attack_breaks_no_promise() -> None:
    assert history.run(2, 180).violations == {}
