"""A separate process that syncs a file shows stalls of the disk: the arithmetic, and a real process that syncs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.stalls import AFTER_S, STALL_S, Disk, watching

DISK = Disk([(0.0, 0.001), (1.0, STALL_S), (2.0, 0.5), (2.5, STALL_S), (3.0, 0.001)])


def test_sync_that_took_long_is_a_stall() -> None:
    assert DISK.stalls() == [
        (1.0, 1.0 + STALL_S + AFTER_S), (2.0, 2.5 + AFTER_S), (2.5, 2.5 + STALL_S + AFTER_S),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("span", "kept"),
    [
        ((0.0, 0.9), True),
        ((0.9, 1.0), False),
        ((0.5, 5.0), False),
        ((1.01, 1.02), False),
        ((1.1, 1.9), True),
        ((2.2, 2.3), False),
        ((2.51, 2.515), False),
        ((2.6, 2.9), True),
        ((3.0, 3.1), True),
    ],
)
def test_span_that_touches_a_stall_is_left_out(span: tuple[float, float], kept: bool) -> None:
    assert DISK.apart([span]) == ([span] if kept else [])


def test_separate_process_syncs_while_the_context_lasts(tmp_path: Path) -> None:
    began = time.perf_counter()
    with watching(tmp_path) as disk:
        # The file exists before its first sync, and no other file is created here.
        while not any(tmp_path.iterdir()):
            assert time.perf_counter() - began < 30
    ended = time.perf_counter()
    assert not any(tmp_path.iterdir())
    assert all(began <= start <= start + seconds <= ended for start, seconds in disk.syncs)
