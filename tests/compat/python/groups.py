"""Group scenarios. They only let members act; the checker judges the delivery log."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.compat.python.client import Member, MemberOptions, UnsupportedError, wait_until
from tests.compat.python.scenario import SCENARIOS, Body, Run, all_of, scenario
from tests.compat.scenarios import ASSIGNORS

PARTITIONS = 4
SESSION_SECONDS = 6.0
SERVER_SIDE = "consumer"
"""Listed among the assignors, but means the consumer protocol (KIP-848), in which the coordinator assigns."""
LONG_SESSION_MS = 45_000
"""Session timeout of members that leave. It is long, so that a hand-over after a LeaveGroup cannot be mistaken for an
expired session.
"""
SOON_SECONDS = 30.0
"""Shorter than the long session timeout. A hand-over within this time was caused by a LeaveGroup, or needed no
rebalance.
"""


def _need(run: Run, assignor: str) -> None:
    if assignor not in run.client.assignors:
        raise UnsupportedError(f"no {assignor} assignor")


def _cooperative(assignor: str) -> bool:
    return assignor in ("cooperative-sticky", SERVER_SIDE)


def _one_two_four(run: Run, assignor: str) -> None:
    _need(run, assignor)
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS, cooperative=_cooperative(assignor))
    feed = run.feed(topic, range(PARTITIONS))
    members: list[Member] = []

    def grow(count: int) -> None:
        while len(members) < count:
            members.append(run.start(MemberOptions(f"c{len(members) + 1}", group, assignor, (topic,))))
        view.wait_settled({member.name for member in members}, all_of(topic, PARTITIONS))
        view.wait_more(2 * PARTITIONS)

    for count in (1, 2, 4):
        grow(count)
    run.leave(members[1:], feed)
    view.wait_settled({"c1"}, all_of(topic, PARTITIONS))
    view.wait_more(2 * PARTITIONS)
    feed.stop()
    view.wait_caught_up()
    members[0].stop()


for _assignor in ASSIGNORS:

    def _bound(run: Run, assignor: str = _assignor) -> None:
        _one_two_four(run, assignor)

    scenario(f"groups.{_assignor}.1-2-4")(_bound)


def _ten_runs(run: Run, assignor: str) -> None:
    """Run ten groups with new names in turn. Each begins where the previous one ended. All share one log."""
    _need(run, assignor)
    topic = run.topic(PARTITIONS)
    _, view = run.journal(topic, PARTITIONS, cooperative=_cooperative(assignor))
    producer_rounds = 5
    for attempt in range(10):
        group = run.group()
        run.client.commit(group, topic, dict.fromkeys(range(PARTITIONS), attempt * 2 * producer_rounds))
        members: list[Member] = []
        for count in (1, 2, 4):
            while len(members) < count:
                name = f"r{attempt}c{len(members) + 1}"
                members.append(run.start(MemberOptions(name, group, assignor, (topic,))))
            view.wait_settled({member.name for member in members}, all_of(topic, PARTITIONS))
            if count > 1:
                run.produce(topic, range(PARTITIONS), producer_rounds)
        view.wait_caught_up()
        for member in members:
            member.request_stop()
        for member in members:
            member.stop()


for _assignor in ("range", "cooperative-sticky"):

    def _bound_ten_runs(run: Run, assignor: str = _assignor) -> None:
        _ten_runs(run, assignor)

    scenario(f"groups.{_assignor}.ten-runs")(_bound_ten_runs)


@scenario("groups.one-partition-three-consumers")
def one_partition_three_consumers(run: Run) -> None:
    topic, group = run.topic(1), run.group()
    _, view = run.journal(topic, 1)
    members = [run.start(MemberOptions(f"c{index}", group, run.client.assignors[0], (topic,))) for index in (1, 2, 3)]
    view.wait_for(lambda: sum(map(len, view.owned.values())) == 1, "the partition has one owner")
    run.produce(topic, [0], 9)
    view.wait_caught_up()
    run.produce(topic, [0], 9)
    view.wait_caught_up()
    for member in members:
        member.stop()


@scenario("groups.leave")
def leave(run: Run) -> None:
    """The remaining member must own everything well before the leaving member's session could expire."""
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS)
    feed = run.feed(topic, range(PARTITIONS))
    options = MemberOptions("c1", group, assignor, (topic,), session_timeout_ms=LONG_SESSION_MS)
    first, second = run.start(options), run.start(replace(options, name="c2"))
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    view.wait_more(2 * PARTITIONS)
    run.leave([second], feed)
    view.wait_settled({"c1"}, all_of(topic, PARTITIONS), SOON_SECONDS)
    view.wait_more(2 * PARTITIONS)
    feed.stop()
    view.wait_caught_up()
    first.stop()


