"""The ACLs of a cluster as a value: indexed by what checks look up, and matched by filters.

The one idea: a check reads only the patterns that match one name, and these are few, however many ACLs exist. They are
the literal of that name, the wildcard, and the prefixes of the name. Sort all prefixes and take the greatest that is
not greater than the name: every prefix of the name is that one or a prefix of it.

Mirrors upstream's StandardAuthorizerData, ResourcePatternFilter and AccessControlEntryFilter.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from enum import IntEnum
from heapq import merge
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from gateway.net.pieces import in_pieces
from gateway.security.kinds import WILDCARD, WILDCARD_PRINCIPAL, AclOperation, PatternType, Permission, ResourceType
from storage.types import Acl

_IMPLIES: Mapping[AclOperation, tuple[AclOperation, ...]] = {
    **dict.fromkeys(
        (AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE, AclOperation.ALTER), (AclOperation.DESCRIBE,)
    ),
    AclOperation.ALTER_CONFIGS: (AclOperation.DESCRIBE_CONFIGS,),
}
"""Operations that an allowed operation implies. A denied operation denies only itself."""

_EVERY_BIT = sum(1 << operation for operation in AclOperation)


def bits_of(operation: int, permission: int) -> int:
    """Return the operations that an ACL covers, as one bit each."""
    if operation == AclOperation.ALL:
        return _EVERY_BIT
    implied = _IMPLIES.get(AclOperation(operation), ()) if permission == Permission.ALLOW else ()
    return sum(1 << each for each in (operation, *implied))


Network = IPv4Network | IPv6Network

MAX_HOSTS_FOUND = 10_000
"""Maximal number of addresses for which the ranges that contain them are cached."""
SORTED_AT_ONCE = 2_000
"""Prefixes sorted in one piece: about a millisecond, in which no other task runs."""


class AclFilter(NamedTuple):
    """A filter of ACLs. None matches every value. Types, operation and permission are codes, including ANY."""

    resource_type: int
    pattern_type: int
    resource_name: str | None
    principal: str | None
    host: str | None
    operation: int
    permission: int

    @property
    def knows_its_pattern(self) -> bool:
        return _known(ResourceType, self.resource_type) and _known(PatternType, self.pattern_type)

    @property
    def knows_its_entry(self) -> bool:
        return _known(AclOperation, self.operation) and _known(Permission, self.permission)

    @property
    def only(self) -> Acl | None:
        """Return the only ACL that the filter can match. Return None if it may match several."""
        definite = self.pattern_type in (PatternType.LITERAL, PatternType.PREFIXED) and all(
            code > 1 for code in (self.resource_type, self.operation, self.permission)
        )
        if not definite or self.resource_name is None or self.principal is None or self.host is None:
            return None
        return Acl(
            self.resource_type,
            self.pattern_type,
            self.resource_name,
            self.principal,
            self.host,
            self.operation,
            self.permission,
        )

    def matches(self, acl: Acl) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (AclOperation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
            and self._matches_name(acl)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        if self.resource_name is None:
            return True
        if self.pattern_type != PatternType.MATCH:
            return self.resource_name == acl.resource_name
        if acl.pattern_type == PatternType.PREFIXED:
            return self.resource_name.startswith(acl.resource_name)
        return acl.resource_name in (self.resource_name, WILDCARD)


def _known(kind: type[IntEnum], code: int) -> bool:
    return code != 0 and code in frozenset(kind)


_Who = tuple[str, str]
"""Principal and host, in the notation of an ACL."""
_ANYBODY: _Who = (WILDCARD_PRINCIPAL, WILDCARD)


class _Rules:
    """Operations that the ACLs of one pattern allow and deny, by principal and host."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        self.allowed: dict[_Who, int] = {}
        self.denied: dict[_Who, int] = {}

    def add(self, acl: Acl) -> None:
        of_permission = self.allowed if acl.permission == Permission.ALLOW else self.denied
        who = acl.principal, spelled(acl.host)
        of_permission[who] = of_permission.get(who, 0) | bits_of(acl.operation, acl.permission)


