"""Nodes behind one address that authenticate their clients: the coordinator authorizes the client, not the node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import pytest

from gateway.security.kinds import AclOperation, Permission, ResourceType
from protocol.errors import ErrorCode
from protocol.messages.create_acls import AclCreation, CreateAclsRequest
from protocol.messages.describe_configs import DescribeConfigsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.list_groups import ListGroupsRequest
from tests.cluster.conftest import balanced, metric
from tests.cluster.one_address import CLIENTS, NODES, OneAddress, one_address, tried
from tests.frames.members import Member, describe, fresh
from tests.postgres import SERVED, Databases
from tests.secured import AUTHORIZER, USERS, Authority, authenticate, jaas, plain_token
from tests.wire import WireClient

GROUPS = 6


@pytest.fixture(scope="module", params=["SASL_PLAINTEXT", "SASL_SSL", "SSL"])
def shared(
    request: pytest.FixtureRequest, postgres: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OneAddress]:
    """Two nodes that check ACLs. They call each other at a listener of this security protocol."""
    directory: Path = tmp_path_factory.mktemp("nodes")
    authority = Authority(directory, "authority")
    server = authority.issue("/CN=localhost")
    settings = {
        **AUTHORIZER,
        "super.users": "User:bob",
        "listener.security.protocol.map": f"{CLIENTS}:SASL_PLAINTEXT,{NODES}:{request.param}",
        "sasl.enabled.mechanisms": "PLAIN",
        f"listener.name.{CLIENTS.lower()}.plain.sasl.jaas.config": jaas(),
    }
    if request.param.startswith("SASL"):
        settings[f"listener.name.{NODES.lower()}.plain.sasl.jaas.config"] = jaas()
    if request.param.endswith("SSL"):
        settings |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(server.whole),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.certificate),
            f"listener.name.{NODES.lower()}.ssl.client.auth": "required",
        }
    url = postgres.create(SERVED)
    with one_address(postgres, url, 2, settings) as running:
        balanced(running.nodes)
        yield running
    postgres.drop(url)


@contextlib.asynccontextmanager
async def logged_in(shared: OneAddress, user: str) -> AsyncIterator[list[WireClient]]:
    """Connect a client of the user to each node."""
    clients = [await WireClient.connect(node.bootstrap) for node in shared.nodes]
    try:
        for client in clients:
            assert (await authenticate(client, plain_token(user, USERS[user]))).error_code == ErrorCode.NONE
        yield clients
    finally:
        for client in clients:
            await client.close()


async def test_coordinator_authorizes_the_client(shared: OneAddress) -> None:
    """Alice may use some groups and not others, through every node. Bob may use all."""
    allowed, forbidden = ([fresh("group") for _ in range(GROUPS)] for _ in range(2))
    async with logged_in(shared, "alice") as alice, logged_in(shared, "bob") as bob:
        acls = tuple(
            AclCreation(
                resource_type=ResourceType.GROUP,
                resource_name=group_id,
                resource_pattern_type=3,
                principal="User:alice",
                host="*",
                operation=AclOperation.READ,
                permission_type=Permission.ALLOW,
            )
            for group_id in allowed
        )
        await bob[0].send(FindCoordinatorRequest(key="group"), 3)  # It creates the coordinators' topic.
        made = await bob[0].send(CreateAclsRequest(creations=acls), 3)
        assert {each.error_code for each in made.results} == {ErrorCode.NONE}
        for client in bob:
            await client.send(DescribeConfigsRequest(), 4)  # The node then follows the catalog.

        async def joins(client: WireClient, group_id: str) -> int | Collection[int]:
            async def code() -> int:
                return int((await Member(client, group_id).join_nowait()).error_code)

            return await tried(code)

        for client in alice:
            for group_id in allowed:
                assert await joins(client, group_id) == ErrorCode.MEMBER_ID_REQUIRED
            for group_id in forbidden:
                assert await joins(client, group_id) == ErrorCode.GROUP_AUTHORIZATION_FAILED
                refused = ErrorCode.GROUP_AUTHORIZATION_FAILED
                assert (await describe(client, group_id)).error_code == refused
        for client in bob:
            for group_id in forbidden:
                assert await joins(client, group_id) == ErrorCode.MEMBER_ID_REQUIRED
            listed = await client.send(ListGroupsRequest(), 4)
            assert listed.error_code == ErrorCode.NONE
    for node in shared.nodes:
        assert metric(node, 'sluice_forwarded_requests_total{api="join_group"}') > 0
        assert metric(node, 'sluice_forwarding_failed_total{api="join_group"}') == 0
