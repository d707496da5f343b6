"""A streams group in single steps: rules of joining, epochs, topics, time, offsets and taking over."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from gateway.coordinator.classic.model import Group
from gateway.coordinator.classic.restore import SHORTEST_SESSION_MS
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.facts import Departure, GroupDeleted, MemberChanged, MemberId, MemberLeft
from gateway.coordinator.machine import MANY, Adopted, ConnectionId, RequestId
from gateway.coordinator.requests import DeleteGroup, Heartbeat, OffsetCommit, TxnOffsetCommit
from gateway.coordinator.settings import Settings, StreamsSettings
from gateway.coordinator.streams.machine import STREAMS
from gateway.coordinator.streams.model import (
    Endpoint,
    MemberState,
    StreamsGroup,
    StreamsGroupHeartbeat,
    StreamsGroupHeartbeatReply,
    StreamsGroupState,
    state_of,
)
from gateway.coordinator.streams.offsets import fetch_refusal
from gateway.coordinator.streams.tasks import Task, Tasks
from gateway.coordinator.streams.topology import StatusCode, Subtopology, TopicInfo, Topology
from protocol.errors import ErrorCode

from .scene import READING, Scene, refused

ALL = frozenset({("0", 0), ("0", 1), ("0", 2), ("0", 3)})
COUNTING = Topology(
    0,
    (
        Subtopology("0", ("t",), ("words",)),
        Subtopology("1", (), (), (TopicInfo("counts"),), (TopicInfo("words"),)),
    ),
)


def active(*tasks: Task) -> Tasks:
    return Tasks(frozenset(tasks))


def state(scene: Scene) -> StreamsGroupState:
    return state_of(scene.group)


# --- joining --------------------------------------------------------------------------------------------------------


def test_one_member_is_given_all_tasks() -> None:
    scene = Scene()
    reply = scene.join("a")
    assert (reply.error, reply.member_epoch, reply.tasks) == (ErrorCode.NONE, 2, Tasks(ALL))
    assert reply.heartbeat_interval_ms == 5_000
    assert reply.status == ()
    assert state(scene) is StreamsGroupState.STABLE
    again = scene.beat("a", 2)
    assert (again.member_epoch, again.tasks) == (2, None)


def test_newcomer_waits_until_tasks_are_released() -> None:
    scene = Scene()
    scene.join("a")
    newcomer = scene.join("b")
    assert (newcomer.member_epoch, newcomer.tasks, newcomer.heartbeat_interval_ms) == (3, Tasks(), 500)
    told = scene.beat("a", 2)
    assert told.tasks is not None
    kept = told.tasks
    assert len(kept.active) == 2
    assert told.member_epoch == 2
    assert scene.beat("b", 3).tasks is None
    assert state(scene) is StreamsGroupState.RECONCILING
    done = scene.beat("a", 2, owned=kept)
    assert (done.member_epoch, done.tasks) == (3, None)
    assert scene.beat("b", 3).tasks == Tasks(ALL - kept.active)
    assert state(scene) is StreamsGroupState.STABLE


def test_initial_rebalance_waits_for_more_members() -> None:
    scene = Scene(initial_rebalance_delay_ms=3_000)
    assert (scene.join("a").member_epoch, scene.join("b").member_epoch) == (1, 1)
    scene.pass_time(2_999)
    assert scene.beat("a", 1).tasks is None
    scene.pass_time(1)
    replies = [scene.beat(name, 1) for name in ("a", "b")]
    assert [reply.member_epoch for reply in replies] == [2, 2]
    given = [reply.tasks for reply in replies if reply.tasks is not None]
    assert [len(tasks.active) for tasks in given] == [2, 2]
    # The group is not empty any more, so a joining member is assigned tasks at once.
    assert scene.join("c").member_epoch == 3


def test_member_waiting_in_the_initial_delay_sees_it_and_the_group_is_not_stable() -> None:
    scene = Scene(initial_rebalance_delay_ms=3_000)

    def told(*replies: StreamsGroupHeartbeatReply) -> list[list[StatusCode]]:
        return [[code for code, _ in reply.status] for reply in replies]

    assert told(scene.join("a"), scene.join("b"), scene.beat("a", 1)) == [[StatusCode.ASSIGNMENT_DELAYED]] * 3
    assert state(scene) is StreamsGroupState.ASSIGNING
    scene.restore()
    assert state(scene) is StreamsGroupState.ASSIGNING
    scene.pass_time(3_000)
    assert state(scene) is StreamsGroupState.RECONCILING
    assert told(scene.beat("a", 1), scene.beat("b", 1)) == [[], []]
    assert state(scene) is StreamsGroupState.STABLE


def test_heartbeat_ends_an_expired_delay() -> None:
    scene = Scene(initial_rebalance_delay_ms=3_000)
    scene.join("a")
    scene.now_ms = 3_000
    reply = scene.beat("a", 1)
    assert (reply.member_epoch, reply.tasks) == (2, Tasks(ALL))


def test_expired_delay_alone_does_not_update_missing_topics() -> None:
    """Kafka also checks a topology's topics when a member sends a heartbeat."""
    scene = Scene(initial_rebalance_delay_ms=3_000)
    assert scene.join("a", COUNTING).missing_internal_topics
    scene.topics({"t": 4, "counts": 4, "words": 4})
    scene.pass_time(3_000)
    assert not scene.group.awaits_members
    assert state(scene) is StreamsGroupState.NOT_READY
    reply = scene.beat("a", 1)
    assert (reply.missing_internal_topics, reply.status) == ((), ())
    assert reply.tasks == Tasks(ALL | {("1", index) for index in range(4)})
    assert state(scene) is StreamsGroupState.STABLE


