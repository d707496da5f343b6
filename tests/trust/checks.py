"""Judge a history by pure functions. Each returns one sentence per violation, or an empty list if the promise was kept.

The one idea: a check takes events and the final state of the log, and nothing else. It can therefore be tested by
values (test_checks.py), and a history on disk can be judged again.

Each function names the promise that it checks. No function may excuse a violation because a fault was under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.trust.history import (
    Change,
    Consumed,
    Delivered,
    Observed,
    OffsetCommitted,
    Outcome,
    OwnerChanged,
    Produced,
    Settled,
    Settlement,
    Transferred,
)

MAX_SENTENCES = 20
"""Number of violations that one check describes. It only counts further ones."""
STALE_S = 30.0
"""How long a member of a share group may hold a fetched record before it hands it out. Its acquisition lock lasts no
longer.
"""
REMOVED_S = 30.0
"""How far apart the removal of a member and an overlap may be noted. A member may learn of its assignment late, and a
node may write the removal to the journal late.
"""


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int


class Part(NamedTuple):
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of the log, as a reader found it at the end of the run."""

    key: str | None
    value: int


Log = Mapping[Place, Entry]


def nothing_acknowledged_is_lost(produced: Iterable[Produced], log: Log) -> list[str]:
    """Check that every acknowledged record is at the offset of its acknowledgement.

    librdkafka reports no offset if the answer was lost and a later batch of the same producer was acknowledged. A
    record without a reported offset must be somewhere in its partition.
    """
    held = {(place.topic, place.partition, entry.value) for place, entry in log.items()}
    found: list[str] = []
    for record in produced:
        if record.outcome is not Outcome.OK:
            continue
        name = f"{record.topic}-{record.partition}"
        if record.offset < 0:
            if (record.topic, record.partition, record.value) not in held:
                found.append(f"value {record.value} of {record.client} was acknowledged and is not in {name}")
        elif _value(log.get(_place(record))) != record.value:
            found.append(
                f"{record.client} was told that value {record.value} is at {name} offset {record.offset}; "
                f"{_found(log.get(_place(record)))}"
            )
    return _some(found)


def nothing_is_there_twice(topics: Collection[str], log: Log) -> list[str]:
    """Check that no record of an idempotent producer is in the log twice. `topics` have idempotent producers only."""
    places: dict[tuple[str, int], list[Place]] = defaultdict(list)
    for place, entry in log.items():
        if place.topic in topics:
            places[place.topic, entry.value].append(place)
    return _some(
        f"value {value} of {topic} is at {len(found)} places: "
        + ", ".join(f"partition {place.partition} offset {place.offset}" for place in sorted(found)[:4])
        for (topic, value), found in places.items()
        if len(found) > 1
    )


def nothing_was_invented(produced: Iterable[Produced], log: Log) -> list[str]:
    """Check that a producer sent every record in the log with its key, and did not receive an error for it."""
    sent = {
        (record.topic, record.partition, record.key, record.value)
        for record in produced
        if record.outcome is not Outcome.FAILED
    }
    return _some(
        f"{place.topic}-{place.partition} offset {place.offset} holds value {entry.value} with key {entry.key}, "
        "which no producer sent there"
        for place, entry in log.items()
        if (place.topic, place.partition, entry.key, entry.value) not in sent
    )


def offsets_are_dense(ends: Mapping[Part, int], topics: Collection[str], log: Log) -> list[str]:
    """Check that a partition without transactions and without compaction has a record at every offset below its end,
    and none behind it.
    """
    offsets: dict[Part, set[int]] = {part: set() for part in ends}
    for place in log:
        offsets.setdefault(Part(place.topic, place.partition), set()).add(place.offset)
    found: list[str] = []
    for part, read in sorted(offsets.items()):
        if part.topic not in topics:
            continue
        end = ends.get(part, 0)
        below = set(range(end))
        for wrong, said in ((below - read, "cannot"), (read - below, "can")):
            if wrong:
                found.append(
                    f"{part.topic}-{part.partition} ends at {end}, but {_ranges(sorted(wrong))} {said} be read"
                )
    return _some(found)


