"""The permissions that each API demands: one table, and the stage that checks them for whole requests.

The one idea: an API that is missing from the table is refused to every client. Demands on the whole request are checked
here, before the handler. Demands on each topic, group or setting are checked by the handler (`Each`), which serves the
others. Mirrors KafkaApis, ControllerApis and AuthHelper of 4.4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Never, TypeVar, cast

from gateway.apis.groups.find_coordinator import FIRST_VERSION_WITH_SHARE, SHARE
from gateway.apis.transactions.lifecycle import FIRST_VERSION_OF_BROKERS
from gateway.net.context import RequestContext, Role
from gateway.net.pieces import in_pieces
from gateway.security.authorizer import HasAuthorizer, may, refusal_of, require
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest

_TOPIC, _GROUP, _CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
_TRANSACTION = ResourceType.TRANSACTIONAL_ID
_Op = AclOperation

Ask = Callable[[Never, RequestContext[HasAuthorizer]], Awaitable[None]]
"""A check of the whole request, of the type that the API has. It raises KafkaError."""

RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True)
class Each:
    """A demand that a handler checks for each resource: before it acts on a named resource, or before it shows one."""

    operation: AclOperation
    kind: ResourceType


@dataclass(frozen=True, slots=True)
class Demand:
    """The ACLs that one API requires."""

    whole: tuple[Ask, ...] = ()
    each: tuple[Each, ...] = ()


def _cluster(*one_of: AclOperation) -> Ask:
    async def ask(_request: object, context: RequestContext[HasAuthorizer]) -> None:
        if not any(may(context, operation, _CLUSTER, told=False) for operation in one_of[:-1]):
            require(context, one_of[-1], _CLUSTER)

    return ask


def _named(operation: AclOperation, kind: ResourceType, field: str) -> Ask:
    """Demand the operation on the resource that the field names, if the request names one."""

    async def ask(request: object, context: RequestContext[HasAuthorizer]) -> None:
        name = getattr(request, field)
        if name is not None:
            require(context, operation, kind, name)

    return ask


def _describes(topics_of: Callable[[RequestT], Iterable[str]]) -> Ask:
    """Require Describe on all of these topics."""

    async def ask(request: RequestT, context: RequestContext[HasAuthorizer]) -> None:
        async for name in in_pieces(topics_of(request)):
            require(context, _Op.DESCRIBE, _TOPIC, name)

    return ask


def _subscribed(request: ConsumerGroupHeartbeatRequest | ShareGroupHeartbeatRequest) -> Iterable[str]:
    return request.subscribed_topic_names or ()


def of_topology(request: StreamsGroupHeartbeatRequest) -> Iterable[str]:
    """Yield the topics that the topology names; a topic named twice is yielded twice."""
    for each in () if request.topology is None else request.topology.subtopologies:
        yield from each.source_topics
        yield from each.repartition_sink_topics
        yield from (topic.name for topic in (*each.state_changelog_topics, *each.repartition_source_topics))


async def _produces(request: InitProducerIdRequest, context: RequestContext[HasAuthorizer]) -> None:
    """Permit an idempotent producer without transactions if its client may write to any topic (KIP-679)."""
    if request.transactional_id is not None:
        require(context, _Op.WRITE, _TRANSACTION, request.transactional_id)
        return
    authorizer = context.services.authorizer
    if authorizer is None or may(context, _Op.IDEMPOTENT_WRITE, _CLUSTER, told=False):
        return
    if not await authorizer.allows_one_of(context.connection, _Op.WRITE, _TOPIC):
        authorizer.refused(context, _Op.IDEMPOTENT_WRITE, _CLUSTER, "kafka-cluster")
        raise refusal_of(_CLUSTER)


async def _adds_partitions(request: AddPartitionsToTxnRequest, context: RequestContext[HasAuthorizer]) -> None:
    """Check the request of a client. Later versions come from brokers, which have already checked their clients."""
    if context.version >= FIRST_VERSION_OF_BROKERS:
        require(context, _Op.CLUSTER_ACTION, _CLUSTER)
    else:
        require(context, _Op.WRITE, _TRANSACTION, request.v3_and_below_transactional_id)


async def _describes_controllers(_request: object, context: RequestContext[HasAuthorizer]) -> None:
    """Every client may ask a broker which nodes exist; controllers are shown to administrators only."""
    if context.role is Role.CONTROLLER:
        require(context, _Op.ALTER, _CLUSTER)


async def _finds_coordinators(request: FindCoordinatorRequest, context: RequestContext[HasAuthorizer]) -> None:
    """Require ClusterAction for the coordinators of share partitions, because only brokers look for them. Earlier
    versions of the request cannot ask for these coordinators.
    """
    if request.key_type == SHARE and context.version >= FIRST_VERSION_WITH_SHARE:
        require(context, _Op.CLUSTER_ACTION, _CLUSTER)


_reads_group = _named(_Op.READ, _GROUP, "group_id")
_writes_transaction = _named(_Op.WRITE, _TRANSACTION, "transactional_id")
_describes_group, _describes_topic = Each(_Op.DESCRIBE, _GROUP), Each(_Op.DESCRIBE, _TOPIC)
_reads_topic, _writes_topic = Each(_Op.READ, _TOPIC), Each(_Op.WRITE, _TOPIC)
_group_described = Demand(each=(_describes_group, _describes_topic))
_alters_settings = Demand(each=tuple(Each(_Op.ALTER_CONFIGS, kind) for kind in (_TOPIC, _GROUP, _CLUSTER)))
_alters_cluster, _describes_cluster = Demand((_cluster(_Op.ALTER),)), Demand((_cluster(_Op.DESCRIBE),))
_member = Demand((_reads_group,))

DEMANDS: Mapping[ApiKey, Demand] = {
    ApiKey.PRODUCE: Demand((_writes_transaction,), (_writes_topic,)),
    ApiKey.FETCH: Demand(each=(_reads_topic, Each(_Op.CLUSTER_ACTION, _CLUSTER))),
    ApiKey.LIST_OFFSETS: Demand(each=(_describes_topic,)),
    ApiKey.METADATA: Demand(each=(_describes_topic, Each(_Op.CREATE, _TOPIC), Each(_Op.CREATE, _CLUSTER))),
    ApiKey.OFFSET_COMMIT: Demand((_reads_group,), (_reads_topic,)),
    ApiKey.OFFSET_FETCH: _group_described,
    ApiKey.FIND_COORDINATOR: Demand((_finds_coordinators,), (_describes_group, Each(_Op.DESCRIBE, _TRANSACTION))),
    ApiKey.JOIN_GROUP: _member,
    ApiKey.HEARTBEAT: _member,
    ApiKey.LEAVE_GROUP: _member,
    ApiKey.SYNC_GROUP: _member,
    ApiKey.DESCRIBE_GROUPS: Demand(each=(_describes_group,)),
    ApiKey.LIST_GROUPS: Demand(each=(Each(_Op.DESCRIBE, _CLUSTER), _describes_group)),
    ApiKey.CREATE_TOPICS: Demand(
        each=(Each(_Op.CREATE, _CLUSTER), Each(_Op.CREATE, _TOPIC), Each(_Op.DESCRIBE_CONFIGS, _TOPIC))
    ),
    ApiKey.DELETE_TOPICS: Demand(each=(Each(_Op.DELETE, _CLUSTER), Each(_Op.DELETE, _TOPIC), _describes_topic)),
    ApiKey.DELETE_RECORDS: Demand(each=(Each(_Op.DELETE, _TOPIC),)),
    ApiKey.INIT_PRODUCER_ID: Demand((_produces,)),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: Demand(each=(Each(_Op.CLUSTER_ACTION, _CLUSTER), _describes_topic)),
    ApiKey.ADD_PARTITIONS_TO_TXN: Demand((_adds_partitions,), (_writes_topic,)),
    ApiKey.ADD_OFFSETS_TO_TXN: Demand((_writes_transaction, _reads_group)),
    ApiKey.END_TXN: Demand((_writes_transaction,)),
    ApiKey.WRITE_TXN_MARKERS: Demand((_cluster(_Op.ALTER, _Op.CLUSTER_ACTION),)),
    ApiKey.TXN_OFFSET_COMMIT: Demand((_writes_transaction, _reads_group), (_reads_topic,)),
    ApiKey.DESCRIBE_ACLS: _describes_cluster,
    ApiKey.CREATE_ACLS: _alters_cluster,
    ApiKey.DELETE_ACLS: _alters_cluster,
    ApiKey.DESCRIBE_CONFIGS: Demand(
        each=tuple(Each(_Op.DESCRIBE_CONFIGS, kind) for kind in (_TOPIC, _GROUP, _CLUSTER))
    ),
    ApiKey.ALTER_CONFIGS: _alters_settings,
    ApiKey.ALTER_REPLICA_LOG_DIRS: _alters_cluster,
    ApiKey.DESCRIBE_LOG_DIRS: _describes_cluster,
    ApiKey.CREATE_PARTITIONS: Demand(each=(Each(_Op.ALTER, _TOPIC),)),
    ApiKey.CREATE_DELEGATION_TOKEN: Demand(each=(Each(_Op.CREATE_TOKENS, ResourceType.USER),)),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: Demand(
        each=(Each(_Op.DESCRIBE, ResourceType.DELEGATION_TOKEN), Each(_Op.DESCRIBE_TOKENS, ResourceType.USER))
    ),
    ApiKey.DELETE_GROUPS: Demand(each=(Each(_Op.DELETE, _GROUP),)),
    ApiKey.ELECT_LEADERS: _alters_cluster,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _alters_settings,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _alters_cluster,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: _describes_cluster,
    ApiKey.OFFSET_DELETE: Demand((_named(_Op.DELETE, _GROUP, "group_id"),), (_reads_topic,)),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: Demand((_cluster(_Op.DESCRIBE_CONFIGS),)),
    ApiKey.ALTER_CLIENT_QUOTAS: Demand((_cluster(_Op.ALTER_CONFIGS),)),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: _describes_cluster,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _alters_cluster,
    ApiKey.DESCRIBE_QUORUM: _describes_cluster,
    ApiKey.UPDATE_FEATURES: _alters_cluster,
    ApiKey.DESCRIBE_CLUSTER: Demand((_describes_controllers,)),
    ApiKey.DESCRIBE_PRODUCERS: Demand(each=(_reads_topic,)),
    ApiKey.UNREGISTER_BROKER: _alters_cluster,
    ApiKey.UNREGISTER_CONTROLLER: _alters_cluster,
    ApiKey.DESCRIBE_TRANSACTIONS: Demand(each=(Each(_Op.DESCRIBE, _TRANSACTION), _describes_topic)),
    ApiKey.LIST_TRANSACTIONS: Demand(each=(Each(_Op.DESCRIBE, _TRANSACTION),)),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: Demand((_reads_group, _describes(_subscribed))),
    ApiKey.CONSUMER_GROUP_DESCRIBE: _group_described,
    ApiKey.LIST_CONFIG_RESOURCES: Demand((_cluster(_Op.DESCRIBE_CONFIGS),)),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: Demand(each=(_describes_topic,)),
    ApiKey.SHARE_GROUP_HEARTBEAT: Demand((_reads_group, _describes(_subscribed))),
    ApiKey.SHARE_GROUP_DESCRIBE: _group_described,
    ApiKey.SHARE_FETCH: Demand((_reads_group,), (_reads_topic,)),
    ApiKey.SHARE_ACKNOWLEDGE: Demand((_reads_group,), (_reads_topic,)),
    ApiKey.ADD_RAFT_VOTER: _alters_cluster,
    ApiKey.REMOVE_RAFT_VOTER: _alters_cluster,
    ApiKey.STREAMS_GROUP_HEARTBEAT: Demand(
        (_reads_group, _describes(of_topology)), (Each(_Op.CREATE, _CLUSTER), Each(_Op.CREATE, _TOPIC))
    ),
    ApiKey.STREAMS_GROUP_DESCRIBE: _group_described,
    ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE: _member,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: _group_described,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: Demand((_reads_group,), (_reads_topic,)),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: Demand((_named(_Op.DELETE, _GROUP, "group_id"),), (_reads_topic,)),
}

FREE = frozenset(
    {
        *(ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE),
        *(ApiKey.RENEW_DELEGATION_TOKEN, ApiKey.EXPIRE_DELEGATION_TOKEN),
    }
)
"""APIs that are served to every client.

DescribeCluster of a broker is one of them, because it shows only which nodes exist; `authorized_operations.py` checks
the permitted operations that it may list. Delegation tokens belong to their owners and renewers.
"""


async def authorize(request: object, context: RequestContext[HasAuthorizer]) -> None:
    """Authorize a request, as a stage of dispatch. Raise KafkaError if the whole request is refused."""
    demand = DEMANDS.get(context.api_key)
    if demand is None:
        if context.api_key not in FREE:
            raise refusal_of(_CLUSTER)
        return
    for ask in demand.whole:
        await cast("Callable[[object, RequestContext[HasAuthorizer]], Awaitable[None]]", ask)(request, context)
