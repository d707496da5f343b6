"""The console as a client of its own node, without a socket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gateway.apis import SERVED
from gateway.console.kafka import Kafka, Viewer
from gateway.net.dispatch import Dispatch
from gateway.operate.metrics import Metrics
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tests.gateway.group_node import group_node, settle


async def test_request_of_a_viewer_leaves_no_open_connection_behind(database_url: str):
    """A node remembers a bounded number of connections, and takes longer to miss members of all others."""
    async with group_node(database_url) as node:
        first, second = node.member("g", "c1"), node.member("g", "c2")
        await settle(first, second)
        services = cast(Any, node.services)
        services.settings.listeners = (SimpleNamespace(name="PLAINTEXT"),)
        kafka = Kafka(Dispatch(SERVED, services, Metrics()), services, frozenset())
        identity = MemberIdentity(member_id=second.member_id)
        request = LeaveGroupRequest(group_id="g", members=(identity,))
        response = await kafka.ask(LeaveGroupResponse, request, Viewer())
        assert [each.error_code for each in response.members] == [0]
        assert node.groups.connections == {"c1", "c2"}
