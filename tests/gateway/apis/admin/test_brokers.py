"""UnregisterBroker and ListPartitionReassignments, on a real Postgres."""

from __future__ import annotations

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsTopics,
)
from protocol.messages.unregister_broker import UnregisterBrokerRequest
from tests.gateway.admin import AdminNode, admin_node


async def unregister(node: AdminNode, broker_id: int) -> tuple[int, str | None]:
    """Send UnregisterBroker; return the error code and the message."""
    try:
        answer = await node.ask(ApiKey.UNREGISTER_BROKER, UnregisterBrokerRequest(broker_id=broker_id), 0)
    except KafkaError as refused:
        return refused.code, refused.message
    return answer.error_code, answer.error_message


async def test_departed_node_is_unregistered_once(database_url: str) -> None:
    async with admin_node(database_url) as node:
        async with admin_node(database_url, name="node-2") as other:
            gone = other.membership.node_id
            assert (await unregister(node, gone))[0] == ErrorCode.INVALID_REQUEST, "it is alive"
            assert (await unregister(node, node.membership.node_id))[0] == ErrorCode.INVALID_REQUEST
            await other.membership.withdraw()
        assert await unregister(node, gone) == (ErrorCode.NONE, None)
        unknown = (ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {gone} is not currently registered.")
        assert await unregister(node, gone) == unknown
        async with admin_node(database_url, name="node-2") as again:
            assert again.membership.node_id == gone
            assert (await unregister(node, gone))[0] == ErrorCode.INVALID_REQUEST, "it is alive again"


@pytest.mark.parametrize("broker_id", [-1, 0, 7, 2**31 - 1])
async def test_unregistering_an_unknown_id_is_refused(database_url: str, broker_id: int) -> None:
    async with admin_node(database_url) as node:
        assert (await unregister(node, broker_id))[0] == ErrorCode.BROKER_ID_NOT_REGISTERED


@pytest.mark.parametrize("topics", [None, (), ("orders",), ("missing",)])
async def test_no_reassignment_is_ever_in_progress(database_url: str, topics: tuple[str, ...] | None) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders")
        named = None
        if topics is not None:
            named = tuple(ListPartitionReassignmentsTopics(name=name, partition_indexes=(0,)) for name in topics)
        request = ListPartitionReassignmentsRequest(topics=named)
        answer = await node.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, request, 0)
        assert (answer.error_code, answer.error_message, answer.topics) == (ErrorCode.NONE, None, ())
