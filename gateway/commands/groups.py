"""`sluice groups`: list, describe, lag, reset-offsets, delete; `history` is in `history.py`.

The one idea: everything here uses Kafka's protocol, so it shows what any client sees, of this gateway or of any broker.
Offsets are moved only if the group has no members, as the broker itself demands. Without --execute a reset only shows
what it would do.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.commands import log
from gateway.commands.arguments import seconds
from gateway.commands.client import Cluster, refuse
from gateway.commands.errors import CommandError, remark
from gateway.commands.group_views import listed_groups, no_group, share_starts, view
from gateway.commands.live import DEFAULT_SECONDS, watch
from gateway.commands.log import TopicPartition
from gateway.commands.refusals import reason
from gateway.commands.render import Row, json_text, ranges, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from protocol.errors import ErrorCode

EMPTY_STATES = frozenset({"Empty", "Dead"})
_OFFSET_FETCH_OF_ONE_GROUP = 7
_OFFSET_COMMIT_BY_NAME = 9
_PARTITION_COLUMNS = (
    *("topic", "partition", "committed", "log_start", "log_end", "lag", "never_committed", "owner", "handoff"),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A group's commit for a partition."""

    offset: int
    metadata: str


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", action="append", default=[], help="only groups in this state; may be repeated")
    parser.set_defaults(command=list_groups)


def add_describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group")
    parser.add_argument(
        "-w",
        "--watch",
        type=seconds,
        nargs="?",
        const=DEFAULT_SECONDS,
        metavar="SECONDS",
        help=f"show it again and again, until Ctrl-C ({DEFAULT_SECONDS:g})",
    )
    parser.set_defaults(command=describe_group)


def add_lag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", nargs="*")
    parser.add_argument("--by-partition", action="store_true", help="a line per partition instead of one per group")
    parser.set_defaults(command=show_lag)


def add_reset_offsets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to-earliest", action="store_true", help="the log's start")
    where.add_argument("--to-latest", action="store_true", help="the log's end")
    where.add_argument("--to-offset", type=int, metavar="OFFSET", help="held within the log")
    where.add_argument("--to-time", type=_time_ms, metavar="ISO8601", help="the first record at or after a time (UTC)")
    where.add_argument("--shift-by", type=int, metavar="RECORDS", help="from what is committed; held within the log")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--topic", action="append", metavar="TOPIC[:PARTITION,...]", help="may be repeated")
    what.add_argument("--all-topics", action="store_true", help="every topic the group has committed for")
    parser.add_argument("--execute", action="store_true", help="commit them")
    parser.set_defaults(command=reset_offsets)


def add_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", nargs="+")
    parser.set_defaults(command=delete_groups)


