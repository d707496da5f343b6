"""Requests to a schema registry, and how its answers may be used."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.archive.registry import Registry
from pipeline.errors import PipelineError


@contextmanager
def server(status: int, content: bytes = b"", location: str = "") -> Iterator[tuple[str, list[str | None]]]:
    """Run a server that gives this answer to each GET. Yield its address, and the Authorization
    header of each request.
    """
    seen: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(status)
            if location:
                self.send_header("Location", location + self.path)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing to the test's output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.server_port}", seen
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_receives_no_password(status: int) -> None:
    with server(200, b'{"schema": "{}"}') as (other, stolen):
        with (
            server(status, location=f"http://{other}") as (address, seen),
            pytest.raises(PipelineError, match=f"answers {status}"),
        ):
            Registry(f"http://user:secret@{address}").schema(1)
        assert (len(seen), stolen) == (1, [])


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_that_is_nested_too_deep_is_refused(status: int) -> None:
    with server(status, b"[" * 100_000) as (address, _), pytest.raises(PipelineError):
        Registry(f"http://{address}").schema(1)
