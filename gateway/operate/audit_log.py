"""The audit log: lines that are appended to a file, or printed.

The one idea: the file is opened for each line, so that logrotate may move it at any time. Several nodes of a host may
share it, because a line is one write at the file's end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import structlog

from gateway.config.definition import ConfigError
from gateway.operate.metrics import Metrics

STDOUT: Final = "stdout"
_STDOUT_DESCRIPTOR = 1
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

logger = structlog.get_logger(__name__)


class AuditLog:
    """A file, or standard output, that receives one JSON object per line."""

    def __init__(self, place: Path | str, metrics: Metrics) -> None:
        """Take the file's path, or `STDOUT`. Raise ConfigError if the file cannot be opened."""
        self._path = None if place == STDOUT else Path(place)
        self._metrics = metrics
        self._turn = threading.Lock()
        self._is_torn = False
        """True if the file may end within a line, because the disk was full."""
        if self._path is not None:
            try:
                os.close(self._open(self._path))
            except OSError as error:
                raise ConfigError("audit-log", str(place), f"cannot be written: {error.strerror}") from error

    def append(self, line: str) -> None:
        """Write a line. If that fails, log and count the loss: the change that the line reports has happened."""
        with self._turn:
            try:
                self._write(line.encode() + b"\n")
            except OSError as error:
                self._is_torn = True
                self._metrics.audit_lines_lost.inc()
                reason = error.strerror or str(error)
                logger.error("audit log cannot be written, its line is lost", path=str(self._path), error=reason)

    def _write(self, line: bytes) -> None:
        if self._path is None:
            _write_all(_STDOUT_DESCRIPTOR, line)
            return
        descriptor = self._open(self._path)
        try:
            _write_all(descriptor, b"\n" + line if self._is_torn else line)
            self._is_torn = False
        finally:
            os.close(descriptor)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, _FLAGS, 0o600)


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
