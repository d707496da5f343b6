"""The node's loggers by name, and the level of each: shown and changed while it serves (KIP-412).

The one idea: the standard library's tree of loggers holds the levels, including those of our own lines (structlog's). A
logger without a level of its own follows its parent. A level set here lasts as long as the process, as upstream's does.

A module's lines have two kinds of names: the module's own, and those that Kafka's documentation gives to the parts that
do the same work (`KAFKA_NAMES`). A level set for the module's name, or for a name above it short of the root, wins.
Without such a level Kafka's names decide, each with its own level or that of the nearest above it. Of several levels
the finest counts, so that a line requested by any of the names is written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog
from structlog.typing import EventDict, WrappedLogger

ROOT = "root"
LEVELS = {"FATAL": 50, "ERROR": 40, "WARN": 30, "INFO": 20, "DEBUG": 10, "TRACE": 5}
"""Kafka's names of levels. Our lines are never finer than DEBUG; TRACE also admits the finer lines of libraries."""

_ROOMS = ("gateway", "protocol", "storage")

KAFKA_NAMES: Mapping[str, tuple[str, ...]] = {
    "kafka": _ROOMS,
    "kafka.authorizer.logger": ("gateway.security.authorizer",),
    "kafka.cluster.Partition": ("gateway.log.appender", "gateway.apis.admin.replicas"),
    "kafka.cluster.Replica": ("gateway.log.batch_search", "storage.log"),
    "kafka.controller": ("gateway.cluster.leases", "gateway.cluster.reconciler", "gateway.apis.admin.replicas"),
    "kafka.coordinator.transaction.TransactionCoordinator": ("gateway.transactions",),
    "kafka.log.LogCleaner": ("gateway.log.compactor",),
    "kafka.log.LogManager": ("gateway.operate.maintenance", "storage.roller", "storage.mover"),
    "kafka.log.UnifiedLog": ("storage.log", "storage.segment_writers"),
    "kafka.network.SocketServer": ("gateway.net", "gateway.security.tls", "gateway.security.failures"),
    "kafka.request.logger": ("gateway.net.request_log",),
    "kafka.server.BrokerLifecycleManager": ("gateway.cluster.membership", "gateway.cluster.reachability"),
    "kafka.server.BrokerServer": (
        "gateway.app",
        "gateway.node",
        "gateway.building",
        "gateway.operate.supervisor",
        "gateway.operate.workers",
    ),
    "kafka.server.ControllerServer": ("gateway.cluster",),
    "kafka.server.KafkaApis": ("gateway.apis",),
    "kafka.server.KafkaRequestHandler": ("gateway.net.dispatch",),
    "kafka.server.ReplicaManager": ("gateway.log.appender", "gateway.apis.data.produce", "gateway.apis.data.fetch"),
    "kafka.server.metadata.BrokerMetadataPublisher": ("gateway.log.catalog",),
    "kafka.server.share.SharePartition": ("gateway.share",),
    "org.apache.kafka": (),
    "org.apache.kafka.coordinator.group.GroupCoordinatorService": ("gateway.groups",),
    "org.apache.kafka.coordinator.group.GroupMetadataManager": ("gateway.groups.groups", "gateway.groups.records"),
    "state.change.logger": ("gateway.cluster.leases", "gateway.cluster.reconciler"),
}
"""Kafka's loggers, each with the modules or packages here that do its work. A module belongs to the loggers whose path
matches most of the module's path. A module without a match belongs to `kafka`. Dots in Kafka's names form a hierarchy,
as in Kafka."""
_METHOD_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}


def names() -> list[str]:
    """Return the root, then the loggers of our modules and of the libraries in use, and Kafka's names, sorted."""
    others = (name for name, logger in list(_tree().items()) if isinstance(logger, logging.Logger))
    return [ROOT, *sorted({*our_names(), *others, *KAFKA_NAMES} - {ROOT})]


def our_names() -> list[str]:
    """Return our loaded modules that write lines: each has a logger called `logger`."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _ROOMS
        and isinstance(getattr(module, "logger", None), structlog.typing.BindableLogger)
    ]


def kafka_names_of(module: str) -> list[str]:
    """Return Kafka's names for a module's lines; none for a module that is not ours."""
    parts = module.split(".")
    if parts[0] not in _ROOMS:
        return []
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        found = [name for name, modules in KAFKA_NAMES.items() if path in modules]
        if found:
            return found
    return []


def level_of(name: str) -> str:
    """Return the effective level, by Kafka's name."""
    number = _level(name)
    return next((text for text, least in LEVELS.items() if number >= least), "TRACE")


def set_level(name: str, level: str) -> None:
    """Set a logger's level, one of LEVELS."""
    _logger(name).setLevel(LEVELS[level])
    _let_through()


def unset_level(name: str) -> None:
    """Remove a logger's level, so that it follows its parent."""
    _logger(name).setLevel(logging.NOTSET)
    _let_through()


def drop_below_level(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Drop lines below their logger's level: a structlog processor that raises DropEvent."""
    if _METHOD_LEVELS.get(method_name, logging.ERROR) < _level(getattr(logger, "name", None) or ROOT):
        raise structlog.DropEvent
    return event_dict


class Fineness:
    """The finest level in use, so that a module with a line per request need not format it if it would be dropped."""

    __slots__ = ("is_debug",)

    def __init__(self) -> None:
        self.is_debug = False


FINEST = Fineness()
"""The finest level of all loggers of this process."""


class NamedPrintLogger(structlog.PrintLogger):
    """A printing logger that knows the name of the logger whose lines it prints.

    As with the standard library's loggers, a line that cannot be written, because of a full disk or a pipe without a
    reader, is lost. Otherwise the error would end the background loop that reports a failure.
    """

    name: str | None = None

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def print_to_stderr(name: str | None = None, *_: object) -> NamedPrintLogger:
    """Create a logger that prints to stderr: a structlog logger factory."""
    made = NamedPrintLogger(sys.stderr)
    made.name = name
    return made


def _let_through() -> None:
    """Drop lines finer than every logger's level before any work: structlog has one level for all loggers."""
    finest = _finest()
    FINEST.is_debug = finest <= logging.DEBUG
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(finest))


def _level(name: str) -> int:
    """Return the number of the effective level."""
    logger = _logger(name)
    if _level_below_root(logger) == logging.NOTSET:
        through = kafka_names_of(name)
        if through:
            return min(_logger(each).getEffectiveLevel() for each in through)
    return logger.getEffectiveLevel()


def _level_below_root(logger: logging.Logger) -> int:
    """Return the logger's own level, or that of the nearest above it except the root; 0 if both are unset."""
    while logger.parent is not None:
        if logger.level:
            return logger.level
        logger = logger.parent
    return logging.NOTSET


def _finest() -> int:
    wanted: Iterable[int] = (
        logger.level for logger in list(_tree().values()) if isinstance(logger, logging.Logger) and logger.level
    )
    return max(logging.DEBUG, min([logging.getLogger().level, *wanted]) // 10 * 10)


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(None if name == ROOT else name)


def _tree() -> dict[str, logging.Logger | logging.PlaceHolder]:
    return logging.root.manager.loggerDict