def test_rejoining_member_keeps_its_tasks_but_owns_none_before_the_answer() -> None:
    scene = Scene()
    scene.join("a")
    reply = scene.join("a")
    assert (reply.member_epoch, reply.tasks) == (2, Tasks(ALL))
    assert scene.group.group_epoch == 2


def test_join_above_the_maximum_group_size_is_refused() -> None:
    scene = Scene(max_size=1)
    scene.join("a")
    assert refused(scene.join("b")) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert scene.join("a").error is ErrorCode.NONE


def test_a_topology_that_could_never_run_is_refused() -> None:
    scene = Scene()
    circle = Topology(0, (Subtopology("0", (), ("loop",), (), (TopicInfo("loop"),)),))
    assert refused(scene.join("a", circle)) is ErrorCode.STREAMS_INVALID_TOPOLOGY
    assert not scene.group.exists


@pytest.mark.parametrize("change", ["process_id", "client_tags", "rack_id", "user_endpoint"])
def test_changed_assignment_input_raises_the_epoch(change: str) -> None:
    values: dict[str, Any] = {
        "process_id": "p",
        "client_tags": (("zone", "a"),),
        "rack_id": "r",
        "user_endpoint": Endpoint("h", 1),
    }
    scene = Scene()
    scene.join("a")
    assert scene.beat("a", 2, **{change: values[change]}).member_epoch == 3
    assert scene.beat("a", 3, **{change: values[change]}).member_epoch == 3


# --- topologies -----------------------------------------------------------------------------------------------------


def test_an_older_topology_runs_no_tasks_and_another_one_is_refused() -> None:
    newer = replace(READING, epoch=1)
    scene = Scene()
    scene.join("a", newer)
    stale = scene.join("b", READING)
    assert [code for code, _ in stale.status] == [StatusCode.STALE_TOPOLOGY]
    assert stale.tasks == Tasks()
    scene.beat("a", 2)
    assert scene.group.target == {"a": Tasks(ALL), "b": Tasks()}
    other = Topology(1, (Subtopology("0", ("t", "u")),))
    assert refused(scene.join("c", other)) is ErrorCode.INVALID_REQUEST
    assert "c" not in scene.group.members


def test_a_group_without_members_takes_another_topology() -> None:
    scene = Scene({"t": 4, "u": 1})
    scene.join("a")
    scene.beat("a", -1)
    assert state(scene) is StreamsGroupState.EMPTY
    reply = scene.join("a", Topology(0, (Subtopology("x", ("u",)),)))
    assert reply.tasks == active(("x", 0))


def test_tasks_wait_for_missing_sources() -> None:
    scene = Scene({})
    reply = scene.join("a")
    assert [code for code, _ in reply.status] == [StatusCode.MISSING_SOURCE_TOPICS]
    assert (reply.tasks, state(scene)) == (Tasks(), StreamsGroupState.NOT_READY)
    scene.topics({"t": 2})
    assert not STREAMS.watches(scene.group)
    assert state(scene) is StreamsGroupState.NOT_READY
    reply = scene.beat("a", 2)
    assert (reply.member_epoch, reply.tasks, reply.status) == (3, active(("0", 0), ("0", 1)), ())


