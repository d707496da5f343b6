"""Write a manifest of an archive, so that the archive can be proved after its topics have forgotten the records.

The one idea: make the manifest after `verify` has proved that the archive equals its topics. Later, `verify --manifest`
compares the archive, or a copy of it in either format, with the manifest.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pipeline import catalog, session, table
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Range
from pipeline.archive.transforms import within
from pipeline.errors import PipelineError
from pipeline.manifest import signature
from pipeline.manifest.document import Day, Manifest, days_of, differences
from pipeline.manifest.sums import block_hashes
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.ticker import Ticker

_SIGNED = "sluice manifest "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the manifest, a file of JSON")
    parser.add_argument("--topics", default="", metavar="A,B", help="only these of the archive's topics")
    parser.add_argument("--key", type=Path, metavar="FILE", help="sign with this Ed25519 private key in PEM")
    catalog.add_arguments(parser)


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    spark = session.open_session(session.options_of(arguments, "sluice manifest"), lines)
    try:
        make(spark, arguments, lines, stop)
    finally:
        spark.stop()
    return 0


def make(spark: SparkSession, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> None:
    """Write the manifest. Raise PipelineError if there is no archive, or the key cannot sign."""
    where, started = table.location(arguments.archive, arguments.format), time.monotonic()
    # Read the progress first. Then the frame has at least the offsets that the progress claims.
    progress = last_progress(spark, where) if table.exists(spark, where) else None
    records = table.read(spark, where)
    if progress is None:
        raise PipelineError(f"{where} holds no archive yet.", "Run `sluice-pipeline archive` first.")
    manifest = Manifest({key: (progress.first[key], end) for key, end in progress.next.items()}, progress.topic_ids, ())
    only = [name for name in arguments.topics.split(",") if name]
    manifest = manifest.only(only) if only else manifest
    manifest = dataclasses.replace(manifest, days=days(spark, records, manifest, lines, stop))
    if arguments.key is not None:
        signed = signature.sign(spark, signed_text(manifest), arguments.key)
        manifest = dataclasses.replace(manifest, signature=signed)
    write(arguments.out, manifest.to_json())
    lines.step(
        f"{arguments.out} names {len(manifest.days)} days of partitions, root {manifest.root}", manifest.records,
        time.monotonic() - started, event="end", root=manifest.root, days=len(manifest.days),
    )  # fmt: skip


def write(path: Path, text: str) -> None:
    """Write a file in one step. Readers see either the whole text or the previous file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def read(spark: SparkSession, path: Path, public_key: Path | None, lines: Lines) -> Manifest:
    """Return the manifest in a file. Raise PipelineError if the manifest was changed, or if it was not signed with the
    requested key.
    """
    try:
        manifest = Manifest.from_json(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"The manifest cannot be read: {error}.", "Check --manifest.") from error
    if public_key is None:
        lines.say(f"the signature of {path} is not checked; name its key with --public-key", event="unsigned")
    elif manifest.signature is None or not signature.is_signed(
        spark, signed_text(manifest), manifest.signature, public_key
    ):
        raise PipelineError(
            f"{path} is not signed with the key of {public_key}.",
            "Check both files, or use an unchanged copy of the manifest.",
        )
    return manifest


def compare(spark: SparkSession, where: str, manifest: Manifest, lines: Lines, stop: Stop) -> list[str]:
    """Return the differences between an archive and a manifest, in words."""
    found = days(spark, table.read(spark, where), manifest, lines, stop)
    return list(differences(manifest, found))


def days(spark: SparkSession, records: DataFrame, manifest: Manifest, lines: Lines, stop: Stop) -> tuple[Day, ...]:
    """Return the days of the records that the manifest claims."""
    ranges = [Range(*key, *span) for key, span in sorted(manifest.claim.items())]
    lines.say(f"hashes the records of {len(ranges)} partitions", event="hashes")
    with Ticker(spark, lines, stop):
        rows = block_hashes(within(records, ranges)).orderBy("topic", "partition", "date", "block").collect()
    return days_of(rows)


def signed_text(manifest: Manifest) -> bytes:
    """Return the text that a signature of the manifest signs."""
    return (_SIGNED + manifest.root).encode()


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["manifest", *sys.argv[1:]]))
