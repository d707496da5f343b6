"""From a frame to its answer: decode → place in order → check bounds → authorize → throttle → handle → shape the
refusal → encode → audit.

The one idea: everything that is the same for all APIs is here and only here, as one line of stages. `Dispatch._run`
shows them in the order in which a request passes them. A handler returns a response or raises. One place decides how a
refusal, a lost database or a bug is answered, logged and counted, so that no client is left without an answer and no
handler repeats it.

The table of served APIs (`gateway/apis/__init__.py`) says which APIs exist, how each is placed among others and how its
refusal looks. Back-pressure is the connection's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Never, TypeVar, cast

import structlog

from gateway.net import request_log
from gateway.net.coding import AT_ONCE_ELEMENTS, decode_anywhere, decode_in_thread, encode_in_thread
from gateway.net.collection import LEFTOVERS_S
from gateway.net.context import ConnectionInfo, RequestContext, Role
from gateway.net.errors import storage_code
from gateway.net.holdings import UNBOUNDED, Holdings
from gateway.net.ids import MAX_ID_BYTES, check_ids
from gateway.net.places import NO_PLACE, Place
from gateway.net.refusals import DerivedRefusal
from gateway.net.requests import Admission, Order, UnanswerableError
from gateway.operate.loggers import FINEST
from gateway.operate.logs import REQUEST
from gateway.operate.metrics import Metrics, RequestSeries
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.codec import MAX_REQUEST_ELEMENTS, decode_request, encode_response, has_more_elements, response_class
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.framing import Frame
from protocol.headers import RequestHeader, decode_request_header, encode_response_header
from protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from protocol.schema import message_schema
from protocol.sizes import outweighs
from protocol.specialise import TooManyElementsError
from storage.errors import StorageError

logger = structlog.stdlib.get_logger(__name__)

STORAGE_LOG_INTERVAL_S = 1.0
"""While Postgres is away every request of an API fails alike. The counter counts them all; the log gets one line a
second."""

MAX_STRUCTURED_BYTES = 8 * 1024 * 1024
"""Largest request of any API but Produce: decoded, it occupies several times its size in memory. Only
socket.request.max.bytes bounds Produce, because its records stay bytes."""

MAX_THROTTLE_MS = 60_000
"""Longest time for which one request may mute its connection."""

_ALONE = Admission()
_KAFKA_KEYS = frozenset(int(api_key) for api_key in ApiKey)

S_contra = TypeVar("S_contra", contravariant=True)
"""The services that handlers or stages need. A caller with more services can call them too."""

Handler = Callable[[Never, RequestContext[S_contra]], Coroutine[object, None, object]]
"""Takes the request of its API and returns the response."""

Refusal = Callable[[Never, int, ErrorCode, str | None], object]
"""(request, version, code, message) → the response in which everything requested failed with the code. The code is in
the field where clients of that API expect it, so that no client waits for a missing element.
"""

Authorize = Callable[[object, RequestContext[S_contra]], Awaitable[None]]
"""Refuses a whole request by raising KafkaError. The handler checks what may fail element by element."""

Throttle = Callable[[object, RequestContext[object]], int]
"""Returns how many milliseconds the connection is muted after this request; 0 for none."""

Prepare = Callable[[RequestContext[S_contra]], Awaitable[None] | None]
"""Returns an awaitable that must end before the handler begins. Returns None if there is nothing to wait for."""

Charged = Callable[[Coroutine[object, None, object], RequestContext[object]], Awaitable[tuple[object, int]]]
"""Awaits the handler, and returns its response or its error, with the time for which the connection is muted after
it."""

Charge = Callable[[RequestContext[object]], Charged | None]
"""Returns None if the client's requests are not counted, so that the handler is awaited directly."""


Audit = Callable[[object, object, int, RequestContext[object]], Awaitable[None]]
"""(request, response, code, context): reports a request before its answer leaves. The response is None if the whole
request was refused with the code."""

Trace = Callable[[RequestContext[object], float, int, int], None]
"""(context, seconds, code, bytes of the answer): reports an answered request to a collector of traces."""


