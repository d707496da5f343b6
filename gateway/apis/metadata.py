"""Metadata, DescribeTopicPartitions, DescribeCluster: live nodes, and the leaders and replicas of partitions.

The one idea: leaders and replicas say where clients go, not where records lie. Each node could serve any partition. If
an administrator has named a partition's nodes, they are its replicas, and the live ones are in sync, because all see
the same log. Other partitions are spread over the live nodes, with as many replicas as the topic's replication factor.

Known topics are answered from memory, so clients keep their routes while Postgres is unavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

import structlog

from gateway.apis.admin.new_topics import STRICT_FROM_THE_FIRST, make_topics, may_create_topic, plan_automatic
from gateway.apis.metadata_cache import MIN_PARTITIONS, HasDescribedTopics
from gateway.apis.services import (
    ChangesCatalog,
    FindsTopics,
    HasCatalog,
    HasClusterId,
    HasMembership,
    HasThrottles,
)
from gateway.cluster.placement import NO_LEADER, Leaders
from gateway.config.topic import requested_replication_factor
from gateway.log.topic_names import why_illegal
from gateway.net.context import SHARED_NODE, RequestContext, Role
from gateway.net.pieces import PIECE, first_of_each, in_pieces, mapped
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorized_operations import CLUSTER, Resource, authorized_operations
from gateway.security.authorizer import HasAuthorizer, may_topic
from gateway.security.kinds import AclOperation
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.describe_cluster import DescribeClusterBroker, DescribeClusterRequest, DescribeClusterResponse
from protocol.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from protocol.schema import ZERO_UUID
from storage.errors import StorageError
from storage.types import NewTopic, Partition, Topic

logger = structlog.get_logger(__name__)

MAX_CREATED = 100
"""Maximal number of topics that one Metadata request may create. For further topics it answers LEADER_NOT_AVAILABLE, so
the client tries again.
"""

MAX_PARTITIONS_PER_PAGE = 2000
"""Upstream's max.request.partition.size.limit."""

FIRST_VERSION_WITH_LISTENER_NOT_FOUND = 6

ENDPOINTS = {Role.BROKER: 1, Role.CONTROLLER: 2}
"""Upstream's EndpointType."""


class MetadataServices(
    ChangesCatalog, FindsTopics, HasClusterId, HasMembership, HasThrottles, HasDescribedTopics, Protocol
): ...


_ALL_NODES = Leaders((SHARED_NODE,))


def leaders_seen(context: RequestContext[HasMembership]) -> Leaders:
    """Return the leaders of partitions as the client sees them."""
    return context.services.membership.leaders if context.connection.shared is None else _ALL_NODES


