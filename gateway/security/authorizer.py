"""Decide whether a principal may do something: super users, ACLs, and the rule for resources without ACLs.

The one idea: a decision is a function of a principal, its host, an operation and a resource. Which permission a request
needs, and how a refusal is answered, is the APIs' business (`gateway/apis/permissions.py`).

Mirrors upstream's StandardAuthorizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from gateway.net.context import ConnectionInfo, RequestContext
from gateway.operate.loggers import FINEST
from gateway.security.acls import Acls
from gateway.security.kinds import CLUSTER_NAME, AclOperation, PatternType, ResourceType
from protocol.errors import ErrorCode, KafkaError

logger = structlog.get_logger(__name__)
"""Logger with upstream's name, `kafka.authorizer.logger`, by which its level is set. Permitted requests are logged
at DEBUG."""

MAX_LINES_PER_S = 10
"""Maximal number of refusals logged per second; the metric counts all refusals."""
MAX_NAME_SHOWN = 249
"""Length of the longest topic name; other names may have 32 KiB."""

_HARDCODED = "hardcode"
"""Name of a resource that stands for any name, as in Kafka."""


class Describing:
    """Decide who may describe which topic by one set of ACLs, for callers that ask about many topics
    (`gateway.coordinator.cluster`)."""

    def __init__(self, acls: Acls, super_users: frozenset[str], *, allow_everyone: bool) -> None:
        self.acls = acls
        self._super_users = super_users
        self._allow_everyone = allow_everyone

    def like(self, principal: str, host: str) -> tuple[str, str] | None:
        """Return the principal and host that stand for all clients with the same answers. "" replaces a name that no
        ACL mentions. None: the client is a super user and may describe every topic."""
        if principal in self._super_users:
            return None
        principals, hosts = self.acls.named(ResourceType.TOPIC)
        host = host.removeprefix("/")
        return principal if principal in principals else "", host if host in hosts else ""

    def allows(self, reader: tuple[str, str], topic: str) -> bool:
        decided = self.acls.decide(*reader, AclOperation.DESCRIBE, ResourceType.TOPIC, topic)
        return self._allow_everyone if decided is None else decided


_NOBODYS = frozenset({ResourceType.USER, ResourceType.DELEGATION_TOKEN})
"""Types that stay closed without ACLs, even if `allow_everyone` opens all others: a client that may create tokens
for a user is that user. Upstream's authorizer does not make this exception."""


class Authorizer:
    """The authorizer of one node. `acls` returns the ACLs in force."""

    def __init__(
        self,
        acls: Callable[[], Acls],
        super_users: frozenset[str],
        *,
        allow_everyone: bool,
        denied: Callable[[ResourceType, AclOperation], object] = lambda _kind, _operation: None,
    ) -> None:
        """Take the super users, as `User:name`. `allow_everyone` opens each resource without any ACL to everyone,
        except users and delegation tokens. `denied` is called for each refusal of an operation that a client asked
        for."""
        self._acls = acls
        self._super_users = super_users
        self._allow_everyone = allow_everyone
        self._denied = denied
        self._describing = Describing(Acls(), super_users, allow_everyone=allow_everyone)
        self._second = 0
        self._lines = 0

    @property
    def acls(self) -> Acls:
        """ACLs in force: a new object after each change."""
        return self._acls()

    def allows(self, who: ConnectionInfo, operation: AclOperation, kind: ResourceType, name: str) -> bool:
        """Return whether the operation is allowed, without counting or logging the answer."""
        principal = str(who.principal)
        if principal in self._super_users:
            return True
        decided = self._acls().decide(principal, host_of(who), operation, kind, name)
        if decided is None:
            return self._allow_everyone and kind not in _NOBODYS
        return decided

    def describing(self) -> Describing:
        """Return the decisions by the ACLs in force: a new object after each change of the ACLs."""
        acls = self._acls()
        if self._describing.acls is not acls:
            self._describing = Describing(acls, self._super_users, allow_everyone=self._allow_everyone)
        return self._describing

    async def allows_one_of(self, who: ConnectionInfo, operation: AclOperation, kind: ResourceType) -> bool:
        """Return whether the operation is allowed on at least one resource of the type."""
        if self.allows(who, operation, kind, _HARDCODED):
            return True
        return await self._acls().allow_one_of(str(who.principal), host_of(who), operation, kind)

    def refused(self, context: RequestContext[object], operation: AclOperation, kind: ResourceType, name: str) -> None:
        """Count the refusal and log it."""
        self._denied(kind, operation)
        second = int(time.monotonic())
        if second != self._second:
            if self._lines > MAX_LINES_PER_S:
                logger.info("more denied", times=self._lines - MAX_LINES_PER_S)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_S:
            logger.info("denied", **_asked(context, operation, kind, name))


class HasAuthorizer(Protocol):
    @property
    def authorizer(self) -> Authorizer | None:
        """None: every client may do everything."""


def _asked(context: RequestContext[object], operation: AclOperation, kind: ResourceType, name: str) -> dict[str, str]:
    """Return the fields of the log line."""
    return {
        "principal": str(context.connection.principal),
        "operation": operation.name,
        "host": host_of(context.connection),
        "resource": f"{kind.name}:{PatternType.LITERAL.name}:{name[:MAX_NAME_SHOWN]}",
        "request": context.api_key.name,
    }


def host_of(who: ConnectionInfo) -> str:
    """Return the peer's address in the form that ACLs use."""
    return who.client_host.removeprefix("/")


# --- as handlers ask ----------------------------------------------------------------------------------------------

REFUSALS: Mapping[ResourceType, tuple[ErrorCode, str]] = {
    ResourceType.TOPIC: (ErrorCode.TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed."),
    ResourceType.GROUP: (ErrorCode.GROUP_AUTHORIZATION_FAILED, "Group authorization failed."),
    ResourceType.CLUSTER: (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "Cluster authorization failed."),
    ResourceType.TRANSACTIONAL_ID: (
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        "Transactional Id authorization failed.",
    ),
}
"""Error code of a refusal and upstream's text, by resource type."""


def may(
    context: RequestContext[HasAuthorizer],
    operation: AclOperation,
    kind: ResourceType,
    name: str = CLUSTER_NAME,
    *,
    told: bool = True,
) -> bool:
    """Return whether the connection's principal may do this. `told`: count and log a refusal. Callers switch it off
    if they list all resources of a kind, or if another permission suffices."""
    authorizer = context.services.authorizer
    if authorizer is None:
        return True
    if authorizer.allows(context.connection, operation, kind, name):
        if FINEST.is_debug:
            logger.debug("allowed", **_asked(context, operation, kind, name))
        return True
    if told:
        authorizer.refused(context, operation, kind, name)
    return False


def refusal_of(kind: ResourceType) -> KafkaError:
    return KafkaError(*REFUSALS[kind])


def require(
    context: RequestContext[HasAuthorizer], operation: AclOperation, kind: ResourceType, name: str = CLUSTER_NAME
) -> None:
    """Raise KafkaError if the connection's principal may not do this."""
    if not may(context, operation, kind, name):
        raise refusal_of(kind)


def may_topic(context: RequestContext[HasAuthorizer], operation: AclOperation, name: str, *, told: bool = True) -> bool:
    return may(context, operation, ResourceType.TOPIC, name, told=told)
