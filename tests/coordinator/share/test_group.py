"""A share group: joins, epochs, assignments, sessions and restarts in single steps, then a seeded simulation."""

from __future__ import annotations

import base64
import random
from dataclasses import replace
from types import MappingProxyType
from uuid import UUID

import pytest

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group
from gateway.coordinator.classic.views import offset_delete_refusal
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerMember
from gateway.coordinator.consumer.partitions import Partitions, size
from gateway.coordinator.document import dump
from gateway.coordinator.facts import MemberId, MemberLeft
from gateway.coordinator.machine import ClusterChanged, ConnectionId, Machines, RequestId, Step, Tick
from gateway.coordinator.requests import (
    DeleteGroup,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    LeaveReply,
    LeavingMember,
    LeftMember,
    OffsetCommit,
)
from gateway.coordinator.settings import Settings, ShareSettings
from gateway.coordinator.share.assignor import Reader, assign
from gateway.coordinator.share.machine import SHARE, step
from gateway.coordinator.share.model import ShareGroup, ShareGroupHeartbeat, ShareGroupHeartbeatReply, ShareMemberRow
from protocol.errors import ErrorCode

T1, T2 = UUID(int=1), UUID(int=2)
SETTINGS = ShareSettings(session_timeout_ms=10_000, heartbeat_interval_ms=1_000, max_size=20)
MACHINES = Machines(CLASSIC, CONSUMER, SHARE)


def uuid_text(number: int) -> MemberId:
    return MemberId(base64.urlsafe_b64encode(UUID(int=number).bytes).decode().rstrip("="))


A, B, C = (uuid_text(number) for number in (1, 2, 3))


def cluster_of(revision: int = 1, **counts: int) -> Cluster:
    ids = {"t1": T1, "t2": T2}
    topics = {name: ClusterTopic(ids[name], name, count) for name, count in counts.items()}
    by_id = {topic.topic_id: topic for topic in topics.values()}
    return Cluster(MappingProxyType(topics), MappingProxyType(by_id), revision)


CLUSTER = cluster_of(t1=2)


def heartbeat(
    member_id: MemberId, epoch: int, names: tuple[str, ...] | None = None, rack: str | None = None
) -> ShareGroupHeartbeat:
    return ShareGroupHeartbeat(RequestId(1), ConnectionId("c"), "client", "/127.0.0.1", member_id, epoch, rack, names)


def beat(
    group: ShareGroup,
    member_id: MemberId,
    epoch: int,
    names: tuple[str, ...] | None = None,
    *,
    rack: str | None = None,
    now: int = 0,
    cluster: Cluster = CLUSTER,
) -> tuple[ShareGroup, ShareGroupHeartbeatReply]:
    taken = step(group, heartbeat(member_id, epoch, names, rack), cluster, now, SETTINGS)
    ((_, reply),) = taken.replies
    assert isinstance(reply, ShareGroupHeartbeatReply)
    return taken.group, reply


def two_members() -> ShareGroup:
    group, _ = beat(ShareGroup("g"), A, 0, ("t1",))
    group, _ = beat(group, B, 0, ("t1",))
    group, _ = beat(group, A, 2)
    return group


def parts(**held: set[int]) -> Partitions:
    return {{"t1": T1, "t2": T2}[name]: frozenset(indexes) for name, indexes in held.items()}


# --- heartbeats -----------------------------------------------------------------------------------------------------


def test_the_first_member_has_everything():
    group, reply = beat(ShareGroup("g"), A, 0, ("t1",))
    assert reply == ShareGroupHeartbeatReply(ErrorCode.NONE, None, A, 2, 1_000, parts(t1={0, 1}))
    again, reply = beat(group, A, 2, now=10)
    assert reply == ShareGroupHeartbeatReply(ErrorCode.NONE, None, A, 2, 1_000, None)
    assert again.session_deadlines[A] == 10_010
    assert replace(again, session_deadlines=group.session_deadlines) == group


def test_a_second_member_takes_its_share_at_once():
    group, _ = beat(ShareGroup("g"), A, 0, ("t1",))
    group, reply = beat(group, B, 0, ("t1",))
    assert (reply.member_epoch, reply.assignment) == (3, parts(t1={1}))
    group, reply = beat(group, A, 2)
    assert (reply.member_epoch, reply.assignment) == (3, parts(t1={0}))


def test_an_answer_that_was_lost_is_given_again():
    group = two_members()
    _, reply = beat(group, A, 2)
    assert (reply.error, reply.member_epoch, reply.assignment) == (ErrorCode.NONE, 3, parts(t1={0}))


def test_more_members_than_partitions_share_them():
    group = two_members()
    group, reply = beat(group, C, 0, ("t1",))
    assert size(reply.assignment or {}) == 1
    assert [size(group.target[each]) for each in (A, B, C)] == [1, 1, 1]