class Placement:
    """Live nodes, leaders and replicas at one moment, so that an answer is consistent, as seen through one listener.
    A node without that listener cannot be reached by the client and is not named as a broker."""

    def __init__(self, context: RequestContext[HasMembership]) -> None:
        listener, membership = context.connection.listener, context.services.membership
        alive = membership.brokers() if context.role is Role.BROKER else membership.controllers()
        self._is_shared = context.connection.shared is not None
        if self._is_shared:
            alive = [node for each in alive[:1] if (node := context.connection.seen(each)) is not None]
        self.brokers = [(node, *node.listeners[listener]) for node in alive if listener in node.listeners]
        """The nodes with host and port. At a controllers' listener these are the controllers."""
        self._reachable = {int(node.node_id) for node, _, _ in self.brokers}
        self._racks = {int(node.node_id): node.rack for node, _, _ in self.brokers}
        self._alive: tuple[int, ...] = membership.broker_ids
        self._replicas: dict[tuple[int, int], tuple[int, ...]] = {}
        self._leaders = leaders_seen(context)
        self.view = (listener, self._leaders, frozenset(self._reachable))
        """Placements with equal views give equal answers."""

    @property
    def controller_id(self) -> int:
        """Return the first reachable node, because any node answers what a controller would; −1 if no node is
        reachable."""
        return int(self.brokers[0][0].node_id) if self.brokers else -1

    def leader(self, partition: Partition) -> int:
        return self._leaders.leader(partition)

    def leader_error(self, leader: int, version: int) -> ErrorCode:
        """Return why `leader` cannot be named, in the codes of Metadata's versions (as KRaftMetadataCache)."""
        if leader in self._reachable:
            return ErrorCode.NONE
        if leader == NO_LEADER or version < FIRST_VERSION_WITH_LISTENER_NOT_FOUND:
            return ErrorCode.LEADER_NOT_AVAILABLE
        return ErrorCode.LISTENER_NOT_FOUND

    def offline(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `replicas` that are not alive, or not reachable through the listener."""
        return tuple(node for node in replicas if node not in self._reachable)

    def in_sync(self, partition: Partition, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the partition's `replicas` that are in sync."""
        return (
            replicas if partition.assignment is None or self._is_shared else self._leaders.in_sync(partition.assignment)
        )

    def replicas(self, partition: Partition, leader: int, factor: int) -> tuple[int, ...]:
        """Return the partition's replicas. If an administrator named some, these are returned in order. Otherwise
        return the leader and the live nodes after it by id, `factor` nodes in total if so many are alive.
        """
        if self._is_shared:
            return (SHARED_NODE,)
        if partition.assignment is not None:
            return partition.assignment.replicas
        found = self._replicas.get((leader, factor))
        if found is None:
            at = self._alive.index(leader) if leader in self._alive else 0
            found = (leader, *(node for node in self._alive[at:] + self._alive[:at] if node != leader))[:factor]
            self._replicas[leader, factor] = found
        return found

    def holds(self, node_id: int, partition: Partition, factor: int) -> bool:
        """Return whether the node is a replica of the partition, or leads it because no replica is alive. At a shared
        listener each node stands for all."""
        if self._is_shared:
            return True
        leader = self.leader(partition)
        return node_id == leader or node_id in self.replicas(partition, leader, factor)

    def nearest(self, rack: str, partition: Partition, factor: int) -> int:
        """Return the live replica in the rack to which the leader redirects a consumer (KIP-392), as
        RackAwareReplicaSelector: the greatest id, because all replicas are caught up. Return −1 if the leader itself
        is in the rack, or no replica is."""
        leader = self.leader(partition)
        near = [node for node in self.replicas(partition, leader, factor) if self._racks.get(node) == rack]
        return -1 if not near or self._racks.get(leader) == rack else max(near)


Endpoint = TypeVar("Endpoint")


class Led:
    """The leaders of partitions that this node refuses, sent with the refusal (KIP-951), and their addresses."""

    def __init__(self, context: RequestContext[HasMembership]) -> None:
        self._context = context
        self._named: set[int] = set()

    def of(self, partition: Partition) -> tuple[int, int]:
        """Return the partition's leader and leader epoch."""
        leader = leaders_seen(self._context).leader(partition)
        self._named.add(leader)
        return leader, partition.leader_epoch

    def endpoints(self, endpoint: Callable[..., Endpoint]) -> tuple[Endpoint, ...]:
        """Return the endpoints of the named leaders, in the shape that `endpoint` makes for each API."""
        if not self._named:
            return ()
        return tuple(
            endpoint(node_id=int(node.node_id), host=host, port=port, rack=node.rack)
            for node, host, port in Placement(self._context).brokers
            if node.node_id in self._named
        )


# --- Metadata -----------------------------------------------------------------------------------------------------


async def metadata(request: MetadataRequest, context: RequestContext[MetadataServices]) -> MetadataResponse:
    """Describe topics. Create missing ones if client and broker both allow it; a request for all topics never creates
    one.

    A created topic is in the next answer, as in Kafka. This answer says UNKNOWN_TOPIC_OR_PARTITION, and clients ask
    again (upstream: AutoTopicCreationManager).
    """
    services = context.services
    placement = Placement(context)
    with_operations = request.include_topic_authorized_operations
    found = await _find_topics(request, context)
    return MetadataResponse(
        brokers=tuple(
            MetadataResponseBroker(node_id=node.node_id, host=host, port=port, rack=node.rack)
            for node, host, port in placement.brokers
        ),
        cluster_id=services.cluster_id,
        controller_id=placement.controller_id,
        topics=await _describe_all(found, context, placement, with_operations),
        cluster_authorized_operations=authorized_operations(
            Resource.CLUSTER, CLUSTER, context, asked=request.include_cluster_authorized_operations
        ),
    )


async def _describe_all(
    found: Sequence[Topic | MetadataResponseTopic],
    context: RequestContext[MetadataServices],
    placement: Placement,
    with_operations: bool,
) -> tuple[MetadataResponseTopic, ...]:
    """Describe the topics. If there are many, use their cached bytes; if there are few, build values."""
    topics = [answer for answer in found if isinstance(answer, Topic)]
    if len(topics) < len(found) or sum(len(topic.partitions) for topic in topics) < MIN_PARTITIONS:
        return tuple(
            [
                _describe(answer, context, placement, with_operations) if isinstance(answer, Topic) else answer
                async for answer in in_pieces(found)
            ]
        )
    asker = None
    if with_operations and context.services.authorizer is not None:
        asker = (context.connection.principal, context.connection.client_host, context.services.authorizer.acls.number)
    view = (placement.view, with_operations, context.services.catalog.broker.default_replication_factor, asker)
    return await context.services.described_topics.encode(
        topics,
        context.version,
        view,
        lambda topic: _describe(topic, context, placement, with_operations),
        in_all=len(context.services.catalog.topics()),
    )


refuse_metadata = DerivedRefusal(ApiKey.METADATA, elements=True)
"""Refuse without a list of brokers, so that Java and librdkafka keep their metadata and repeat the request."""


async def _find_topics(
    request: MetadataRequest, context: RequestContext[MetadataServices]
) -> Sequence[Topic | MetadataResponseTopic]:
    asked = request.topics
    # Version 0 has no null: its empty list is everything.
    if asked is None or (context.version == 0 and not asked):
        await _follow_other_nodes(context.services)
        topics = context.services.catalog.topics()
        if context.services.authorizer is None:
            return topics
        return [topic async for topic in in_pieces(topics) if _may_describe(context, topic.name, told=False)]
    by_id = any(await mapped(lambda topic: topic.topic_id != ZERO_UUID, asked))
    if context.version < 12 and (by_id or any(await mapped(lambda topic: topic.name is None, asked))):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Topics are asked for by id from version 12 on.")
    if by_id:
        ids = await first_of_each(topic.topic_id for topic in asked if topic.topic_id != ZERO_UUID)
        return await _find_by_id(ids, context)
    names = await first_of_each(topic.name for topic in asked if topic.name is not None)
    if not names and asked:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "A topic has neither name nor id.")
    return await _find_by_name(names, request.allow_auto_topic_creation, context)