def test_missing_internal_topics_are_reported_until_they_exist() -> None:
    scene = Scene()
    reply = scene.join("a", COUNTING)
    assert [code for code, _ in reply.status] == [StatusCode.MISSING_INTERNAL_TOPICS]
    assert [(topic.name, topic.partitions) for topic in reply.missing_internal_topics] == [("counts", 4), ("words", 4)]
    assert scene.beat("a", 2).missing_internal_topics == reply.missing_internal_topics
    scene.topics({"t": 4, "counts": 4, "words": 4})
    reply = scene.beat("a", 2)
    assert (reply.missing_internal_topics, reply.status) == ((), ())
    assert reply.tasks == Tasks(ALL | {("1", index) for index in range(4)})


def test_deleted_source_topic_ends_all_tasks() -> None:
    scene = Scene()
    scene.join("a")
    scene.topics({})
    assert state(scene) is StreamsGroupState.STABLE
    reply = scene.beat("a", 2)
    assert (reply.tasks, [code for code, _ in reply.status]) == (Tasks(), [StatusCode.MISSING_SOURCE_TOPICS])
    assert state(scene) is StreamsGroupState.NOT_READY


def test_changes_of_unrelated_topics_are_ignored() -> None:
    scene = Scene()
    scene.join("a")
    configured = scene.group.configured
    scene.topics({"t": 4, "other": 1})
    scene.beat("a", 2)
    assert (scene.group.configured, scene.group.group_epoch) == (configured, 2)
    assert scene.group.configured is configured
    scene.topics({"t": 5, "other": 1})
    scene.beat("a", 2)
    assert scene.group.configured is not None
    assert scene.group.configured.task_counts == {"0": 5}


def test_more_partitions_are_more_tasks() -> None:
    scene = Scene()
    scene.join("a")
    scene.topics({"t": 5})
    reply = scene.beat("a", 2)
    assert (reply.member_epoch, reply.tasks) == (3, Tasks(ALL | {("0", 4)}))


def test_streams_coordinator_with_older_topics_decides_nothing() -> None:
    scene = Scene()
    scene.topics({"t": 4})
    scene.join("a")
    scene.cluster = replace(scene.cluster, revision=1)
    assert refused(scene.beat("a", 2)) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_standby_replicas_are_assigned_if_configured() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    scene.set(num_standby_replicas=1)
    scene.beat("a", 2)
    shares = list(scene.group.target.values())
    assert shares[0].standby == shares[1].active
    assert shares[1].standby == shares[0].active


# --- epochs and reports ---------------------------------------------------------------------------------------------


