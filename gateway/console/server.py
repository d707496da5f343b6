"""The console's socket and routes.

The one idea: one small table of routes, each a function of the viewer and the query that returns JSON. Pages are files
of this package, read once and kept in memory. Nothing is computed before a request comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from gateway.cluster.figures import NodeFigures
from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.listeners import parse_address
from gateway.config.security import OAuthSettings
from gateway.console import oidc
from gateway.console.actions import Actions
from gateway.console.asked import MAX_PARTITION, parse_record, parse_search
from gateway.console.cluster import GROUP_RESOURCE, ClusterViews
from gateway.console.decode import Json
from gateway.console.groups import GroupViews
from gateway.console.guard import SESSION, VIEWER, BadRequestError, Rules, failure, guarded, is_loopback
from gateway.console.kafka import Kafka, Viewer
from gateway.console.live import Event, Streams
from gateway.console.oidc import LoginError, Oidc
from gateway.console.overview import Overview
from gateway.console.registry import Registry
from gateway.console.sessions import (
    MAX_NAME_CHARS,
    Attempts,
    Session,
    Sessions,
    address_key,
    credentials_of,
    password_matches,
)
from gateway.console.topics import TopicViews
from gateway.net.context import Principal
from gateway.net.http_connections import HttpConnections
from gateway.security.authenticator import Users
from gateway.security.jwks import KeysUnavailableError, Tokens
from gateway.security.jwt import TokenError
from protocol.errors import KafkaError
from storage.console import ConsoleStore
from storage.errors import StorageError
from storage.groups import GroupStore
from storage.journal import JournalStore
from storage.nodes import NodeStore
from storage.pool import Database

logger = structlog.get_logger(__name__)

MAX_CONNECTIONS = 512
MAX_CONNECTIONS_FROM = 256
"""Maximal number of connections of one address, so that one address cannot use all of them."""
MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_SHORT_BODY_BYTES = 64 * 1024
"""Bytes of a body that are not in one of its first MAX_STRINGS texts: the JSON is parsed on the event loop of the node,
and two megabytes of short lists take a second."""
MAX_STRINGS = 4_096
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text of JSON. One without an end counts to the end of the body, as a second search for its end would make the time
grow with the square of the length."""
BODY_S = 20.0
"""How long a browser may take to send a body."""
MAX_LINE_BYTES = 128 * 1024
"""Bytes of the first line of a request: a pasted schema is in it, or a position in each of 2,000 partitions. aiohttp's
own limit is 8,190."""
STOP_TIMEOUT_S = 0.3
BACKLOG = 64
MAX_TEXT_CHARS = 4_096
OVERVIEW_S = 2.0
GROUP_S = 1.0
"""Interval at which an open group page checks for new events."""
LAG_EVERY = 2
"""Lag is read at every second check."""

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}

DEFAULT_LISTEN = "127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the node that the console uses."""

    kafka: Kafka
    database: Database
    users: Users
    figures: NodeFigures
    oauth: OAuthSettings | None = None
    """Checks the access tokens with which viewers may log in. None if no listener accepts tokens."""


