"""The job that fetches or lists the jars. See `jars.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import jars
from pipeline.progress import Progress, Stop

USES_SPARK = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="folder for the jars (default: the folder in which jobs look)"
    )
    parser.add_argument("--names", action="store_true", help="print their coordinates, and fetch nothing")
    parser.add_argument(
        "--list", action="store_true", help="print their paths, separated by commas, for spark-submit's --jars"
    )


def run(arguments: argparse.Namespace, progress: Progress, _stop: Stop) -> int:
    where = (arguments.to or jars.folder()).resolve()
    if arguments.names:
        print("\n".join(f"{group}:{artifact}:{version}" for group, artifact, version in jars.coordinates()))
    elif arguments.list:
        print(",".join(str(path) for path in jars.paths(where)))
    else:
        jars.fetch(where)
        progress.say(f"{len(jars.names())} jars are in {where}")
    return 0
