"""Replicas that a client has assigned, on a real Postgres: assignments, elections and reassignments, as clients see
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import UUID

import pytest

from gateway.apis.admin import replicas as module
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from protocol.messages.create_topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from protocol.messages.describe_log_dirs import DescribeLogDirsRequest
from protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from protocol.messages.list_partition_reassignments import ListPartitionReassignmentsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from storage.errors import StorageUnavailable
from storage.monitor import Monitor
from storage.types import Assignment, Topic
from tests.gateway.admin import AdminNode, admin_node

PREFERRED, UNCLEAN = 0, 1
NOT_NEEDED = (ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition.")

Shown = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Leader, replicas, in-sync replicas and offline replicas of one partition."""


@asynccontextmanager
async def three(url: str) -> AsyncIterator[list[AdminNode]]:
    """Start nodes 1 to 3, and let each of them learn of the others."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(admin_node(url, name=f"node-{number}")) for number in (1, 2, 3)]
        await see_each_other(nodes)
        yield nodes


async def see_each_other(nodes: Sequence[AdminNode]) -> None:
    for node in nodes:
        await node.membership.renew()


async def gone(node: AdminNode, *others: AdminNode) -> None:
    await node.membership.withdraw()
    await see_each_other(others)


async def back(node: AdminNode, *others: AdminNode) -> None:
    node.membership._withdrawn = False  # noqa: SLF001
    await node.membership.join()
    await see_each_other(others)


async def assigned(node: AdminNode, name: str, *replicas: tuple[int, ...]) -> None:
    """Create a topic whose partitions have replicas on these nodes."""
    named = tuple(
        CreatableReplicaAssignment(partition_index=index, broker_ids=each) for index, each in enumerate(replicas)
    )
    request = CreateTopicsRequest(
        topics=(CreatableTopic(name=name, num_partitions=-1, replication_factor=-1, assignments=named),)
    )
    answer = await node.ask(ApiKey.CREATE_TOPICS, request, 7)
    (made,) = answer.topics
    assert (made.error_code, made.num_partitions) == (ErrorCode.NONE, len(replicas)), made
    assert made.replication_factor == len(replicas[0])


async def shown(node: AdminNode, name: str) -> list[Shown]:
    """Return the topic's partitions as Metadata shows them, and check that DescribeTopicPartitions shows the same."""
    await node.catalog.refresh_if_changed()
    answer = await node.ask(ApiKey.METADATA, MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 12)
    paged = await node.ask(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, DescribeTopicPartitionsRequest(topics=(TopicRequest(name=name),)), 0
    )
    one, other = (
        [(part.leader_id, part.replica_nodes, part.isr_nodes, part.offline_replicas) for part in topic.partitions]
        for topic in (answer.topics[0], paged.topics[0])
    )
    assert one == other
    return one


async def reassign(
    node: AdminNode, name: str, *targets: tuple[int, tuple[int, ...] | None], version: int = 1, may_change: bool = True
) -> list[tuple[int, str | None]]:
    """Reassign partitions; return the error code and message of each."""
    request = AlterPartitionReassignmentsRequest(
        allow_replication_factor_change=may_change,
        topics=(
            ReassignableTopic(
                name=name,
                partitions=tuple(ReassignablePartition(partition_index=at, replicas=to) for at, to in targets),
            ),
        ),
    )
    answer = await node.ask(ApiKey.ALTER_PARTITION_REASSIGNMENTS, request, version)
    assert (answer.error_code, answer.error_message) == (ErrorCode.NONE, None)
    (topic,) = answer.responses
    assert (topic.name, [part.partition_index for part in topic.partitions]) == (name, [at for at, _ in targets])
    return [(part.error_code, part.error_message) for part in topic.partitions]


