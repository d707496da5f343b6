"""If a test cannot be interrupted, the run ends and reports where the test was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gateway_process import ROOT

# A thread that locks a mutex it already holds waits in C. It ignores every signal and keeps the interpreter's lock.
STUCK = """
import ctypes
import pytest

@pytest.mark.timeout(1)
def test_that_waits_for_itself():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_test_that_ignores_signals_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_stuck.py").write_text(STUCK)
    arguments = [sys.executable, "-m", "pytest", "-p", "tests.watchdog", "-o", "timeout=5", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLUICE_TEST_GRACE_S": "2"}
    ended = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:03)!" in ended.stderr
    assert "in test_that_waits_for_itself" in ended.stderr
