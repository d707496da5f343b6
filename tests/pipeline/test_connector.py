"""Many small topics are read by few tasks, and each becomes one file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline import connector
from pipeline.archive.plan import Range
from pipeline.table import files
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]


def test_small_ranges_are_shared_by_records_and_a_topic_stays_whole() -> None:
    ranges = [Range(f"t{topic}", partition, 10, 20) for topic in range(6) for partition in (1, 0)]
    groups = connector.shared(ranges, 3)
    assert [[(each.topic, each.partition) for each in group] for group in groups] == [
        [(f"t{topic}", partition) for topic in pair for partition in (0, 1)] for pair in ((0, 1), (2, 3), (4, 5))
    ]
    wide = [Range("t", partition, 0, 10) for partition in range(40)]
    assert sorted(len(group) for group in connector.shared(wide, 2)) == [19, 21]
    uneven = [Range("a", 0, 0, 1000), *(Range(f"b{number}", 0, 0, 1) for number in range(9))]
    assert [len(group) for group in connector.shared(uneven, 2)] == [1, 9]


def test_many_small_topics_are_one_file_each_and_read_by_a_task_per_core(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path
) -> None:
    cores, partitions, out = spark.sparkContext.defaultParallelism, 2, str(tmp_path / "table")
    names = [topics.fresh(gateway.bootstrap, partitions) for _ in range(connector.MANY_PER_CORE * cores // 2 + 1)]
    for name in names:
        topics.fill(gateway.bootstrap, name, [(n % partitions, None, b"v", topics.START_MS, []) for n in range(12)])
    ranges = [Range(name, partition, 0, 6) for name in names for partition in range(partitions)]
    frame = connector.read(spark, gateway.bootstrap, ranges, settings={})
    assert frame.rdd.getNumPartitions() == cores

    jobs.archive(spark, gateway.bootstrap, out, "--topics", ",".join(names))
    assert files(spark, out).count() == len(names)
    rows = (
        spark.read.format("delta").load(out).select("topic", "partition", "offset", F.input_file_name().alias("file"))
    )
    by_file: dict[str, list[tuple[str, int, int]]] = {}
    for row in rows.collect():
        by_file.setdefault(row.file, []).append((row.topic, row.partition, row.offset))
    assert all(before < after for found in by_file.values() for before, after in pairwise(found))
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0
