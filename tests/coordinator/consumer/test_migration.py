"""Online migration: a classic group becomes a consumer group when a consumer member joins, and may become a classic
group again.
"""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.model import GroupState
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import handoff as consumer_handoff
from gateway.coordinator.consumer import unsettled
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import MemberState
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import (
    Awaits,
    Drained,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    HandoffSettings,
)
from gateway.coordinator.machine import Adopted, ClusterChanged
from gateway.coordinator.requests import HandoffProgress, SyncReply
from gateway.coordinator.settings import MigrationPolicy
from protocol.errors import ErrorCode

from .mixed import MACHINES, NONE, REBALANCE_MS, SESSION_MS, Mixed, offer, read
from .scene import named, topic_id

ALL = {"t": {0, 1, 2, 3}}
GIVEN = {"t": {2, 3}}
L = 2
"""The connection on which member l joins."""
DRAIN = HandoffSettings(HandoffMode.DRAIN, 30_000)
REBALANCE = ErrorCode.REBALANCE_IN_PROGRESS


def held(scene: Mixed) -> dict[str, dict[str, set[int]]]:
    return {member_id: named(member.assigned) for member_id, member in scene.group.members.items()}


def test_a_group_of_one_is_upgraded_while_it_reads():
    scene = Mixed()
    generation = scene.classic_group({"k": ALL})
    assert scene.told(scene.enter("a")) == (generation + 1, {})
    assert scene.is_consumer
    assert scene.facts[0] == "classic group became a consumer group: a member of the consumer protocol joined"
    assert held(scene) == {"k": ALL, "a": {}}
    assert scene.commit("k", generation).error is NONE, "what it has read is still its own to commit"
    assert scene.alive("k", generation) is REBALANCE
    # The member is eager: it releases all partitions and then joins.
    joined = scene.join("k", offer())
    assert joined is not None
    assert (joined.error, joined.generation_id, joined.leader, joined.members) == (NONE, generation + 1, "", ())
    assert (joined.protocol_type, joined.protocol_name) == ("consumer", "range")
    mine = scene.share("k", generation + 1)
    epoch, its = scene.told(scene.beat("a", generation + 1))
    assert its is not None
    assert (epoch, mine["t"] | its["t"], mine["t"] & its["t"]) == (generation + 1, ALL["t"], set())
    assert scene.alive("k", generation + 1) is NONE


def test_cooperative_member_releases_before_another_receives():
    scene = Mixed()
    generation = scene.classic_group({"k": ALL}, "cooperative-sticky")
    scene.enter("a")
    joined = scene.join("k", offer("cooperative-sticky", owned=ALL, generation=generation))
    assert joined is not None
    assert joined.generation_id == generation, "it has not come as far as the group"
    assert scene.group.members[MemberId("k")].state is MemberState.UNREVOKED
    kept = scene.share("k", generation)
    assert len(kept["t"]) == 2
    assert scene.told(scene.beat("a", generation + 1)) == (generation + 1, None), "nothing is free yet"
    assert scene.alive("k", generation) is REBALANCE
    joined = scene.join("k", offer("cooperative-sticky", owned=kept, generation=generation))
    assert joined is not None
    assert joined.generation_id == generation + 1
    assert scene.share("k", generation + 1) == kept
    assert scene.told(scene.beat("a", generation + 1)) == (generation + 1, {"t": ALL["t"] - kept["t"]})
    assert scene.alive("k", generation + 1) is NONE


@pytest.mark.parametrize("state", [GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE])
def test_held_requests_must_join_again_after_an_upgrade(state: GroupState):
    scene = Mixed()
    generation = scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}})
    assert scene.join("k", offer("range", topics=("t", "u"))) is None
    if state is GroupState.COMPLETING_REBALANCE:
        assert scene.join("l") is not None
        follower = "l" if scene.group.leader_id == "k" else "k"
        assert scene.sync(follower, generation + 1) is None
    assert scene.group.state is state
    held_before = max(scene.answers, default=0)
    scene.enter("a")
    assert scene.is_consumer
    errors = [reply.error for request_id, reply in scene.last.replies]
    assert errors == [REBALANCE, NONE]
    assert held_before


def test_eager_member_that_has_just_joined_owns_nothing():
    """The eager member waits for the end of the join phase. It has released its partitions before, so they are free."""
    scene = Mixed()
    scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}})
    scene.join("k", offer("range", topics=("t", "u")))
    scene.enter("a")
    assert held(scene)["k"] == {}
    assert held(scene)["l"] == {"t": {2, 3}}


def test_cooperative_member_owns_its_claim_and_its_assignment():
    """The member was assigned fewer partitions than it claimed, and may not have released the others yet."""
    scene = Mixed()
    scene.join("", offer("cooperative-sticky"), new_id="k")
    scene.sync("k", 1, {"k": ALL})
    scene.join("k", offer("cooperative-sticky", owned=ALL, generation=1))
    scene.sync("k", 2, {"k": {"t": {0, 1}}})
    assert scene.group.state is GroupState.STABLE
    scene.enter("a")
    assert held(scene)["k"] == ALL