def test_leaving_share_member_frees_its_partitions():
    group, reply = beat(two_members(), B, -1)
    assert (reply.error, reply.member_epoch) == (ErrorCode.NONE, -1)
    _, reply = beat(group, A, 3)
    assert (reply.member_epoch, reply.assignment) == (4, parts(t1={0, 1}))


def test_a_subscription_that_changes_moves_the_epoch():
    wide = cluster_of(t1=2, t2=1)
    group, _ = beat(ShareGroup("g"), A, 0, ("t1",), cluster=wide)
    group, reply = beat(group, A, 2, ("t1", "t2"), cluster=wide)
    assert (reply.member_epoch, reply.assignment) == (4, parts(t1={0, 1}, t2={0}))


def test_new_partitions_arrive_with_the_next_heartbeat():
    group = two_members()
    grown = cluster_of(2, t1=4)
    assert step(group, ClusterChanged(), grown, 0, SETTINGS).group is group
    assert not SHARE.watches(group)
    group, reply = beat(group, A, 3, cluster=grown)
    assert (reply.member_epoch, size(reply.assignment or {})) == (5, 2)
    _, reply = beat(group, B, 3, cluster=CLUSTER)
    assert reply.error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


# --- epochs that Kafka spends before partitions can be read -----------------------------------------------------------


def test_partitions_never_read_cost_one_more_epoch():
    group, reply = beat(ShareGroup("g"), A, 0, ("t1", "t2"), cluster=cluster_of())
    assert (reply.member_epoch, reply.assignment) == (1, {})
    for revision, counts, epoch, given in (
        (2, {"t1": 2}, 3, {"t1": {0, 1}}),
        (3, {"t1": 2, "t2": 1}, 5, {"t1": {0, 1}, "t2": {0}}),
        (4, {"t1": 3, "t2": 1}, 7, {"t1": {0, 1, 2}, "t2": {0}}),
        (5, {"t2": 1}, 8, {"t2": {0}}),
    ):
        cluster = cluster_of(revision, **counts)
        group, reply = beat(group, A, reply.member_epoch, cluster=cluster)
        assert (reply.member_epoch, reply.assignment) == (epoch, parts(**given))
        _, again = beat(group, A, epoch, cluster=cluster)
        assert (again.member_epoch, again.assignment) == (epoch, None)
    assert group.begun == {T2: 1}


def test_topics_that_came_one_by_one_cost_one_epoch():
    group, _ = beat(ShareGroup("g"), A, 0, ("t1", "t2"), cluster=cluster_of())
    for cluster in (cluster_of(2, t1=2), cluster_of(3, t1=2, t2=1)):
        group = step(group, ClusterChanged(), cluster, 0, SETTINGS).group
    _, reply = beat(group, A, 1, cluster=cluster_of(3, t1=2, t2=1))
    assert (reply.member_epoch, reply.assignment) == (3, parts(t1={0, 1}, t2={0}))


def test_returning_share_member_reads_on_at_the_same_epoch():
    group, reply = beat(ShareGroup("g"), A, 0, ("t1",))
    group, _ = beat(group, A, -1)
    stored = SHARE.stored(group)
    back = SHARE.restore("g", stored, {}, None, 0, Settings(share=SETTINGS))
    for each in (group, back):
        _, again = beat(each, A, 0, ("t1",))
        assert (again.member_epoch, again.assignment) == (reply.member_epoch + 2, reply.assignment)


def test_skipped_epoch_is_accepted_without_an_assignment():
    group, _ = beat(ShareGroup("g"), A, 0, ("t1",), cluster=cluster_of())
    group, reply = beat(group, A, 1)
    assert reply.member_epoch == 3
    for epoch, assignment in ((2, None), (1, parts(t1={0, 1}))):
        _, again = beat(group, A, epoch)
        assert (again.error, again.member_epoch, again.assignment) == (ErrorCode.NONE, 3, assignment)
    assert beat(group, A, 4)[1].error is ErrorCode.FENCED_MEMBER_EPOCH


