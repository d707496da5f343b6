"""`sluice groups history`: what happened to a group, in words.

The one idea: this is the one command that is not a client. Kafka has no request for the past, so it reads the journal
in the database of `--database-url`, or behind the socket of a running `sluice serve` of the same data directory. It
only reads, and changes no schema.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from gateway.commands.errors import CommandError, remark
from gateway.commands.render import Row, json_text, ranges, show
from gateway.config.settings import Settings, hide_password
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from protocol.errors import ErrorCode
from protocol.shown import shown
from storage.embedded_socket import running_url
from storage.errors import StorageError, StorageUnavailable
from storage.journal import GroupHistory, JournalStore
from storage.pool import Database

DEFAULT_EVENTS = 200
MAX_EVENTS = 100_000
DETAILS_PER_EVENT = 50
"""Partitions and refused commits that are read per requested event."""

RECENT_EVENTS = 20_000
"""Events of the journal among which the groups with a similar name are searched."""
FOLLOW_INTERVAL_S = 1.0
"""Pause between two reads of the journal."""

EXIT_FAILED = 1

Record = Mapping[str, Any]


def add_history(parser: argparse.ArgumentParser, settings: Callable[[argparse.Namespace], Settings]) -> None:
    """Add the arguments of `groups history`; `settings` says where the journal is."""
    parser.add_argument("group")
    parser.add_argument(
        "--last", type=_count, default=DEFAULT_EVENTS, metavar="EVENTS", help=f"how many events ({DEFAULT_EVENTS})"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table; a line per event with --follow")

    def run_given(given: argparse.Namespace) -> int:
        return run(given, settings(given))

    parser.set_defaults(run=run_given)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= MAX_EVENTS:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {MAX_EVENTS}")
    return int(text)


def run(given: argparse.Namespace, settings: Settings) -> int:
    try:
        url = settings.database_url or running_url(settings.data_dir)
        if url is None:
            raise CommandError(
                f"no gateway serves from {settings.data_dir.absolute()}: give --config, --database-url or --data-dir"
            )
        if given.follow:
            return _follow(url, given)
        rows = told(asyncio.run(_read(url, given.group, given.last)))
        if not rows:
            known = asyncio.run(_groups(url))
            hint = did_you_mean(given.group, known, SUGGESTIONS)
            raise CommandError(f"the journal has no rows of group {given.group}{hint}")
    except (CommandError, StorageError) as error:
        remark(str(error))
        return EXIT_FAILED
    show(rows, ("time", "generation", "state", "what"), as_json=given.json)
    return 0


def _follow(url: str, given: argparse.Namespace) -> int:
    """Print the events, then each new one. The journal numbers its rows in the order in which they become visible."""
    try:
        asyncio.run(_print_new(url, given))
    except KeyboardInterrupt:
        return 0
    return 0


async def _print_new(url: str, given: argparse.Namespace) -> None:
    last_seq = -1
    async with _journal(url) as journal:
        while True:
            found = await journal.history(given.group, given.last, given.last * DETAILS_PER_EVENT)
            for row in told(found):
                seq = int(str(row["seq"]))
                if seq > last_seq:
                    print(json_text(dict(row)) if given.json else _line(row))
                    last_seq = seq
            sys.stdout.flush()
            await asyncio.sleep(FOLLOW_INTERVAL_S)


def _line(row: Row) -> str:
    generation, state = ("-" if row[name] is None else str(row[name]) for name in ("generation", "state"))
    return f"{row['time']}  {generation:>10}  {state:<19}  {shown(str(row['what']), None)}"


async def _read(url: str, group_id: str, last: int) -> GroupHistory:
    async with _journal(url) as journal:
        return await journal.history(group_id, last, last * DETAILS_PER_EVENT)


async def _groups(url: str) -> list[str]:
    async with _journal(url) as journal:
        return await journal.groups(RECENT_EVENTS)


@asynccontextmanager
async def _journal(url: str) -> AsyncGenerator[JournalStore]:
    """Yield the journal. Raise CommandError if the database does not respond."""
    try:
        database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
        try:
            yield JournalStore(database)
        finally:
            await database.close()
    except StorageUnavailable as error:
        place = hide_password(url)
        raise CommandError(f"{place} does not answer ({error}): check --database-url") from error
    except StorageError as error:
        raise CommandError(f"no journal can be read in {hide_password(url)}: {error}") from error


# --- words ------------------------------------------------------------------------------------------------------------


def told(history: GroupHistory) -> list[Row]:
    """Return the events, oldest first. Partitions that one member received, or released, at one time are one row."""
    waits = _Waits(history.handoffs)
    rows = [
        _row(event, _event(event) + waits.left_at(event))
        for event in history.events
        if event["group_id"] or _within(event, history)
    ]
    rows += _merged(history.ownership, ("change", "member_id", "generation_id", "at_ms"), _ownership)
    rows += _merged(
        history.refused_commits, ("error_code", "member_id", "generation_id", "at_ms", "sql_role"), _refusal
    )
    alike = ("phase", "source_member_id", "target_member_id", "generation_id", "reason", "at_ms")
    rows += _merged(history.handoffs, alike, _handoff)
    return sorted(rows, key=lambda row: int(str(row["seq"])))


class _Waits:
    """Members that waited for previous owners at each event: they have their assignment and may not read all of it
    yet."""

    def __init__(self, handoffs: Sequence[Record]) -> None:
        self._handoffs = sorted(handoffs, key=lambda record: record["seq"])

    def left_at(self, event: Record) -> str:
        kind, member_id = event["kind"], event["member_id"]
        if kind not in ("member_synced", "rebalance_completed"):
            return ""
        pending: dict[tuple[object, ...], Record] = {}
        for each in self._handoffs:
            if each["seq"] > event["seq"]:
                break
            key = each["topic"], each["partition"], each["source_member_id"], each["target_member_id"]
            if each["phase"] == "begun":
                pending[key] = each
            else:
                pending.pop(key, None)
        if kind == "member_synced":
            own = [each for each in pending.values() if each["target_member_id"] == member_id]
            return f", but may not read {_partitions(own)} yet" if own else ""
        targets = sorted({each["target_member_id"] for each in pending.values()})
        return f"; {', '.join(targets)} may not read {_partitions(list(pending.values()))} yet" if targets else ""


def _within(event: Record, history: GroupHistory) -> bool:
    """Return whether rows were lost during the group's lifetime. Losses before that do not concern the group."""
    oldest = next((each["seq"] for each in reversed(history.events) if each["group_id"]), None)
    return oldest is not None and event["seq"] > oldest