def test_wrong_member_epoch_is_fenced() -> None:
    scene = Scene()
    scene.join("a")
    assert refused(scene.beat("a", 3)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert refused(scene.beat("b", 2)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert refused(scene.beat("b", -1)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_previous_epoch_is_accepted_if_the_owned_tasks_are_permitted() -> None:
    scene = Scene()
    scene.join("a")
    scene.topics({"t": 5})
    assert scene.beat("a", 2).member_epoch == 3
    reply = scene.beat("a", 2, owned=Tasks(ALL))
    assert (reply.member_epoch, reply.tasks) == (3, Tasks(ALL | {("0", 4)}))
    assert refused(scene.beat("a", 2)) is ErrorCode.FENCED_MEMBER_EPOCH


def test_previous_epoch_is_fenced_if_a_task_has_another_owner() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    kept = scene.beat("a", 2).tasks
    assert kept is not None
    assert scene.beat("a", 2, owned=kept).member_epoch == 3
    assert refused(scene.beat("a", 2, owned=Tasks(ALL))) is ErrorCode.FENCED_MEMBER_EPOCH


def test_a_report_from_before_the_assignment_was_accepted_releases_no_task() -> None:
    """The first heartbeat of Java after a join reports its tasks, even if its application is still accepting them."""
    scene = Scene()
    scene.join("a")
    scene.join("b")
    kept = scene.beat("a", 2, owned=Tasks()).tasks
    assert kept is not None
    assert scene.beat("b", 3).tasks is None
    # The application has accepted all tasks now, and releases some of them next.
    scene.beat("a", 2, owned=Tasks(ALL))
    assert scene.beat("b", 3).tasks is None
    assert scene.beat("a", 2, owned=kept).member_epoch == 3
    assert scene.beat("b", 3).tasks == Tasks(ALL - kept.active)


def test_report_of_an_unknown_task_is_refused() -> None:
    scene = Scene()
    scene.join("a")
    for task in (("0", 4), ("0", -1), ("1", 0)):
        assert refused(scene.beat("a", 2, owned=active(task))) is ErrorCode.INVALID_REQUEST


def test_overtaken_request_is_ignored() -> None:
    scene = Scene()
    scene.join("a", connection_number=5)
    assert refused(scene.beat("a", 2, connection_number=4)) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert refused(scene.join("a", connection_number=4)) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.beat("a", 2, connection_number=6).error is ErrorCode.NONE


def test_shutdown_is_announced_until_the_group_is_empty() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    scene.beat("b", 3, shutdown_application=True)
    told = scene.beat("a", 2)
    assert [code for code, _ in told.status] == [StatusCode.SHUTDOWN_APPLICATION]
    assert "member b" in told.status[0][1]
    scene.restore()
    assert scene.group.shutdown_by == "b"
    scene.beat("a", -1)
    scene.beat("b", -1)
    assert scene.join("a").status == ()


def test_leaving_member_may_request_a_shutdown() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    assert scene.beat("a", -1, shutdown_application=True).error is ErrorCode.NONE
    scene.restore()
    ((code, detail),) = scene.beat("b", 3).status
    assert code is StatusCode.SHUTDOWN_APPLICATION
    assert "a" in detail
    scene.beat("b", -1, shutdown_application=True)
    assert scene.join("a").status == ()


def test_endpoints_are_sent_to_members_with_an_older_epoch() -> None:
    scene = Scene()
    reply = scene.join("a", user_endpoint=Endpoint("h", 9))
    assert reply.partitions_by_user_endpoint is not None
    ((endpoint, read, standby),) = reply.partitions_by_user_endpoint
    assert (endpoint, read, standby) == (Endpoint("h", 9), {"t": frozenset(range(4))}, {})
    known = reply.endpoint_information_epoch
    assert known > 0
    assert scene.beat("a", 2, endpoint_information_epoch=known).partitions_by_user_endpoint is None
    assert scene.beat("a", 2, endpoint_information_epoch=0).partitions_by_user_endpoint is not None


def test_partitions_that_a_topic_has_gained_are_sent_without_a_new_task() -> None:
    scene = Scene({"t": 4, "u": 1})
    scene.join("a", Topology(0, (Subtopology("0", ("t", "u")),)), user_endpoint=Endpoint("h", 9))
    known = scene.beat("a", 2).endpoint_information_epoch
    scene.topics({"t": 4, "u": 3})
    reply = scene.beat("a", 2, endpoint_information_epoch=known)
    assert reply.tasks is None
    assert reply.partitions_by_user_endpoint is not None
    ((_, read, _),) = reply.partitions_by_user_endpoint
    assert read == {"t": frozenset(range(4)), "u": frozenset(range(3))}


def test_threads_of_one_instance_have_one_entry_for_their_endpoint() -> None:
    """Java keeps only the last of several entries (KAFKA-20782), and would send queries to the wrong instance."""
    scene = Scene()
    thread: dict[str, Any] = {"user_endpoint": Endpoint("h", 9), "process_id": "p"}
    scene.join("a", **thread)
    scene.join("b", **thread)
    scene.beat("a", 2, owned=scene.beat("a", 2).tasks)
    told = scene.beat("b", 3, endpoint_information_epoch=-1)
    assert told.tasks is not None
    assert len(told.tasks.active) == 2
    assert told.partitions_by_user_endpoint == ((Endpoint("h", 9), {"t": frozenset(range(4))}, {}),)


def test_changed_endpoint_is_sent_to_other_members() -> None:
    scene = Scene()
    scene.join("a", user_endpoint=Endpoint("h", 9))
    known = scene.beat("a", 2).endpoint_information_epoch
    moved = scene.beat("a", 2, user_endpoint=Endpoint("h", 11), endpoint_information_epoch=known)
    assert moved.endpoint_information_epoch > known
    told = moved.partitions_by_user_endpoint
    assert told is not None
    assert [each.endpoint for each in told] == [Endpoint("h", 11)]


def test_returning_member_without_tasks_has_no_partitions_at_its_endpoint() -> None:
    scene = Scene()
    scene.join("a", replace(READING, epoch=1), user_endpoint=Endpoint("h", 9))
    known = scene.beat("a", 2).endpoint_information_epoch
    back = scene.join("a", READING, user_endpoint=Endpoint("h", 9), endpoint_information_epoch=known)
    assert back.tasks == Tasks()
    assert back.endpoint_information_epoch > known


def test_cost_of_endpoints_follows_their_partitions() -> None:
    scene = Scene({"t": 10_000, "other": 1})
    started = time.process_time()
    reply = scene.join("a", Topology(0, (Subtopology("0", ("t", "other") * 2_400),)), user_endpoint=Endpoint("h", 9))
    assert time.process_time() - started < 1, "seconds: a tenth of one is enough, and topics by tasks take three"
    assert reply.partitions_by_user_endpoint is not None
    ((_, read, _),) = reply.partitions_by_user_endpoint
    assert read == {"t": frozenset(range(10_000)), "other": frozenset({0})}


# --- going ----------------------------------------------------------------------------------------------------------


def test_leaving_streams_member_frees_its_tasks() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    kept = scene.beat("a", 2).tasks
    assert kept is not None
    reply = scene.beat("b", -1)
    assert (reply.error, reply.member_epoch) == (ErrorCode.NONE, -1)
    assert list(scene.group.members) == ["a"]
    reply = scene.beat("a", 2, owned=kept)
    assert reply.tasks == Tasks(ALL)


def test_streams_member_silent_for_its_session_is_removed() -> None:
    scene = Scene()
    scene.join("a")
    scene.pass_time(40_000)
    scene.join("b")
    scene.pass_time(4_999)
    assert "a" in scene.group.members
    scene.pass_time(1)
    assert list(scene.group.members) == ["b"]
    assert MemberLeft(MemberId("a"), Departure.SESSION_EXPIRED) in scene.last.facts
    assert scene.beat("b", 3).tasks == Tasks(ALL)


def test_member_that_does_not_release_in_time_is_removed() -> None:
    scene = Scene()
    scene.join("a")
    scene.join("b")
    scene.beat("a", 2)
    scene.pass_time(9_999)
    scene.beat("a", 2)
    assert "a" in scene.group.members
    scene.pass_time(1)
    assert list(scene.group.members) == ["b"]
    assert MemberLeft(MemberId("a"), Departure.NOT_REVOKED) in scene.last.facts
    assert refused(scene.beat("a", 2)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_time_lost_by_a_late_timer_is_not_counted() -> None:
    scene = Scene(initial_rebalance_delay_ms=3_000)
    scene.join("a")
    scene.group = STREAMS.postponed(scene.group, 1_000)
    assert STREAMS.next_deadline(scene.group) == 4_000
    scene.pass_time(4_000)
    assert not scene.group.awaits_members
    assert STREAMS.next_deadline(scene.group) == 46_000


# --- taking over ----------------------------------------------------------------------------------------------------


def test_restored_streams_group_continues() -> None:
    scene = Scene()
    scene.join("a", user_endpoint=Endpoint("h", 9), client_tags=(("zone", "a"),))
    scene.join("b")
    scene.beat("a", 2)
    before = scene.group
    scene.now_ms = 100_000
    scene.restore()
    assert (
        replace(
            scene.group,
            session_deadlines=before.session_deadlines,
            rebalance_deadlines=before.rebalance_deadlines,
            unheard=frozenset(),
            members={
                key: replace(each, connection_number=before.members[key].connection_number)
                for key, each in scene.group.members.items()
            },
        )
        == before
    )
    assert scene.group.members[MemberId("a")].state is MemberState.UNREVOKED
    assert STREAMS.next_deadline(scene.group) == 110_000
    kept = scene.group.members[MemberId("a")].assigned
    assert scene.beat("a", 2, owned=kept).member_epoch == 3
    assert scene.group.unheard == {"b"}
    assert scene.beat("b", 3).tasks == Tasks(ALL - kept.active)
    assert not scene.group.unheard


def test_second_restart_continues_the_running_session() -> None:
    scene = Scene()
    scene.join("a")
    scene.restore(silent_ms=40_000)
    assert STREAMS.next_deadline(scene.group) == SHORTEST_SESSION_MS
    scene.restore(silent_ms=None)
    assert STREAMS.next_deadline(scene.group) == 45_000


def test_an_initial_delay_begins_anew_after_a_restart() -> None:
    scene = Scene(initial_rebalance_delay_ms=3_000)
    scene.join("a")
    scene.now_ms = 1_000
    scene.restore()
    scene.pass_time(2_999)
    assert scene.group.awaits_members
    scene.pass_time(1)
    assert scene.beat("a", 1).tasks == Tasks(ALL)


def test_empty_classic_group_continues_as_a_streams_group() -> None:
    settings = Settings(streams=StreamsSettings(initial_rebalance_delay_ms=0))
    adopted = STREAMS.adopt(
        Group("app", exists=True, generation_id=7), DeleteGroup(RequestId(1)), NO_TOPICS, 0, settings
    )
    assert isinstance(adopted, Adopted)
    scene = Scene()
    scene.group = adopted.group
    assert scene.join("a").member_epoch == 8
    assert STREAMS.adopt(scene.group, DeleteGroup(RequestId(1)), NO_TOPICS, 0, settings) is None


# --- offsets, and what others ask -----------------------------------------------------------------------------------


def ids(scene: Scene, *partitions: tuple[str, int]) -> tuple[tuple[UUID, int], ...]:
    return tuple((scene.cluster.topics[name].topic_id, index) for name, index in partitions)


def commit_event(
    scene: Scene, member_id: str, epoch: int, version: int = 9, partitions: tuple[tuple[str, int], ...] = ()
) -> OffsetCommit:
    return OffsetCommit(
        request_id=RequestId(1),
        connection_id=ConnectionId("c"),
        version=version,
        member_id=MemberId(member_id),
        group_instance_id=None,
        generation_id=epoch,
        partitions=ids(scene, *partitions),
    )


def commit(scene: Scene, member_id: str, epoch: int, version: int = 9, **more: Any) -> ErrorCode:
    error: ErrorCode = scene.play(commit_event(scene, member_id, epoch, version, **more)).error
    return error


def txn_commit(scene: Scene, member_id: str, epoch: int, partitions: tuple[tuple[str, int], ...] = ()) -> ErrorCode:
    event = TxnOffsetCommit(
        request_id=RequestId(1),
        connection_id=ConnectionId("c"),
        member_id=MemberId(member_id),
        group_instance_id=None,
        generation_id=epoch,
        partitions=ids(scene, *partitions),
    )
    error: ErrorCode = scene.play(event).error
    return error


def test_a_member_commits_at_its_epoch_alone() -> None:
    scene = Scene()
    scene.join("a")
    assert commit(scene, "a", 2) is ErrorCode.NONE
    assert commit(scene, "a", 3) is ErrorCode.STALE_MEMBER_EPOCH
    assert commit(scene, "b", 2) is ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(scene, "", -1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(scene, "a", 2, version=8) is ErrorCode.UNSUPPORTED_VERSION
    assert txn_commit(scene, "a", 2) is ErrorCode.NONE
    assert txn_commit(scene, "a", 3) is ErrorCode.ILLEGAL_GENERATION
    assert txn_commit(scene, "", -1) is ErrorCode.NONE
    assert fetch_refusal(scene.group, MemberId("a"), 2) is None
    assert fetch_refusal(scene.group, MemberId("a"), 3) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch_refusal(scene.group, None, -1) is None
    scene.beat("a", -1)
    assert commit(scene, "", -1) is ErrorCode.NONE


def test_commit_at_an_older_epoch_is_accepted_for_tasks_held_since() -> None:
    """A heartbeat advances the member's epoch while the member's commit is under way."""
    scene = Scene({"t": 4, "other": 9})
    scene.join("a")
    scene.join("b")
    kept = scene.beat("a", 2).tasks
    assert kept is not None
    assert commit(scene, "a", 2, partitions=tuple(("t", index) for _, index in ALL)) is ErrorCode.NONE
    assert scene.beat("a", 2, owned=kept).member_epoch == 3
    assert scene.beat("b", 3).tasks is not None
    scene.topics({"t": 6, "other": 9})
    assert scene.beat("a", 3).member_epoch == 4
    held = tuple(("t", index) for _, index in sorted(kept.active))
    lost = tuple(("t", index) for _, index in sorted(ALL - kept.active))
    gained = tuple(("t", index) for _, index in sorted(scene.group.members[MemberId("a")].assigned.active - ALL))
    assert (len(held), len(lost), len(gained)) == (2, 2, 1)
    for restored in (False, True):
        if restored:
            scene.restore()
        for partitions, epoch, error in (
            (held, 2, ErrorCode.NONE),
            (held, 3, ErrorCode.NONE),
            (held, 1, ErrorCode.STALE_MEMBER_EPOCH),
            (held, 5, ErrorCode.STALE_MEMBER_EPOCH),
            (held, -1, ErrorCode.STALE_MEMBER_EPOCH),
            (gained, 4, ErrorCode.NONE),
            (gained, 3, ErrorCode.STALE_MEMBER_EPOCH),
            ((*held, *lost), 3, ErrorCode.STALE_MEMBER_EPOCH),
            ((("other", 0),), 3, ErrorCode.STALE_MEMBER_EPOCH),
        ):
            assert commit(scene, "a", epoch, partitions=partitions) is error, (partitions, epoch)
            stale = error is ErrorCode.STALE_MEMBER_EPOCH
            assert (txn_commit(scene, "a", epoch, partitions) is ErrorCode.ILLEGAL_GENERATION) is stale
        # Postgres knows only the member's newest epoch.
        assert scene.play(commit_event(scene, "a", 3, partitions=held)).member_epoch == 4
    # A member that joins anew owns nothing of its former share.
    scene.join("a")
    assert commit(scene, "a", 3, partitions=held) is ErrorCode.STALE_MEMBER_EPOCH


def test_a_group_with_members_is_not_deleted() -> None:
    scene = Scene()
    scene.join("a")
    delete = DeleteGroup(RequestId(1))
    assert scene.play(delete).error is ErrorCode.NON_EMPTY_GROUP
    scene.beat("a", -1)
    assert scene.play(delete).error is ErrorCode.NONE
    assert scene.last.facts == (GroupDeleted(),)
    assert STREAMS.is_deleted(scene.group)


def test_classic_requests_find_no_member() -> None:
    scene = Scene()
    scene.join("a")
    beat = Heartbeat(
        request_id=RequestId(1),
        connection_id=ConnectionId("c"),
        member_id=MemberId("a"),
        group_instance_id=None,
        generation_id=1,
    )
    assert STREAMS.takes(scene.group, beat)
    assert scene.play(beat).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_summary_shows_the_subscribed_topics() -> None:
    scene = Scene()
    scene.join("a", COUNTING)
    summary = STREAMS.summary(scene.group)
    assert (summary.state, summary.group_type, summary.protocol_type) == ("NotReady", "streams", "streams")
    assert summary.subscribed_topics == {"t", "words", "counts"}
    assert (summary.member_count, summary.is_stable) == (1, False)
    assert isinstance(scene.group, StreamsGroup)


def test_member_with_another_client_host_is_stored_anew() -> None:
    """A change of its connection alone is not stored."""
    scene = Scene()
    epoch = scene.join("a").member_epoch
    scene.beat("a", epoch, connection_number=2)
    assert scene.last.facts == ()
    scene.beat("a", epoch, connection_number=3, client_host="/elsewhere")
    assert scene.last.facts == (MemberChanged(MemberId("a")),)


def test_first_heartbeat_after_a_change_of_topics_may_be_slow() -> None:
    scene = Scene({"t": MANY + 1})
    epoch = scene.join("a").member_epoch
    said = StreamsGroupHeartbeat(
        request_id=RequestId(1),
        connection_id=ConnectionId("c"),
        connection_number=1,
        client_id="",
        client_host="",
        member_id=MemberId("a"),
        member_epoch=epoch,
        endpoint_information_epoch=scene.group.endpoint_epoch,
    )
    assert not STREAMS.is_long(scene.group, said, scene.cluster)
    scene.topics({"t": MANY + 1, "other": 1})
    assert STREAMS.is_long(scene.group, said, scene.cluster)
    scene.beat("a", epoch)
    assert not STREAMS.is_long(scene.group, said, scene.cluster)