class Console:
    """The console of one node. Call `start` once and `stop` once."""

    def __init__(self, parts: Parts, broker: BrokerConfig) -> None:
        kafka, store = parts.kafka, ConsoleStore(parts.database)
        host, port = parse_address(broker.console_listen)
        self._address = (host, port)
        self._broker = broker
        self._tls = _tls(broker)
        self._kafka, self._store, self._users = kafka, store, parts.users
        has_authorizer = kafka.services.authorizer is not None
        local = is_loopback(host)
        if not local and self._tls is None and not broker.console_plaintext_allow:
            raise ConfigError(
                "console.listen",
                broker.console_listen,
                "is not a loopback address, so passwords would cross the network in the clear: give "
                "console.ssl.keystore.location, or set console.plaintext.allow=true behind a proxy that has TLS",
            )
        services = kafka.services
        cookie = f"sluice_console-{services.cluster_id}-{services.membership.node_id}-{port}"
        self._rules = Rules(local, not local or has_authorizer, self._tls is not None, broker.console_read_only, cookie)
        self._may_produce = not broker.console_read_only and (
            broker.console_produce == "true" or (broker.console_produce == "auto" and not has_authorizer)
        )
        self._tokens = None if parts.oauth is None else Tokens(parts.oauth)
        self._oidc = Oidc(broker, parts.oauth, is_loopback=local) if broker.console_oidc_issuer else None
        self._sessions, self._attempts, self._streams = Sessions(parts.users), Attempts(), Streams()
        self._groups = GroupViews(kafka, store, GroupStore(parts.database))
        self._overview = Overview(kafka, store, NodeStore(parts.database), self._groups, parts.figures)
        self._cluster = ClusterViews(kafka, store, self._groups)
        registry = broker.console_schema_registry_url
        self._registry = Registry(registry, broker.console_schema_registry_login or "") if registry else None
        self._topics = TopicViews(kafka, store, self._groups, self._cluster, self._registry)
        journal = JournalStore(parts.database) if kafka.services.groups.journal is not None else None
        self._actions = Actions(kafka, self._groups, self._topics, self._cluster, journal)
        self._files = _static()
        self._runner: web.AppRunner | None = None
        self.url = ""
        """URL of the console, once started."""

    async def start(self) -> None:
        """Listen. Raise OSError if the address is taken."""
        connections = HttpConnections(MAX_CONNECTIONS, most_from=MAX_CONNECTIONS_FROM)
        guard = guarded(self._rules, self._sessions, connections)
        app = web.Application(middlewares=[guard])
        app.add_routes(self._routes())
        # A stream ends as soon as its reader has gone. Then its queries to Postgres end too.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=STOP_TIMEOUT_S,
            handler_cancellation=True,
            max_line_size=MAX_LINE_BYTES,
            # aiohttp decompresses even the bodies that it ignores, on the event loop. No page compresses a body.
            auto_decompress=False,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        host, port = self._address
        self._bound = await connections.listen(server, host, port, BACKLOG, self._tls)
        port = self._bound.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if self._tls else 'http'}://{shown}:{port}"
        logger.info("console", url=self.url, login=self._rules.needs_login, read_only=self._rules.is_read_only)

    async def stop(self) -> None:
        if self._runner is None:
            return
        if self.url:
            self._bound.close()
        await self._streams.close()
        await self._runner.cleanup()
        self._topics.close()
        if self._registry is not None:
            await self._registry.close()
        if self._tokens is not None:
            await self._tokens.close()
        if self._oidc is not None:
            await self._oidc.close()

    # --- routes -------------------------------------------------------------------------------------------------------

    def _routes(self) -> list[web.RouteDef]:
        views: Mapping[str, Callable[[Viewer, Mapping[str, str]], Awaitable[object]]] = {
            "/api/overview": lambda who, query: self._overview.show(who),
            "/api/nodes": self._nodes,
            "/api/groups": lambda who, query: self._groups.list(who, _text(query, "search", "")),
            "/api/group": lambda who, query: self._groups.describe(who, _text(query, "id")),
            "/api/group/timeline": self._timeline,
            "/api/group/lag": self._lag,
            "/api/group/settings": self._group_settings,
            "/api/topics": lambda who, query: self._topics.list(who, _text(query, "search", "")),
            "/api/topic": self._topic,
            "/api/topic/records": self._records,
            "/api/topic/record": self._record,
            "/api/transactions": lambda who, query: self._cluster.transactions(who),
            "/api/share": lambda who, query: self._cluster.share_groups(who),
            "/api/acls": lambda who, query: self._cluster.acls(who),
            "/api/users": lambda who, query: self._cluster.users(who),
            "/api/quotas": lambda who, query: self._cluster.quotas(who),
            "/api/settings": lambda who, query: self._cluster.node_settings(who),
        }
        routes = [web.get(path, _answering(view)) for path, view in views.items()]
        routes += [
            web.get("/api/session", self._get_session),
            web.post("/api/login", self._post_login),
            web.get(f"{oidc.PATH}/login", self._get_oidc_login),
            web.get(oidc.CALLBACK, self._get_oidc_callback),
            web.post("/api/logout", self._post_logout),
            web.post("/api/action/plan", self._post_plan),
            web.post("/api/action", self._post_action),
            web.post("/api/produce", self._post_produce),
            web.get("/api/live/overview", self._live_overview),
            web.get("/api/live/group", self._live_group),
            web.get("/api/live/records", self._live_records),
            web.get("/{name:[a-z0-9_-]*(?:\\.[a-z]+)?}", self._get_file),
        ]
        return routes

    async def _get_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"] or "index.html"
        found = self._files.get(name)
        if found is None:
            return failure(404, "there is no such page")
        body, kind, tag = found
        headers = {"Cache-Control": "no-cache", "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _nodes(self, who: Viewer, query: Mapping[str, str]) -> object:
        return {"nodes": await self._overview.nodes(who), "figures": await self._overview.figures(who)}

    async def _timeline(self, who: Viewer, query: Mapping[str, str]) -> object:
        from_ms, to_ms = self._window(query)
        return await self._groups.timeline(who, _text(query, "id"), from_ms, to_ms)

    async def _lag(self, who: Viewer, query: Mapping[str, str]) -> object:
        from_ms, to_ms = self._window(query)
        return await self._groups.lag_history(who, _text(query, "id"), from_ms, to_ms)

    def _window(self, query: Mapping[str, str]) -> tuple[int, int]:
        now_ms = self._kafka.services.clock.now_ms()
        to_ms = _number(query, "to", now_ms)
        from_ms = _number(query, "from", to_ms - 300_000)
        if not 0 <= from_ms < to_ms < 2**53:
            raise BadRequestError("the window ends before it begins")
        return from_ms, to_ms

    async def _group_settings(self, who: Viewer, query: Mapping[str, str]) -> object:
        return {"settings": await self._cluster.settings(who, GROUP_RESOURCE, _text(query, "id"))}

    async def _topic(self, who: Viewer, query: Mapping[str, str]) -> object:
        topic = await self._topics.describe(who, _text(query, "name"))
        return {**topic, "mayProduce": self._may_produce}

    async def _records(self, who: Viewer, query: Mapping[str, str]) -> object:
        search, begin, value, at = parse_search(query)
        return await self._topics.records(who, search, begin, value, at)

    async def _record(self, who: Viewer, query: Mapping[str, str]) -> object:
        search, _, _, _ = parse_search(query)
        partition = _number(query, "partition")
        if not 0 <= partition <= MAX_PARTITION:
            raise BadRequestError("there is no such partition")
        return await self._topics.record(who, search, partition, _number(query, "offset"))

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def _get_session(self, request: web.Request) -> web.Response:
        """Return who the viewer is. If viewers need no login, begin a session."""
        session = request.get(SESSION)
        if session is None and not self._rules.needs_login:
            session = self._sessions.begin()
            return self._with_cookie(web.json_response(self._session_of(session)), session)
        return web.json_response(self._session_of(session))

    def _session_of(self, session: Session | None) -> dict[str, object]:
        return {
            "needsLogin": session is None and self._rules.needs_login,
            "takesTokens": self._tokens is not None,
            "provider": None if self._oidc is None else urlsplit(self._oidc.issuer).netloc,
            "user": str(session.principal) if session is not None and session.is_logged_in else None,
            "csrf": None if session is None else session.csrf,
            "readOnly": self._rules.is_read_only,
            "node": int(self._kafka.services.membership.node_id),
        }

    def _with_cookie(self, response: web.Response, session: Session) -> web.Response:
        response.set_cookie(
            self._rules.cookie, session.key, httponly=True, samesite="Strict", secure=self._rules.is_secure, path="/"
        )
        return response

    async def _post_login(self, request: web.Request) -> web.Response:
        given = await _body(request)
        if "token" in given:
            return await self._log_in_by_token(request, given["token"])
        user, password = given.get("user"), given.get("password")
        if not isinstance(user, str) or not isinstance(password, str):
            raise BadRequestError("user and password are texts")
        if not user or len(user) > MAX_NAME_CHARS or len(password) > MAX_NAME_CHARS:
            raise BadRequestError("user or password is empty or too long")
        address = request.remote or ""
        keys = (address_key(address), f"user {user}")
        if (refused := self._too_many(keys)) is not None:
            return refused
        # Counted before the password is compared, so that many requests at once are many attempts.
        self._attempts.failed(*keys)
        try:
            known = await credentials_of(self._users, user, address)
        except StorageError:
            self._attempts.withdraw(*keys)
            raise
        if not await password_matches(known, password):
            logger.warning("a login to the console failed", user=user[:100], address=address)
            return failure(403, "user or password is wrong")
        self._attempts.forget(*keys)
        session = self._logged_in(request, user, math.inf)
        session.credentials = known
        return self._with_cookie(web.json_response(self._session_of(session)), session)

    def _too_many(self, keys: Sequence[str]) -> web.Response | None:
        wait_s = self._attempts.wait_s(*keys)
        if wait_s <= 0:
            return None
        response = failure(429, f"too many failed logins; try again in {int(wait_s) + 1} s")
        response.headers["Retry-After"] = str(int(wait_s) + 1)
        return response

    def _logged_in(self, request: web.Request, user: str, lifetime_s: float) -> Session:
        old = request.cookies.get(self._rules.cookie)
        if old is not None:
            self._sessions.end(old)
        session = self._sessions.begin(Principal(user), is_logged_in=True, lifetime_s=lifetime_s)
        logger.info("a user logged in to the console", user=user, address=request.remote or "")
        return session

    async def _log_in_by_token(self, request: web.Request, token: object) -> web.Response:
        """Log the subject of an access token in, as the listener with OAUTHBEARER would."""
        if self._tokens is None or not isinstance(token, str):
            raise BadRequestError("this console takes no access tokens, because no listener does (OAUTHBEARER)")
        address = request.remote or ""
        keys = (address_key(address),)
        if (refused := self._too_many(keys)) is not None:
            return refused
        self._attempts.failed(*keys)
        try:
            found = await self._tokens.check(token)
        except TokenError as error:
            logger.warning("a login to the console failed", error=str(error)[:200], address=address)
            return failure(403, f"the access token is refused: {error}"[:200])
        except KeysUnavailableError as error:
            self._attempts.withdraw(*keys)
            return failure(503, str(error))
        self._attempts.forget(*keys)
        session = self._logged_in(request, found.subject, max(found.expires_s - self._tokens.now_s(), 0.0))
        return self._with_cookie(web.json_response(self._session_of(session)), session)

    async def _get_oidc_login(self, request: web.Request) -> web.Response:
        """Send the browser to the provider."""
        if self._oidc is None:
            return failure(404, "this console has no OpenID Connect provider (console.oidc.issuer)")
        try:
            url, cookie = await self._oidc.begin(f"{request.scheme}://{request.host}")
        except LoginError as error:
            return self._login_failed(request, error)
        response = web.Response(status=303, headers={"Location": url, "Cache-Control": "no-store"})
        # Lax, because the provider's page sends the browser back here; the session's own cookie stays Strict.
        response.set_cookie(
            oidc.COOKIE,
            cookie,
            httponly=True,
            samesite="Lax",
            secure=self._rules.is_secure,
            path=oidc.PATH,
            max_age=oidc.LOGIN_S,
        )
        return response

    async def _get_oidc_callback(self, request: web.Request) -> web.Response:
        """Log in the person whom the provider sends back. The page that opens is always one of this console."""
        if self._oidc is None:
            return failure(404, "this console has no OpenID Connect provider (console.oidc.issuer)")
        keys, cookie = (address_key(request.remote or ""),), request.cookies.get(oidc.COOKIE, "")
        try:
            # A page of another site can lead a browser here, so an answer to no login is not counted as a failed login.
            self._oidc.check_begun(request.query, cookie)
            if self._attempts.wait_s(*keys) > 0:
                raise LoginError("often", "too many failed logins")
            self._attempts.failed(*keys)
            origin = f"{request.scheme}://{request.host}"
            found = await self._oidc.finish(request.query, cookie, origin)
        except LoginError as error:
            if error.code == "away":
                self._attempts.withdraw(*keys)
            return self._login_failed(request, error)
        self._attempts.forget(*keys)
        session = self._logged_in(request, found.subject, self._oidc.session_s)
        return self._with_cookie(_to_page("done"), session)

    def _login_failed(self, request: web.Request, error: LoginError) -> web.Response:
        logger.warning("a login to the console failed", error=str(error)[:300], address=request.remote or "")
        return _to_page(error.code)

    async def _post_logout(self, request: web.Request) -> web.Response:
        self._sessions.end(request[SESSION].key)
        response = web.json_response({})
        response.del_cookie(self._rules.cookie, path="/")
        return response

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _post_plan(self, request: web.Request) -> web.Response:
        return web.json_response(await self._actions.plan(request[VIEWER], await _body(request)), dumps=_dumps)

    async def _post_action(self, request: web.Request) -> web.Response:
        if self._rules.is_read_only:
            return failure(403, "this console is read-only (console.read.only)")
        given = await _body(request)
        # If the person closes the page now, the action is nevertheless confirmed.
        done = await asyncio.shield(asyncio.create_task(self._actions.carry_out(request[VIEWER], given)))
        return web.json_response(done)

    async def _post_produce(self, request: web.Request) -> web.Response:
        if not self._may_produce:
            return failure(403, "this console does not produce (console.produce, console.read.only)")
        given = await _body(request, MAX_BODY_BYTES)
        topic, partition, record = parse_record(given, self._kafka.services.clock.now_ms())
        who = request[VIEWER]
        done = await asyncio.shield(asyncio.create_task(self._topics.produce(who, topic, partition, record)))
        return web.json_response(done)

    # --- live ---------------------------------------------------------------------------------------------------------

    async def _live_overview(self, request: web.Request) -> web.StreamResponse:
        who = request[VIEWER]

        async def events() -> AsyncIterator[Event]:
            loop = asyncio.get_running_loop()
            while True:
                began_s = loop.time()
                yield "overview", await self._overview.show(who)
                # If the overview of a cluster takes long to read, it is read less often.
                await asyncio.sleep(max(OVERVIEW_S, 20 * (loop.time() - began_s)))

        return await self._streams.serve(request, events, self._still(request))

    async def _live_group(self, request: web.Request) -> web.StreamResponse:
        who, group_id = request[VIEWER], _text(request.query, "id")
        await self._groups.describe(who, group_id)  # refuse before the stream begins

        async def events() -> AsyncIterator[Event]:
            loop = asyncio.get_running_loop()
            journal, group, offsets, looks = -1, None, None, 0
            while True:
                began_s = loop.time()
                position = await self._store.position()
                if position != journal:
                    journal, now = position, await self._store.group_position(group_id)
                    if now != group:
                        group = now
                        try:
                            yield "group", await self._groups.describe(who, group_id)
                        except KafkaError as error:
                            yield "gone", {"error": error.message or error.code.name}
                if looks % LAG_EVERY == 0:
                    found = await self._groups.offsets(who, group_id)
                    if found != offsets:
                        offsets = found
                        yield "lag", {"at": self._kafka.services.clock.now_ms(), "offsets": offsets}
                looks += 1
                await asyncio.sleep(max(GROUP_S, 20 * (loop.time() - began_s)))

        return await self._streams.serve(request, events, self._still(request))

    async def _live_records(self, request: web.Request) -> web.StreamResponse:
        who, query = request[VIEWER], dict(request.query)
        search, _, _, _ = parse_search(query)

        async def events() -> AsyncIterator[Event]:
            async for found in self._topics.tail(who, search):
                if found["records"] or found["scanned"]:
                    yield "records", found

        return await self._streams.serve(request, events, self._still(request))

    def _still(self, request: web.Request) -> Callable[[], Awaitable[bool]]:
        key, address = request[SESSION].key, request.remote or ""

        async def still() -> bool:
            return await self._sessions.checked(key, address) is not None

        return still


def _to_page(said: str) -> web.Response:
    """Return a redirect to the console's own page, which explains the result of the login."""
    response = web.Response(status=303, headers={"Location": f"/#/?login={said}", "Cache-Control": "no-store"})
    response.del_cookie(oidc.COOKIE, path=oidc.PATH)
    return response


def _answering(
    view: Callable[[Viewer, Mapping[str, str]], Awaitable[object]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        data = await view(request[VIEWER], request.query)
        # A timeline may have thousands of spans, and serializing them takes milliseconds.
        body = await asyncio.to_thread(_dumps, data)
        return web.Response(text=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    return answer


def _dumps(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), default=str)


async def _body(request: web.Request, most_bytes: int = MAX_SHORT_BODY_BYTES) -> Mapping[str, Json]:
    """Return the JSON object that a page sent. Raise BadRequestError if it is none, or too long."""
    if (request.charset or "utf-8").lower() != "utf-8":
        # Python knows codecs whose time grows with the square of the length (punycode), and the event loop decodes.
        raise BadRequestError("the request is not in UTF-8")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most_bytes:
                    raise BadRequestError(f"the request is longer than {most_bytes} bytes")
        if len(body) > MAX_SHORT_BODY_BYTES:
            in_texts = sum(len(text[0]) for text in islice(_STRING.finditer(body), MAX_STRINGS))
            if len(body) - in_texts > MAX_SHORT_BODY_BYTES:
                raise BadRequestError("the request has too many parts")
        data: Json = json.loads(body.decode())
        # JSON permits a lone surrogate, but Kafka and Postgres cannot store it.
        json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequestError("the request is not JSON that this console can read") from error
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    if not isinstance(data, dict):
        raise BadRequestError("the request is not an object")
    return data


def _text(query: Mapping[str, str], name: str, default: str | None = None) -> str:
    text = query.get(name, default)
    if text is None or len(text) > MAX_TEXT_CHARS * 8 or "\0" in text:
        raise BadRequestError(f"{name} is missing, too long, or has a NUL")
    return text


def _number(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = query.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        raise BadRequestError(f"{name} is not a number") from None
    if not -(2**53) < number < 2**53:
        raise BadRequestError(f"{name} is too large")
    return number


def _static() -> Mapping[str, tuple[bytes, str, str]]:
    """Return the package's files by name: content, type, and a tag that changes with the content."""
    found: dict[str, tuple[bytes, str, str]] = {}
    for file in files("gateway.console").joinpath("static").iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in _TYPES:
            body = file.read_bytes()
            found[file.name] = body, _TYPES[ending], f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return found


def _tls(broker: BrokerConfig) -> ssl.SSLContext | None:
    """Return the TLS context from `console.ssl.keystore.location`. Return None if that is not set.
    Raise ConfigError.
    """
    path = broker.console_ssl_keystore_location
    if not path:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        reason = f"is no PEM file with a key and its certificates: {error}"
        raise ConfigError("console.ssl.keystore.location", path, reason) from error
    return context