def producers_keep_their_order(produced: Iterable[Produced], log: Log) -> list[str]:
    """Check that the values of one idempotent producer rise within a partition, because the producer sends rising
    values.
    """
    client_of = {(record.topic, record.partition, record.value): record.client for record in produced}
    last: dict[tuple[str, str, int], int] = {}
    found: list[str] = []
    for place, entry in sorted(log.items()):
        client = client_of.get((place.topic, place.partition, entry.value))
        if client is None:
            continue
        before = last.get((client, place.topic, place.partition), -1)
        if entry.value < before:
            found.append(
                f"{place.topic}-{place.partition} offset {place.offset}: {client}'s {entry.value} follows {before}"
            )
        last[client, place.topic, place.partition] = entry.value
    return _some(found)


def groups_read_everything(
    produced: Iterable[Produced], consumed: Iterable[Consumed | Delivered], groups: Mapping[str, str]
) -> list[str]:
    """Check that every acknowledged record reached its groups. `groups` maps each group to its topic."""
    return _some(
        f"group {group} was never given value {record.value} of {record.topic}-{record.partition}"
        for group, record in unread(produced, consumed, groups)
    )


def unread(
    produced: Iterable[Produced], consumed: Iterable[Consumed | Delivered], groups: Mapping[str, str]
) -> list[tuple[str, Produced]]:
    """Return the acknowledged records that each group did not receive. `groups` maps each group to its topic."""
    read: dict[str, set[tuple[int, int]]] = {group: set() for group in groups}
    for delivery in consumed:
        if delivery.group in read:
            read[delivery.group].add((delivery.partition, delivery.value))
    records = [record for record in produced if record.outcome is Outcome.OK]
    return [
        (group, record)
        for group, topic in groups.items()
        for record in records
        if record.topic == topic and (record.partition, record.value) not in read[group]
    ]


def groups_read_what_the_log_holds(consumed: Iterable[Consumed | Delivered], log: Log) -> list[str]:
    """Check that a consumer receives at an offset the record that the log holds there, at any time, from any node."""
    return _some(
        f"{delivery.member} of {delivery.group} was given value {delivery.value} at {delivery.topic}-"
        f"{delivery.partition} offset {delivery.offset}; {_found(log.get(_place(delivery)))}"
        for delivery in consumed
        if _value(log.get(_place(delivery))) != delivery.value
    )


def members_read_forward(changes: Iterable[OwnerChanged], consumed: Iterable[Consumed]) -> list[str]:
    """Check that a member receives rising offsets of a partition from its assignment until its revocation."""
    events: list[tuple[float, OwnerChanged | Consumed]] = [(each.at_s, each) for each in (*changes, *consumed)]
    last: dict[tuple[str, str, str, int], int] = {}
    found: list[str] = []
    for at_s, event in sorted(events, key=lambda each: (each[0], isinstance(each[1], Consumed))):
        key = (event.group, event.member, event.topic, event.partition)
        if isinstance(event, OwnerChanged):
            last.pop(key, None)
            continue
        if event.offset <= last.get(key, -1):
            found.append(
                f"group {event.group}: {event.member} received offset {event.offset} of {event.topic}-"
                f"{event.partition} after offset {last[key]} at {at_s:.3f} s, and owned the partition all the time"
            )
        last[key] = event.offset
    return _some(found)


