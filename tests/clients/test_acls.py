"""librdkafka's admin client creates ACLs, and they permit or refuse its producer and consumer."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false
# The type stubs of these client libraries are incomplete, or belong to an older release.

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.clients.acls import ME, TIMEOUT_S, delivered
from tests.clients.topics import create_topic
from tests.conftest import gateways
from tests.gateway_process import GatewayProcess
from tests.postgres import Databases
from tests.secured import AUTHORIZER


@pytest.fixture(scope="module")
def guarded(postgres: Databases) -> Iterator[GatewayProcess]:
    """A gateway that permits every client to use a resource without ACLs. Otherwise no client could create the first
    ACL.
    """
    with gateways(postgres) as start:
        yield start({**AUTHORIZER, "allow.everyone.if.no.acl.found": "true"})


def binding(
    kind: ResourceType, name: str, operation: AclOperation, permission: AclPermissionType = AclPermissionType.ALLOW
) -> AclBinding:
    return AclBinding(kind, name, ResourcePatternType.LITERAL, ME, "*", operation, permission)


def add(admin: AdminClient, *bindings: AclBinding) -> None:
    for future in admin.create_acls(list(bindings)).values():
        future.result(TIMEOUT_S)


def consumed(bootstrap: str, topic: str, group: str) -> bytes | int:
    """Return the first record, or the code of the error that the client reports instead."""
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        error = message.error()
        return message.value() or b"" if error is None else error.code()
    finally:
        consumer.close()


def test_acls_are_created_described_and_deleted(guarded: GatewayProcess) -> None:
    admin = AdminClient({"bootstrap.servers": guarded.bootstrap})
    name = f"acl-{uuid.uuid4().hex[:12]}"
    made = [binding(ResourceType.TOPIC, name, each) for each in (AclOperation.READ, AclOperation.WRITE)]
    add(admin, *made)
    asked = AclBindingFilter(
        ResourceType.ANY, name, ResourcePatternType.MATCH, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    assert set(admin.describe_acls(asked).result(TIMEOUT_S)) == set(made)
    for future in admin.delete_acls([asked]).values():
        assert set(future.result(TIMEOUT_S)) == set(made)
    assert admin.describe_acls(asked).result(TIMEOUT_S) == []


def test_acl_requests_without_an_authorizer_are_refused(gateway: GatewayProcess) -> None:
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    with pytest.raises(KafkaException) as refused:
        add(admin, binding(ResourceType.TOPIC, "t", AclOperation.READ))
    assert refused.value.args[0].code() == KafkaError.SECURITY_DISABLED
    assert refused.value.args[0].str() == "No Authorizer is configured."


def test_a_refused_client_is_permitted_after_an_acl_is_created(guarded: GatewayProcess) -> None:
    bootstrap = guarded.bootstrap
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topic, group = create_topic(bootstrap, 1), f"group-{uuid.uuid4().hex[:12]}"
    add(admin, binding(ResourceType.TOPIC, topic, AclOperation.DESCRIBE))
    error = delivered(bootstrap, topic)
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert consumed(bootstrap, topic, group) == KafkaError.TOPIC_AUTHORIZATION_FAILED
    add(admin, *(binding(ResourceType.TOPIC, topic, each) for each in (AclOperation.READ, AclOperation.WRITE)))
    assert delivered(bootstrap, topic) is None
    denied = binding(ResourceType.GROUP, group, AclOperation.READ, AclPermissionType.DENY)
    add(admin, binding(ResourceType.GROUP, group, AclOperation.READ), denied)
    assert consumed(bootstrap, topic, group) == KafkaError.GROUP_AUTHORIZATION_FAILED
    asked = AclBindingFilter(
        ResourceType.GROUP,
        group,
        ResourcePatternType.LITERAL,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.DENY,
    )
    for future in admin.delete_acls([asked]).values():
        assert future.result(TIMEOUT_S) == [denied]
    assert consumed(bootstrap, topic, group) == b"value"
