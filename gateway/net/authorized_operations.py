"""Which operations a client may be told it has on a resource: the sets that Kafka knows, and who has them.

The one idea: one place says it, for Metadata, DescribeCluster and DescribeGroups alike. Without an
authorizer everyone has every operation that the resource has (upstream's AclEntry.supportedOperations).
"""

from __future__ import annotations

from enum import Enum

from gateway.net.context import RequestContext
from gateway.security.kinds import CLUSTER_NAME as CLUSTER
from gateway.security.kinds import AclOperation, ResourceType

NOT_ASKED = -(2**31)
"""What stands in an answer where nobody asked for the operations."""

__all__ = ["CLUSTER", "NOT_ASKED", "AclOperation", "Resource", "authorized_operations"]


class Resource(Enum):
    """A kind of resource, with the operations that it has."""

    TOPIC = "READ WRITE CREATE DELETE ALTER DESCRIBE DESCRIBE_CONFIGS ALTER_CONFIGS"
    GROUP = "READ DELETE DESCRIBE DESCRIBE_CONFIGS ALTER_CONFIGS"
    CLUSTER = "CREATE ALTER DESCRIBE CLUSTER_ACTION DESCRIBE_CONFIGS ALTER_CONFIGS IDEMPOTENT_WRITE"

    @property
    def operations(self) -> frozenset[AclOperation]:
        return frozenset(AclOperation[name] for name in self.value.split())


_ALL = {resource: sum(1 << operation for operation in resource.operations) for resource in Resource}


def authorized_operations(resource: Resource, name: str, context: RequestContext, *, asked: bool) -> int:
    """The bit field of what the connection's principal may do to the resource of that name. Of the cluster nothing,
    where it may not describe it."""
    if not asked:
        return NOT_ASKED
    authorizer = context.services.authorizer
    if authorizer is None:
        return _ALL[resource]
    who, kind = context.connection, ResourceType[resource.name]
    if resource is Resource.CLUSTER and not authorizer.allows(who, AclOperation.DESCRIBE, kind, name):
        authorizer.refused(context, AclOperation.DESCRIBE, kind, name)
        return 0
    return sum(1 << each for each in resource.operations if authorizer.allows(who, each, kind, name))