def _time_ms(text: str) -> int:
    try:
        return log.time_ms(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write e.g. 2026-01-31T12:00:00") from None


# --- list, describe, delete -------------------------------------------------------------------------------------------


def list_groups(cluster: Cluster, given: argparse.Namespace) -> int:
    rows = listed_groups(cluster)
    wanted = {state.lower() for state in given.state}
    if wanted:
        rows = [row for row in rows if str(row["state"]).lower() in wanted]
    show(rows, ("group", "type", "state", "protocol_type", "broker"), as_json=given.json)
    return 0


def describe_group(cluster: Cluster, given: argparse.Namespace) -> int:
    if given.watch is not None:
        return watch(lambda: _described(cluster, given)[0], given.watch)
    text, silent = _described(cluster, given)
    print(text, end="")
    return _report_silent(silent)


def _described(cluster: Cluster, given: argparse.Namespace) -> tuple[str, set[str]]:
    """Return the text for a person or a program, and the partitions that do not answer."""
    group = view(cluster, given.group)
    partitions = _partition_rows(cluster, given.group, group.owners, group.pending)
    silent = _silent(partitions)
    head = {
        "group": group.group_id,
        "type": group.type,
        "state": group.state,
        "protocol_type": group.protocol_type,
        "assignor": group.assignor,
        "members": len(group.members),
        "lag": _sum(partitions, "lag"),
        "never_committed": _sum(partitions, "never_committed"),
    }
    out = io.StringIO()
    if given.json:
        whole = {**head, "members": group.members, "partitions": partitions}
        if given.watch is not None:
            return json_text(whole) + "\n", silent
        show([whole], (), as_json=True, out=out)
        return out.getvalue(), silent
    show([head], tuple(head), as_json=False, out=out)
    for title, rows, columns in (
        ("Members", group.members, ("member", "instance", "client", "host", "assigned")),
        ("Partitions", partitions, _PARTITION_COLUMNS),
    ):
        out.write(f"\n{title}\n")
        if rows:
            show(rows, columns, as_json=False, out=out)
        else:
            out.write("none\n")
    return out.getvalue(), silent


def _silent(partitions: Sequence[Row]) -> set[str]:
    """Return the partitions that do not answer. The sum of the lag leaves them out."""
    return {
        f"{row['topic']}[{row['partition']}]" for row in partitions if row["log_end"] is None and row["lag"] is None
    }


def _report_silent(silent: Collection[str]) -> int:
    """Name the partitions that do not answer, and return the exit code."""
    if silent:
        remark(f"the log of {', '.join(sorted(silent))} does not answer now, and the lag leaves it out: run this again")
    return 1 if silent else 0


def delete_groups(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse

    def code(response: DeleteGroupsResponse) -> int:
        return response.results[0].error_code

    failed = 0
    rows: list[Row] = []
    for group_id in dict.fromkeys(given.group):
        response = cluster.ask_coordinator(
            DeleteGroupsResponse, group_id, DeleteGroupsRequest(groups_names=(group_id,)), code
        )
        if code(response) == ErrorCode.GROUP_ID_NOT_FOUND:
            result = no_group(group_id, [str(row["group"]) for row in listed_groups(cluster)])
        else:
            result = _result(group_id, code(response))
        failed += code(response) != 0
        rows.append({"group": group_id, "result": "deleted" if result is None else result})
    show(rows, ("group", "result"), as_json=given.json)
    return 1 if failed else 0


def _result(group_id: str, code: int) -> str | None:
    if not code:
        return None
    if code == ErrorCode.NON_EMPTY_GROUP:
        return "has members: stop its consumers first"
    return reason(code, needs=f"--operation delete --group {group_id}")


# --- offsets ----------------------------------------------------------------------------------------------------------


def show_lag(cluster: Cluster, given: argparse.Namespace) -> int:
    known = [str(row["group"]) for row in listed_groups(cluster)]
    names: list[str] = list(dict.fromkeys(given.group)) or known
    absent: list[str] = []
    silent: set[str] = set()
    rows: list[Row] = []
    for group_id in names:
        partitions = _partition_rows(cluster, group_id, _owners(cluster, group_id) if group_id in known else {})
        if not partitions and group_id not in known:
            absent.append(no_group(group_id, known))
            continue
        silent |= _silent(partitions)
        if given.by_partition:
            rows += [{"group": group_id, **row} for row in partitions]
            continue
        lags = [int(str(row["lag"])) for row in partitions if row["lag"] is not None]
        rows.append(
            {
                "group": group_id,
                "partitions": len(partitions),
                "lag": _sum(partitions, "lag"),
                "most_of_one": max(lags, default=None),
                "never_committed": _sum(partitions, "never_committed"),
            }
        )
    columns = ("group", "partitions", "lag", "most_of_one", "never_committed")
    if given.by_partition:
        columns = ("group", "topic", "partition", "committed", "log_end", "lag", "never_committed")
    if absent and not rows:
        raise CommandError("; ".join(absent))
    show(rows, columns, as_json=given.json)
    for said in absent:
        remark(said)
    return max(_report_silent(silent), 1 if absent else 0)


def _sum(rows: Sequence[Row], column: str) -> int | None:
    """Return the sum of a column, or None if no row has a value: unknown is not zero."""
    known = [int(str(row[column])) for row in rows if row[column] is not None]
    return sum(known) if known else None


def _owners(cluster: Cluster, group_id: str) -> Mapping[TopicPartition, str]:
    try:
        return view(cluster, group_id).owners
    except CommandError:
        return {}  # the group was deleted after it was listed


def _partition_rows(
    cluster: Cluster,
    group_id: str,
    owners: Mapping[TopicPartition, str],
    pending: Collection[TopicPartition] = (),
) -> list[Row]:
    """Return one row per partition with the group's commit and owner, or a share group's start, and the log's bounds.
    An unknown value is None.

    All partitions of a topic for which the group has committed are listed. Without a commit the lag is unknown: a new
    member reads `never_committed` records if its auto.offset.reset is earliest, and none of them if it is latest.
    """
    commits = committed(cluster, group_id)
    starts = share_starts(cluster, group_id) if not commits else {}
    wanted = sorted(
        commits.keys() | owners.keys() | starts.keys() | _all_partitions(cluster, {topic for topic, _ in commits})
    )
    bounds = log.bounds(cluster, wanted)
    rows: list[Row] = []
    for topic, partition in wanted:
        found = bounds.get((topic, partition))
        commit = commits.get((topic, partition))
        offset, lag = starts.get((topic, partition), (None if commit is None else commit.offset, None))
        if found is not None and commit is not None:
            lag = max(found.end - max(commit.offset, found.start), 0)
        rows.append(
            {
                "topic": topic,
                "partition": partition,
                "committed": offset,
                "log_start": None if found is None else found.start,
                "log_end": None if found is None else found.end,
                "lag": lag,
                "never_committed": found.end - found.start if found is not None and offset is None else None,
                "owner": owners.get((topic, partition)),
                "handoff": "pending" if (topic, partition) in pending else None,
            }
        )
    return rows


def _all_partitions(cluster: Cluster, names: Collection[str]) -> set[TopicPartition]:
    """Return all partitions of those topics that still exist."""
    if not names:
        return set()
    return {
        (topic.name or "", partition.partition_index)
        for topic in cluster.metadata(sorted(names)).topics
        if not topic.error_code
        for partition in topic.partitions
    }


def committed(
    cluster: Cluster, group_id: str, *, unstable: set[TopicPartition] | None = None
) -> dict[TopicPartition, Commit]:
    """Return the commits of a group; none if the group does not exist.

    If `unstable` is given, add the partitions whose offsets an open transaction is about to replace. They have no
    commit in the result.
    """
    from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchResponse

    def code(response: OffsetFetchResponse) -> int:
        return response.error_code

    response = cluster.ask_coordinator(
        OffsetFetchResponse,
        group_id,
        OffsetFetchRequest(group_id=group_id, topics=None, require_stable=unstable is not None),
        code,
        at_most=_OFFSET_FETCH_OF_ONE_GROUP,
    )
    refuse(response.error_code, f"offsets of group {group_id}", needs=f"--operation describe --group {group_id}")
    found: dict[TopicPartition, Commit] = {}
    for topic in response.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            if partition.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT and unstable is not None:
                unstable.add(key)
            elif not partition.error_code and partition.committed_offset >= 0:
                found[key] = Commit(partition.committed_offset, partition.metadata or "")
    return found


def reset_offsets(cluster: Cluster, given: argparse.Namespace) -> int:
    group_id: str = given.group
    commits = committed(cluster, group_id)
    wanted = _wanted_partitions(cluster, given, commits)
    known = [] if commits else [str(row["group"]) for row in listed_groups(cluster)]
    if not wanted:
        if group_id not in known:
            raise CommandError(no_group(group_id, known))
        raise CommandError(f"group {group_id} has committed nothing; name topics with --topic")
    is_new = not commits and group_id not in known
    rows: list[Row] = []
    targets: dict[TopicPartition, Commit] = {}
    for (topic, partition), target in _targets(cluster, given, wanted, commits).items():
        commit = commits.get((topic, partition))
        targets[topic, partition] = Commit(target, "")
        rows.append(
            {
                "topic": topic,
                "partition": partition,
                "committed": None if commit is None else commit.offset,
                "new": target,
                "moved": None if commit is None else target - commit.offset,
            }
        )
    if given.execute:
        _demand_no_members(cluster, group_id)
        commit_offsets(cluster, group_id, targets)
    show(rows, ("topic", "partition", "committed", "new", "moved"), as_json=given.json)
    if is_new:
        remark(f"group {group_id} is new{did_you_mean(group_id, known, SUGGESTIONS)}")
    if not given.json:
        print("\nCommitted." if given.execute else "\nNothing was changed; --execute commits this.")
    return 0


def _demand_no_members(cluster: Cluster, group_id: str) -> None:
    try:
        state = view(cluster, group_id).state
    except CommandError:
        return  # if the group does not exist yet, the first commit creates it
    if state not in EMPTY_STATES:
        raise CommandError(f"group {group_id} is {state}: stop its consumers, then run this again")


def _wanted_partitions(
    cluster: Cluster, given: argparse.Namespace, commits: Mapping[TopicPartition, Commit]
) -> list[TopicPartition]:
    if given.all_topics:
        return sorted(commits)
    wanted: list[TopicPartition] = []
    for text in given.topic:
        name, colon, listed = str(text).partition(":")
        (topic,) = cluster.topics((name,))
        present = {partition.partition_index for partition in topic.partitions}
        try:
            numbers = {int(number) for number in listed.split(",")} if colon else present
        except ValueError:
            raise CommandError(f"--topic {text}: write TOPIC or TOPIC:0,1,2") from None
        if numbers - present:
            raise CommandError(f"topic {name} has no partition {ranges(numbers - present)}")
        wanted += [(name, number) for number in sorted(numbers)]
    return sorted(set(wanted))


def _targets(
    cluster: Cluster,
    given: argparse.Namespace,
    wanted: Sequence[TopicPartition],
    commits: Mapping[TopicPartition, Commit],
) -> dict[TopicPartition, int]:
    bounds = log.bounds(cluster, wanted)
    log.demand_answers(wanted, bounds)
    # As Kafka's own tool does, count the records of open transactions. A later commit makes them readable.
    ends = log.high_watermarks(cluster, wanted)
    log.demand_answers(wanted, ends)
    at_time = log.offsets_at(cluster, wanted, given.to_time) if given.to_time is not None else {}
    targets: dict[TopicPartition, int] = {}
    for key in wanted:
        start, end = bounds[key].start, ends[key]
        if given.to_earliest:
            target = start
        elif given.to_latest:
            target = end
        elif given.to_offset is not None:
            target = given.to_offset
        elif given.to_time is not None:
            target = at_time.get(key, end)
        elif key in commits:
            target = commits[key].offset + given.shift_by
        else:
            topic, partition = key
            raise CommandError(f"nothing is committed for {topic}[{partition}], so there is nothing to shift")
        targets[key] = min(max(target, start), end)
    return targets


def commit_offsets(cluster: Cluster, group_id: str, targets: Mapping[TopicPartition, Commit]) -> None:
    """Commit for a group without members. Raise CommandError if the group has members."""
    from protocol.messages.offset_commit import (
        OffsetCommitRequest,
        OffsetCommitRequestPartition,
        OffsetCommitRequestTopic,
        OffsetCommitResponse,
    )

    topics = tuple(
        OffsetCommitRequestTopic(
            name=name,
            partitions=tuple(
                OffsetCommitRequestPartition(
                    partition_index=partition, committed_offset=each.offset, committed_metadata=each.metadata
                )
                for (topic, partition), each in targets.items()
                if topic == name
            ),
        )
        for name in sorted({topic for topic, _ in targets})
    )

    def code(response: OffsetCommitResponse) -> int:
        return next((p.error_code for topic in response.topics for p in topic.partitions if p.error_code), 0)

    response = cluster.ask_coordinator(
        OffsetCommitResponse,
        group_id,
        OffsetCommitRequest(group_id=group_id, topics=topics),
        code,
        at_most=_OFFSET_COMMIT_BY_NAME,
    )
    if code(response) == ErrorCode.UNKNOWN_MEMBER_ID:
        raise CommandError(f"group {group_id} has members: stop its consumers, then run this again")
    refuse(code(response), f"offsets of group {group_id}", needs=f"--operation read --group {group_id}")
