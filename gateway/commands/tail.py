"""`sluice topics tail`: print the last records of a topic, and, if requested, continue with new ones."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.log import bounds, demand_answers
from gateway.commands.reader import Reader
from gateway.commands.render import json_text
from protocol.records import Record
from protocol.shown import shown

FOLLOW_WAIT_MS = 500


def tail_topic(cluster: Cluster, given: argparse.Namespace) -> int:
    if given.records < 0:
        raise CommandError("-n wants a number from 0 on")
    (topic,) = cluster.topics((given.topic,))
    present = sorted(partition.partition_index for partition in topic.partitions)
    wanted: list[int] = given.partition or present
    if set(wanted) - set(present):
        raise CommandError(f"topic {given.topic} has partitions {present[0]} to {present[-1]}")
    keys = [(given.topic, partition) for partition in wanted]
    found_bounds = bounds(cluster, keys)
    demand_answers(keys, found_bounds)
    positions: dict[int, int] = {}
    ends: dict[int, int] = {}
    for (_, partition), found in found_bounds.items():
        start = found.start if given.from_beginning else max(found.start, found.end - given.records)
        positions[partition], ends[partition] = start, found.end
    reader = Reader(cluster, given.topic, positions)
    try:
        while left := [partition for partition in positions if positions[partition] < ends[partition]]:
            for partition, record in reader.read(left, max_wait_ms=FOLLOW_WAIT_MS):
                _print_record(given, partition, record)
        while given.follow:
            for partition, record in reader.read(sorted(positions), max_wait_ms=FOLLOW_WAIT_MS):
                _print_record(given, partition, record)
    except KeyboardInterrupt:
        return 0
    return 0


def _print_record(given: argparse.Namespace, partition: int, record: Record) -> None:
    if given.json:
        print_json(given.topic, partition, record)
        if given.follow:
            sys.stdout.flush()
        return
    head = f"{partition}:{record.offset}  {_moment(record.timestamp)}  {_shown(record.key)}"
    sys.stdout.write(f"{head}  {_shown(record.value)}\n")
    if given.follow:
        sys.stdout.flush()


def _moment(timestamp_ms: int) -> str:
    """Return a time in ISO 8601, or the number of milliseconds if no calendar has its year."""
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms"
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def print_json(topic: str, partition: int, record: Record) -> None:
    """Print a record as one line of JSON."""
    fields = {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp,
        "key": _text(record.key),
        "value": _text(record.value),
        "headers": [[name, _text(value)] for name, value in record.headers],
    }
    print(json_text(fields))


def _text(value: bytes | None) -> str | None:
    r"""Return the value as text; bytes that are not text become \x.. escapes."""
    return None if value is None else value.decode(errors="backslashreplace")


def _shown(value: bytes | None) -> str:
    if value is None:
        return "null"
    return shown(value.decode(errors="backslashreplace"), None)