@scenario("groups.crash")
def crash(run: Run) -> None:
    """A member in a process of its own is killed. Its partitions move when its session ends, and continue at the last
    commit.
    """
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS, redelivery_allowed=True)
    feed = run.feed(topic, range(PARTITIONS))
    survivor = run.start(MemberOptions("c1", group, assignor, (topic,)))
    each = "each" in run.client.commits
    victim = run.spawn(MemberOptions("c2", group, assignor, (topic,), commit="each" if each else "auto"))
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    view.wait_for(lambda: view.delivered_by["c2"] > 10, "the victim reads")
    victim.kill()
    view.wait_settled({"c1"}, all_of(topic, PARTITIONS), SESSION_SECONDS + 40)
    feed.stop()
    view.wait_caught_up()
    survivor.stop()
    again = sum(count - 1 for count in view.delivered.values())
    assert again <= 1 or not each, f"{again} records came again, though each was committed before the next"


@scenario("groups.crash-half-open")
def crash_half_open(run: Run) -> None:
    """A stopped process keeps its connections open. When it continues, it learns that it was
    removed, and joins again.
    """
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS, redelivery_allowed=True)
    feed = run.feed(topic, range(PARTITIONS))
    survivor = run.start(MemberOptions("c1", group, assignor, (topic,)))
    victim = run.spawn(MemberOptions("c2", group, assignor, (topic,)))
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    view.wait_for(lambda: view.delivered_by["c2"] > 10, "the victim reads")
    victim.freeze()
    view.wait_settled({"c1"}, all_of(topic, PARTITIONS), SESSION_SECONDS + 40)
    rounds = view.rounds["c2"]
    victim.thaw()
    view.wait_for(lambda: view.rounds["c2"] > rounds, "the victim has joined again")
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    feed.stop()
    view.wait_caught_up()
    victim.stop()
    survivor.stop()


def _gateway_away(run: Run, *, killed: bool) -> None:
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS, redelivery_allowed=True)
    feed = run.feed(topic, range(PARTITIONS), outage=True)
    members = [run.start(MemberOptions(name, group, assignor, (topic,))) for name in ("c1", "c2")]
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    view.wait_more(5 * PARTITIONS)
    if killed:
        run.kill_gateway()
    else:
        run.restart_gateway()
    produced = len(view.produced)
    view.wait_for(lambda: len(view.produced) > produced + PARTITIONS, "producing goes on")
    view.wait_more(5 * PARTITIONS)
    view.wait_settled({"c1", "c2"}, all_of(topic, PARTITIONS))
    feed.stop()
    view.wait_caught_up()
    for member in members:
        member.stop()


@scenario("groups.gateway-restart")
def gateway_restart(run: Run) -> None:
    _gateway_away(run, killed=False)


@scenario("groups.gateway-kill")
def gateway_kill(run: Run) -> None:
    _gateway_away(run, killed=True)


@scenario("groups.commit-resume")
def commit_resume(run: Run) -> None:
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS)
    for name in ("first", "second", "third"):
        run.produce(topic, range(PARTITIONS), 5)
        member = run.start(MemberOptions(name, group, assignor, (topic,)))
        view.wait_caught_up()
        member.stop()
    for partition in range(PARTITIONS):
        assert run.client.committed(group, topic, partition) == 15


@scenario("groups.commit-in-revoke")
def commit_in_revoke(run: Run) -> None:
    """Only the revoke callback commits. So every hand-over without a repeated record proves that the callback has
    committed.
    """
    if "revoke" not in run.client.commits:
        raise UnsupportedError("it has no callbacks")
    for assignor in ("range", "cooperative-sticky"):
        if assignor not in run.client.assignors:
            continue
        topic, group = run.topic(PARTITIONS), run.group()
        if run.view is None:
            run.journal(topic, PARTITIONS)
        view = run.view
        assert view is not None
        feed = run.feed(topic, range(PARTITIONS))
        options = [MemberOptions(f"{assignor}{index}", group, assignor, (topic,), commit="revoke") for index in (1, 2)]
        first = run.start(options[0])
        view.wait_settled({first.name}, all_of(topic, PARTITIONS))
        view.wait_more(5 * PARTITIONS)
        second = run.start(options[1])
        view.wait_settled({first.name, second.name}, all_of(topic, PARTITIONS))
        view.wait_more(5 * PARTITIONS)
        second.stop()
        view.wait_settled({first.name}, all_of(topic, PARTITIONS))
        view.wait_more(5 * PARTITIONS)
        feed.stop()
        view.wait_caught_up()
        first.stop()