def _answered(_request: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Served(Generic[S_contra]):
    """One line of the table of served APIs: an API, its promised versions, its handler, its refusal, and the roles
    that serve it."""

    api_key: ApiKey
    min_version: int
    max_version: int
    handler: Handler[S_contra]
    order: Order = Order.ALONE
    refuse: Refusal | None = None
    """None: the refusal that follows from the declarations of request and response."""
    bulky: bool = False
    alone_above_bytes: int | None = None
    """A request larger than this is ALONE, regardless of `order`."""
    advertised_min: int | None = None
    """The version that ApiVersions must claim if it is lower than the lowest served one (Produce); None:
    `min_version`."""
    awaits_answer: Callable[[Never], bool] = _answered
    """True if the sender of a request waits for its answer. Otherwise a refusal closes the connection."""
    max_elements: int = MAX_REQUEST_ELEMENTS
    """Array elements of one request, at any depth. More are refused as POLICY_VIOLATION, as upstream refuses a
    request that would be more than 10,000 records of its metadata log. Counted only above `coding.AT_ONCE_ELEMENTS`."""
    roles: Role = Role.BROKER
    only_if_awaited: bool = False
    """True for a change that no lease, epoch or sequence number fences. It is not made once the client has closed the
    connection, because the client may have repeated the request at another node. A node that was frozen finds such
    requests when it continues."""

    @property
    def refusal(self) -> Refusal:
        """The function that refuses the API's requests: the API's own one, or the derived one."""
        return self.refuse or DerivedRefusal(self.api_key)


@dataclass(frozen=True, slots=True)
class Stages(Generic[S_contra]):
    """The stages between a request's place in order and its handler. A node without authorizer and quotas has
    neither."""

    authorize: Authorize[S_contra] | None = None
    throttle: Throttle | None = None
    prepare: Prepare[S_contra] | None = None
    charge: Charge | None = None
    """Wraps the handler, so that its time is counted for the client's quota."""
    audit: Mapping[ApiKey, Audit] = dataclasses.field(default_factory=lambda: dict[ApiKey, Audit]())
    """Reports the audited APIs. For all others it costs one comparison."""
    trace: Trace | None = None


def served_as(role: Role, served: Sequence[Served[S_contra]]) -> tuple[Served[S_contra], ...]:
    """Return those lines of a table that a node serves in this role."""
    return tuple(line for line in served if role in line.roles)


def served_versions(served: Sequence[Served[S_contra]]) -> tuple[ApiVersion, ...]:
    """Return the versions that ApiVersions promises for a table: each API once, by key."""
    return tuple(
        ApiVersion(
            api_key=line.api_key,
            min_version=line.min_version if line.advertised_min is None else line.advertised_min,
            max_version=line.max_version,
        )
        for line in sorted(served, key=lambda line: line.api_key)
    )


class _Route(Generic[S_contra]):
    """A line of the table, with values that every request needs."""

    __slots__ = (
        "always_answers",
        "api_key",
        "api_name",
        "audit",
        "awaits_answer",
        "handler",
        "line",
        "refuse",
        "series",
        "storage_logged_at",
    )

    def __init__(self, line: Served[S_contra], metrics: Metrics, audit: Audit | None) -> None:
        self.line = line
        self.audit = audit
        self.api_key = line.api_key
        self.api_name = line.api_key.name.lower()
        for counter in (metrics.internal_errors, metrics.storage_errors):
            counter.labels(self.api_name)  # Alert rules need a series that begins at 0.
        # The request is decoded by the key of the line, so it is of the type that these functions take.
        self.handler = cast(
            "Callable[[object, RequestContext[S_contra]], Coroutine[object, None, object]]", line.handler
        )
        self.refuse = cast("Callable[[object, int, ErrorCode, str | None], object]", line.refusal)
        self.awaits_answer = cast("Callable[[object], bool]", line.awaits_answer)
        self.always_answers = line.awaits_answer is _answered
        self.storage_logged_at = float("-inf")
        self.series: dict[int, RequestSeries] = {
            version: metrics.request_series(self.api_name, version)
            for version in range(line.min_version, line.max_version + 1)
        }


class Dispatch(Generic[S_contra]):
    """Answers frames by a table of served APIs. It is the `RequestHandler` of every connection of a role."""

    def __init__(
        self,
        served: Sequence[Served[S_contra]],
        services: S_contra,
        metrics: Metrics,
        stages: Stages[S_contra] = Stages(),
        role: Role = Role.BROKER,
    ) -> None:
        """Build the routes. `served` is the table for the role."""
        self._role = role
        self._served = served_versions(served)
        self._services = services
        self._metrics = metrics
        self._stages = stages
        self._routes = {int(line.api_key): _Route(line, metrics, stages.audit.get(line.api_key)) for line in served}
        self._admissions = {int(line.api_key): Admission(line.order, line.bulky) for line in served}
        self._alone_above_bytes = {
            int(line.api_key): line.alone_above_bytes for line in served if line.alone_above_bytes is not None
        }
        self._placed = frozenset(int(line.api_key) for line in served if line.order is Order.PLACED)

    def admission(self, frame: Frame) -> Admission:
        if len(frame) < 2:
            return _ALONE
        api_key = frame[0] << 8 | frame[1]
        if api_key in self._alone_above_bytes and len(frame) > self._alone_above_bytes[api_key]:
            return _ALONE
        return self._admissions.get(api_key, _ALONE)

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        """Take the request's place in order now. The stages run when the result is awaited. It returns the answer's
        chunks, length first; none for Produce with acks=0.

        The stages raise ProtocolError if no answer is possible and the connection must close: no Kafka request, an API
        or version that is not served and has no shape to say so, or a refused request that awaits no answer.
        """
        if len(frame) >= 2 and frame[0] << 8 | frame[1] in self._placed:
            return self._run_placed(frame, connection, connection.line.take())
        return self._run(frame, connection, NO_PLACE)

    async def _run_placed(self, frame: Frame, connection: ConnectionInfo, place: Place) -> Sequence[Buffer]:
        try:
            return await self._run(frame, connection, place)
        finally:
            place.leave()

    async def _run(self, frame: Frame, connection: ConnectionInfo, place: Place) -> Sequence[Buffer]:  # noqa: C901
        # All stages in one function, so that a reader sees their order and a request costs no further coroutine.
        started = time.perf_counter()
        header, position = decode_request_header(frame)
        route = self._find_route(header)
        version = header.api_version
        series = route.series.get(version)
        if series is None:
            return await self._answer_unsupported(route, header, connection)
        api_key = route.api_key
        if route.line.only_if_awaited:
            await asyncio.sleep(0)  # The end of the connection may lie behind the request.
            if connection.peer_gone:
                logger.info("a request was ignored because its client has gone", api=route.api_name)
                connection.skipped = True
                return ()
        if len(frame) > MAX_STRUCTURED_BYTES and api_key is not ApiKey.PRODUCE:
            raise UnanswerableError("request_size", f"{route.api_name} of {len(frame)} bytes")
        REQUEST.set((connection.connection_id, route.api_name, header.correlation_id))
        done_with: Callable[[], None] | None = None
        try:
            request = decode_request(api_key, version, frame, position, max_elements=AT_ONCE_ELEMENTS)
        except TooManyElementsError:
            request, done_with = await decode_in_thread(api_key, version, frame, position)
        context = RequestContext(
            api_key,
            version,
            header.correlation_id,
            header.client_id,
            connection,
            self._services,
            place,
            self._served,
            self._role,
            self._storage_failed,
        )
        crowded = done_with is not None
        response: object = None
        code, throttle_ms, stages, holdings = 0, 0, self._stages, connection.holdings
        try:
            if crowded:
                await asyncio.to_thread(_check_bounds, request, context, route.line.max_elements)
            elif len(frame) > MAX_ID_BYTES:
                check_ids(request, context.client_id)
            charged = None if stages.charge is None else stages.charge(context)  # with its authorization
            if stages.authorize is not None and charged is None:
                await stages.authorize(request, context)
            if stages.throttle is not None:
                throttle_ms = _mute(connection, stages.throttle(request, context))
            if stages.prepare is not None and (preparing := stages.prepare(context)) is not None:
                await preparing
            if charged is None:
                response = await route.handler(request, context)
            else:
                outcome, charged_ms = await charged(self._authorized(route, request, context), context)
                throttle_ms = max(throttle_ms, _mute(connection, charged_ms))
                if isinstance(outcome, Exception):
                    raise outcome
                response = outcome
            code = getattr(response, "error_code", 0)
            chunks: Sequence[Buffer] = ()
            if route.always_answers or route.awaits_answer(request):
                if throttle_ms or outweighs(response, AT_ONCE_ELEMENTS):
                    chunks = await encode_answer(
                        api_key, version, header.correlation_id, response, holdings, throttle_ms
                    )
                else:
                    # This is the usual case, and it needs no coroutine.
                    body = encode_response(response, version)
                    chunks = _framed(encode_response_header(api_key, version, header.correlation_id), body)
        except ProtocolError:
            raise
        except KafkaError as error:
            code = error.code
            chunks = await self._refuse(
                route, header, request, error.code, error.message, holdings, throttle_ms, crowded
            )
        except StorageError as error:
            code = self._storage_failed(api_key, error)
            if started >= route.storage_logged_at + STORAGE_LOG_INTERVAL_S:
                route.storage_logged_at = started
                logger.warning("storage could not serve a request", error=str(error), answer=code.name)
            reason = "storage is not available"
            chunks = await self._refuse(route, header, request, code, reason, holdings, throttle_ms, crowded)
        except Exception:
            code = ErrorCode.UNKNOWN_SERVER_ERROR
            self._metrics.internal_errors.labels(route.api_name).inc()
            logger.exception("a handler failed", version=version, client_id=header.client_id)
            chunks = await self._refuse(route, header, request, code, None, holdings, throttle_ms, crowded)
        finally:
            if done_with is not None:
                asyncio.get_running_loop().call_later(LEFTOVERS_S, done_with)
        took_s = time.perf_counter() - started
        series.observe(took_s, code)
        if FINEST.is_debug or route.audit is not None or stages.trace is not None:
            await _report(route.audit, stages.trace, request, response, header, context, took_s, code, chunks)
        if crowded:
            # Freeing a hundred thousand objects takes milliseconds and cannot be interrupted, so the response
            # and the request have a turn each.
            del response
            await asyncio.sleep(0)
            del request
            await asyncio.sleep(0)
        return chunks

    def _storage_failed(self, api_key: ApiKey, error: StorageError) -> ErrorCode:
        """Count a request, or a part of one, that storage could not serve. Return the code that answers it."""
        self._metrics.storage_errors.labels(self._routes[api_key].api_name).inc()
        return storage_code(api_key, error)

    async def _authorized(self, route: _Route[S_contra], request: object, context: RequestContext[S_contra]) -> object:
        """Authorize and handle a request. As in Kafka, quotas count the time of both: a refusal is work, too."""
        if self._stages.authorize is not None:
            await self._stages.authorize(request, context)
        return await route.handler(request, context)

    async def refuse(self, frame: Frame, code: ErrorCode, message: str | None) -> Sequence[Buffer]:
        """Return the answer that refuses a request without handling it. Raise ProtocolError if the request has no
        such answer."""
        header, position = decode_request_header(frame)
        route = self._find_route(header)
        version = header.api_version
        if version not in route.series:
            raise UnanswerableError("unsupported_version", f"{route.api_name} version {version}")
        request, done_with = await decode_anywhere(route.api_key, version, frame, position)
        try:
            return await self._refuse(
                route, header, request, code, message, UNBOUNDED, 0, crowded=done_with is not None
            )
        finally:
            if done_with is not None:
                asyncio.get_running_loop().call_later(LEFTOVERS_S, done_with)

    def _find_route(self, header: RequestHeader) -> _Route[S_contra]:
        route = self._routes.get(header.api_key)
        if route is None:
            if header.api_key in _KAFKA_KEYS:
                name = ApiKey(header.api_key).name.lower()
                raise UnanswerableError("unserved_api", f"{name} version {header.api_version} is not served")
            raise UnanswerableError("unknown_api", f"api key {header.api_key} version {header.api_version}")
        return route

    async def _refuse(
        self,
        route: _Route[S_contra],
        header: RequestHeader,
        request: object,
        code: ErrorCode,
        message: str | None,
        holdings: Holdings,
        throttle_ms: int,
        crowded: bool,
    ) -> Sequence[Buffer]:
        if not route.awaits_answer(request):
            # Upstream does the same: a client that awaits no answer (a producer with acks=0) learns of a refusal only
            # from a closed connection.
            raise UnanswerableError("acks_0_refused", f"{route.api_name} with acks=0 refused: {code.name}")
        refuse = route.refuse
        if crowded:
            # The thread touches nothing but the request, and the refusal has an entry for each element.
            response = await asyncio.to_thread(refuse, request, header.api_version, code, message)
        else:
            response = refuse(request, header.api_version, code, message)
        try:
            return await encode_answer(
                route.api_key, header.api_version, header.correlation_id, response, holdings, throttle_ms
            )
        except KafkaError as error:
            raise UnanswerableError("answer_size", f"{route.api_name} refused: {code.name}: {error.message}") from error

    async def _answer_unsupported(
        self, route: _Route[S_contra], header: RequestHeader, connection: ConnectionInfo
    ) -> Sequence[Buffer]:
        """Answer ApiVersions in v0 with the whole list, so that the client can choose again. Answer other APIs in
        the served version nearest to the requested one, if it has a place for the code.

        A client of a shared listener gets no answer in another version. The node that forwards its request may be newer
        than this node. That node then refuses the request in the version that it has promised.
        """
        reason = f"{route.api_name} version {header.api_version}"
        code = ErrorCode.UNSUPPORTED_VERSION
        if route.api_key is ApiKey.API_VERSIONS:
            self._metrics.unsupported_versions.labels(route.api_name).inc()
            versions = ApiVersionsResponse(error_code=code, api_keys=self._served)
            return await encode_answer(route.api_key, 0, header.correlation_id, versions, UNBOUNDED)
        line = route.line
        nearest = min(max(header.api_version, line.min_version), line.max_version)
        response = None if connection.shared else top_level_refusal(route.api_key, nearest, code)
        if response is None:
            raise UnanswerableError("unsupported_version", reason)
        self._metrics.unsupported_versions.labels(route.api_name).inc()
        logger.warning("request of a version that is not served", request=reason, client_id=header.client_id)
        return await encode_answer(route.api_key, nearest, header.correlation_id, response, UNBOUNDED)


async def _report(
    audit: Audit | None,
    trace: Trace | None,
    request: object,
    response: object,
    header: RequestHeader,
    context: RequestContext[object],
    took_s: float,
    code: int,
    chunks: Sequence[Buffer],
) -> None:
    """Report a request to its logger, to the collector of traces and to the audit trail, before its answer leaves."""
    if FINEST.is_debug or trace is not None:
        answer_bytes = sum(map(len, chunks))
        if FINEST.is_debug:
            request_log.tell(header, context.connection, took_s, code, answer_bytes)
        if trace is not None:
            trace(context, took_s, code, answer_bytes)
    if audit is not None:
        await audit(request, response, code, context)


def _check_bounds(request: object, context: RequestContext[object], max_elements: int) -> None:
    """Raise KafkaError if a request of many elements has more of them than its API takes, or an id that is too long."""
    if has_more_elements(request, max_elements):
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"One request may have {max_elements} elements.")
    check_ids(request, context.client_id)


