"""Send spans to a collector (OTLP over HTTP).

The one idea: the node's work never waits for the collector. Spans wait in a bounded queue, and one loop sends them in
batches. If the collector does not take a batch, the batch goes back into the queue and the loop pauses. Spans that find
the queue full are dropped and counted. The log gets one line per minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp
import structlog

from gateway.tracing.spans import Attributes, Span, encode_spans

logger = structlog.stdlib.get_logger(__name__)

MAX_QUEUED = 8_192
"""Maximal number of waiting spans, including those on their way to the collector. A span takes less than a kilobyte."""
MAX_BATCH = 512
LINGER_S = 1.0
"""Spans within this time share a request."""
REQUEST_TIMEOUT_S = 10.0
PAUSE_S = 5.0
"""Pause after a batch that the collector did not take."""
LOG_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 0.2
"""Time for the last batch of a node that stops."""
PATH = "/v1/traces"
_RETRYABLE = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP demands a repeat. Any other failure refuses the batch itself."""


class CollectorError(Exception):
    """The collector did not take a batch."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        """Error of an export. `is_final`: a repetition would fail in the same way."""
        super().__init__(reason)
        self.is_final = is_final


class Exporter:
    """The queue of one node's spans, and the loop that sends them."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        resource: Attributes,
        version: str,
        count_dropped: Callable[[int], None],
        *,
        linger_s: float = LINGER_S,
        pause_s: float = PAUSE_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        max_queued: int = MAX_QUEUED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoint`: the collector's base URL. `headers` go with each request. `clock` returns seconds and paces the
        log."""
        self._endpoint = endpoint
        self._url = endpoint + PATH
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._resource = resource
        self._version = version
        self._count_dropped = count_dropped
        self._linger_s = linger_s
        self._pause_s = pause_s
        self._close_timeout_s = close_timeout_s
        self._max_queued = max_queued
        self._clock = clock
        self._queue: deque[Span] = deque()
        self._sending: Sequence[Span] = ()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._logged_s = float("-inf")
        self._unlogged = 0
        """Spans that were dropped since the last line of the log."""

    def put(self, span: Span) -> None:
        """Queue a span, or drop and count it if the queue is full."""
        waiting = len(self._queue) + len(self._sending)
        if waiting >= self._max_queued:
            self._drop(1)
            return
        self._queue.append(span)
        if not waiting:
            self._some.set()
        elif waiting + 1 == MAX_BATCH:
            self._enough.set()

    async def run(self) -> None:
        """Wait for a batch and send it. Pause if the collector does not accept it."""
        await self._some.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._enough.wait(), self._linger_s)
        try:
            await self._send()
        except CollectorError as error:
            self._log(error)
            await asyncio.sleep(self._pause_s)

    async def close(self) -> None:
        """Send what fits into one last batch, and drop the rest."""
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._send()
        except (CollectorError, TimeoutError) as error:
            self._log(error)
        finally:
            self._drop(len(self._queue))
            self._queue.clear()
            if self._session is not None:
                await self._session.close()

    async def _send(self) -> None:
        """Send the oldest spans. Raise CollectorError; the spans are in the queue again unless the error is final."""
        self._sending = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        try:
            if self._sending:
                # Encoding takes milliseconds, for which heartbeats would have to wait.
                body = await asyncio.to_thread(encode_spans, self._sending, self._resource, self._version)
                await self._post(body)
        except asyncio.CancelledError:
            self._put_back()
            raise
        except Exception as error:
            if isinstance(error, CollectorError) and not error.is_final:
                self._put_back()
            else:
                self._drop(len(self._sending))
            raise
        finally:
            self._sending = ()
            self._await_more()

    def _put_back(self) -> None:
        self._queue.extendleft(reversed(self._sending))

    def _await_more(self) -> None:
        if not self._queue:
            self._some.clear()
        if len(self._queue) < MAX_BATCH:
            self._enough.clear()

    async def _post(self, body: bytes) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S))
        try:
            # No redirects: the operator decides where spans go, and a response must not change that.
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise CollectorError(str(error) or type(error).__name__, is_final=False) from error
        if status != 200:
            raise CollectorError(f"it answered with status {status}", is_final=status not in _RETRYABLE)

    def _drop(self, count: int) -> None:
        if count:
            self._unlogged += count
            self._count_dropped(count)

    def _log(self, error: Exception) -> None:
        now_s = self._clock()
        if now_s < self._logged_s + LOG_INTERVAL_S:
            return
        logger.warning(
            "the collector does not take traces: check --otlp-endpoint and the collector's log",
            endpoint=self._endpoint,
            error=str(error) or "no answer in time",
            spans_dropped=self._unlogged,
        )
        self._logged_s, self._unlogged = now_s, 0
