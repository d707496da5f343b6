"""Classic members in a consumer group: the error matrix, ids, timers and answers."""

from __future__ import annotations

import pytest

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ConsumerGroup, MemberState
from gateway.coordinator.consumer.offsets import fetch_refusal
from gateway.coordinator.facts import MemberId
from gateway.coordinator.requests import OffsetCommitReply
from gateway.coordinator.settings import MigrationPolicy
from protocol.consumer import decode_assignment
from protocol.errors import ErrorCode

from .mixed import NONE, REBALANCE_MS, SESSION_MS, Mixed, offer
from .scene import named

ALL = {"t": {0, 1, 2, 3}}
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
FENCED = ErrorCode.FENCED_INSTANCE_ID
ILLEGAL = ErrorCode.ILLEGAL_GENERATION
REBALANCE = ErrorCode.REBALANCE_IN_PROGRESS
INCONSISTENT = ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def consumers(*members: str) -> Mixed:
    scene = Mixed()
    for member in members or ("a",):
        scene.enter(member)
    return scene


def settled(*, protocol: str = "range", instance: str | None = None) -> tuple[Mixed, int]:
    """Return a scene with members a (consumer) and k (classic), each with half of the partitions, and the epoch of
    both.
    """
    scene = consumers()
    scene.join("" if instance else "k", offer(protocol), new_id="k", instance=instance)
    scene.beat("a", 1)
    scene.beat("a", 1, {"t": {0, 1}})
    assert scene.alive("k", 2, instance=instance) is REBALANCE
    scene.join("k", offer(protocol), instance=instance)
    assert scene.share("k", 2, instance=instance) == {"t": {2, 3}}
    return scene, 2


# --- JoinGroup ------------------------------------------------------------------------------------------------------


def test_newcomer_receives_an_id_that_is_not_stored():
    scene = consumers()
    before = scene.group
    named_ = scene.join("", version=4, new_id="k")
    assert named_ is not None
    assert (named_.error, named_.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "k")
    assert scene.group is before
    joined = scene.join("any id at all", version=4)
    assert joined is not None
    assert (joined.error, joined.member_id) == (NONE, "any id at all")


def test_older_versions_join_at_once():
    scene = consumers()
    joined = scene.join("", version=3, new_id="k")
    assert joined is not None
    assert (joined.error, joined.member_id, joined.generation_id) == (NONE, "k", 2)
    assert (joined.leader, joined.members, joined.skip_assignment) == ("", (), False)


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        ({}, NONE),
        ({"generation": 7}, UNKNOWN),
        ({"owned": {"t": {0}}}, UNKNOWN),
    ],
)
def test_removed_classic_member_joins_anew(claim: dict[str, object], error: ErrorCode):
    """A removed member that claims partitions is refused. Other members have read these partitions further, and the
    removed member would continue from its own position.
    """
    scene = consumers()
    joined = scene.join("k", offer("cooperative-sticky", **claim))  # type: ignore[arg-type]
    assert joined is not None
    assert joined.error is error


def test_static_members_are_found_by_their_instance():
    scene = consumers()
    assert scene.join("k", instance="i").error is UNKNOWN  # type: ignore[union-attr]
    first = scene.join("", instance="i", new_id="k", version=5)
    assert first is not None
    assert (first.error, first.member_id) == (NONE, "k")
    assert scene.join("other", instance="i").error is FENCED  # type: ignore[union-attr]
    second = scene.join("", instance="i", new_id="k2", version=5)
    assert second is not None
    assert (second.error, second.member_id, second.generation_id) == (NONE, "k2", 2)
    assert set(scene.group.members) == {"a", "k2"}
    assert scene.alive("k", 2, instance="i") is FENCED
    assert scene.alive("k2", 2, instance="i") is NONE


def test_static_classic_member_replaces_a_silent_consumer_member():
    scene = consumers("a")
    scene.enter("b", instance_id="i")
    scene.beat("a", 1)
    scene.beat("a", 1, {"t": {0, 1}})
    scene.told(scene.beat("b", 2, instance_id="i"))
    joined = scene.join("", instance="i", new_id="k")
    assert joined is not None
    assert (joined.error, joined.generation_id) == (NONE, 2)
    assert scene.share("k", 2, instance="i") == {"t": {2, 3}}
    assert scene.beat("b", 2, instance_id="i").error is FENCED
    # Later, a process of the consumer protocol replaces the classic one.
    assert scene.told(scene.enter("c", instance_id="i")) == (2, {"t": {2, 3}})
    assert scene.alive("k", 2, instance="i") is FENCED


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"protocol_type": "connect"}, INCONSISTENT),
        ({"offered": ()}, INCONSISTENT),
        ({"offered": (("", b""),)}, INCONSISTENT),
        ({"offered": (("range", b"\xff\xff"),)}, INCONSISTENT),
        ({"offered": offer("roundrobin")}, INCONSISTENT),
        ({"offered": offer("roundrobin", "range")}, NONE),
        ({"session_ms": 1}, ErrorCode.INVALID_SESSION_TIMEOUT),
    ],
)
def test_incompatible_join_is_refused_and_changes_nothing(given: dict[str, object], error: ErrorCode):
    scene = consumers()
    scene.join("", offer("range", "sticky"), new_id="k")
    before = scene.group
    joined = scene.join("l", **given)  # type: ignore[arg-type]
    assert joined is not None
    assert joined.error is error
    assert (scene.group is before) == (error is not NONE)
    assert joined.member_id == ("" if error is INCONSISTENT else "l"), "upstream names nobody"


