"""Kafka's codes for ACLs: operations, types of resources and of patterns, permissions.

The one idea: UNKNOWN stands for every unknown code. ANY matches everything, and occurs only in filters.
"""

from __future__ import annotations

from enum import IntEnum

CLUSTER_NAME = "kafka-cluster"
"""The one resource of type CLUSTER."""

WILDCARD = "*"
"""Every name in a literal pattern, and every host."""
WILDCARD_PRINCIPAL = "User:*"


class AclOperation(IntEnum):
    """Codes of operations, as in Kafka."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
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
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class ResourceType(IntEnum):
    """Upstream's codes."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """Upstream's codes. An ACL has one of the last two."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """Upstream's AclPermissionType."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3
