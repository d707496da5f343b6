"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: messages to events of a KIP-848 group, and its values to messages.

The one idea: as for classic groups, each handler is a translation and one call of `Groups.submit`; what a member may
do is decided in `gateway/coordinator/consumer`.
"""

from __future__ import annotations

import uuid
from enum import IntEnum
from typing import Protocol

from gateway.apis.admin.features import GROUPS, ChecksFeatures, require_protocol
from gateway.apis.groups.epoch_groups import (
    assignment,
    describe_groups,
    described_assignment,
    look_up_subscribed,
    play_heartbeat,
    require_group_id,
    require_shown,
    topic_names,
)
from gateway.apis.services import FindsTopics, HasGroups
from gateway.coordinator.consumer import views
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerMember
from gateway.coordinator.consumer.partitions import Partitions, partitions_of
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.security.authorized_operations import Resource, authorized_operations
from protocol.messages import consumer_group_describe as described
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse


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
    require_group_id(request.group_id)
    await look_up_subscribed(request.subscribed_topic_names, context.services.catalog)
    owned = request.topic_partitions
    reply = await play_heartbeat(
        request.group_id,
        ConsumerGroupHeartbeat(
            request_id=context.services.groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            connection_number=context.connection.number,
            version=context.version,
            client_id=context.client_id or "",
            client_host=context.connection.client_host,
            # Use the member's own id, or a new id if the member has none.
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
        request.member_epoch,
        context,
    )
    return ConsumerGroupHeartbeatResponse(
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=reply.heartbeat_interval_ms,
        assignment=None if reply.assignment is None else assignment(reply.assignment),
    )


async def consumer_group_describe(
    request: described.ConsumerGroupDescribeRequest, context: RequestContext[ConsumerGroupServices]
) -> described.ConsumerGroupDescribeResponse:
    """Describe consumer groups, as `describe_groups` says."""
    services = context.services

    async def describe(group: ConsumerGroup) -> described.DescribedGroup:
        await services.catalog.resolve_all_ids(group.owners)
        shown = views.describe(group, services.groups.settings.consumer.assignors[0])
        held = {topic_id for each in shown.members for topic_id in (*each.member.assigned, *each.target)}
        await require_shown(context, topic_names(held, services.catalog))
        return described.DescribedGroup(
            group_id=group.group_id,
            group_state=shown.state.value,
            group_epoch=shown.group_epoch,
            assignment_epoch=shown.assignment_epoch,
            assignor_name=shown.assignor,
            members=tuple(_member(each.member, each.target, services.catalog) for each in shown.members),
            authorized_operations=authorized_operations(
                Resource.GROUP, group.group_id, context, asked=request.include_authorized_operations
            ),
        )

    groups = await describe_groups(ConsumerGroup, GROUPS, request, context, describe, described.DescribedGroup)
    return described.ConsumerGroupDescribeResponse(groups=groups)


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
        assignment=described_assignment(member.assigned, catalog),
        target_assignment=described_assignment(target, catalog),
        member_type=MemberType.CONSUMER if member.classic is None else MemberType.CLASSIC,
    )