async def test_node_that_has_just_started_may_be_named(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("t")
        await node.create("grown", factor=1)
        async with admin_node(database_url, name="node-2"):
            await assigned(node, "new", (2, 1))
            assert await reassign(node, "t", (0, (2,))) == [(ErrorCode.NONE, None)]
            assert [leader for leader, *_ in await shown(node, "t")] == [2]
        async with admin_node(database_url, name="node-3"):
            growth = CreatePartitionsTopic(
                name="grown", count=2, assignments=(CreatePartitionsAssignment(broker_ids=(3,)),)
            )
            answer = await node.ask(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest(topics=(growth,)), 3)
            assert answer.results[0].error_code == ErrorCode.NONE, answer.results[0]


async def elect(
    node: AdminNode, asked: dict[str, tuple[int, ...]] | None, election: int = PREFERRED, version: int = 2
) -> dict[str, dict[int, tuple[int, str | None]]]:
    """Elect leaders; return the error code and message of each partition, by topic and index."""
    named = (
        None if asked is None else tuple(TopicPartitions(topic=name, partitions=parts) for name, parts in asked.items())
    )
    request = ElectLeadersRequest(election_type=election, topic_partitions=named)
    answer = await node.ask(ApiKey.ELECT_LEADERS, request, version)
    assert answer.error_code == ErrorCode.NONE
    return {
        result.topic: {part.partition_id: (part.error_code, part.error_message) for part in result.partition_result}
        for result in answer.replica_election_results
    }


# --- assignments ----------------------------------------------------------------------------------------------------


async def test_every_node_shows_the_assignment(database_url: str) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (3, 1), (2, 3), (1, 2))
        await nodes[0].create("placed", 3, factor=2)
        for node in nodes:
            assert await shown(node, "named") == [
                (3, (3, 1), (3, 1), ()),
                (2, (2, 3), (2, 3), ()),
                (1, (1, 2), (1, 2), ()),
            ]
            for leader, replicas, in_sync, offline in await shown(node, "placed"):
                assert (replicas[0], len(set(replicas)), in_sync, offline) == (leader, 2, replicas, ())


async def test_next_replica_leads_until_the_first_returns(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await assigned(one, "named", (3, 2), (3, 2))
        assert await reassign(one, "named", (1, (3,))) == [(ErrorCode.NONE, None)]
        await shown(two, "named")
        await gone(three_, one, two)
        (first, alone) = await shown(one, "named")
        assert first == (2, (3, 2), (2,), (3,))
        assert alone[0] in (1, 2), "nothing is lost with it, so somebody leads"
        assert alone[1:] == ((3,), (), (3,))
        assert await shown(two, "named") == [first, alone]
        await back(three_, one, two)
        for node in (one, two, three_):
            assert await shown(node, "named") == [(3, (3, 2), (3, 2), ()), (3, (3,), (3,), ())]


async def test_a_node_that_starts_reads_assignments(database_url: str) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (2, 1))
        assert await reassign(nodes[0], "named", (0, (1, 3))) == [(ErrorCode.NONE, None)]
        async with admin_node(database_url, name="node-4") as four:
            assert await shown(four, "named") == [(1, (1, 3), (1, 3), ())]
            assert four.catalog.get("named") == nodes[0].catalog.get("named")
            (ends,) = await Monitor(four.database).partitions(10)
            assert ends.partition.assignment == Assignment((1, 3)), "metrics name the same leader"


async def test_added_partitions_have_their_assigned_replicas(database_url: str) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (3, 1))
        named = (CreatePartitionsAssignment(broker_ids=(2, 3)), CreatePartitionsAssignment(broker_ids=(1, 2)))
        request = CreatePartitionsRequest(topics=(CreatePartitionsTopic(name="named", count=3, assignments=named),))
        answer = await nodes[0].ask(ApiKey.CREATE_PARTITIONS, request, 3)
        assert answer.results[0].error_code == ErrorCode.NONE, answer
        expected = [(3, (3, 1), (3, 1), ()), (2, (2, 3), (2, 3), ()), (1, (1, 2), (1, 2), ())]
        for node in nodes:
            assert await shown(node, "named") == expected


