"""The ownership timeline of a group: who owned which partition, when, and why that changed.

The one idea: a pure function from the journal's rows (`Stretch`) to what the page draws. Spans say who owned a
partition, waits say who waited for a previous owner, marks say what happened. A story describes the departure of one
member and its cost: the time for which the partitions had no reader.

Times are Unix ms. A span that began before the window has no true beginning and says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import NotRequired, TypedDict

from gateway.commands.history import told
from gateway.commands.render import ranges
from storage.console import Loaded, Stretch
from storage.journal import GroupHistory

MAX_SPANS = 6_000
"""Maximal number of spans that are sent. If there are more, spans that are too short to see are merged."""
SLOTS = 1_500
"""Number of parts of the window. A span shorter than one part cannot be seen."""
MAX_MARKS = 1_500
MAX_WORDS = 600
"""Number of the newest rows of each kind that get a sentence."""
MAX_STORIES = 50
SHORT_ID_CHARS = 4

Lane = tuple[str, int]

Span = TypedDict(
    "Span",
    {
        "member": str | None,
        "from": int,
        "to": int | None,
        "seq": NotRequired[int],
        "earlier": NotRequired[bool],
        "merged": NotRequired[int],
    },
)
"""A time in which a member owned a partition. `to` is None while the member still owns it. `earlier` means that it
began before the window. `merged` is the number of short spans, of any members, that this span replaces.
"""


class Mark(TypedDict):
    kind: str
    at: int
    seq: int
    member: str | None
    what: str
    silent: NotRequired[int | None]
    topic: NotRequired[str]
    partition: NotRequired[int]


class LaneRow(TypedDict):
    topic: str
    partition: int
    spans: list[Span]
    waits: list[dict[str, object]]


class Label(TypedDict):
    """Texts that the page shows for a member."""

    label: str
    client: str
    host: str


Labels = Mapping[str, Label]

Timeline = TypedDict(
    "Timeline",
    {
        "from": int,
        "to": int,
        "lanes": list[LaneRow],
        "rebalances": list[dict[str, object]],
        "marks": list[Mark],
        "stories": list[dict[str, object]],
        "words": list[dict[str, object]],
        "members": Labels,
        "cut": bool,
        "position": NotRequired[object],
    },
)


@dataclass(slots=True)
class _Lane:
    spans: list[Span] = field(default_factory=list[Span])
    open: dict[str, Span] = field(default_factory=dict[str, Span])
    """Spans without an end, by member."""

    def begin(self, member: str, at_ms: int, seq: int, *, earlier: bool = False) -> None:
        if member not in self.open:
            span: Span = {"member": member, "from": at_ms, "to": None, "seq": seq}
            if earlier:
                span["earlier"] = True
            self.open[member] = span
            self.spans.append(span)

    def end(self, member: str, at_ms: int) -> None:
        span = self.open.pop(member, None)
        if span is not None:
            span["to"] = at_ms


def timeline(stretch: Stretch, from_ms: int, to_ms: int) -> Timeline:
    """Return lanes, marks, rebalances, stories, words and members of the window, ready for JSON."""
    labels = _labels(stretch)
    lanes = _owned(stretch, from_ms)
    waits = _waits(stretch)
    for key in waits:
        lanes.setdefault(key, _Lane())
    rebalances = _rebalances(stretch.events)
    words = _words(stretch, labels)
    spans: list[LaneRow] = [
        {"topic": topic, "partition": partition, "spans": lane.spans, "waits": waits.get((topic, partition), [])}
        for (topic, partition), lane in sorted(lanes.items())
    ]
    _thin(spans, from_ms, to_ms)
    return {
        "from": from_ms,
        "to": to_ms,
        "lanes": spans,
        "rebalances": rebalances,
        "marks": _marks(stretch, words)[-MAX_MARKS:],
        "stories": _stories(stretch, labels),
        "words": words,
        "members": labels,
        "cut": stretch.is_cut,
    }


# --- members ----------------------------------------------------------------------------------------------------------


def _labels(stretch: Stretch) -> dict[str, Label]:
    """Return a short label for each member that the stretch names: its client id, and the end of its member id if
    several members have the client id."""
    named: dict[str, tuple[str, str]] = {}
    for member_id, row in stretch.members.items():
        named[member_id] = row["client_id"] or "", row["client_host"] or ""
    for event in stretch.events:
        member_id = event["member_id"]
        if member_id and event["client_id"]:
            host = event["client_host"] or named.get(member_id, ("", ""))[1]
            named[member_id] = event["client_id"], host
    for row in (*stretch.before, *stretch.ownership, *stretch.events):
        if row["member_id"]:
            named.setdefault(row["member_id"], ("", ""))
    for row in stretch.handoffs:
        for member_id in (row["source_member_id"], row["target_member_id"]):
            named.setdefault(member_id, ("", ""))
    alike: dict[str, int] = defaultdict(int)
    for client, _ in named.values():
        alike[client] += 1
    return {
        member_id: {
            "label": _label(member_id, client, alike[client] > 1),
            "client": client,
            "host": host.removeprefix("/"),
        }
        for member_id, (client, host) in named.items()
    }


def _label(member_id: str, client: str, is_shared: bool) -> str:
    if not client:
        return member_id if len(member_id) <= 24 else f"{member_id[:8]}…{member_id[-SHORT_ID_CHARS:]}"
    return f"{client} ·{member_id[-SHORT_ID_CHARS:]}" if is_shared else client


def _name(member_id: str | None, labels: Labels) -> str:
    if not member_id:
        return "an administrator"
    known = labels.get(member_id)
    return member_id if known is None else str(known["label"])


# --- lanes ------------------------------------------------------------------------------------------------------------


def _owned(stretch: Stretch, from_ms: int) -> dict[Lane, _Lane]:
    lanes: dict[Lane, _Lane] = defaultdict(_Lane)
    for (topic, partition), (member, seq) in _owners_before(stretch.before).items():
        lanes[topic, partition].begin(member, from_ms, seq, earlier=True)
    loads = [event for event in stretch.events if event["kind"] == "loaded"]
    rows = sorted((*loads, *stretch.ownership), key=lambda row: row["seq"])
    for position, row in enumerate(rows):
        if "kind" in row:
            _restate(lanes, row, islice(rows, position + 1, None))
            continue
        lane = lanes[row["topic"], row["partition"]]
        if row["change"] == "released":
            lane.end(row["member_id"], row["at_ms"])
        else:
            lane.begin(row["member_id"], row["at_ms"], row["seq"])
    return lanes


def _owners_before(rows: Iterable[Loaded]) -> dict[Lane, tuple[str, int]]:
    """Return the owner of each partition after these rows. A row may be missing, so only the last owner counts."""
    owners: dict[Lane, tuple[str, int]] = {}
    for row in rows:
        key = row["topic"], row["partition"]
        if row["change"] != "released":
            owners[key] = row["member_id"], row["seq"]
        elif key in owners and owners[key][0] == row["member_id"]:
            del owners[key]
    return owners


def _restate(lanes: Mapping[Lane, _Lane], event: Loaded, after: Iterable[Loaded]) -> None:
    """End the spans that a `loaded` event does not restate: their ends are lost."""
    kept: set[tuple[str, int, str]] = set()
    for row in after:
        if row.get("change") != "kept" or row["at_ms"] != event["at_ms"]:
            break
        kept.add((row["topic"], row["partition"], row["member_id"]))
    for (topic, partition), lane in lanes.items():
        for member in [member for member in lane.open if (topic, partition, member) not in kept]:
            lane.end(member, event["at_ms"])


def _waits(stretch: Stretch) -> dict[Lane, list[dict[str, object]]]:
    """Return the handoffs of each partition: who waited for whom, how long, and how the wait ended."""
    waits: dict[Lane, list[dict[str, object]]] = defaultdict(list)
    begun: dict[tuple[object, ...], dict[str, object]] = {}
    for row in stretch.handoffs:
        lane = row["topic"], row["partition"]
        key = (*lane, row["source_member_id"], row["target_member_id"], row["generation_id"])
        if row["phase"] == "begun":
            begun[key] = {
                "source": row["source_member_id"],
                "target": row["target_member_id"],
                "mode": row["mode"],
                "from": row["at_ms"],
                "to": None,
                "reason": None,
            }
            waits[lane].append(begun[key])
            continue
        wait = begun.pop(key, None)
        if wait is None:
            wait = {
                "source": row["source_member_id"],
                "target": row["target_member_id"],
                "mode": row["mode"],
                "from": row["at_ms"] - (row["wait_ms"] or 0),
            }
            waits[lane].append(wait)
        wait |= {"to": row["at_ms"], "reason": row["reason"], "forced": row["reason"] in ("timeout", "client_cap")}
    return waits


def _thin(lanes: Sequence[LaneRow], from_ms: int, to_ms: int) -> None:
    """Merge neighbouring spans that are too short to see, if there are too many of them."""
    if sum(len(lane["spans"]) for lane in lanes) <= MAX_SPANS:
        return
    slot_ms = max((to_ms - from_ms) / SLOTS, 1)
    for lane in lanes:
        kept: list[Span] = []
        merged: Span | None = None
        count = merged_to_ms = 0
        for span in lane["spans"]:
            begin_ms, end_ms = span["from"], span["to"]
            if end_ms is None or end_ms - begin_ms >= slot_ms:
                kept.append(span)
                merged = None
                continue
            if merged is None or begin_ms - merged_to_ms >= slot_ms:
                merged = {"member": None, "from": begin_ms, "to": end_ms}
                count = merged_to_ms = 0
                kept.append(merged)
            count, merged_to_ms = count + 1, max(merged_to_ms, end_ms)
            merged["to"], merged["merged"] = merged_to_ms, count
        lane["spans"] = kept[-MAX_SPANS // max(len(lanes), 1) - 1 :]


# --- what happened ----------------------------------------------------------------------------------------------------

_MARKED = {
    "member_joined": "joined",
    "member_left": "left",
    "member_expired": "lost",
    "member_fenced": "fenced",
    "heartbeat_gap": "silent",
    "loaded": "loaded",
    "observed": "seen",
    "deleted": "deleted",
    "rows_dropped": "missing",
}


def _marks(stretch: Stretch, told_rows: Iterable[Mapping[str, object]]) -> list[Mark]:
    words = {row["seq"]: str(row["what"]) for row in told_rows}
    marks: list[Mark] = []
    for event in stretch.events:
        kind = _MARKED.get(event["kind"], "")
        if not kind or (kind == "joined" and event["reason"] == "rejoined"):
            continue
        marks.append(
            {
                "kind": kind,
                "at": event["at_ms"],
                "seq": event["seq"],
                "member": event["member_id"],
                "silent": event["wait_ms"] if kind in ("lost", "silent") else None,
                "what": words.get(event["seq"]) or str(event["kind"]),
            }
        )
    refused: list[Mark] = [
        {
            "kind": "refused",
            "at": row["at_ms"],
            "seq": row["seq"],
            "member": row["member_id"],
            "topic": row["topic"],
            "partition": row["partition"],
            "what": words.get(row["seq"], "commit refused"),
        }
        for row in stretch.refusals
    ]
    return sorted((*marks, *refused), key=lambda mark: mark["seq"])


def _rebalances(events: Sequence[Loaded]) -> list[dict[str, object]]:
    """Return the rebalances of the window. A rebalance without an end continues, or another rebalance replaced it."""
    found: list[dict[str, object]] = []
    running: dict[str, object] | None = None
    for event in events:
        if event["kind"] == "rebalance_started":
            if running is not None:
                running["to"], running["superseded"] = event["at_ms"], True
            running = {
                "from": event["at_ms"],
                "to": None,
                "seq": event["seq"],
                "reason": event["reason"],
                "member": event["member_id"],
                "generation": event["generation_id"],
            }
            found.append(running)
        elif running is not None and (
            event["kind"] in ("rebalance_completed", "deleted") or event["state_after"] in ("Empty", "Dead")
        ):
            running["to"], running["generation"] = event["at_ms"], event["generation_id"]
            running = None
    return found


def _words(stretch: Stretch, labels: Labels) -> list[dict[str, object]]:
    """Return the history in the words of `sluice groups history`, with short names of members."""
    history = GroupHistory(
        events=stretch.events[: -MAX_WORDS - 1 : -1],
        ownership=stretch.ownership[: -MAX_WORDS - 1 : -1],
        refused_commits=stretch.refusals[: -MAX_WORDS - 1 : -1],
        handoffs=stretch.handoffs[: -MAX_WORDS - 1 : -1],
    )
    by_length = sorted(_named(history) & labels.keys(), key=len, reverse=True)
    rows: list[dict[str, object]] = []
    for row in told(history):
        what = str(row["what"])
        for member_id in by_length:
            if member_id in what:
                client = labels[member_id]["client"]
                what = what.replace(f"{member_id} (client {client})", member_id)
                what = what.replace(member_id, str(labels[member_id]["label"]))
        rows.append(
            {
                "at": row["at_ms"],
                "seq": row["seq"],
                "generation": row["generation"],
                "state": row["state"],
                "kind": row.get("kind") or row.get("change") or row.get("phase") or "refused",
                "what": what,
            }
        )
    return rows


def _named(history: GroupHistory) -> set[str]:
    """Return the ids of the members that these rows name."""
    rows = (*history.events, *history.ownership, *history.refused_commits)
    waits = ((row["source_member_id"], row["target_member_id"]) for row in history.handoffs)
    return {row["member_id"] for row in rows if row["member_id"]} | set(chain.from_iterable(waits))


# --- stories ----------------------------------------------------------------------------------------------------------


def _stories(stretch: Stretch, labels: Labels) -> list[dict[str, object]]:
    """Describe each departure with a cost: the member, the reason, the new owners, and the time without a reader."""
    departures = [
        event for event in stretch.events if event["kind"] in ("member_expired", "member_fenced", "member_left")
    ]
    course = _Course(stretch)
    stories = (_story(event, course, labels) for event in departures[-MAX_STORIES:])
    return [story for story in stories if story is not None]


class _Course:
    """The rows of a stretch by what they are about. A member may lose thousands of partitions, and each story asks who
    took every one of them."""

    def __init__(self, stretch: Stretch) -> None:
        self._released: dict[tuple[str, int], list[Loaded]] = defaultdict(list)
        self._taken: dict[Lane, list[Loaded]] = defaultdict(list)
        self._synced: dict[str, list[Loaded]] = defaultdict(list)
        self._waited: dict[tuple[Lane, str], list[Loaded]] = defaultdict(list)
        for row in stretch.ownership:
            if row["change"] == "released":
                self._released[row["member_id"], row["at_ms"]].append(row)
            else:
                self._taken[row["topic"], row["partition"]].append(row)
        for event in stretch.events:
            if event["kind"] == "member_synced" and event["group_type"] == "classic":
                self._synced[event["member_id"]].append(event)
        for wait in stretch.handoffs:
            if wait["phase"] == "ended":
                self._waited[(wait["topic"], wait["partition"]), wait["target_member_id"]].append(wait)

    def lost(self, event: Loaded) -> Sequence[Loaded]:
        """Return the partitions that the member of a departure released by it."""
        return _after(self._released.get((event["member_id"], event["at_ms"]), ()), event["seq"])

    def taken(self, key: Lane, seq: int) -> tuple[str, int] | None:
        """Return the member that received the partition after this number, and the time at which it could read."""
        row = _first(self._taken.get(key, ()), seq)
        if row is None:
            return None
        member_id = row["member_id"]
        synced = _first(self._synced.get(member_id, ()), row["seq"]) or row
        waited = _first(self._waited.get((key, member_id), ()), row["seq"]) or row
        return member_id, max(synced["at_ms"], waited["at_ms"])


def _first(rows: Sequence[Loaded], seq: int) -> Loaded | None:
    position = bisect_right(rows, seq, key=itemgetter("seq"))
    return rows[position] if position < len(rows) else None


def _after(rows: Sequence[Loaded], seq: int) -> Sequence[Loaded]:
    return rows[bisect_right(rows, seq, key=itemgetter("seq")) :]


def _story(event: Loaded, course: _Course, labels: Labels) -> dict[str, object] | None:
    member_id, at_ms, seq = event["member_id"], event["at_ms"], event["seq"]
    lost = course.lost(event)
    if not lost and event["kind"] == "member_left":
        return None
    heard_ms = at_ms - (event["wait_ms"] or 0) if event["kind"] == "member_expired" else at_ms
    resumed: dict[Lane, tuple[str, int]] = {}
    for row in lost:
        key = row["topic"], row["partition"]
        taken = course.taken(key, seq)
        if taken is not None:
            resumed[key] = taken
    missing = len(lost) - len(resumed)
    last_ms = max((each for _, each in resumed.values()), default=None)
    return {
        "seq": seq,
        "at": at_ms,
        "kind": "lost" if event["kind"] == "member_expired" else "left" if event["kind"] == "member_left" else "fenced",
        "member": member_id,
        "heard": heard_ms,
        "resumed": None if missing or last_ms is None else last_ms,
        "gap": None if missing or last_ms is None else max(last_ms - heard_ms, 0),
        "title": _title(event, labels),
        "text": _sentences(event, lost, resumed, heard_ms, labels),
    }


_WHY = {
    "session_timeout": "it sent no heartbeat within its session timeout",
    "connection_closed": "its connection closed and it did not come back",
    "rebalance_timeout": "it did not rejoin in time for the rebalance",
    "sync_timeout": "it did not ask for its assignment in time",
    "join_timeout": "it did not finish joining",
    "leave": "it left the group",
    "leave_static": "it left the group for good",
    "removed": "an administrator removed it",
    "static_replaced": "another client took its instance id",
    "stale_epoch": "its member epoch was too old",
    "turned_away": "the group is full",
}


def _title(event: Loaded, labels: Labels) -> str:
    name = _name(event["member_id"], labels)
    verb = {"member_expired": "was lost", "member_fenced": "was fenced"}.get(event["kind"], "left")
    return f"{name} {verb}"


def _sentences(
    event: Loaded,
    lost: Sequence[Loaded],
    resumed: Mapping[Lane, tuple[str, int]],
    heard_ms: int,
    labels: Labels,
) -> str:
    known = labels.get(event["member_id"] or "")
    host = "" if known is None else known["host"]
    why = _WHY.get(event["reason"] or "", event["reason"] or "the reason is unknown")
    silent = f", silent for {duration(event['wait_ms'])}" if event["wait_ms"] else ""
    said = [f"{why[:1].upper()}{why[1:]}{f' (host {host})' if host else ''}{silent}."]
    if not lost:
        said.append("It owned no partitions, so no reading was interrupted.")
        return " ".join(said)
    by_taker: dict[str, list[Lane]] = defaultdict(list)
    for key, (member_id, _) in resumed.items():
        by_taker[member_id].append(key)
    for member_id, keys in by_taker.items():
        said.append(f"{partitions_said(keys)} went to {_name(member_id, labels)}.")
    left = [(row["topic"], row["partition"]) for row in lost if (row["topic"], row["partition"]) not in resumed]
    if left:
        said.append(f"Nobody has taken {partitions_said(left)} over yet.")
    elif resumed:
        gap_ms = max(max(ready for _, ready in resumed.values()) - heard_ms, 0)
        said.append(f"Nobody read {'it' if len(lost) == 1 else 'them'} for up to {duration(gap_ms)}.")
    return " ".join(said)


def partitions_said(keys: Sequence[Lane]) -> str:
    by_topic: dict[str, list[int]] = defaultdict(list)
    for topic, index in keys:
        by_topic[topic].append(index)
    return ", ".join(f"{topic}[{ranges(indexes)}]" for topic, indexes in sorted(by_topic.items()))


def duration(ms: int | None) -> str:
    """Return a duration for people: 640 ms, 12.3 s, 4 min 10 s."""
    if ms is None:
        return "an unknown time"
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
