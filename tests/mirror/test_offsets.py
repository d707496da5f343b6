"""Offsets in a source, and the offsets of the same records in a target without gaps."""

from __future__ import annotations

import pytest

from gateway.mirror.offsets import MAX_RUNS, OffsetRuns


def test_offsets_behind_a_gap_are_smaller_in_the_target() -> None:
    runs = OffsetRuns.begin(100, 0)
    runs.copied(100, 10, 110)  # 100 to 109 at 0 to 9
    runs.copied(110, 0, 111)  # a marker
    runs.copied(115, 5, 120)  # 111 to 114 are missing
    found = {offset: runs.translate(offset) for offset in (99, 100, 109, 110, 112, 115, 119, 120, 500)}
    assert found == {99: None, 100: 0, 109: 9, 110: 10, 112: 10, 115: 10, 119: 14, 120: 15, 500: 15}
    assert not runs.are_equal


def test_offsets_without_a_gap_are_equal() -> None:
    runs = OffsetRuns.begin(0, 0)
    runs.copied(0, 10, 10)
    runs.copied(10, 5, 15)
    assert runs.are_equal
    assert len(runs.runs) == 1
    runs.copied(16, 1, 17)
    assert not runs.are_equal


def test_runs_survive_their_text() -> None:
    runs = OffsetRuns.begin(5, 0)
    runs.copied(7, 3, 12)
    again = OffsetRuns.parse(runs.text(), runs.next_target)
    assert (again.next_source, again.next_target, again.runs) == (12, 3, runs.runs)
    for text in ("", "5", "5 1:2", "x 1:2:3"):
        with pytest.raises(ValueError, match=r"unpack|literal|no runs"):
            OffsetRuns.parse(text, 0)


def test_forgotten_runs_translate_to_an_earlier_offset_and_their_text_fits_a_commit() -> None:
    runs, exact = OffsetRuns.begin(0, 0), dict[int, int]()
    for number in range(MAX_RUNS * 3):
        exact[number * 10**16] = runs.next_target
        runs.copied(number * 10**16, 2, number * 10**16 + 2)
    for source, target in exact.items():
        translated = runs.translate(source)
        assert translated is not None
        assert translated <= target
    assert [runs.translate(source) for source in list(exact)[-10:]] == list(exact.values())[-10:]
    assert len(runs.text()) < 4_000
