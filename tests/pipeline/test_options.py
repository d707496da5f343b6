"""Options that say where a job connects and how Spark runs. The tests turn texts into values or an explanation."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from pipeline import jdbc, session
from pipeline.archive import figures
from pipeline.commit import Commit
from pipeline.delta import parse_commit
from pipeline.demo.__main__ import Demo
from pipeline.errors import PipelineError
from pipeline.iceberg import _ddl
from pipeline.kafka import Cluster
from pipeline.progress import Progress
from pipeline.sql import identifier


def test_a_url_becomes_the_drivers_address_and_properties() -> None:
    assert jdbc.address("postgresql://me:s%40cret@db:6432/prod?sslmode=require", "--x") == (
        "jdbc:postgresql://db:6432/prod",
        {"user": "me", "password": "s@cret", "ApplicationName": "sluice-pipeline", "connectTimeout": "30",
         "sslmode": "require"},
    )  # fmt: skip
    assert jdbc.address("postgresql://me@/prod?host=/run/postgresql", "--x") is None


def test_user_password_and_certificate_may_be_parameters_of_a_url() -> None:
    url = "postgresql:///?host=db&port=6432&dbname=prod&user=me&password=secret&sslmode=verify-full&sslrootcert=/ca.pem"
    found = jdbc.address(url, "--x")
    assert found is not None
    address, properties = found
    assert address == "jdbc:postgresql://db:6432/prod"
    assert (properties["user"], properties["password"]) == ("me", "secret")
    assert (properties["sslmode"], properties["sslrootcert"]) == ("verify-full", "/ca.pem")


@pytest.mark.parametrize(
    "url", ["postgresql://me:hush#1@db/prod", "postgresql://me:hush/1@db/prod", "postgresql://a:1,b:2/prod", "hush"]
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(PipelineError) as failed:
        jdbc.address(url, "--database-url")
    assert "--database-url" in failed.value.cause
    assert "hush" not in str(failed.value)
    assert failed.value.__context__ is None or failed.value.__suppress_context__


def options(*conf: str) -> session.SessionOptions:
    parser = argparse.ArgumentParser()
    session.add_arguments(parser)
    return session.options_of(parser.parse_args([f"--conf={text}" for text in conf]), "job")


def test_a_time_zone_other_than_utc_is_refused() -> None:
    assert options("spark.sql.session.timeZone=UTC", "a=b=c").settings["a"] == "b=c"
    with pytest.raises(PipelineError, match="days in UTC"):
        options("spark.sql.session.timeZone=Europe/Berlin")


def test_no_task_has_two_attempts_at_a_time(spark: SparkSession) -> None:
    """Clusters may set this in spark-defaults.conf. Two attempts of a replay's task would write records twice."""
    assert spark.sparkContext.getConf().get("spark.speculation") == "false"


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    cluster = Cluster("127.0.0.1:1")
    assert cluster.topics(pattern="or.*", existing={"orders", "other", "__x"}) == ["orders"]
    with pytest.raises(PipelineError, match="no regular expression"):
        cluster.topics(pattern="*", existing={"orders"})


def test_a_metrics_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"cannot be served on 127.0.0.1:{port}"):
            figures.serve("127.0.0.1", port)


def test_a_commit_is_read_whatever_separators_of_lines_its_texts_hold() -> None:
    info = '{"commitInfo":{"operation":"DELETE","predicate":"key = \u2028","userMetadata":"{}"}}'
    assert parse_commit(7, f'{{"protocol":{{}}}}\n{info}\n{{"add":{{}}}}\n') == Commit(7, "DELETE", "{}", 0)
    assert parse_commit(7, '{"add":{}}\n') == Commit(7, "", None, 0)


def test_names_of_fields_may_have_a_backtick() -> None:
    assert identifier("a`b") == "`a``b`"
    kind = ArrayType(StructType([StructField("a`b", LongType()), StructField("c", LongType())]))
    assert _ddl(kind) == "array<struct<`a``b`: bigint, `c`: bigint>>"


def test_the_demo_removes_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for out in (tmp_path, kept):
        with pytest.raises(PipelineError, match="is not the folder of an earlier demo"):
            Demo(argparse.Namespace(out=out, master="local[1]", records=0), Progress("demo")).run()
    assert kept.read_text() == "mine"
