"""ShareGroupHeartbeat and ShareGroupDescribe: messages to events of a share group (KIP-932), and values to messages.

The one idea: as for consumer groups, each handler is a translation; what a member may do is decided in
`gateway/coordinator/share`.
"""

from __future__ import annotations

from typing import Protocol

from gateway.apis.admin.features import SHARE, ChecksFeatures, require_protocol
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
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.share.model import SIMPLE, ShareGroup, ShareGroupHeartbeat, ShareMember, state_of
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.security.authorized_operations import Resource, authorized_operations
from protocol.messages import share_group_describe as described
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse


class ShareGroupServices(ChecksFeatures, FindsTopics, HasGroups, Protocol): ...


async def share_group_heartbeat(
    request: ShareGroupHeartbeatRequest, context: RequestContext[ShareGroupServices]
) -> ShareGroupHeartbeatResponse:
    """Answer a heartbeat. Unknown topics are looked up first, as for consumer groups."""
    require_protocol(SHARE, context)
    require_group_id(request.group_id)
    await look_up_subscribed(request.subscribed_topic_names, context.services.catalog)
    reply = await play_heartbeat(
        request.group_id,
        ShareGroupHeartbeat(
            request_id=context.services.groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            client_id=context.client_id or "",
            client_host=context.connection.client_host,
            member_id=MemberId(request.member_id),
            member_epoch=request.member_epoch,
            rack_id=request.rack_id,
            subscribed_topic_names=request.subscribed_topic_names,
        ),
        request.member_epoch,
        context,
    )
    return ShareGroupHeartbeatResponse(
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=reply.heartbeat_interval_ms,
        assignment=None if reply.assignment is None else assignment(reply.assignment),
    )


async def share_group_describe(
    request: described.ShareGroupDescribeRequest, context: RequestContext[ShareGroupServices]
) -> described.ShareGroupDescribeResponse:
    """Describe share groups, as `describe_groups` says."""
    catalog = context.services.catalog

    async def describe(group: ShareGroup) -> described.DescribedGroup:
        held = {topic_id for each in group.members.values() for topic_id in each.assigned}
        await catalog.resolve_all_ids(held)
        await require_shown(context, topic_names(held, catalog))
        return described.DescribedGroup(
            group_id=group.group_id,
            group_state=state_of(group).value,
            group_epoch=group.group_epoch,
            assignment_epoch=group.assignment_epoch,
            assignor_name=SIMPLE,
            members=tuple(_member(each, catalog) for each in group.members.values()),
            authorized_operations=authorized_operations(
                Resource.GROUP, group.group_id, context, asked=request.include_authorized_operations
            ),
        )

    groups = await describe_groups(ShareGroup, SHARE, request, context, describe, described.DescribedGroup)
    return described.ShareGroupDescribeResponse(groups=groups)


def _member(member: ShareMember, catalog: Catalog) -> described.Member:
    return described.Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.subscribed_topic_names,
        assignment=described_assignment(member.assigned, catalog),
    )