class Hosts:
    """Hosts that ACLs name: addresses, and ranges in CIDR notation. Each address of a range is a member."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._ranges: dict[str, Network] = {}
        self._found: dict[str, tuple[str, ...]] = {}

    def add(self, host: str) -> None:
        self._named.add(spelled(host))
        network = network_of(host)
        if network is not None:
            self._ranges[host] = network

    def __contains__(self, host: object) -> bool:
        return host in self._named or (isinstance(host, str) and bool(self.ranges_of(host)))

    def ranges_of(self, host: str) -> tuple[str, ...]:
        """Return the host ranges that contain the address, as written in their ACLs."""
        if not self._ranges:
            return ()
        found = self._found.get(host)
        if found is None:
            if len(self._found) >= MAX_HOSTS_FOUND:
                self._found.clear()
            try:
                address = ip_address(host)
            except ValueError:
                found = ()
            else:
                found = tuple(name for name, network in self._ranges.items() if address in network)
            self._found[host] = found
        return found


def spelled(host: str) -> str:
    """Return an IPv6 address in the spelling of sockets. An ACL may have another spelling, such as 0:0:0:0:0:0:0:1 of
    Java. Return any other host unchanged."""
    try:
        return str(ip_address(host)) if ":" in host else host
    except ValueError:
        return host


def network_of(host: str) -> Network | None:
    """Return the range that an ACL's host names; None if the host is an address or unreadable. Bits behind the
    prefix are ignored, as upstream does (CidrUtils)."""
    if "/" not in host:
        return None
    try:
        return ip_network(host, strict=False)
    except ValueError:
        return None


class _Patterns:
    """Patterns of one resource type."""

    def __init__(self) -> None:
        self.literal: defaultdict[str, _Rules] = defaultdict(_Rules)
        self.prefixed: defaultdict[str, _Rules] = defaultdict(_Rules)
        self.by_principal: defaultdict[str, list[Acl]] = defaultdict(list)
        self.hosts = Hosts()
        self._sorted: list[str] = []
        self._within: dict[str, str | None] = {}
        """Prefix → the longest other prefix that it begins with."""

    def add(self, acl: Acl) -> None:
        (self.literal if acl.pattern_type == PatternType.LITERAL else self.prefixed)[acl.resource_name].add(acl)
        self.by_principal[acl.principal].append(acl)
        self.hosts.add(acl.host)

    async def arrange(self) -> None:
        prefixes = list(self.prefixed)
        starts = in_pieces(range(0, len(prefixes), SORTED_AT_ONCE))
        runs = [sorted(prefixes[start : start + SORTED_AT_ONCE]) async for start in starts]
        self._sorted = [prefix async for prefix in in_pieces(merge(*runs))]
        before: str | None = None
        async for prefix in in_pieces(self._sorted):
            while before is not None and not prefix.startswith(before):
                before = self._within[before]
            self._within[prefix] = before
            before = prefix

    def matching(self, name: str) -> Iterator[_Rules]:
        for literal in {name, WILDCARD}:
            if (rules := self.literal.get(literal)) is not None:
                yield rules
        at = bisect_right(self._sorted, name)
        prefix = self._sorted[at - 1] if at else None
        while prefix is not None:
            if name.startswith(prefix):
                yield self.prefixed[prefix]
            prefix = self._within[prefix]


_numbers = itertools.count()


class Acls:
    """An immutable set of ACLs."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        """Number unique to this set of ACLs within the process."""
        self._all: dict[Acl, None] = {}
        self._by_type: defaultdict[int, _Patterns] = defaultdict(_Patterns)

    @classmethod
    async def read(cls, stored: Iterable[Acl]) -> Acls:
        """Index the ACLs that the catalog holds."""
        acls = cls()
        async for acl in in_pieces(stored):
            acls._all[acl] = None
            acls._by_type[acl.resource_type].add(acl)
        for patterns in list(acls._by_type.values()):
            await patterns.arrange()
        return acls

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, acl: Acl) -> bool:
        return acl in self._all

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._all)

    def named(self, kind: ResourceType) -> tuple[Container[str], Container[str]]:
        """Return the principals and hosts that ACLs of the type name. All other clients get one and the same answer."""
        patterns = self._by_type.get(kind)
        return ((), ()) if patterns is None else (patterns.by_principal, patterns.hosts)

    def decide(self, principal: str, host: str, operation: AclOperation, kind: ResourceType, name: str) -> bool | None:
        """Return whether the ACLs of the resource allow the operation; None if the resource has no ACL for any
        principal. One deny outweighs every allow."""
        patterns = self._by_type.get(kind)
        if patterns is None:
            return None
        bit = 1 << operation
        ranges = patterns.hosts.ranges_of(host)
        whoever = [(principal, host), (principal, WILDCARD), (WILDCARD_PRINCIPAL, host), _ANYBODY]
        for name_of_range in ranges:
            whoever += [(principal, name_of_range), (WILDCARD_PRINCIPAL, name_of_range)]
        decided: bool | None = None
        for rules in patterns.matching(name):
            decided = decided or False
            for who in whoever:
                if rules.denied.get(who, 0) & bit:
                    return False
                if rules.allowed.get(who, 0) & bit:
                    decided = True
        return decided

    async def allow_one_of(self, principal: str, host: str, operation: AclOperation, kind: ResourceType) -> bool:
        """Return whether the operation could be allowed on at least one resource of the type, existing or not
        (KIP-679): an ACL allows exactly this operation, or ALL, and no ACL denies it there. Mirrors upstream's
        Authorizer.authorizeByResourceType."""
        patterns = self._by_type.get(kind)
        if patterns is None:
            return False
        hosts = {host, WILDCARD, *patterns.hosts.ranges_of(host)}
        denied: dict[int, set[str]] = {PatternType.LITERAL: set(), PatternType.PREFIXED: set()}
        allowed: list[Acl] = []
        for named in {principal, WILDCARD_PRINCIPAL}:
            async for acl in in_pieces(patterns.by_principal.get(named, ())):
                if spelled(acl.host) not in hosts or acl.operation not in (operation, AclOperation.ALL):
                    continue
                if acl.permission == Permission.ALLOW:
                    allowed.append(acl)
                else:
                    denied[acl.pattern_type].add(acl.resource_name)
        literals, prefixes = denied[PatternType.LITERAL], denied[PatternType.PREFIXED]
        lengths = {len(prefix) for prefix in prefixes}
        if WILDCARD in literals:
            return False
        async for acl in in_pieces(allowed):
            name = acl.resource_name
            if acl.pattern_type == PatternType.LITERAL and name == WILDCARD:
                return True
            if acl.pattern_type == PatternType.LITERAL and name in literals:
                continue
            if not any(name[:length] in prefixes for length in lengths if length <= len(name)):
                return True
        return False