@scenario("groups.static-members")
def static_members(run: Run) -> None:
    """A restart within the session moves no partition, and the other member sees no rebalance. A second member with the
    same instance id fences the first one.
    """
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    journal, view = run.journal(topic, PARTITIONS)

    def options(name: str, instance_id: str) -> MemberOptions:
        return MemberOptions(name, group, assignor, (topic,), instance_id=instance_id, session_timeout_ms=20_000)

    other = run.start(options("other", "i-1"))
    mover = run.start(options("mover", "i-2"))
    view.wait_settled({"other", "mover"}, all_of(topic, PARTITIONS))
    run.produce(topic, range(PARTITIONS), 3)
    view.wait_caught_up()
    held, rounds = set(view.owned["mover"]), view.rounds["other"]
    mover.stop()
    mover = run.start(options("mover again", "i-2"))
    view.wait_settled({"other", "mover again"}, all_of(topic, PARTITIONS), 15)
    assert view.owned["mover again"] == held, "the restart moved partitions"
    assert view.rounds["other"] == rounds, "the restart made the other member rebalance"
    run.produce(topic, range(PARTITIONS), 3)
    view.wait_caught_up()
    for partition in range(PARTITIONS):
        wait_until(lambda partition=partition: run.client.committed(group, topic, partition) == 6, "6 is committed")

    if run.client.not_fenced:
        run.detail = f"restart only: {run.client.not_fenced}"
        mover.stop()
        other.stop()
        return

    # The fenced member learns only later that it is fenced, so the test ends its ownership here.
    journal.killed(mover.name)
    mover.expects_fencing = True
    usurper = run.start(options("usurper", "i-2"))
    wait_until(mover.fenced.is_set, "the first of the name is fenced")
    mover.join(10)
    view.wait_settled({"other", "usurper"}, all_of(topic, PARTITIONS))
    run.produce(topic, range(PARTITIONS), 3)
    view.wait_caught_up()
    usurper.stop()
    other.stop()


@scenario("groups.cooperative")
def cooperative(run: Run) -> None:
    _need(run, "cooperative-sticky")
    topic, group = run.topic(6), run.group()
    _, view = run.journal(topic, 6, cooperative=True)
    feed = run.feed(topic, range(6))
    members: list[Member] = []
    for count in (1, 2, 3):
        members.append(run.start(MemberOptions(f"c{count}", group, "cooperative-sticky", (topic,))))
        view.wait_settled({member.name for member in members}, all_of(topic, 6))
        view.wait_more(18)
    feed.stop()
    view.wait_caught_up()
    for member in members:
        member.request_stop()
    for member in members:
        member.stop()


@scenario("groups.rolling-upgrade")
def rolling_upgrade(run: Run) -> None:
    raise UnsupportedError(run.client.no_upgrade)


@scenario("groups.partition-added")
def partition_added(run: Run) -> None:
    assignor = run.client.assignors[0]
    topic, group = run.topic(2), run.group()
    _, view = run.journal(topic, 2)
    feed = run.feed(topic, range(2))
    members = [run.start(MemberOptions(name, group, assignor, (topic,), topics_change=True)) for name in ("c1", "c2")]
    view.wait_settled({"c1", "c2"}, all_of(topic, 2))
    run.client.add_partitions(topic, 4)
    view.wait_settled({"c1", "c2"}, all_of(topic, 4))
    feed.stop()
    run.produce(topic, range(4), 10)
    view.wait_caught_up()
    for member in members:
        member.stop()


@scenario("groups.topic-deleted")
def topic_deleted(run: Run) -> None:
    if run.client.ends_with_topic:
        raise UnsupportedError(run.client.ends_with_topic)
    assignor = run.client.assignors[0]
    stays, goes, group = run.topic(2, "stays"), run.topic(2, "goes"), run.group()
    _, view = run.journal(stays, 2)
    commit = run.client.commit_where_topics_go
    members = [
        run.start(MemberOptions(name, group, assignor, (stays, goes), commit=commit, topics_change=True))
        for name in ("c1", "c2")
    ]
    view.wait_settled({"c1", "c2"}, all_of(stays, 2) + all_of(goes, 2))
    run.produce(goes, range(2), 5)
    run.produce(stays, range(2), 5)
    view.wait_caught_up()
    run.client.delete_topic(goes)
    view.wait_settled({"c1", "c2"}, all_of(stays, 2))
    run.produce(stays, range(2), 5)
    view.wait_caught_up()
    for member in members:
        member.stop()


@scenario("groups.regex")
def regex(run: Run) -> None:
    assignor = run.client.assignors[0]
    group = run.group()
    prefix = f"re-{group[2:]}"
    first = run.topic(2, f"{prefix}-a")
    _, view = run.journal(first, 2)
    member = run.start(MemberOptions("c1", group, assignor, pattern=f"^{prefix}-[ab]-.*", topics_change=True))
    view.wait_settled({"c1"}, all_of(first, 2))
    run.topic(2, f"{prefix}-c")
    second = run.topic(2, f"{prefix}-b")
    view.wait_settled({"c1"}, all_of(first, 2) + all_of(second, 2))
    run.produce(first, range(2), 5)
    run.produce(second, range(2), 5)
    view.wait_caught_up()
    member.stop()


