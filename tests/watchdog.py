"""End the run, with every thread's stack, if a test exceeds its own time limit.

pytest-timeout raises in the main thread. That has no effect while a library waits in C and keeps the interpreter's
lock, as librdkafka may do (`tests/closing.py`). One such test would block the whole run for ever.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

GRACE_S = float(os.environ.get("SLUICE_TEST_GRACE_S", "60"))
_stderr = os.dup(2)  # pytest loads this plugin before it redirects the standard descriptors.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker is not None else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
