"""The queue of spans and its sender, with a collector that accepts, refuses or is unreachable."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from gateway.tracing.exporter import LOG_INTERVAL_S, MAX_BATCH, Exporter
from gateway.tracing.spans import Kind, Span
from tests.gateway.tracing.otlp import Collector, collecting
from tests.gateway_process import free_ports
from tests.steps.waiting import until

RESOURCE = (("service.name", "sluice"),)


class Running:
    """An exporter whose loop runs, the number of spans that it dropped, and its clock."""

    def __init__(self, url: str, *, max_queued: int = 8_192, close_timeout_s: float = 60.0) -> None:
        self.dropped = 0
        self.now_s = 0.0
        self.passes = 0
        self.exporter = Exporter(
            url,
            {"X-Key": "secret"},
            RESOURCE,
            "1",
            self._count,
            linger_s=0.01,
            pause_s=0.01,
            close_timeout_s=close_timeout_s,
            max_queued=max_queued,
            clock=lambda: self.now_s,
        )

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.exporter.put(Span(f"span {number}", Kind.INTERNAL, number, number, ()))

    async def run(self) -> None:
        while True:
            await self.exporter.run()
            self.passes += 1

    async def until_passes(self, count: int) -> None:
        """Wait until the loop has run this many more passes."""
        wanted = self.passes + count
        await until(lambda: self.passes >= wanted, f"{count} passes")

    def _count(self, count: int) -> None:
        self.dropped += count


@asynccontextmanager
async def running(url: str, *, max_queued: int = 8_192) -> AsyncIterator[Running]:
    made = Running(url, max_queued=max_queued)
    loop = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await made.exporter.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def names(count: int, first: int = 0) -> list[str]:
    return [f"span {number}" for number in range(first, first + count)]


def received(collector: Collector) -> Callable[[], int]:
    return lambda: len(collector.spans)


async def test_spans_arrive_in_order_in_batches_with_the_headers(collector: Collector) -> None:
    count = 2 * MAX_BATCH + 10
    async with running(collector.url) as made:
        made.put(*range(count))
        await until(received(collector), holds=lambda spans: spans == count)
    assert [span.name for span in collector.spans] == names(count)
    assert len(collector.requests) == 3
    for path, headers in collector.requests:
        assert path == "/v1/traces"
        assert (headers["content-type"], headers["x-key"]) == ("application/x-protobuf", "secret")
    assert made.dropped == 0


async def test_spans_without_room_are_dropped_and_counted(collector: Collector) -> None:
    collector.status = 503
    async with running(collector.url, max_queued=5) as made:
        made.put(*range(8))
        assert made.dropped == 3
        await made.until_passes(2)
        made.put(8)
        assert made.dropped == 4
        collector.status = 200
        await until(received(collector), holds=lambda spans: spans == 5)
    assert [span.name for span in collector.spans] == names(5)


async def test_an_unreachable_collector_costs_one_line_per_minute_and_no_span() -> None:
    (port,) = free_ports(1)
    with capture_logs() as lines:
        async with running(f"http://127.0.0.1:{port}") as made:
            made.put(1, 2)
            await made.until_passes(5)
            assert len(lines) == 1
            made.now_s += LOG_INTERVAL_S - 1
            await made.until_passes(2)
            assert len(lines) == 1
            made.now_s += 1
            await made.until_passes(2)
            assert len(lines) == 2
            assert made.dropped == 0
            with collecting(port) as collector:
                await until(received(collector), holds=lambda spans: spans == 2)
            assert [span.name for span in collector.spans] == ["span 1", "span 2"]
    assert lines[0]["event"].startswith("the collector does not take traces: check --otlp-endpoint")
    assert lines[0]["endpoint"] == f"http://127.0.0.1:{port}"
    assert lines[0]["log_level"] == "warning"


@pytest.mark.parametrize("status", [400, 404, 302])
async def test_a_batch_that_the_collector_refuses_is_dropped_and_the_next_one_is_sent(
    collector: Collector, status: int
) -> None:
    collector.status = status
    with capture_logs() as lines:
        async with running(collector.url) as made:
            made.put(1)
            await made.until_passes(1)
            assert made.dropped == 1
            collector.status = 200
            made.put(2)
            await until(received(collector))
    assert [span.name for span in collector.spans] == ["span 2"]
    assert [line["error"] for line in lines] == [f"it answered with status {status}"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_batch_that_the_collector_cannot_take_now_is_sent_again(collector: Collector, status: int) -> None:
    collector.status = status
    async with running(collector.url) as made:
        made.put(1)
        await made.until_passes(2)
        made.put(2)
        collector.status = 200
        await until(received(collector), holds=lambda spans: spans >= 2)
    # On a busy machine an answer may be later than the exporter waits for it. It then sends the batch again.
    assert list(dict.fromkeys(span.name for span in collector.spans)) == ["span 1", "span 2"]
    assert made.dropped == 0


async def test_closing_sends_what_is_queued(collector: Collector) -> None:
    made = Running(collector.url)
    made.put(1, 2)
    await made.exporter.close()
    assert [span.name for span in collector.spans] == ["span 1", "span 2"]


async def test_closing_does_not_wait_for_a_collector_that_does_not_answer() -> None:
    # The kernel accepts connections for a listening socket, even if no process calls accept().
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = Running(f"http://127.0.0.1:{silent.getsockname()[1]}", close_timeout_s=0.1)
        made.put(1, 2)
        await asyncio.wait_for(made.exporter.close(), 30)
    assert made.dropped == 2
