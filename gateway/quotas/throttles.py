"""How long a client is to be silent after what it has had.

The one idea: quotas are counted at two places on the line of a request, before its handler (what it brings) and behind
it (what it is answered). Whoever is above a limit is answered at once, and its connection is silent until its rate is
down at it (KIP-219). Without quotas nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from gateway.log.tail import Buffer
from gateway.net.context import RequestContext
from gateway.quotas.limits import QuotaKey
from gateway.quotas.rates import Rate
from protocol.api_keys import ApiKey

SWEEP_EVERY_S = 60.0

_Shared = tuple[QuotaKey, str | None, str | None]


class Throttles:
    """Rates of one node, of whoever has a limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: dict[_Shared, Rate] = {}
        self._swept_s = clock()
        self.throttled: Callable[[QuotaKey, float], None] = lambda key, seconds: None
        """Told of each wait."""

    def __len__(self) -> int:
        """Rates that are kept."""
        return len(self._rates)

    def before(self, request: Any, context: RequestContext) -> int:
        """For how many milliseconds the connection is to be silent for what the request brings."""
        if context.api_key is not ApiKey.PRODUCE or not context.services.catalog.quotas:
            return 0
        return self._charge(QuotaKey.PRODUCER_BYTE_RATE, sum(_produced(request)), context)

    def after(self, response: Any, context: RequestContext) -> int:
        """And for what it is answered."""
        if context.api_key is not ApiKey.FETCH or not context.services.catalog.quotas:
            return 0
        return self._charge(QuotaKey.CONSUMER_BYTE_RATE, sum(_fetched(response)), context)

    def _charge(self, key: QuotaKey, amount: float, context: RequestContext) -> int:
        user, client_id = context.connection.principal.name, context.client_id or ""
        limit = context.services.catalog.quotas.limit(user, client_id, key)
        if limit is None:
            return 0
        now_s = self._clock()
        self._sweep(now_s)
        rate = self._rates.setdefault((key, *limit.shared_by), Rate())
        rate.record(amount, now_s)
        wait_s = rate.wait_s(limit.bound, now_s)
        if wait_s > 0:
            self.throttled(key, wait_s)
        return round(wait_s * 1000)

    def _sweep(self, now_s: float) -> None:
        """Clients come and go under names of their own."""
        if now_s < self._swept_s + SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        self._rates = {shared: rate for shared, rate in self._rates.items() if not rate.is_idle(now_s)}


def _produced(request: Any) -> Iterator[int]:
    for topic in request.topic_data:
        for partition in topic.partition_data:
            if partition.records is not None:
                yield len(partition.records)


def _fetched(response: Any) -> Iterator[int]:
    for topic in response.responses:
        for partition in topic.partitions:
            records: bytes | tuple[Buffer, ...] | None = partition.records
            if isinstance(records, tuple):
                yield from map(len, records)
            elif records is not None:
                yield len(records)