def test_id_is_handed_out_before_the_metadata_is_read():
    scene = consumers()
    named_ = scene.join("", (("range", b""),), version=4, new_id="k")
    assert named_ is not None
    assert (named_.error, named_.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "k")
    joined = scene.join("k", (("range", b""),), version=4)
    assert joined is not None
    assert joined.error is INCONSISTENT


def test_a_full_group_lets_its_own_members_in():
    scene = Mixed(consumer={"max_size": 2})
    scene.enter("a")
    scene.join("", new_id="k")
    full = scene.join("", new_id="l")
    assert full is not None
    assert (full.error, full.member_id) == (ErrorCode.GROUP_MAX_SIZE_REACHED, "")
    assert scene.join("k").error is NONE  # type: ignore[union-attr]
    assert scene.enter("b").error is ErrorCode.GROUP_MAX_SIZE_REACHED


def test_member_of_one_protocol_is_unknown_to_the_other():
    scene, epoch = settled()
    assert scene.join("a").error is UNKNOWN  # type: ignore[union-attr]
    assert scene.alive("a", epoch) is UNKNOWN
    assert scene.sync("a", epoch).error is UNKNOWN  # type: ignore[union-attr]
    assert scene.beat("k", epoch).error is UNKNOWN
    assert scene.enter("k").error is ErrorCode.FENCED_MEMBER_EPOCH


def test_late_request_on_an_older_connection_is_ignored():
    """The late request reports that the member owns nothing. Since then the member was assigned partitions on a newer
    connection.
    """
    scene, epoch = settled()
    scene.join("k", connection_number=5)
    scene.share("k", epoch)
    late = scene.join("k", connection_number=4)
    assert late is not None
    assert late.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_claim_of_another_generation_is_ignored():
    """The member has not received its last assignment, but may act as the owner of these partitions. The next answer
    decides.
    """
    scene, epoch = settled(protocol="cooperative-sticky")
    scene.enter("b")
    scene.join("k", offer("cooperative-sticky", owned={"t": {2}}, generation=epoch - 1))
    assert named(scene.group.members[MemberId("k")].pending_revocation) != {}
    assert scene.group.members[MemberId("k")].state is MemberState.UNREVOKED


def test_a_changed_subscription_has_its_assignment_in_the_next_answer():
    scene = Mixed({"t": 2, "u": 2})
    scene.enter("a", "t")
    scene.join("", offer(topics=("t",)), new_id="k")
    scene.join("k", offer(topics=("u",)))
    assert scene.group.members[MemberId("k")].subscribed_topic_names == ("u",)
    assert scene.share("k", scene.group.group_epoch) == {"u": {0, 1}}


# --- SyncGroup ------------------------------------------------------------------------------------------------------


def test_sync_errors_in_their_order():
    scene, epoch = settled(instance="i")
    assert scene.sync("k", epoch, instance="j").error is UNKNOWN  # type: ignore[union-attr]
    assert scene.sync("x", epoch, instance="i").error is FENCED  # type: ignore[union-attr]
    assert scene.sync("x", epoch).error is UNKNOWN  # type: ignore[union-attr]
    assert scene.sync("k", epoch + 1, instance="i").error is ILLEGAL  # type: ignore[union-attr]
    assert scene.sync("k", epoch, protocol_type="connect").error is INCONSISTENT  # type: ignore[union-attr]
    assert scene.sync("k", epoch, protocol_name="sticky").error is INCONSISTENT  # type: ignore[union-attr]
    assert scene.sync("k", epoch, protocol_type="consumer", protocol_name="range").error is NONE  # type: ignore[union-attr]
    scene.enter("b")
    assert scene.sync("k", epoch, instance="i").error is REBALANCE  # type: ignore[union-attr]
    assert "k" in scene.group.join_deadlines


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_the_assignment_is_of_the_version_that_the_member_speaks(version: int):
    scene = consumers()
    scene.join("", offer(version=version), new_id="k")
    reply = scene.sync("k", 2)
    assert reply is not None
    assert (reply.protocol_type, reply.protocol_name) == ("consumer", "range")
    assert decode_assignment(reply.assignment).version == version


