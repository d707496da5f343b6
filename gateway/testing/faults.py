"""Faults on request: failing and slow answers of single APIs.

The one idea: a fault is a stage in front of the handler. A request that fails has changed nothing, and its answer has
the shape of a real refusal.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from dataclasses import dataclass

from gateway.net.context import RequestContext
from gateway.net.dispatch import S_contra, Stages
from gateway.net.requests import UnanswerableError
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError

MAX_FAILURES = 10_000
"""Failures that may be pending for one API."""
MAX_DELAY_MS = 600_000


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to one request; without a code the connection closes instead."""

    code: ErrorCode | None


class Faults:
    """Pending failures and delays of one node."""

    def __init__(self) -> None:
        self._failures: dict[ApiKey, deque[Failure]] = {}
        self._delays_s: dict[ApiKey, float] = {}

    def fail_next(self, api: str, error: str | None, times: int) -> None:
        """Refuse the next `times` requests of an API with an error's name; None closes their connections. Raise
        ValueError for a name that Kafka does not have."""
        if not 0 < times <= MAX_FAILURES:
            raise ValueError(f"times is {times}, and must be from 1 to {MAX_FAILURES}")
        pending = self._failures.setdefault(_api(api), deque(maxlen=MAX_FAILURES))
        pending.extend([Failure(None if error is None else _code(error))] * times)

    def slow(self, api: str, delay_ms: int) -> None:
        """Delay each request of an API from now on; 0 ends that. Raise ValueError as `fail_next` does."""
        if not 0 <= delay_ms <= MAX_DELAY_MS:
            raise ValueError(f"ms is {delay_ms}, and must be from 0 to {MAX_DELAY_MS}")
        self._delays_s[_api(api)] = delay_ms / 1000

    def clear(self) -> None:
        self._failures.clear()
        self._delays_s.clear()

    def within(self, stages: Stages[S_contra]) -> Stages[S_contra]:
        """Return the stages, preceded by the faults."""
        authorize = stages.authorize

        async def fail_or_wait(request: object, context: RequestContext[S_contra]) -> None:
            await self._meet(context)
            if authorize is not None:
                await authorize(request, context)

        return dataclasses.replace(stages, authorize=fail_or_wait)

    async def _meet(self, context: RequestContext[object]) -> None:
        delay_s = self._delays_s.get(context.api_key, 0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        pending = self._failures.get(context.api_key)
        if not pending:
            return
        failure = pending.popleft()
        if failure.code is None:
            raise UnanswerableError("test_fault", f"{context.api_key.name} fails on request of a test")
        raise KafkaError(failure.code, "A test asked for this error.")


def _api(name: str) -> ApiKey:
    """Return the API of a name such as `Produce` or `OffsetCommit`."""
    wanted = name.replace("_", "").lower()
    for api_key in ApiKey:
        if api_key.name.replace("_", "").lower() == wanted:
            return api_key
    raise ValueError(f"Kafka has no API {name}")


def _code(name: str) -> ErrorCode:
    code = ErrorCode.__members__.get(name.upper(), ErrorCode.NONE)
    if code is ErrorCode.NONE:
        raise ValueError(f"Kafka has no error {name}")
    return code