async def test_added_partitions_are_named_as_many_nodes_as_the_first(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):

        async def grow(count: int, *, validate_only: bool = False) -> tuple[int, str | None]:
            topic = CreatePartitionsTopic(name="named", count=count, assignments=None)
            request = CreatePartitionsRequest(topics=(topic,), validate_only=validate_only)
            (result,) = (await one.ask(ApiKey.CREATE_PARTITIONS, request, 3)).results
            return result.error_code, result.error_message

        async def replicas(node: AdminNode) -> list[tuple[int, ...]]:
            await node.catalog.refresh_if_changed()
            topic = node.catalog.get("named")
            assert topic is not None
            return [part.assignment.replicas for part in topic.partitions if part.assignment is not None]

        await assigned(one, "named", (3, 1))
        assert await grow(4) == (ErrorCode.NONE, None)
        expected = [(3, 1), (1, 2), (2, 3), (3, 2)]
        assert [await replicas(node) for node in (one, two, three_)] == [expected] * 3
        await gone(two, one, three_)
        assert await grow(6) == (ErrorCode.NONE, None)
        assert (await replicas(one))[4:] == [(3, 1), (1, 3)], "who is alive comes first"
        assert await reassign(one, "named", (0, (3, 2, 1))) == [(ErrorCode.NONE, None)]
        assert await grow(7) == (ErrorCode.NONE, None)
        assert (await replicas(one))[6:] == [(3, 1, 2)]
        await one.membership.unregister(two.membership.node_id)
        reason = "The target replication factor of 3 cannot be reached because only 2 broker(s) are registered."
        for validate_only in (True, False):
            assert await grow(8, validate_only=validate_only) == (ErrorCode.INVALID_REPLICATION_FACTOR, reason)


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        (((1, 9),), "broker 9, but no such broker is registered."),
        (((1, 1),), "the broker 1 more than once."),
        (((),), "an empty replica list."),
        (
            ((1, 2), (3,)),
            "a partition with 1 replica(s), but this is not consistent with previous partitions, "
            "which have 2 replica(s).",
        ),
    ],
)
async def test_invalid_assignment_is_refused(
    database_url: str, replicas: tuple[tuple[int, ...], ...], reason: str
) -> None:
    async with three(database_url) as nodes:
        named = tuple(
            CreatableReplicaAssignment(partition_index=index, broker_ids=each) for index, each in enumerate(replicas)
        )
        topic = CreatableTopic(name="named", num_partitions=-1, replication_factor=-1, assignments=named)
        answer = await nodes[0].ask(ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=(topic,)), 7)
        (refused,) = answer.topics
        assert refused.error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
        assert refused.error_message == f"The manual partition assignment includes {reason}"
        assert nodes[0].catalog.get("named") is None


async def test_a_new_partition_needs_one_node_that_is_alive(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await gone(three_, one, two)
        await assigned(one, "named", (3, 1))
        topic = CreatableTopic(
            name="dead",
            num_partitions=-1,
            replication_factor=-1,
            assignments=(CreatableReplicaAssignment(partition_index=0, broker_ids=(3,)),),
        )
        answer = await one.ask(ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=(topic,)), 7)
        assert answer.topics[0].error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
        assert "for partition 0 are fenced" in (answer.topics[0].error_message or "")


async def test_log_directories_list_the_replicas(database_url: str) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (3, 1), (2, 3))
        found: list[tuple[int, int]] = []
        for node in nodes:
            await node.catalog.refresh_if_changed()
            answer = await node.ask(ApiKey.DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=None), 4)
            found += [
                (int(node.membership.node_id), part.partition_index)
                for topic in answer.results[0].topics
                for part in topic.partitions
            ]
        assert sorted(found) == [(1, 0), (2, 1), (3, 0), (3, 1)]


# --- reassignments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
async def test_a_reassignment_is_complete_when_it_is_answered(database_url: str, version: int) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (1, 2), (1, 2))
        none = (ErrorCode.NONE, None)
        assert await reassign(nodes[0], "named", (1, (3, 2)), (0, (2, 1)), version=version) == [none, none]
        listed = await nodes[1].ask(
            ApiKey.LIST_PARTITION_REASSIGNMENTS, ListPartitionReassignmentsRequest(topics=None), 0
        )
        assert (listed.error_code, listed.topics) == (ErrorCode.NONE, ())
        for node in nodes:
            # If the leader is alive it continues. Otherwise the first live replica is elected.
            assert await shown(node, "named") == [(1, (2, 1), (2, 1), ()), (3, (3, 2), (3, 2), ())]


async def test_a_partition_that_was_placed_keeps_its_leader_too(database_url: str) -> None:
    async with three(database_url) as nodes:
        await nodes[0].create("placed", 1)
        ((leader, _, _, _),) = await shown(nodes[0], "placed")
        other = leader % 3 + 1
        assert await reassign(nodes[0], "placed", (0, (other, leader))) == [(ErrorCode.NONE, None)]
        assert await shown(nodes[1], "placed") == [(leader, (other, leader), (other, leader), ())]


