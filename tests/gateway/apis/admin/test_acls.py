"""DescribeAcls, CreateAcls and DeleteAcls, on a real Postgres."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.apis.admin import acls as acl_apis
from gateway.apis.partition_lookup import look_up_topics
from gateway.net.coding import MAX_ANSWER_BYTES
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.security.kinds import AclOperation, PatternType, Permission, ResourceType
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_acls import AclCreation, CreateAclsRequest
from protocol.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest
from protocol.messages.describe_acls import DescribeAclsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.schema import ZERO_UUID
from storage.types import Acl
from tests.gateway.admin import AdminNode, admin_node

OK, INVALID = ErrorCode.NONE, ErrorCode.INVALID_REQUEST
READ = AclCreation(
    resource_type=ResourceType.TOPIC,
    resource_name="t",
    resource_pattern_type=PatternType.LITERAL,
    principal="User:alice",
    host="*",
    operation=AclOperation.READ,
    permission_type=Permission.ALLOW,
)
ANYTHING: dict[str, Any] = {
    "resource_type_filter": ResourceType.ANY,
    "resource_name_filter": None,
    "pattern_type_filter": PatternType.ANY,
    "principal_filter": None,
    "host_filter": None,
    "operation": AclOperation.ANY,
    "permission_type": Permission.ANY,
}


def like(base: AclCreation, **changed: Any) -> AclCreation:
    return AclCreation(**{name: changed.get(name, getattr(base, name)) for name in AclCreation.__dataclass_fields__})


async def create(node: AdminNode, *creations: AclCreation, version: int = 3) -> list[tuple[int, str | None]]:
    answer = await node.ask(ApiKey.CREATE_ACLS, CreateAclsRequest(creations=creations), version)
    return [(each.error_code, each.error_message) for each in answer.results]


async def delete(node: AdminNode, *filters: dict[str, Any], version: int = 3) -> list[list[str] | tuple[int, str]]:
    """Delete the ACLs; return the names of their resources, or the error."""
    asked = DeleteAclsRequest(filters=tuple(DeleteAclsFilter(**{**ANYTHING, **each}) for each in filters))
    answer = await node.ask(ApiKey.DELETE_ACLS, asked, version)
    return [
        (each.error_code, each.error_message)
        if each.error_code
        else sorted(matching.resource_name for matching in each.matching_acls)
        for each in answer.filter_results
    ]


async def described(node: AdminNode, version: int = 3, **changed: Any) -> list[Acl]:
    answer = await node.ask(ApiKey.DESCRIBE_ACLS, DescribeAclsRequest(**{**ANYTHING, **changed}), version)
    assert answer.error_code == OK
    return sorted(
        Acl(
            resource.resource_type,
            resource.pattern_type,
            resource.resource_name,
            entry.principal,
            entry.host,
            entry.operation,
            entry.permission_type,
        )
        for resource in answer.resources
        for entry in resource.acls
    )


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_acls_are_created_shown_and_deleted_on_every_node(database_url: str, version: int) -> None:
    async with (
        admin_node(database_url, authorizes=True) as node,
        admin_node(database_url, name="node-2", authorizes=True) as other,
    ):
        long = like(READ, resource_name="n" * 20_000, principal="User:" + "p" * 5_000)
        odd = like(READ, resource_name="a\0b", resource_pattern_type=PatternType.PREFIXED)
        assert await create(node, READ, READ, long, odd, version=version) == [(OK, "")] * 4
        assert await create(node, READ) == [(OK, "")], "one that there is is made"
        expected = sorted(
            Acl(2, each.resource_pattern_type, each.resource_name, each.principal, "*", 3, 3)
            for each in (READ, long, odd)
        )
        for each in (node, other):
            assert await described(each, version) == expected
            assert sorted(each.catalog.acls) == expected
        matching = await described(other, version, resource_name_filter="a\0bc", pattern_type_filter=PatternType.MATCH)
        assert matching == [each for each in expected if each.resource_name == "a\0b"]
        exact = {
            "resource_type_filter": 2,
            "resource_name_filter": "t",
            "pattern_type_filter": 3,
            "principal_filter": "User:alice",
            "host_filter": "*",
            "operation": 3,
            "permission_type": 3,
        }
        assert await delete(other, exact, {"host_filter": "nowhere"}, exact, version=version) == [["t"], [], ["t"]]
        assert await delete(other, exact) == [[]]
        assert await described(node) == [each for each in expected if each.resource_name != "t"]


async def test_acls_survive_a_restart(database_url: str) -> None:
    async with admin_node(database_url, authorizes=True) as node:
        await create(node, READ)
    async with admin_node(database_url, authorizes=True) as node:
        assert len(node.catalog.acls) == 1


@pytest.mark.parametrize("by_id", [False, True])
async def test_acl_created_before_a_topic_is_known_with_it(database_url: str, by_id: bool) -> None:
    denied = like(READ, principal="User:ANONYMOUS", operation=AclOperation.DESCRIBE, permission_type=Permission.DENY)
    async with (
        admin_node(database_url, authorizes=True) as node,
        admin_node(database_url, name="node-2", authorizes=True) as other,
    ):
        assert await create(node, denied) == [(OK, "")]
        topic = await node.create("t")
        assert not len(other.catalog.acls), "nothing has told the other node yet"
        asked = MetadataRequestTopic(topic_id=topic.topic_id) if by_id else MetadataRequestTopic(name="t")
        answer = await other.ask(ApiKey.METADATA, MetadataRequest(topics=(asked,)), 12)
        (shown,) = answer.topics
        assert shown.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert shown.partitions == ()
        assert by_id or shown.topic_id == ZERO_UUID, "what it is, is not told"


async def test_acl_created_before_a_topic_is_known_to_a_lookup(database_url: str) -> None:
    denied = like(READ, principal="User:ANONYMOUS", operation=AclOperation.DELETE, permission_type=Permission.DENY)
    async with (
        admin_node(database_url, authorizes=True) as node,
        admin_node(database_url, name="node-2", authorizes=True) as other,
    ):
        assert await create(node, denied) == [(OK, "")]
        await node.create("t")
        asker = ConnectionInfo("connection", "/127.0.0.1")
        context = RequestContext(ApiKey.DELETE_RECORDS, 2, 1, "tests", asker, other.services)
        found = await look_up_topics(["t", "none"], context, AclOperation.DELETE)
        assert found == {
            "t": ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            "none": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        }


async def test_acls_are_known_before_the_topics_that_came_after_them(database_url: str) -> None:
    """A refresh of the catalog applies topics in several turns of the event loop. Other requests run in between."""
    async with (
        admin_node(database_url, authorizes=True) as node,
        admin_node(database_url, name="node-2", authorizes=True) as other,
    ):
        await create(node, READ)
        topic = await node.create("t")
        seen: list[int] = []
        other.catalog.listen(lambda: seen.append(len(other.catalog.acls) if other.catalog.get("t") else -1))
        await other.catalog.refresh_if_changed()
        assert other.catalog.get("t") == topic
        assert seen[0] == 1


async def test_acl_apis_without_an_authorizer_are_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for api_key, request, text in (
            (ApiKey.CREATE_ACLS, CreateAclsRequest(creations=(READ,)), "No Authorizer is configured."),
            (ApiKey.DELETE_ACLS, DeleteAclsRequest(filters=(DeleteAclsFilter(),)), "No Authorizer is configured."),
            (ApiKey.DESCRIBE_ACLS, DescribeAclsRequest(), "No Authorizer is configured on the broker"),
        ):
            with pytest.raises(KafkaError, match=text) as refused:
                await node.ask(api_key, request, 3)
            assert refused.value.code == ErrorCode.SECURITY_DISABLED


async def test_each_acl_is_judged_alone_in_upstreams_words(database_url: str) -> None:
    wrong = {
        "The only valid name for the CLUSTER resource is kafka-cluster": like(READ, resource_type=4),
        "Invalid empty resource name": like(READ, resource_name=""),
        "Invalid resourceType ANY": like(READ, resource_type=1),
        "Invalid resourceType UNKNOWN": like(READ, resource_type=99),
        "Invalid patternType MATCH": like(READ, resource_pattern_type=2),
        "Invalid operation ANY": like(READ, operation=1),
        "Host pattern cannot be null or empty": like(READ, host=""),
        "Invalid CIDR notation '10.0.0.0/33': it must be an address, a slash and the length of a prefix": like(
            READ, host="10.0.0.0/33"
        ),
        "Invalid CIDR notation '10.0.0.1/0.0.0.0': it must be an address, a slash and the length of a prefix": like(
            READ, host="10.0.0.1/0.0.0.0"
        ),
        "Invalid permissionType ANY": like(READ, permission_type=1),
        "Could not parse principal from `alice` (no colon is present separating the principal type from the principal "
        "name)": like(READ, principal="alice"),
    }
    async with admin_node(database_url, authorizes=True) as node:
        assert await create(node, *wrong.values(), READ) == [*((INVALID, text) for text in wrong), (OK, "")]
        assert [each.resource_name for each in node.catalog.acls] == ["t"]
        unknown: list[dict[str, Any]] = [{"pattern_type_filter": 0}, {"operation": 99}, {}]
        assert await delete(node, *unknown) == [
            (INVALID, "Unknown patternFilter."),
            (INVALID, "Unknown entryFilter."),
            ["t"],
        ]


async def test_acls_are_bounded(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl_apis, "MAX_ACLS", 3)
    async with admin_node(database_url, authorizes=True) as node:
        some = [like(READ, resource_name=f"t{number}") for number in range(4)]
        full = (ErrorCode.POLICY_VIOLATION, "A cluster has at most 3 ACLs. Delete some first.")
        assert await create(node, *some) == [(OK, ""), (OK, ""), (OK, ""), full]
        assert await create(node, some[0], some[3]) == [(OK, ""), full]
        monkeypatch.setattr(acl_apis, "MAX_CHANGES", 2)
        with pytest.raises(KafkaError, match="Cannot remove more than 2 acls in a single delete operation"):
            await delete(node, {})
        assert len(node.catalog.acls) == 3


async def test_acls_that_no_answer_could_name_are_not_deleted(database_url: str) -> None:
    """Dispatch refuses an answer above its bound. A client would take the refusal for a deletion that was not made."""
    long = like(READ, resource_name="n" * 32_000, principal="User:" + "p" * 32_000)
    async with admin_node(database_url, authorizes=True) as node:
        count = MAX_ANSWER_BYTES // 96_000 + 1
        some = [like(long, host=f"{number:032000}") for number in range(count)]
        for start in range(0, count, 100):
            await create(node, *some[start : start + 100])
        with pytest.raises(KafkaError, match="Delete fewer of them") as refused:
            await delete(node, {})
        assert refused.value.code == ErrorCode.POLICY_VIOLATION
        assert len(node.catalog.acls) == count
        assert await delete(node, {"host_filter": some[0].host}, {"host_filter": some[1].host}) == [
            [long.resource_name],
            [long.resource_name],
        ]
        assert len(node.catalog.acls) == count - 2
