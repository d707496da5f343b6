"""One Spark session for all tests of a process; without PySpark, Java or the jars they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline import jars, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The runs are short: compile little, and collect garbage with one thread.
FAST_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Default for tests without settings of their own: Spark uses only the CPU time that other suites of the machine leave.
LIMIT_S = 1_200
# Tests have few rows. For these, compiling a plan costs more than interpreting it.
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
# Tests of transforms import PySpark at the top of the module, so without PySpark they cannot even be collected.
collect_ignore_glob = [] if find_spec("pyspark") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the pipeline's long fault runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = _lacking()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
        if lacking is not None:
            item.add_marker(pytest.mark.skip(reason=lacking))
        elif item.get_closest_marker("long") and not config.getoption("--long", default=False):
            item.add_marker(pytest.mark.skip(reason="a long run; --long runs it"))


def _lacking() -> str | None:
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "PySpark is not installed; make test-pipeline installs it"
    if shutil.which("java") is None:
        return "there is no Java"
    missing = jars.missing(jars.folder())
    return f"jars are missing, such as {missing[0]}; make pipeline-jars fetches them" if missing else None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    opened = session.open_session(
        session.SessionOptions(
            app_name="tests",
            master="local[2]",
            local_dir=folder / "local",
            settings={
                "spark.driver.extraJavaOptions": FAST_JVM,
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.warehouse.dir": str(folder / "warehouse"),
            },
        )
    )
    yield opened
    opened.stop()


@contextmanager
def interpreting(spark: SparkSession) -> Iterator[None]:
    """Interpret plans instead of compiling them, for many plans over few rows."""
    before = {name: spark.conf.get(name) for name in INTERPRETED}
    for name, value in INTERPRETED.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="module")
def interpreted(spark: SparkSession) -> Iterator[None]:
    with interpreting(spark):
        yield


@pytest.fixture(params=["postgres", "folder"])
def lake(
    request: pytest.FixtureRequest, spark: SparkSession, database_url: str, tmp_path: Path
) -> Iterator[SparkSession]:
    """A session of its own with an empty Iceberg catalog."""
    # These imports need PySpark, but this module must also load without it.
    from pipeline import catalog
    from pipeline.archive import job as archive_job
    from tests.pipeline import jobs
    from tests.pipeline.relay import relayed

    with relayed(database_url) as url:
        where = ["--catalog", url, "--warehouse", str(tmp_path / "files")]
        if request.param == "folder":
            where = ["--catalog", str(tmp_path / "files")]
        arguments = jobs.parse(archive_job, ["--bootstrap", "x", "--out", "x", "--format", "iceberg", *where])
        session = spark.newSession()
        for name, value in catalog.settings_of(arguments).items():
            session.conf.set(name, value)
        for name, value in {**INTERPRETED, "spark.sql.shuffle.partitions": "2"}.items():
            session.conf.set(name, value)
        yield session
