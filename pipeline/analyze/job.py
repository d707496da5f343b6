"""`analyze`: report from the coordinator's journal what rebalances did to consumer groups.

The job copies the journal's rows once, turns them into tables (docs/analysis.md), and writes findings and charts. It
also checks invariants that hold however clients behave, and ends with exit code 3 if one is violated. So the job also
tests every long run of the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pipeline import session
from pipeline.analyze.findings import Finding, delivery_findings, findings
from pipeline.analyze.handoffs import delivered
from pipeline.analyze.journal import DELIVERY, Journal, open_archive, with_eras
from pipeline.analyze.postgres import copy_snapshot, source_of
from pipeline.analyze.tables import Tables, Thresholds, analyze
from pipeline.errors import PipelineError
from pipeline.progress import Progress, Stop
from pipeline.report.data import delivery_data, report_data
from pipeline.report.page import write_page
from pipeline.report.pictures import write_pictures
from pipeline.ticker import Ticker

RULES_BROKEN = 3
SMALL_TABLES = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""Spark settings for the many queries of the written tables, because these queries take longer to compile than to
interpret.
"""
SHOWN = 12
"""Number of findings that are printed. findings.json and the report contain all findings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where the journal is")
    where.add_argument(
        "--database-url",
        default=os.environ.get("SLUICE_DATABASE_URL"),
        metavar="URL",
        help="postgresql://user:password@host/database (default: SLUICE_DATABASE_URL)",
    )
    where.add_argument(
        "--data-dir", metavar="FOLDER", help="data folder of a running gateway with an embedded Postgres"
    )
    where.add_argument("--schema", default="sluice", help="schema of the gateway's tables (default %(default)s)")
    where.add_argument("--archive", metavar="FOLDER", help="read an earlier --out/journal instead of Postgres")
    where.add_argument("--from-seq", type=int, metavar="N", help="first row of the journal to read")
    where.add_argument("--until-seq", type=int, metavar="N", help="first row after those to read")
    where.add_argument(
        "--delivery",
        metavar="FOLDER",
        help="Parquet with the members' own logs of processed records, for exact duplicates",
    )
    where.add_argument(
        "--delivery-only", metavar="FOLDER", help="read only the members' own logs of processed records, and no journal"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="folder for tables, findings.json, report.html and *.png",
    )
    words = parser.add_argument_group("thresholds")
    words.add_argument(
        "--storm-rebalances", type=int, default=5, metavar="K", help="a storm is K rebalances (default %(default)s)"
    )
    words.add_argument(
        "--storm-within", type=float, default=60.0, metavar="S", help="within S seconds (default %(default)s)"
    )
    words.add_argument(
        "--lag-points", type=int, default=400, metavar="N", help="points per line of lag (default %(default)s)"
    )
    words.add_argument(
        "--tolerance-ms",
        type=int,
        default=1_000,
        metavar="MS",
        help="how much later than the commit its row may be (default %(default)s)",
    )
    parser.add_argument("--no-report", action="store_true", help="write tables and findings only")


def run(arguments: argparse.Namespace, lines: Progress, stop: Stop) -> int:
    thresholds = _thresholds(arguments)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    spark = session.open_session(session.options_of(arguments, "sluice analyze"), lines)
    try:
        if arguments.delivery_only is not None:
            found = _delivery_only(spark, arguments.delivery_only, out, lines)
            return _tell(found, lines)
        journal = _journal(spark, arguments, lines)
        lines.say(f"analysing {journal.next_seq - journal.first_seq:,} rows of the journal")
        with Ticker(spark, lines, stop):
            planned = analyze(with_eras(journal), thresholds)
        tables = write_tables(planned, out, lines, stop)
        for name, value in SMALL_TABLES.items():
            spark.conf.set(name, value)
        found = findings(tables, thresholds)
        _write_json(out / "findings.json", [finding.as_dict() for finding in found])
        if not arguments.no_report and not stop.asked:
            data = report_data(tables, found)
            write_page(out / "report.html", data)
            pictures = write_pictures(out, data)
            lines.say(
                f"wrote report.html and {len(pictures)} pictures to {out}", pictures=[path.name for path in pictures]
            )
    finally:
        spark.stop()
    return _tell(found, lines)


def _delivery_only(spark: SparkSession, folder: str, out: Path, lines: Progress) -> list[Finding]:
    turns = delivered(spark.read.schema(DELIVERY).parquet(folder))
    turns.write.mode("overwrite").parquet(str(out / "delivered"))
    turns = spark.read.parquet(str(out / "delivered"))
    found = delivery_findings(turns)
    _write_json(out / "findings.json", [finding.as_dict() for finding in found])
    data = delivery_data(turns, found)
    write_page(out / "report.html", data)
    pictures = write_pictures(out, data)
    lines.say(f"wrote report.html and {len(pictures)} pictures to {out}", pictures=[path.name for path in pictures])
    return found


def _thresholds(arguments: argparse.Namespace) -> Thresholds:
    if arguments.storm_rebalances < 2 or arguments.storm_within <= 0 or not 10 <= arguments.lag_points <= 100_000:
        raise PipelineError(
            "--storm-rebalances must be 2 or more, --storm-within above 0, --lag-points from 10 to 100,000.",
            "Leave them out for the defaults.",
        )
    return Thresholds(
        storm_rebalances=arguments.storm_rebalances,
        storm_within_ms=int(arguments.storm_within * 1_000),
        lag_points=arguments.lag_points,
        tolerance_ms=arguments.tolerance_ms,
    )


def _journal(spark: SparkSession, arguments: argparse.Namespace, lines: Progress) -> Journal:
    first_seq, next_seq = arguments.from_seq, arguments.until_seq
    if arguments.archive is not None:
        opened = open_archive(spark, arguments.archive).between(first_seq, next_seq)
    else:
        folder: Path = arguments.out / "journal"
        source = source_of(spark, _database_url(arguments), arguments.schema)
        copied = copy_snapshot(source, folder, lines.say, from_seq=first_seq, until_seq=next_seq)
        opened = open_archive(spark, str(folder), copied)
    if arguments.delivery is None:
        return opened
    return replace(opened, delivery=spark.read.schema(DELIVERY).parquet(arguments.delivery))


def _database_url(arguments: argparse.Namespace) -> str:
    if arguments.data_dir is not None:
        folder = Path(arguments.data_dir).resolve() / "socket"
        if not folder.is_dir():
            raise PipelineError(
                f"There is no embedded Postgres in {arguments.data_dir}.",
                "Name the folder that `sluice serve --data-dir` was given, while the gateway runs.",
            )
        return f"postgresql://sluice@/postgres?host={folder}&port=5432&sslmode=disable"
    if not arguments.database_url:
        raise PipelineError(
            "No journal is named.",
            "Give --database-url, --data-dir, or --archive with the journal of an earlier run.",
        )
    return str(arguments.database_url)


def write_tables(tables: Tables, out: Path, lines: Progress, stop: Stop) -> Tables:
    """Write each table as Parquet, and return the tables as read back, so that each is computed only once."""
    written: dict[str, Any] = {}
    for name, table in tables.named().items():
        if stop.asked:
            raise PipelineError(
                "The job was stopped before all tables were written.", "Start it again; it begins anew."
            )
        started = time.monotonic()
        target = str(out / name)
        with Ticker(table.sparkSession, lines, stop):
            table.write.mode("overwrite").parquet(target)
            written[name] = table.sparkSession.read.parquet(target)
            rows = written[name].count()
        lines.say(f"{name}: {rows:,} rows in {time.monotonic() - started:.1f} s", event="step", rows=rows)
    return Tables(**written)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")


def _tell(found: list[Finding], lines: Progress) -> int:
    for finding in found[:SHOWN]:
        lines.say(f"{finding.severity}: {finding.says}", finding=finding.as_dict())
    if len(found) > SHOWN:
        lines.say(f"{len(found) - SHOWN} more findings are in findings.json")
    broken = [finding for finding in found if finding.severity == "violation"]
    if broken:
        lines.say(f"{len(broken)} rules are broken: this journal shows a fault of the gateway")
        return RULES_BROKEN
    return 0


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["analyze", *sys.argv[1:]]))
