"""A TCP port for a Postgres that listens on a Unix socket only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit


@contextmanager
def relayed(url: str) -> Iterator[str]:
    """Yield a URL of the same database over TCP, for as long as the block lasts. The suite's Postgres listens on a Unix
    socket, which JDBC cannot use."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    upstream = query["host"][0] if "host" in query else parts.hostname or "127.0.0.1"
    port = int(query.get("port", [parts.port or 5432])[0])
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, upstream, port), daemon=True).start()
    user = parts.netloc.rpartition("@")[0]
    try:
        yield f"postgresql://{user}@127.0.0.1:{server.getsockname()[1]}{parts.path}?sslmode=disable"
    finally:
        # Closing is not enough: a thread that already waits in accept would still accept the next connection.
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _accept(server: socket.socket, host: str, port: int) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        if host.startswith("/"):
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(f"{host}/.s.PGSQL.{port}")
        else:
            upstream = socket.create_connection((host, port))
        for source, target in ((client, upstream), (upstream, client)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while received := source.recv(65_536):
            target.sendall(received)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()