def test_sync_waits_for_topics_that_the_new_coordinator_does_not_know_yet():
    """Otherwise the answer would leave out a topic that another node has just created. No request would ask the member
    to rejoin, because the group has not changed, so no consumer would read these partitions.
    """
    scene, epoch = settled()
    scene.restart()
    present, scene.cluster = scene.cluster, Cluster()
    reply = scene.sync("k", epoch)
    assert reply is not None
    assert (reply.error, reply.assignment) == (REBALANCE, b"")
    joined = scene.join("k")
    assert joined is not None
    assert joined.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    scene.cluster = present
    joined = scene.join("k")
    assert joined is not None
    assert (joined.error, joined.generation_id) == (NONE, epoch)
    assert scene.share("k", epoch) == {"t": {2, 3}}
    scene.tick(SESSION_MS - 1)
    assert set(scene.group.members) == {"a", "k"}


# --- Heartbeat ------------------------------------------------------------------------------------------------------


def test_commit_without_an_id_is_unknown_and_not_fenced():
    scene, epoch = settled(instance="i")
    assert scene.commit("x", epoch, instance="i").error is FENCED
    assert scene.commit("", epoch, instance="i").error is UNKNOWN


def test_heartbeat_errors():
    scene, epoch = settled(instance="i")
    assert scene.alive("k", epoch, instance="i") is NONE
    assert scene.alive("x", epoch) is UNKNOWN
    assert scene.alive("k", epoch, instance="j") is UNKNOWN
    assert scene.alive("x", epoch, instance="i") is FENCED
    assert scene.alive("", epoch, instance="i") is UNKNOWN, "librdkafka has dropped its id"
    assert scene.alive("k", epoch - 1) is ILLEGAL
    assert scene.alive("k", epoch + 1) is ILLEGAL


def test_waiting_member_is_not_asked_to_rejoin_until_all_partitions_are_free():
    scene = consumers()
    scene.join("", new_id="k")
    assert scene.group.members[MemberId("k")].state is MemberState.UNRELEASED
    assert scene.share("k", 2) == {}
    assert scene.alive("k", 2) is NONE
    scene.beat("a", 1)
    assert scene.alive("k", 2) is NONE, "a was told, and has not let go"
    scene.beat("a", 1, {"t": {0, 1}})
    assert scene.alive("k", 2) is REBALANCE


# --- time -----------------------------------------------------------------------------------------------------------


def test_classic_member_has_its_own_session_timeout():
    scene, epoch = settled()
    scene.now_ms += SESSION_MS - 1
    scene.alive("k", epoch)
    scene.tick(SESSION_MS - 1)
    assert "k" in scene.group.members
    scene.tick(1)
    assert "k" not in scene.group.members
    assert "a" in scene.group.members


def test_missed_heartbeat_of_a_classic_member_is_reported():
    scene, epoch = settled()
    late_ms = SESSION_MS * 2 // 3 + 1
    scene.alive("k", epoch)
    scene.now_ms += late_ms
    scene.alive("k", epoch)
    assert scene.facts == [f"member k said nothing for {late_ms} ms"]
    scene.alive("k", epoch)
    assert not scene.facts


def test_commit_does_not_prolong_the_session():
    scene, epoch = settled()
    scene.now_ms += SESSION_MS - 1
    assert scene.commit("k", epoch).error is NONE
    scene.tick(1)
    assert "k" not in scene.group.members


