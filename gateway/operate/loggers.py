"""The node's loggers by name, and the level of each: shown and changed while it serves (KIP-412).

The one idea: the standard library's tree of loggers has the levels, of our own lines (structlog's) as well; a logger
that has none of its own follows its parent. What is set here lasts as long as the process, as upstream's does.

Kafka's documentation gives loggers names of its own. They are loggers here, too, in a tree of their own below `kafka`,
and each stands for the modules that do that work: a line follows the nearest of its module's own loggers that has been
given a level, else the nearest of Kafka's, else the root.
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

KAFKA = "kafka"
"""The ancestor of Kafka's loggers, and all that a node writes."""
KAFKA_LOGGERS = {
    "kafka.authorizer.logger": ("gateway.security.authorizer", "gateway.apis.acls"),
    "kafka.cluster.Replica": ("gateway.log.tail",),
    "kafka.controller": ("gateway.cluster",),
    "kafka.coordinator.group.GroupCoordinator": ("gateway.groups", "gateway.coordinator"),
    "kafka.coordinator.transaction.TransactionCoordinator": ("gateway.transactions",),
    "kafka.log.LogCleaner": ("gateway.log.compactor", "gateway.operate.maintenance", "storage.compaction"),
    "kafka.log.LogManager": ("storage",),
    "kafka.network.RequestChannel": ("gateway.net.connection",),
    "kafka.network.SocketServer": ("gateway.net", "gateway.security"),
    "kafka.request.logger": ("gateway.net.dispatch",),
    "kafka.server.ClientQuotaManager": ("gateway.quotas",),
    "kafka.server.ControllerServer": ("gateway.cluster.jobs", "gateway.cluster.reconciler", "gateway.apis.topics"),
    "kafka.server.KafkaApis": ("gateway.apis",),
    "kafka.server.KafkaRequestHandler": ("gateway.apis.produce", "gateway.apis.fetch"),
    "kafka.server.ReplicaManager": ("gateway.log",),
    "kafka.server.share.SharePartitionManager": ("gateway.share",),
}
"""Kafka's name → the modules and packages whose lines it has; the one that names a module most closely has them."""
_ROOMS = ("gateway", "protocol", "storage")
_KAFKA_NAMES = {module: name for name, modules in KAFKA_LOGGERS.items() for module in modules}
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
    return [ROOT, *sorted({*ours, *others, KAFKA, *KAFKA_LOGGERS} - {ROOT})]


def level_of(name: str) -> str:
    """The level that is in effect, by Kafka's name."""
    number = _level_in_effect(None if name == ROOT else name)
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
    level = _METHOD_LEVELS.get(method_name, logging.ERROR)
    if level < _level_in_effect(getattr(logger, "name", None)) or level <= logging.root.manager.disable:
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


def _level_in_effect(name: str | None) -> int:
    if name is None:
        return logging.root.level
    return _given(name) or _given(_in_kafka(name)) or logging.root.level


def _given(name: str) -> int:
    """The level of the nearest one that has been given any; 0 if there is none below the root."""
    while name:
        found = _tree().get(name)
        if isinstance(found, logging.Logger) and found.level:
            return found.level
        name = name.rpartition(".")[0]
    return logging.NOTSET


def _in_kafka(name: str) -> str:
    """What Kafka calls the logger of a module of ours; "" where it is none of ours."""
    if name.partition(".")[0] not in _ROOMS:
        return ""
    while name:
        if name in _KAFKA_NAMES:
            return _KAFKA_NAMES[name]
        name = name.rpartition(".")[0]
    return KAFKA


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
