"""Plan the target topics of a replay: partitions, settings, and whether they can hold the replayed records.

Replayed records keep their timestamps by default, so a restored topic is as old as its archive. A retention that suited
the source then empties the target minutes after the replay. Created topics therefore keep everything until the operator
sets a retention, and a retention that the operator asked for is refused if it would remove records. For the same reason
a created topic accepts the producer's timestamps, however old they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.kafka import Log, Partition
from pipeline.replay.plan import Plan

UNLIMITED = "-1"
RETENTION_MS = "retention.ms"
RETENTIONS = (RETENTION_MS, "retention.bytes")
TIMESTAMP_TYPE = "message.timestamp.type"
CREATE_TIME = "CreateTime"
# With these settings a broker refuses records that are old when they arrive, and all replayed records are old.
_AGE_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.difference.max.ms")
# These settings describe nodes of the source cluster, not the topic.
_PLACED = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


@dataclass(frozen=True, slots=True)
class Target:
    """A topic to create: its partition count and its settings. `unlimited` lists the retention settings that were
    lifted.
    """

    topic: str
    partitions: int
    settings: Mapping[str, str]
    unlimited: Mapping[str, str]
    """Each lifted retention setting and the source's own value, which is empty if the source used
    its broker's default.
    """


def targets(
    asked: Plan,
    archived: Iterable[Partition],
    sources: Mapping[str, Mapping[str, str]],
    given: Mapping[str, str],
) -> list[Target]:
    """Return the topics that a replay needs, as they would be created.

    `archived` holds every partition of the archive, empty ones too. `sources` holds each source topic's own settings.
    `given` holds the operator's settings, which take precedence.
    """
    highest: dict[str, int] = dict.fromkeys(asked.topics, 0)
    for source, partition in archived:
        if source in highest:
            highest[source] = max(highest[source], asked.target(source, partition)[1], 0)
            if asked.by_key is not None:
                highest[source] = asked.by_key - 1 if asked.by_key else max(highest[source], partition)
    found: list[Target] = []
    for source, topic in sorted(asked.topics.items(), key=lambda pair: pair[1]):
        settings = {name: value for name, value in sources.get(source, {}).items() if name not in _PLACED}
        if asked.timestamps == "keep":
            settings = {name: value for name, value in settings.items() if name not in _AGE_LIMITS}
            settings |= {TIMESTAMP_TYPE: CREATE_TIME} if TIMESTAMP_TYPE in settings else {}
        policy = given.get("cleanup.policy", settings.get("cleanup.policy", "delete"))
        lifted: dict[str, str] = {}
        if "delete" in policy and asked.timestamps == "keep":
            lifted = {name: settings.get(name, "") for name in RETENTIONS if name not in given}
        settings |= dict.fromkeys(lifted, UNLIMITED)
        found.append(Target(topic, highest[source] + 1, {**settings, **given}, lifted))
    return found


def check_given(given: Mapping[str, str]) -> None:
    """Raise PipelineError if a retention in --topic-config is no whole number."""
    for name in RETENTIONS:
        if name in given and not re.fullmatch(r"-?[0-9]+", given[name]):
            raise PipelineError(
                f"--topic-config {name}={given[name]} is no whole number.",
                "Write a number of milliseconds or bytes, or -1 for no limit.",
            )


def check_timestamps(topic: str, config: Mapping[str, str]) -> None:
    """Raise PipelineError if a topic with these settings would replace the timestamps that a replay must keep."""
    if config.get(TIMESTAMP_TYPE, CREATE_TIME) != CREATE_TIME:
        raise PipelineError(
            f"The topic {topic} has {TIMESTAMP_TYPE}={config[TIMESTAMP_TYPE]}, so its broker would replace the "
            "timestamps of the replayed records.",
            f"Set the topic's {TIMESTAMP_TYPE} to {CREATE_TIME}, or use --timestamps now.",
        )


def expiring(retention_ms: str | None, policy: str | None, oldest_ms: int | None, now_ms: int) -> bool:
    """Return whether retention by time would remove a record of `oldest_ms`. `policy` is the topic's cleanup.policy."""
    if oldest_ms is None or retention_ms is None or "delete" not in (policy or "delete"):
        return False
    limit = int(retention_ms)
    return limit >= 0 and oldest_ms < now_ms - limit


def check_held(bases: Mapping[Partition, int], records: Mapping[Partition, int], logs: Iterable[Log]) -> int:
    """Return how many replayed records the targets have. Raise PipelineError if a partition no longer has all of them.

    `bases` are the ends of the target partitions before the replay, and `records` is the number of records that the
    replay wrote to each.
    """
    held = {(log.topic, log.partition): log for log in logs}
    for key, count in sorted(records.items()):
        if not count:
            continue
        log, base = held.get(key), bases[key]
        name = f"{key[0]}-{key[1]}"
        if log is None:
            raise PipelineError(
                f"The target {name} has been deleted after {count:,} records were written to it.",
                "Replay again under another --name.",
            )
        if log.end < base + count:
            raise PipelineError(
                f"The target {name} ends at offset {log.end:,}, but the replay wrote up to {base + count:,}.",
                "Look at the brokers' logs; then replay again under another --name, into a new topic.",
            )
        if log.start > base:
            gone = min(log.start, base + count) - base
            raise PipelineError(
                f"The target {name} no longer holds {gone:,} of the {count:,} records that were replayed: it begins "
                f"at offset {log.start:,}, the replay began at {base:,}.",
                "Set the topic's retention.ms and retention.bytes to -1, and replay again under another --name, "
                "into a new topic.",
            )
    return sum(records.values())
