"""Journals whose correct analysis is known. A simulated group acts, and its rows are written as a coordinator writes
them. The simulation counts what the analysis must find, from its own actions and not from the rows.

Used by the tests (a few thousand rows in lists) and by the benchmark (millions, streamed to files).
"""

from __future__ import annotations

import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Emit = Callable[[str, Row], None]
Partition = int

ILLEGAL_GENERATION = 22


@dataclass
class Truth:
    """The correct findings of the analysis for one group."""

    rebalances: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    partitions_moved: int = 0
    minimum_moves: int = 0
    unowned_partition_ms: int = 0
    duplicates_min: int = 0
    duplicates_max: int = 0
    duplicates: int = 0
    gap_records: int = 0
    skipped: int = 0
    forced: int = 0
    handoffs: int = 0
    refused_commits: int = 0
    accepted_commits: int = 0
    storms: list[tuple[int, int]] = field(default_factory=list)
    """For each storm, its first rebalance and its number of rebalances."""
    times_last: Counter[str] = field(default_factory=Counter)
    owned: dict[Partition, str] = field(default_factory=dict)
    """Owner of each partition at the end."""


class Clock:
    """The clock and the row numbers that all groups of one journal share."""

    def __init__(self, start_ms: int = 1_790_000_000_000) -> None:
        self.now_ms = start_ms
        self.seq = 0

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq


def sticky(owner: Mapping[Partition, str], members: Sequence[str], partitions: int) -> dict[Partition, str]:
    """Return shares that differ by at most one partition, with as few moves as possible."""
    quota, spare = divmod(partitions, len(members))
    mine: dict[str, list[Partition]] = {member: [] for member in members}
    for partition in range(partitions):
        if owner.get(partition) in mine:
            mine[owner[partition]].append(partition)
    loose: list[Partition] = [partition for partition in range(partitions) if owner.get(partition) not in mine]
    # If partitions are left over, the members with most partitions keep one more than the quota.
    for member in sorted(members, key=lambda name: -len(mine[name])):
        allowed = quota + 1 if spare > 0 and len(mine[member]) > quota else quota
        spare -= allowed - quota
        loose += mine[member][allowed:]
        del mine[member][allowed:]
    for member in members:
        while len(mine[member]) < quota and loose:
            mine[member].append(loose.pop())
    for member in members:
        if loose and len(mine[member]) == quota:
            mine[member].append(loose.pop())
    assert not loose
    return {partition: member for member in members for partition in mine[member]}


def round_robin(owner: Mapping[Partition, str], members: Sequence[str], partitions: int) -> dict[Partition, str]:
    """Return shares that differ by at most one partition, regardless of the previous owners."""
    return {partition: members[partition % len(members)] for partition in range(partitions)}


