"""How long a client is to be silent after what it has had.

The one idea: quotas are counted at two places on the line of a request, before its handler (what it brings) and around
it (what it takes of the event loop's time, what it is answered). Whoever is above a limit is answered at once, and its
connection is silent until its rate is down at it (KIP-219). Without quotas nothing is counted.

Each node counts by itself, as Kafka's brokers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from gateway.net.context import RequestContext
from gateway.net.dispatch import Charged
from gateway.quotas.limits import Limit, QuotaKey, Quotas
from gateway.quotas.rates import WINDOW_S, Rate, TokenBucket
from gateway.quotas.steps import Steps
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError

SWEEP_EVERY_S = 60.0
MAX_REQUEST_WAIT_S = WINDOW_S
"""Longest silence for the time that requests took, as upstream (KIP-124)."""

_Shared = tuple[QuotaKey, str | None, str | None]


class Throttles:
    """Rates of one node, of whoever has a limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: dict[_Shared, Rate] = {}
        self._buckets: dict[_Shared, TokenBucket] = {}
        self._swept_s = clock()
        self.throttled: Callable[[QuotaKey, float], None] = lambda key, seconds: None
        """Told of each wait."""

    def __len__(self) -> int:
        """Rates that are kept."""
        return len(self._rates) + len(self._buckets)

    def before(self, request: Any, context: RequestContext) -> int:
        """For how many milliseconds the connection is to be silent for what the request brings."""
        if context.api_key is not ApiKey.PRODUCE or not context.services.catalog.quotas:
            return 0
        return self._charge(QuotaKey.PRODUCER_BYTE_RATE, lambda: sum(_produced(request)), context)

    def around(self, context: RequestContext) -> Charged | None:
        if context.api_key is ApiKey.API_VERSIONS:
            return None  # asked before it is known who asks: a stranger would spend what is somebody's
        return self._charged if context.services.catalog.quotas else None

    async def _charged(self, handling: Coroutine[Any, Any, Any], context: RequestContext) -> tuple[Any, int]:
        """The response, and for how many milliseconds the connection is to be silent for it."""
        waits_ms = [0]
        if context.services.catalog.quotas.limits(QuotaKey.REQUEST_PERCENTAGE):
            steps = Steps(handling)
            try:
                response = await steps
            finally:
                waits_ms.append(self._charge(QuotaKey.REQUEST_PERCENTAGE, lambda: steps.worked_s * 100, context))
        else:
            response = await handling
        if context.api_key in _FETCHING:
            waits_ms.append(self._charge(QuotaKey.CONSUMER_BYTE_RATE, lambda: sum(_fetched(response)), context))
        elif context.api_key in _MUTATING:
            waits_ms.append(response.throttle_time_ms)
        return response, max(waits_ms)

    def mutations(self, context: RequestContext, strict_since: int) -> Mutations:
        """Of partitions that the request makes or deletes. From version `strict_since` on who owes is refused, before
        it only waits (KIP-599)."""
        return Mutations(self, context, strict=context.version >= strict_since)

    def connection_wait_s(self, quotas: Quotas, address: str) -> float:
        """0: the address may open one more, which counts from now on (KIP-612)."""
        bound = quotas.connections_from(address)
        if bound is None:
            return 0.0
        now_s = self._clock()
        self._sweep(now_s)
        key = QuotaKey.CONNECTION_CREATION_RATE
        rate = self._rates.setdefault((key, address, None), Rate())
        rate.record(1, now_s)
        wait_s = rate.wait_s(bound, now_s)
        if wait_s > 0:
            rate.take_back(1)
            self.throttled(key, wait_s)
        return wait_s

    def bucket(self, limit: Limit) -> TokenBucket:
        self._sweep(self._clock())
        return self._buckets.setdefault((QuotaKey.CONTROLLER_MUTATION_RATE, *limit.shared_by), TokenBucket())

    def now_s(self) -> float:
        return self._clock()

    def _charge(self, key: QuotaKey, amount: Callable[[], float], context: RequestContext) -> int:
        limit = limit_of(context, key)
        if limit is None:
            return 0
        now_s = self._clock()
        self._sweep(now_s)
        rate = self._rates.setdefault((key, *limit.shared_by), Rate())
        rate.record(amount(), now_s)
        wait_s = rate.wait_s(limit.bound, now_s)
        if key is QuotaKey.REQUEST_PERCENTAGE:
            wait_s = min(wait_s, MAX_REQUEST_WAIT_S)
        if wait_s > 0:
            self.throttled(key, wait_s)
        return round(wait_s * 1000)

    def _sweep(self, now_s: float) -> None:
        """Clients come and go under names of their own."""
        if now_s < self._swept_s + SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        self._rates = {shared: rate for shared, rate in self._rates.items() if not rate.is_idle(now_s)}
        self._buckets = {shared: bucket for shared, bucket in self._buckets.items() if not bucket.is_idle(now_s)}


class Mutations:
    """What one request may still make or delete."""

    def __init__(self, throttles: Throttles, context: RequestContext, *, strict: bool) -> None:
        self._throttles = throttles
        self._limit = limit_of(context, QuotaKey.CONTROLLER_MUTATION_RATE)
        self._strict = strict
        self.wait_ms = 0
        """How long the client is to be silent after what was recorded so far."""

    def record(self, partitions: int) -> None:
        """Raises KafkaError where the client owes for what came before; then nothing is recorded."""
        if self._limit is None:
            return
        bucket, bound, now_s = self._throttles.bucket(self._limit), self._limit.bound, self._throttles.now_s()
        refused = self._strict and bucket.wait_s(bound, now_s) > 0
        if not refused:
            bucket.take(partitions, bound, now_s)
        wait_s = bucket.wait_s(bound, now_s)
        if wait_s > 0 and (refused or not self._strict):
            self.wait_ms = round(wait_s * 1000)
            self._throttles.throttled(QuotaKey.CONTROLLER_MUTATION_RATE, wait_s)
        if refused:
            raise KafkaError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "The throttling quota has been exceeded.")


def limit_of(context: RequestContext, key: QuotaKey) -> Limit | None:
    quotas = context.services.catalog.quotas
    if not quotas.limits(key):
        return None
    return quotas.limit(context.connection.principal.name, context.client_id or "", key)


_FETCHING = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
_MUTATING = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})


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
