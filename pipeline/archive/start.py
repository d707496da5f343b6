"""Turn `--from` into the first offset of each partition."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pipeline.errors import PipelineError
from pipeline.kafka import Cluster, Log, Partition


def starting_offsets(
    cluster: Cluster, logs: Sequence[Log], start: str, begun: Collection[Partition] = ()
) -> dict[Partition, int]:
    """Return the first offset to archive of each log. A partition that the JSON omits begins at its earliest offset.

    The archive holds the partitions `begun` already. Raise PipelineError if the JSON names any other partition.
    """
    if start == "earliest":
        return {(log.topic, log.partition): log.start for log in logs}
    if start == "latest":
        return {(log.topic, log.partition): log.end for log in logs}
    if start.lstrip().startswith("{"):
        return from_json(start, logs, begun)
    found = cluster.at_time([(log.topic, log.partition) for log in logs], milliseconds(start))
    # If every record is older than the time, the archive begins with the next new record.
    return {
        (log.topic, log.partition): log.end if (offset := found.get((log.topic, log.partition), -1)) < 0 else offset
        for log in logs
    }


def from_json(text: str, logs: Sequence[Log], begun: Collection[Partition] = ()) -> dict[Partition, int]:
    try:
        told: Mapping[str, Mapping[str, Any]] = json.loads(text)
        wanted = {(topic, int(partition)): int(at) for topic, of in told.items() for partition, at in of.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise PipelineError(
            f"--from {text} is not JSON of topics, partitions and offsets ({error}).",
            'Write it like {"orders": {"0": 1200, "1": 980}}.',
        ) from error
    for topic, partition in sorted(wanted.keys() - {(log.topic, log.partition) for log in logs} - set(begun)):
        raise PipelineError(
            f"--from names {topic}-{partition}, which is not archived.",
            "Check its topics and partitions against --topics, --pattern and a listing of topics.",
        )
    for log in logs:
        offset = wanted.get((log.topic, log.partition), log.start)
        if not 0 <= offset <= log.end:
            raise PipelineError(
                f"--from names offset {offset:,} of {log.topic}-{log.partition}, whose log ends at {log.end:,}.",
                "Name an offset from 0 up to the end of the log, or begin at earliest or latest.",
            )
    return {(log.topic, log.partition): wanted.get((log.topic, log.partition), log.start) for log in logs}


def milliseconds(text: str) -> int:
    """Return a time, given as ISO 8601 (in UTC unless it names a zone) or as milliseconds since 1970."""
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(
            f"{text} is no time.", "Write it like 2026-01-31T12:00:00Z, or as milliseconds since 1970."
        ) from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
