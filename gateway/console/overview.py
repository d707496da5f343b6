"""The overview: nodes, rates, and the groups that need attention, each with one sentence.

The one idea: urgency is a number computed from facts of the last minutes in the journal, and the page sorts by it.
Rates are differences between two reads of the cluster's totals, so they exist only while a person looks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.cluster.figures import Figures, NodeFigures
from gateway.cluster.jobs import Job
from gateway.console.groups import GroupRow, GroupViews
from gateway.console.kafka import Kafka, Viewer
from gateway.console.timeline import duration
from gateway.net.context import Principal
from gateway.security.kinds import AclOperation, ResourceType
from gateway.version import program_version
from storage.console import ConsoleStore, Loaded
from storage.nodes import NodeStore

RECENT_MS = 10 * 60 * 1000
"""Age up to which a lost member or a forced handoff needs attention."""
MAX_EVENTS = 5_000
LONG_REBALANCE_MS = 15_000
LAG_MEMORY_S = 30.0
"""Age of the earlier lag with which the current lag is compared."""
MAX_LAG_READS = 60
RISING_BY = 100
"""Number of records by which lag must have grown to be called rising."""
MAX_ATTENTION = 50

_REBALANCING = frozenset({"PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling"})


@dataclass(slots=True)
class _Reads:
    """Earlier reads of totals and lags, the oldest first, kept only while a person looks."""

    totals: list[tuple[float, Loaded]] = field(default_factory=list[tuple[float, Loaded]])
    lags: dict[Principal, list[tuple[float, dict[str, int]]]] = field(
        default_factory=lambda: defaultdict(list[tuple[float, dict[str, int]]])
    )
    """By viewer, because each may see other groups and topics."""


class Attention(GroupRow):
    """A group that needs attention."""

    urgency: int
    why: str
    """The most urgent reason, as a sentence."""
    also: list[str]


class Overview:
    def __init__(
        self,
        kafka: Kafka,
        store: ConsoleStore,
        nodes: NodeStore,
        groups: GroupViews,
        figures: NodeFigures,
    ) -> None:
        self._kafka, self._store, self._nodes, self._groups = kafka, store, nodes, groups
        self._figures = figures
        self._reads = _Reads()

    async def show(self, who: Viewer) -> dict[str, object]:
        """Return what the first page shows to the viewer."""
        services = self._kafka.services
        now_ms = services.clock.now_ms()
        totals = await self._store.totals()
        listed = await self._groups.list(who, "")
        events = await self._store.recent_events(now_ms - RECENT_MS, MAX_EVENTS)
        forced = await self._store.forced_handoffs(now_ms - RECENT_MS, MAX_EVENTS)
        refused = await self._store.refusals(now_ms - RECENT_MS, MAX_EVENTS)
        lags = {row["id"]: row["lag"] or 0 for row in listed["groups"]}
        earlier = self._earlier_lags(who, lags)
        attention = attend(listed["groups"], events, forced, refused, earlier, now_ms)
        sees_cluster = self._kafka.may(who, AclOperation.DESCRIBE, ResourceType.CLUSTER)
        return {
            "cluster": services.cluster_id,
            "version": program_version(),
            "now": now_ms,
            "node": int(services.membership.node_id),
            "nodes": await self.nodes(who) if sees_cluster else [],
            "counts": {name: totals[name] for name in ("topics", "partitions", "groups", "size_bytes")},
            "rates": self._rates(totals),
            "attention": attention[:MAX_ATTENTION],
            "groups": len(listed["groups"]),
            "cut": listed["cut"],
        }

    async def nodes(self, who: Viewer) -> list[dict[str, object]]:
        """Return the live nodes with their leases and jobs. Raise KafkaError if the viewer may not describe the
        cluster."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.CLUSTER)
        jobs: dict[int, list[str]] = defaultdict(list)
        for shard, node_id in (await self._store.jobs()).items():
            jobs[node_id].append(_job_name(shard))
        return [
            {
                "id": int(report.node.node_id),
                "here": report.node.node_id == self._kafka.services.membership.node_id,
                "listeners": {name: f"{host}:{port}" for name, (host, port) in report.node.listeners.items()},
                "rack": report.node.rack,
                "roles": [
                    name
                    for name, has in (
                        ("broker", report.node.roles.is_broker),
                        ("controller", report.node.roles.is_controller),
                    )
                    if has
                ],
                "up": report.registered_ms_ago,
                "leases": dict(report.leases),
                "jobs": sorted(jobs.get(int(report.node.node_id), [])),
                "behind": report.revision_lag,
                "incarnation": report.node.incarnation,
            }
            for report in await self._nodes.reports()
        ]

    async def figures(self, who: Viewer) -> Mapping[int, Figures]:
        """Return the figures of each node that answers, by node. Raise KafkaError if the viewer may not describe the
        cluster."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.CLUSTER)
        return await self._figures.of_all()

    def _rates(self, totals: Loaded) -> dict[str, object] | None:
        """Return records and bytes per second since the previous read; None at the first one."""
        now, reads = time.monotonic(), self._reads.totals
        while reads and reads[0][0] < now - LAG_MEMORY_S:
            reads.pop(0)
        before = next(((at, each) for at, each in reads if now - at >= 1.0), None)
        if not reads or now - reads[-1][0] >= 1.0:
            reads.append((now, totals))
        if before is None:
            return None
        at, each = before
        return {
            "produced": max(totals["written"] - each["written"], 0) / (now - at),
            "consumed": max(totals["committed"] - each["committed"], 0) / (now - at),
            "bytes": max(totals["size_bytes"] - each["size_bytes"], 0) / (now - at),
        }

    def _earlier_lags(self, who: Viewer, lags: dict[str, int]) -> Mapping[str, int]:
        now, kept = time.monotonic(), self._reads.lags
        for viewer in [viewer for viewer, reads in kept.items() if reads[-1][0] < now - 2 * LAG_MEMORY_S]:
            del kept[viewer]
        reads = kept[who.principal]
        while reads and (reads[0][0] < now - 2 * LAG_MEMORY_S or len(reads) >= MAX_LAG_READS):
            reads.pop(0)
        earlier: dict[str, int] = {}
        for at, each in reversed(reads):
            if now - at >= LAG_MEMORY_S / 3:
                earlier |= each
        if not reads or now - reads[-1][0] >= 1.0:
            reads.append((now, lags))
        return earlier


def _job_name(shard: int) -> str:
    try:
        return Job(shard).name.lower().replace("_", " ")
    except ValueError:
        return f"job {shard}"


def attend(
    groups: Sequence[GroupRow],
    events: Sequence[Loaded],
    forced: Mapping[str, int],
    refused: Mapping[str, int],
    earlier: Mapping[str, int],
    now_ms: int,
) -> list[Attention]:
    """Return the groups that need attention, the most urgent first. `events` are newest first."""
    by_group: dict[str, list[Loaded]] = defaultdict(list)
    for event in events:
        by_group[event["group_id"]].append(event)
    found: list[Attention] = []
    for group in groups:
        group_id = group["id"]
        said = _said_of_members(group, by_group[group_id], now_ms)
        if forced.get(group_id):
            said.append((70, f"{_count(forced[group_id], 'handoff')} ended by a timeout: records may be read twice."))
        if refused.get(group_id):
            said.append((60, f"{_count(refused[group_id], 'commit')} refused in ten minutes."))
        lag = group["lag"] or 0
        if group["members"] == 0 and lag > 0:
            said.append((40, f"No member reads, and {lag:,} records wait."))
        elif lag - earlier.get(group_id, lag) > RISING_BY:
            said.append((50, f"Lag is rising: {lag:,} records, {lag - earlier[group_id]:,} more than before."))
        if said:
            said.sort(reverse=True)
            found.append({**group, "urgency": said[0][0], "why": said[0][1], "also": [text for _, text in said[1:]]})
    return sorted(found, key=lambda group: (-group["urgency"], group["id"]))


def _said_of_members(group: GroupRow, events: Sequence[Loaded], now_ms: int) -> list[tuple[int, str]]:
    """Return sentences about rebalances and lost members, each with its urgency."""
    said: list[tuple[int, str]] = []
    rebalancing_ms = now_ms - (group["changed"] or now_ms)
    if group["state"] in _REBALANCING and rebalancing_ms > LONG_REBALANCE_MS:
        said.append((90, f"It has been rebalancing for {duration(rebalancing_ms)}."))
    expired = [event for event in events if event["kind"] in ("member_expired", "member_fenced")]
    if expired:
        ago = duration(now_ms - expired[0]["at_ms"])
        name = expired[0]["client_id"] or expired[0]["member_id"]
        more = f" and {len(expired) - 1} more" if len(expired) > 1 else ""
        said.append(
            (80, f"{name}{more} was lost {ago} ago." if not more else f"{name}{more} were lost; last {ago} ago.")
        )
    starts = sum(event["kind"] == "rebalance_started" for event in events)
    if starts >= 5:
        said.append((55, f"{starts} rebalances in ten minutes."))
    return said


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
