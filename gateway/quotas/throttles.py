"""For how long a client's connection is muted after what the client has used.

The one idea: use is counted at two places of a request. Before the handler it counts what the request brings; around
the handler it counts the event loop's time and the size of the answer. A client above a limit is answered at once, and
its connection is muted until its rate has fallen to the limit (KIP-219). Without quotas nothing is counted.

Each node counts by itself, as Kafka's brokers do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from typing import TypeVar, cast

from gateway.net.context import RequestContext
from gateway.net.dispatch import Charged
from gateway.quotas.limits import Limit, QuotaKey, Quotas
from gateway.quotas.rates import WINDOW_S, WINDOWS, Rate, TokenBucket
from gateway.quotas.steps import Steps
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.fetch import FetchResponse
from protocol.messages.produce import ProduceRequest
from protocol.messages.share_fetch import ShareFetchResponse

SWEEP_EVERY_S = 60.0
MAX_RATES = 50_000
"""Rates that are kept, and as many buckets. If there are more, those unused for the longest time are forgotten, because
a client may call itself by another id in each request."""
MAX_REQUEST_WAIT_S = WINDOW_S
"""Longest time that a connection is muted for the processing time of its requests, as upstream (KIP-124)."""

_Shared = tuple[QuotaKey, str | None, str | None]
T = TypeVar("T")


class Throttles:
    """The rates of one node, for clients that have a limit."""

    def __init__(
        self,
        quotas: Callable[[], Quotas],
        clock: Callable[[], float] = time.monotonic,
        *,
        throttled: Callable[[QuotaKey, float], None] = lambda _key, _seconds: None,
        max_rates: int = MAX_RATES,
    ) -> None:
        """`quotas` returns the quotas in force. `throttled` is called for each wait, with its seconds."""
        self._quotas = quotas
        self._clock = clock
        self.throttled = throttled
        self._max_rates = max_rates
        self._rates: OrderedDict[_Shared, Rate] = OrderedDict()
        self._buckets: OrderedDict[_Shared, TokenBucket] = OrderedDict()
        self._swept_s = clock()

    def __len__(self) -> int:
        """Number of rates that are kept."""
        return len(self._rates) + len(self._buckets)

    def before(self, request: object, context: RequestContext[object]) -> int:
        """Return for how many milliseconds the connection is muted for what the request brings."""
        if context.api_key is not ApiKey.PRODUCE or not self._quotas():
            return 0
        return self._charge(
            QuotaKey.PRODUCER_BYTE_RATE, lambda: sum(_produced(cast("ProduceRequest", request))), context
        )

    def around(self, context: RequestContext[object]) -> Charged | None:
        if context.api_key is ApiKey.API_VERSIONS:
            return None  # the client is not known yet, and a stranger could use up a client's quota
        return self._charged if self._quotas() else None

    async def _charged(
        self, handling: Coroutine[object, None, object], context: RequestContext[object]
    ) -> tuple[object, int]:
        """Return the response or the handler's error, and the number of milliseconds for which the connection is muted
        after it."""
        waits_ms = [0]
        if self._quotas().limits(QuotaKey.REQUEST_PERCENTAGE):
            steps = Steps(handling)
            try:
                response = await steps
            except Exception as error:  # noqa: BLE001 - dispatch raises it
                response = error
            finally:
                waits_ms.append(self._charge(QuotaKey.REQUEST_PERCENTAGE, lambda: steps.worked_s * 100, context))
            if isinstance(response, Exception):
                return response, max(waits_ms)
        else:
            response = await handling
        if context.api_key in _FETCHING:
            waits_ms.append(
                self._charge(
                    QuotaKey.CONSUMER_BYTE_RATE,
                    lambda: sum(_fetched(cast("FetchResponse | ShareFetchResponse", response))),
                    context,
                )
            )
        elif context.api_key in _MUTATING:
            throttle_time_ms: int = getattr(response, "throttle_time_ms", 0)
            waits_ms.append(throttle_time_ms)
        return response, max(waits_ms)

    def fetchable_bytes(self, wanted_bytes: int, context: RequestContext[object]) -> int:
        """Return how many of these bytes of records one answer may have, as upstream: no more than the client's quota
        allows in all complete windows. A connection is muted for a minute at most (`MAX_THROTTLE_MS`), so the use of a
        larger answer would be forgotten before it is paid."""
        limit = self.limit_of(context, QuotaKey.CONSUMER_BYTE_RATE)
        return wanted_bytes if limit is None else min(wanted_bytes, max(int(limit.bound * (WINDOWS - 1) * WINDOW_S), 1))

    def mutations(self, context: RequestContext[object], strict_since: int) -> Mutations:
        """Return the budget for partitions that the request creates or deletes. From version `strict_since` on a client
        in debt is refused; before that version it is only muted (KIP-599)."""
        return Mutations(self, context, strict=context.version >= strict_since)

    def connection_wait_s(self, address: str) -> float:
        """Return 0 if the address may open one more connection, and count that connection (KIP-612)."""
        bound = self._quotas().connections_from(address)
        if bound is None:
            return 0.0
        now_s = self._clock()
        self._sweep(now_s)
        key = QuotaKey.CONNECTION_CREATION_RATE
        rate = self._kept(self._rates, (key, address, None), Rate)
        rate.record(1, now_s)
        wait_s = rate.wait_s(bound, now_s)
        if wait_s > 0:
            rate.take_back(1)
            self.throttled(key, wait_s)
        return wait_s

    def bucket(self, limit: Limit) -> TokenBucket:
        self._sweep(self._clock())
        return self._kept(self._buckets, (QuotaKey.CONTROLLER_MUTATION_RATE, *limit.shared_by), TokenBucket)

    def limit_of(self, context: RequestContext[object], key: QuotaKey) -> Limit | None:
        """Return the limit that applies to the client, or None."""
        quotas = self._quotas()
        if not quotas.limits(key):
            return None
        return quotas.limit(context.connection.principal.name, context.client_id or "", key)

    def now_s(self) -> float:
        return self._clock()

    def _charge(self, key: QuotaKey, amount: Callable[[], float], context: RequestContext[object]) -> int:
        limit = self.limit_of(context, key)
        if limit is None:
            return 0
        now_s = self._clock()
        self._sweep(now_s)
        rate = self._kept(self._rates, (key, *limit.shared_by), Rate)
        rate.record(amount(), now_s)
        wait_s = rate.wait_s(limit.bound, now_s)
        if key is QuotaKey.REQUEST_PERCENTAGE:
            wait_s = min(wait_s, MAX_REQUEST_WAIT_S)
        if wait_s > 0:
            self.throttled(key, wait_s)
        return round(wait_s * 1000)

    def _kept(self, those: OrderedDict[_Shared, T], shared: _Shared, make: Callable[[], T]) -> T:
        """Return the rate or bucket of a limit, and make it if necessary."""
        found = those.get(shared)
        if found is None:
            found = those[shared] = make()
            if len(those) > self._max_rates:
                those.popitem(last=False)
        else:
            those.move_to_end(shared)
        return found

    def _sweep(self, now_s: float) -> None:
        """Drop idle rates, because clients come and go with names of their own."""
        if now_s < self._swept_s + SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        self._rates = OrderedDict((shared, each) for shared, each in self._rates.items() if not each.is_idle(now_s))
        self._buckets = OrderedDict((shared, each) for shared, each in self._buckets.items() if not each.is_idle(now_s))


class Mutations:
    """Limits the changes that one request may still make."""

    def __init__(self, throttles: Throttles, context: RequestContext[object], *, strict: bool) -> None:
        self._throttles = throttles
        self._limit = throttles.limit_of(context, QuotaKey.CONTROLLER_MUTATION_RATE)
        self._strict = strict
        self.wait_ms = 0
        """Return for how many milliseconds the connection is muted for the use recorded so far."""

    def record(self, partitions: int) -> None:
        """Record created or deleted partitions. Raise KafkaError, and record nothing, if the client is in debt."""
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


_FETCHING = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
_MUTATING = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})


def _produced(request: ProduceRequest) -> Iterator[int]:
    for topic in request.topic_data:
        for partition in topic.partition_data:
            if partition.records is not None:
                yield len(partition.records)


def _fetched(response: FetchResponse | ShareFetchResponse) -> Iterator[int]:
    for topic in response.responses:
        for partition in topic.partitions:
            records = partition.records
            if isinstance(records, tuple):
                yield from map(len, records)
            elif records is not None:
                yield len(records)
