"""BROKER_LOGGER, a resource of DescribeConfigs and IncrementalAlterConfigs: this node's loggers and their levels.

A level belongs to one process and ends with it, so only the node that is named answers (KIP-412). Mirrors upstream's
RuntimeLoggerManager: what is asked of one node is checked whole before any of it is done. Legacy AlterConfigs does not
know loggers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import structlog

from gateway.config.definition import ConfigSource
from gateway.operate import loggers
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.describe_configs import DescribeConfigsResource, DescribeConfigsResourceResult
from protocol.messages.incremental_alter_configs import AlterableConfig

logger = structlog.get_logger(__name__)

_RESOURCE = "BROKER_LOGGER"


class Operation(IntEnum):
    """Upstream's AlterConfigOp.OpType."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


KnownLoggers = dict[str, DescribeConfigsResourceResult]
"""Every logger as one answer describes it, by name; empty until a resource of the request needs it. To find the
loggers takes milliseconds, and a request may name this node fifty thousand times."""


def describe_loggers(
    resource: DescribeConfigsResource, node_id: int, known: KnownLoggers
) -> list[DescribeConfigsResourceResult]:
    """Return the requested loggers with the level in effect; all loggers if the request names none."""
    if not resource.resource_name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Broker id must not be empty")
    if read_broker_id(resource.resource_name, "Broker") != node_id:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {node_id} but received {resource.resource_name}",
        )
    if not known:
        for name in loggers.names():
            known[name] = DescribeConfigsResourceResult(
                name=name,
                value=loggers.level_of(name),
                read_only=False,
                config_source=ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG,
            )
    wanted = set(resource.configuration_keys or ())
    return [entry for name, entry in known.items() if not wanted or name in wanted]


def alter_loggers(resource_name: str, changes: Sequence[AlterableConfig], node_id: int, *, validate_only: bool) -> None:
    """Apply all of the changes, or none. Raise KafkaError."""
    asked_id = read_broker_id(resource_name, "Node")
    if asked_id != node_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unexpected node id. Expected {node_id}, but received {asked_id}")
    known = set(loggers.names())
    for change in changes:
        _check(change, known)
    if validate_only:
        return
    for change in changes:
        if change.config_operation == Operation.SET:
            loggers.set_level(change.name, change.value or "")
        else:
            loggers.unset_level(change.name)
        logger.warning("level of a logger changed", logger=change.name, level=loggers.level_of(change.name))


def read_broker_id(text: str, what: str) -> int:
    """Parse the id of a broker that names a resource. `what` describes the resource in the refusal.

    Refuse other spellings of an id, such as 01. A request could name one broker in thousands of them, and each answer
    is large.
    """
    with suppress(ValueError):
        broker_id = int(text)
        if str(broker_id) == text:
            return broker_id
    raise KafkaError(ErrorCode.INVALID_REQUEST, f"{what} id must be an integer, but it is: {text}")


def _check(change: AlterableConfig, known: set[str]) -> None:
    match change.config_operation:
        case Operation.SET | Operation.DELETE:
            if change.name not in known:
                raise KafkaError(ErrorCode.INVALID_CONFIG, f"Logger {change.name} does not exist!")
            if change.config_operation == Operation.DELETE:
                if change.name == loggers.ROOT:
                    raise KafkaError(
                        ErrorCode.INVALID_REQUEST,
                        f"Removing the log level of the {loggers.ROOT} logger is not allowed",
                    )
            elif change.value not in loggers.LEVELS:
                raise KafkaError(
                    ErrorCode.INVALID_CONFIG,
                    f"Cannot set the log level of {change.name} to {change.value} as it is not a supported log level."
                    f" Valid log levels are {', '.join(sorted(loggers.LEVELS))}",
                )
        case Operation.APPEND | Operation.SUBTRACT:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                f"{Operation(change.config_operation).name} operation is not allowed for the {_RESOURCE} resource",
            )
        case _:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                f"Unknown operation type {change.config_operation} is not allowed for the {_RESOURCE} resource",
            )