def top_level_refusal(api_key: ApiKey, version: int, code: ErrorCode) -> object | None:
    """Return the response with nothing but a top-level code, for a request that could not be read; None if `version`
    of the response has no such field."""
    response_type = response_class(api_key)
    for field in message_schema(response_type).fields:
        if field.name == "error_code" and version in field.versions:
            return response_type(error_code=code)
    return None


def _mute(connection: ConnectionInfo, throttle_ms: int) -> int:
    """Mute the connection. Return the time for which it is muted from now, which the answer also contains (KIP-219)."""
    throttle_ms = min(throttle_ms, MAX_THROTTLE_MS)
    if throttle_ms > 0:
        until_s = asyncio.get_running_loop().time() + throttle_ms / 1000
        connection.muted_until_s = max(connection.muted_until_s, until_s)
    return throttle_ms


async def encode_answer(
    api_key: ApiKey, version: int, correlation_id: int, response: object, holdings: Holdings, throttle_ms: int = 0
) -> Sequence[Buffer]:
    """Return an answer with its size. Raise KafkaError for an answer that is too large."""
    if throttle_ms > 0 and hasattr(response, "throttle_time_ms"):
        # Every response that has this field is a dataclass like this one.
        response = dataclasses.replace(cast(ApiVersionsResponse, response), throttle_time_ms=throttle_ms)
    head = encode_response_header(api_key, version, correlation_id)
    if outweighs(response, AT_ONCE_ELEMENTS):
        body = await encode_in_thread(response, version, holdings)
    else:
        body = encode_response(response, version)
    return _framed(head, body)


def _framed(head: bytes, body: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return length, header and body."""
    if len(body) == 1:
        chunk = body[0]
        return (b"".join(((len(head) + len(chunk)).to_bytes(4, "big"), head, chunk)),)
    frame_bytes = len(head)
    for chunk in body:
        frame_bytes += len(chunk)
    return [frame_bytes.to_bytes(4, "big") + head, *body]
