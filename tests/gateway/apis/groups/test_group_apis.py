"""The group handlers at every version, through the codec: each field of requests and answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.coordinator.classic.model import Member
from gateway.net.ids import check_ids
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from storage.errors import StorageUnavailable
from storage.nodes import NodeStore
from storage.types import LeaseKind, NewTopic, Node, Refusal, Topic
from tests.gateway.group_node import GroupNode, forget_everything, group_node, lose_lease, settle
from tests.postgres import Databases
from tests.steps.waiting import until

G = "g"
UUID4 = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def database_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    await forget_everything(database_url)
    async with group_node(database_url) as started:
        yield started


def join_request(
    member_id: str = "",
    *,
    group_id: str = G,
    group_instance_id: str | None = None,
    protocol_type: str = "consumer",
    session_timeout_ms: int = 10_000,
) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group_id,
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=20_000,
        member_id=member_id,
        group_instance_id=group_instance_id,
        protocol_type=protocol_type,
        protocols=(JoinGroupRequestProtocol(name="range", metadata=b"subscription"),),
    )


async def join(node: GroupNode, version: int, *, connection: str = "c", **given: str) -> JoinGroupResponse:
    answer = await node.ask(join_request(**given), version, connection=connection)  # type: ignore[arg-type]
    if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        given["member_id"] = answer.member_id
        answer = await node.ask(join_request(**given), version, connection=connection)  # type: ignore[arg-type]
    return answer


# --- JoinGroup ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(10))
async def test_join_as_the_only_member(node: GroupNode, version: int) -> None:
    answer = await join(node, version)
    assert (answer.error_code, answer.generation_id, answer.protocol_name) == (ErrorCode.NONE, 1, "range")
    assert answer.protocol_type == ("consumer" if version >= 7 else None)
    assert answer.leader == answer.member_id
    assert re.fullmatch(f"client-{UUID4}", answer.member_id)
    assert [(member.member_id, member.metadata) for member in answer.members] == [(answer.member_id, b"subscription")]


@pytest.mark.parametrize("version", range(10))
async def test_first_join_without_a_member_id_is_refused_from_version_4(node: GroupNode, version: int) -> None:
    answer = await node.ask(join_request(), version)
    assert answer.error_code == (ErrorCode.MEMBER_ID_REQUIRED if version >= 4 else ErrorCode.NONE)
    assert answer.member_id
    if version >= 4:
        assert answer.generation_id == -1
        assert answer.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize("version", range(5, 10))
async def test_a_static_member_joins_at_once_under_its_instance_id(node: GroupNode, version: int) -> None:
    answer = await node.ask(join_request(group_instance_id="instance"), version)
    assert answer.error_code == ErrorCode.NONE
    assert re.fullmatch(f"instance-{UUID4}", answer.member_id)
    assert answer.members[0].group_instance_id == "instance"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"group_id": ""}, ErrorCode.INVALID_GROUP_ID),
        ({"member_id": "nobody"}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"session_timeout_ms": 1}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"protocol_type": ""}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
async def test_refused_joins_have_no_generation_and_no_protocol(
    node: GroupNode, given: dict[str, str], code: ErrorCode
) -> None:
    for version in range(10):
        answer = await node.ask(join_request(**given), version)  # type: ignore[arg-type]
        assert (answer.error_code, answer.generation_id, answer.leader, answer.members) == (code, -1, "", ())
        assert answer.protocol_type is None
        assert answer.protocol_name == (None if version >= 7 else "")
        assert answer.member_id == given.get("member_id", "")
    assert await node.stored(G) is None


async def test_version_0_uses_the_session_timeout_for_the_rebalance(node: GroupNode) -> None:
    await node.ask(join_request(session_timeout_ms=7_000), 0)
    (member,) = (await node.groups.view(G)).members.values()
    assert isinstance(member, Member)
    assert member.rebalance_timeout_ms == 7_000


async def test_a_client_without_an_id_or_with_a_huge_one_gets_a_member_id(node: GroupNode) -> None:
    nameless = await node.ask(join_request(group_id="a"), 3, client_id=None)
    assert re.fullmatch(f"-{UUID4}", nameless.member_id)
    huge = await node.ask(join_request(group_id="b"), 3, client_id="x" * 30_000)
    assert huge.error_code == ErrorCode.NONE
    assert re.fullmatch(f"x{{255}}-{UUID4}", huge.member_id)


async def test_member_id_made_of_a_clients_id_may_be_sent_back(node: GroupNode) -> None:
    joined = await node.ask(join_request(group_id="a"), 3, client_id="\U0001f600" * 255)
    check_ids(join_request(group_id="a", member_id=joined.member_id))
    assert re.fullmatch(f"\U0001f600+-{UUID4}", joined.member_id)


async def test_client_id_with_a_nul_character_is_accepted(node: GroupNode) -> None:
    answer = await node.ask(join_request(group_id="g\0"), 3, client_id="\0")
    assert answer.error_code == ErrorCode.NONE
    described = await node.ask(DescribeGroupsRequest(groups=("g\0",)), 5)
    assert described.groups[0].members[0].client_id == "\0"


@pytest.mark.parametrize("version", [8, 9])
async def test_returning_static_leader_skips_the_assignment_from_version_9(node: GroupNode, version: int) -> None:
    first = await node.ask(join_request(group_instance_id="i"), version)
    await node.ask(
        SyncGroupRequest(
            group_id=G,
            generation_id=1,
            member_id=first.member_id,
            group_instance_id="i",
            assignments=(SyncGroupRequestAssignment(member_id=first.member_id, assignment=b"a"),),
        ),
        4,
    )
    again = await node.ask(join_request(group_instance_id="i"), version, connection="other")
    assert (again.error_code, again.generation_id) == (ErrorCode.NONE, 1)
    assert again.member_id != first.member_id
    assert again.skip_assignment is (version >= 9)
    assert len(again.members) == (1 if version >= 9 else 0)
    assert again.leader == (again.member_id if version >= 9 else first.member_id)


# --- SyncGroup ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(6))
async def test_sync_gives_the_leaders_assignment(node: GroupNode, version: int) -> None:
    member = await join(node, 9)
    answer = await node.ask(
        SyncGroupRequest(
            group_id=G,
            generation_id=1,
            member_id=member.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=(SyncGroupRequestAssignment(member_id=member.member_id, assignment=b"bytes"),),
        ),
        version,
    )
    assert (answer.error_code, answer.assignment) == (ErrorCode.NONE, b"bytes")
    assert (answer.protocol_type, answer.protocol_name) == (("consumer", "range") if version >= 5 else (None, None))
    again = SyncGroupRequest(
        group_id=G, generation_id=1, member_id=member.member_id, protocol_type="consumer", protocol_name="range"
    )
    assert await node.ask(again, version) == answer, "a repeat is answered from what is stored"


@pytest.mark.parametrize("version", range(6))
async def test_refused_syncs_carry_nothing(node: GroupNode, version: int) -> None:
    request = SyncGroupRequest(
        group_id=G, generation_id=1, member_id="nobody", protocol_type="consumer", protocol_name="range"
    )
    answer = await node.ask(request, version)
    assert (answer.error_code, answer.assignment) == (ErrorCode.UNKNOWN_MEMBER_ID, b"")
    assert (answer.protocol_type, answer.protocol_name) == (None, None)
    nameless = SyncGroupRequest(group_id="", member_id="m", protocol_type="consumer", protocol_name="range")
    assert (await node.ask(nameless, version)).error_code == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("fields", [{"protocol_type": None}, {"protocol_name": None}])
async def test_sync_of_version_5_must_name_its_protocol(node: GroupNode, fields: dict[str, None]) -> None:
    given: dict[str, str | None] = {"protocol_type": "consumer", "protocol_name": "range", **fields}
    answer = await node.ask(SyncGroupRequest(group_id="", **given), 5)  # type: ignore[arg-type]
    assert answer.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


# --- Heartbeat, LeaveGroup ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(5))
async def test_heartbeat_is_answered_at_every_version(node: GroupNode, version: int) -> None:
    member = await join(node, 9)

    async def beat(group_id: str, member_id: str, generation_id: int) -> int:
        request = HeartbeatRequest(group_id=group_id, member_id=member_id, generation_id=generation_id)
        return int((await node.ask(request, version)).error_code)

    assert await beat(G, member.member_id, 1) == ErrorCode.NONE
    assert await beat(G, member.member_id, 2) == ErrorCode.ILLEGAL_GENERATION
    assert await beat(G, "nobody", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await beat("missing", member.member_id, 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await beat("", member.member_id, 1) == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", range(3))
async def test_single_leave_is_answered_at_the_top_level(node: GroupNode, version: int) -> None:
    member = await join(node, 3)
    unknown = await node.ask(LeaveGroupRequest(group_id=G, member_id="nobody"), version)
    assert (unknown.error_code, unknown.members) == (ErrorCode.UNKNOWN_MEMBER_ID, ())
    left = await node.ask(LeaveGroupRequest(group_id=G, member_id=member.member_id), version)
    assert (left.error_code, left.members) == (ErrorCode.NONE, ())
    assert not (await node.groups.view(G)).members
    assert (await node.ask(LeaveGroupRequest(group_id=""), version)).error_code == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", range(3, 6))
async def test_batched_leave_is_answered_per_member(node: GroupNode, version: int) -> None:
    dynamic = await join(node, 3)
    static = asyncio.create_task(node.ask(join_request(group_instance_id="i"), 5, connection="s"))

    async def both_are_in() -> bool:
        return len((await node.groups.view(G)).members) == 2

    await until(both_are_in)
    rejoined = await node.ask(join_request(dynamic.member_id), 3)
    assert (await static).error_code == rejoined.error_code == ErrorCode.NONE
    answer = await node.ask(
        LeaveGroupRequest(
            group_id=G,
            members=(
                MemberIdentity(member_id="nobody", reason="why not"),
                MemberIdentity(member_id="wrong", group_instance_id="i"),
                MemberIdentity(member_id="", group_instance_id="i"),
                MemberIdentity(member_id=dynamic.member_id),
            ),
        ),
        version,
    )
    assert answer.error_code == ErrorCode.NONE
    assert [(member.member_id, member.group_instance_id, member.error_code) for member in answer.members] == [
        ("nobody", None, ErrorCode.UNKNOWN_MEMBER_ID),
        ("wrong", "i", ErrorCode.FENCED_INSTANCE_ID),
        ("", "i", ErrorCode.NONE),
        (dynamic.member_id, None, ErrorCode.NONE),
    ]
    missing = await node.ask(LeaveGroupRequest(group_id="missing", members=(MemberIdentity(member_id="m"),)), version)
    assert (missing.error_code, missing.members[0].error_code) == (ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID)


# --- FindCoordinator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(7))
async def test_the_coordinator_of_a_group_is_the_node_that_holds_its_lease(node: GroupNode, version: int) -> None:
    answer = await node.ask(FindCoordinatorRequest(key=G, coordinator_keys=(G, "")), version)
    self_node = node.services.membership.self_node
    found = [answer] if version < 4 else answer.coordinators
    assert [(one.error_code, one.node_id, one.host, one.port) for one in found] == [
        (ErrorCode.NONE, self_node.node_id, "127.0.0.1", 9092)
    ] * (1 if version < 4 else 2)
    if version >= 4:
        assert [one.key for one in found] == [G, ""]


@pytest.mark.parametrize(
    ("key_type", "code"),
    [
        (2, ErrorCode.INVALID_REQUEST),
        (7, ErrorCode.INVALID_REQUEST),
        (-1, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_other_coordinators_are_refused(node: GroupNode, key_type: int, code: ErrorCode) -> None:
    for version in range(1, 7):
        answer = await node.ask(FindCoordinatorRequest(key="k", key_type=key_type, coordinator_keys=("k",)), version)
        found = answer if version < 4 else answer.coordinators[0]
        assert (found.error_code, found.node_id, found.host, found.port) == (code, -1, "", -1)
        assert found.error_message


async def test_coordinator_has_the_message_none_before_batched_versions(node: GroupNode) -> None:
    for version in range(1, 7):
        answer = await node.ask(FindCoordinatorRequest(key=G, coordinator_keys=(G,)), version)
        found = answer if version < 4 else answer.coordinators[0]
        assert found.error_code == ErrorCode.NONE
        assert found.error_message == ("NONE" if version < 4 else "")


async def test_coordinator_without_the_clients_listener_is_not_available(node: GroupNode) -> None:
    for version in range(7):
        answer = await node.ask(FindCoordinatorRequest(key=G, coordinator_keys=(G,)), version, listener="OUTSIDE")
        found = answer if version < 4 else answer.coordinators[0]
        assert (found.error_code, found.node_id) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, -1)


async def test_coordinator_lookup_creates_the_offsets_topic(node: GroupNode) -> None:
    """Committed offsets survive the deletion of the topic, because they are not stored in it."""
    offsets = "__consumer_offsets"
    known = await node.topics.find(offsets)
    if known is not None:
        await node.topics.delete(known.topic_id)
        node.services.catalog.remove(known.topic_id)
    await node.ask(FindCoordinatorRequest(key="k", key_type=1, coordinator_keys=("k",)), 6)
    assert await node.topics.find(offsets) is None, "a transaction's"
    await node.ask(FindCoordinatorRequest(coordinator_keys=(G,)), 6)
    made = node.services.catalog.get(offsets)
    assert made is not None
    assert made.internal


async def test_many_coordinator_lookups_change_the_catalog_once(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets, create, calls = "__consumer_offsets", node.topics.create, 0
    known = await node.topics.find(offsets)
    if known is not None:
        await node.topics.delete(known.topic_id)
        node.services.catalog.remove(known.topic_id)
    begun, gate = asyncio.Event(), asyncio.Event()

    async def counted(topics: Sequence[NewTopic]) -> list[Topic | Refusal]:
        nonlocal calls
        calls += 1
        begun.set()
        await gate.wait()
        return await create(topics)

    monkeypatch.setattr(node.topics, "create", counted)
    request = FindCoordinatorRequest(coordinator_keys=(G,))
    first, *others = [asyncio.create_task(node.ask(request, 6)) for _ in range(20)]
    await begun.wait()
    first.cancel()
    await asyncio.wait({first})
    gate.set()
    answers = await asyncio.gather(*others)
    assert {answer.coordinators[0].error_code for answer in answers} == {ErrorCode.NONE}
    assert calls == 1
    made = node.services.catalog.get(offsets)
    assert made is not None
    assert len(made.partitions) == 50
    # If a client deletes the topic, the next lookup creates it again.
    await node.topics.delete(made.topic_id)
    node.services.catalog.remove(made.topic_id)
    await node.ask(request, 6)
    assert calls == 2


async def test_shard_without_a_known_holder_has_no_coordinator(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(store: NodeStore, kind: LeaseKind) -> dict[int, Node]:
        raise StorageUnavailable("away")

    monkeypatch.setattr(NodeStore, "lease_owners", away)
    node.lease_clock.seconds += 3600
    answer = await node.ask(FindCoordinatorRequest(coordinator_keys=(G,)), 4)
    assert answer.coordinators[0].error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


# --- DescribeGroups, ListGroups, DeleteGroups -----------------------------------------------------------------------


@pytest.mark.parametrize("version", range(7))
async def test_a_stable_group_is_described_with_subscriptions_and_assignments(node: GroupNode, version: int) -> None:
    member = node.member(G, "c1", group_instance_id="i")
    await settle(member)
    answer = await node.ask(DescribeGroupsRequest(groups=(G,)), version)
    (group,) = answer.groups
    assert (group.error_code, group.error_message, group.group_id, group.group_state) == (0, None, G, "Stable")
    assert (group.protocol_type, group.protocol_data) == ("consumer", "range")
    assert group.authorized_operations == -(2**31)
    (described,) = group.members
    assert (described.member_id, described.client_id, described.client_host) == ("member-c1", "client", "/127.0.0.1")
    assert (described.member_metadata, described.member_assignment) == (b"subscription", b"member-c1")
    assert described.group_instance_id == ("i" if version >= 4 else None)


async def test_group_that_is_named_twice_is_described_once(node: GroupNode) -> None:
    """The group may have very many members, and a request may name it very many times."""
    await settle(node.member(G, "a"))
    described = await node.ask(DescribeGroupsRequest(groups=(G, "other", G, G)), 5)
    assert [group.group_id for group in described.groups] == [G, "other"]


async def test_subscriptions_are_shown_in_stable_only(node: GroupNode) -> None:
    await join(node, 3)
    (group,) = (await node.ask(DescribeGroupsRequest(groups=(G,)), 6)).groups
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("CompletingRebalance", "consumer", "")
    assert group.members[0].member_metadata == b""


@pytest.mark.parametrize("version", range(7))
async def test_a_missing_group_is_dead(node: GroupNode, version: int) -> None:
    (group,) = (await node.ask(DescribeGroupsRequest(groups=("",)), version)).groups
    assert (group.group_id, group.group_state, group.protocol_type, group.members) == ("", "Dead", "", ())
    assert group.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version >= 6 else ErrorCode.NONE)
    assert bool(group.error_message) is (version >= 6)


@pytest.mark.parametrize("version", range(3, 7))
async def test_authorized_operations_are_returned_if_requested(node: GroupNode, version: int) -> None:
    await settle(node.member(G, "c1"))
    request = DescribeGroupsRequest(groups=(G,), include_authorized_operations=True)
    (group,) = (await node.ask(request, version)).groups
    # AclEntry.supportedOperations of a group: READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS and ALTER_CONFIGS.
    assert group.authorized_operations == sum(1 << operation for operation in (3, 6, 8, 10, 11))
    request = DescribeGroupsRequest(groups=("missing",), include_authorized_operations=True)
    (missing,) = (await node.ask(request, version)).groups
    assert (missing.authorized_operations == -(2**31)) == bool(missing.error_code) == (version >= 6)


async def test_many_groups_are_described_with_few_queries(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test may have moved a shard to another node.
    group_ids = [group_id for group_id in map(str, range(1000)) if node.leases.lease_for(group_id) is not None][:250]
    await settle(node.member(group_ids[150], "c1"))
    asked: list[object] = []
    load = node.store.load

    async def counted(group_ids: Any) -> Any:
        asked.append(group_ids)
        return await load(group_ids)

    monkeypatch.setattr(node.store, "load", counted)
    for request in (
        DescribeGroupsRequest(groups=tuple(group_ids)),
        ConsumerGroupDescribeRequest(group_ids=tuple(group_ids)),
    ):
        asked.clear()
        version = 5 if isinstance(request, DescribeGroupsRequest) else 1
        groups = (await node.ask(request, version)).groups
        assert [group.group_id for group in groups] == group_ids
        assert len(asked) < 10
        stable = [group.group_id for group in groups if group.group_state == "Stable"]
        assert stable == ([group_ids[150]] if version == 5 else [])


async def test_a_group_coordinated_elsewhere_is_described_as_such_alone(node: GroupNode) -> None:
    await settle(node.member(G, "c1"))
    other = next(name for name in "abcdef" if node.leases.shard_of(name) != node.leases.shard_of(G))
    await lose_lease(node, other)
    answer = await node.ask(DescribeGroupsRequest(groups=(other, G)), 5)
    assert [group.error_code for group in answer.groups] == [ErrorCode.NOT_COORDINATOR, ErrorCode.NONE]


@pytest.mark.parametrize("version", range(6))
async def test_groups_in_memory_and_stored_groups_are_listed(node: GroupNode, version: int) -> None:
    await settle(node.member("stable", "c1"))
    gone = node.member("emptied", "c2")
    await settle(gone)
    await gone.leave()
    held = node.member("rebalancing", "c3")
    await settle(held)
    newcomer = node.member("rebalancing", "c4").join()
    await node.ask(join_request(group_id="asked only"), 4, connection="c5")
    answer = await node.ask(ListGroupsRequest(), version)
    assert answer.error_code == ErrorCode.NONE
    listed = {group.group_id: (group.protocol_type, group.group_state, group.group_type) for group in answer.groups}
    states = {
        "stable": ("consumer", "Stable"),
        "emptied": ("consumer", "Empty"),
        "rebalancing": ("consumer", "PreparingRebalance"),
        "asked only": ("", "Empty"),
    }
    assert listed == {
        group_id: (protocol_type, state if version >= 4 else "", "classic" if version >= 5 else "")
        for group_id, (protocol_type, state) in states.items()
    }
    newcomer.cancel()


@pytest.mark.parametrize(
    ("version", "states", "types", "expected"),
    [
        (4, ("stable",), (), {"stable"}),
        (5, ("STABLE", "empty"), (), {"stable", "emptied"}),
        (5, ("no such state",), (), set[str]()),
        (5, (), ("Classic",), {"stable", "emptied"}),
        (5, (), ("consumer", "share"), set[str]()),
        (5, ("Stable",), ("classic", "consumer"), {"stable"}),
        (5, ("Stable",), ("consumer",), set[str]()),
    ],
)
async def test_lists_are_filtered(
    node: GroupNode, version: int, states: tuple[str, ...], types: tuple[str, ...], expected: set[str]
) -> None:
    await settle(node.member("stable", "c1"))
    gone = node.member("emptied", "c2")
    await settle(gone)
    await gone.leave()
    answer = await node.ask(ListGroupsRequest(states_filter=states, types_filter=types), version)
    assert {group.group_id for group in answer.groups} == expected


async def test_groups_of_other_nodes_are_not_listed(node: GroupNode) -> None:
    await settle(node.member(G, "c1"))
    await lose_lease(node, G)
    assert (await node.ask(ListGroupsRequest(), 5)).groups == ()


@pytest.mark.parametrize("version", range(3))
async def test_groups_are_deleted_when_empty(node: GroupNode, version: int) -> None:
    await settle(node.member("stable", "c1"))
    gone = node.member("emptied", "c2")
    await settle(gone)
    await gone.leave()
    request = DeleteGroupsRequest(groups_names=("stable", "emptied", "missing", "", "emptied"))
    answer = await node.ask(request, version)
    assert [(result.group_id, result.error_code) for result in answer.results] == [
        ("stable", ErrorCode.NON_EMPTY_GROUP),
        ("emptied", ErrorCode.NONE),
        ("missing", ErrorCode.GROUP_ID_NOT_FOUND),
        ("", ErrorCode.GROUP_ID_NOT_FOUND),
    ]
    assert await node.stored("emptied") is None
    again = await node.ask(request, version)
    assert again.results[1].error_code == ErrorCode.GROUP_ID_NOT_FOUND
