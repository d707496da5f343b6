"""Log lines as they reach standard error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import structlog
from structlog.typing import EventDict

from gateway.operate.logs import LINES_PER_EVENT, WINDOW_S, Limit

PROGRAM = """
import logging
import sys

import structlog

from gateway.operate import logs

logs.configure(sys.argv[1], "info")

def connect(dsn):
    raise ConnectionRefusedError("nobody there")

dsn = "postgresql://me:" + "-".join(("quite", "secret")) + "@host/db"
try:
    connect(dsn)
except OSError:
    structlog.get_logger().exception("ours")
    logging.getLogger("library").warning("theirs", exc_info=True)
    logging.getLogger("asyncpg.pool").warning("a pool tries again", exc_info=True)
logs.REQUEST.set(("c1", "heartbeat", 7))
structlog.get_logger().info("in a request", group_id="g")
"""

HOSTILE_PROGRAM = r"""
import logging
import sys

import structlog

from gateway.operate import logs

logs.configure(sys.argv[1], "info")
hostile = "x\x1b]0;owned\x07\x1b[2J" + "y" * 1_000_000
logger = structlog.get_logger()
logger.info("a value", topic=hostile)
logger.info("values", configs={hostile: [hostile] * 1000}, seen=(hostile,))
logging.getLogger("library").warning("theirs: %s", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    logger.exception("a failure")
    logging.getLogger("library").exception("their failure")
"""


def logged(log_format: str, program: str = PROGRAM) -> str:
    command = [sys.executable, "-c", program, log_format]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_values(log_format: str) -> None:
    """Values in a traceback would show passwords (asyncpg's frames hold the database URL) and clients' records."""
    text = logged(log_format)
    assert text.count("nobody there") >= 2
    assert "quite-secret" not in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_client_text_in_a_log_line_is_escaped_and_cut(log_format: str) -> None:
    text = logged(log_format, HOSTILE_PROGRAM)
    assert "owned" in text
    assert {character for character in text if not character.isprintable()} == {"\n"}
    assert len(text) < 400_000


def test_json_lines_carry_the_request_they_belong_to() -> None:
    ours, theirs, last = [json.loads(line) for line in logged("json").splitlines()]
    assert (ours["event"], ours["level"]) == ("ours", "error")
    assert (theirs["event"], theirs["level"]) == ("theirs", "warning")
    assert ours["exception"][0]["exc_type"] == "ConnectionRefusedError"
    assert "connection" not in ours
    wanted = {"event": "in a request", "connection": "c1", "api": "heartbeat", "correlation_id": 7, "group_id": "g"}
    assert wanted.items() <= last.items()


def test_console_lines_carry_it_too() -> None:
    (line,) = [line for line in logged("console").splitlines() if "in a request" in line]
    for part in ("connection=c1", "api=heartbeat", "correlation_id=7", "group_id=g"):
        assert part in line


def test_repeated_event_is_limited_and_omitted_lines_are_counted() -> None:
    now_s = 100.0
    limit = Limit(lambda: now_s)

    def say(event: str) -> EventDict | None:
        try:
            return limit(None, "warning", {"event": event})
        except structlog.DropEvent:
            return None

    said = [say("a batch is refused") for _ in range(LINES_PER_EVENT + 7)]
    assert said == [{"event": "a batch is refused"}] * LINES_PER_EVENT + [None] * 7
    assert say("another event") is not None
    now_s += WINDOW_S
    assert say("a batch is refused") == {"event": "a batch is refused", "left_out": 7}
    assert say("a batch is refused") == {"event": "a batch is refused"}
    now_s += WINDOW_S
    assert say("a batch is refused") == {"event": "a batch is refused"}
