"""HTTP interface through which suites of any language restart or kill their gateway: POST /restart, POST /kill.

The interface answers when the gateway serves again, with the same port and data. If the gateway fails to start, the
answer is 500 with the end of its log.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from tests.compat.brokers import BrokerProcess, starting


class Control:
    """Serves on a free port of 127.0.0.1 while the context lasts. Before each restart or kill, it calls `before`."""

    def __init__(self, gateway: BrokerProcess, before: Callable[[], None]) -> None:
        actions = {"/restart": gateway.restart, "/kill": lambda: _kill(gateway)}
        lock = self._acting = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                action = actions.get(self.path)
                if action is None:
                    self.answer(404, {"ok": False, "error": f"POST {' or '.join(actions)}"})
                    return
                try:
                    with lock, starting(gateway):
                        before()
                        action()
                except (AssertionError, OSError) as error:
                    self.answer(500, {"ok": False, "error": str(error)})
                else:
                    self.answer(200, {"ok": True})

            def answer(self, status: int, body: dict[str, object]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: suites report their actions, and the gateway's log shows the rest."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="control", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._acting.acquire()  # Keep the lock for good, so that no restart can follow the gateway's final stop.


def _kill(gateway: BrokerProcess) -> None:
    gateway.kill()
    gateway.start()