async def _follow_other_nodes(services: HasCatalog) -> None:
    """Follow the catalog, because a listing must include topics that another node created a moment ago. Without
    Postgres this node's copy must do."""
    try:
        await services.catalog.refresh_if_changed()
    except StorageError as error:
        logger.warning("topics listed from memory: Postgres does not answer", reason=str(error))


async def _find_by_id(ids: Sequence[UUID], context: RequestContext[FindsTopics]) -> list[Topic | MetadataResponseTopic]:
    catalog = context.services.catalog
    code = ErrorCode.UNKNOWN_TOPIC_ID
    try:
        await catalog.resolve_all_ids(ids)
    except StorageError as error:
        code = context.storage_failed(context.api_key, error)

    def found(topic_id: UUID) -> Topic | MetadataResponseTopic:
        topic = catalog.get_by_id(topic_id)
        if topic is None:
            return MetadataResponseTopic(error_code=code, name=None, topic_id=topic_id)
        if not _may_describe(context, topic.name):
            return MetadataResponseTopic(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=None, topic_id=topic_id)
        return topic

    return await mapped(found, ids)


def _may_describe(context: RequestContext[HasAuthorizer], topic: str, *, told: bool = True) -> bool:
    return may_topic(context, AclOperation.DESCRIBE, topic, told=told)


async def _find_by_name(
    names: Sequence[str], may_create: bool, context: RequestContext[MetadataServices]
) -> list[Topic | MetadataResponseTopic]:
    catalog = context.services.catalog
    forbidden: dict[str, ErrorCode] = {}
    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if context.services.authorizer is not None:
        forbidden = {name: refused async for name in in_pieces(names) if not _may_describe(context, name)}
    missing = [name async for name in in_pieces(names) if catalog.get(name) is None and name not in forbidden]
    illegal = ErrorCode.INVALID_TOPIC_EXCEPTION
    codes = {name: illegal for name, why in await mapped(lambda name: (name, why_illegal(name)), missing) if why}
    missing = [name async for name in in_pieces(missing) if name not in codes]
    try:
        await catalog.resolve_all(missing)
        if context.services.authorizer is not None:
            # The ACLs were read together with the topics.
            forbidden |= {name: refused async for name in in_pieces(missing) if not _may_describe(context, name)}
        missing = [name async for name in in_pieces(missing) if catalog.get(name) is None and name not in forbidden]
        if missing and may_create and catalog.broker.auto_create_topics_enable:
            creatable = [name async for name in in_pieces(missing) if may_create_topic(context, name)]
            forbidden.update(dict.fromkeys(set(missing).difference(creatable), ErrorCode.TOPIC_AUTHORIZATION_FAILED))
            codes.update(await _create_missing(creatable, context))
    except StorageError as error:
        codes.update(dict.fromkeys(missing, context.storage_failed(context.api_key, error)))
    codes.update(forbidden)
    return await mapped(lambda name: (None if name in codes else catalog.get(name)) or _failed(name, codes), names)


