"""Java objects behind a SparkSession that have no Python name in Spark.

The one idea: these objects have no Python types, so they have the type `Any` here and in the few lines of the callers.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession


def classes(spark: SparkSession) -> Any:
    """Return the packages of the session's JVM: `classes(spark).org.apache.…`."""
    opened: Any = spark
    return opened._jvm


def java_session(spark: SparkSession) -> Any:
    """Return the session's own object in the JVM."""
    opened: Any = spark
    return opened._jsparkSession


def file_system(spark: SparkSession, path: Any) -> Any:
    """Return Hadoop's file system of a Hadoop path."""
    opened: Any = spark
    return path.getFileSystem(opened._jsc.hadoopConfiguration())


def delta_log(spark: SparkSession, path: str) -> Any:
    """Return Delta's log of the table at this path."""
    return classes(spark).org.apache.spark.sql.delta.DeltaLog.forTable(java_session(spark), path)


def analyzed(frame: DataFrame) -> Any:
    """Return Spark's plan of a frame before it is optimized."""
    opened: Any = frame
    return opened._jdf.queryExecution().analyzed()