def _row(record: Record, what: str) -> Row:
    shown = {name: value for name, value in record.items() if name != "group_id"}
    generation_id = record["generation_id"]
    return {
        **shown,
        "time": datetime.fromtimestamp(record["at_ms"] / 1000, UTC).isoformat(timespec="milliseconds"),
        "generation": None if generation_id < 0 else generation_id,
        "state": record.get("state_after"),
        "what": what,
    }


def _merged(
    records: Sequence[Record], alike: tuple[str, ...], words: Callable[[Sequence[Record]], str]
) -> Iterable[Row]:
    ordered = sorted(records, key=lambda record: record["seq"])
    for _, run_of in groupby(ordered, key=lambda record: tuple(record[name] for name in alike)):
        same = list(run_of)
        partitions = [{"topic": each["topic"], "partition": each["partition"]} for each in same]
        first = {name: value for name, value in same[0].items() if name not in ("topic", "partition", "offset")}
        yield {**_row(first, words(same)), "partitions": partitions}


def _partitions(records: Sequence[Record]) -> str:
    topics = sorted({record["topic"] for record in records})
    return ", ".join(
        f"{topic}[{ranges(each['partition'] for each in records if each['topic'] == topic)}]" for topic in topics
    )


def _ownership(records: Sequence[Record]) -> str:
    verb = {"assigned": "receives", "released": "releases", "kept": "owns"}.get(records[0]["change"], "has")
    return f"{records[0]['member_id']} {verb} {_partitions(records)}"


def _handoff(records: Sequence[Record]) -> str:
    first, partitions = records[0], _partitions(records)
    if first["phase"] == "begun":
        awaited = "has committed" if first["mode"] == "drain" else "releases"
        return f"{first['target_member_id']} waits until {first['source_member_id']} {awaited} {partitions}"
    waited = max((each["wait_ms"] or 0 for each in records), default=0)
    forced = ", forced" if first["reason"] in _FORCED else ""
    reason = _ENDS.get(first["reason"], first["reason"])
    return (
        f"{first['target_member_id']} no longer waits for {partitions}: {reason}{forced}, after {_milliseconds(waited)}"
    )


_FORCED = frozenset({"timeout", "client_cap"})
_ENDS = {
    "never_fetched": "the previous owner had read nothing",
    "drained": "the previous owner has committed",
    "processed": "the previous owner has committed what it processed, and was served more",
    "acked": "the previous owner has released",
    "source_left": "the previous owner left",
    "source_expired": "the previous owner was lost",
    "target_left": "it left",
    "superseded": "another rebalance began",
    "partition_deleted": "it is deleted",
    "timeout": "group.handoff.timeout.ms is over",
    "client_cap": "its client cannot wait longer",
}


