"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: messages to events of a KIP-848 group, and its values to messages.

The one idea: as for classic groups, each handler is a translation and one call of `Groups.submit`; what a member may
do is decided in `gateway/coordinator/consumer`.
"""

from __future__ import annotations

import asyncio
import uuid
from enum import IntEnum
from typing import Protocol

from gateway.apis.admin.features import GROUPS, ChecksFeatures, require_protocol
from gateway.apis.groups.group_types import of_type
from gateway.apis.groups.leave_delay import delay_leave
from gateway.apis.groups.subscribed_topics import look_up_subscribed
from gateway.apis.services import FindsTopics, HasGroups
from gateway.apis.visibility import HIDDEN, group_views, shows_all, topic_names
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerMember
from gateway.coordinator.consumer.partitions import Partitions, partitions_of
from gateway.coordinator.consumer.views import describe
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Value
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each
from gateway.security.authorized_operations import NOT_ASKED, Resource, authorized_operations
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import consumer_group_describe as described
from protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)


class ConsumerGroupServices(ChecksFeatures, FindsTopics, HasGroups, Protocol): ...


class MemberType(IntEnum):
    """Upstream's codes of ConsumerGroupDescribe 1."""

    CLASSIC = 0
    CONSUMER = 1


async def consumer_group_heartbeat(
    request: ConsumerGroupHeartbeatRequest, context: RequestContext[ConsumerGroupServices]
) -> ConsumerGroupHeartbeatResponse:
    """Answer a heartbeat. Unknown topics are looked up first, so a member can receive a topic that another node created
    a moment ago."""
    require_protocol(GROUPS, context)
    if not request.group_id:
        return ConsumerGroupHeartbeatResponse(
            error_code=ErrorCode.INVALID_REQUEST, error_message="GroupId can't be empty."
        )
    await look_up_subscribed(request.subscribed_topic_names, context.services.catalog)
    if request.member_epoch < 0:
        await delay_leave()
    groups = context.services.groups
    owned = request.topic_partitions
    reply = groups.submit(
        request.group_id,
        ConsumerGroupHeartbeat(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            connection_number=context.connection.number,
            version=context.version,
            client_id=context.client_id or "",
            client_host=context.connection.client_host,
            # The member's own id, or a new one if it has none.
            new_member_id=MemberId(request.member_id or str(uuid.uuid4())),
            member_id=MemberId(request.member_id),
            member_epoch=request.member_epoch,
            instance_id=request.instance_id,
            rack_id=request.rack_id,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            subscribed_topic_names=request.subscribed_topic_names,
            subscribed_topic_regex=request.subscribed_topic_regex,
            server_assignor=request.server_assignor,
            owned=None if owned is None else partitions_of((topic.topic_id, topic.partitions) for topic in owned),
            principal=None if context.services.authorizer is None else str(context.connection.principal),
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    return ConsumerGroupHeartbeatResponse(
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=reply.heartbeat_interval_ms,
        assignment=None if reply.assignment is None else _assignment(reply.assignment),
    )


def _assignment(held: Partitions) -> Assignment:
    return Assignment(
        topic_partitions=tuple(
            TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(indexes))) for topic_id, indexes in held.items()
        )
    )


async def consumer_group_describe(
    request: described.ConsumerGroupDescribeRequest, context: RequestContext[ConsumerGroupServices]
) -> described.ConsumerGroupDescribeResponse:
    """Describe consumer groups. A missing group, or one of another type, is GROUP_ID_NOT_FOUND: Java's admin then asks
    DescribeGroups."""
    require_protocol(GROUPS, context)
    asked = request.include_authorized_operations
    viewed = group_views(context, await first_of_each(request.group_ids))
    return described.ConsumerGroupDescribeResponse(
        groups=tuple([await _described(group_id, group, asked, context) async for group_id, group in viewed])
    )


async def _described(
    group_id: str, group: Value | KafkaError, with_operations: bool, context: RequestContext[ConsumerGroupServices]
) -> described.DescribedGroup:
    try:
        found = of_type(ConsumerGroup, group_id, group)
    except KafkaError as error:
        return described.DescribedGroup(
            group_id=group_id, error_code=error.code, error_message=error.message, authorized_operations=NOT_ASKED
        )
    catalog = context.services.catalog
    await catalog.resolve_all_ids(found.owners)
    shown = describe(found, context.services.groups.settings.consumer.assignors[0])
    held = {topic_id for each in shown.members for topic_id in (*each.member.assigned, *each.target)}
    if not await shows_all(context, topic_names(held, catalog)):
        return described.DescribedGroup(
            group_id=group_id,
            error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            error_message=HIDDEN,
            authorized_operations=NOT_ASKED,
        )
    return described.DescribedGroup(
        group_id=group_id,
        group_state=shown.state.value,
        group_epoch=shown.group_epoch,
        assignment_epoch=shown.assignment_epoch,
        assignor_name=shown.assignor,
        members=tuple(_member(each.member, each.target, catalog) for each in shown.members),
        authorized_operations=authorized_operations(Resource.GROUP, group_id, context, asked=with_operations),
    )


def _member(member: ConsumerMember, target: Partitions, catalog: Catalog) -> described.Member:
    return described.Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.subscribed_topic_names,
        subscribed_topic_regex=member.subscribed_topic_regex or "",
        assignment=_described_assignment(member.assigned, catalog),
        target_assignment=_described_assignment(target, catalog),
        member_type=MemberType.CONSUMER if member.classic is None else MemberType.CLASSIC,
    )


def _described_assignment(held: Partitions, catalog: Catalog) -> described.Assignment:
    """Return an assignment with topic names. Topics deleted a moment ago have no name and are left out."""
    return described.Assignment(
        topic_partitions=tuple(
            described.TopicPartitions(topic_id=topic_id, topic_name=topic.name, partitions=tuple(sorted(indexes)))
            for topic_id, indexes in held.items()
            if (topic := catalog.get_by_id(topic_id)) is not None
        )
    )
