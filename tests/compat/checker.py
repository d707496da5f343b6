"""Judge a delivery log: ownership without overlap, no gaps, duplicates or rewinds, and the length of pauses.

The one idea: a log is a list of events in time, and everything is computed from that list alone, so the same judgement
holds for every client and language. Values in, values out: it opens no socket and reads no clock.

A log is made of JSON lines. Times are milliseconds since the epoch, written by processes of one machine.

    {"t": …, "event": "scenario", "mode": "eager" | "cooperative", "topic": …, "partitions": 4,
     "produced": {"0": 25}, "redelivery_allowed": true}
    {"t": …, "event": "produced", "topic": …, "partition": 0, "offset": 7}            when it was acknowledged
    {"t": …, "event": "assigned" | "revoked" | "lost", "member": "c1", "topic": …, "partition": 0}
    {"t": …, "event": "delivered", "member": "c1", "topic": …, "partition": 0, "offset": 7}   when it was processed
    {"t": …, "event": "closed" | "killed", "member": "c1", "partition": -1}           its ownership has ended

`produced` in the first line gives counts per partition, from offset 0; `topic` may be left out of later lines when
there is one. `killed` also stands for a process that was stopped: its deliveries until its next assignment are judged
as redelivery. A client without callbacks on revocation says so with `"revoke_callbacks": false`. An assignment that
excludes a partition then ends its ownership only if the suite says so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PAUSE_LIMIT_MS = 2000.0
"""Milliseconds that a record of a retained partition may wait in a cooperative rebalance. This is far below any timeout
of a group.
"""

MAX_PROBLEMS = 20

EVENTS = frozenset({"scenario", "assigned", "revoked", "lost", "delivered", "produced", "closed", "killed"})
OWNERSHIP = frozenset({"assigned", "revoked", "lost"})

Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Event:
    t: float
    event: str
    member: str
    topic: str
    partition: int
    offset: int

    @property
    def key(self) -> Partition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Log:
    """Events ordered by time. Events with equal times keep their order in the file. `torn` counts lines that are not
    events.
    """

    header: dict[str, Any]
    events: tuple[Event, ...]
    torn: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """How long records of one partition waited. If the partition was `retained`, they waited while other partitions
    were handed over; else during the partition's own hand-over.
    """

    partition: Partition
    milliseconds: float
    retained: bool


@dataclass(slots=True)
class Verdict:
    """The result for a log, which passes if `problems` is empty. `late` counts records processed after their partition
    was revoked. `handovers` counts changes of ownership.
    """

    problems: list[str] = field(default_factory=list)
    deliveries: int = 0
    duplicates: int = 0
    rewinds: int = 0
    late: int = 0
    handovers: int = 0
    pauses: list[Pause] = field(default_factory=list)

    def add(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def longest_pause_ms(self, *, retained: bool) -> float | None:
        return max((pause.milliseconds for pause in self.pauses if pause.retained is retained), default=None)


def read_log(text: str) -> Log:
    """Parse a log. A killed process may leave an incomplete last line. So lines that are not events are counted and do
    not raise an error.
    """
    header: dict[str, Any] = {}
    events: list[Event] = []
    torn = 0
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            kind, t = entry["event"], float(entry["t"])
            if kind not in EVENTS:
                raise ValueError(kind)
            if kind == "scenario":
                header = {**header, **entry}
                continue
            member = str(entry.get("member") or "")
            topic = str(entry.get("topic") or header.get("topic") or "")
            events.append(Event(t, kind, member, topic, int(entry.get("partition", -1)), int(entry.get("offset", -1))))
        except (ValueError, KeyError, TypeError, AttributeError):
            torn += 1
    events.sort(key=lambda event: event.t)
    return Log(header, tuple(events), torn)


def check(log: Log, *, outage: bool = False, pause_limit_ms: float = PAUSE_LIMIT_MS) -> Verdict:
    """Judge a log. With `outage`, the gateway itself was down for some time, so pauses are reported and not judged."""
    verdict = Verdict()
    if not log.header:
        verdict.add("the log has no scenario line")
    redelivery_allowed = bool(log.header.get("redelivery_allowed"))
    if log.torn > (1 if redelivery_allowed else 0):
        verdict.add(f"{log.torn} lines of the log are no events")
    cooperative = log.header.get("mode") == "cooperative"
    _check_ownership(log.events, verdict, cooperative=cooperative, may_lose=redelivery_allowed or outage)
    _check_deliveries(log.events, verdict, redelivery_allowed=redelivery_allowed)
    _check_gaps(log, verdict)
    _measure_pauses(log.events, verdict)
    if cooperative and not outage and not redelivery_allowed:
        for pause in verdict.pauses:
            if pause.retained and pause.milliseconds > pause_limit_ms:
                verdict.add(f"{_name(pause.partition)} was retained, yet paused for {pause.milliseconds:.0f} ms")
    return verdict


def _check_ownership(events: Sequence[Event], verdict: Verdict, *, cooperative: bool, may_lose: bool) -> None:
    """Check that a partition has one owner at a time, that a cooperative member never loses a partition that it keeps,
    and that only owners read.
    """
    members = {event.member for event in events if event.event == "assigned"}
    readers = {event.member for event in events if event.event == "delivered"}
    # A log without assignments belongs to a client without a group.
    for stranger in sorted(readers - members) if members else ():
        verdict.add(f"{stranger} processed records and was never assigned a partition")
    owners: dict[Partition, str] = {}
    revoked_by: dict[Partition, Event] = {}
    for event in events:
        if event.event == "assigned":
            owner = owners.get(event.key)
            if owner is not None and owner != event.member:
                verdict.add(f"{_name(event.key)} was assigned to {event.member} while {owner} owned it")
            revoked = revoked_by.pop(event.key, None)
            if cooperative and revoked is not None and revoked.member == event.member:
                verdict.add(f"{_name(event.key)} was {revoked.event} from {event.member}, which retained it")
            owners[event.key] = event.member
        elif event.event in ("revoked", "lost"):
            if owners.get(event.key) == event.member:
                del owners[event.key]
                if event.event == "revoked" or not may_lose:
                    revoked_by[event.key] = event
        elif event.event in ("closed", "killed"):
            for key in [key for key, owner in owners.items() if owner == event.member]:
                del owners[key]
            for key in [key for key, revoked in revoked_by.items() if revoked.member == event.member]:
                del revoked_by[key]


def _check_deliveries(events: Sequence[Event], verdict: Verdict, *, redelivery_allowed: bool) -> None:
    """Find duplicates, rewinds, and records processed by a member while another one owned the partition.

    If redelivery is allowed, a new owner may go back to the last commit. Within one ownership no member may go back.
    """
    owners: dict[Partition, str] = {}
    gone: set[str] = set()
    seen: set[tuple[Partition, int]] = set()
    highest: dict[Partition, int] = {}
    highest_of_ownership: dict[Partition, int] = {}
    for event in events:
        key = event.key
        if event.event == "assigned":
            gone.discard(event.member)
            if owners.get(key) != event.member:
                owners[key] = event.member
                highest_of_ownership.pop(key, None)
        elif event.event in ("revoked", "lost"):
            if owners.get(key) == event.member:
                del owners[key]
        elif event.event in ("closed", "killed"):
            if event.event == "killed":
                gone.add(event.member)
            for held in [held for held, owner in owners.items() if owner == event.member]:
                del owners[held]
        elif event.event == "delivered":
            verdict.deliveries += 1
            where = f"{_name(key)} offset {event.offset}"
            owner = owners.get(key)
            stray = owner != event.member
            if owner is None:
                verdict.late += 1
            elif stray and not (redelivery_allowed and event.member in gone):
                verdict.add(f"{where} was processed by {event.member} while {owner} owned the partition")
            if (key, event.offset) in seen:
                verdict.duplicates += 1
                if not redelivery_allowed:
                    verdict.add(f"{where} was delivered again, to {event.member}")
            seen.add((key, event.offset))
            if event.offset <= highest.get(key, -1):
                verdict.rewinds += 1
                if not redelivery_allowed and event.offset < highest[key]:
                    verdict.add(f"{where} came to {event.member} after offset {highest[key]}")
            if not stray:
                if redelivery_allowed and event.offset <= highest_of_ownership.get(key, -1):
                    verdict.add(
                        f"{where} came to {event.member} after offset {highest_of_ownership[key]} in one ownership"
                    )
                highest_of_ownership[key] = max(highest_of_ownership.get(key, -1), event.offset)
            highest[key] = max(highest.get(key, -1), event.offset)


def _check_gaps(log: Log, verdict: Verdict) -> None:
    """Check that every produced record was delivered. If the log does not say what was produced, check that the
    delivered offsets have no hole."""
    delivered: dict[Partition, set[int]] = defaultdict(set)
    produced: dict[Partition, set[int]] = defaultdict(set)
    for event in log.events:
        if event.event == "delivered":
            delivered[event.key].add(event.offset)
        elif event.event == "produced":
            produced[event.key].add(event.offset)
    topic = str(log.header.get("topic") or "")
    counts = log.header.get("produced")
    if isinstance(counts, dict):
        for partition, count in counts.items():
            produced[topic, int(partition)].update(range(int(count)))
    if not produced:
        for key, offsets in delivered.items():
            produced[key] = set(range(min(offsets), max(offsets) + 1))
        if not delivered:
            verdict.add("nothing was delivered")
    for key, offsets in sorted(produced.items()):
        missing = sorted(offsets - delivered[key])
        if missing:
            verdict.add(f"{_name(key)}: {len(missing)} of {len(offsets)} records never arrived: {_ranges(missing)}")


@dataclass(slots=True)
class _Span:
    """A period in which one member owned a partition. `end` is infinite while the period lasts."""

    owner: str
    start: float
    end: float = math.inf


def _spans(events: Sequence[Event]) -> dict[Partition, list[_Span]]:
    spans: dict[Partition, list[_Span]] = defaultdict(list)
    open_spans: dict[Partition, _Span] = {}
    for event in events:
        if event.event == "assigned":
            held = open_spans.get(event.key)
            if held is not None and held.owner == event.member:
                continue
            if held is not None:
                held.end = event.t
            open_spans[event.key] = _Span(event.member, event.t)
            spans[event.key].append(open_spans[event.key])
        elif event.event in ("revoked", "lost"):
            if event.key in open_spans and open_spans[event.key].owner == event.member:
                open_spans.pop(event.key).end = event.t
        elif event.event in ("closed", "killed"):
            for key in [key for key, span in open_spans.items() if span.owner == event.member]:
                open_spans.pop(key).end = event.t
    return spans


def _measure_pauses(events: Sequence[Event], verdict: Verdict) -> None:
    """Measure how long records waited for a rebalance, if the log says when they were acknowledged.

    A hand-over's pause begins at the end of the old ownership, or at the record's own time if that is later. It ends
    when the new owner delivers the record. On a partition that is not handed over, a pause is the wait of a record
    while another partition was handed over.

    If the times are unknown, a hand-over's pause lasts until the new owner's first delivery, which idle time may
    lengthen. Other pauses are not measured, because there may have been no record to read.
    """
    first_delivery: dict[tuple[Partition, int], float] = {}
    acknowledged: dict[Partition, list[Event]] = defaultdict(list)
    deliveries: dict[Partition, list[float]] = defaultdict(list)
    for event in events:
        if event.event == "delivered":
            first_delivery.setdefault((event.key, event.offset), event.t)
            deliveries[event.key].append(event.t)
        elif event.event == "produced":
            acknowledged[event.key].append(event)
    owned = _spans(events)
    moves = [(key, previous.end, span.start) for key, spans in owned.items() for previous, span in pairwise(spans)] + [
        (event.key, event.t, event.t) for event in events if event.event in OWNERSHIP
    ]
    for key, spans in sorted(owned.items()):
        others = [(start, end) for moved, start, end in moves if moved != key]
        waits = [
            (record.t, arrival)
            for record in acknowledged[key]
            if (arrival := first_delivery.get((key, record.offset))) is not None
        ]
        for previous, span in pairwise(spans):
            verdict.handovers += 1
            if waits:
                ends = [(since, arrival) for since, arrival in waits if since <= span.start <= arrival < span.end]
                pause_ms = max((arrival - max(since, previous.end) for since, arrival in ends), default=0.0)
            else:
                first = min((t for t in deliveries[key] if span.start <= t < span.end), default=None)
                if first is None:
                    continue
                pause_ms = first - previous.end
            verdict.pauses.append(Pause(key, pause_ms, retained=False))
        for span in spans:
            through = [(start, end) for start, end in others if span.start < start and end < span.end]
            pauses = [
                arrival - since
                for since, arrival in waits
                if span.start <= since
                and arrival < span.end
                and any(since <= end and start <= arrival for start, end in through)
            ]
            if pauses:
                verdict.pauses.append(Pause(key, max(pauses), retained=True))


def _name(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}" if partition[0] else f"partition {partition[1]}"


def _ranges(offsets: Iterable[int]) -> str:
    """Return the numbers 3 4 5 9 as the text `3-5, 9`, with at most ten ranges."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][1] + 1:
            found[-1][1] = offset
        else:
            found.append([offset, offset])
    named = [str(low) if low == high else f"{low}-{high}" for low, high in found]
    return ", ".join(named[:10]) + (" …" if len(named) > 10 else "")