@pytest.mark.parametrize("phase", ["join", "sync"])
def test_member_that_does_not_join_or_sync_in_time_is_removed(phase: str):
    scene, epoch = settled()
    if phase == "join":
        scene.enter("b")
        assert scene.alive("k", epoch) is REBALANCE
    else:
        scene.join("k")
    for _ in range(REBALANCE_MS // 5_000 - 1):
        scene.tick(5_000)
        scene.beat("a", scene.group.members[MemberId("a")].member_epoch)
        assert scene.alive("k", epoch) in (NONE, REBALANCE)
    assert "k" in scene.group.members
    scene.tick(5_000)
    assert "k" not in scene.group.members
    why = "did not re-join in time" if phase == "join" else "never synced"
    assert any(why in fact for fact in scene.facts)


def test_join_ends_the_join_wait_and_sync_ends_the_sync_wait():
    scene, epoch = settled()
    scene.enter("b")
    scene.alive("k", epoch)
    assert set(scene.group.join_deadlines) == {"k"}
    scene.join("k")
    assert (set(scene.group.join_deadlines), set(scene.group.sync_deadlines)) == (set(), {"k"})
    scene.share("k", epoch + 1)
    assert scene.group.sync_deadlines == {}


def test_member_that_rejoins_without_releasing_is_removed():
    scene, epoch = settled(protocol="cooperative-sticky")
    scene.enter("b")
    mine = {"t": {2, 3}}
    for _ in range(REBALANCE_MS // 5_000):
        scene.join("k", offer("cooperative-sticky", owned=mine, generation=epoch))
        scene.share("k", epoch)
        for member in ("a", "b"):
            scene.beat(member, scene.group.members[MemberId(member)].member_epoch)
        scene.tick(5_000)
    assert "k" not in scene.group.members


# --- leaving, offsets, restart --------------------------------------------------------------------------------------


def test_batched_leave_has_a_code_for_each_member():
    scene, _ = settled(instance="i")
    scene.enter("b")
    scene.enter("c", instance_id="j")
    epoch = scene.group.group_epoch
    codes = scene.leave("x", ("x", "i"), ("", "no such"), ("", "i"), "b", "b", ("c", "j"))
    assert codes == [UNKNOWN, FENCED, UNKNOWN, NONE, NONE, UNKNOWN, NONE]
    assert set(scene.group.members) == {"a"}
    assert scene.group.group_epoch == epoch + 1, "however many go"


def test_leave_of_unknown_members_changes_nothing():
    scene, _ = settled()
    before = scene.group
    assert scene.leave("x") == [UNKNOWN]
    assert scene.group is before


def test_commits_name_the_epoch_as_generation():
    scene, epoch = settled()
    reply = scene.commit("k", epoch, version=2)
    assert (reply.error, reply.by_member_epoch, reply.stale) == (NONE, True, ILLEGAL)
    assert scene.commit("k", epoch - 1).error is ILLEGAL
    assert scene.commit("k", epoch + 1).error is ILLEGAL
    for said in (epoch, epoch + 1):
        assert scene.commit("a", said, version=8).error is ErrorCode.UNSUPPORTED_VERSION
    assert scene.commit("a", epoch + 1, version=9).error is ErrorCode.STALE_MEMBER_EPOCH
    assert scene.commit("", -1).error is UNKNOWN
    assert fetch_refusal(scene.group, MemberId("k"), epoch) is None
    assert fetch_refusal(scene.group, MemberId("k"), epoch + 1) is ILLEGAL


def test_transactional_commit_at_another_epoch_is_an_illegal_generation():
    scene, epoch = settled()
    before = scene.group
    for member in ("a", "k"):
        reply = scene.txn_commit(member, epoch)
        assert reply == OffsetCommitReply(NONE, by_member_epoch=True, stale=ILLEGAL, member_epoch=epoch)
        for said in (epoch - 1, epoch + 1, -1):
            assert scene.txn_commit(member, said).error is ILLEGAL
    assert scene.txn_commit("x", epoch).error is UNKNOWN
    assert scene.txn_commit("x", -1).error is UNKNOWN
    assert scene.txn_commit("", epoch).error is UNKNOWN
    reply = scene.txn_commit("", -1)
    assert (reply.error, reply.by_member_epoch, reply.by_producer) == (NONE, False, True)
    assert scene.txn_commit("", -1, instance="i").error is UNKNOWN
    assert scene.group is before


def test_empty_group_accepts_a_transactional_commit_without_an_epoch():
    scene, epoch = settled()
    scene.leave("a", "k")
    assert isinstance(scene.group, ConsumerGroup)
    assert not scene.group.members
    assert scene.txn_commit("", -1).error is NONE
    assert scene.txn_commit("k", -1).error is NONE
    assert scene.txn_commit("k", epoch).error is UNKNOWN


def test_restart_moves_no_partition():
    scene, epoch = settled()
    before = {member_id: member.assigned for member_id, member in scene.group.members.items()}
    scene.restart()
    assert {member_id: member.assigned for member_id, member in scene.group.members.items()} == before
    assert scene.alive("k", epoch) is NONE
    assert scene.told(scene.beat("a", epoch)) == (epoch, None)
    assert "all members were heard since the restart" in scene.facts
    assert scene.share("k", epoch) == {"t": {2, 3}}


def test_classic_member_joins_under_any_migration_policy():
    scene = Mixed(policy=MigrationPolicy.DISABLED)
    scene.enter("a")
    joined = scene.join("", new_id="k")
    assert joined is not None
    assert joined.error is NONE
