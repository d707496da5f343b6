"""The view of a group of any type that `sluice groups` shows: its state, its members and their assignments.

The one idea: DescribeGroups knows only classic groups, and each other type has an API of its own. The first API that
knows the group determines its type. An API that the broker does not serve is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway.commands.client import Cluster, refuse
from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.commands.render import Row, ranges
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from protocol.api_keys import ApiKey
from protocol.consumer import decode_assignment
from protocol.errors import ErrorCode, ProtocolError

MAX_MEMBERS_ASKED = 500
"""Maximal number of members of a classic group for which OffsetFetch is sent, one request per member."""
_OFFSET_FETCH_NAMES_MEMBERS = 9


class _Described(Protocol):
    """A group in a response."""

    @property
    def error_code(self) -> int: ...


G = TypeVar("G", bound=_Described)
G_co = TypeVar("G_co", bound=_Described, covariant=True)


class _Groups(Protocol[G_co]):
    """A response about groups."""

    @property
    def groups(self) -> Sequence[G_co]: ...


class _Member(Protocol):
    """A member in a response."""

    @property
    def member_id(self) -> str: ...
    @property
    def client_id(self) -> str: ...
    @property
    def client_host(self) -> str: ...


Held = Mapping[str, Iterable[int]]
"""Maps a topic, or a subtopology, to its partitions."""


@dataclass(slots=True)
class GroupView:
    group_id: str
    type: str
    state: str
    protocol_type: str
    assignor: str = ""
    members: list[Row] = field(default_factory=list[Row])
    owners: dict[TopicPartition, str] = field(default_factory=dict[TopicPartition, str])
    """Owners by partition; empty for a share group, in which several members read one partition."""
    pending: set[TopicPartition] = field(default_factory=set[TopicPartition])
    """Partitions that their new owners may not read yet, because the previous owners have not finished with them."""

    def add(self, member: _Member, assigned: list[str], reads: Held, instance: str | None = None) -> None:
        self.members.append(
            {
                "member": member.member_id,
                "instance": instance,
                "client": member.client_id,
                "host": member.client_host.removeprefix("/"),
                "assigned": assigned,
            }
        )
        self.owners |= {(name, index): member.member_id for name, indexes in reads.items() for index in indexes}


def view(cluster: Cluster, group_id: str) -> GroupView:
    """Return the view of a group. Raise CommandError if no such group exists."""
    for look in (_classic, _consumer, _streams, _share):
        found = look(cluster, group_id)
        if found is not None:
            found.members.sort(key=lambda row: str(row["member"]))
            return found
    raise CommandError(no_group(group_id, (str(row["group"]) for row in listed_groups(cluster))))


def listed_groups(cluster: Cluster) -> list[Row]:
    """Return each group once. A group may move between two brokers while the command asks one after the other."""
    from protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse

    found: dict[str, Row] = {}
    for node_id in cluster.node_ids:
        response = cluster.ask(ListGroupsResponse, ListGroupsRequest(), node_id=node_id)
        refuse(response.error_code, f"broker {node_id} lists no groups")
        for group in response.groups:
            row = {
                "group": group.group_id,
                "type": group.group_type.lower() or "classic",
                "state": group.group_state,
                "protocol_type": group.protocol_type,
                "broker": node_id,
            }
            found.setdefault(group.group_id, row)
    return [found[group_id] for group_id in sorted(found)]


def no_group(group_id: str, known: Iterable[str]) -> str:
    """Return the error for a missing group, with the names that resemble the given one."""
    return f"there is no group {group_id}{did_you_mean(group_id, known, SUGGESTIONS)}"


def _asked(
    cluster: Cluster, response_type: type[_Groups[G]], api_key: ApiKey, group_id: str, request: object
) -> G | None:
    """Return the group as its coordinator describes it, or None if it has another type than the API."""
    if not cluster.serves(api_key):
        return None
    group = cluster.ask_coordinator(response_type, group_id, request, _code).groups[0]
    if group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
        return None
    refuse(group.error_code, f"group {group_id}", needs=f"--operation describe --group {group_id}")
    return group


def _code(response: _Groups[_Described]) -> int:
    return response.groups[0].error_code


def _classic(cluster: Cluster, group_id: str) -> GroupView | None:
    from protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse

    request = DescribeGroupsRequest(groups=(group_id,))
    group = _asked(cluster, DescribeGroupsResponse, ApiKey.DESCRIBE_GROUPS, group_id, request)
    if group is None or group.group_state == "Dead":
        return None
    found = GroupView(group_id, "classic", group.group_state, group.protocol_type, group.protocol_data)
    for member in group.members:
        try:
            given = member.member_assignment
            topics = decode_assignment(given, bounded=False).assigned_partitions if given else ()
        except ProtocolError:  # the metadata of another protocol type is readable only for its own clients
            topics = ()
        reads = dict(topics)
        found.add(member, _told(reads), reads, member.group_instance_id)
        if len(found.members) <= MAX_MEMBERS_ASKED:
            found.pending |= _pending(cluster, group_id, member.member_id, reads)
    return found


def _pending(cluster: Cluster, group_id: str, member_id: str, reads: Held) -> set[TopicPartition]:
    """Return the partitions of a classic member whose offsets OffsetFetch reports as unstable."""
    from protocol.messages.offset_fetch import (
        OffsetFetchRequest,
        OffsetFetchRequestGroup,
        OffsetFetchRequestTopics,
        OffsetFetchResponse,
    )

    topics = tuple(
        OffsetFetchRequestTopics(name=name, partition_indexes=tuple(indexes)) for name, indexes in reads.items()
    )
    if not topics or not cluster.serves(ApiKey.OFFSET_FETCH, _OFFSET_FETCH_NAMES_MEMBERS):
        return set()
    asked = OffsetFetchRequestGroup(group_id=group_id, member_id=member_id, member_epoch=-1, topics=topics)
    request = OffsetFetchRequest(groups=(asked,), require_stable=True)
    response = cluster.ask_coordinator(
        OffsetFetchResponse, group_id, request, _code, at_most=_OFFSET_FETCH_NAMES_MEMBERS
    )
    group = response.groups[0]
    refuse(group.error_code, f"offsets of group {group_id}", needs=f"--operation describe --group {group_id}")
    return {
        (topic.name, part.partition_index)
        for topic in group.topics
        for part in topic.partitions
        if part.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    }


def _consumer(cluster: Cluster, group_id: str) -> GroupView | None:
    from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse

    request = ConsumerGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False)
    group = _asked(cluster, ConsumerGroupDescribeResponse, ApiKey.CONSUMER_GROUP_DESCRIBE, group_id, request)
    if group is None:
        return None
    found = GroupView(group_id, "consumer", group.group_state, "consumer", group.assignor_name)
    for member in group.members:
        reads = {each.topic_name: each.partitions for each in member.assignment.topic_partitions}
        found.add(member, _told(reads), reads, member.instance_id)
        for each in member.target_assignment.topic_partitions:
            awaited = set(each.partitions) - set(reads.get(each.topic_name, ()))
            found.pending |= {(each.topic_name, index) for index in awaited}
    return found


def _streams(cluster: Cluster, group_id: str) -> GroupView | None:
    from protocol.messages.streams_group_describe import StreamsGroupDescribeRequest, StreamsGroupDescribeResponse

    request = StreamsGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False)
    group = _asked(cluster, StreamsGroupDescribeResponse, ApiKey.STREAMS_GROUP_DESCRIBE, group_id, request)
    if group is None:
        return None
    found = GroupView(group_id, "streams", group.group_state, "streams")
    topology = group.topology.subtopologies or () if group.topology is not None else ()
    sources = {
        each.subtopology_id: (*each.source_topics, *(topic.name for topic in each.repartition_source_topics))
        for each in topology
    }
    for member in group.members:
        tasks = {each.subtopology_id: each.partitions for each in member.assignment.active_tasks}
        standby = {each.subtopology_id: each.partitions for each in member.assignment.standby_tasks}
        reads = {name: indexes for task, indexes in tasks.items() for name in sources.get(task, ())}
        told = [*_told(tasks), *(f"standby {each}" for each in _told(standby))]
        found.add(member, told, reads, member.instance_id)
    return found


def _share(cluster: Cluster, group_id: str) -> GroupView | None:
    from protocol.messages.share_group_describe import ShareGroupDescribeRequest, ShareGroupDescribeResponse

    request = ShareGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False)
    group = _asked(cluster, ShareGroupDescribeResponse, ApiKey.SHARE_GROUP_DESCRIBE, group_id, request)
    if group is None:
        return None
    found = GroupView(group_id, "share", group.group_state, "share", group.assignor_name)
    for member in group.members:
        held = {each.topic_name: each.partitions for each in member.assignment.topic_partitions}
        found.add(member, _told(held), {})
    return found


def _told(held: Held) -> list[str]:
    return [f"{name}[{ranges(tuple(indexes))}]" for name, indexes in held.items()]


def share_starts(cluster: Cluster, group_id: str) -> dict[TopicPartition, tuple[int, int]]:
    """Return a share group's start offset and its lag, by partition: the lag counts the unsettled records from the
    start on. Return nothing for a group of another type."""
    from protocol.messages.describe_share_group_offsets import (
        DescribeShareGroupOffsetsRequest,
        DescribeShareGroupOffsetsRequestGroup,
        DescribeShareGroupOffsetsResponse,
    )

    if not cluster.serves(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS):
        return {}
    asked = DescribeShareGroupOffsetsRequestGroup(group_id=group_id, topics=None)
    request = DescribeShareGroupOffsetsRequest(groups=(asked,))
    group = cluster.ask_coordinator(DescribeShareGroupOffsetsResponse, group_id, request, _code).groups[0]
    if group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
        return {}
    refuse(group.error_code, f"offsets of group {group_id}", needs=f"--operation describe --group {group_id}")
    return {
        (topic.topic_name, part.partition_index): (part.start_offset, part.lag)
        for topic in group.topics
        for part in topic.partitions
        if not part.error_code and part.start_offset >= 0
    }