def _failed(name: str, codes: dict[str, ErrorCode]) -> MetadataResponseTopic:
    return MetadataResponseTopic(error_code=codes.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), name=name)


async def _create_missing(names: Sequence[str], context: RequestContext[MetadataServices]) -> dict[str, ErrorCode]:
    """Create the topics and return the error code for each name. A name without a code was created by another node.

    Topics beyond the client's quota of mutations are not created. As with Kafka, their code does not show the reason,
    and the client asks again.
    """
    services = context.services
    mutations = services.throttles.mutations(context, STRICT_FROM_THE_FIRST)
    codes = dict.fromkeys(names, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    codes.update(dict.fromkeys(names[MAX_CREATED:], ErrorCode.LEADER_NOT_AVAILABLE))
    broker, rendered = services.catalog.broker, services.catalog.rendered_names()
    plans: list[NewTopic] = []
    for name in names[:MAX_CREATED]:
        try:
            plan = plan_automatic(name, broker, rendered)
            mutations.record(plan.partition_count)
            plans.append(plan)
        except KafkaError as error:
            if error.code is not ErrorCode.THROTTLING_QUOTA_EXCEEDED:
                codes[name] = error.code
    lost = [name for name, made in (await make_topics(plans, services)).items() if isinstance(made, KafkaError)]
    if lost:
        # Another node has created the topic first, so answer with that topic.
        await services.catalog.refresh_if_changed()
        for name in lost:
            if services.catalog.get(name) is not None:
                del codes[name]
            else:
                codes[name] = ErrorCode.LEADER_NOT_AVAILABLE
    return codes


def _describe(
    topic: Topic, context: RequestContext[FindsTopics], placement: Placement, with_operations: bool
) -> MetadataResponseTopic:
    factor = requested_replication_factor(topic.configs, context.services.catalog.broker)
    partitions: list[MetadataResponsePartition] = []
    for partition in topic.partitions:
        leader = placement.leader(partition)
        replicas = placement.replicas(partition, leader, factor)
        in_sync = placement.in_sync(partition, replicas)
        error = placement.leader_error(leader, context.version)
        leader_id = -1 if error else leader
        if context.version == 0 and (missing := placement.offline(replicas)):
            # Clients of this version do not know the missing nodes, so none of them is named, as upstream.
            replicas, in_sync = (tuple(node for node in named if node not in missing) for named in (replicas, in_sync))
            error = error or ErrorCode.REPLICA_NOT_AVAILABLE
        partitions.append(
            MetadataResponsePartition(
                error_code=error,
                partition_index=partition.partition_index,
                leader_id=leader_id,
                leader_epoch=partition.leader_epoch,
                replica_nodes=replicas,
                isr_nodes=in_sync,
                offline_replicas=placement.offline(replicas),
            )
        )
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.internal,
        partitions=tuple(partitions),
        topic_authorized_operations=authorized_operations(Resource.TOPIC, topic.name, context, asked=with_operations),
    )


# --- DescribeTopicPartitions --------------------------------------------------------------------------------------


async def describe_topic_partitions(
    request: DescribeTopicPartitionsRequest, context: RequestContext[MetadataServices]
) -> DescribeTopicPartitionsResponse:
    """Describe topics by name, page by page; never create one. Mirrors DescribeTopicPartitionsRequestHandler and
    KRaftMetadataCache.describeTopicResponse: a cursor names the next topic and partition to describe."""
    services = context.services
    cursor = request.cursor
    if cursor is not None and cursor.partition_index < 0:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "The cursor's partition is negative.")
    await _follow_other_nodes(services)
    asked = await first_of_each(topic.name for topic in request.topics or services.catalog.topics())
    # In a thread: sorting a hundred thousand names may take half a second.
    names = [name async for name in in_pieces(asked) if cursor is None or name >= cursor.topic_name]
    forbidden: set[str] = set()
    if services.authorizer is not None:
        named = bool(request.topics)
        forbidden = {name async for name in in_pieces(names) if not _may_describe(context, name, told=named)}
        names = [name async for name in in_pieces(names) if named or name not in forbidden]
    names = sorted(names) if len(names) <= PIECE else await asyncio.to_thread(sorted, names)
    remaining = max(min(request.response_partition_limit, MAX_PARTITIONS_PER_PAGE), 1)
    placement = Placement(context)
    described: list[DescribeTopicPartitionsResponseTopic] = []
    next_cursor: Cursor | None = None
    async for name in in_pieces(names):
        if remaining == 0:
            next_cursor = Cursor(topic_name=name, partition_index=0)
            break
        topic = services.catalog.get(name)
        if name in forbidden:
            code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            described.append(DescribeTopicPartitionsResponseTopic(error_code=code, name=name))
            continue
        if topic is None:
            illegal = why_illegal(name) is not None
            code = ErrorCode.INVALID_TOPIC_EXCEPTION if illegal else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            described.append(DescribeTopicPartitionsResponseTopic(error_code=code, name=name))
            continue
        first = cursor.partition_index if cursor is not None and cursor.topic_name == name else 0
        page = topic.partitions[first : first + remaining]
        remaining -= len(page)
        described.append(_describe_page(topic, page, context, placement))
        if first + len(page) < len(topic.partitions):
            next_cursor = Cursor(topic_name=name, partition_index=first + len(page))
            break
    return DescribeTopicPartitionsResponse(topics=tuple(described), next_cursor=next_cursor)