@pytest.mark.parametrize(
    ("member_id", "epoch", "names", "rack", "error"),
    [
        (MemberId(""), 0, ("t1",), None, ErrorCode.INVALID_REQUEST),
        (MemberId("not a uuid"), 0, ("t1",), None, ErrorCode.NONE),
        (MemberId("*" * 36), 0, ("t1",), None, ErrorCode.NONE),
        (MemberId("*" * 37), 0, ("t1",), None, ErrorCode.INVALID_REQUEST),
        (MemberId("\N{GRINNING FACE}" * 18), 0, ("t1",), None, ErrorCode.NONE),
        (MemberId("\N{GRINNING FACE}" * 19), 0, ("t1",), None, ErrorCode.INVALID_REQUEST),
        (C, 0, None, None, ErrorCode.INVALID_REQUEST),
        (C, 0, (), None, ErrorCode.INVALID_REQUEST),
        (C, 0, ("t1",), "", ErrorCode.INVALID_REQUEST),
        (A, -2, None, None, ErrorCode.INVALID_REQUEST),
        (C, 1, None, None, ErrorCode.UNKNOWN_MEMBER_ID),
        (C, -1, None, None, ErrorCode.UNKNOWN_MEMBER_ID),
        (A, 4, None, None, ErrorCode.FENCED_MEMBER_EPOCH),
        (A, 2, None, None, ErrorCode.NONE),
        (C, 0, ("t1",), "rack", ErrorCode.NONE),
    ],
)
def test_share_heartbeats_are_checked(member_id, epoch, names, rack, error):
    group = two_members()
    after, reply = beat(group, member_id, epoch, names, rack=rack)
    assert reply.error is error
    if error is not ErrorCode.NONE:
        assert after is group


def test_unused_share_group_is_not_found():
    for epoch in (1, -1):
        group = ShareGroup("g")
        after, reply = beat(group, A, epoch)
        assert (after, reply.error) == (group, ErrorCode.GROUP_ID_NOT_FOUND)


def test_a_full_group_takes_no_more():
    group = ShareGroup("g")
    for number in range(SETTINGS.max_size):
        group, _ = beat(group, uuid_text(number + 1), 0, ("t1",))
    _, reply = beat(group, uuid_text(99), 0, ("t1",))
    assert reply.error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert beat(group, A, 0, ("t1",))[1].error is ErrorCode.NONE


def test_silent_share_member_is_removed():
    group, _ = beat(two_members(), A, 2, now=5_000)
    assert SHARE.next_deadline(group) == 10_000
    assert step(group, Tick(), CLUSTER, 9_999, SETTINGS).group is group
    taken = step(group, Tick(), CLUSTER, 10_000, SETTINGS)
    assert [fact.member_id for fact in taken.facts if isinstance(fact, MemberLeft)] == [B]
    assert list(taken.group.members) == [A]


def test_only_an_empty_group_is_deleted():
    group = two_members()
    ((_, reply),) = step(group, DeleteGroup(RequestId(2)), CLUSTER, 0, SETTINGS).replies
    assert reply.error is ErrorCode.NON_EMPTY_GROUP
    for each in (A, B):
        group, _ = beat(group, each, -1)
    taken = step(group, DeleteGroup(RequestId(2)), CLUSTER, 0, SETTINGS)
    assert taken.group.is_deleted
    assert SHARE.summary(group).state == "Empty"


# --- other kinds of groups ------------------------------------------------------------------------------------------


def consumer_heartbeat() -> ConsumerGroupHeartbeat:
    return ConsumerGroupHeartbeat(
        RequestId(3), ConnectionId("c"), 1, 1, "client", "/h", MemberId("m"), MemberId("m"), 0,
        rebalance_timeout_ms=1_000, subscribed_topic_names=("t1",), owned={},
    )  # fmt: skip


def played(group: object, event: object) -> Step:
    return MACHINES.step(group, event, CLUSTER, 0, Settings())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("emptied", [False, True])
