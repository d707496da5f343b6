"""Merge a table's small files, in order, and remove files that no reader needs any more.

The one idea: an archive is merged topic by topic and day by day, and each day is one commit. So the job can be stopped
and started at any moment. It can run beside an archive job, because it rewrites only committed files and the archive
job only adds files. A table that `table` made is merged by its own partitions and in its own order. The vacuum keeps
each file that belongs to a version newer than the horizon, and each newer file.
"""

from __future__ import annotations

import argparse
import sys
import time

from pyspark.sql import SparkSession

from pipeline import catalog, delta, session, table
from pipeline.compact.transforms import worth_compacting
from pipeline.errors import PipelineError, explain
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import ARCHIVE_CLUSTER
from pipeline.sql import literal
from pipeline.ticker import Ticker

LEAST_HORIZON_HOURS = 1
MEGABYTE = 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--archive", "--table", required=True, metavar="TABLE", help="the table that `archive` or `table` wrote"
    )
    parser.add_argument(
        "--file-mb", type=int, default=256, metavar="N", help="size of a merged file (default %(default)s)"
    )
    parser.add_argument(
        "--least-files",
        type=int,
        default=2,
        metavar="N",
        help="merge a day that has at least so many small files (default %(default)s)",
    )
    parser.add_argument(
        "--horizon-hours", type=float, default=delta.SAFE_HORIZON_HOURS, metavar="H",
        help="remove files that were replaced longer ago; readers and batches must be shorter (default %(default)s)",
    )  # fmt: skip
    catalog.add_arguments(parser)
    parser.add_argument("--no-vacuum", action="store_true", help="keep files that were replaced")


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    if arguments.horizon_hours < LEAST_HORIZON_HOURS:
        raise PipelineError(
            f"A horizon of {arguments.horizon_hours:g} hours would remove files of batches and readers that still run.",
            f"Use {LEAST_HORIZON_HOURS} hour or more.",
        )
    spark = session.open_session(session.options_of(arguments, "sluice compact"), lines)
    try:
        where = table.location(arguments.archive, arguments.format)
        table.read(spark, where)
        merge(spark, where, arguments, lines, stop)
        if not arguments.no_vacuum and not stop.asked:
            vacuum(spark, where, arguments.horizon_hours, lines)
    finally:
        spark.stop()
    return 0


def merge(spark: SparkSession, where: str, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> None:
    """Merge the small files. Raise PipelineError if another writer replaced the same files of a table that is no
    archive.
    """
    target = arguments.file_mb * MEGABYTE
    if not table.is_archive(spark, where):
        _merge_whole(spark, where, target, arguments.least_files, lines)
        return
    parts = worth_compacting(table.files(spark, where), target, arguments.least_files).collect()
    lines.say(
        f"{len(parts)} days of topics are worth merging, {sum(part.files for part in parts):,} files", event="begin"
    )
    for index, part in enumerate(parts, 1):
        if stop.asked:
            lines.say(f"stopped; {len(parts) - index + 1} days are left for the next time", event="end")
            return
        started = time.monotonic()
        day = f"topic = {literal(part.topic)} AND date = {literal(str(part.date))}"
        try:
            with Ticker(spark, lines, stop, "what was merged stays merged"):
                removed, added = table.rewrite(spark, where, day, target, ARCHIVE_CLUSTER)
        except Exception as error:
            # Another writer has replaced the same files in the meantime. The other days can still be merged.
            told = explain(error)
            if "Another writer" not in told.cause:
                raise
            lines.say(f"{part.topic} of {part.date} is left for the next time: {told.cause}", event="conflict")
            continue
        lines.say(
            f"{index} of {len(parts)}: {part.topic} of {part.date}, {removed:,} files into "
            f"{added:,} in {time.monotonic() - started:.1f} s",
            event="merged", removed=removed, added=added,
        )  # fmt: skip


def _merge_whole(spark: SparkSession, where: str, target: int, least_files: int, lines: Lines) -> None:
    started = time.monotonic()
    lines.say(f"merges the small files of {where}", event="begin")
    with Ticker(spark, lines):
        removed, added = table.merge_files(spark, where, target, least_files)
    lines.say(
        f"{removed:,} files into {added:,} in {time.monotonic() - started:.1f} s",
        event="merged", removed=removed, added=added,
    )  # fmt: skip


def vacuum(spark: SparkSession, where: str, hours: float, lines: Lines) -> None:
    doomed = table.vacuum(spark, where, hours)
    more = " or more" if doomed >= 1000 else ""  # Delta lists no more files than that
    lines.say(
        f"removed {doomed:,}{more} files that no version of the last {hours:g} hours names", event="end", removed=doomed
    )


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["compact", *sys.argv[1:]]))