async def test_invalid_reassignment_is_refused(database_url: str) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (1, 2))
        before = await shown(nodes[0], "named")
        assignment = ErrorCode.INVALID_REPLICA_ASSIGNMENT
        includes = "The manual partition assignment includes"
        targets: list[tuple[int, tuple[int, ...] | None]] = [(0, ()), (0, (1, 1)), (0, (1, 7)), (1, (1,)), (0, None)]
        assert await reassign(nodes[0], "named", *targets) == [
            (assignment, f"{includes} an empty replica list."),
            (assignment, f"{includes} the broker 1 more than once."),
            (assignment, f"{includes} broker 7, but no such broker is registered."),
            (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find the partition."),
            (ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No partition reassignment is in progress."),
        ]
        assert await reassign(nodes[0], "missing", (0, (1,))) == [
            (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find the topic.")
        ]
        factor = (ErrorCode.INVALID_REPLICATION_FACTOR, "The replication factor is changed from 2 to 3")
        assert await reassign(nodes[0], "named", (0, (1, 2, 3)), may_change=False) == [factor]
        assert await shown(nodes[0], "named") == before
        assert await reassign(nodes[0], "named", (0, (1, 2, 3))) == [(ErrorCode.NONE, None)]
        assert await reassign(nodes[0], "named", (0, (3, 2, 1)), may_change=False) == [(ErrorCode.NONE, None)]


async def test_registered_node_that_is_not_alive_may_be_a_replica(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await assigned(one, "named", (1, 2))
        await gone(three_, one, two)
        assert await reassign(one, "named", (0, (3, 2))) == [(ErrorCode.NONE, None)]
        assert await shown(two, "named") == [(2, (3, 2), (2,), (3,))]


async def test_empty_reassignment_changes_nothing(database_url: str) -> None:
    async with three(database_url) as nodes:
        answer = await nodes[0].ask(ApiKey.ALTER_PARTITION_REASSIGNMENTS, AlterPartitionReassignmentsRequest(), 1)
        assert (answer.error_code, answer.responses) == (ErrorCode.NONE, ())
        assert await elect(nodes[0], {}) == {}


# --- elections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_the_preferred_replica_is_elected(database_url: str, version: int) -> None:
    async with three(database_url) as nodes:
        await assigned(nodes[0], "named", (1, 2), (1, 2))
        await reassign(nodes[0], "named", (0, (2, 1)), (1, (3, 1)))
        assert [each[0] for each in await shown(nodes[2], "named")] == [1, 1]
        none = (ErrorCode.NONE, None)
        assert await elect(nodes[1], {"named": (0,)}, version=version) == {"named": {0: none}}
        for node in nodes:
            assert [each[0] for each in await shown(node, "named")] == [2, 1]
        assert await elect(nodes[1], {"named": (0, 1)}, version=version) == {"named": {0: NOT_NEEDED, 1: none}}
        assert [each[0] for each in await shown(nodes[2], "named")] == [2, 3]


async def test_election_of_all_lists_the_changed_partitions(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await assigned(one, "moved", (1, 2), (1, 2), (1, 2))
        await assigned(one, "still", (2, 1))
        await one.create("placed", 3)
        await reassign(one, "moved", (0, (2, 1)), (2, (3, 1)))
        await gone(three_, one, two)
        unavailable = (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        assert await elect(two, None) == {"moved": {0: (ErrorCode.NONE, None), 2: unavailable}}
        assert await elect(one, None) == {"moved": {2: unavailable}}
        await back(three_, one, two)
        assert await elect(one, None) == {"moved": {2: (ErrorCode.NONE, None)}}
        assert await elect(one, None) == {}


async def test_invalid_election_is_refused(database_url: str) -> None:
    async with three(database_url) as (one, two, three_):
        await assigned(one, "named", (1, 2), (3, 1))
        await reassign(one, "named", (1, (3,)))
        await one.create("placed", 1)
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        for election in (PREFERRED, UNCLEAN):
            assert await elect(one, {"named": (0, 1, 2, -1), "missing": (0,), "placed": (0,)}, election) == {
                "named": {
                    0: NOT_NEEDED,
                    1: NOT_NEEDED,
                    2: (unknown, "No such partition."),
                    -1: (unknown, "No such partition."),
                },
                "missing": {0: (unknown, "No such topic as missing")},
                "placed": {0: NOT_NEEDED},
            }
        await gone(three_, one, two)
        unavailable = (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        assert await elect(one, {"named": (1,)}) == {"named": {1: unavailable}}
        nobody = (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "Eligible topic partition leaders are not available.")
        assert await elect(one, {"named": (0, 1)}, UNCLEAN) == {"named": {0: NOT_NEEDED, 1: nobody}}
        with pytest.raises(KafkaError, match="Unknown election type 2") as refused:
            await elect(one, {"named": (0,)}, 2)
        assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_election_keeps_a_concurrent_reassignment(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(database_url) as (one, two, three_):
        await assigned(one, "named", (1, 2))
        await reassign(one, "named", (0, (2, 1)))
        write = one.topics.assign

        async def later(assignments: Mapping[tuple[UUID, int], Assignment]) -> list[Topic]:
            assert await reassign(two, "named", (0, (3, 2))) == [(ErrorCode.NONE, None)]
            return await write(assignments)

        monkeypatch.setattr(one.topics, "assign", later)
        assert await elect(one, {"named": (0,)}) == {"named": {0: (ErrorCode.NONE, None)}}
        for node in (one, two, three_):
            assert await shown(node, "named") == [(3, (3, 2), (3, 2), ())]


async def test_election_written_before_an_outage_counts(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(database_url) as (one, two, _):
        await assigned(one, "named", *[(1, 2)] * 5)
        monkeypatch.setattr(module, "ASSIGNED_AT_ONCE", 2)
        write, calls, failing = one.topics.assign, 0, 2

        async def breaking(assignments: Mapping[tuple[UUID, int], Assignment]) -> list[Topic]:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise StorageUnavailable("away")
            return await write(assignments)

        monkeypatch.setattr(one.topics, "assign", breaking)
        done, late = (ErrorCode.NONE, None), (ErrorCode.REQUEST_TIMED_OUT, None)
        unknown = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find the partition.")
        targets: list[tuple[int, tuple[int, ...] | None]] = [(at, (2, 1)) for at in (0, 9, 1, 2, 3, 4)]
        assert await reassign(one, "named", *targets) == [done, unknown, done, late, late, late]
        assert [each[1] for each in await shown(two, "named")] == [(2, 1)] * 2 + [(1, 2)] * 3
        calls = 0
        await reassign(two, "named", *((at, (2, 1)) for at in (2, 3, 4)))
        assert await elect(one, None) == {"named": {0: done, 1: done, 2: late, 3: late, 4: late}}
        assert [each[0] for each in await shown(two, "named")] == [2, 2, 1, 1, 1]
        calls, failing = 0, 1
        with pytest.raises(StorageUnavailable):
            await elect(one, None)


async def test_leader_owns_its_partitions(database_url: str) -> None:
    """A node's state that depends on leadership, for example share groups, learns of elections."""
    async with three(database_url) as nodes:
        for node in nodes:
            node.catalog.place_by(lambda node=node: node.membership.leads)
        await assigned(nodes[0], "named", (1, 2))
        await reassign(nodes[0], "named", (0, (2, 1)))

        async def owned() -> list[int]:
            for node in nodes:
                await node.catalog.refresh_if_changed()
                await node.catalog.settle()
            return [node.catalog.owned for node in nodes]

        assert await owned() == [1, 0, 0]
        before = [node.catalog.assigned for node in nodes]
        await elect(nodes[0], None)
        assert await owned() == [0, 1, 0]
        assert all(node.catalog.assigned is not was for node, was in zip(nodes, before, strict=True))
        await nodes[0].create("placed")
        before = [node.catalog.assigned for node in nodes]
        await owned()
        assert [node.catalog.assigned for node in nodes] == before


@pytest.mark.parametrize("version", [0, 1])
async def test_oldest_metadata_versions_list_no_absent_replica(database_url: str, version: int) -> None:
    """Upstream does the same, because the oldest clients cannot use a broker id without an address."""
    async with three(database_url) as (one, two, three_):
        await assigned(one, "named", (1, 3))
        await gone(three_, one, two)
        request = MetadataRequest(topics=(MetadataRequestTopic(name="named"),))
        (part,) = (await two.ask(ApiKey.METADATA, request, version)).topics[0].partitions
        if version == 0:
            assert (part.error_code, part.leader_id) == (ErrorCode.REPLICA_NOT_AVAILABLE, 1)
            assert (part.replica_nodes, part.isr_nodes) == ((1,), (1,))
        else:
            assert (part.error_code, part.leader_id) == (ErrorCode.NONE, 1)
            assert (part.replica_nodes, part.isr_nodes) == ((1, 3), (1,))
        await gone(one, two)
        (part,) = (await two.ask(ApiKey.METADATA, request, version)).topics[0].partitions
        assert (part.error_code, part.leader_id) == (
            ErrorCode.REPLICA_NOT_AVAILABLE if version == 0 else ErrorCode.NONE,
            2,
        ), "another node leads"


async def test_a_replication_factor_above_the_number_of_nodes_is_accepted(database_url: str) -> None:
    async with three(database_url) as (one, *_):
        topic = CreatableTopic(name="orders", num_partitions=1, replication_factor=9)
        (result,) = (await one.ask(ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=(topic,)), 7)).topics
        assert (result.error_code, result.replication_factor) == (ErrorCode.NONE, 9)
        ((_, replicas, in_sync, offline),) = await shown(one, "orders")
        assert (len(replicas), in_sync, offline) == (3, replicas, ())
