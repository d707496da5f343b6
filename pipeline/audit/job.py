"""`audit`: describe how the records of each archived topic are distributed, how large they are and how their times
behave; advise their producers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, session, table
from pipeline.audit import transforms
from pipeline.audit.advice import advice
from pipeline.audit.report import write_audit
from pipeline.errors import PipelineError
from pipeline.partitioners import guessed
from pipeline.progress import Progress, Stop
from pipeline.ticker import Ticker

CODECS = ("lz4", "snappy", "zstd", "gzip")
SAMPLED, SAMPLED_BYTES = 4_000, 16_384
"""Number of values, and bytes of each at most, that the driver compresses. It holds them all in memory."""
BATCH = 200
"""Number of records that are compressed together, as in a batch of a producer with a short linger."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    catalog.add_arguments(parser)
    parser.add_argument("--topics", default="", metavar="A,B", help="only these of the archive's topics")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder for audit.json, audit.html and *.png"
    )


def run(arguments: argparse.Namespace, lines: Progress, stop: Stop) -> int:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    spark = session.open_session(session.options_of(arguments, "sluice audit"), lines)
    try:
        records = table.read(spark, table.location(arguments.archive, arguments.format))
        names = [name for name in arguments.topics.split(",") if name]
        found = audit(spark, of_topics(records, names), lines, stop)
    finally:
        spark.stop()
    (out / "audit.json").write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    pictures = write_audit(out, found)
    for name, told in found.items():
        for sentence in told["advice"]:
            lines.say(f"{name}: {sentence}")
    lines.say(f"wrote audit.html and {len(pictures)} pictures to {out}")
    return 0


def of_topics(records: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the records of these topics, or all if `names` is empty. Raise PipelineError if a topic has no records."""
    chosen = records.where(F.col("topic").isin(*names)) if names else records
    held = {row.topic for row in chosen.select("topic").distinct().collect()}
    missing = sorted({*names} - held)
    if missing or not held:
        raise PipelineError(
            f"The archive has no records of {', '.join(missing) or 'any topic'}.",
            "Archive them first, or check --topics.",
        )
    return chosen


def audit(spark: SparkSession, records: DataFrame, lines: Progress, stop: Stop) -> dict[str, dict[str, Any]]:
    """Return all figures of each topic, as plain values."""
    sized = transforms.measured(records)
    found: dict[str, dict[str, Any]] = {}

    def step(name: str, rows: DataFrame, many: bool) -> None:
        if stop.asked:
            raise PipelineError("The job was stopped before the audit was complete.", "Start it again; it begins anew.")
        started = time.monotonic()
        with Ticker(spark, lines, stop):
            collected = rows.collect()
        for row in collected:
            values = _plain(row.asDict())
            topic = found.setdefault(values.pop("topic"), {})
            if many:
                topic.setdefault(name, []).append(values)
            else:
                topic[name] = values
        seconds = time.monotonic() - started
        lines.say(f"{name}: {len(collected):,} rows in {seconds:.1f} s", event="step", rows=len(collected))

    step("partitions", transforms.partitions(sized).orderBy("topic", "partition"), many=True)
    step("over_time", transforms.over_time(sized).orderBy("topic", "begins_ms"), many=True)
    step("keys", transforms.keys(sized), many=False)
    step("hottest_keys", transforms.hottest_keys(sized, 200).orderBy("topic", "rank"), many=True)
    step("sizes", transforms.sizes(sized).orderBy("topic", "size_class"), many=True)
    step("size_figures", transforms.size_figures(sized), many=False)
    step("lateness", transforms.lateness(sized), many=False)
    for name, told in found.items():
        told["compression"] = compression(records.where(F.col("topic") == name))
        told["partitioner"] = guessed(
            [
                (bytes.fromhex(key["key"]), key["partition"])
                for key in told.get("hottest_keys", ())
                if key["partitions"] == 1
            ],
            max(partition["partition"] for partition in told["partitions"]) + 1,
        )
        told["advice"] = advice(told)
        lines.say(f"{name}: compressed a sample with {', '.join(CODECS)}")
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its bytes in hexadecimal digits, because JSON cannot hold bytes."""
    return {name: bytes(value).hex() if isinstance(value, bytes | bytearray) else value for name, value in row.items()}


def compression(records: DataFrame) -> dict[str, dict[str, float]]:
    """Return the ratio and the MB/s of each codec on a sample of batches of neighbouring records."""
    sample = records.where(F.col("value").isNotNull()).select(F.substring("value", 1, SAMPLED_BYTES).alias("value"))
    values = [bytes(row.value) for row in sample.limit(SAMPLED).collect()]
    batches = [b"".join(values[start : start + BATCH]) for start in range(0, len(values), BATCH)]
    plain = sum(map(len, batches))
    told: dict[str, dict[str, float]] = {}
    for codec in CODECS if plain else ():
        # Measure processor time, because on a busy machine the wall-clock time would include other processes.
        started = time.thread_time()
        packed = sum(len(pa.compress(batch, codec=codec, asbytes=True)) for batch in batches)
        took = max(time.thread_time() - started, 1e-9)
        told[codec] = {"ratio": round(plain / max(packed, 1), 3), "mb_per_s": round(plain / took / 1e6, 1)}
    return told


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["audit", *sys.argv[1:]]))