def owners_never_overlap(
    changes: Iterable[OwnerChanged],
    groups: Collection[str],
    removed: Mapping[tuple[str, str], Sequence[float] | None],
) -> list[str]:
    """Check that no other member owns a partition between a member's assignment and its revocation.

    `removed` has the members, each with its group, that the coordinator removed because they were silent, and the times
    of their removals, or None if these are unknown. A removed member learns of its removal late, so an overlap that
    follows a removal does not count.
    """
    owners: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    found: list[str] = []

    def was_removed(group: str, member: str, began_s: float, ended_s: float) -> bool:
        times_s = removed.get((group, member), ())
        return times_s is None or any(began_s - REMOVED_S <= at_s <= ended_s + REMOVED_S for at_s in times_s)

    for change in sorted(changes, key=lambda each: each.at_s):
        if change.group not in groups:
            continue
        held = owners[change.group, change.topic, change.partition]
        if change.change is not Change.ASSIGNED:
            held.pop(change.member, None)
            continue
        others = sorted(
            member
            for member, since_s in held.items()
            if member != change.member and not was_removed(change.group, member, since_s, change.at_s)
        )
        if others and not was_removed(change.group, change.member, change.at_s, change.at_s):
            found.append(
                f"group {change.group}: {change.member} was given {change.topic}-{change.partition} "
                f"at {change.at_s:.3f} s while {', '.join(others)} owned it"
            )
        held[change.member] = change.at_s
    return _some(found)


def old_owners_cannot_commit(changes: Sequence[OwnerChanged], commits: Iterable[OffsetCommitted]) -> list[str]:
    """Check that a member's commit fails if the member sends it after the coordinator gave the partition to another
    member.
    """
    assigned: dict[tuple[str, str, int], list[tuple[float, str]]] = defaultdict(list)
    for change in sorted(changes, key=lambda each: each.at_s):
        if change.change is Change.ASSIGNED:
            assigned[change.group, change.topic, change.partition].append((change.at_s, change.member))
    found: list[str] = []
    for commit in commits:
        if commit.outcome is not Outcome.OK:
            continue
        owner: str | None = None
        for at_s, member in assigned[commit.group, commit.topic, commit.partition]:
            if at_s >= commit.invoked_s:
                break
            owner = member
        if owner not in (None, commit.member):
            found.append(
                f"group {commit.group}: {commit.member} committed {commit.topic}-{commit.partition} offset "
                f"{commit.offset} at {commit.invoked_s:.3f} s, after {owner} had been given it"
            )
    return _some(found)


def numbers_never_fall(
    observations: Iterable[Observed], commits: Iterable[OffsetCommitted], produced: Iterable[Produced]
) -> list[str]:
    """Check that committed offsets, log starts and log ends never fall.

    A read that begins after a commit or a record was acknowledged must see it.
    """
    lines: dict[tuple[str, str, str, int], list[tuple[float, float, int, str]]] = defaultdict(list)
    for seen in observations:
        key = (seen.quantity.value, seen.group, seen.topic, seen.partition)
        lines[key].append((seen.invoked_s, seen.completed_s, seen.value, "read"))
    for commit in commits:
        if commit.outcome is Outcome.OK:
            key = ("committed offset", commit.group, commit.topic, commit.partition)
            lines[key].append((commit.invoked_s, commit.completed_s, commit.offset, "written"))
    for record in produced:
        if record.outcome is Outcome.OK:
            key = ("log end", "", record.topic, record.partition)
            lines[key].append((record.invoked_s, record.completed_s, record.offset + 1, "written"))
    found: list[str] = []
    for (quantity, group, topic, partition), events in lines.items():
        # The highest value that was known for certain when a read began is a lower bound of what it may return.
        known = sorted((completed_s, value) for _, completed_s, value, _ in events)
        at, highest = 0, -1
        for invoked_s, _, value, how in sorted(events):
            while at < len(known) and known[at][0] < invoked_s:
                highest = max(highest, known[at][1])
                at += 1
            if how == "read" and value < highest:
                name = f"{topic}-{partition}" + (f" of group {group}" if group else "")
                found.append(f"{quantity} of {name} was {highest}, and {value} at {invoked_s:.3f} s")
    return _some(found)