class Group:
    """One classic group on one topic. Every method performs an action, writes its rows, and counts its effects."""

    def __init__(
        self, emit: Emit, clock: Clock, group_id: str, partitions: int, seed: int, *, cooperative: bool = False
    ) -> None:
        self.truth = Truth()
        self.group_id, self.partitions, self.cooperative = group_id, partitions, cooperative
        self.topic, self.topic_id = f"{group_id}-topic", str(uuid.UUID(int=seed + 1))
        self._emit, self._clock = emit, clock
        self._random = random.Random(seed)
        self._generation, self._state = 0, "Empty"
        self.members: list[str] = []
        self._born = 0
        self._owner: dict[Partition, str] = {}
        """The last member to which each partition was assigned."""
        self._holder: dict[Partition, str] = {}
        self._let_go_ms: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = dict.fromkeys(range(partitions), 0)
        self._has_commit: set[Partition] = set()
        self._processed: dict[Partition, int] = dict.fromkeys(range(partitions), 0)
        self._log_end: dict[Partition, int] = dict.fromkeys(range(partitions), 100)
        self._chain_started_ms = 0
        self._in_chain = False
        self._recent: list[tuple[int, int]] = []
        self._began = False

    # --- what a test asks for ---------------------------------------------------------------------------------------

    def join(self, count: int = 1, **plan: Any) -> list[str]:
        """Let members join, which causes one rebalance."""
        names = [self._new_name() for _ in range(count)]
        self._rebalance("member_joined", names[0], [*self.members, *names], new=names, **plan)
        return names

    def leave(self, member: str | None = None, *, expire: bool = False, **plan: Any) -> None:
        """Let a member leave. If it was the last member, the group becomes empty and does not rebalance."""
        member = member or self._random.choice(self.members)
        left = [name for name in self.members if name != member]
        self.members = left
        kind, reason = ("member_expired", "session_timeout") if expire else ("member_left", "leave")
        extra = {"wait_ms": 10_000} if expire else {}
        if left:
            self._event(kind, reason=reason, member_id=member, **extra)
            self._release(member)
            self._rebalance(kind, member, left, **plan)
        else:
            self._rebalance_started(kind, member)
            self._clock.now_ms += 5
            self._event(kind, reason=reason, member_id=member, state_after="Empty", member_count=0, **extra)
            self._release(member)
            self.truth.outcomes["emptied"] += 1
            self._in_chain = False

    def rejoin(self, **plan: Any) -> None:
        """Let the leader rejoin without a change of the assignment."""
        self._rebalance("leader_rejoined", self.members[0], list(self.members), **plan)

    def interrupted(self, **plan: Any) -> None:
        """Start a rebalance that another rebalance interrupts before any member receives an assignment."""
        self._rebalance_started("leader_rejoined", self.members[0])
        started_ms = self._clock.now_ms
        self._clock.now_ms += 20
        for member in self.members:
            self._joined(member, started_ms, new=False, wait_ms=20)
            if not self.cooperative:
                self._release(member)
        if len(self.members) > 1:
            self.truth.times_last[max(self.members)] += 1
        self._generation_created(self.members)
        self._clock.now_ms += 50
        self.truth.outcomes["superseded"] += 1
        self._in_chain = True
        self._rebalance("member_rejoined", self.members[-1], list(self.members), **plan)

    def storm(self, rebalances: int, every_ms: int) -> None:
        """Run `count` rebalances at this interval. The analysis only finds the storm if other rebalances are at least a
        minute away.
        """
        first = self.truth.rebalances + 1
        for _ in range(rebalances):
            begun = self._clock.now_ms
            self.rejoin(quick=True)
            self._clock.now_ms = max(self._clock.now_ms, begun + every_ms)
        self.truth.storms.append((first, rebalances))

    def work(self, rounds: int, every_ms: int = 5_000) -> None:
        """Append records, and let the owners process and commit them."""
        for _ in range(rounds):
            self._clock.now_ms += every_ms
            for partition, member in self._holder.items():
                self._log_end[partition] += self._random.randrange(0, 50)
                behind = self._random.randrange(0, 3) and self._random.randrange(0, 20)
                reach = max(self._processed[partition], self._log_end[partition] - behind)
                self._process(partition, member, self._processed[partition], reach)
                self._commit(partition, member, reach)

    # --- a rebalance ------------------------------------------------------------------------------------------------

    def _rebalance(
        self,
        reason: str,
        by: str,
        members: list[str],
        *,
        new: Sequence[str] = (),
        assign: Callable[[Mapping[Partition, str], Sequence[str], int], dict[Partition, str]] = sticky,
        duplicates: int = 0,
        gap: int = 0,
        force: bool = False,
        quick: bool = False,
    ) -> None:
        old_generation = self._generation
        self._rebalance_started(reason, by)
        started_ms = self._clock.now_ms
        target = assign(self._owner, members, self.partitions)
        waits = {member: 1 if quick else self._random.randrange(1, 3_000) for member in members}
        ordered = sorted(members, key=lambda member: (waits[member], member))
        for member in ordered:
            self._clock.now_ms = started_ms + waits[member]
            self._joined(member, started_ms, new=member in new, wait_ms=waits[member])
            self._release(member, keep={p for p, m in target.items() if m == member} if self.cooperative else set())
        if len(members) > 1:
            self.truth.times_last[ordered[-1]] += 1
        self.members = members
        moving = {
            p: (self._owner[p], m) for p, m in target.items() if p in self._owner and self._owner[p] != m
        }  # fmt: skip
        least = sticky(self._owner, members, self.partitions)
        self.truth.partitions_moved += len(moving)
        self.truth.minimum_moves += sum(1 for p, m in least.items() if p in self._owner and self._owner[p] != m)
        self._generation_created(members)
        ahead: dict[Partition, int] = {}
        for partition, (source, _) in moving.items():
            if duplicates:
                ahead[partition] = self._refuse(partition, source, duplicates, old_generation)
        self._clock.now_ms += 5
        self._event("assignment_stored", wait_ms=5, state_after="Stable")
        for partition, member in sorted(target.items()):
            if self._holder.get(partition) != member:
                self._ownership(partition, "assigned", member)
        for partition, (source, gainer) in moving.items():
            if force:
                self._handoff(partition, source, gainer)
        for member in members:
            self._clock.now_ms += 3
            self._event("member_synced", member_id=member, wait_ms=8)
            told_ms = self._clock.now_ms
            for partition in sorted(p for p, m in target.items() if m == member and self._holder.get(p) != member):
                self._take(partition, member, told_ms, gap if partition in moving else 0)
        for beyond in ahead.values():
            self.truth.duplicates_min += beyond
            self.truth.duplicates_max += beyond + 7
        self._owner = target
        self._event("rebalance_completed", wait_ms=self._clock.now_ms - started_ms, member_count=len(members))
        self.truth.outcomes["completed"] += 1
        self._in_chain = False

    def _rebalance_started(self, reason: str, by: str) -> None:
        self.truth.rebalances += 1
        if not self._in_chain:
            self._chain_started_ms = self._clock.now_ms
        self._event("rebalance_started", reason=reason, member_id=by, state_after="PreparingRebalance")

    def _joined(self, member: str, started_ms: int, *, new: bool, wait_ms: int) -> None:
        self._event("member_joined", member_id=member, reason="new" if new else "rejoined", wait_ms=wait_ms)

    def _generation_created(self, members: Sequence[str]) -> None:
        self._generation += 1
        self._event(
            "generation_created", member_id=members[0], member_count=len(members), protocol_name="sticky",
            state_after="CompletingRebalance",
        )  # fmt: skip
        for member in members:
            self._write(
                "journal_member", generation_id=self._generation, member_id=member, group_instance_id=None,
                client_id=f"client-{member}", client_host="10.0.0.1", session_timeout_ms=10_000,
                rebalance_timeout_ms=60_000, join_wait_ms=1, leader=member == members[0],
            )  # fmt: skip

    def _release(self, member: str, keep: set[Partition] = frozenset()) -> None:  # type: ignore[assignment]
        for partition in [p for p, m in self._holder.items() if m == member and p not in keep]:
            del self._holder[partition]
            self._let_go_ms[partition] = self._clock.now_ms
            self._ownership(partition, "released", member)

    def _take(self, partition: Partition, member: str, told_ms: int, gap: int) -> None:
        self._holder[partition] = member
        if partition in self._let_go_ms:
            idle_from = max(self._let_go_ms.pop(partition), self._chain_started_ms)
            self.truth.unowned_partition_ms += told_ms - idle_from
        start = self._committed[partition]
        known = partition in self._has_commit
        self._has_commit.add(partition)
        self._offset(partition, "fetch", member, start if known else -1)
        if gap:
            self._log_end[partition] = max(self._log_end[partition], start) + gap + 1
        self._offset(partition, "position", member, start + gap)
        self.truth.skipped += gap
        if gap:
            missed = max(0, start + gap - self._processed[partition])
            self.truth.gap_records += missed
        reach = max(start + gap, self._log_end[partition])
        self._process(partition, member, start + gap, reach)
        self._commit(partition, member, reach)

    def _refuse(self, partition: Partition, source: str, records: int, generation: int) -> int:
        """Let the old owner process records that it can no longer commit. Return the number of these records."""
        reach = self._processed[partition] + records
        self._log_end[partition] = max(self._log_end[partition], reach)
        self._process(partition, source, self._processed[partition], reach)
        self._offset(partition, "commit", source, reach, generation=generation, error=ILLEGAL_GENERATION)
        self._offset(partition, "position", source, reach + 7)
        self.truth.refused_commits += 1
        return reach - self._committed[partition]

    def _process(self, partition: Partition, member: str, first: int, end: int) -> None:
        if end <= first:
            return
        self._clock.now_ms += 1
        self._emit("delivery", {
            "group_id": self.group_id, "topic": self.topic, "partition": partition, "member_id": member,
            "at_ms": self._clock.now_ms, "first_offset": first, "last_offset": end - 1,
        })  # fmt: skip
        self.truth.duplicates += max(0, min(self._processed[partition], end) - first)
        self._processed[partition] = max(self._processed[partition], end)

    def _commit(self, partition: Partition, member: str, offset: int) -> None:
        self._offset(partition, "commit", member, offset)
        self._committed[partition] = offset
        self.truth.accepted_commits += 1

    def _handoff(self, partition: Partition, source: str, target: str) -> None:
        common: Row = {
            "generation_id": self._generation, "topic_id": self.topic_id, "topic": self.topic, "partition": partition,
            "mode": "drain", "source_member_id": source, "target_member_id": target, "mark_offset": None,
            "deadline_ms": self._clock.now_ms + 1_000,
        }  # fmt: skip
        self._write("journal_handoff", **common, phase="begun", reason=None, wait_ms=None)
        self._clock.now_ms += 1_000
        self._write("journal_handoff", **common, phase="ended", reason="timeout", wait_ms=1_000)
        self.truth.forced += 1
        self.truth.handoffs += 1

    # --- rows -------------------------------------------------------------------------------------------------------

    def _write(self, table: str, **columns: Any) -> None:
        common = {"at_ms": self._clock.now_ms, "node_id": 1, "group_id": self.group_id}
        self._emit(table, {"seq": self._clock.next_seq(), **common, **columns})

    def _event(self, kind: str, *, state_after: str | None = None, **columns: Any) -> None:
        before = self._state if self._began else None
        self._began = True
        self._state = state_after or self._state
        known: Row = dict.fromkeys(
            ("reason", "detail", "member_id", "group_instance_id", "client_id", "client_host", "protocol_name",
             "member_count", "wait_ms", "row_count")
        )  # fmt: skip
        self._write(
            "journal_event", group_type="classic", kind=kind, generation_id=self._generation, state_before=before,
            state_after=self._state, **{**known, **columns},
        )  # fmt: skip

    def _ownership(self, partition: Partition, change: str, member: str) -> None:
        self._write(
            "journal_ownership", generation_id=self._generation, topic_id=self.topic_id, topic=self.topic,
            partition=partition, change=change, member_id=member,
        )  # fmt: skip

    def _offset(
        self,
        partition: Partition,
        kind: str,
        member: str,
        offset: int,
        *,
        generation: int | None = None,
        error: int = 0,
    ) -> None:
        self._write(
            "journal_offset", kind=kind, generation_id=self._generation if generation is None else generation,
            member_id=member, topic_id=self.topic_id, topic=self.topic, partition=partition, offset=offset,
            log_start_offset=0, log_end_offset=self._log_end[partition], error_code=error,
        )  # fmt: skip

    def _new_name(self) -> str:
        self._born += 1
        return f"m{self._born}-{uuid.UUID(int=self._random.getrandbits(128))}"

    def finish(self) -> Truth:
        self.truth.owned = dict(self._holder)
        return self.truth