def test_share_group_keeps_its_type(emptied):
    group = two_members()
    if emptied:
        for each in (A, B):
            group, _ = beat(group, each, -1)
    join = JoinGroup(
        RequestId(3), ConnectionId("c"), 9, "client", "/h", MemberId(""), None, "consumer", (("range", b""),), 10_000,
        10_000, MemberId("new"),
    )  # fmt: skip
    beating = Heartbeat(RequestId(3), ConnectionId("c"), MemberId("m"), None, 1)
    commit = OffsetCommit(RequestId(3), ConnectionId("c"), 9, MemberId(""), None, -1)
    for event, error in (
        (consumer_heartbeat(), ErrorCode.GROUP_ID_NOT_FOUND),
        (join, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        (beating, ErrorCode.UNKNOWN_MEMBER_ID),
        (commit, ErrorCode.GROUP_ID_NOT_FOUND),
    ):
        taken = played(group, event)
        assert taken.group is group
        assert taken.replies[0][1].error is error, type(event)
    assert offset_delete_refusal(SHARE.summary(group)) is ErrorCode.GROUP_ID_NOT_FOUND


def test_leave_of_a_classic_member_from_a_share_group_is_unknown():
    group = two_members()
    leave = LeaveGroup(RequestId(3), ConnectionId("c"), (LeavingMember(A, None),))
    taken = played(group, leave)
    assert taken.group is group
    assert taken.replies == (
        (RequestId(3), LeaveReply(ErrorCode.NONE, (LeftMember(A, None, ErrorCode.UNKNOWN_MEMBER_ID),))),
    )


def test_group_of_another_type_never_becomes_a_share_group():
    member = ConsumerMember(MemberId("m"))
    for group in (
        ConsumerGroup("g", exists=True),
        ConsumerGroup("g", exists=True, members={member.member_id: member}),
        Group("g", exists=True),
    ):
        taken = played(group, heartbeat(A, 0, ("t1",)))
        assert taken.group is group
        assert taken.replies[0][1].error is ErrorCode.GROUP_ID_NOT_FOUND
    fresh = Group("g")
    assert isinstance(played(fresh, heartbeat(A, 0, ("t1",))).group, ShareGroup)
    assert played(fresh, heartbeat(A, 1)).group is fresh


# --- the assignor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_every_partition_has_a_reader_and_every_member_a_partition(seed):
    source = random.Random(seed)
    counts = {UUID(int=number + 1): source.randrange(1, 8) for number in range(source.randrange(1, 4))}
    readers: dict[MemberId, Reader] = {}
    last: dict[MemberId, Partitions] = {}
    alike = source.random() < 0.5
    for _ in range(6):
        for _ in range(source.randrange(4)):
            wanted = counts if alike else source.sample(sorted(counts), source.randrange(1, len(counts) + 1))
            readers[uuid_text(source.randrange(1, 30))] = Reader(frozenset(wanted), {})
        if readers and source.random() < 0.5:
            del readers[source.choice(sorted(readers))]
        readers = {key: replace(each, last=last.get(key, {})) for key, each in readers.items()}
        last = assign(readers, counts)
        assert set(last) == set(readers)
        read = {topic_id for each in readers.values() for topic_id in each.topic_ids}
        given = [(t, i) for held in last.values() for t, indexes in held.items() for i in indexes]
        assert set(given) == {(topic_id, index) for topic_id in read for index in range(counts[topic_id])}
        for key, held in last.items():
            assert held
            assert readers[key].topic_ids.issuperset(held)
        if alike and readers:
            sizes = sorted(map(size, last.values()))
            assert sizes[-1] - sizes[0] <= 1
        if alike:
            settled = {key: replace(each, last=last[key]) for key, each in readers.items()}
            assert assign(settled, counts) == last


# --- anything at all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_stored_rows_restore_the_shown_group(seed):
    """Rows written from durable facts alone always restore the group, and epochs never fall."""
    source = random.Random(seed)
    settings = Settings(share=SETTINGS)
    group, now, cluster = ShareGroup("g"), 0, cluster_of(t1=2)
    rows: dict[MemberId, dict[str, object]] = {}
    stored = SHARE.stored(group)
    told: dict[MemberId, Partitions] = {}
    epochs: dict[MemberId, int] = {}
    for turn in range(150):
        now += source.randrange(3_000)
        member_id = uuid_text(source.randrange(1, 8))
        choice = source.random()
        if choice < 0.1:
            cluster = cluster_of(cluster.revision + 1, t1=source.randrange(1, 6), t2=source.randrange(1, 4))
            event = ClusterChanged()
        elif choice < 0.2:
            event = Tick()
        elif choice < 0.3:
            event = heartbeat(member_id, -1)
        elif choice < 0.5:
            event = heartbeat(member_id, 0, source.choice((("t1",), ("t2",), ("t1", "t2"), ("none",))))
        else:
            event = heartbeat(member_id, epochs.get(member_id, 1))
        taken = step(group, event, cluster, now, SETTINGS)
        assert taken.group.group_epoch >= group.group_epoch >= group.assignment_epoch
        group = taken.group
        if any(type(fact) in SHARE.durable for fact in taken.facts):
            stored = SHARE.stored(group)
            for touched in {each for fact in taken.facts for each in fact.touches()}:
                member = SHARE.stored_member(group, touched)
                if member is None:
                    rows.pop(touched, None)
                else:
                    rows[touched] = dict(member.document)
        for _, reply in taken.replies:
            assert isinstance(reply, ShareGroupHeartbeatReply)
            if reply.error is not ErrorCode.NONE or reply.member_epoch < 0:
                continue
            epochs[member_id] = reply.member_epoch
            if reply.assignment is not None:
                told[member_id] = reply.assignment
            if reply.member_epoch == group.assignment_epoch:
                assert told[member_id] == group.target[member_id]
        assert rows == {
            key: dump(ShareMemberRow(member, group.target.get(key, {}))) for key, member in group.members.items()
        }, turn
        if group.exists:
            back = SHARE.restore("g", stored, rows, None, now, settings)
            same = ("group_epoch", "assignment_epoch", "metadata_hash", "topics_revision", "begun", "members", "target")
            assert all(getattr(back, name) == getattr(group, name) for name in same), turn
            assert back.unheard == frozenset(group.members)
            if source.random() < 0.05:
                group = back
    assert group.group_epoch > 5