def test_waiting_member_owns_nothing_of_its_assignment():
    """The leader has assigned a partition that another member reads, so the new owner's SyncGroup is held. At this
    moment the partition has no owner.
    """
    scene = Mixed()
    generation = scene.classic_group({"k": ALL, "l": {}}, "cooperative-sticky")
    assert scene.group.leader_id == "k"
    scene.join("k", offer("cooperative-sticky", owned=ALL, generation=generation))
    scene.join("l", offer("cooperative-sticky", generation=generation))
    assert scene.sync("k", generation + 1, {"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}) is not None
    assert scene.sync("l", generation + 1) is None, "it waits for k"
    scene.enter("a")
    assert held(scene) == {"k": ALL, "l": {}, "a": {}}


def draining(scene: Mixed) -> int:
    """Return the epoch of a group where member k has released two partitions and must commit the records that it was
    served. Their new owner l waits.
    """
    generation = scene.classic_group({"k": ALL, "l": {}}) + 1
    assert scene.group.leader_id == "k"
    scene.join("k", offer())
    scene.join("l", offer(), connection_number=L)
    assert scene.sync("k", generation, {"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}) is not None
    assert scene.sync("l", generation) is None
    return generation


def drained(scene: Mixed, source: str, *partitions: int, by_id: bool) -> None:
    topic = topic_id("t") if by_id else "t"
    scene.play(HandoffProgress(tuple(Drained(topic, each, MemberId(source), 7, 7) for each in partitions)))


def test_pending_drain_continues_after_an_upgrade():
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    draining(scene)
    scene.enter("a")
    assert scene.is_consumer
    assert [(fact.target, fact.reason) for fact in scene.last.facts if isinstance(fact, HandoffEnded)] == [
        ("l", HandoffEnd.SUPERSEDED)
    ] * 2
    assert held(scene) == {"k": {"t": {0, 1}}, "l": {}, "a": {}}
    assert {(each.source, each.partition) for each in consumer_handoff.draining(scene.group)} == {("k", 2), ("k", 3)}
    joined = scene.join("l", offer(), connection_number=L)
    assert joined is not None
    assert scene.share("l", joined.generation_id) == {}, "they are not drained"
    assert scene.told(scene.beat("a", joined.generation_id)) == (joined.generation_id, None)
    drained(scene, "k", 2, 3, by_id=True)
    epoch, given = scene.told(scene.beat("a", joined.generation_id))
    assert given is not None
    assert len(given["t"]) == 1
    joined = scene.join("l", offer(), connection_number=L)
    assert joined is not None
    assert scene.share("l", epoch)["t"] | given["t"] == {2, 3}


def test_upgrade_does_not_prolong_a_drain():
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    draining(scene)
    scene.tick(SESSION_MS // 4)
    scene.enter("a")
    assert scene.group.drain_deadlines == {"k": scene.now_ms - SESSION_MS // 4 + DRAIN.timeout_ms}


def test_commit_of_a_classic_member_at_its_last_epoch_counts_while_it_is_awaited():
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    generation = scene.classic_group({"k": ALL})
    epoch, _ = scene.told(scene.enter("a"))
    scene.join("k", offer())
    gone = {"t": ALL["t"] - scene.share("k", epoch)["t"]}
    reply = scene.commit("k", generation, ALL)
    assert (reply.error, reply.by_member_epoch, reply.member_epoch) == (NONE, True, epoch)
    assert scene.commit("k", generation - 1, gone).error is ErrorCode.ILLEGAL_GENERATION
    drained(scene, "k", *gone["t"], by_id=True)
    assert scene.commit("k", generation, gone).error is ErrorCode.ILLEGAL_GENERATION


def test_commit_of_a_classic_source_at_its_last_epoch_counts_after_another_member_got_its_share_early():
    scene, generation = told_early()
    joined = scene.join("k", offer())
    assert joined is not None
    assert joined.generation_id == generation + 1
    assert scene.commit("k", generation, GIVEN).error is NONE
    assert scene.commit("l", generation - 1, GIVEN).error is ErrorCode.ILLEGAL_GENERATION


def test_pending_drain_continues_after_a_downgrade():
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    scene.classic_group({"k": ALL})
    epoch, _ = scene.told(scene.enter("a"))
    joined = scene.join("k", offer())
    assert joined is not None
    kept = scene.share("k", epoch)
    gone = ALL["t"] - kept["t"]
    assert len(gone) == 2
    assert scene.told(scene.beat("a", epoch)) == (epoch, None), "they are not drained"
    scene.tick(1_000)
    scene.beat("a", -1)
    assert not scene.is_consumer
    assert {(each.source, each.partition, each.deadline_ms) for each in scene.group.handoffs} == {
        ("k", each, scene.now_ms - 1_000 + DRAIN.timeout_ms) for each in gone
    }
    scene.join("k", offer())
    assert scene.group.state is GroupState.COMPLETING_REBALANCE
    scene.join("", offer(), new_id="l")
    scene.join("k", offer())
    generation = scene.group.generation_id
    assert scene.group.leader_id == "k"
    assert scene.sync("k", generation, {"k": kept, "l": {"t": gone}}) is not None
    assert scene.sync("l", generation) is None, "they are still not drained"
    drained(scene, "k", *gone, by_id=False)
    assert read(next(iter(reply for _, reply in scene.last.replies if isinstance(reply, SyncReply))).assignment) == {
        "t": gone
    }


def told_early() -> tuple[Mixed, int]:
    """Do the same as `draining`, but l was held for the maximal time and then received its share before the group was
    upgraded.
    """
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    generation = draining(scene)
    for _ in range(2):
        scene.tick(SESSION_MS // 4)
        scene.alive("k", generation)
    assert [read(reply.assignment) for reply in scene.answers.values() if isinstance(reply, SyncReply)][-1] == GIVEN
    scene.enter("a")
    assert scene.is_consumer
    return scene, generation


def waits_for(scene: Mixed, connection: int = L) -> set[int]:
    """Return the partitions whose committed offset OffsetFetch on this connection reports as unstable."""
    return {index for _, index in unsettled.awaited_by(scene.group, connection, "", "")}


def ended(scene: Mixed) -> list[tuple[int, HandoffEnd]]:
    return [(fact.partition, fact.reason) for fact in scene.last.facts if isinstance(fact, HandoffEnded)]


def sources(scene: Mixed) -> set[tuple[str, int]]:
    return {(each.source, each.partition) for each in consumer_handoff.draining(scene.group)}


def test_share_assigned_too_early_is_kept_after_an_upgrade_but_not_readable():
    scene, _ = told_early()
    assert held(scene) == {"k": {"t": {0, 1}}, "l": GIVEN, "a": {}}
    assert any(isinstance(fact, HandoffBegun) and fact.target == "l" for fact in scene.last.facts)
    assert sources(scene) == {("k", 2), ("k", 3)}
    assert waits_for(scene) == {2, 3}
    assert waits_for(scene, connection=1) == set(), "it is their source"
    assert {index for _, index in unsettled.awaited_by(scene.group, 77, "client", "/127.0.0.1")} == {2, 3}
    assert unsettled.awaited_by(scene.group, 77, "another", "/127.0.0.1") == set()
    drained(scene, "k", 2, by_id=True)
    assert ended(scene) == [(2, HandoffEnd.DRAINED)]
    assert (waits_for(scene), sources(scene)) == ({3}, {("k", 3)})
    assert MACHINES.must_store(scene.last)


def test_claim_of_an_earlier_generation_is_not_readable_yet():
    """Member l's next SyncGroup is held when the upgrade happens, and l believes that it owns its earlier
    assignment."""
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    sticky = "cooperative-sticky"
    kept, gone = {"t": {0, 1}}, {"t": {2, 3}}
    generation = scene.classic_group({"k": ALL, "l": {}}, sticky)
    scene.join("k", offer(sticky, owned=kept, generation=generation))
    scene.join("l", offer(sticky, generation=generation), connection_number=L)
    scene.sync("k", generation + 1, {"k": kept, "l": gone})
    assert scene.sync("l", generation + 1) is None
    for _ in range(2):
        scene.tick(SESSION_MS // 4)
        scene.alive("k", generation + 1)
    scene.join("l", offer(sticky, topics=("t", "u"), owned=gone, generation=generation + 1), connection_number=L)
    scene.join("k", offer(sticky, owned=kept, generation=generation + 1))
    scene.sync("k", generation + 2, {"k": kept, "l": gone})
    assert scene.sync("l", generation + 2) is None
    scene.enter("a")
    assert held(scene) == {"k": kept, "l": gone, "a": {}}
    assert waits_for(scene) == {2, 3}
    assert sources(scene) == {("k", 2), ("k", 3)}


def test_source_drains_again_after_the_early_owner_releases():
    scene, _ = told_early()
    joined = scene.join("l", offer(topics=("u",)), connection_number=L)
    assert joined is not None
    assert held(scene)["l"] == {}
    assert named(scene.group.members[MemberId("k")].undrained) == GIVEN
    assert named(scene.group.members[MemberId("l")].undrained) == {}, "it has read nothing of it"
    assert (waits_for(scene), sources(scene)) == (set(), {("k", 2), ("k", 3)})
    assert {reason for _, reason in ended(scene)} == {HandoffEnd.SUPERSEDED, HandoffEnd.ACKNOWLEDGED}
    epoch = joined.generation_id
    assert not scene.told(scene.beat("a", epoch - 1))[1]
    drained(scene, "k", 2, 3, by_id=True)
    assert scene.told(scene.beat("a", epoch))[1]


def test_replacement_of_an_early_static_owner_may_not_read_yet():
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    generation = scene.classic_group({"k": ALL, "l": {}}, instances={"l": "j"}) + 1
    scene.join("k", offer())
    scene.join("l", offer(), connection_number=L, instance="j")
    scene.sync("k", generation, {"k": {"t": {0, 1}}, "l": GIVEN})
    scene.sync("l", generation, instance="j")
    for _ in range(2):
        scene.tick(SESSION_MS // 4)
        scene.alive("k", generation)
    scene.enter("a", "u", instance_id="j")
    assert held(scene) == {"k": {"t": {0, 1}}, "a": {}}
    assert named(scene.group.members[MemberId("a")].undrained) == {}
    assert named(scene.group.members[MemberId("k")].undrained) == GIVEN


def test_source_drains_again_after_the_early_owner_leaves():
    scene, _ = told_early()
    scene.leave("l")
    assert named(scene.group.members[MemberId("k")].undrained) == GIVEN
    assert scene.group.drain_deadlines == {"k": scene.now_ms - SESSION_MS // 2 + DRAIN.timeout_ms}


def test_source_drains_again_if_the_early_owner_leaves_a_coordinator_that_is_behind():
    """The coordinator does not know the topic yet. So it must not take the topic for deleted."""
    scene, _ = told_early()
    scene.cluster = behind(scene)
    scene.leave("l")
    assert named(scene.group.members[MemberId("k")].undrained) == GIVEN
    assert HandoffEnd.PARTITION_DELETED not in {reason for _, reason in ended(scene)}


def test_leave_of_the_source_makes_the_partition_readable():
    scene, _ = told_early()
    scene.leave("k")
    assert {reason for _, reason in ended(scene)} == {HandoffEnd.SOURCE_LEFT}
    assert waits_for(scene) == set()


def test_upgrade_does_not_prolong_the_wait_to_read():
    scene, _ = told_early()
    until_ms = scene.now_ms - SESSION_MS // 2 + DRAIN.timeout_ms
    while (next_ms := CONSUMER.next_deadline(scene.group)) != until_ms:
        assert next_ms is not None
        assert next_ms < until_ms
        scene.now_ms = next_ms - 1
        scene.alive("k", scene.group.members[MemberId("k")].member_epoch)
        scene.alive("l", scene.group.members[MemberId("l")].member_epoch)
        scene.beat("a", scene.group.members[MemberId("a")].member_epoch)
    scene.now_ms = until_ms - 1
    scene.tick(0)
    assert waits_for(scene) == {2, 3}
    scene.tick(1)
    assert {reason for _, reason in ended(scene)} == {HandoffEnd.TIMEOUT}
    assert waits_for(scene) == set()


def test_share_taken_from_a_waiting_member_is_not_readable_after_an_upgrade():
    """The leader gave a partition to l, which waits for the commits of k, and then to m."""
    scene = Mixed(handoff=DRAIN, consumer={"handoff": DRAIN})
    name, half = "cooperative-sticky", {"t": {0, 1}}
    scene.classic_group({"k": ALL, "l": {}, "m": {}}, name)
    for shares, claims in (
        ({"k": half, "l": {"t": {2, 3}}, "m": {}}, {"k": ALL, "l": {}, "m": {}}),
        ({"k": half, "l": {}, "m": {"t": {2, 3}}}, {"k": half, "l": {"t": {2, 3}}, "m": {}}),
    ):
        generation = scene.group.generation_id
        for member, claim in claims.items():
            scene.join(member, offer(name, owned=claim, generation=generation))
        for member in ("l", "m", "k"):
            scene.sync(member, generation + 1, shares)
    assert [(each.source, each.behind) for each in scene.group.handoffs] == [("l", "k")] * 2
    scene.enter("a")
    assert [(each.source, each.owner) for each in scene.group.unsettled] == [("k", "l")] * 2


def test_client_without_stable_fetch_continues_to_read():
    scene, _ = told_early()
    scene.play(HandoffProgress(passed=((MemberId("l"), "t", 2), (MemberId("k"), "t", 3))))
    assert ended(scene) == [(2, HandoffEnd.CLIENT_CAP)]
    assert waits_for(scene) == {3}


def test_partition_not_readable_stays_so_after_a_restart():
    scene, _ = told_early()
    scene.restart()
    assert {index for _, index in unsettled.awaited_by(scene.group, 77, "client", "/127.0.0.1")} == {2, 3}
    assert {each.deadline_ms for each in scene.group.unsettled} == {scene.now_ms + DRAIN.timeout_ms}


def test_partition_not_readable_stays_so_after_a_downgrade():
    scene, _ = told_early()
    until_ms = scene.now_ms - SESSION_MS // 2 + DRAIN.timeout_ms
    scene.beat("a", -1)
    assert not scene.is_consumer
    assert {(each.source, each.partition, each.awaits, each.deadline_ms) for each in scene.group.handoffs} == {
        ("k", each, Awaits.DRAIN, until_ms) for each in (2, 3)
    }


def test_absent_static_member_keeps_its_delivered_partitions():
    scene = Mixed()
    generation = scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}, instances={"k": "i", "l": "j"})
    scene.join("l", offer("range", topics=("t", "u")), instance="j")
    for _ in range(REBALANCE_MS // 5_000):
        scene.alive("k", generation, instance="i")
        scene.tick(5_000)
    assert scene.group.generation_id == generation + 1
    assert scene.group.state is GroupState.COMPLETING_REBALANCE
    scene.enter("a")
    assert held(scene)["k"] == {"t": {0, 1}}
    assert held(scene)["l"] == {}


@pytest.mark.parametrize(
    ("policy", "up", "down"),
    [
        (MigrationPolicy.BIDIRECTIONAL, True, True),
        (MigrationPolicy.UPGRADE, True, False),
        (MigrationPolicy.DOWNGRADE, False, True),
        (MigrationPolicy.DISABLED, False, False),
    ],
)
def test_migration_policy_permits_each_direction(policy: MigrationPolicy, up: bool, down: bool):
    scene = Mixed(policy=policy)
    scene.classic_group({"k": ALL})
    reply = scene.enter("a")
    assert (reply.error, scene.is_consumer) == ((NONE, True) if up else (ErrorCode.GROUP_ID_NOT_FOUND, False))
    other = Mixed(policy=policy)
    other.enter("a")
    assert other.join("", offer()) is not None, "a classic member may join, whatever the policy"
    other.beat("a", -1)
    assert other.is_consumer is not down


def test_groups_without_members_convert_under_any_policy():
    scene = Mixed(policy=MigrationPolicy.DISABLED)
    scene.classic_group({"k": ALL})
    scene.leave("k")
    assert scene.told(scene.enter("a"))[1] == ALL
    assert scene.is_consumer
    scene.beat("a", -1)
    assert scene.join("", offer(), new_id="k") is not None
    assert not scene.is_consumer


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param("type", id="another protocol type"),
        pytest.param("subscription", id="an unreadable subscription"),
        pytest.param("assignment", id="an unreadable assignment"),
        pytest.param("user data", id="an assignor's own data"),
        pytest.param("size", id="too many members"),
    ],
)
def test_incompatible_classic_group_is_not_upgraded(spoil: str):
    from gateway.coordinator.machine import ConnectionId, RequestId
    from gateway.coordinator.requests import SyncGroup
    from protocol.consumer import Assignment, TopicPartition, encode_assignment

    scene = Mixed(consumer={"max_size": 1 if spoil == "size" else 10})
    if spoil == "type":
        scene.join("", (("x", b""),), protocol_type="connect", new_id="k")
    elif spoil == "subscription":
        scene.join("", (("range", b"\xff"),), new_id="k")
    else:
        scene.join("", new_id="k")
        if spoil == "size":
            scene.join("", new_id="l")
            scene.join("k")
    if spoil in ("assignment", "user data"):
        whole = encode_assignment(Assignment(0, (TopicPartition("t", (0,)),), b"mine"))
        given = b"\x00" if spoil == "assignment" else whole
        scene.play(
            SyncGroup(RequestId(900), ConnectionId("c"), MemberId("k"), None, 1, None, None, ((MemberId("k"), given),))
        )
    before = scene.group
    reply = scene.enter("a")
    assert reply.error is ErrorCode.GROUP_ID_NOT_FOUND
    assert scene.group is before
    cannot = "Cannot upgrade classic group g to consumer group because "
    assert reply.message == {
        "subscription": cannot + "the embedded consumer protocol is malformed.",
        "assignment": cannot + "the embedded consumer protocol is malformed.",
        "user data": cannot
        + "an unsupported custom assignor is in use. Please refer to the documentation or switch to a default "
        "assignor before re-attempting the upgrade.",
    }.get(spoil, "the group has members of another protocol")


def test_owned_partitions_in_a_subscription_do_not_hinder_an_upgrade():
    """librdkafka's leaders do this: their sticky members put their former partitions into their subscriptions."""
    from gateway.coordinator.machine import ConnectionId, RequestId
    from gateway.coordinator.requests import SyncGroup
    from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription

    scene = Mixed()
    scene.join("", (("cooperative-sticky", encode_subscription(Subscription(1, ("t",), b"mine"))),), new_id="k")
    given = encode_assignment(Assignment(0, (TopicPartition("t", (0, 1, 2, 3)),), b"mine"))
    scene.play(
        SyncGroup(RequestId(900), ConnectionId("c"), MemberId("k"), None, 1, None, None, ((MemberId("k"), given),))
    )
    scene.enter("a")
    assert scene.is_consumer
    assert held(scene) == {"k": ALL, "a": {}}


def test_partition_with_a_negative_number_does_not_hinder_an_upgrade():
    """A leader's assignor may assign such a partition, which does not exist."""
    scene = Mixed()
    generation = scene.classic_group({"k": {"t": {-1, 0, 1, 2}}})
    assert scene.told(scene.enter("a")) == (generation + 1, {"t": {3}})
    assert held(scene) == {"k": {"t": {0, 1, 2}}, "a": {"t": {3}}}


def behind(scene: Mixed, *names: str) -> Cluster:
    """Return the topics as a coordinator knows them that has read only the named ones."""
    topics = {name: scene.cluster.topics[name] for name in names}
    return Cluster(topics, {topic.topic_id: topic for topic in topics.values()}, scene.cluster.revision - 1)


def test_coordinator_that_is_behind_does_not_upgrade_a_group():
    """The coordinator cannot name an assigned topic, so the topic would have no owner in the consumer group."""
    scene = Mixed({"t": 2, "u": 2})
    scene.join("", offer(topics=("u",)), new_id="k")
    scene.sync("k", 1, {"k": {"u": {0, 1}}})
    known, scene.cluster = scene.cluster, behind(scene, "t")
    assert scene.enter("a", "u").error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert not scene.is_consumer
    scene.cluster = known
    scene.enter("a", "u")
    assert held(scene) == {"k": {"u": {0, 1}}, "a": {}}


def test_later_one_of_two_claims_to_a_partition_counts_in_an_upgrade():
    """Another member may have received a partition since one claimed it, as if its topic was deleted and created
    again."""
    scene = Mixed()
    cooperative = "cooperative-sticky"
    scene.join("", offer(cooperative), new_id="k")
    scene.sync("k", 1, {"k": ALL})
    scene.join("", offer(cooperative), new_id="l")
    scene.join("k", offer(cooperative, owned=ALL, generation=1))
    scene.sync("k", 2, {"k": {"t": {0, 1}}, "l": GIVEN})
    scene.sync("l", 2)
    scene.join("l", offer(cooperative, owned=GIVEN, generation=2))
    scene.enter("a")
    assert held(scene) == {"k": {"t": {0, 1}}, "l": GIVEN, "a": {}}


def test_coordinator_that_is_behind_an_upgrade_takes_no_topic_away():
    """A static member has returned with the other protocol, so no target was computed for the consumer group."""
    scene = Mixed()
    generation = scene.classic_group({"k": ALL}, instances={"k": "i"})
    assert scene.told(scene.enter("a", instance_id="i")) == (generation, ALL)
    scene.restart()
    scene.cluster = behind(scene)
    assert scene.beat("a", generation).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert held(scene) == {"a": ALL}


def test_only_a_join_upgrades():
    """A member that has not noticed the downgrade sends a heartbeat. The coordinator must ask it to rejoin, because
    GROUP_ID_NOT_FOUND would end the client.
    """
    scene = Mixed()
    scene.classic_group({"k": ALL})
    assert scene.beat("a", 5).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.beat("a", -1).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert not scene.is_consumer


def test_a_refused_join_upgrades_nothing():
    scene = Mixed()
    scene.classic_group({"k": ALL})
    assert scene.enter("a", subscribed_topic_regex="(").error is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert not scene.is_consumer


def test_a_static_member_may_come_back_with_the_other_protocol():
    scene = Mixed()
    generation = scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}, instances={"k": "i", "l": "j"})
    epoch, mine = scene.told(scene.enter("a", instance_id="i"))
    assert scene.is_consumer
    assert (epoch, mine) == (generation, {"t": {0, 1}}), "nothing has changed but who speaks"
    assert scene.alive("k", generation, instance="i") is ErrorCode.FENCED_INSTANCE_ID
    assert scene.alive("l", generation, instance="j") is NONE
    # Then the group becomes a classic group again.
    back = scene.join("", offer(), instance="i", new_id="k2", version=9)
    assert back is not None
    assert not scene.is_consumer
    assert "consumer group became a classic group: its last member of the consumer protocol has gone" in scene.facts
    assert (back.error, back.generation_id, back.leader, back.skip_assignment) == (NONE, epoch, "k2", True)
    assert [member.member_id for member in back.members] == ["l", "k2"], "it watches the topics of all"
    assert scene.share("k2", epoch, instance="i") == mine, "nothing has changed but who speaks"
    assert scene.alive("l", generation, instance="j") is NONE
    assert scene.commit("l", epoch).error is NONE
    assert scene.group.state is GroupState.STABLE
    assert scene.beat("a", epoch, instance_id="i").error is ErrorCode.UNKNOWN_MEMBER_ID
    scene.restart()
    assert scene.alive("l", generation, instance="j") is NONE
    assert scene.share("k2", epoch, instance="i") == mine


def test_absent_static_member_returns_with_the_other_protocol():
    scene = Mixed()
    scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}, instances={"k": "i", "l": "j"})
    epoch, mine = scene.told(scene.enter("a", instance_id="i"))
    assert scene.beat("a", -2, instance_id="i").error is NONE
    back = scene.join("", offer(), instance="i", new_id="k2", version=9)
    assert back is not None
    assert (back.error, back.generation_id) == (NONE, epoch)
    assert scene.share("k2", epoch, instance="i") == mine
    assert scene.alive("k2", epoch, instance="i") is NONE
    assert scene.commit("k2", epoch).error is NONE
    assert scene.alive("l", epoch, instance="j") is NONE


def test_sync_gets_the_protocol_of_the_consumer_group_after_a_return_with_the_other_protocol():
    scene = Mixed({"t": 1})
    epoch, _ = scene.told(scene.enter("a", instance_id="i"))
    joined = scene.join("", offer("cooperative-sticky", "range"), new_id="l")
    assert joined is not None
    scene.beat("a", epoch, {"t": {0}})
    scene.join("", offer("range", "cooperative-sticky"), instance="i", new_id="k", version=9)
    assert (scene.group.state, scene.group.protocol_name) == (GroupState.STABLE, "range")
    synced = scene.sync("l", joined.generation_id, protocol_type="consumer", protocol_name="cooperative-sticky")
    assert synced is not None
    assert (synced.error, synced.protocol_name) == (NONE, "cooperative-sticky")


def with_a_pattern(scene: Mixed) -> tuple[int, dict[str, set[int]]]:
    """Return a scene where a (subscribed by a pattern to the topics of k) and l own all their partitions. Return also
    their epoch and the share of a.
    """
    epoch, mine = scene.told(scene.enter("a", instance_id="i", subscribed_topic_names=(), subscribed_topic_regex="t.*"))
    scene.join("l", offer(), instance="j")
    scene.share("l", epoch, instance="j")
    assert mine is not None
    scene.beat("a", epoch, mine)
    return epoch, mine


@pytest.mark.parametrize(
    "unsettled_by",
    [
        "an older client",
        "other topics",
        "topics not looked at",
        "a move",
        "a newcomer",
        "a group that is ahead",
        "what is to be drained",
    ],
)
def test_return_with_the_other_protocol_waits_if_shares_must_change(unsettled_by: str):
    draining = unsettled_by == "what is to be drained"
    more = {"handoff": DRAIN, "consumer": {"handoff": DRAIN}} if draining else {}
    scene = Mixed({"t": 4, "u": 1}, **more)
    generation = scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}, instances={"k": "i", "l": "j"})
    epoch, _ = scene.told(scene.enter("a", instance_id="i"))
    wanted = ("t", "u") if unsettled_by in ("other topics", "a move") else ("t",)
    if unsettled_by in ("a move", "what is to be drained"):
        # The only reader of topic u releases some partitions of t, which member l must receive.
        scene.beat("a", epoch, subscribed_topic_names=("t", "u"))
        if draining:
            scene.beat("a", epoch, subscribed_topic_names=("t",), owned={"t": {0, 1}})
    elif unsettled_by == "a newcomer":
        scene.join("", offer(), new_id="m")
    elif unsettled_by in ("topics not looked at", "a group that is ahead"):
        scene.cluster = Mixed({"t": 6, "u": 1}).cluster
        if unsettled_by == "a group that is ahead":
            scene.play(ClusterChanged())
    version = 8 if unsettled_by == "an older client" else 9
    back = scene.join("", offer(topics=wanted), instance="i", new_id="k2", version=version)
    assert not scene.is_consumer
    assert back is None, "the others join again first"
    assert scene.alive("l", scene.group.members[MemberId("l")].member_epoch, instance="j") is REBALANCE
    assert generation <= scene.group.generation_id


def test_pattern_equal_to_the_newcomers_names_changes_nothing():
    scene = Mixed({"t": 4, "u": 1})
    scene.classic_group({"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}, instances={"k": "i", "l": "j"})
    epoch, mine = with_a_pattern(scene)
    back = scene.join("", offer(), instance="i", new_id="k2", version=9)
    assert back is not None
    assert scene.share("k2", epoch, instance="i") == mine


def test_return_with_the_other_protocol_ends_the_current_rebalance():
    """Partitions without an owner at that moment are assigned, although no new member has joined."""
    scene = Mixed()
    scene.classic_group({"k": {"t": {0, 1}}, "l": {}}, "cooperative-sticky", instances={"k": "i", "l": "j"})
    epoch, given = scene.told(scene.enter("a", instance_id="j"))
    assert scene.is_consumer
    assert set(scene.group.members) == {"k", "a"}
    assert given is not None
    joined = scene.join("k", offer("cooperative-sticky", owned={"t": {0, 1}}), instance="i")
    assert joined is not None
    assert joined.generation_id == epoch
    assert scene.share("k", epoch, instance="i")["t"] | given["t"] == ALL["t"]


def test_unsubscribed_partitions_are_revoked_if_another_member_ends_the_rebalance():
    scene = Mixed({"t": 1, "u": 1})
    scene.classic_group({"k": {"t": {0}, "u": {0}}, "l": {}}, "cooperative-sticky", instances={"k": "i", "l": "j"})
    wants_t = offer("cooperative-sticky", topics=("t",), owned={"t": {0}, "u": {0}})
    assert scene.join("k", wants_t, instance="i") is None, "the others are to join again"
    scene.enter("a", instance_id="j")
    assert scene.is_consumer
    joined = scene.join("k", wants_t, instance="i")
    assert joined is not None
    assert "u" not in scene.share("k", joined.generation_id, instance="i")


def test_waiting_joiner_gets_a_share_if_another_member_ends_the_rebalance():
    """In the meantime all other members keep their partitions. So no partition is left for the new member, and every
    partition has an owner.
    """
    scene = Mixed()
    shares = {"k": {"t": {0, 1}}, "l": {"t": {2, 3}}}
    scene.classic_group(shares, "cooperative-sticky", instances={"k": "i", "l": "j"})
    assert scene.join("", offer("cooperative-sticky"), new_id="m") is None, "the others are to join again"
    scene.enter("a", instance_id="j")
    assert scene.is_consumer
    joined = scene.join("m", offer("cooperative-sticky"))
    assert joined is not None
    assert scene.share("m", joined.generation_id) == {}, "nobody has let go of anything"
    assert named(scene.group.target[MemberId("m")])["t"]


def test_the_last_static_member_alone_is_replaced_in_a_classic_group():
    scene = Mixed()
    scene.enter("a", instance_id="i")
    joined = scene.join("", offer(), instance="i", new_id="k")
    assert not scene.is_consumer
    assert joined is not None
    assert joined.generation_id == 3
    refused = Mixed()
    refused.enter("a", instance_id="i")
    reply = refused.join("", (), instance="i")
    assert reply is not None
    assert reply.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert refused.is_consumer
    assert "a" in refused.group.members


def mixed(rebalance_timeout_ms: int = REBALANCE_MS) -> tuple[Mixed, int]:
    """Return a scene where members k (classic) and a (consumer) share the topic, and the epoch of both."""
    scene = Mixed()
    generation = scene.classic_group({"k": ALL})
    scene.enter("a", rebalance_timeout_ms=rebalance_timeout_ms)
    scene.join("k", offer())
    scene.share("k", generation + 1)
    scene.told(scene.beat("a", generation + 1))
    return scene, generation + 1


def test_members_rejoin_with_their_partitions_after_the_last_consumer_member_leaves():
    scene, epoch = mixed()
    mine = named(scene.group.members[MemberId("k")].assigned)
    assert scene.beat("a", -1).error is NONE
    assert not scene.is_consumer
    assert "consumer group became a classic group: its last member of the consumer protocol has gone" in scene.facts
    assert scene.group.state is GroupState.PREPARING_REBALANCE
    assert read(scene.group.members[MemberId("k")].assignment) == mine
    assert scene.alive("k", epoch) is REBALANCE, "its generation is still the epoch that it knows"
    commit = scene.commit("k", epoch)
    assert (commit.error, commit.by_member_epoch) == (NONE, True)
    late = scene.sync("k", epoch)
    assert late is not None
    assert late.error is REBALANCE
    joined = scene.join("k", offer())
    assert joined is not None
    assert (joined.error, joined.generation_id, joined.leader) == (NONE, epoch + 2, "k")
    assert scene.commit("k", epoch).error is ErrorCode.ILLEGAL_GENERATION
    scene.sync("k", epoch + 2, {"k": ALL})
    assert scene.group.state is GroupState.STABLE
    assert scene.commit("k", epoch + 2).by_member_epoch is False


def test_sync_with_the_protocol_of_the_consumer_group_must_join_again_after_a_downgrade():
    """In a consumer group each member receives its own first protocol. The classic group votes for one of them."""
    scene = Mixed()
    scene.enter("a")
    scene.join("", offer("range", "cooperative-sticky"), new_id="k")
    joined = scene.join("", offer("cooperative-sticky", "range"), new_id="l")
    assert joined is not None
    assert joined.protocol_name == "cooperative-sticky"
    scene.beat("a", -1)
    assert scene.group.protocol_name == "range"
    late = scene.sync("l", joined.generation_id, protocol_type="consumer", protocol_name=joined.protocol_name)
    assert late is not None
    assert late.error is REBALANCE
    unknown = scene.sync("l", joined.generation_id, protocol_type="consumer", protocol_name="roundrobin")
    assert unknown is not None
    assert unknown.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_lagging_member_survives_a_downgrade():
    """The member's epoch lags behind the group's. As a generation it would be illegal."""
    scene, epoch = mixed()
    scene.enter("b")
    assert scene.group.members[MemberId("k")].member_epoch < scene.group.group_epoch
    assert scene.leave("a", "b") == [NONE, NONE]
    assert not scene.is_consumer
    assert scene.alive("k", epoch) is REBALANCE
    assert scene.commit("k", epoch).error is NONE


@pytest.mark.parametrize("how", ["session", "leave by an administrator", "rebalance"])
def test_group_is_downgraded_however_the_last_consumer_member_ends(how: str):
    scene, epoch = mixed(5_000)
    if how == "session":
        for _ in range(10):
            scene.now_ms += SESSION_MS // 2
            scene.alive("k", epoch)
        scene.tick(0)
    elif how == "rebalance":
        for member in ("l", "m"):
            scene.join("", offer(), new_id=member)
        scene.beat("a", epoch)
        assert scene.group.members[MemberId("a")].state is MemberState.UNREVOKED
        scene.tick(5_000)
    else:
        assert scene.leave("a") == [NONE]
    assert not scene.is_consumer


def test_no_downgrade_beyond_the_size_of_a_classic_group():
    scene = Mixed(group_max_size=1)
    scene.enter("a")
    for member in ("k", "l"):
        scene.join("", offer(), new_id=member)
    scene.beat("a", -1)
    assert scene.is_consumer
    assert len(scene.group.members) == 2


@pytest.mark.parametrize("returns", [False, True])
def test_coordinator_that_is_behind_does_not_downgrade_a_group(returns: bool):
    """The coordinator cannot name an assigned topic, so the topic would have no owner in the classic group."""
    scene = Mixed({"t": 2, "u": 2})
    scene.enter("a", "t", instance_id="i")
    scene.join("", offer(topics=("u",)), new_id="k")
    assert held(scene)["k"] == {"u": {0, 1}}
    known, scene.cluster = scene.cluster, behind(scene, "t")
    if returns:
        refused = scene.join("", offer(topics=("t",)), instance="i", new_id="l")
        assert refused is not None
        assert refused.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.beat("a", -1, instance_id="i").error is NONE
    scene.cluster = known
    scene.enter("b", "u")
    assert held(scene) == {"k": {"u": {0, 1}}, "b": {}}


def test_coordinator_downgrades_a_group_when_it_is_no_longer_behind():
    scene, epoch = mixed()
    known, scene.cluster = scene.cluster, behind(scene)
    scene.beat("a", -1)
    assert scene.is_consumer
    scene.play(ClusterChanged())
    assert scene.is_consumer, "it has not read all topics yet"
    scene.cluster = known
    scene.play(ClusterChanged())
    assert not scene.is_consumer
    assert scene.alive("k", epoch) is REBALANCE


def test_a_downgraded_group_survives_a_restart():
    scene, epoch = mixed()
    scene.beat("a", -1)
    scene.restart()
    assert scene.group.state is GroupState.PREPARING_REBALANCE
    assert scene.alive("k", epoch) is REBALANCE
    assert scene.commit("k", epoch).by_member_epoch
    joined = scene.join("k", offer())
    assert joined is not None
    assert joined.error is NONE


def test_an_upgraded_group_survives_a_restart():
    scene = Mixed()
    generation = scene.classic_group({"k": ALL})
    scene.enter("a")
    scene.restart()
    assert scene.is_consumer
    assert scene.alive("k", generation) is REBALANCE
    assert scene.group.session_deadlines[MemberId("k")] == scene.now_ms + SESSION_MS, "its own session, not the group's"


def test_group_converts_repeatedly():
    scene, epoch = mixed()
    scene.beat("a", -1)
    scene.enter("b")
    assert scene.is_consumer
    assert scene.group.members[MemberId("k")].member_epoch == epoch, "it has heard of no other"
    assert scene.alive("k", epoch) is REBALANCE
    assert scene.commit("k", epoch).error is NONE


def test_adopted_has_group_conversion_replies_and_facts():
    assert Adopted.__slots__ == ("group", "conversion", "replies", "facts")


def test_request_on_an_older_connection_is_stale_after_an_upgrade():
    """The member rejoined without changes on connection 3 and was answered at once. Its earlier request on connection 2
    arrives last.
    """
    scene = Mixed()
    sticky = offer("cooperative-sticky")
    scene.join("", sticky, new_id="k", connection_number=1)
    again = scene.join("k", sticky, connection_number=3)
    assert again is not None
    assert (again.error, scene.group.state) == (NONE, GroupState.COMPLETING_REBALANCE)
    assert scene.share("k", 1, assignments={"k": ALL}) == ALL
    scene.enter("a")
    late = scene.join("k", sticky, connection_number=2)
    assert late is not None
    assert late.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "it read nothing then, and reads everything since"
    assert held(scene) == {"k": ALL, "a": {}}
    newest = scene.join("k", offer("cooperative-sticky", owned=ALL, generation=1), connection_number=3)
    assert newest is not None
    assert newest.error is NONE


def test_a_late_join_that_a_classic_group_believed_does_not_count_as_the_newest():
    scene = Mixed()
    scene.classic_group({"k": ALL, "l": {}}, "cooperative-sticky")
    for connection_number in (3, 2):
        scene.join("l", offer("cooperative-sticky", topics=("t", "u")), connection_number=connection_number)
    scene.enter("a")
    late = scene.join("l", offer("cooperative-sticky"), connection_number=2)
    assert late is not None
    assert late.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_heartbeat_of_a_heard_member_builds_nothing_while_another_member_is_silent(protocol: str):
    """A static member that left for a while is silent until its session ends."""
    scene = Mixed({"t": 1})
    epoch, _ = scene.told(scene.enter("a", instance_id="i"))
    if protocol == "classic":
        scene.join("", offer(), new_id="k")
        scene.share("k", epoch + 1)
    else:
        scene.enter("k")
    scene.beat("a", epoch, {"t": {0}})
    scene.beat("a", -2, instance_id="i")
    scene.restart()

    def beat() -> None:
        assert scene.alive("k", epoch + 1) is NONE if protocol == "classic" else scene.beat("k", epoch + 1)

    beat()
    before = scene.group
    beat()
    assert scene.group.unheard == {MemberId("a")}
    assert scene.group.session_deadlines is not before.session_deadlines
    assert scene.group.owners is before.owners