def journal(seed: int, groups: int = 4) -> tuple[dict[str, list[Row]], dict[str, Truth]]:
    """Return a journal of a few thousand rows that contains every kind of event."""
    tables: dict[str, list[Row]] = defaultdict(list)
    clock = Clock()
    truths: dict[str, Truth] = {}
    chance = random.Random(seed)
    for number in range(groups):
        group = Group(
            lambda table, row: tables[table].append(row), clock, f"group-{number}", chance.choice((5, 6, 12)),
            seed * 1_000 + number, cooperative=bool(number % 2),
        )  # fmt: skip
        group.join(chance.randrange(1, 4))
        group.work(4, 30_000)
        group.join(duplicates=chance.randrange(1, 40))
        group.work(3, 30_000)
        group.join(gap=chance.randrange(1, 30), assign=round_robin)
        group.work(2, 45_000)
        group.leave(force=True, expire=bool(number % 2))
        group.work(2, 45_000)
        group.interrupted()
        clock.now_ms += 120_000
        group.storm(chance.randrange(5, 9), 4_000)
        clock.now_ms += 120_000
        group.join(2, duplicates=3, force=True)
        group.work(3)
        if number == 0:
            while group.members:
                clock.now_ms += 90_000
                group.leave()
            clock.now_ms += 600_000
            group.join(2)
            group.work(1)
        truths[group.group_id] = group.finish()
    return tables, truths
