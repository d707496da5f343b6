"""Background passes: repeated, repaired, counted, ended."""

from __future__ import annotations

import asyncio

import pytest

from gateway import supervisor
from gateway.metrics import Metrics
from gateway.supervisor import Supervisor


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 10)


async def test_a_pass_that_fails_is_counted_and_run_again() -> None:
    metrics = Metrics()
    supervised = Supervisor(metrics)
    outcomes = [RuntimeError("first"), RuntimeError("second"), None, None]
    worked = asyncio.Event()

    async def run_once() -> None:
        outcome = outcomes.pop(0) if outcomes else None
        if outcome is not None:
            raise outcome
        if not outcomes:
            worked.set()

    supervised.start("flaky", run_once, interval_ms=0)
    await until(worked)
    await supervised.stop()
    assert metrics.registry.get_sample_value("sluice_background_failures_total", {"loop": "flaky"}) == 2
    age_s = metrics.registry.get_sample_value("sluice_background_last_success_age_seconds", {"loop": "flaky"})
    assert age_s is not None
    assert age_s < 10


async def test_stop_ends_a_pass_that_waits_and_one_that_runs() -> None:
    supervised = Supervisor(Metrics())
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def brief() -> None:
        await asyncio.sleep(0)

    supervised.start("endless", endless, interval_ms=0)
    supervised.start("brief", brief, interval_ms=3_600_000)
    await until(began)
    await asyncio.wait_for(supervised.stop(), 10)
    assert ended.is_set()
