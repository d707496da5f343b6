"""The operations on a resource that an answer may show to a client: the sets that Kafka knows, and the permitted
subset.

The one idea: one place computes them, for Metadata, DescribeCluster and DescribeGroups alike. Without an authorizer
every client is permitted every operation of the resource (upstream's AclEntry.supportedOperations).
"""

from __future__ import annotations

from enum import Enum

from gateway.net.context import RequestContext
from gateway.security.authorizer import HasAuthorizer
from gateway.security.kinds import CLUSTER_NAME as CLUSTER
from gateway.security.kinds import AclOperation, ResourceType

NOT_ASKED = -(2**31)
"""The value in an answer if the client did not ask for the operations."""

__all__ = ["CLUSTER", "NOT_ASKED", "AclOperation", "Resource", "authorized_operations"]


class Resource(Enum):
    """A kind of resource and the operations that exist on it."""

    TOPIC = "READ WRITE CREATE DELETE ALTER DESCRIBE DESCRIBE_CONFIGS ALTER_CONFIGS"
    GROUP = "READ DELETE DESCRIBE DESCRIBE_CONFIGS ALTER_CONFIGS"
    CLUSTER = "CREATE ALTER DESCRIBE CLUSTER_ACTION DESCRIBE_CONFIGS ALTER_CONFIGS IDEMPOTENT_WRITE"

    @property
    def operations(self) -> frozenset[AclOperation]:
        return frozenset(AclOperation[name] for name in self.value.split())


_ALL = {resource: sum(1 << operation for operation in resource.operations) for resource in Resource}


def authorized_operations(resource: Resource, name: str, context: RequestContext[HasAuthorizer], *, asked: bool) -> int:
    """Return the bit field of the operations that the connection's principal may do on the named resource. If the
    principal may not describe the cluster, the field for the cluster is empty."""
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
