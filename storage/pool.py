"""Connections to Postgres: three pools, and the one place where asyncpg's exceptions become ours.

The one idea: `hot` serves writes and look-ups that a client waits for. `cold` serves maintenance and reads of the log
below the in-memory tail, so a consumer that replays the past cannot starve producers. `control` keeps this node in the
cluster (registration, leases, catalog changes, readiness), so none of that waits behind clients. Every wait is bounded:
for a connection, for a lock, for a statement, on the server and here.

Each connection pins what it relies on (isolation, timeouts, search path) after it is open. So neither the database's
defaults nor a session pooler that drops start-up parameters change it. A pooler that hands a session's transactions to
different servers cannot work, and is refused when the database is opened.

The pools do not retry what may have taken effect. Only serialization failures and deadlocks are retried, because
Postgres has rolled them back. After a lost connection the next call gets a new one, and first ends the server process
of the lost one (`LostSessions`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from storage.database_url import parse_database_url
from storage.errors import PoolerError, StorageError, StorageUnavailable
from storage.guard import HistoryGuard, Known, Witness
from storage.queries import statement
from storage.schema import SEARCH_PATH

APPLICATION_NAME = "sluice"

_ARRAY_TYPES = tuple(
    {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{element}",
        "kind": b"b",
        "basetype": None,
        "elemtype": element_oid,
        "elemdelim": b",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
    }
    for oid, element, element_oid in (
        (1000, "bool", 16),
        (1001, "bytea", 17),
        (1005, "int2", 21),
        (1007, "int4", 23),
        (1016, "int8", 20),
        (1185, "timestamptz", 1184),
        (2951, "uuid", 2950),
    )
)
"""Array types that statements use, as asyncpg's look-up of types describes them. The numbers (OIDs) of built-in types
are the same in every Postgres. asyncpg knows only text[] and oid[], and asks each new connection for the others by a
recursive query of some 8 ms."""

SESSION_SETTINGS: Mapping[str, str] = {
    "application_name": APPLICATION_NAME,
    "search_path": SEARCH_PATH,
    "timezone": "UTC",
    "jit": "off",
    # Writers decide under row locks, and read the protected rows after a lock is acquired. Only this isolation level
    # sees the newest rows then.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # Plans are cached per session, perhaps while the tables are still tiny. Every look-up has an index. With sequential
    # scans switched off, the planner always chooses the index, so the plan stays right when the tables grow.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}

Row = Mapping[str, Any]
T = TypeVar("T")

Url = str | Callable[[], Awaitable[str]]
"""A database's URL as the user wrote it, or a function that returns the URL for the next connection and does not raise.
A password may change while the program runs."""

_RETRIED_SQLSTATES = frozenset({"40001", "40P01"})
"""serialization_failure, deadlock_detected: rolled back by Postgres, so safe to run again."""

_TRANSIENT_SQLSTATE_CLASSES = frozenset({"08", "28", "40", "53", "57", "58"})
"""Connection, refused login (a changed password may reach the file of the URL a minute later), rollback, insufficient
resources, operator intervention (shutdown, timeouts), system error."""

_TRANSIENT_SQLSTATES = frozenset({"25006", "25P03", "55P03"})
"""read_only_sql_transaction (a standby after failover), idle_in_transaction timeout, lock_not_available."""

_CONNECTION_ERRORS = (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""The errors of a broken connection. asyncpg raises InternalClientError if a server dies while a connection is being
opened.
"""

_ATTEMPTS = 4
_RETRY_DELAY_S = 0.02

CONFIRM_S = 5.0
"""How long a check of the history waits for a connection, and for each answer."""

_END_SESSION_MS = 1_000
"""How long one attempt waits for a server process to end. A process that is committing ends after the commit."""


class Connection(Protocol):
    """The part of an asyncpg connection that other modules use."""

    async def fetch(self, query: str, *args: object) -> Sequence[Row]: ...
    async def fetchrow(self, query: str, *args: object) -> Row | None: ...
    async def fetchval(self, query: str, *args: object) -> Any: ...
    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...
    async def copy_records_to_table(
        self,
        table_name: str,
        *,
        records: Iterable[Sequence[object]] | AsyncIterable[Sequence[object]],
        columns: Sequence[str],
    ) -> str: ...
    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[object]: ...


