"""The ACLs of a cluster as a value: kept by what they are looked up by, and matched by filters.

The one idea: a check asks for the patterns that match one name, which are few, however many there are: the literal of
that name, the wildcard, and the prefixes of the name. Every prefix of a name is among the prefixes of the greatest one
that is not greater than the name.

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
"""What an operation that is allowed allows, too. One that is denied denies itself alone."""

_EVERY_BIT = sum(1 << operation for operation in AclOperation)


def bits_of(operation: int, permission: int) -> int:
    """The operations that an ACL is about, as a bit for each."""
    if operation == AclOperation.ALL:
        return _EVERY_BIT
    implied = _IMPLIES.get(AclOperation(operation), ()) if permission == Permission.ALLOW else ()
    return sum(1 << each for each in (operation, *implied))


Network = IPv4Network | IPv6Network

MAX_HOSTS_FOUND = 10_000
"""Addresses of which is remembered in which ranges they lie."""
SORTED_AT_ONCE = 2_000
"""Prefixes; about a millisecond, which nobody interrupts."""


class AclFilter(NamedTuple):
    """None: whatever it is. Types, operation and permission are codes, of which ANY is one."""

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
        """The one ACL that it can match; None: it may be several."""
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
"""Principal and host, as an ACL names them."""
_ANYBODY: _Who = (WILDCARD_PRINCIPAL, WILDCARD)


class _Rules:
    """Of one pattern: who is allowed and denied what."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        self.allowed: dict[_Who, int] = {}
        self.denied: dict[_Who, int] = {}

    def add(self, acl: Acl) -> None:
        of_permission = self.allowed if acl.permission == Permission.ALLOW else self.denied
        who = acl.principal, acl.host
        of_permission[who] = of_permission.get(who, 0) | bits_of(acl.operation, acl.permission)


class Hosts:
    """Those that ACLs name: addresses, and ranges of them in CIDR notation. It has each address of a range."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._ranges: dict[str, Network] = {}
        self._found: dict[str, tuple[str, ...]] = {}

    def add(self, host: str) -> None:
        self._named.add(host)
        network = network_of(host)
        if network is not None:
            self._ranges[host] = network

    def __contains__(self, host: object) -> bool:
        return host in self._named or (isinstance(host, str) and bool(self.ranges_of(host)))

    def ranges_of(self, host: str) -> tuple[str, ...]:
        """The ranges, as ACLs name them, in which the address lies."""
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


def network_of(host: str) -> Network | None:
    """The range that an ACL's host names; None: it is an address, or nothing that can be read. Bits behind the prefix
    do not matter, as upstream (CidrUtils)."""
    if "/" not in host:
        return None
    try:
        return ip_network(host, strict=False)
    except ValueError:
        return None


class _Patterns:
    """Of one type of resource."""

    def __init__(self) -> None:
        self.literal: defaultdict[str, _Rules] = defaultdict(_Rules)
        self.prefixed: defaultdict[str, _Rules] = defaultdict(_Rules)
        self.by_principal: defaultdict[str, list[Acl]] = defaultdict(list)
        self.hosts = Hosts()
        self._sorted: list[str] = []
        self._within: dict[str, str | None] = {}
        """Prefix → the longest other one that it begins with."""

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
    """Does not change once it is made."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        """No other ACLs of this process have it."""
        self._all: dict[Acl, None] = {}
        self._by_type: defaultdict[int, _Patterns] = defaultdict(_Patterns)

    @classmethod
    async def read(cls, stored: Iterable[Acl]) -> Acls:
        """As the catalog has them."""
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
        """Principals and hosts that ACLs of the type name: all others are answered alike."""
        patterns = self._by_type.get(kind)
        return ((), ()) if patterns is None else (patterns.by_principal, patterns.hosts)

    def decide(self, principal: str, host: str, operation: AclOperation, kind: ResourceType, name: str) -> bool | None:
        """Whether the ACLs of the resource allow it; None: it has none, of whomever. What is denied is denied, however
        many ACLs allow it."""
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
        """Whether some resource of the type can be thought of for which ACLs allow exactly this operation, or all, and
        none denies it (KIP-679). Mirrors upstream's Authorizer.authorizeByResourceType."""
        patterns = self._by_type.get(kind)
        if patterns is None:
            return False
        hosts = {host, WILDCARD, *patterns.hosts.ranges_of(host)}
        denied: dict[int, set[str]] = {PatternType.LITERAL: set(), PatternType.PREFIXED: set()}
        allowed: list[Acl] = []
        for named in {principal, WILDCARD_PRINCIPAL}:
            async for acl in in_pieces(patterns.by_principal.get(named, ())):
                if acl.host not in hosts or acl.operation not in (operation, AclOperation.ALL):
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
