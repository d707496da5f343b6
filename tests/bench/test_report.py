"""The report of `python -m bench`."""

from __future__ import annotations

from bench.__main__ import Row, measured, report


def test_failed_measurement_is_a_row_that_gives_its_reason() -> None:
    def fail() -> list[Row]:
        raise RuntimeError("the disk has only 3 GB free")

    (row,) = measured(fail, "retention")
    assert "| retention | it can be measured | not measured: the disk has only 3 GB free | **no** |" in report([row])


def test_measurement_keeps_its_rows() -> None:
    rows = [Row("codec", "≤ 1", "0.4", True)]
    assert measured(lambda: rows, "codec") == rows
