"""Fixtures: a fresh database, a gateway in its own process, and the gateway's log in the report of a failure."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.dealing import dealt
from tests.forks import forks
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess, find_coordinator
from tests.postgres import EMPTY, SERVED, Databases, cluster_directory, databases, shared_databases
from tests.restorable_postgres import RestorablePostgres, restorable_postgres
from tests.rotation import PARTS, part_of, rotated
from tests.templates import make_templates

NO_SETTINGS: Mapping[str, str] = {}
SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
}
"""Settings of each gateway, unless a test gives others. With Kafka's defaults members of groups wait for seconds."""
MARKS = {"alone": ("mark.alone",), "long": ("mark.long", "first_always")}
"""Names that give a test a mark. Collecting all modules takes eight seconds of each worker's CPU. So a run of one mark
collects only the modules that contain its names.
"""

_servers: list[Databases] = []
_gateways: list[GatewayProcess] = []
"""Running gateways, for the report of a failure."""


_shared_server = contextlib.ExitStack()
"""The Postgres of all parallel workers, open in the process that starts the workers."""


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """The suite's Postgres server, with its templates."""
    given = getattr(request.config, "workerinput", None)
    with _own_server() if given is None else shared_databases(**given["postgres"]) as server:
        yield server


@contextlib.contextmanager
def _own_server() -> Iterator[Databases]:
    with databases() as server:
        make_templates(server)
        _servers.append(server)
        yield server


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a new parallel worker the address of the Postgres that all workers share. For the first worker, start this
    Postgres.
    """
    if not _servers:
        _shared_server.enter_context(_own_server())
    node.workerinput["postgres"] = _servers[0].shared()


def pytest_unconfigure() -> None:
    _shared_server.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=int, help=f"of the long tests the Nth of {PARTS} parts")
    parser.addoption("--marked", choices=sorted(MARKS), help="collect only modules that mention this mark")
    parser.addoption("--rotate", type=int, help="the tests of part N, and the first one of each module")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    mark: str | None = config.getoption("marked")
    if mark is None or not collection_path.match("test_*.py") or mentions(collection_path, mark):
        return None
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the collected test objects. They are all used until the end, and one pass
    over all of them takes a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def mentions(module: Path, mark: str) -> bool:
    """Return whether a module's source contains a name that gives its tests the mark."""
    source = module.read_text()
    return any(name in source for name in MARKS[mark])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: int | None = config.getoption("part")
    rotate: int | None = config.getoption("rotate")
    for module, mark in {
        (item.path, mark.name) for item in items for mark in item.iter_markers() if mark.name in MARKS
    }:
        if not mentions(module, mark):
            raise pytest.UsageError(f"{module} has tests with the mark {mark} but none of the names {MARKS[mark]}")
    tests = [item.nodeid for item in items]
    kept = set(tests) if rotate is None else rotated(tests, rotate)
    if part is not None:
        kept -= {item.nodeid for item in items if item.get_closest_marker("long") and part_of(item.nodeid) != part}
    left_out = [item for item in items if item.nodeid not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in kept]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = dealt(items, workers, folder_of=_folder_of, module_of=attrgetter("path"))


def _folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).parts[1]


@pytest.fixture
def database_url(postgres: Databases) -> Iterator[str]:
    """URL of a migrated database that is the test's own."""
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest.fixture
def empty_database_url(postgres: Databases) -> Iterator[str]:
    """URL of a database without any table."""
    url = postgres.create(EMPTY)
    yield url
    postgres.drop(url)


@pytest.fixture
def restorable() -> Iterator[RestorablePostgres]:
    """A Postgres server of the test's own. The test can restore its files to an earlier state."""
    with restorable_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(postgres: Databases) -> Iterator[GatewayProcess]:
    """A gateway that the tests of a module share. It has a database of its own."""
    with gateways(postgres) as factory:
        yield factory()


@pytest.fixture
def gateway_factory(postgres: Databases) -> Iterator[GatewayFactory]:
    """Start gateways that end with the test."""
    with gateways(postgres) as factory:
        yield factory


@contextlib.contextmanager
def gateways(server: Databases) -> Iterator[GatewayFactory]:
    with contextlib.ExitStack() as stack:

        def start(
            settings: Mapping[str, str] = NO_SETTINGS,
            *,
            embedded: bool = False,
            database_url: str | None = None,
            environment: Mapping[str, str] = NO_SETTINGS,
            root: Path = ROOT,
            coordinated: bool = True,
        ) -> GatewayProcess:
            directory = stack.enter_context(cluster_directory())
            if not embedded and database_url is None:
                database_url = server.create(SERVED)
                stack.callback(server.drop, database_url)
            process = GatewayProcess(
                directory,
                database_url=database_url,
                settings={**SETTINGS, **settings},
                environment=environment,
                root=root,
                forks=forks(),
            )
            _gateways.append(process)
            stack.callback(_gateways.remove, process)
            stack.callback(process.close)
            process.start()
            if coordinated:
                find_coordinator(process.bootstrap)
            return process

        yield start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for process in _gateways:
            report.sections.append((f"log of the gateway on {process.bootstrap}", process.log_tail()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for server in _servers:
        terminalreporter.write_line(f"Postgres of this run: {server.description}")