def settled_records_stay_settled(deliveries: Iterable[Delivered], settled: Iterable[Settled]) -> list[str]:
    """Check that a record which a member of a share group has accepted or rejected is not delivered again, and that no
    second member accepts or rejects it.

    A member whose acquisition has ended may still hand out records that it fetched before. Such a delivery has no
    higher count than the settled one, and the client hands it out within STALE_S.
    """
    final: dict[tuple[str, str, int, int], Settled] = {}
    found: list[str] = []
    for each in settled:
        if each.settlement is Settlement.RELEASE or each.outcome is not Outcome.OK:
            continue
        key = (each.group, each.topic, each.partition, each.offset)
        first = final.setdefault(key, each)
        if first is not each:
            found.append(
                f"group {each.group}: {first.member} and {each.member} both settled "
                f"{each.topic}-{each.partition} offset {each.offset}"
            )
    for each in deliveries:
        first = final.get((each.group, each.topic, each.partition, each.offset))
        if first is None or each.at_s <= first.completed_s:
            continue
        if each.count > first.count or each.at_s > first.completed_s + STALE_S:
            found.append(
                f"group {each.group}: {each.member} was given {each.topic}-{each.partition} offset {each.offset} "
                f"(delivery {each.count}) at {each.at_s:.3f} s, after the {first.settlement} of {first.member} "
                f"(delivery {first.count}) at {first.completed_s:.3f} s"
            )
    return _some(found)


def deliveries_keep_their_limit(deliveries: Iterable[Delivered], settled: Iterable[Settled], limit: int) -> list[str]:
    """Check that a share group delivers a record at most `limit` times by its own count, and that an acknowledgement
    ends this count of the record. Otherwise the count would not limit anything.
    """
    beyond = [
        f"group {each.group}: {each.topic}-{each.partition} offset {each.offset} was delivered for the "
        f"{each.count}th time to {each.member}"
        for each in deliveries
        if not 1 <= each.count <= limit
    ]
    ended = Counter(
        (each.group, each.topic, each.partition, each.offset, each.count)
        for each in settled
        if each.outcome is Outcome.OK
    )
    again = [
        f"group {group}: delivery {count} of {topic}-{partition} offset {offset} was acknowledged {times} times"
        for (group, topic, partition, offset, count), times in ended.items()
        if times > 1
    ]
    return _some([*beyond, *again])


def records_are_the_committed_rows(rows: Mapping[str, Sequence[int]], topic: str, log: Log) -> list[str]:
    """Check that SQL transactions produce exactly the records whose rows they commit, in the order of their row locks.

    `rows` holds the values by key, in the order of the locks.
    """
    records: dict[str, list[int]] = {key: [] for key in rows}
    for place, entry in sorted(log.items()):
        if place.topic == topic:
            records.setdefault(entry.key or "", []).append(entry.value)
    found: list[str] = []
    for key, values in sorted(records.items()):
        wanted = list(rows.get(key, ()))
        if values == wanted:
            continue
        lost, extra = Counter(wanted) - Counter(values), Counter(values) - Counter(wanted)
        why = f"rows without a record: {sorted(lost)[:5]}; records without a row: {sorted(extra.elements())[:5]}"
        found.append(f"{topic}, key {key}: {why if lost or extra else 'the order differs'}")
    return _some(found)


def records_are_processed_once(processed: Iterable[tuple[Place, int]], topic: str, log: Log) -> list[str]:
    """Check that a consumer that commits its offsets in the SQL transaction of its results has one result for
    each record, with the record's value.
    """
    counts = Counter(processed)
    wanted = Counter((place, entry.value) for place, entry in log.items() if place.topic == topic)
    return _some(
        f"{place.topic}-{place.partition} offset {place.offset}, value {value}, has {counts[place, value]} results"
        for place, value in sorted({*counts, *wanted})
        if counts[place, value] != wanted[place, value]
    )


