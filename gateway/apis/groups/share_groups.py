"""ShareGroupHeartbeat and ShareGroupDescribe: messages to events of a share group (KIP-932), and values to messages.

The one idea: as for consumer groups, each handler is a translation; what a member may do is decided in
`gateway/coordinator/share`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.apis.admin.features import SHARE, ChecksFeatures, require_protocol
from gateway.apis.groups.group_types import of_type
from gateway.apis.groups.leave_delay import delay_leave
from gateway.apis.groups.subscribed_topics import look_up_subscribed
from gateway.apis.services import FindsTopics, HasGroups
from gateway.apis.visibility import HIDDEN, group_views, shows_all, topic_names
from gateway.coordinator.consumer.partitions import Partitions
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Value
from gateway.coordinator.share.model import SIMPLE, ShareGroup, ShareGroupHeartbeat, ShareMember, state_of
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each
from gateway.security.authorized_operations import NOT_ASKED, Resource, authorized_operations
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import share_group_describe as described
from protocol.messages.share_group_heartbeat import (
    Assignment,
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
    TopicPartitions,
)


class ShareGroupServices(ChecksFeatures, FindsTopics, HasGroups, Protocol): ...


async def share_group_heartbeat(
    request: ShareGroupHeartbeatRequest, context: RequestContext[ShareGroupServices]
) -> ShareGroupHeartbeatResponse:
    """Answer a heartbeat. Unknown topics are looked up first, as for consumer groups."""
    require_protocol(SHARE, context)
    if not request.group_id:
        return ShareGroupHeartbeatResponse(
            error_code=ErrorCode.INVALID_REQUEST, error_message="GroupId can't be empty."
        )
    await look_up_subscribed(request.subscribed_topic_names, context.services.catalog)
    if request.member_epoch < 0:
        await delay_leave()
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        ShareGroupHeartbeat(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            client_id=context.client_id or "",
            client_host=context.connection.client_host,
            member_id=MemberId(request.member_id),
            member_epoch=request.member_epoch,
            rack_id=request.rack_id,
            subscribed_topic_names=request.subscribed_topic_names,
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    return ShareGroupHeartbeatResponse(
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


async def share_group_describe(
    request: described.ShareGroupDescribeRequest, context: RequestContext[ShareGroupServices]
) -> described.ShareGroupDescribeResponse:
    """Describe share groups. A missing group, or one of another type, is GROUP_ID_NOT_FOUND."""
    require_protocol(SHARE, context)
    asked = request.include_authorized_operations
    viewed = group_views(context, await first_of_each(request.group_ids))
    return described.ShareGroupDescribeResponse(
        groups=tuple([await _described(group_id, group, asked, context) async for group_id, group in viewed])
    )


async def _described(
    group_id: str, group: Value | KafkaError, with_operations: bool, context: RequestContext[FindsTopics]
) -> described.DescribedGroup:
    try:
        found = of_type(ShareGroup, group_id, group)
    except KafkaError as error:
        return described.DescribedGroup(
            group_id=group_id, error_code=error.code, error_message=error.message, authorized_operations=NOT_ASKED
        )
    catalog = context.services.catalog
    held = {topic_id for each in found.members.values() for topic_id in each.assigned}
    await catalog.resolve_all_ids(held)
    if not await shows_all(context, topic_names(held, catalog)):
        return described.DescribedGroup(
            group_id=group_id,
            error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            error_message=HIDDEN,
            authorized_operations=NOT_ASKED,
        )
    return described.DescribedGroup(
        group_id=group_id,
        group_state=state_of(found).value,
        group_epoch=found.group_epoch,
        assignment_epoch=found.assignment_epoch,
        assignor_name=SIMPLE,
        members=tuple(_member(each, catalog) for each in found.members.values()),
        authorized_operations=authorized_operations(Resource.GROUP, group_id, context, asked=with_operations),
    )


def _member(member: ShareMember, catalog: Catalog) -> described.Member:
    """Describe a member. Topics deleted a moment ago have no name and are left out."""
    return described.Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.subscribed_topic_names,
        assignment=described.Assignment(
            topic_partitions=tuple(
                described.TopicPartitions(topic_id=topic_id, topic_name=topic.name, partitions=tuple(sorted(indexes)))
                for topic_id, indexes in member.assigned.items()
                if (topic := catalog.get_by_id(topic_id)) is not None
            )
        ),
    )
