"""Joins, reconciliation, subscriptions, topics, timers and leaves of consumer groups, one answer at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import GroupState, MemberState
from gateway.coordinator.consumer.views import state_of
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClusterChanged
from gateway.coordinator.settings import ConsumerSettings, Settings
from protocol.errors import ErrorCode

from .scene import Scene, named, partitions

ALL = {"t": {0, 1, 2, 3}}
U = {"u": {0, 1}}
A, B = MemberId("a"), MemberId("b")


def both() -> Scene:
    """Return a scene with members a (partitions 0 and 1) and b (2 and 3). Both are at epoch 2 and have taken over their
    assignments.
    """
    scene = Scene()
    scene.join("a")
    scene.join("b")
    assert scene.beat("a", 1) == (1, {"t": {0, 1}})
    assert scene.beat("a", 1, {"t": {0, 1}}) == (2, None)
    assert scene.beat("b", 2) == (2, {"t": {2, 3}})
    return scene


def test_commit_at_an_older_epoch_is_accepted_for_partitions_held_since():
    """A heartbeat advances the member's epoch while the member's commit is under way (KIP-1251)."""
    scene = both()
    none, stale = ErrorCode.NONE, ErrorCode.STALE_MEMBER_EPOCH
    assert scene.commit("a", 1, {"t": {0, 1}}).error is none
    assert scene.commit("a", 1, {"t": {2}}).error is stale, "b owns it"
    scene.heartbeat("b", -1)
    assert scene.beat("a", 2) == (3, ALL)
    for held, epoch, error in (
        ({"t": {0, 1}}, 3, none),
        ({"t": {0, 1}}, 2, none),
        ({"t": {0, 1}}, 1, none),
        ({"t": {0, 1}}, 0, stale),
        ({"t": {0, 1}}, 4, stale),
        ({"t": {0, 1}}, -1, stale),
        ({"t": {2}}, 3, none),
        ({"t": {2}}, 2, stale),
        ({"t": {0, 2}}, 2, stale),
        ({"t": {0}, "u": {0}}, 2, stale),
        ({}, 2, stale),
    ):
        assert scene.commit("a", epoch, held).error is error, (held, epoch)
        refused = scene.txn_commit("a", epoch, held).error
        assert refused is (none if error is none else ErrorCode.ILLEGAL_GENERATION), (held, epoch)
    assert scene.commit("a", 2, {"t": {0}}).member_epoch == 3, "Postgres knows only the newest epoch"
    assert scene.commit("a", 2, {"t": {0}}, version=8).error is ErrorCode.UNSUPPORTED_VERSION


def test_partition_that_is_to_be_revoked_is_committed_at_the_epoch_of_its_assignment():
    scene = both()
    scene.heartbeat("b", -1)
    assert scene.beat("a", 2, ALL) == (3, ALL)
    assert scene.beat("a", 3, ALL) == (3, None)
    scene.join("b")
    assert scene.beat("a", 3) == (3, {"t": {0, 1}})
    assert scene.commit("a", 3, {"t": {2, 3}}).error is ErrorCode.NONE
    assert scene.beat("a", 3, {"t": {0, 1}}) == (4, None)
    assert scene.commit("a", 3, {"t": {0, 1}}).error is ErrorCode.NONE
    assert scene.commit("a", 3, {"t": {2, 3}}).error is ErrorCode.STALE_MEMBER_EPOCH, "it has released them"


def test_member_that_joins_again_commits_nothing_at_its_old_epoch():
    scene = both()
    scene.join("a")
    assert scene.commit("a", 2, {"t": {0}}).error in (ErrorCode.NONE, ErrorCode.STALE_MEMBER_EPOCH)
    assert scene.commit("a", 1, {"t": {0}}).error is ErrorCode.STALE_MEMBER_EPOCH


def test_the_first_member_gets_everything_at_once():
    scene = Scene()
    assert state_of(scene.group) is GroupState.EMPTY
    reply = scene.join("a")
    assert scene.told(reply) == (1, ALL)
    assert (reply.member_id, reply.heartbeat_interval_ms) == ("a", 5_000)
    assert state_of(scene.group) is GroupState.STABLE
    assert scene.beat("a", 1) == (1, None)


def test_partition_has_no_owner_between_old_and_new_owner():
    scene = Scene()
    scene.join("a")
    waiting = scene.join("b")
    assert scene.told(waiting) == (2, {})
    assert waiting.heartbeat_interval_ms == 500, "it is to ask again soon"
    assert state_of(scene.group) is GroupState.RECONCILING
    assert scene.group.members[MemberId("b")].state is MemberState.UNRELEASED
    assert scene.beat("b", 2) == (2, None)
    assert scene.beat("a", 1) == (1, {"t": {0, 1}})
    assert scene.beat("b", 2) == (2, None), "a has not let go"
    assert scene.beat("a", 1) == (1, {"t": {0, 1}}), "a has reported nothing yet"
    assert scene.beat("a", 1, ALL) == (1, {"t": {0, 1}}), "a owns them only now, and is told again what it is to keep"
    assert scene.beat("a", 1, ALL) == (1, None), "a owns them still"
    assert scene.beat("b", 2) == (2, None)
    assert scene.beat("a", 1, {"t": {0, 1}}) == (2, None)
    assert scene.beat("b", 2) == (2, {"t": {2, 3}})
    assert state_of(scene.group) is GroupState.STABLE


def test_member_that_has_not_reported_its_assignment_is_told_again_after_a_lost_response():
    """The coordinator may store an assignment, and lose Postgres or its connection before the answer.

    A client that does not notice continues with short heartbeats. Without a second answer it would never own the
    assignment.
    """
    scene = Scene()
    scene.join("a")
    scene.beat("a", 1, ALL)
    scene.join("b")
    scene.beat("a", 1, {"t": {0, 1}})
    assert scene.beat("b", 2) == (2, {"t": {2, 3}}), "the response that is lost"
    assert scene.beat("b", 2, connection_number=2) == (2, {"t": {2, 3}})
    assert scene.beat("b", 2, {"t": {2, 3}}, connection_number=2) == (2, None)
    assert scene.beat("b", 2, connection_number=3) == (2, None), "b has reported it"


def test_member_that_owns_no_revoked_partition_need_not_report():
    scene = Scene()
    scene.join("a")
    scene.beat("a", 1, ALL)
    scene.join("b")
    assert scene.beat("a", 1, {"t": {0, 1}}) == (2, {"t": {0, 1}})
    assert scene.beat("b", 2) == (2, {"t": {2, 3}})


@pytest.mark.parametrize("so_far", [{}, {"t": {0}}], ids=["nothing yet", "one yet"])
def test_partition_not_yet_taken_over_counts_as_not_released(so_far: dict[str, set[int]]):
    """librdkafka 2.16 behaves like this if its application takes over the first assignment slowly."""
    full = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": ("t",)}
    scene = Scene()
    scene.join("a")
    scene.join("b")
    for _ in range(2):
        assert scene.beat("a", 1, so_far, **full) == (1, {"t": {0, 1}})
        assert scene.beat("b", 2) == (2, None)
    assert scene.beat("a", 1, ALL) == (1, {"t": {0, 1}}), "now it has them all"
    assert scene.beat("b", 2) == (2, None)
    assert scene.beat("a", 1, {"t": {0, 1}}) == (2, None)
    assert scene.beat("b", 2) == (2, {"t": {2, 3}})


def test_member_need_not_take_over_an_assignment_that_shrank():
    scene = Scene()
    scene.join("a")
    scene.join("b")
    assert scene.beat("a", 1, {}) == (1, {"t": {0, 1}})
    assert scene.beat("a", 1, {"t": {0, 1}}) == (2, None)
    assert scene.beat("b", 2) == (2, {"t": {2, 3}})


class TestWhoIsSlowToTakeOver:
    """A member with a slow application reports in full heartbeats the partitions that it owned before. Then it takes
    over all of its first assignment, even if later answers revoked a part. (librdkafka and Java do so, for example
    after a restart.)
    """

    def given_and_taken_away(self, before: dict[str, set[int]]) -> Scene:
        """Return a scene where member a has reported `before` and was also assigned all of topic u. Now the coordinator
        moves u to member b.
        """
        scene = Scene({"t": 2, "u": 2})
        scene.join("a", *before, "u")
        if before:
            # The member has owned this partition for a long time.
            member = scene.group.members[A]
            scene.group = replace(scene.group, members={A: replace(member, untaken=partitions(U))})
        scene.join("b", "u")
        scene.group = replace(scene.group, target={A: partitions(before), B: partitions(U)}, spread=None)
        return scene

    def whole(self, scene: Scene, owned: dict[str, set[int]]) -> dict[str, set[int]] | None:
        names = scene.group.members[A].subscribed_topic_names
        epoch = scene.group.members[A].member_epoch
        return scene.beat("a", epoch, owned, rebalance_timeout_ms=60_000, subscribed_topic_names=names)[1]

    def delta(self, scene: Scene, owned: dict[str, set[int]] | None = None) -> dict[str, set[int]] | None:
        return scene.beat("a", scene.group.members[A].member_epoch, owned)[1]

    def others_share(self, scene: Scene) -> dict[str, set[int]]:
        """Return the partitions of member b after its next heartbeat."""
        scene.beat("b", scene.group.members[B].member_epoch)
        return named(scene.group.members[B].assigned)

    before = pytest.mark.parametrize("before", [{}, {"t": {0, 1}}], ids=["nothing", "something"])

    @before
    def test_has_not_released_what_it_is_still_taking_over(self, before: dict[str, set[int]]):
        scene = self.given_and_taken_away(before)
        for _ in range(2):
            assert self.whole(scene, before) == before | U, "it is told to take it over after all"
            assert self.others_share(scene) == {}
            assert scene.group.members[A].state is MemberState.UNREVOKED
        assert self.delta(scene, before | U) == before, "it has, and is told to let go of it"
        assert self.others_share(scene) == {}
        assert self.delta(scene, before) is None
        assert self.others_share(scene) == U

    @before
    def test_releases_a_revoked_partition_after_taking_it_over(self, before: dict[str, set[int]]):
        scene = self.given_and_taken_away(before)
        assert self.delta(scene) == before
        assert self.whole(scene, before) == before | U
        assert self.others_share(scene) == {}
        assert self.whole(scene, before | U) == before
        assert self.others_share(scene) == {}
        assert self.whole(scene, before) == before
        assert self.others_share(scene) == U, "a whole request lets go as well, of what it has owned"

    @before
    def test_releases_by_reporting_what_it_took_over(self, before: dict[str, set[int]]):
        """The coordinator revokes partitions before the member has begun to take them over. The member takes over only
        the others, and acknowledges those.
        """
        scene = self.given_and_taken_away(before)
        assert self.delta(scene) == before
        assert self.delta(scene, before) is None
        assert self.others_share(scene) == U

    @before
    def test_acknowledges_known_topics_before_it_learns_of_another(self, before: dict[str, set[int]]):
        """Java's client does so, and takes over the other topic's partitions when it learns that topic's name. It does
        not know yet that they have another owner.
        """
        scene = self.given_and_taken_away(before)
        assert self.delta(scene, before) == before | U, "it is told to take it over after all"
        assert self.others_share(scene) == {}
        read_back(scene)
        assert self.delta(scene, before) == before | U, "it has still not heard of it"
        assert self.others_share(scene) == {}
        assert self.delta(scene, before | U) == before
        assert self.delta(scene, before) is None
        assert self.others_share(scene) == U

    @before
    def test_acknowledges_kept_partitions_before_it_takes_over_more(self, before: dict[str, set[int]]):
        scene = self.given_and_taken_away(before)
        assert self.delta(scene) == before
        assert self.whole(scene, before) == before | U
        assert self.delta(scene, before) == before | U, "it has not heard of the topic"
        assert self.others_share(scene) == {}
        assert self.whole(scene, before | U) == before
        assert self.delta(scene, before) is None
        assert self.others_share(scene) == U

    def test_has_released_what_it_had_taken_over(self):
        scene = self.given_and_taken_away({})
        epoch = scene.group.members[A].member_epoch
        scene.group = replace(scene.group, target={A: partitions(U), B: partitions({})})
        assert scene.beat("a", epoch, U)[0] == 2
        scene.group = replace(scene.group, group_epoch=3, assignment_epoch=3, target={A: {}, B: partitions(U)})
        assert self.whole(scene, {}) == {}
        assert self.others_share(scene) == U

    def test_is_removed_after_its_rebalance_timeout(self):
        scene = self.given_and_taken_away({})
        assert self.whole(scene, {}) == U
        scene.now_ms += 30_000
        assert self.whole(scene, {}) == U, "which prolongs nothing"
        assert self.others_share(scene) == {}
        scene.tick(30_000)
        assert self.others_share(scene) == U
        assert scene.refused(scene.heartbeat("a", 1)) is ErrorCode.UNKNOWN_MEMBER_ID

    def test_does_not_wait_for_a_deleted_topic(self):
        scene = self.given_and_taken_away({"t": {0, 1}})
        scene.topics_changed({"t": 2})
        assert self.whole(scene, {"t": {0, 1}}) == {"t": {0, 1}}
        assert scene.group.members[A].state is MemberState.STABLE

    def test_owns_nothing_after_it_joins_anew(self):
        scene = self.given_and_taken_away({})
        assert scene.told(scene.join("a", "u"))[1] == {}
        assert self.others_share(scene) == U

    def test_is_forgotten_with_the_process_that_was_a_static_member(self):
        scene = Scene({"t": 2})
        scene.join("a", instance_id="i")
        assert named(scene.group.members[A].untaken) == {"t": {0, 1}}
        scene.beat("a", -2, instance_id="i")
        assert not scene.group.members[A].untaken
        scene.join("b")
        scene.group = replace(scene.group, target={A: {}, B: partitions({"t": {0, 1}})}, spread=None)
        assert scene.told(scene.join("a2", instance_id="i"))[1] == {}
        assert self.others_share(scene) == {"t": {0, 1}}

    def test_receives_its_whole_assignment_as_a_returning_static_member(self):
        scene = Scene({"t": 2})
        scene.join("a", instance_id="i")
        scene.beat("a", 1, {"t": {0, 1}}, instance_id="i")
        scene.beat("a", -2, instance_id="i")
        assert scene.told(scene.join("a2", instance_id="i"))[1] == {"t": {0, 1}}
        assert named(scene.group.members[MemberId("a2")].untaken) == {"t": {0, 1}}

    def test_is_remembered_after_a_restart(self):
        scene = self.given_and_taken_away({})
        read_back(scene)
        assert named(scene.group.members[A].untaken) == U
        assert self.whole(scene, {}) == U
        assert self.others_share(scene) == {}

    def test_is_read_from_rows_of_an_older_release(self):
        scene = self.given_and_taken_away({})
        read_back(scene, without="untaken")
        assert not scene.group.members[A].untaken
        assert self.whole(scene, {}) == {}
        assert self.others_share(scene) == U


def read_back(scene: Scene, without: str | None = None) -> None:
    """Let another coordinator read the stored group. If `without` is given, each stored member lacks this field."""
    stored = {key: CONSUMER.stored_member(scene.group, key) for key in scene.group.members}
    documents = {key: json.loads(json.dumps(row.document)) for key, row in stored.items() if row is not None}
    for document in documents.values():
        document["member"].pop(without, None)
    settings = Settings(consumer=scene.settings)
    target = dict(scene.group.target)
    scene.group = CONSUMER.restore("g", CONSUMER.stored(scene.group), documents, None, scene.now_ms, settings)
    assert scene.group.target == target


def test_repeated_acknowledgement_stores_nothing():
    scene = both()
    assert scene.beat("b", 2, {"t": {2, 3}}) == (2, None)
    assert scene.facts == ["member b changed"]
    assert scene.beat("b", 2, {"t": {2, 3}}) == (2, None)
    assert scene.facts == []
    assert scene.beat("b", 2) == (2, None)
    assert scene.facts == []


def test_full_request_receives_its_assignment_again():
    scene = both()
    full = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": ("t",)}
    assert scene.beat("a", 2, {"t": {0, 1}}) == (2, None)
    assert scene.beat("a", 2, {"t": {0, 1}}, **full) == (2, {"t": {0, 1}})
    assert scene.beat("a", 2, None, **full) == (2, None)


def test_lost_answer_is_repeated_for_the_previous_epoch():
    scene = both()
    scene.join("c")
    scene.beat("a", 2)
    assert scene.beat("b", 2, {"t": {2, 3}}) == (2, {"t": {2}})
    assert scene.beat("b", 2, {"t": {2}}) == (3, None)
    assert scene.beat("b", 2, {"t": {2}})[0] == 3
    assert scene.refused(scene.heartbeat("b", 2)) is ErrorCode.FENCED_MEMBER_EPOCH, "it says nothing of what it owns"
    assert scene.refused(scene.heartbeat("b", 2, {"t": {2, 3}})) is ErrorCode.FENCED_MEMBER_EPOCH
    assert scene.refused(scene.heartbeat("b", 4)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert scene.refused(scene.heartbeat("b", 1, {"t": {2}})) is ErrorCode.FENCED_MEMBER_EPOCH
    assert MemberId("b") in scene.group.members


def test_a_changed_subscription_gets_its_assignment_in_the_same_answer():
    scene = Scene({"t": 2, "u": 2})
    scene.join("a")
    assert scene.beat("a", 1, subscribed_topic_names=("t", "u")) == (2, {"t": {0, 1}, "u": {0, 1}})
    assert scene.beat("a", 2, subscribed_topic_names=("u",)) == (2, {"u": {0, 1}})
    assert scene.beat("a", 2, {"u": {0, 1}}) == (3, None)
    assert scene.beat("a", 3, subscribed_topic_names=("u", "u")) == (3, None), "the same subscription"


def test_unsubscribed_topic_is_revoked_during_another_revocation():
    scene = Scene({"t": 2, "u": 2})
    scene.join("a", "t", "u")
    scene.join("b", "t", "u")
    scene.beat("a", 1)
    assert named(scene.group.members[MemberId("a")].pending_revocation) == {"u": {0, 1}}
    assert scene.beat("a", 1, subscribed_topic_names=("u",)) == (1, {})
    assert named(scene.group.members[MemberId("a")].pending_revocation) == {"t": {0, 1}, "u": {0, 1}}


def test_missing_topic_is_assigned_once_it_exists():
    scene = Scene({})
    assert scene.told(scene.join("a", "later")) == (1, {})
    scene.topics_changed({"later": 1})
    assert scene.group.group_epoch == 2
    assert scene.beat("a", 1) == (2, {"later": {0}})


@pytest.mark.parametrize("hinted", [True, False])
def test_new_partitions_are_assigned(hinted: bool):
    scene = both()
    scene.set_topics({"t": 6, "unrelated": 1})
    if hinted:
        scene.topics_changed({"t": 6, "unrelated": 1})
    assert scene.beat("a", 2) == (3, {"t": {0, 1, 4}})
    assert scene.beat("b", 2) == (3, {"t": {2, 3, 5}})
    scene.topics_changed({"t": 6, "unrelated": 9})
    assert (scene.group.group_epoch, scene.facts) == (3, [])


def test_a_deleted_topic_is_revoked():
    scene = both()
    scene.topics_changed({})
    assert scene.beat("a", 2) == (2, {})
    assert scene.beat("a", 2, {}) == (3, None)
    assert scene.group.members[MemberId("a")].state is MemberState.STABLE


def test_pattern_matches_whole_names_and_later_topics():
    scene = Scene({"logs-a": 1, "my-logs-b": 1})
    join = {"subscribed_topic_names": (), "subscribed_topic_regex": "logs-.*"}
    assert scene.told(scene.join("a", **join)) == (1, {"logs-a": {0}})
    scene.topics_changed({"logs-a": 1, "my-logs-b": 1, "logs-c": 1})
    assert scene.beat("a", 1) == (2, {"logs-a": {0}, "logs-c": {0}})
    assert scene.beat("a", 2, subscribed_topic_regex="") == (2, {})
    assert scene.beat("a", 2, {}) == (3, None)
    assert not scene.group.patterns


def test_topics_named_beside_a_new_pattern_are_assigned_an_epoch_before_those_it_matches():
    scene = Scene({"logs-a": 1, "t": 1, "u": 1})
    joined = scene.join("a", "t", subscribed_topic_regex="logs-.*")
    assert scene.told(joined) == (1, {"t": {0}})
    assert joined.heartbeat_interval_ms == 500, "it is to ask again soon"
    after = scene.heartbeat("a", 1, {"t": {0}})
    assert scene.told(after) == (2, {"logs-a": {0}, "t": {0}})
    assert after.heartbeat_interval_ms == 5_000
    assert scene.beat("a", 2, {"logs-a": {0}, "t": {0}}) == (2, None)


def test_topics_of_a_group_are_unknown_until_a_postponed_pattern_is_resolved():
    """Offsets of topics that a Stable group does not read may expire or be deleted."""
    scene = Scene({"logs-a": 1, "t": 1})
    scene.join("a", "t", subscribed_topic_regex="logs-.*")
    summary = CONSUMER.summary(scene.group)
    assert (summary.is_stable, summary.subscribed_topics) == (True, None)
    scene.beat("a", 1, {"t": {0}})
    assert CONSUMER.summary(scene.group).subscribed_topics == {"logs-a", "t"}


def test_any_heartbeat_of_the_group_resolves_a_postponed_pattern():
    scene = Scene({"logs-a": 1, "t": 2})
    scene.join("a", "t")
    scene.beat("a", 1, {"t": {0, 1}})
    scene.join("b", "none", subscribed_topic_regex="logs-.*")
    assert scene.beat("a", 1) == (3, None)
    assert scene.beat("b", 2) == (3, {"logs-a": {0}})


def test_a_pattern_that_another_member_has_is_not_postponed():
    scene = Scene({"logs-a": 4, "t": 1})
    scene.join("a", subscribed_topic_names=(), subscribed_topic_regex="logs-.*")
    scene.beat("a", 1, {"logs-a": {0, 1, 2, 3}})
    assert scene.told(scene.join("b", "t", subscribed_topic_regex="logs-.*")) == (2, {"t": {0}}), "a is to release"
    assert set(named(scene.group.target[B])) == {"logs-a", "t"}
    assert not scene.group.postponed


def test_pattern_added_to_names_is_postponed_and_former_matches_are_revoked_at_once():
    scene = Scene({"logs-a": 1, "t": 1})
    scene.join("a", "t")
    scene.beat("a", 1, {"t": {0}})
    assert scene.beat("a", 1, subscribed_topic_regex="logs-.*") == (2, None)
    assert scene.beat("a", 2) == (3, {"logs-a": {0}, "t": {0}})
    scene.beat("a", 3, {"logs-a": {0}, "t": {0}})
    assert scene.beat("a", 3, subscribed_topic_regex="none.*") == (3, {"t": {0}})


def test_a_postponed_pattern_of_topics_that_others_read_raises_the_epoch():
    scene = Scene({"logs-a": 2})
    scene.join("a", "logs-a")
    scene.beat("a", 1, {"logs-a": {0, 1}})
    scene.join("b", "none", subscribed_topic_regex="logs-.*")
    assert scene.beat("a", 1)[0] == 1, "it is to release first"
    assert named(scene.group.target[B]) == {"logs-a": {1}}


def test_a_coordinator_that_takes_the_group_over_resolves_a_postponed_pattern_of_topics_that_others_read():
    scene = Scene({"logs-a": 2})
    scene.join("a", "logs-a")
    scene.beat("a", 1, {"logs-a": {0, 1}})
    scene.join("b", "none", subscribed_topic_regex="logs-.*")
    read_back(scene)
    assert scene.beat("a", 1, {"logs-a": {0, 1}})[0] == 1, "it is to release first"
    assert named(scene.group.target[B]) == {"logs-a": {1}}


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a" * 20_000, "((a{100}){100}){100}"])
def test_invalid_or_too_large_pattern_is_refused(pattern: str):
    scene = Scene()
    refused = scene.refused(scene.join("a", subscribed_topic_regex=pattern))
    assert refused is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert not scene.group.members


def test_pattern_matching_takes_linear_time():
    scene = Scene({"a" * 200 + "!": 1})
    assert scene.told(scene.join("a", "none", subscribed_topic_regex="(a*)*(a*)*(a*)*b")) == (1, {})


def test_assignor_with_most_votes_is_used():
    scene = Scene({"t": 2, "u": 2})
    scene.join("a", "t", "u")
    assert scene.group.assignor == "uniform"
    scene.join("b", "t", "u", server_assignor="range")
    assert scene.group.assignor == "range"
    assert {each: named(held) for each, held in scene.group.target.items()} == {
        "a": {"t": {0}, "u": {0}},
        "b": {"t": {1}, "u": {1}},
    }
    scene.join("c", "t", "u", server_assignor="uniform")
    assert scene.group.assignor == "uniform", "one each: the one configured first"


def test_sessions_end_and_heartbeats_prolong_them():
    scene = both()
    scene.now_ms += 40_000
    scene.beat("a", 2)
    scene.tick(5_000)
    assert list(scene.group.members) == ["a"]
    assert scene.facts == ["member b was not heard within its session", "rebalance: a member left (b)"]
    assert scene.beat("a", 2) == (3, ALL)
    assert scene.refused(scene.heartbeat("b", 2)) is ErrorCode.UNKNOWN_MEMBER_ID
    scene.tick(44_999)
    assert scene.group.members
    scene.tick(1)
    assert state_of(scene.group) is GroupState.EMPTY
    assert not scene.group.owners


def test_missed_heartbeat_is_reported():
    scene = both()
    scene.beat("a", 2)
    scene.now_ms += 30_000
    scene.beat("a", 2)
    assert not scene.facts
    scene.now_ms += 30_001
    scene.beat("a", 2)
    assert scene.facts == ["member a said nothing for 30001 ms"]
    scene.now_ms += 30_001
    scene.beat("a", 2, {"t": {0, 1}})
    assert scene.facts[0] == "member a said nothing for 30001 ms", "also where it has news"


def test_a_refused_heartbeat_prolongs_nothing():
    scene = both()
    scene.now_ms = 44_999
    scene.heartbeat("a", 9)
    scene.tick(1)
    assert not scene.group.members


def test_member_that_does_not_release_in_time_is_removed():
    scene = Scene()
    scene.join("a", rebalance_timeout_ms=10_000)
    scene.join("b")
    scene.beat("a", 1)
    scene.now_ms = 9_999
    scene.beat("a", 1)
    scene.beat("b", 2)
    scene.tick(1)
    assert list(scene.group.members) == ["b"]
    assert scene.refused(scene.heartbeat("a", 1)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.beat("b", 2) == (3, ALL)


def test_release_in_time_ends_the_wait():
    scene = Scene()
    scene.join("a", rebalance_timeout_ms=10_000)
    scene.join("b")
    scene.beat("a", 1)
    scene.beat("a", 1, {"t": {0, 1}})
    scene.tick(20_000)
    assert set(scene.group.members) == {"a", "b"}


def test_leave_frees_partitions_at_once():
    scene = both()
    assert scene.beat("a", -1) == (-1, None)
    assert (scene.group.group_epoch, scene.group.assignment_epoch) == (3, 2), "computed when somebody asks"
    assert state_of(scene.group) is GroupState.ASSIGNING
    assert scene.beat("b", 2) == (3, ALL)
    assert scene.refused(scene.heartbeat("a", -1)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_joins_anew_owned_nothing():
    """The client was fenced, or restarted with the same member id."""
    scene = both()
    scene.join("c")
    assert scene.told(scene.join("b")) == (3, {"t": {2}})
    assert scene.group.members[MemberId("b")].previous_member_epoch == 0
    assert scene.beat("c", 3) == (3, {"t": {3}})
    assert scene.told(scene.join("b")) == (3, {"t": {2}}), "the answer was lost"
    assert scene.group.group_epoch == 3


def test_member_of_version_0_receives_a_generated_id():
    scene = Scene()
    assert scene.join("", version=0).member_id == "made"
    assert scene.refused(scene.join("", version=1)) is ErrorCode.INVALID_REQUEST


def test_no_more_members_than_the_group_may_have():
    scene = Scene(settings=ConsumerSettings(max_size=1))
    scene.join("a")
    assert scene.refused(scene.join("b")) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert scene.told(scene.join("a"))[1] == ALL


@pytest.mark.parametrize(
    ("epoch", "changes", "error"),
    [
        (0, {"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        (0, {"rack_id": ""}, ErrorCode.INVALID_REQUEST),
        (0, {"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        (0, {"rebalance_timeout_ms": -2}, ErrorCode.INVALID_REQUEST),
        (0, {"owned": None}, ErrorCode.INVALID_REQUEST),
        (0, {"owned": {"t": {0}}}, ErrorCode.INVALID_REQUEST),
        (0, {"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        (0, {"server_assignor": "sticky"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
        (1, {"member_id": "", "version": 0}, ErrorCode.INVALID_REQUEST),
        (-1, {"member_id": ""}, ErrorCode.INVALID_REQUEST),
        (-2, {}, ErrorCode.INVALID_REQUEST),
        (-3, {}, ErrorCode.INVALID_REQUEST),
        (1, {}, ErrorCode.UNKNOWN_MEMBER_ID),
        (-1, {}, ErrorCode.UNKNOWN_MEMBER_ID),
        (1, {"instance_id": "i"}, ErrorCode.UNKNOWN_MEMBER_ID),
        (-2, {"instance_id": "i"}, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_invalid_heartbeats_are_refused(epoch: int, changes: dict[str, object], error: ErrorCode):
    scene = Scene()
    given: dict[str, Any] = {"owned": {}, "subscribed_topic_names": ("t",), "rebalance_timeout_ms": 1} | changes
    assert scene.refused(scene.heartbeat(given.pop("member_id", "a"), epoch, given.pop("owned"), **given)) is error
    assert scene.group.members == {}


def test_member_without_a_subscription_is_accepted():
    scene = Scene()
    assert scene.told(scene.join("a", subscribed_topic_names=())) == (1, {})


class TestStaticMembers:
    def test_returning_static_member_finds_its_partitions(self):
        scene = Scene()
        scene.join("a", instance_id="i")
        scene.join("b")
        scene.beat("a", 1, {"t": {0, 1}}, instance_id="i")
        assert scene.beat("a", -2, instance_id="i") == (-2, None)
        assert scene.group.group_epoch == 2
        assert scene.beat("b", 2) == (2, {"t": {2, 3}}), "and no more"
        assert scene.told(scene.join("a2", instance_id="i")) == (2, {"t": {0, 1}})
        assert scene.group.group_epoch == 2
        assert list(scene.group.members) == ["b", "a2"]
        assert scene.refused(scene.heartbeat("a", 2, instance_id="i")) is ErrorCode.FENCED_INSTANCE_ID
        assert scene.refused(scene.heartbeat("a", -1, instance_id="i")) is ErrorCode.FENCED_INSTANCE_ID
        assert scene.refused(scene.heartbeat("a", 2)) is ErrorCode.UNKNOWN_MEMBER_ID

    def test_returning_static_member_with_another_subscription_is_reassigned(self):
        scene = Scene({"t": 2, "u": 2})
        scene.join("a", "t", instance_id="i")
        scene.beat("a", -2, instance_id="i")
        assert scene.told(scene.join("a2", "u", instance_id="i")) == (2, {"u": {0, 1}})

    def test_returning_static_member_has_released_revoked_partitions(self):
        """If the answer had epoch 0, the client would continue like a joining member and send no full heartbeat."""
        scene = Scene()
        scene.join("a", instance_id="i")
        scene.beat("a", 1, ALL, instance_id="i")
        scene.beat("a", -2, instance_id="i")
        scene.join("b")
        assert scene.told(scene.join("a2", instance_id="i")) == (2, {"t": {0, 1}})
        assert scene.beat("a2", 2, {"t": {0, 1}}, instance_id="i") == (2, None)
        assert scene.beat("b", 2) == (2, {"t": {2, 3}})

    def test_static_member_that_does_not_return_expires(self):
        scene = both()
        scene.join("c", instance_id="i")
        scene.beat("c", -2, instance_id="i")
        scene.now_ms += 40_000
        scene.beat("a", 2)
        scene.beat("b", 2)
        scene.tick(5_000)
        assert set(scene.group.members) == {"a", "b"}
        assert not scene.group.instances

    def test_static_member_that_leaves_for_good_is_removed(self):
        scene = Scene()
        scene.join("a", instance_id="i")
        assert scene.beat("a", -1, instance_id="i") == (-1, None)
        assert (scene.group.members, scene.group.instances, scene.group.target) == ({}, {}, {})

    def test_revoked_partition_is_free_once_its_owner_left(self):
        scene = Scene()
        scene.join("a", instance_id="i")
        scene.join("b")
        scene.beat("a", 1, instance_id="i")
        scene.beat("a", -2, instance_id="i")
        assert scene.beat("b", 2) == (2, {"t": {2, 3}})
        assert MemberId("a") not in scene.group.rebalance_deadlines

    def test_instance_in_use_is_refused_to_another_member(self):
        scene = Scene()
        scene.join("a", instance_id="i")
        assert scene.refused(scene.join("b", instance_id="i")) is ErrorCode.UNRELEASED_INSTANCE_ID
        assert scene.told(scene.join("a", instance_id="i")) == (1, ALL), "its own member asks again"

    def test_a_member_changes_its_instance(self):
        scene = Scene()
        scene.join("a", instance_id="i")
        scene.join("a", instance_id="j")
        assert dict(scene.group.instances) == {"j": "a"}


def test_heartbeat_on_an_older_connection_is_too_late():
    scene = both()
    scene.beat("a", 2, connection_number=7)
    late = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.refused(scene.join("a", connection_number=6)) is late
    assert scene.refused(scene.heartbeat("a", 2, {"t": {0}}, connection_number=6)) is late
    assert scene.refused(scene.heartbeat("a", -1, connection_number=6)) is late
    assert scene.beat("a", 2, connection_number=7) == (2, None)


def test_new_member_moves_one_share():
    scene = Scene({"t": 1_000})
    for number in range(20):
        scene.join(f"m{number:03}")
    assert scene.group.assignment_epoch == 20
    before = scene.group.target
    scene.join("m999")
    changed = [each for each, held in scene.group.target.items() if before.get(each) != held]
    assert sum(len(held) for held in named(scene.group.target[MemberId("m999")]).values()) == 47
    assert len(changed) <= 21


def test_coordinator_with_older_topics_decides_nothing():
    scene = both()
    older = scene.cluster
    scene.topics_changed({"t": 6})
    assert scene.beat("a", 2) == (3, {"t": {0, 1, 4}})
    newer, scene.cluster = scene.cluster, older
    group = scene.group
    assert scene.refused(scene.heartbeat("a", 3)) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    scene.play(ClusterChanged())
    assert scene.group is group
    assert scene.beat("b", -1) == (-1, None), "who leaves may"
    scene.cluster = newer
    assert scene.beat("a", 3) == (4, {"t": {0, 1, 2, 3, 4, 5}})


def test_newer_revision_of_the_same_topics_changes_nothing():
    scene = both()
    scene.cluster = Cluster(scene.cluster.topics, scene.cluster.by_id, scene.cluster.revision + 1)
    scene.play(ClusterChanged())
    assert scene.facts == []
    assert scene.beat("a", 2) == (2, None)
    assert scene.facts == []
