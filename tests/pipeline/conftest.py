"""One Spark session for all of the pipeline's tests: starting one costs more than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="the extra `pipeline` is not installed: make test-pipeline")

from pyspark.sql import SparkSession

from pipeline.session import SessionOptions, open_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = open_session(
        SessionOptions(
            app_name="tests",
            master="local[2]",
            local_dir=tmp_path_factory.mktemp("spark"),
            settings={
                "spark.sql.shuffle.partitions": "2",
                "spark.default.parallelism": "2",
                # A handful of rows: compiling a plan costs more than interpreting it.
                "spark.sql.codegen.wholeStage": "false",
                "spark.sql.codegen.factoryMode": "NO_CODEGEN",
                "spark.sql.adaptive.enabled": "false",
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            },
        )
    )
    yield session
    session.stop()
