"""`sluice top`: lag of groups and rates of topics, measured between two looks, with any broker.

The one idea: a look reads the log ends and the commits at a moment. Two looks yield rates, so the first view appears
after one interval. Kafka's protocol carries no rates.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.commands import log
from gateway.commands.arguments import seconds
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.group_views import listed_groups, no_group, share_starts
from gateway.commands.groups import committed
from gateway.commands.live import DEFAULT_SECONDS, watch
from gateway.commands.log import TopicPartition
from gateway.commands.render import Row, json_text, show

GROUP_COLUMNS = ("group", "state", "partitions", "lag", "lag_per_s", "committed_per_s")
TOPIC_COLUMNS = ("topic", "partitions", "records", "appended_per_s")


@dataclass(frozen=True, slots=True)
class Group:
    state: str
    type: str
    offsets: Mapping[TopicPartition, int]
    lag: int | None
    """Number of records behind the log ends. None if nothing is committed, or if a partition does not answer."""


@dataclass(frozen=True, slots=True)
class Look:
    """Groups and log ends at one time of the monotonic clock."""

    at_s: float
    bounds: Mapping[TopicPartition, log.Bounds]
    groups: Mapping[str, Group]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", nargs="*", help="only these groups (all)")
    parser.add_argument(
        "--interval", type=seconds, default=DEFAULT_SECONDS, metavar="SECONDS", help=f"({DEFAULT_SECONDS:g})"
    )
    parser.add_argument("--once", action="store_true", help="print one view, of rates over one interval, and end")
    parser.set_defaults(command=top)


def top(cluster: Cluster, given: argparse.Namespace) -> int:
    view = _View(cluster, given)
    if given.once:
        time.sleep(given.interval)
        print(view.draw(), end="")
        return 0
    try:
        time.sleep(given.interval)
    except KeyboardInterrupt:
        return 0
    return watch(view.draw, given.interval)


class _View:
    def __init__(self, cluster: Cluster, given: argparse.Namespace) -> None:
        self._cluster = cluster
        self._given = given
        self._before = look(cluster, given.group)

    def draw(self) -> str:
        now = look(self._cluster, self._given.group)
        groups, topics = group_rows(self._before, now), topic_rows(self._before, now)
        self._before = now
        moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        if self._given.json:
            return json_text({"time": moment, "groups": groups, "topics": topics}) + "\n"
        out = io.StringIO()
        lag = sum(int(str(row["lag"])) for row in groups if row["lag"] is not None)
        out.write(f"{moment}  {len(groups)} groups, lag {lag}, {len(topics)} topics\n\n")
        show(groups, GROUP_COLUMNS, as_json=False, out=out)
        out.write("\n")
        show(topics, TOPIC_COLUMNS, as_json=False, out=out)
        return out.getvalue()


def look(cluster: Cluster, wanted: list[str]) -> Look:
    """Read the cluster. Raise CommandError if a requested group does not exist."""
    listed = {str(row["group"]): row for row in listed_groups(cluster)}
    for name in wanted:
        if name not in listed:
            raise CommandError(no_group(name, listed))
    names = wanted or sorted(listed)
    offsets: dict[str, dict[TopicPartition, int]] = {}
    share_lags: dict[str, int] = {}
    for name in names:
        offsets[name] = {key: commit.offset for key, commit in committed(cluster, name).items()}
        if listed[name]["type"] == "share":
            starts = share_starts(cluster, name)
            offsets[name] = {key: start for key, (start, _) in starts.items()}
            share_lags[name] = sum(lag for _, lag in starts.values())
    partitions = [
        (topic.name or "", partition.partition_index)
        for topic in cluster.metadata().topics
        if not topic.is_internal and not topic.error_code
        for partition in topic.partitions
    ]
    bounds = log.bounds(cluster, partitions)
    groups: dict[str, Group] = {}
    for name in names:
        behind = [
            max(bounds[key].end - max(offset, bounds[key].start), 0)
            for key, offset in offsets[name].items()
            if key in bounds
        ]
        # If a partition does not answer, the lag of the group is unknown.
        lag = share_lags.get(name, sum(behind) if behind and len(behind) == len(offsets[name]) else None)
        groups[name] = Group(str(listed[name]["state"]), str(listed[name]["type"]), offsets[name], lag)
    return Look(time.monotonic(), bounds, groups)


def group_rows(before: Look, now: Look) -> list[Row]:
    """Return a row per group, the largest lag first. An unknown rate is None."""
    elapsed_s = now.at_s - before.at_s
    rows: list[Row] = []
    for name, group in now.groups.items():
        earlier = before.groups.get(name)
        lag_rate = committed_rate = None
        if earlier is not None:
            # A reset backwards is no progress, so only advances count.
            moved = [max(offset - earlier.offsets[key], 0) for key, offset in group.offsets.items()
                     if key in earlier.offsets]  # fmt: skip
            committed_rate = round(sum(moved) / elapsed_s, 1)
            if group.lag is not None and earlier.lag is not None:
                lag_rate = round((group.lag - earlier.lag) / elapsed_s, 1)
        rows.append(
            {
                "group": name,
                "type": group.type,
                "state": group.state,
                "partitions": len(group.offsets),
                "lag": group.lag,
                "lag_per_s": lag_rate,
                "committed_per_s": committed_rate,
            }
        )
    return sorted(rows, key=lambda row: (-int(str(row["lag"] or 0)), str(row["group"])))


def topic_rows(before: Look, now: Look) -> list[Row]:
    """Return a row per topic, the highest rate first. A topic that is new has no rate yet."""
    elapsed_s = now.at_s - before.at_s
    rows: list[Row] = []
    for name in sorted({topic for topic, _ in now.bounds}):
        keys = [key for key in now.bounds if key[0] == name]
        known = [key for key in keys if key in before.bounds]
        appended = sum(max(now.bounds[key].end - before.bounds[key].end, 0) for key in known)
        rows.append(
            {
                "topic": name,
                "partitions": len(keys),
                "records": sum(now.bounds[key].end - now.bounds[key].start for key in keys),
                "appended_per_s": round(appended / elapsed_s, 1) if known else None,
            }
        )
    return sorted(rows, key=lambda row: -float(str(row["appended_per_s"] or 0)))
