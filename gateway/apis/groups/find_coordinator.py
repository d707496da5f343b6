"""FindCoordinator: the node that holds the lease of a group's shard.

The one idea: the answer is a hint from the leases. If this node knows no lease for the group, it asks Postgres. The
named node decides again whether it coordinates. The state of share groups in a partition is kept by the partition's
leader.
"""

from __future__ import annotations

import asyncio
import re
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from gateway.apis.coordinator_topics import HasInternalTopics, InternalTopicsServices
from gateway.apis.services import HasMembership, HasTransactions
from gateway.log.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.net.pieces import PIECE, in_pieces
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorizer import HasAuthorizer, may, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from storage.types import Node, Partition

GROUP, TRANSACTION, SHARE = 0, 1, 2
_KINDS = {GROUP: ResourceType.GROUP, TRANSACTION: ResourceType.TRANSACTIONAL_ID}
_TOPIC_ID, _INDEX = re.compile(r"[\w-]{22}", re.ASCII), re.compile(r"[+-]?\d{1,10}", re.ASCII)
FIRST_VERSION_WITH_KEYS, FIRST_VERSION_WITH_SHARE = 4, 6


class FindCoordinatorServices(
    InternalTopicsServices, HasAuthorizer, HasMembership, HasTransactions, HasInternalTopics, Protocol
): ...


async def find_coordinator(
    request: FindCoordinatorRequest, context: RequestContext[FindCoordinatorServices]
) -> FindCoordinatorResponse:
    """Return one coordinator per key from version 4 on, and one in the response itself before.

    Each node may end any transaction; clients of one transactional id are all sent to one node. Keys of share
    partitions (type 2) are GROUP:TOPIC ID:PARTITION. Keys with an absent topic lead to this node, which reports that.
    Other keys, and unknown types, are answered INVALID_REQUEST.
    """
    keys = request.coordinator_keys if context.version >= FIRST_VERSION_WITH_KEYS else (request.key,)
    coordinators: list[Coordinator] = []
    for start in range(0, len(keys), PIECE):
        some = keys[start : start + PIECE]
        found = await _find_allowed(some, request.key_type, context)
        connection = context.connection
        coordinators += (_coordinator(key, node, connection) for key, node in zip(some, found, strict=True))
        if start:
            await asyncio.sleep(0)
    if context.version >= FIRST_VERSION_WITH_KEYS:
        return FindCoordinatorResponse(coordinators=tuple(coordinators))
    (only,) = coordinators
    return FindCoordinatorResponse(
        error_code=only.error_code,
        # Kafka sends this text only here.
        error_message=only.error_message if only.error_code else ErrorCode.NONE.name,
        node_id=only.node_id,
        host=only.host,
        port=only.port,
    )


refuse_find_coordinator = DerivedRefusal(ApiKey.FIND_COORDINATOR, values={"node_id": -1, "port": -1})


async def _find_allowed(
    keys: Sequence[str], key_type: int, context: RequestContext[FindCoordinatorServices]
) -> Sequence[Node | KafkaError]:
    kind = _KINDS.get(key_type)
    if context.services.authorizer is None or kind is None:
        return await _find(keys, key_type, context)
    allowed = [key for key in keys if may(context, AclOperation.DESCRIBE, kind, key)]
    found = dict(zip(allowed, await _find(allowed, key_type, context), strict=True)) if allowed else {}
    return [found.get(key) or refusal_of(kind) for key in keys]


async def _find(
    keys: Sequence[str], key_type: int, context: RequestContext[FindCoordinatorServices]
) -> Sequence[Node | KafkaError]:
    services = context.services
    if key_type == GROUP:
        await services.internal_topics.show(CONSUMER_OFFSETS, services)
        return await services.groups.coordinators_of(keys)
    if key_type == TRANSACTION:
        await services.internal_topics.show(TRANSACTION_STATE, services)
        return [services.transactions.coordinator_of(key) async for key in in_pieces(keys)]
    if key_type == SHARE and context.version >= FIRST_VERSION_WITH_SHARE:
        return await _share_coordinators(keys, context)
    refused = KafkaError(ErrorCode.INVALID_REQUEST, f"coordinator key type {key_type} is not served")
    return [refused] * len(keys)


def _leader_of(partition: Partition, services: HasMembership) -> Node | KafkaError:
    """Return the leader of the partition, which keeps the state of share groups in it."""
    leader = services.membership.leader_of_partition(partition)
    return leader or KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "nobody leads the partition")


async def _share_coordinators(
    keys: Sequence[str], context: RequestContext[FindCoordinatorServices]
) -> list[Node | KafkaError]:
    services = context.services
    named = [_share_partition(key) for key in keys]
    missing = [each[0] for each in named if each is not None and services.catalog.get_by_id(each[0]) is None]
    await services.catalog.resolve_all_ids(missing)
    found: list[Node | KafkaError] = []
    for key, each in zip(keys, named, strict=True):
        if each is None:
            found.append(KafkaError(ErrorCode.INVALID_REQUEST, f"{key} is no GROUP:TOPIC ID:PARTITION"))
            continue
        topic_id, index = each
        topic = services.catalog.get_by_id(topic_id)
        if topic is None or not 0 <= index < len(topic.partitions):
            found.append(services.membership.self_node)
        else:
            found.append(_leader_of(topic.partitions[index], services))
    return found


def _share_partition(key: str) -> tuple[UUID, int] | None:
    """Parse topic id and index (upstream: SharePartitionKey), or return None for any other key."""
    group_id, _, rest = key.partition(":")
    encoded, _, index = rest.partition(":")
    if not group_id.strip() or not _TOPIC_ID.fullmatch(encoded) or not _INDEX.fullmatch(index):
        return None
    return UUID(bytes=urlsafe_b64decode(f"{encoded}==")), int(index)


def _coordinator(key: str, found: Node | KafkaError, connection: ConnectionInfo) -> Coordinator:
    """Return the coordinator at its address for the client's listener. A node without that listener cannot be reached
    (as upstream)."""
    node = found if isinstance(found, KafkaError) else connection.seen(found)
    if node is None:
        why = "the coordinator has no listener of this name"
        node = KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{connection.listener}: {why}")
    if isinstance(node, KafkaError):
        return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=node.code, error_message=node.message)
    host, port = node.listeners[connection.listener]
    return Coordinator(key=key, node_id=node.node_id, host=host, port=port)
