"""A proxy between a node and Postgres. It can delay bytes, hold them back, or forward them in one direction only.

The one idea: a connection is two pumps, and every pump checks the proxy's current fault before it forwards a piece. So
a fault affects open and later connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from tests.postgres import LoopThread

READ_BYTES = 256 * 1024
NOTIFICATION = b"A"
"""The type byte of Postgres' NotificationResponse."""
SOCKET_NAME = ".s.PGSQL.5432"


class PostgresProxy:
    """Listens on a Unix socket of its own. `url` is the URL by which a node reaches the database through the proxy."""

    def __init__(self, loop: LoopThread, database_url: str, directory: Path) -> None:
        self.url = _through(database_url, directory)
        self._loop = loop
        self._upstream = _address(database_url)
        self._path = directory / SOCKET_NAME
        self._delay_s = 0.0
        self._passing = asyncio.Event()
        self._silent = False
        self.swallowed = 0
        """Number of notifications that the proxy dropped."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_node: set[asyncio.StreamWriter] = set()
        self._held: list[asyncio.Event] = []
        self._holding = asyncio.Event()
        self._server = loop.run(self._listen())

    async def _listen(self) -> asyncio.Server:
        self._passing.set()
        return await asyncio.start_unix_server(self._serve, self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._upstream, Path):
                upstream = await asyncio.open_unix_connection(self._upstream)
            else:
                upstream = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        ends = {writer, upstream[1]}
        self._writers |= ends
        self._to_node.add(writer)
        try:
            await asyncio.gather(self._pump(reader, upstream[1]), self._pump(upstream[0], writer, _Messages()))
        finally:
            self._writers -= ends
            self._to_node.discard(writer)
            for end in ends:
                end.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, messages: _Messages | None = None
    ) -> None:
        """Forward bytes. With `messages`, split the server's bytes into messages, so that single messages can be
        dropped.
        """
        passing = self._passing
        with contextlib.suppress(OSError, RuntimeError):
            while data := await source.read(READ_BYTES):
                if messages is not None:
                    data = self._heard(messages.feed(data))
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if messages is None and not passing.is_set():
                    self._holding.set()
                await passing.wait()
                sink.write(data)
                await sink.drain()
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    def _heard(self, messages: list[bytes]) -> bytes:
        if self._silent:
            kept = [message for message in messages if not message.startswith(NOTIFICATION)]
            self.swallowed += len(messages) - len(kept)
            messages = kept
        return b"".join(messages)

    # --- faults, from any thread ----------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Delay every piece by `seconds` from now on; 0 ends the delay."""
        self._delay_s = seconds

    def drop(self) -> None:
        """Hold all bytes back in both directions. Connections stay open."""
        self._loop.run(self._call(self._passing.clear))

    def hold_open_connections(self) -> None:
        """Hold back the bytes of all connections that are open now. Later connections work."""

        def hold() -> None:
            self._holding.clear()
            self._passing.clear()
            self._held.append(self._passing)
            self._passing = asyncio.Event()
            self._passing.set()

        self._loop.run(self._call(hold))

    async def held(self) -> None:
        """Wait until a held connection has sent a statement. This method may be called from any event loop."""
        await asyncio.to_thread(self._loop.run, self._holding.wait())

    async def lose_held_statement(self, patience_s: float | None = None) -> None:
        """Wait until a held connection has sent a statement, or for `patience_s`. Then cut the node's ends of all
        connections. `heal` then still forwards the statement to Postgres, as a slow network would. This method may be
        called from any event loop.
        """

        async def lose() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._holding.wait()
            for writer in list(self._to_node):
                writer.transport.abort()

        await asyncio.to_thread(self._loop.run, lose())

    def heal(self) -> None:
        """Forward all bytes again, the held ones first."""
        self._delay_s = 0.0
        self._silent = False

        def passed() -> None:
            for event in (self._passing, *self._held):
                event.set()
            self._held.clear()

        self._loop.run(self._call(passed))

    def silence(self) -> None:
        """Drop notifications from now on and forward everything else, so that a listening session seems to work."""
        self._silent = True

    def half_close(self) -> None:
        """End one direction of every open connection: each side sees that the other sends no more bytes."""

        def end() -> None:
            for writer in list(self._writers):
                with contextlib.suppress(OSError, RuntimeError):
                    writer.write_eof()

        self._loop.run(self._call(end))

    def reset(self) -> None:
        """Cut every open connection."""

        def cut() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.run(self._call(cut))

    def move(self, database_url: str) -> None:
        """Connect clients to another server from now on, as after a failover, and cut their connections to the previous
        server.
        """
        self.move_new_connections(database_url)
        self.reset()

    def move_new_connections(self, database_url: str) -> None:
        """Connect clients to another server from now on. Open connections still lead to the previous server."""
        self._upstream = _address(database_url)

    def close(self) -> None:
        self.heal()
        self.reset()
        self._loop.run(self._call(self._server.close))

    @staticmethod
    async def _call(what: object) -> None:
        assert callable(what)
        what()


class _Messages:
    """Splits the bytes that a server sends on one connection into whole messages: a type byte, and the length of the
    rest.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        found: list[bytes] = []
        start = 0
        while start + 5 <= len(data):
            end = start + 1 + int.from_bytes(data[start + 1 : start + 5], "big")
            if end > len(data):
                break
            found.append(data[start:end])
            start = end
        self._rest = data[start:]
        return found


@contextlib.contextmanager
def proxied(database_url: str) -> Iterator[PostgresProxy]:
    """Run a proxy in front of the database for as long as the context lasts."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-"))
    directory.chmod(0o711)
    loop = LoopThread()
    try:
        proxy = PostgresProxy(loop, database_url, directory)
        try:
            yield proxy
        finally:
            proxy.close()
    finally:
        loop.close()
        shutil.rmtree(directory)


def _address(url: str) -> Path | tuple[str, int]:
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    port = int(given.get("port") or parts.port or 5432)
    host = given.get("host") or parts.hostname or "127.0.0.1"
    return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)


def _through(url: str, directory: Path) -> str:
    """Return the URL with the proxy's directory as its host."""
    parts = urlsplit(url)
    others = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("host", "port", "sslmode")]
    who, _, _ = parts.netloc.rpartition("@")
    query = urlencode([*others, ("host", str(directory))], quote_via=quote, safe="/")
    return urlunsplit(parts._replace(netloc=f"{who}@" if who else "", query=query))
