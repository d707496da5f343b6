"""The canonical scenarios: one name and one meaning for every client in any language.

The one idea: a suite answers every required scenario, even if the answer only says why its client cannot run it. So the
report card lacks no scenario silently. Additional scenarios of a client have names of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ASSIGNORS = ("range", "roundrobin", "sticky", "cooperative-sticky")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`name` may contain `<assignor>`. Then the answer for one assignor suffices, and a suite may give more.

    `logged` scenarios pass only with a delivery log that the checker accepts. In `outage` scenarios the gateway is away
    for some time, so that no partition can be read.
    """

    name: str
    meaning: str
    logged: bool = False
    outage: bool = False


def _group(name: str, meaning: str, *, logged: bool = True, outage: bool = False) -> Scenario:
    return Scenario(f"groups.{name}", meaning, logged, outage)


SCENARIOS: tuple[Scenario, ...] = (
    *(
        Scenario(f"data.codec.{codec}", f"keys, headers, nulls and a record of 900 kB come back, compressed by {codec}")
        for codec in ("none", "gzip", "snappy", "lz4", "zstd")
    ),
    Scenario("data.idempotent", "an idempotent producer's records are stored once and in order"),
    Scenario("data.seek_and_times", "seek to the beginning, the end, an offset and a timestamp"),
    Scenario("data.delete_records", "records before an offset are deleted and no longer read"),
    Scenario("transactions.commit-abort", "a read_committed consumer receives only records of committed transactions"),
    Scenario(
        "transactions.open",
        "while a transaction is open, a read_committed consumer receives neither its records nor later ones",
    ),
    Scenario("transactions.fencing", "a second producer of a transactional id aborts and fences the first"),
    Scenario(
        "transactions.consume-transform-produce",
        "all produced records and committed offsets take effect together, or none do",
    ),
    Scenario("transactions.gateway-kill", "consume-transform-produce while the gateway is killed (kill −9)"),
    Scenario("transactions.timeout", "a transaction left open is aborted, and read_committed consumers continue"),
    Scenario("admin.topics", "create, describe, add partitions, delete"),
    Scenario("admin.configs", "describe and alter a topic's configs"),
    Scenario("admin.groups", "list, describe and delete groups, and read or alter their offsets"),
    _group("<assignor>.1-2-4", "one, two, four members and one again, records flowing, one owner per partition"),
    _group("<assignor>.ten-runs", "one, two, four members, ten runs in a row"),
    _group("one-partition-three-consumers", "three members on one partition read each record once"),
    _group("leave", "a member that leaves hands over at once"),
    _group("crash", "a member killed (−9) is replaced after its session; reading resumes from the last commit"),
    _group("crash-half-open", "a stopped process keeps its connections open, is replaced, and comes back"),
    _group("gateway-restart", "the gateway restarts under a group that reads", outage=True),
    _group("gateway-kill", "the gateway is killed (−9) under a group that reads", outage=True),
    _group("commit-resume", "the next consumer does not read committed records again"),
    _group("commit-in-revoke", "the next owner starts at offsets that were committed in the revoke callback"),
    _group(
        "static-members",
        "a static member restarts without a rebalance; a second member with the same instance id fences the first",
    ),
    _group("cooperative", "6 → 3+3 → 2+2+2, and retained partitions are never revoked"),
    _group("rolling-upgrade", "two rolling bounces from eager to cooperative-sticky under load"),
    _group("partition-added", "partitions added to a topic are read"),
    _group("topic-deleted", "a deleted topic leaves the assignment, and the other topic stays"),
    _group("regex", "a pattern also matches topics that are created later"),
    _group("subscription-change", "a member changes its topics without leaving"),
    _group("same-client-id", "members that share a client id are different members"),
    _group("leave-versions", "LeaveGroup at each version the client can send", logged=False),
    _group("connect-and-sr", "groups of protocol types connect and sr", logged=False),
)
ASSIGNOR_FIELD = "<assignor>"

CORE = (
    "data.codec.zstd",
    "data.idempotent",
    "data.seek_and_times",
    "transactions.commit-abort",
    "admin.topics",
    "admin.groups",
    "groups.range.1-2-4",
    "groups.roundrobin.1-2-4",
    "groups.leave",
    "groups.gateway-kill",
    "groups.commit-resume",
    "groups.static-members",
    "groups.cooperative",
)
"""Scenarios that every client runs in each run of continuous integration."""


def find(name: str) -> Scenario | None:
    """Return the canonical scenario that `name` stands for, or None if the scenario is the suite's own."""
    return _BY_NAME.get(name)


def unanswered(answered: Collection[str]) -> list[str]:
    """Return the canonical scenarios that `answered` lacks. For `<assignor>` an answer of any assignor suffices."""
    return [scenario.name for scenario in SCENARIOS if not any(name in answered for name in _names(scenario))]


def _names(scenario: Scenario) -> tuple[str, ...]:
    if ASSIGNOR_FIELD not in scenario.name:
        return (scenario.name,)
    return tuple(scenario.name.replace(ASSIGNOR_FIELD, assignor) for assignor in (*ASSIGNORS, ASSIGNOR_FIELD))


_BY_NAME = {name: scenario for scenario in SCENARIOS for name in _names(scenario)}