class _PooledConnection(Connection, Protocol):
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    def add_termination_listener(self, callback: Callable[[object], None]) -> None: ...


class _AsyncpgPool(Protocol):
    def acquire(self, *, timeout: float) -> Awaitable[_PooledConnection]: ...
    async def release(self, connection: _PooledConnection) -> None: ...
    async def close(self) -> None: ...
    def terminate(self) -> None: ...
    async def expire_connections(self) -> None: ...
    def get_size(self) -> int: ...


def _translated(error: Exception) -> StorageError:
    """Return the storage error for an exception of asyncpg or the socket."""
    if isinstance(error, asyncpg.PostgresError):
        sqlstate = str(getattr(error, "sqlstate", "") or "")
        transient = sqlstate[:2] in _TRANSIENT_SQLSTATE_CLASSES or sqlstate in _TRANSIENT_SQLSTATES
        return (StorageUnavailable if transient else StorageError)(f"Postgres: {error} ({sqlstate})")
    if isinstance(error, ValueError):  # asyncpg.DataError: an argument of the wrong type or range
        return StorageError(f"argument refused: {error}")
    # A timeout of ours has no text, and a log line without a reason is useless.
    reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return StorageUnavailable(f"Postgres unavailable: {reason}")


@asynccontextmanager
async def translated_errors() -> AsyncGenerator[None, None]:
    """Raise storage errors in place of the errors of asyncpg and of the socket. A timeout is an OSError, too."""
    try:
        yield
    except (*_CONNECTION_ERRORS, asyncpg.PostgresError) as error:
        raise _translated(error) from error


def _lost_connection(error: StorageUnavailable) -> bool:
    cause = error.__cause__
    if isinstance(cause, asyncpg.PostgresError):
        sqlstate = str(getattr(cause, "sqlstate", "") or "")
        return sqlstate.startswith(("08", "57P"))
    return not isinstance(cause, TimeoutError)


def lock_not_available(error: BaseException) -> bool:
    """True if Postgres gave up waiting for a lock."""
    return str(getattr(error, "sqlstate", "")) == "55P03"


def is_refused_login(error: StorageError) -> bool:
    """True if Postgres refused user or password."""
    return str(getattr(error.__cause__, "sqlstate", "")).startswith("28")


def _retried(error: StorageError) -> bool:
    return str(getattr(error.__cause__, "sqlstate", "")) in _RETRIED_SQLSTATES


class LostSessions:
    """Server processes whose connections this process has lost.

    Such a server process may not have read its last statement yet, for example because the network or the machine is
    slow. It would execute the statement after later ones of this process: an offset would go back to an older commit,
    or a batch would be written after its producer has been refused the next one and has numbered it anew. So the server
    processes are ended before any pool sends another statement, and an unknown outcome cannot change any more.

    A server process is known by its id and its start. After a restart, in a container above all, Postgres gives the
    same ids to processes that serve other connections.
    """

    def __init__(self) -> None:
        self._processes: set[tuple[int, datetime]] = set()
        self._ending = asyncio.Lock()

    def watch(self, connection: _PooledConnection, process_id: int, started_at: datetime) -> None:
        """Remember the server process as soon as its connection is closed, for any reason."""
        connection.add_termination_listener(lambda _: self._processes.add((process_id, started_at)))

    @property
    def any(self) -> bool:
        return bool(self._processes)

    async def end(self, connection: Connection) -> None:
        """End the server processes. `connection` is a healthy one. Raise StorageUnavailable if a process still runs."""
        async with self._ending:
            for _ in range(_ATTEMPTS):
                if not self._processes:
                    return
                asked = list(self._processes)
                ids, starts = [each for each, _ in asked], [each for _, each in asked]
                running: list[int] = await connection.fetchval(statement("end_sessions"), ids, starts, _END_SESSION_MS)
                self._processes.difference_update(each for each in asked if each[0] not in running)
        if self._processes:
            raise StorageUnavailable(
                f"Postgres does not end the processes of lost connections: {[each for each, _ in self._processes]}"
            )


