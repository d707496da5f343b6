"""The part of Toxiproxy that Sarama's functional tests use: five ports that lead to five brokers, with faults.

The one idea: those tests reach broker N at 127.0.0.1:2909N and ask a Toxiproxy to cut, delay or reset its connections.
Here each such port leads to one node of the gateway, and the control interface serves the four requests that the tests
send. It knows two toxics (faults): `latency` of answers, and an immediate `reset_peer`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST_PORT = 29091
CONTROL_PORT = 8474
CONNECT_SECONDS = 10.0
CHUNK_BYTES = 1 << 16
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Address = tuple[str, int]


class Proxy:
    """One port that leads to `target` while enabled. Raise OSError if the port is taken."""

    def __init__(self, name: str, port: int, target: Address) -> None:
        self.name = name
        self.port = port
        self._target = target
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._latency_s = 0.0
        self._resets = False
        self.enable(True)

    def describe(self) -> dict[str, object]:
        host, port = self._target
        return {
            "name": self.name,
            "listen": f"127.0.0.1:{self.port}",
            "upstream": f"{host}:{port}",
            "enabled": self._listener is not None,
        }

    def enable(self, enabled: bool) -> None:
        """Enable or disable the port. A disabled port does not listen, and its connections are closed."""
        with self._lock:
            if enabled and self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self.port))
                threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
            elif not enabled and self._listener is not None:
                _shut(self._listener)  # This wakes the thread that waits in accept.
                self._listener.close()
                self._listener = None
                for connection in self._connections:
                    _shut(connection)

    def disturb(self, toxic: str, attributes: Mapping[str, Any]) -> bool:
        """Apply a toxic, and return False if it is unknown."""
        if toxic == "latency":
            self._latency_s = float(attributes.get("latency", 0)) / 1000
        elif toxic == "reset_peer":
            self._resets = True
            with self._lock:
                for client in self._clients:
                    _reset(client)
        else:
            return False
        return True

    def reset(self) -> None:
        self._latency_s = 0.0
        self._resets = False
        self.enable(True)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # The port was disabled.
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target, timeout=CONNECT_SECONDS)
                except OSError:
                    threading.Thread(target=_turn_away, args=(near,), daemon=True).start()
                    continue
                far.settimeout(None)
                with self._lock:
                    if self._listener is not listener:
                        near.close()
                        far.close()
                        return
                    self._connections |= {near, far}
                    self._clients.add(near)
                if self._resets:
                    _reset(near)
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._copy, args=(source, sink, answers), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):  # Either side may end the connection at any time.
            while data := source.recv(CHUNK_BYTES):
                if answers and self._latency_s:
                    time.sleep(self._latency_s)
                sink.sendall(data)
        if answers:
            # The broker has closed the connection. If the client sends another request, it must see the end of the
            # answers, as over a network. If both are on one machine, a reset would arrive before the client reads.
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            return
        _shut(source)
        _shut(sink)
        with self._lock:
            self._connections -= {source, sink}
            self._clients -= {source, sink}


def _reset(client: socket.socket) -> None:
    """Close by RST instead of FIN. A thread that reads from the socket must stop first, because until then the kernel
    keeps it open."""
    with contextlib.suppress(OSError):  # The connection is down already.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        client.shutdown(socket.SHUT_RD)
        client.close()


def _turn_away(client: socket.socket) -> None:
    """Close so that the client sees the end of the answers. If unread bytes were left, the kernel
    would send a reset.
    """
    with client, contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        while client.recv(CHUNK_BYTES):
            pass


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The connection is down already.
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def toxiproxy(targets: Sequence[Address]) -> Iterator[str]:
    """Let `kafka1` and so on lead to the targets in order, and yield the address of the control interface."""
    proxies = {f"kafka{i + 1}": Proxy(f"kafka{i + 1}", FIRST_PORT + i, target) for i, target in enumerate(targets)}

    class Control(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            proxy = proxies.get(self.path.removeprefix("/proxies/"))
            if proxy is None:
                self._answer(404, {"error": "proxy not found"})
            else:
                self._answer(200, proxy.describe())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            wanted: dict[str, Any] = json.loads(body) if body else {}
            match self.path.strip("/").split("/"):
                case ["reset"]:
                    for proxy in proxies.values():
                        proxy.reset()
                    self._answer(204, None)
                case ["proxies", name] if name in proxies:
                    proxies[name].enable(bool(wanted.get("enabled", True)))
                    self._answer(200, proxies[name].describe())
                case ["proxies", name, "toxics"] if name in proxies and proxies[name].disturb(
                    str(wanted.get("type")), wanted.get("attributes") or {}
                ):
                    self._answer(200, wanted)
                case _:
                    self._answer(404, {"error": f"{self.path}: {wanted}"})

        def _answer(self, status: int, content: Mapping[str, object] | None) -> None:
            encoded = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the tests report their actions."""

    server = ThreadingHTTPServer(("127.0.0.1", CONTROL_PORT), Control)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        for proxy in proxies.values():
            proxy.enable(False)
