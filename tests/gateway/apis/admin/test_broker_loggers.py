"""BROKER_LOGGER: loggers and their levels by DescribeConfigs and IncrementalAlterConfigs, on the wire."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator

import pytest
import structlog

from gateway.apis.admin.broker_loggers import Operation
from gateway.apis.admin.config_resources import ResourceType
from gateway.config.definition import ConfigSource
from gateway.operate import logs
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from tests.gateway.admin import admin_node
from tests.gateway.apis.admin.configs import alter, describe, replace

Capture = pytest.CaptureFixture[str]

LOGGERS = ResourceType.BROKER_LOGGER
SET, DELETE, APPEND, SUBTRACT = Operation
OURS = "gateway.apis.admin.alter_configs"


@pytest.fixture
def lines(capsys: Capture) -> Iterator[Capture]:
    """Capture the node's log lines at level info, and restore the loggers after the test."""
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, levels = root.handlers, {None: root.level}
    levels |= {name: each.level for name, each in root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    logs.configure("json", "info")
    yield capsys
    root.handlers = handlers
    for name in [None, *root.manager.loggerDict]:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    structlog.configure(**before)


def said(lines: Capture) -> list[str]:
    """Return the events of the log lines since the last call."""
    return [json.loads(line)["event"] for line in lines.readouterr().err.splitlines()]


async def levels(node, *names: str) -> dict[str, str]:
    result = await describe(node, LOGGERS, "1", *names)
    assert result.error_code == ErrorCode.NONE
    return {entry.name: entry.value for entry in result.configs}


async def test_loggers_are_described_with_the_level_in_effect(database_url: str, lines: Capture) -> None:
    async with admin_node(database_url) as node:
        result = await describe(node, LOGGERS, "1")
        assert result.error_code == ErrorCode.NONE
        shown = {entry.name: entry for entry in result.configs}
        assert {"root", OURS, "asyncpg"} <= shown.keys()
        assert shown[OURS].value == shown["root"].value == "INFO"
        assert shown["asyncpg"].value == "ERROR"
        entry = shown[OURS]
        assert entry.config_source == ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG == 6
        assert (entry.read_only, entry.is_sensitive, entry.synonyms) == (False, False, ())
        assert await levels(node, OURS, "no.such") == {OURS: "INFO"}


async def test_request_that_repeats_the_node_looks_for_its_loggers_once(database_url: str) -> None:
    """A request of two megabytes can repeat the node fifty thousand times."""
    resources = tuple(
        DescribeConfigsResource(resource_type=LOGGERS, resource_name="1", configuration_keys=("root", str(number)))
        for number in range(1_000)
    )
    async with admin_node(database_url) as node:
        began_s = time.thread_time()
        answer = await node.ask(ApiKey.DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=resources), 4)
        assert time.thread_time() - began_s < 1
        assert [[entry.name for entry in result.configs] for result in answer.results] == [["root"]] * 1_000


async def test_a_level_that_is_set_decides_what_is_logged(database_url: str, lines: Capture) -> None:
    log = structlog.get_logger(OURS)
    async with admin_node(database_url) as node:
        assert (await alter(node, LOGGERS, "1", (SET, OURS, "DEBUG"))).error_code == ErrorCode.NONE
        said(lines)
        log.debug("fine")
        structlog.get_logger("gateway.apis.admin.new_topics").debug("not asked for")
        assert said(lines) == ["fine"]
        assert await levels(node, OURS, "root") == {OURS: "DEBUG", "root": "INFO"}
        await alter(node, LOGGERS, "1", (SET, OURS, "ERROR"))
        said(lines)
        log.warning("not asked for")
        log.error("bad")
        assert said(lines) == ["bad"]
        await alter(node, LOGGERS, "1", (DELETE, OURS, None))
        said(lines)
        log.debug("not asked for")
        log.info("as its parent")
        assert said(lines) == ["as its parent"]
        await alter(node, LOGGERS, "1", (SET, "root", "FATAL"))
        log.error("not asked for")
        assert await levels(node, OURS) == {OURS: "FATAL"}
        assert said(lines) == []


async def test_levels_of_libraries_are_set_too(database_url: str, lines: Capture) -> None:
    async with admin_node(database_url) as node:
        await alter(node, LOGGERS, "1", (SET, "asyncpg", "TRACE"))
        assert await levels(node, "asyncpg") == {"asyncpg": "TRACE"}
        said(lines)
        logging.getLogger("asyncpg").debug("from a library")
        assert "from a library" in lines.readouterr().err


