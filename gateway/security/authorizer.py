"""Whether somebody may do something: super users, ACLs, and what holds where there are none.

The one idea: a decision is a function of a principal, its host, an operation and a resource. What it is asked for, and
what is answered to whom is refused, is the APIs' business (`gateway/apis/permissions.py`).

Mirrors upstream's StandardAuthorizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog

from gateway.net.context import ConnectionInfo, RequestContext
from gateway.operate.loggers import FINEST
from gateway.security.acls import Acls
from gateway.security.kinds import CLUSTER_NAME, AclOperation, PatternType, ResourceType
from protocol.errors import ErrorCode, KafkaError

logger = structlog.get_logger(__name__)
"""By upstream's name `kafka.authorizer.logger` its level is set, too. What is allowed it tells at DEBUG."""

MAX_LINES_PER_S = 10
"""Refusals that are told of in the log; the metric has all of them."""
MAX_NAME_SHOWN = 249
"""A topic's longest; other names may have 32 KiB."""

_HARDCODED = "hardcode"
"""Any name, as upstream asks for it."""


class Describing:
    """Who may describe which topic by one set of ACLs, for whoever asks of many (`gateway.coordinator.cluster`)."""

    def __init__(self, acls: Acls, super_users: frozenset[str], *, allow_everyone: bool) -> None:
        self.acls = acls
        self._super_users = super_users
        self._allow_everyone = allow_everyone

    def like(self, principal: str, host: str) -> tuple[str, str] | None:
        """Principal and host of all who are answered as these are: "" where no ACL names it. None: who may describe
        every topic."""
        if principal in self._super_users:
            return None
        principals, hosts = self.acls.named(ResourceType.TOPIC)
        host = host.removeprefix("/")
        return principal if principal in principals else "", host if host in hosts else ""

    def allows(self, reader: tuple[str, str], topic: str) -> bool:
        decided = self.acls.decide(*reader, AclOperation.DESCRIBE, ResourceType.TOPIC, topic)
        return self._allow_everyone if decided is None else decided


_NOBODYS = frozenset({ResourceType.USER, ResourceType.DELEGATION_TOKEN})
"""Without ACLs these are nobody's, whatever else is everybody's: who may make tokens for a user is that user.
Upstream's authorizer makes no difference."""


class Authorizer:
    """Of one node. `acls`: those in force."""

    def __init__(self, acls: Callable[[], Acls], super_users: frozenset[str], *, allow_everyone: bool) -> None:
        """`super_users`: principals as `User:name`. `allow_everyone`: whether a resource without any ACL is
        everybody's; but no user and no delegation token is."""
        self._acls = acls
        self._super_users = super_users
        self._allow_everyone = allow_everyone
        self.denied: Callable[[ResourceType, AclOperation], object] = lambda kind, operation: None
        """Told of each refusal of something that was asked for."""
        self._describing = Describing(Acls(), super_users, allow_everyone=allow_everyone)
        self._second = 0
        self._lines = 0

    @property
    def acls(self) -> Acls:
        """Another object when one has changed."""
        return self._acls()

    def allows(self, who: ConnectionInfo, operation: AclOperation, kind: ResourceType, name: str) -> bool:
        """Told to nobody."""
        principal = str(who.principal)
        if principal in self._super_users:
            return True
        decided = self._acls().decide(principal, host_of(who), operation, kind, name)
        if decided is None:
            return self._allow_everyone and kind not in _NOBODYS
        return decided

    def describing(self) -> Describing:
        """By the ACLs in force; another object when one has changed."""
        acls = self._acls()
        if self._describing.acls is not acls:
            self._describing = Describing(acls, self._super_users, allow_everyone=self._allow_everyone)
        return self._describing

    async def allows_one_of(self, who: ConnectionInfo, operation: AclOperation, kind: ResourceType) -> bool:
        """Whether it is allowed for any resource of the type."""
        if self.allows(who, operation, kind, _HARDCODED):
            return True
        return await self._acls().allow_one_of(str(who.principal), host_of(who), operation, kind)

    def refused(self, context: RequestContext, operation: AclOperation, kind: ResourceType, name: str) -> None:
        """Counts and tells."""
        self.denied(kind, operation)
        second = int(time.monotonic())
        if second != self._second:
            if self._lines > MAX_LINES_PER_S:
                logger.info("more denied", times=self._lines - MAX_LINES_PER_S)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_S:
            logger.info("denied", **_asked(context, operation, kind, name))


def _asked(context: RequestContext, operation: AclOperation, kind: ResourceType, name: str) -> dict[str, str]:
    """As a line of the log says it."""
    return {
        "principal": str(context.connection.principal),
        "operation": operation.name,
        "host": host_of(context.connection),
        "resource": f"{kind.name}:{PatternType.LITERAL.name}:{name[:MAX_NAME_SHOWN]}",
        "request": context.api_key.name,
    }


def host_of(who: ConnectionInfo) -> str:
    """The peer's address as an ACL names it."""
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
"""What is answered, with upstream's text."""


def may(
    context: RequestContext,
    operation: AclOperation,
    kind: ResourceType,
    name: str = CLUSTER_NAME,
    *,
    told: bool = True,
) -> bool:
    """Whether the connection's principal may. `told`: a refusal is counted and logged; not where all there are of a
    kind are listed, or where another permission does as well."""
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


def require(context: RequestContext, operation: AclOperation, kind: ResourceType, name: str = CLUSTER_NAME) -> None:
    """Raises KafkaError."""
    if not may(context, operation, kind, name):
        raise refusal_of(kind)


def may_topic(context: RequestContext, operation: AclOperation, name: str, *, told: bool = True) -> bool:
    return may(context, operation, ResourceType.TOPIC, name, told=told)
