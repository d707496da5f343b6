"""The guard before every page and API of the console: headers, hosts, sessions, tokens, and errors as JSON.

The one idea: a handler is reached only by a request that may pass, so no handler checks a session or a token. A page
gets a policy that allows nothing but this package's own files: no inline script, no other host, no frame.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.console.kafka import ElsewhereError, Viewer
from gateway.console.sessions import Session, Sessions
from gateway.net.http_connections import HttpConnections
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError

logger = structlog.get_logger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
CSRF_HEADER = "X-CSRF-Token"

VIEWER: web.RequestKey[Viewer] = web.RequestKey("viewer", Viewer)
SESSION: web.RequestKey[Session] = web.RequestKey("session", Session)


class BadRequestError(Exception):
    """The request is not one that the page sends; the message says why."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that this console enforces on every request."""

    is_loopback: bool
    """True if it listens on loopback only. Then a request must name this host, so that no foreign page whose name
    resolves to loopback can read anything."""
    needs_login: bool
    is_secure: bool
    """True if the console itself serves TLS."""
    is_read_only: bool
    cookie: str
    """Name of the session's cookie. A browser sends cookies to all ports of a host, so each node has its own name."""


_OPEN = frozenset({"/api/session", "/api/login", "/api/oidc/login", "/api/oidc/callback"})
"""APIs that need no session."""


def guarded(rules: Rules, sessions: Sessions, connections: HttpConnections) -> Middleware:
    """Return the middleware that enforces the rules."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            with connections.busy(request.transport):
                response = await _checked(request, handler)
        except web.HTTPException as error:
            response = failure(error.status, error.reason)
        except (BadRequestError, KafkaError, ElsewhereError, StorageError) as error:
            response = _told(error)
        except Exception:
            logger.exception("the console failed to answer", path=request.path)
            response = failure(500, "the console failed; the gateway's log says why")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if rules.is_loopback and not is_loopback(_host_of(request)):
            raise BadRequestError("this console answers only at localhost and at loopback addresses such as 127.0.0.1")
        if not request.path.startswith("/api/"):
            return await handler(request)
        session = await sessions.checked(request.cookies.get(rules.cookie), request.remote or "")
        if session is not None and rules.needs_login and not session.is_logged_in:
            session = None
        if request.method not in ("GET", "HEAD"):
            _demand_own_page(request)
        if session is None:
            if request.path not in _OPEN:
                return failure(401, "log in first" if rules.needs_login else "the session is over; reload the page")
            return await handler(request)
        if request.method not in ("GET", "HEAD"):
            given = request.headers.get(CSRF_HEADER, "").encode(errors="replace")
            if not hmac.compare_digest(given, session.csrf.encode()) and request.path != "/api/login":
                return failure(403, "the request lacks the page's token; reload the page")
        request[SESSION] = session
        request[VIEWER] = Viewer(session.principal, f"/{request.remote or '127.0.0.1'}")
        return await handler(request)

    return guard


def _host_of(request: web.Request) -> str:
    try:
        return (urlsplit(f"//{request.host}").hostname or "").lower()
    except ValueError:
        return ""


def _place_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _demand_own_page(request: web.Request) -> None:
    """Raise BadRequestError unless a page of this console sent the request."""
    origin = request.headers.get("Origin")
    if origin is not None and _place_of(origin) != request.host:
        raise BadRequestError("the request comes from a page of another site")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise BadRequestError("the request comes from a page of another site")
    if request.content_type != "application/json":
        raise BadRequestError("the request is not JSON")


def failure(status: int, reason: str, **more: object) -> web.Response:
    return web.json_response({"error": reason, **more}, status=status)


_DENIED = frozenset(
    {
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_UNKNOWN = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.GROUP_ID_NOT_FOUND})


def _told(error: Exception) -> web.Response:
    if isinstance(error, KafkaError):
        status = 403 if error.code in _DENIED else 404 if error.code in _UNKNOWN else 409
        return failure(status, error.message or error.code.name, code=error.code.name)
    if isinstance(error, StorageError):
        return failure(503, f"Postgres does not answer: {' '.join(str(error).split())}")
    return failure(400 if isinstance(error, BadRequestError) else 409, str(error))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
