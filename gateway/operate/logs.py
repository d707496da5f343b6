"""Log lines as JSON or for a console, each with the request it belongs to.

The one idea: one context variable holds the current request. A processor expands it into connection, API and
correlation id only when a line is written, so that a request that logs nothing pays nothing. Lines repeat names that
clients choose. So repeated lines are counted, long values are cut, and no value holds a character that moves a
terminal's cursor.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context, ContextVar
from io import StringIO
from itertools import islice
from typing import TextIO, cast

import structlog
from structlog.processors import ExceptionRenderer
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from gateway.config.log_options import LogFormat
from gateway.operate.loggers import FINEST, drop_below_level, print_to_stderr
from protocol.shown import shown

LINES_PER_EVENT, WINDOW_S = 200, 10.0
"""Lines of one event per window. A client that repeats one mistake, or a thousand clients of an absent Postgres,
must not fill the disk."""

MAX_VALUE_CHARS, MAX_VALUES = 1_000, 100
"""Characters of one value in a line, and values of one list: a line is about one thing."""

REQUEST: ContextVar[tuple[str, str, int] | None] = ContextVar("request", default=None)
"""Connection id, API name and correlation id of the request that the current task works on."""
NO_REQUEST = Context()
"""Context for work that a request's task starts but does not wait for (a timer): its lines belong to no request."""


def as_json(log_format: LogFormat) -> bool:
    return log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())


def configure(log_format: LogFormat, level: str, node: str | None = None) -> None:
    """Send the lines of structlog and of the standard library's loggers to stderr at `level`, one of LOG_LEVELS. In
    JSON each line names the `node` that wrote it, for tools that collect the lines of many nodes.
    """
    minimum = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Processor]
    # Tracebacks without the values of locals, which hold the database's password and clients' records.
    if as_json(log_format):
        if node is not None:
            shared.insert(0, _add_node(node))
        traceback = ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        renderer = [traceback, show_values, structlog.processors.JSONRenderer(default=str)]
    else:
        console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)
        renderer = [show_values, console]
    limit = Limit()
    structlog.configure(
        processors=[drop_below_level, limit, *shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=print_to_stderr,
        cache_logger_on_first_use=False,
    )
    FINEST.is_debug = minimum <= logging.DEBUG
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(limit.admits)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(minimum)
    # aiohttp's access log would have one line per scrape.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # asyncpg logs a trace for each attempt of each pool while Postgres is away. Our own passes and requests report
    # that.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)


class Limit:
    """Let `LINES_PER_EVENT` lines of one event pass per window. The first line of the next window says how many were
    dropped. Events are constants in the code, so only few must be remembered.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._windows: dict[str, tuple[float, int]] = {}
        """For each event, the start of the window and the number of its lines."""

    def __call__(self, logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
        """Drop surplus lines. This is a structlog processor that raises DropEvent."""
        now_s, event = self._now_s(), str(event_dict["event"])
        began_s, lines = self._windows.get(event, (now_s, 0))
        if now_s - began_s >= WINDOW_S:
            if lines > LINES_PER_EVENT:
                event_dict["left_out"] = lines - LINES_PER_EVENT
            began_s, lines = now_s, 0
        self._windows[event] = began_s, lines + 1
        if lines >= LINES_PER_EVENT:
            raise structlog.DropEvent
        return event_dict

    def admits(self, record: logging.LogRecord) -> bool:
        """Return whether a line of a library is written: aiohttp writes one for each malformed request. This is a
        filter of the standard library."""
        try:
            self(None, "", {"event": f"{record.name}:{record.lineno}"})
        except structlog.DropEvent:
            return False
        return True


def show_values(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Make every text printable and limit its length. This is a structlog processor."""
    for name, value in event_dict.items():
        if name != "exc_info":
            event_dict[name] = _show(value)
    return event_dict


def _show(value: object) -> object:
    if isinstance(value, str):
        return shown(value, MAX_VALUE_CHARS)
    if isinstance(value, Mapping):
        items = islice(cast("Mapping[object, object]", value).items(), MAX_VALUES)
        return {_show(key): _show(each) for key, each in items}
    if isinstance(value, list | set | frozenset) or value.__class__ is tuple:
        return [_show(each) for each in islice(cast("Iterable[object]", value), MAX_VALUES)]
    # The representation of any other value has no such characters, and an exception is rendered later.
    return value


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    """Write a traceback with the exception's text sanitized, because it may repeat what a client sent."""
    text = StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write("\n".join(shown(line, MAX_VALUE_CHARS) for line in text.getvalue().splitlines()))


def _add_node(node: str) -> Processor:
    def add(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
        event_dict.setdefault("node", node)
        return event_dict

    return add


def _add_request(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    request = REQUEST.get()
    if request is not None:
        connection, api, correlation_id = request
        event_dict.setdefault("connection", connection)
        event_dict.setdefault("api", api)
        event_dict.setdefault("correlation_id", correlation_id)
    return event_dict
