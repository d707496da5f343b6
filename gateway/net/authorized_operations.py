"""Which operations a client may be told it has on a resource: the sets that Kafka knows, and who has them.

The one idea: one place says it, for Metadata, DescribeCluster and DescribeGroups alike. There is no authorizer, so
everyone has every operation that the resource has (upstream's AclEntry.supportedOperations).
"""

from __future__ import annotations

from enum import Enum, IntEnum

from gateway.net.context import RequestContext

NOT_ASKED = -(2**31)
"""What stands in an answer where nobody asked for the operations."""


CLUSTER = "kafka-cluster"
"""The name of the one cluster resource."""


class AclOperation(IntEnum):
    """Upstream's AclOperation codes."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


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
    """The bit field of what the connection's principal may do to the resource of that name."""
    return _ALL[resource] if asked else NOT_ASKED