async def test_validate_only_and_a_refusal_change_nothing(database_url: str, lines: Capture) -> None:
    async with admin_node(database_url) as node:
        response = await alter(node, LOGGERS, "1", (SET, OURS, "DEBUG"), validate_only=True)
        assert response.error_code == ErrorCode.NONE
        response = await alter(node, LOGGERS, "1", (SET, OURS, "DEBUG"), (SET, "asyncpg", "LOUD"))
        assert response.error_code == ErrorCode.INVALID_CONFIG
        assert await levels(node, OURS, "asyncpg") == {OURS: "INFO", "asyncpg": "ERROR"}


@pytest.mark.parametrize(
    ("name", "change", "code", "message"),
    [
        ("1", (SET, "no.such", "INFO"), ErrorCode.INVALID_CONFIG, "Logger no.such does not exist!"),
        ("1", (DELETE, "no.such", None), ErrorCode.INVALID_CONFIG, "Logger no.such does not exist!"),
        (
            "1",
            (SET, OURS, "info"),
            ErrorCode.INVALID_CONFIG,
            f"Cannot set the log level of {OURS} to info as it is not a supported log level. "
            "Valid log levels are DEBUG, ERROR, FATAL, INFO, TRACE, WARN",
        ),
        (
            "1",
            (DELETE, "root", None),
            ErrorCode.INVALID_REQUEST,
            "Removing the log level of the root logger is not allowed",
        ),
        (
            "1",
            (APPEND, OURS, "INFO"),
            ErrorCode.INVALID_REQUEST,
            "APPEND operation is not allowed for the BROKER_LOGGER resource",
        ),
        (
            "1",
            (SUBTRACT, OURS, "INFO"),
            ErrorCode.INVALID_REQUEST,
            "SUBTRACT operation is not allowed for the BROKER_LOGGER resource",
        ),
        (
            "1",
            (9, OURS, "INFO"),
            ErrorCode.INVALID_REQUEST,
            "Unknown operation type 9 is not allowed for the BROKER_LOGGER resource",
        ),
        ("1", (SET, OURS, None), ErrorCode.INVALID_REQUEST, f"Null value not supported for : {OURS}"),
        ("2", (SET, OURS, "INFO"), ErrorCode.INVALID_REQUEST, "Unexpected node id. Expected 1, but received 2"),
        ("one", (SET, OURS, "INFO"), ErrorCode.INVALID_REQUEST, "Node id must be an integer, but it is: one"),
        ("", (SET, OURS, "INFO"), ErrorCode.INVALID_REQUEST, "Node id must be an integer, but it is: "),
    ],
)
async def test_refusals_in_kafkas_words(
    database_url: str, name: str, change: tuple[int, str, str | None], code: ErrorCode, message: str
) -> None:
    async with admin_node(database_url) as node:
        response = await alter(node, LOGGERS, name, change)
        assert (response.error_code, response.error_message) == (code, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Broker id must not be empty"),
        ("2", "Unexpected broker id, expected 1 but received 2"),
        ("one", "Broker id must be an integer, but it is: one"),
    ],
)
async def test_loggers_of_another_node_are_not_described(database_url: str, name: str, message: str) -> None:
    async with admin_node(database_url) as node:
        result = await describe(node, LOGGERS, name)
        assert (result.error_code, result.error_message) == (ErrorCode.INVALID_REQUEST, message)


async def test_legacy_alter_configs_of_loggers_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        response = await replace(node, LOGGERS, "1", [(OURS, "INFO")])
        assert (response.error_code, response.error_message) == (ErrorCode.INVALID_REQUEST, "Unknown resource type 8")


async def test_level_set_by_kafkas_name_applies_to_our_logger(database_url: str, lines: Capture) -> None:
    cleaner, log = "kafka.log.LogCleaner", structlog.get_logger("gateway.log.compactor")
    async with admin_node(database_url) as node:
        assert (await levels(node, "kafka", cleaner)) == {"kafka": "INFO", cleaner: "INFO"}
        assert (await alter(node, LOGGERS, "1", (SET, "kafka", "ERROR"))).error_code == ErrorCode.NONE
        assert (await alter(node, LOGGERS, "1", (SET, cleaner, "DEBUG"))).error_code == ErrorCode.NONE
        assert await levels(node, "kafka", cleaner) == {"kafka": "ERROR", cleaner: "DEBUG"}
        said(lines)
        log.debug("fine")
        structlog.get_logger(OURS).warning("not asked for")
        assert said(lines) == ["fine"]
        await alter(node, LOGGERS, "1", (DELETE, cleaner, None))
        log.warning("not asked for")
        assert await levels(node, cleaner) == {cleaner: "ERROR"}
        assert said(lines) == []
