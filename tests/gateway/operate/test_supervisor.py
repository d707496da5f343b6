"""Background passes: they are repeated, continue after an error, are counted, and end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import structlog

from gateway.operate import supervisor
from gateway.operate.metrics import Metrics
from gateway.operate.supervisor import Supervisor
from storage.errors import StorageUnavailable


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


async def test_failure_is_logged_once_and_with_a_trace_only_if_unexpected() -> None:
    supervised = Supervisor(Metrics())
    away = StorageUnavailable("Postgres is away")
    outcomes = [away, away, RuntimeError("a bug"), None, away]
    worked = asyncio.Event()

    async def run_once() -> None:
        if not outcomes:
            worked.set()
            return
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    with structlog.testing.capture_logs() as lines:
        supervised.start("flaky", run_once, interval_ms=0)
        await until(worked)
        await supervised.stop()
    failures = [line for line in lines if line["event"] == "background pass failed"]
    assert [(line["log_level"], line["error"], line["exc_info"]) for line in failures] == [
        ("warning", "StorageUnavailable: Postgres is away", False),
        ("error", "RuntimeError: a bug", True),
        ("warning", "StorageUnavailable: Postgres is away", False),
    ]


async def test_a_pass_that_fails_is_not_put_off_longer_than_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.1)
    slept: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 6:
            enough.set()
            await asyncio.Event().wait()

    async def run_once() -> None:
        raise StorageUnavailable("Postgres is away")

    monkeypatch.setattr(supervisor, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    supervised = Supervisor(Metrics())
    supervised.start("leases", run_once, interval_ms=1000)
    await until(enough)
    await supervised.stop()
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


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