@scenario("groups.subscription-change")
def subscription_change(run: Run) -> None:
    if not run.client.changes_topics:
        raise UnsupportedError("its topics are fixed when it starts")
    assignor = run.client.assignors[0]
    old, new, group = run.topic(2, "old"), run.topic(2, "new"), run.group()
    _, view = run.journal(old, 2)
    steady = run.start(MemberOptions("steady", group, assignor, (old,), topics_change=True))
    changing = run.start(MemberOptions("changing", group, assignor, (old,), topics_change=True))
    view.wait_settled({"steady", "changing"}, all_of(old, 2))
    run.produce(old, range(2), 5)
    view.wait_caught_up()
    changing.change_topics((new,))
    view.wait_for(
        lambda: view.owned.get("steady") == set(all_of(old, 2)) and view.owned.get("changing") == set(all_of(new, 2)),
        "each has its topic",
    )
    run.produce(old, range(2), 5)
    run.produce(new, range(2), 5)
    view.wait_caught_up()
    changing.change_topics((old, new))
    view.wait_for(
        lambda: sum(map(len, view.owned.values())) == 4 and set(all_of(new, 2)) <= view.owned["changing"],
        "both topics are owned",
    )
    run.produce(old, range(2), 5)
    run.produce(new, range(2), 5)
    view.wait_caught_up()
    for member in (changing, steady):
        member.stop()


@scenario("groups.same-client-id")
def same_client_id(run: Run) -> None:
    """Start four members at the same moment. All members of this suite share one client id."""
    assignor = run.client.assignors[0]
    topic, group = run.topic(PARTITIONS), run.group()
    _, view = run.journal(topic, PARTITIONS)
    members = [run.start(MemberOptions(f"c{index}", group, assignor, (topic,))) for index in range(PARTITIONS)]
    view.wait_settled({member.name for member in members}, all_of(topic, PARTITIONS))
    run.produce(topic, range(PARTITIONS), 10)
    view.wait_caught_up()
    for member in members:
        member.request_stop()
    for member in members:
        member.stop()


@scenario("groups.leave-versions")
def leave_versions(run: Run) -> None:
    """If the gateway did not understand a LeaveGroup, the next member would wait for the session to expire."""
    versions = run.client.leave_versions()
    assignor = run.client.assignors[0]
    _, view = run.journal("", 1)
    for version, extra in versions.items():
        topic, group = run.topic(1), run.group()
        options = MemberOptions(
            f"v{version} leaves", group, assignor, (topic,), session_timeout_ms=LONG_SESSION_MS, extra=extra
        )
        leaver = run.start(options)
        view.wait_settled({leaver.name}, all_of(topic, 1))
        run.produce(topic, [0], 1)
        view.wait_caught_up()
        sent = run.requests("leave_group", version)
        leaver.stop()
        told = run.requests("leave_group", version)
        assert sent is None or told is None or told > sent, f"no LeaveGroup v{version} has come"
        started = time.monotonic()
        follower = run.start(replace(options, name=f"v{version} follows"))
        view.wait_settled({follower.name}, all_of(topic, 1))
        took = time.monotonic() - started
        assert took < SOON_SECONDS, f"LeaveGroup v{version}: the next member waited {took:.1f} s"
        follower.stop()
    run.detail = f"versions {', '.join(map(str, versions))}"


@scenario("groups.connect-and-sr")
def connect_and_sr(run: Run) -> None:
    """The gateway forwards the bytes of other protocols without parsing them: those of the protocol types of Connect
    and the Schema Registry.
    """
    for protocol_type, protocol in (("connect", "compatible"), ("sr", "v0")):
        metadata, assignment = b"\x00\x01metadata of " + protocol_type.encode(), b"\xff\xfe\x00assignment"
        answered = run.client.raw_group(protocol_type, protocol, metadata, assignment)
        assert answered == assignment, f"{protocol_type}: {answered!r}"


CONSUMER_PROTOCOL: dict[str, Body] = {
    "consumer-protocol.1-2-4": lambda run: _one_two_four(run, SERVER_SIDE),
    **{
        f"consumer-protocol.{name}": SCENARIOS[f"groups.{name}"]
        for name in (
            *("leave", "crash", "crash-half-open", "gateway-restart", "gateway-kill", "commit-resume"),
            *("partition-added", "topic-deleted", "regex", "subscription-change"),
        )
    },
}
"""The same scenarios for a client with the consumer protocol, whose members have no assignors."""
