"""Names of loggers, and how levels set by two kinds of names combine."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
from collections.abc import Iterator

import pytest
import structlog

import gateway
import storage
from gateway.operate import loggers, logs
from tests.gateway.data_plane import data_plane
from tests.gateway.operate.compaction import EAGER, compact, send_pairs

CLEANER, COMPACTOR = "kafka.log.LogCleaner", "gateway.log.compactor"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore every level after the test. During the test only the root logger has a level."""
    configured, root = structlog.get_config(), logging.getLogger()
    tree = root.manager.loggerDict
    before = {name: each.level for name, each in tree.items() if isinstance(each, logging.Logger)}
    root_level, handlers, is_debug = root.level, root.handlers, loggers.FINEST.is_debug
    for name in before:
        logging.getLogger(name).setLevel(logging.NOTSET)
    loggers.set_level("root", "INFO")
    yield
    for name, each in tree.items():
        if isinstance(each, logging.Logger):
            each.setLevel(before.get(name, logging.NOTSET))
    root.setLevel(root_level)
    root.handlers = handlers
    loggers.FINEST.is_debug = is_debug
    structlog.configure(**configured)


def test_every_kafka_logger_name_has_a_logger_that_writes() -> None:
    """A level for a name without a logger would have no effect."""
    for package in (gateway, storage):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    writers = loggers.our_names()
    for name, modules in loggers.KAFKA_NAMES.items():
        for module in modules:
            if module != "protocol":
                assert [each for each in writers if f"{each}.".startswith(f"{module}.")], (name, module)
    assert [writer for writer in writers if not loggers.kafka_names_of(writer)] == []


def test_names_that_documentation_gives_are_listed() -> None:
    wanted = {"kafka", "kafka.cluster.Replica", CLEANER, "kafka.request.logger", "state.change.logger"}
    assert wanted <= set(loggers.names())
    assert loggers.names()[0] == "root"
    assert loggers.names()[1:] == sorted(loggers.names()[1:])


def test_a_level_holds_for_those_below_that_have_none() -> None:
    loggers.set_level("kafka", "DEBUG")
    assert [loggers.level_of(name) for name in ("kafka", CLEANER, COMPACTOR)] == ["DEBUG"] * 3
    loggers.set_level(CLEANER, "ERROR")
    assert [loggers.level_of(name) for name in ("kafka", CLEANER, COMPACTOR)] == ["DEBUG", "ERROR", "ERROR"]
    assert loggers.level_of("gateway.cluster.clock") == "DEBUG"
    loggers.unset_level(CLEANER)
    loggers.set_level("kafka", "TRACE")
    assert [loggers.level_of(name) for name in (CLEANER, COMPACTOR)] == ["TRACE"] * 2
    loggers.unset_level("kafka")
    loggers.set_level("root", "WARN")
    assert [loggers.level_of(name) for name in ("kafka", CLEANER, COMPACTOR)] == ["WARN"] * 3


def test_groups_have_another_ancestor() -> None:
    of_groups = "org.apache.kafka.coordinator.group.GroupCoordinatorService"
    loggers.set_level("kafka", "DEBUG")
    assert [loggers.level_of(name) for name in (of_groups, "gateway.groups.runtime")] == ["INFO"] * 2
    loggers.set_level("org.apache.kafka", "ERROR")
    assert [loggers.level_of(name) for name in (of_groups, "gateway.groups.runtime")] == ["ERROR"] * 2


def test_our_own_name_comes_before_kafkas() -> None:
    loggers.set_level(CLEANER, "DEBUG")
    loggers.set_level(COMPACTOR, "ERROR")
    assert (loggers.level_of(CLEANER), loggers.level_of(COMPACTOR)) == ("DEBUG", "ERROR")
    loggers.unset_level(COMPACTOR)
    assert loggers.level_of(COMPACTOR) == "DEBUG"


def test_the_finest_of_several_of_kafkas_names_counts() -> None:
    leases = "gateway.cluster.leases"
    assert loggers.kafka_names_of(leases) == ["kafka.controller", "state.change.logger"]
    loggers.set_level("kafka.controller", "ERROR")
    assert loggers.level_of(leases) == "INFO"
    loggers.set_level("state.change.logger", "WARN")
    assert loggers.level_of(leases) == "WARN"
    loggers.set_level("state.change.logger", "DEBUG")
    assert loggers.level_of(leases) == "DEBUG"


def test_the_names_with_the_most_of_a_path_stand_for_it() -> None:
    assert loggers.kafka_names_of("gateway.apis.data.produce") == ["kafka.server.ReplicaManager"]
    assert loggers.kafka_names_of("gateway.apis.admin.new_topics") == ["kafka.server.KafkaApis"]
    assert loggers.kafka_names_of("gateway.quotas.limits") == ["kafka"]
    assert loggers.kafka_names_of("asyncpg") == []


def test_request_lines_are_built_only_if_enabled() -> None:
    assert not loggers.FINEST.is_debug
    loggers.set_level("kafka.request.logger", "DEBUG")
    assert loggers.FINEST.is_debug
    loggers.unset_level("kafka.request.logger")
    assert not loggers.FINEST.is_debug


async def test_compaction_is_logged_if_kafkas_log_cleaner_is_at_debug(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("json", "info")
    async with data_plane(database_url) as node:
        topic = await node.create_topic("t", configs=EAGER)

        async def told() -> list[str]:
            for value in (b"1", b"2"):
                await send_pairs(node, topic, (b"a", value))
            capsys.readouterr()
            await compact(node)
            return [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]

        assert await told() == ["partition compacted"]
        loggers.set_level(CLEANER, "DEBUG")
        assert await told() == ["compaction looked", "compaction begins", "batches compacted", "partition compacted"]
        loggers.set_level(CLEANER, "ERROR")
        assert await told() == []