class Pool:
    """A bounded set of connections. Calls wait at most `acquire_timeout_s` for one, else they raise StorageUnavailable.

    A healthy connection stays at hand for the next call: returning it to asyncpg and acquiring it again costs as much
    as a small statement.

    When another history is accepted, open connections may still lead to the server of the former one, which may write
    what no other server has. So no call uses them from then on, and a call that was running has no outcome.
    """

    def __init__(self, pool: _AsyncpgPool, acquire_timeout_s: float, lost: LostSessions, guard: HistoryGuard) -> None:
        self._pool = pool
        self._acquire_timeout_s = acquire_timeout_s
        self._lost = lost
        self._guard = guard
        self._history = guard.history
        """The history to which connections that are not expired belong."""
        self._at_hand: list[_PooledConnection] = []
        self._waiting = 0
        """Number of calls that wait in asyncpg's pool. A freed connection belongs to them."""
        self._expired = 0
        """Number of times that all connections were expired. A connection acquired before the last time is not kept at
        hand.
        """

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Connection, None]:
        """Provide a connection for the caller's unit of work. Raise storage errors only."""
        async with translated_errors():
            connection = await self._take()
            try:
                yield connection
            finally:
                await self._let_go(connection)

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` on a connection, and again if Postgres rolled it back because of a deadlock or a serialization
        failure.

        `work` must be one statement or one transaction, and must not depend on state that its first run has changed.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._run(work)
            except StorageError as error:
                if attempt == _ATTEMPTS or not _retried(error):
                    raise
            await asyncio.sleep(_RETRY_DELAY_S * attempt * (0.5 + random.random()))
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        expired = self._expired
        try:
            try:
                history = self._guard.history
                connection = await self._take()
                while history != self._guard.history:
                    # Another history was accepted while this call waited. The connection may lead to the former one.
                    await self._let_go(connection)
                    history = self._guard.history
                    connection = await self._take()
                try:
                    result = await work(connection)
                except BaseException as error:
                    if isinstance(error, TimeoutError):
                        # Postgres has not cancelled the statement, so a release would wait in vain for an answer.
                        with suppress(*_CONNECTION_ERRORS):
                            connection.terminate()
                    await self._let_go(connection)
                    raise
                if self._waiting or expired != self._expired:
                    await self._let_go(connection)
                else:
                    self._at_hand.append(connection)
            except (*_CONNECTION_ERRORS, asyncpg.PostgresError) as error:
                raise _translated(error) from error
        except StorageUnavailable as error:
            if _lost_connection(error):
                # The other connections are probably lost too, and each of them would fail one more call.
                await self._expire()
            raise
        self._guard.require(history)
        return result

    async def _take(self) -> _PooledConnection:
        if self._history != self._guard.history:
            await self._leave_history()
        connection = await self._acquire()
        if self._lost.any:
            try:
                async with asyncio.timeout(self._acquire_timeout_s):
                    await self._lost.end(connection)
            except BaseException:
                await self._let_go(connection)
                raise
        return connection

    async def _acquire(self) -> _PooledConnection:
        while self._at_hand:
            connection = self._at_hand.pop()
            try:
                closed = connection.is_closed()
            except asyncpg.InterfaceError:
                continue  # the server has died, so asyncpg has already released the connection
            if not closed:
                return connection
            await self._let_go(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=self._acquire_timeout_s)
        finally:
            self._waiting -= 1

    async def _expire(self) -> None:
        """Reopen every connection before its next use."""
        self._expired += 1
        await self._pool.expire_connections()
        await self._release_idle()

    async def _leave_history(self) -> None:
        """Reopen every connection before its next use, and do not wait for the server of the former history."""
        self._history = self._guard.history
        self._expired += 1
        await self._pool.expire_connections()
        while self._at_hand:
            with suppress(*_CONNECTION_ERRORS):
                self._at_hand.pop().terminate()

    async def _release_idle(self) -> None:
        while self._at_hand:
            await self._let_go(self._at_hand.pop())

    async def _let_go(self, connection: _PooledConnection) -> None:
        """Release a connection and ignore errors, so that they do not mask the caller's error."""
        with suppress(*_CONNECTION_ERRORS):
            await self._pool.release(connection)

    async def fetch(self, query: str, *args: object) -> Sequence[Row]:
        return await self.run(lambda connection: connection.fetch(query, *args))

    async def fetch_row(self, query: str, *args: object) -> Row | None:
        return await self.run(lambda connection: connection.fetchrow(query, *args))

    async def fetch_value(self, query: str, *args: object) -> Any:
        """Return the first column of the first row, or None without a row."""
        return await self.run(lambda connection: connection.fetchval(query, *args))

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` in one transaction, with the retries of `run`."""

        async def transaction(connection: Connection) -> T:
            async with connection.transaction():
                return await work(connection)

        return await self.run(transaction)

    @property
    def size(self) -> int:
        """Number of open connections."""
        return self._pool.get_size()

    async def close(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self._expired += 1
                await self._release_idle()
                await self._pool.close()
        except (*_CONNECTION_ERRORS, asyncpg.PostgresError):
            self._pool.terminate()


async def _dsn(url: Url) -> str:
    return parse_database_url(url if isinstance(url, str) else await url()).for_asyncpg


async def connect(url: Url, settings: Mapping[str, str], **options: float) -> Any:
    """Open an asyncpg connection outside the pools, to the database at `url` as the user wrote it. `settings` are
    pinned as in the pools; `options` are asyncpg's. The connection checks no history and raises what asyncpg raises."""
    connection = await cast(
        Awaitable[Any],
        asyncpg.connect(  # pyright: ignore[reportUnknownMemberType]
            await _dsn(url), **cast(Any, options)
        ),
    )
    try:
        await connection.fetch(statement("pin_session_settings"), list(settings), list(settings.values()))
        _register_array_types(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


def _register_array_types(connection: Any) -> None:
    """Spare the connection the look-ups of `_ARRAY_TYPES`. asyncpg has no public function for this."""
    connection._protocol.get_settings().register_data_types(_ARRAY_TYPES)


async def _no_reset(_connection: object) -> None:
    """Sessions hold nothing between uses (asyncpg itself rolls back an open transaction), so a reset would be a wasted
    round trip."""


def _prepare_session(
    settings: Mapping[str, str], guard: HistoryGuard, lost: LostSessions
) -> Callable[[_PooledConnection], Awaitable[None]]:
    """Pin those of `settings` that this Postgres knows. An acknowledged write must be on disk, so an installation's
    synchronous_commit = off is overridden; stronger values stay."""

    async def prepare(connection: _PooledConnection) -> None:
        _register_array_types(connection)
        await connection.fetch(statement("pin_session_settings"), list(settings), list(settings.values()))
        known = guard.known()
        server = await connection.fetchrow(statement("history_witness"))
        assert server is not None
        lost.watch(connection, server["process_id"], server["started_at"])
        await _check_history(connection, guard, known, server)

    return prepare


async def _check_history(connection: Connection, guard: HistoryGuard, known: Known, server: Row) -> None:
    """Raise StorageUnavailable unless the connection leads into the accepted history. `server` is the row of
    history_witness."""
    present: Row | None = None
    if guard.accepted and server["identity"] is not None:
        present = await connection.fetchrow(statement("present_history"), known.transactions)
    history, has_all = None, False
    if present is not None:
        history = present["history"]
        has_all = present["has_all"] and present["catalog_revision"] >= known.catalog_revision
    guard.check(Witness(server["identity"], server["flushed_lsn"], history, has_all), known)


async def _open_pool(
    url: Url,
    *,
    connections: int,
    statement_timeout_ms: int,
    acquire_timeout_s: float,
    connect_timeout_s: float,
    guard: HistoryGuard,
    lost: LostSessions,
) -> Pool:
    settings = {
        **SESSION_SETTINGS,
        "statement_timeout": str(statement_timeout_ms),
        "lock_timeout": str(min(statement_timeout_ms, 5000)),
        "idle_in_transaction_session_timeout": "15000",
        # An idle pool must keep its connections.
        "idle_session_timeout": "0",
        # From Postgres 17 on, a default of the database could end a commit that only waits for the disk.
        "transaction_timeout": "0",
    }

    async def connect_anew(_dsn_of_the_pool: object, **options: object) -> Any:
        return await cast(
            Awaitable[Any],
            asyncpg.connect(await _dsn(url), **cast(Any, options)),  # pyright: ignore[reportUnknownMemberType]
        )

    pool = await cast(
        Awaitable[Any],
        asyncpg.create_pool(  # pyright: ignore[reportUnknownMemberType]
            connect=connect_anew,
            min_size=1,
            max_size=connections,
            max_queries=2**62,
            max_inactive_connection_lifetime=0,
            init=_prepare_session(settings, guard, lost),
            reset=_no_reset,
            timeout=connect_timeout_s,
            # The server cancels first and reports that. This timeout is for a server that does not respond at all.
            command_timeout=statement_timeout_ms / 1000 + 2,
            max_cached_statement_lifetime=0,
            server_settings={"application_name": APPLICATION_NAME},
        ),
    )
    return Pool(cast(_AsyncpgPool, pool), acquire_timeout_s, lost, guard)


@dataclass(frozen=True, slots=True)
class Database:
    """One Postgres database with Sluice's schema. Call `migrate` before use."""

    hot: Pool
    cold: Pool
    control: Pool
    url: Url = field(repr=False)
    guard: HistoryGuard = field(repr=False)

    @classmethod
    async def open(
        cls,
        url: Url,
        *,
        hot_connections: int = 6,
        cold_connections: int = 4,
        control_connections: int = 3,
        statement_timeout_ms: int = 10_000,
        acquire_timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
    ) -> Database:
        """Open the pools. Raise StorageUnavailable if Postgres cannot be reached, and PoolerError if a pooler in
        front of it does not keep sessions."""
        pools: list[Pool] = []
        guard = HistoryGuard()
        lost = LostSessions()
        try:
            for connections in (hot_connections, cold_connections, control_connections):
                async with translated_errors():
                    pool = await _open_pool(
                        url,
                        connections=connections,
                        statement_timeout_ms=statement_timeout_ms,
                        acquire_timeout_s=acquire_timeout_s,
                        connect_timeout_s=connect_timeout_s,
                        guard=guard,
                        lost=lost,
                    )
                pools.append(pool)
            await _require_sessions(pools[0], pools[1])
        except BaseException:
            await asyncio.gather(*(pool.close(timeout_s=1.0) for pool in pools))
            raise
        return cls(*pools, url=url, guard=guard)

    async def confirm_history(self) -> None:
        """Raise StorageUnavailable unless a new connection leads into the accepted history. After a failover, open
        connections may lead to the former server for as long as it runs."""
        async with translated_errors():
            connection = await connect(self.url, SESSION_SETTINGS, timeout=CONFIRM_S, command_timeout=CONFIRM_S)
            try:
                await self.admit(connection)
            finally:
                connection.terminate()

    async def admit(self, connection: Connection) -> int:
        """Return the number of the accepted history, to which a connection outside the pools leads. Raise
        StorageUnavailable if it leads elsewhere."""
        known = self.guard.known()
        server = await connection.fetchrow(statement("history_witness"))
        assert server is not None
        await _check_history(connection, self.guard, known, server)
        return known.history

    async def close(self, timeout_s: float = 5.0) -> None:
        """Wait for running calls for at most `timeout_s`, then close their connections."""
        await asyncio.gather(*(pool.close(timeout_s) for pool in (self.hot, self.cold, self.control)))


async def _require_sessions(first: Pool, second: Pool) -> None:
    """Raise PoolerError unless each connection keeps its server, because prepared statements, LISTEN and the pinned
    settings belong to a server. A pooler in transaction mode hands a free server to the next client that asks. So
    the second connection gets the server of the first, or the first gets another one afterwards."""
    query = statement("backend")
    try:
        async with first.connection() as one, second.connection() as other:
            before = await one.fetchval(query)
            kept = before != await other.fetchval(query)
            if kept:
                async with other.transaction():
                    kept = before != await other.fetchval(query) and before == await one.fetchval(query)
    except StorageUnavailable:
        raise
    except StorageError as error:
        raise PoolerError(f"{_POOLER} ({error})") from error
    if not kept:
        raise PoolerError(_POOLER)


_POOLER = (
    "the connection pooler in front of Postgres moves a connection from server to server (transaction or statement"
    " mode): Sluice needs it in session mode, or Postgres itself"
)