def compaction_keeps_the_last(produced: Iterable[Produced], topics: Collection[str], log: Log) -> list[str]:
    """Check that a compacted topic keeps the last record of each key. This is the last acknowledged record, or a later
    record whose outcome is unknown.
    """
    least: dict[tuple[str, str], int] = {}
    for record in produced:
        if record.topic in topics and record.key is not None and record.outcome is Outcome.OK:
            least[record.topic, record.key] = max(record.value, least.get((record.topic, record.key), -1))
    last: dict[tuple[str, str], int] = {}
    for place, entry in sorted(log.items()):
        if place.topic in topics and entry.key is not None:
            last[place.topic, entry.key] = entry.value
    return _some(
        f"the last value of key {key} in {topic} is {last.get((topic, key), 'missing')}; {value} was acknowledged"
        for (topic, key), value in sorted(least.items())
        if last.get((topic, key), -1) < value
    )


def transfers_happen_once(
    sources: Iterable[int], results: Iterable[int], transferred: Iterable[Transferred] = ()
) -> list[str]:
    """Check that consume-process-produce transactions turn every source record into exactly one result
    (read_committed). A violation names the transactions in `transferred` that had the record.
    """
    left = set(sources)
    outcomes: dict[int, list[str]] = defaultdict(list)
    for each in transferred:
        ended = f"{each.worker} {each.outcome} after {each.invoked_s:.3f}-{each.completed_s:.3f}"
        for _, _, value in each.places:
            outcomes[value].append(f"{ended} {each.detail}".rstrip())

    def told(sentence: str, value: int) -> str:
        return "; ".join([sentence, *outcomes[value]]) if value in outcomes else sentence

    counts: dict[int, int] = defaultdict(int)
    for result in results:
        counts[result] += 1
    twice = [told(f"source {value} has {count} results", value) for value, count in sorted(counts.items()) if count > 1]
    invented = [f"result {value} has no source" for value in sorted(set(counts) - left)]
    missing = [told(f"source {value} has no result", value) for value in sorted(left - set(counts))]
    return _some([*twice, *invented, *missing])


def states_are_equal(before: Mapping[str, object], after: Mapping[str, object], what: str) -> list[str]:
    """Check that two descriptions of the cluster are the same."""
    return _some(
        f"{what}: {name} was {before.get(name, 'absent')} and is {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def topic_has_its_records(
    topic: str,
    sent: Mapping[int, Sequence[bytes]],
    read: Mapping[int, Sequence[tuple[int, bytes]]],
    unsure: Collection[bytes],
) -> list[str]:
    """Check that a topic that was created again holds what was sent since then, and begins at offset 0.

    `sent` has the acknowledged values by partition, `read` offsets and values. Values in `unsure` may be there or not.
    """
    found: list[str] = []
    values = {index: [value for _, value in each if value not in unsure] for index, each in read.items()}
    if values != sent:
        found.append(f"{topic}: wrote {sent} and read {values}")
    begins = {index: each[0][0] for index, each in read.items() if each}
    if any(begins.values()):
        found.append(f"{topic}: its logs begin at {begins}")
    return found


def every_client_worked(done: Mapping[str, int]) -> list[str]:
    """Check that no number of successful operations is zero. Otherwise the other checks would have judged nothing."""
    return _some(f"{what}: none" for what, count in done.items() if not count)


def _place(event: Produced | Consumed | Delivered) -> Place:
    return Place(event.topic, event.partition, event.offset)


def _value(entry: Entry | None) -> int | None:
    return None if entry is None else entry.value


def _found(entry: Entry | None) -> str:
    return "no record is there" if entry is None else f"value {entry.value} is there"


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    said = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:5]]
    return f"{len(numbers)} offsets ({', '.join(said)}{', …' if len(ranges) > 5 else ''})"


def _some(violations: Iterable[str]) -> list[str]:
    found = list(violations)
    more = len(found) - MAX_SENTENCES
    return found if more <= 0 else [*found[:MAX_SENTENCES], f"and {more} more"]
