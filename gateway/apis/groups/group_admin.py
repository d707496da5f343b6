"""DescribeGroups, ListGroups and DeleteGroups: groups as administrators see them.

The one idea: a group is shown as it was last settled, so a crash cannot undo any generation or assignment that is
visible here. `gateway/coordinator/classic/views.py` decides what is shown of a classic group. Consumer groups are
listed and deleted here, and described by `consumer_groups.py`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.apis.groups.group_views import ViewsGroups, group_views
from gateway.apis.services import HasShare
from gateway.coordinator.classic.model import Group
from gateway.coordinator.classic.views import describe
from gateway.coordinator.machine import Value
from gateway.coordinator.requests import DeleteGroup
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces, mapped
from gateway.security.authorized_operations import NOT_ASKED, Resource, authorized_operations
from gateway.security.authorizer import HasAuthorizer, may
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from protocol.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from protocol.messages.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse
from protocol.shown import shown

FIRST_VERSION_WITH_GROUP_ID_NOT_FOUND = 6
CLASSIC = "classic"


class GroupAdminServices(ViewsGroups, HasShare, Protocol): ...


async def describe_groups(
    request: DescribeGroupsRequest, context: RequestContext[ViewsGroups]
) -> DescribeGroupsResponse:
    """Describe classic groups. A group that does not exist is `Dead`; from version 6 on also GROUP_ID_NOT_FOUND.

    A group that is named twice is answered once, because it may have very many members.
    """
    with_operations = request.include_authorized_operations
    viewed = group_views(context, await first_of_each(request.groups))
    return DescribeGroupsResponse(
        groups=tuple([_described(group_id, group, with_operations, context) async for group_id, group in viewed])
    )


def _described(
    group_id: str, group: Value | KafkaError, with_operations: bool, context: RequestContext[HasAuthorizer]
) -> DescribedGroup:
    if isinstance(group, KafkaError):
        return DescribedGroup(
            group_id=group_id,
            error_code=group.code,
            error_message=group.message,
            authorized_operations=NOT_ASKED,
        )
    reason = f"Group {shown(group_id)} not found."
    if not isinstance(group, Group):
        # Upstream shows only classic groups here. Admin clients use ConsumerGroupDescribe for consumer groups.
        if group.exists:
            reason = f"Group {shown(group_id)} is not a classic group."
        group = Group(group_id)
    missing = not group.exists and context.version >= FIRST_VERSION_WITH_GROUP_ID_NOT_FOUND
    described = describe(group)
    return DescribedGroup(
        group_id=group_id,
        error_code=ErrorCode.GROUP_ID_NOT_FOUND if missing else ErrorCode.NONE,
        error_message=reason if missing else None,
        group_state=described.state,
        protocol_type=described.protocol_type,
        protocol_data=described.protocol_data,
        members=tuple(
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in described.members
        ),
        # As in upstream, no operation is allowed on a group that does not exist.
        authorized_operations=authorized_operations(
            Resource.GROUP, group_id, context, asked=with_operations and not missing
        ),
    )


async def list_groups(request: ListGroupsRequest, context: RequestContext[ViewsGroups]) -> ListGroupsResponse:
    """List only this node's groups, because admin clients ask every node and merge the answers. Filters ignore case;
    unknown values match nothing.
    """
    states = set(await mapped(str.lower, request.states_filter))
    types = set(await mapped(str.lower, request.types_filter))
    shows_all = may(context, AclOperation.DESCRIBE, ResourceType.CLUSTER, told=False)
    listed = [
        ListedGroup(
            group_id=group.group_id,
            protocol_type=group.protocol_type,
            group_state=group.state,
            group_type=group.group_type,
        )
        async for group in in_pieces(await context.services.groups.list())
        if (not states or group.state.lower() in states)
        and (not types or group.group_type.lower() in types)
        and (shows_all or may(context, AclOperation.DESCRIBE, ResourceType.GROUP, group.group_id, told=False))
    ]
    return ListGroupsResponse(groups=tuple(listed))


async def delete_groups(
    request: DeleteGroupsRequest, context: RequestContext[GroupAdminServices]
) -> DeleteGroupsResponse:
    """Delete Empty groups with their offsets. A group that is named twice is answered once."""
    groups = context.services.groups
    results: list[DeletableGroupResult] = []
    async for group_id in in_pieces(dict.fromkeys(request.groups_names)):
        if not may(context, AclOperation.DELETE, ResourceType.GROUP, group_id):
            results.append(DeletableGroupResult(group_id=group_id, error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED))
            continue
        reply = groups.submit(group_id, DeleteGroup(groups.next_request_id()))
        if isinstance(reply, asyncio.Future):
            reply = await reply
        if reply.error is ErrorCode.NONE:
            context.services.share.drop_group(group_id)
        results.append(DeletableGroupResult(group_id=group_id, error_code=reply.error))
    return DeleteGroupsResponse(results=tuple(results))