def _refusal(records: Sequence[Record]) -> str:
    first = records[0]
    try:
        reason = ErrorCode(first["error_code"]).name
    except ValueError:
        reason = f"error {first['error_code']}"
    offsets = ", ".join(
        f"{each['topic']}[{each['partition']}] to {each['offset']}"
        + ("" if each["log_end_offset"] is None else f" of {each['log_end_offset']}")
        + ("" if each["commit_count"] == 1 else f" and {each['commit_count'] - 1} more")
        for each in records
    )
    by_sql = f"SQL role {first['sql_role']}" if first["sql_role"] else ""
    who = first["member_id"] or by_sql or "an administrator"
    return f"commit of {who}{f' by {by_sql}' if by_sql not in ('', who) else ''} refused, {reason}: {offsets}"


_REASONS = {
    "member_joined": "a member joined",
    "member_rejoined": "a member joined again with another subscription",
    "leader_rejoined": "the leader joined again",
    "member_left": "a member left",
    "member_expired": "a member was lost",
    "static_replaced": "a static member came back",
    "topics_changed": "subscribed topics changed",
    "subscription_changed": "a member changed its subscription",
    "migrated": "members continue by the classic protocol",
    "too_many_members": "there are more members than group.max.size",
    "sync_timeout": "a member never asked for its assignment",
    "session_timeout": "not heard within its session",
    "rebalance_timeout": "did not come back in time for the rebalance",
    "connection_closed": "did not come back after its connection closed",
    "join_timeout": "was gone before its first generation",
    "turned_away": "turned away, group.max.size is reached",
    "leave": "",
    "leave_static": "a static member, for good",
    "removed": "removed by an administrator",
    "expired": "it was empty and had no offsets left",
    "requested": "an administrator asked for it",
}


_CONVERSIONS = {
    "upgrade": "the classic group becomes a consumer group: a member of that protocol joins",
    "downgrade": "the consumer group becomes a classic group: the last member of its protocol is gone",
}


def _event(event: Record) -> str:
    kind, member, waited = event["kind"], event["member_id"], _milliseconds(event["wait_ms"])
    reason = _REASONS.get(event["reason"] or "", event["reason"] or "")
    said = f" ({event['detail']})" if event["detail"] else ""
    because = f": {reason}" if reason else ""
    client = f" (client {event['client_id']})" if event["client_id"] else ""
    count = f"{event['member_count']} {'member' if event['member_count'] == 1 else 'members'}"
    match kind:
        case "loaded":
            how = _CONVERSIONS.get(event["reason"] or "", f"node {event['node_id']} coordinates the group")
            return f"{how}, {count}"
        case "rebalance_started":
            return f"rebalance{because}" + (f" ({member})" if member else "")
        case "member_joined":
            verb = {"new": "joins", "rejoined": "joins again"}.get(
                event["reason"] or "", "takes a static member's place"
            )
            return f"{member}{client} {verb}" + (f", {waited} into the rebalance" if waited else "") + said
        case "generation_created":
            return _generation(event, count)
        case "assignment_stored":
            return f"assignment decided after {waited}" if waited else "assignment decided"
        case "member_synced":
            return f"{member} has its assignment"
        case "rebalance_completed":
            return f"rebalance complete after {waited}, {count}" if waited else f"complete, {count}"
        case "member_left":
            return f"{member}{client} leaves{because}{said}"
        case "member_expired":
            silent = f", silent for {waited}" if waited else ""
            return f"{member}{client} is lost{because}{silent}{said}"
        case "heartbeat_gap":
            return f"{member} was silent for {waited}"
        case "observed":
            return _observed(event, client)
        case "member_fenced":
            return f"{member} is fenced{because}{said}"
        case "deleted":
            return f"group deleted{because}"
        case "rows_dropped":
            return f"{event['row_count']} rows of the journal are missing here"
        case _:
            return f"{kind}{because}" + (f" ({member})" if member else "") + said


def _observed(event: Record, client: str) -> str:
    return str(event["detail"]) if event["reason"] == "administered" else f"seen{client}: {event['detail']}"


def _generation(event: Record, count: str) -> str:
    leader = f", led by {event['member_id']}" if event["member_id"] else ""
    late = f"; {event['detail']} joined last, after {_milliseconds(event['wait_ms'])}" if event["detail"] else ""
    return f"generation {event['generation_id']}: {count}, {event['protocol_name']}{leader}{late}"


def _milliseconds(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value} ms" if value < 1_000 else f"{value / 1000:.1f} s"
