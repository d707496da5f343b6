"""How often the relay (the job that copies staged SQL transactions to the log) looks for transactions."""

from __future__ import annotations

import pytest

from gateway.log.relay import BUSY_POLL_S, POLL_S, poll_interval_s


@pytest.mark.parametrize(("found", "since_s"), [(0, 0.004), (0, 1.0), (1, 0.02), (1, 60.0), (50, 1.0)])
def test_few_transactions_per_second_are_looked_for_at_short_intervals(found: int, since_s: float) -> None:
    assert poll_interval_s(found, since_s) == POLL_S


@pytest.mark.parametrize(("found", "since_s"), [(1, 0.005), (2, 0.011), (200, 1.0)])
def test_many_transactions_per_second_are_appended_together(found: int, since_s: float) -> None:
    assert poll_interval_s(found, since_s) == BUSY_POLL_S