def _describe_page(
    topic: Topic, page: Iterable[Partition], context: RequestContext[FindsTopics], placement: Placement
) -> DescribeTopicPartitionsResponseTopic:
    factor = requested_replication_factor(topic.configs, context.services.catalog.broker)
    partitions: list[DescribeTopicPartitionsResponsePartition] = []
    for partition in page:
        leader = placement.leader(partition)
        replicas = placement.replicas(partition, leader, factor)
        error = ErrorCode.NONE
        if leader != NO_LEADER:
            error = placement.leader_error(leader, FIRST_VERSION_WITH_LISTENER_NOT_FOUND)
        partitions.append(
            DescribeTopicPartitionsResponsePartition(
                error_code=error,
                partition_index=partition.partition_index,
                leader_id=-1 if error else leader,
                leader_epoch=partition.leader_epoch,
                replica_nodes=replicas,
                isr_nodes=placement.in_sync(partition, replicas),
                # These must not be null, because Java's Admin client reads both without a check.
                eligible_leader_replicas=(),
                last_known_elr=(),
                offline_replicas=placement.offline(replicas),
            )
        )
    return DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.internal,
        partitions=tuple(partitions),
        topic_authorized_operations=authorized_operations(Resource.TOPIC, topic.name, context, asked=True),
    )


# --- DescribeCluster ----------------------------------------------------------------------------------------------


async def describe_cluster(
    request: DescribeClusterRequest, context: RequestContext[MetadataServices]
) -> DescribeClusterResponse:
    """Describe live nodes that have the listener. On request also describe fenced ones: registered nodes that are
    not alive and can be unregistered. No controller is fenced, and none has a rack (upstream:
    AuthHelper.computeDescribeClusterResponse, ControllerRegistrationsPublisher)."""
    _require_endpoint(request, context)
    placement, as_broker = Placement(context), context.role is Role.BROKER
    brokers = {
        node.node_id: DescribeClusterBroker(
            broker_id=node.node_id, host=host, port=port, rack=node.rack if as_broker else None
        )
        for node, host, port in placement.brokers
    }
    if request.include_fenced_brokers and as_broker and context.connection.shared is None:
        listener = context.connection.listener
        for node in await context.services.membership.fenced():
            if node.node_id not in brokers and listener in node.listeners:
                host, port = node.listeners[listener]
                brokers[node.node_id] = DescribeClusterBroker(
                    broker_id=node.node_id, host=host, port=port, rack=node.rack, is_fenced=True
                )
    return DescribeClusterResponse(
        endpoint_type=ENDPOINTS[context.role],
        cluster_id=context.services.cluster_id,
        controller_id=placement.controller_id,
        brokers=tuple(brokers[node_id] for node_id in sorted(brokers)),
        cluster_authorized_operations=authorized_operations(
            Resource.CLUSTER, CLUSTER, context, asked=request.include_cluster_authorized_operations
        ),
    )


def _require_endpoint(request: DescribeClusterRequest, context: RequestContext[object]) -> None:
    """Raise KafkaError unless the request is for the kind of node (broker or controller) that received it. Version 0
    has no such field.
    """
    asked, here = request.endpoint_type, ENDPOINTS[context.role]
    if asked == here:
        return
    names = {number: role.name for role, number in ENDPOINTS.items()}
    code, message = ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {asked}"
    if asked in names:
        code = ErrorCode.MISMATCHED_ENDPOINT_TYPE
        sent = f"The request was sent to an endpoint of type {names[here]}"
        message = f"{sent}, but we wanted an endpoint of type {names[asked]}"
    raise KafkaError(ErrorCode.INVALID_REQUEST if context.version == 0 else code, message)


refuse_describe_cluster = DerivedRefusal(ApiKey.DESCRIBE_CLUSTER, answers={"endpoint_type": "endpoint_type"})
