"""The node's loggers by name, and the level of each: shown and changed while it serves (KIP-412).

The one idea: the standard library's tree of loggers has the levels, of our own lines (structlog's) as well; a logger
that has none of its own follows its parent. What is set here lasts as long as the process, as upstream's does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import structlog
from structlog.typing import EventDict, WrappedLogger

ROOT = "root"
LEVELS = {"FATAL": 50, "ERROR": 40, "WARN": 30, "INFO": 20, "DEBUG": 10, "TRACE": 5}
"""Kafka's names. A line of ours is never finer than DEBUG; TRACE lets through what a library has below it."""

_ROOMS = ("gateway", "protocol", "storage")
_METHOD_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}


def names() -> list[str]:
    """The root, then the loggers of our modules and of the libraries in use, by name."""
    ours = (
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _ROOMS
        and isinstance(getattr(module, "logger", None), structlog.typing.BindableLogger)
    )
    others = (name for name, logger in list(_tree().items()) if isinstance(logger, logging.Logger))
    return [ROOT, *sorted({*ours, *others} - {ROOT})]


def level_of(name: str) -> str:
    """The level that is in effect, by Kafka's name."""
    number = _logger(name).getEffectiveLevel()
    return next((text for text, least in LEVELS.items() if number >= least), "TRACE")


def set_level(name: str, level: str) -> None:
    """`level` is one of LEVELS."""
    _logger(name).setLevel(LEVELS[level])
    _let_through()


def unset_level(name: str) -> None:
    """From here on it follows its parent."""
    _logger(name).setLevel(logging.NOTSET)
    _let_through()


def drop_below_level(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """A structlog processor. Raises DropEvent for a line that its logger's level leaves out."""
    if not logging.getLogger(getattr(logger, "name", None)).isEnabledFor(
        _METHOD_LEVELS.get(method_name, logging.ERROR)
    ):
        raise structlog.DropEvent
    return event_dict


class NamedPrintLogger(structlog.PrintLogger):
    """Knows whose lines it prints."""

    name: str | None = None


def print_to_stderr(name: str | None = None, *_: object) -> NamedPrintLogger:
    """A structlog logger factory."""
    made = NamedPrintLogger(sys.stderr)
    made.name = name
    return made


def _let_through() -> None:
    """What no logger wants is dropped before any work: structlog asks one level of all."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_finest()))


def _finest() -> int:
    wanted: Iterable[int] = (
        logger.level for logger in list(_tree().values()) if isinstance(logger, logging.Logger) and logger.level
    )
    return max(logging.DEBUG, min([logging.getLogger().level, *wanted]) // 10 * 10)


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(None if name == ROOT else name)


def _tree() -> dict[str, logging.Logger | logging.PlaceHolder]:
    return logging.root.manager.loggerDict
