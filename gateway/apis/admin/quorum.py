"""DescribeQuorum, AddRaftVoter, RemoveRaftVoter: the metadata log, its leader, its voters and its observers.

The one idea: the metadata log is the catalog in Postgres, and an offset of it is a revision. Nodes that run jobs for
all are its voters, and the other live nodes observe. A node's log ends at the revision of its catalog when it last
renewed its registration. Postgres holds the log and appoints the leader: the node with the lease of the job that
removes deleted topics. The lease's epoch rises with every change of owner, as a leader's does.

Voters are the live controllers (`process.roles`), or the brokers if no controller is alive. So no request can add or
remove one: they are refused as by a cluster of `kraft.version` 0. Answers are those of KafkaRaftClient, AddVoterHandler
and RemoveVoterHandler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol
from uuid import NAMESPACE_OID, uuid5

from gateway.apis.services import HasClusterId, HasMembership, HasSettings
from gateway.cluster.jobs import Job
from gateway.config.listeners import render_listeners
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_raft_voter import AddRaftVoterRequest, AddRaftVoterResponse
from protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    PartitionData,
    ReplicaState,
    TopicData,
)
from protocol.messages.remove_raft_voter import RemoveRaftVoterRequest, RemoveRaftVoterResponse
from protocol.schema import ZERO_UUID
from storage.types import Follower, LeaseKind, MetadataLog
from storage.types import Node as Member

METADATA_TOPIC, METADATA_PARTITION = "__cluster_metadata", 0
LEADS = Job.DELETION
"""The job whose lease makes a node the leader."""
UNKNOWN = -1
MAX_EPOCH = 2**31 - 1
NO_QUORUM = "This server does not host this topic-partition."
NO_LEADER = "No node has the lease of the metadata log at this moment."


# --- DescribeQuorum -------------------------------------------------------------------------------------------------


class QuorumServices(HasClusterId, HasMembership, HasSettings, Protocol): ...


async def describe_quorum(
    request: DescribeQuorumRequest, context: RequestContext[QuorumServices]
) -> DescribeQuorumResponse:
    """Describe the metadata log's one partition. Other requested partitions do not exist."""
    asked = [(topic.topic_name, [part.partition_index for part in topic.partitions]) for topic in request.topics[:2]]
    if asked != [(METADATA_TOPIC, [METADATA_PARTITION])]:
        return await _unknown(request)
    log = await context.services.membership.metadata_log(LeaseKind.JOBS, LEADS)
    controllers = any(each.node.roles.is_controller for each in log.followers)
    # A node with the lease is the leader until it has handed the lease over.
    voters = [
        each
        for each in log.followers
        if each.node.roles.is_controller or each.lease_epoch is not None or not controllers
    ]
    leader = next((each for each in voters if each.lease_epoch is not None), None)
    if leader is None or leader.lease_epoch is None:
        return _answer(_failed(METADATA_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER, NO_LEADER))
    # Each of them follows the log in Postgres. Voters of `kraft.version` 0 have no directory.
    directory = uuid5(NAMESPACE_OID, context.services.cluster_id)
    described = PartitionData(
        partition_index=METADATA_PARTITION,
        leader_id=leader.node.node_id,
        leader_epoch=min(leader.lease_epoch, MAX_EPOCH),
        high_watermark=log.revision,
        current_voters=tuple(_state(each, log, leads=each is leader) for each in voters),
        observers=tuple(
            replace(_state(each, log, leads=False), replica_directory_id=directory)
            for each in log.followers
            if each not in voters
        ),
    )
    return _answer(described, tuple(_node(each.node) for each in voters))


async def _unknown(request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    topics: list[TopicData] = []
    async for topic in in_pieces(request.topics):
        partitions = [
            _failed(part.partition_index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, NO_QUORUM)
            async for part in in_pieces(topic.partitions)
        ]
        topics.append(TopicData(topic_name=topic.topic_name, partitions=tuple(partitions)))
    return DescribeQuorumResponse(topics=tuple(topics))


def _failed(partition: int, code: ErrorCode, message: str) -> PartitionData:
    return PartitionData(
        partition_index=partition,
        error_code=code,
        error_message=message,
        leader_id=UNKNOWN,
        leader_epoch=UNKNOWN,
        high_watermark=UNKNOWN,
    )


def _answer(partition: PartitionData, nodes: tuple[Node, ...] = ()) -> DescribeQuorumResponse:
    return DescribeQuorumResponse(topics=(TopicData(topic_name=METADATA_TOPIC, partitions=(partition,)),), nodes=nodes)


def _state(follower: Follower, log: MetadataLog, *, leads: bool) -> ReplicaState:
    """Describe a follower. The leader's log is the one in Postgres. When a lagging node was last caught up is
    unknown."""
    node_id, revision = follower.node.node_id, follower.revision
    if leads:
        return ReplicaState(
            replica_id=node_id,
            log_end_offset=log.revision,
            last_fetch_timestamp=log.read_ms,
            last_caught_up_timestamp=log.read_ms,
        )
    caught_up = revision is not None and revision >= log.revision
    return ReplicaState(
        replica_id=node_id,
        log_end_offset=UNKNOWN if revision is None else min(revision, log.revision),
        last_fetch_timestamp=follower.heard_ms,
        last_caught_up_timestamp=follower.heard_ms if caught_up else UNKNOWN,
    )


def _node(node: Member) -> Node:
    """Return the node with its address as a controller."""
    return Node(
        node_id=node.node_id,
        listeners=tuple(
            Listener(name=name, host=node.listeners[name][0], port=node.listeners[name][1])
            for name in node.roles.controller_listeners
            if name in node.listeners
        ),
    )


# --- AddRaftVoter, RemoveRaftVoter ----------------------------------------------------------------------------------


async def add_raft_voter(request: AddRaftVoterRequest, context: RequestContext[QuorumServices]) -> AddRaftVoterResponse:
    """Refuse the request for the first of upstream's reasons that applies."""
    services = context.services
    _require_cluster(request.cluster_id, services)
    if request.voter_id < 0 or request.voter_directory_id == ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Add voter request didn't include a valid voter")
    named = {listener.name.upper(): (listener.host, listener.port) for listener in request.listeners}
    default = next((each.name for each in services.settings.listeners if each.is_controller), None)
    if default is not None and default not in named:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Add voter request didn't include the endpoint ({render_listeners(named)}) for the default listener"
            f" {default}",
        )
    raise KafkaError(
        ErrorCode.UNSUPPORTED_VERSION, "Cluster doesn't support adding voter because the kraft.version feature is 0"
    )


async def remove_raft_voter(
    request: RemoveRaftVoterRequest, context: RequestContext[HasClusterId]
) -> RemoveRaftVoterResponse:
    """Refuse the request in the same way as AddRaftVoter."""
    _require_cluster(request.cluster_id, context.services)
    if request.voter_id < 0 or request.voter_directory_id == ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Remove voter request didn't include a valid voter")
    raise KafkaError(
        ErrorCode.UNSUPPORTED_VERSION, "Cluster doesn't support removing voter because the kraft.version feature is 0"
    )


def _require_cluster(cluster_id: str | None, services: HasClusterId) -> None:
    if cluster_id is not None and cluster_id != services.cluster_id:
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f'The given id "{cluster_id}" doesn\'t match the cluster id "{services.cluster_id}"',
        )
