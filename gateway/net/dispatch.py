"""From a frame to its answer: header, API, decode, handler, encode.

The one idea: everything that is the same for all APIs is here and only here. A handler returns a response or raises;
how a refusal, a lost database or a bug is answered, logged and counted is decided in one place, so that no client is
left without an answer and no handler repeats it.

Which APIs exist is the table it is given (`gateway/apis/__init__.py`); order and back-pressure are the connection's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from gateway.net.coding import decode_aside, encode_aside
from gateway.net.connection import Chunk, Hold, UnanswerableError
from gateway.net.context import ConnectionInfo, RequestContext, Services
from gateway.net.error_responses import error_response, top_level_error_response
from gateway.net.errors import storage_code
from gateway.operate.logs import REQUEST
from gateway.operate.metrics import Metrics, RequestSeries
from protocol.api_keys import ApiKey
from protocol.codec import decode_request
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.framing import Frame
from protocol.headers import RequestHeader, decode_request_header, encode_response_header
from protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from storage.errors import StorageError

log = structlog.stdlib.get_logger(__name__)

STORAGE_LOG_INTERVAL_S = 1.0
"""While Postgres is away every request of an API fails alike: the counter has them all, the log one a second."""

MAX_STRUCTURED_BYTES = 8 * 1024 * 1024
"""Largest request of any API but Produce: decoded it takes several times its size in memory. Produce is bounded by
socket.request.max.bytes alone, for its records stay bytes."""

Handler = Callable[[Any, RequestContext], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """One line of the table of what is served: an API, the versions promised for it, and who answers."""

    api_key: ApiKey
    min_version: int
    max_version: int
    handler: Handler
    hold: Hold = Hold.NO
    advertised_min: int | None = None
    """Where ApiVersions must claim a lower version than is served (Produce); None: `min_version`."""


def versions_response(served: Sequence[Served], code: ErrorCode = ErrorCode.NONE) -> ApiVersionsResponse:
    """What ApiVersions answers for a table: each API once, by key; no features."""
    return ApiVersionsResponse(
        error_code=code,
        api_keys=tuple(
            ApiVersion(
                api_key=line.api_key,
                min_version=line.min_version if line.advertised_min is None else line.advertised_min,
                max_version=line.max_version,
            )
            for line in sorted(served, key=lambda line: line.api_key)
        ),
    )


class _Route:
    """A line of the table with what the hot path needs at hand."""

    __slots__ = ("api_key", "api_name", "handler", "line", "series", "storage_logged_at")

    def __init__(self, line: Served, metrics: Metrics) -> None:
        self.line = line
        self.api_key = line.api_key
        self.api_name = line.api_key.name.lower()
        self.handler = line.handler
        self.storage_logged_at = float("-inf")
        self.series: dict[int, RequestSeries] = {
            version: metrics.request_series(self.api_name, version)
            for version in range(line.min_version, line.max_version + 1)
        }


class Dispatch:
    """Answers frames by a table of served APIs. It is the `RequestHandler` of every connection."""

    def __init__(self, served: Sequence[Served], services: Services, metrics: Metrics) -> None:
        self._served = tuple(served)
        self._services = services
        self._metrics = metrics
        self._routes = {int(line.api_key): _Route(line, metrics) for line in served}
        self._holds = {int(line.api_key): line.hold for line in served if line.hold is not Hold.NO}

    def hold(self, frame: Frame) -> Hold:
        if len(frame) < 2:
            return Hold.NO
        return self._holds.get(frame[0] << 8 | frame[1], Hold.NO)

    async def handle(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Chunk]:
        """The answer's chunks, length first; none for Produce with acks=0.

        Raises ProtocolError if no answer is possible and the connection must close: no Kafka request, an API or
        version that is not served and has no shape to say so, or a refused request that awaits no answer.
        """
        started = time.perf_counter()
        header, position = decode_request_header(frame)
        route = self._routes.get(header.api_key)
        if route is None:
            raise UnanswerableError("unknown_api", f"api key {header.api_key} version {header.api_version}")
        version = header.api_version
        series = route.series.get(version)
        if series is None:
            return await self._answer_unsupported(route, header)
        api_key = route.api_key
        if len(frame) > MAX_STRUCTURED_BYTES and api_key is not ApiKey.PRODUCE:
            raise UnanswerableError("request_size", f"{route.api_name} of {len(frame)} bytes")
        REQUEST.set((connection.connection_id, route.api_name, header.correlation_id))
        if api_key is ApiKey.PRODUCE:
            # Its order is that of arrival, up to the handler's first await.
            request = decode_request(api_key, version, frame, position)
        else:
            request = await decode_aside(api_key, version, frame, position)
        context = RequestContext(api_key, version, header.correlation_id, header.client_id, connection, self._services)
        code = 0
        try:
            response = await route.handler(request, context)
            if response is None:
                series.observe(time.perf_counter() - started, 0)
                return ()
            code = getattr(response, "error_code", 0)
            chunks = await _frame(api_key, version, header.correlation_id, response)
        except ProtocolError:
            raise
        except KafkaError as error:
            code = error.code
            chunks = await self._refuse(route, header, request, error.code, error.message)
        except StorageError as error:
            code = storage_code(api_key, error)
            self._metrics.storage_errors.labels(route.api_name).inc()
            if started >= route.storage_logged_at + STORAGE_LOG_INTERVAL_S:
                route.storage_logged_at = started
                log.warning("storage could not serve a request", error=str(error), answer=code.name)
            chunks = await self._refuse(route, header, request, code, "storage is not available")
        except Exception:
            code = ErrorCode.UNKNOWN_SERVER_ERROR
            self._metrics.internal_errors.labels(route.api_name).inc()
            log.exception("a handler failed", version=version, client_id=header.client_id)
            chunks = await self._refuse(route, header, request, code, None)
        series.observe(time.perf_counter() - started, code)
        return chunks

    async def _refuse(
        self, route: _Route, header: RequestHeader, request: Any, code: ErrorCode, message: str | None
    ) -> Sequence[Chunk]:
        if route.api_key is ApiKey.PRODUCE and request.acks == 0:
            # As upstream: a producer that awaits no answer learns of a refusal only from a closed connection.
            raise UnanswerableError("acks_0_refused", f"produce with acks=0 refused: {code.name}")
        version = header.api_version
        response = error_response(route.api_key, version, request, code, message)
        return await _frame(route.api_key, version, header.correlation_id, response)

    async def _answer_unsupported(self, route: _Route, header: RequestHeader) -> Sequence[Chunk]:
        """ApiVersions in v0 with the whole list, so that the client can choose again. Others in the served version
        nearest to the one asked for, if it has a place for the code."""
        reason = f"{route.api_name} version {header.api_version}"
        code = ErrorCode.UNSUPPORTED_VERSION
        if route.api_key is ApiKey.API_VERSIONS:
            self._metrics.unsupported_versions.labels(route.api_name).inc()
            return await _frame(route.api_key, 0, header.correlation_id, versions_response(self._served, code))
        line = route.line
        nearest = min(max(header.api_version, line.min_version), line.max_version)
        response = top_level_error_response(route.api_key, nearest, code)
        if response is None:
            raise UnanswerableError("unsupported_version", reason)
        self._metrics.unsupported_versions.labels(route.api_name).inc()
        log.warning("request of a version that is not served", request=reason, client_id=header.client_id)
        return await _frame(route.api_key, nearest, header.correlation_id, response)


async def _frame(api_key: ApiKey, version: int, correlation_id: int, response: Any) -> Sequence[Chunk]:
    head = encode_response_header(api_key, version, correlation_id)
    body = await encode_aside(response, version)
    if len(body) == 1:
        chunk = body[0]
        return (b"".join(((len(head) + len(chunk)).to_bytes(4, "big"), head, chunk)),)
    frame_bytes = len(head)
    for chunk in body:
        frame_bytes += len(chunk)
    return [frame_bytes.to_bytes(4, "big") + head, *body]
