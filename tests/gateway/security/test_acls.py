"""Decisions by ACLs, and which ACLs a filter matches. The results are compared with a direct implementation of
upstream's rules.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.net.context import ConnectionInfo, Principal
from gateway.security.acls import MAX_HOSTS_FOUND, AclFilter, Acls, Hosts
from gateway.security.authorizer import Authorizer
from gateway.security.kinds import AclOperation as Op
from gateway.security.kinds import PatternType, Permission, ResourceType
from storage.types import Acl

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = Permission.ALLOW, Permission.DENY
ALICE, HOST = "User:alice", "10.0.0.1"


def acl(
    operation: Op,
    name: str = "t",
    *,
    kind: ResourceType = TOPIC,
    pattern: PatternType = LITERAL,
    principal: str = ALICE,
    host: str = "*",
    permission: Permission = ALLOW,
) -> Acl:
    return Acl(kind, pattern, name, principal, host, operation, permission)


async def decide(*acls: Acl, operation: Op = Op.READ, name: str = "t", host: str = HOST) -> bool | None:
    return (await Acls.read(acls)).decide(ALICE, host, operation, TOPIC, name)


@pytest.mark.parametrize(
    ("acls", "decided"),
    [
        ((), None),
        ((acl(Op.READ),), True),
        ((acl(Op.ALL),), True),
        ((acl(Op.WRITE),), False),
        ((acl(Op.READ, "other"),), None),
        ((acl(Op.READ, kind=GROUP),), None),
        ((acl(Op.READ, "*"),), True),
        ((acl(Op.READ, "*", pattern=PREFIXED),), None),
        ((acl(Op.READ, "t", pattern=PREFIXED),), True),
        ((acl(Op.READ, principal="User:bob"),), False),
        ((acl(Op.READ, principal="User:*"),), True),
        ((acl(Op.READ, principal="Group:alice"),), False),
        ((acl(Op.READ, host=HOST),), True),
        ((acl(Op.READ, host="10.0.0.2"),), False),
        ((acl(Op.READ, host="10.0.0.0/24"),), True),
        ((acl(Op.READ, host="10.0.0.77/24"),), True),
        ((acl(Op.READ, host="10.0.0.2/31"),), False),
        ((acl(Op.READ, host="0.0.0.0/0", principal="User:*"),), True),
        ((acl(Op.READ, host="::/0"),), False),
        ((acl(Op.READ, host="10.0.0.0/99"),), False),
        ((acl(Op.READ), acl(Op.READ, host="10.0.0.0/8", permission=DENY)), False),
        ((acl(Op.READ), acl(Op.READ, permission=DENY)), False),
        ((acl(Op.READ), acl(Op.ALL, "*", principal="User:*", permission=DENY)), False),
        ((acl(Op.READ), acl(Op.READ, permission=DENY, host="10.0.0.2")), True),
        ((acl(Op.READ), acl(Op.DESCRIBE, permission=DENY)), True),
    ],
)
async def test_acl_decision_follows_upstreams_examples(acls: tuple[Acl, ...], decided: bool | None) -> None:
    assert await decide(*acls) is decided


@pytest.mark.parametrize("operation", [Op.READ, Op.WRITE, Op.DELETE, Op.ALTER])
async def test_allowed_operation_implies_describe(operation: Op) -> None:
    assert await decide(acl(operation), operation=Op.DESCRIBE) is True
    assert await decide(acl(operation), operation=Op.DESCRIBE_CONFIGS) is False
    assert await decide(acl(Op.DESCRIBE), acl(operation, permission=DENY), operation=Op.DESCRIBE) is True


async def test_alter_configs_implies_describe_configs() -> None:
    assert await decide(acl(Op.ALTER_CONFIGS), operation=Op.DESCRIBE_CONFIGS) is True
    assert await decide(acl(Op.ALTER_CONFIGS), operation=Op.DESCRIBE) is False
    assert await decide(acl(Op.CREATE), operation=Op.DESCRIBE) is False


async def test_nested_prefixes_all_apply() -> None:
    some = await Acls.read([acl(Op.READ, name, pattern=PREFIXED) for name in ("a", "aa", "ab", "abc", "b")])
    asked = {"a": 1, "aa": 1, "aaa": 1, "ab": 1, "abb": 1, "abcd": 1, "ac": 1, "b": 1, "c": 0, "": 0}
    assert {name: some.decide(ALICE, HOST, Op.READ, TOPIC, name) for name in asked} == {
        name: True if found else None for name, found in asked.items()
    }
    more = await Acls.read([acl(Op.READ, "ab", pattern=PREFIXED), acl(Op.READ, "a", pattern=PREFIXED, permission=DENY)])
    assert more.decide(ALICE, HOST, Op.READ, TOPIC, "abz") is False, "denied by the shorter one"


# --- super users, and resources without ACLs --------------------------------------------------------------------------


def who(name: str) -> ConnectionInfo:
    return ConnectionInfo("c", f"/{HOST}", principal=Principal(name))


async def test_ranges_of_addresses_of_version_6() -> None:
    rule = acl(Op.READ, host="2001:db8::/32")
    assert await decide(rule, host="2001:db8:0:1::7") is True
    assert await decide(rule, host="2001:db9::7") is False
    assert await decide(rule, host="no address") is False


@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "0:0::0001"])
async def test_an_address_of_version_6_counts_in_every_spelling(host: str) -> None:
    allowed, denied = acl(Op.WRITE, host=host), acl(Op.WRITE, host=host, permission=DENY)
    assert await decide(allowed, operation=Op.WRITE, host="::1") is True
    assert await decide(acl(Op.WRITE), denied, operation=Op.WRITE, host="::1") is False
    assert await decide(acl(Op.WRITE), denied, operation=Op.WRITE, host="::2") is True
    acls = await Acls.read((acl(Op.WRITE), acl(Op.WRITE, host=host, permission=DENY)))
    assert not await acls.allow_one_of(ALICE, "::1", Op.WRITE, TOPIC)
    _, hosts = acls.named(TOPIC)
    assert "::1" in hosts


async def test_address_range_allows_any_resource_of_a_type() -> None:
    acls = await Acls.read((acl(Op.WRITE, host="10.0.0.0/24"),))
    assert await acls.allow_one_of(ALICE, HOST, Op.WRITE, TOPIC)
    assert not await acls.allow_one_of(ALICE, "10.0.1.1", Op.WRITE, TOPIC)


async def test_an_address_within_a_range_is_not_answered_as_one_that_no_acl_names() -> None:
    acls = await Acls.read((acl(Op.DESCRIBE, host="10.0.0.0/24"),))
    _, hosts = acls.named(TOPIC)
    assert HOST in hosts
    assert "10.0.1.1" not in hosts


def test_addresses_that_are_remembered_for_ranges_have_a_bound() -> None:
    hosts = Hosts()
    hosts.add("10.0.0.0/8")
    for number in range(MAX_HOSTS_FOUND + 1):
        assert hosts.ranges_of(f"10.0.{number >> 8}.{number & 255}") == ("10.0.0.0/8",)
    kept = hosts._found  # noqa: SLF001 - what is remembered shows in nothing but memory
    assert len(kept) <= MAX_HOSTS_FOUND


async def test_super_user_is_allowed_and_resource_without_acl_follows_the_setting() -> None:
    acls = await Acls.read([acl(Op.READ, principal="User:root", permission=DENY)])
    for allow_everyone in (False, True):
        authorizer = Authorizer(lambda: acls, frozenset({"User:root"}), allow_everyone=allow_everyone)
        assert authorizer.allows(who("root"), Op.READ, TOPIC, "t")
        assert not authorizer.allows(who("alice"), Op.READ, TOPIC, "t"), "there are ACLs, of others"
        assert authorizer.allows(who("alice"), Op.READ, TOPIC, "other") is allow_everyone


@pytest.mark.parametrize(
    ("acls", "allowed"),
    [
        ((), False),
        ((acl(Op.WRITE),), True),
        ((acl(Op.ALL),), True),
        ((acl(Op.READ),), False),
        ((acl(Op.WRITE, principal="User:bob"),), False),
        ((acl(Op.WRITE, host="10.0.0.2"),), False),
        ((acl(Op.WRITE), acl(Op.WRITE, permission=DENY)), False),
        ((acl(Op.WRITE), acl(Op.WRITE, "*", permission=DENY)), False),
        ((acl(Op.WRITE, "*"), acl(Op.WRITE, "*", permission=DENY)), False),
        ((acl(Op.WRITE, "*"), acl(Op.WRITE, "t", permission=DENY)), True),
        ((acl(Op.WRITE, "topic"), acl(Op.WRITE, "t", pattern=PREFIXED, permission=DENY)), False),
        ((acl(Op.WRITE, "topic"), acl(Op.WRITE, "tx", pattern=PREFIXED, permission=DENY)), True),
        ((acl(Op.WRITE, "t", pattern=PREFIXED), acl(Op.WRITE, "t", permission=DENY)), True),
        ((acl(Op.WRITE, "to", pattern=PREFIXED), acl(Op.ALL, "t", pattern=PREFIXED, permission=DENY)), False),
        ((acl(Op.WRITE, kind=GROUP),), False),
    ],
)
async def test_any_resource_of_a_type_is_allowed_by_upstreams_rule(acls: tuple[Acl, ...], allowed: bool) -> None:
    found = await Acls.read(acls)
    authorizer = Authorizer(lambda: found, frozenset(), allow_everyone=False)
    assert await authorizer.allows_one_of(who("alice"), Op.WRITE, TOPIC) is allowed


# --- against upstream's rules, one ACL after the other ------------------------------------------------------------

NAMES = st.text("ab*", min_size=1, max_size=4)
ACLS = st.builds(
    Acl,
    st.sampled_from([TOPIC, GROUP]),
    st.sampled_from([LITERAL, PREFIXED]),
    NAMES,
    st.sampled_from([ALICE, "User:bob", "User:*"]),
    st.sampled_from([HOST, "10.0.0.2", "*"]),
    st.sampled_from([Op.ALL, Op.READ, Op.WRITE, Op.ALTER, Op.DESCRIBE, Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS]),
    st.sampled_from([ALLOW, DENY]),
)
ALLOW_IMPLIES = {
    Op.DESCRIBE: {Op.DESCRIBE, Op.READ, Op.WRITE, Op.DELETE, Op.ALTER},
    Op.DESCRIBE_CONFIGS: {Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS},
}


def naive(acls: list[Acl], operation: Op, name: str) -> bool | None:
    of_resource = [
        each
        for each in acls
        if each.resource_type == TOPIC
        and (
            name.startswith(each.resource_name) if each.pattern_type == PREFIXED else each.resource_name in (name, "*")
        )
    ]
    if not of_resource:
        return None
    results = set()
    for each in of_resource:
        if each.principal not in (ALICE, "User:*") or each.host not in (HOST, "*"):
            continue
        implied = ALLOW_IMPLIES.get(operation, {operation}) if each.permission == ALLOW else {operation}
        if each.operation == Op.ALL or each.operation in implied:
            results.add(each.permission)
    return ALLOW in results and DENY not in results


@given(st.lists(ACLS, max_size=30), st.sampled_from([Op.READ, Op.WRITE, Op.DESCRIBE, Op.DESCRIBE_CONFIGS]), NAMES)
@settings(max_examples=500, deadline=None)
async def test_decision_equals_a_walk_over_all_acls(acls: list[Acl], operation: Op, name: str) -> None:
    assert (await Acls.read(acls)).decide(ALICE, HOST, operation, TOPIC, name) is naive(acls, operation, name)


# --- filters ------------------------------------------------------------------------------------------------------

ANYTHING = AclFilter(1, 1, None, None, None, 1, 1)


@pytest.mark.parametrize(
    ("changed", "matches"),
    [
        ({}, True),
        ({"resource_type": TOPIC}, True),
        ({"resource_type": GROUP}, False),
        ({"principal": ALICE}, True),
        ({"principal": "User:*"}, False),
        ({"host": "*"}, True),
        ({"host": HOST}, False),
        ({"operation": Op.READ}, True),
        ({"operation": Op.DESCRIBE}, False),
        ({"permission": ALLOW}, True),
        ({"permission": DENY}, False),
        ({"resource_name": "top"}, True),
        ({"resource_name": "topic"}, False),
        ({"resource_name": "top", "pattern_type": PREFIXED}, True),
        ({"resource_name": "top", "pattern_type": LITERAL}, False),
        ({"resource_name": "topic", "pattern_type": PatternType.MATCH}, True),
        ({"resource_name": "to", "pattern_type": PatternType.MATCH}, False),
    ],
)
def test_filter_matches_its_acls(changed: dict[str, object], matches: bool) -> None:
    asked = ANYTHING._replace(**changed)  # type: ignore[arg-type]
    assert asked.matches(acl(Op.READ, "top", pattern=PREFIXED)) is matches


def test_a_name_matches_its_literal_and_the_wildcard() -> None:
    asked = ANYTHING._replace(resource_name="t", pattern_type=PatternType.MATCH)
    assert [asked.matches(acl(Op.READ, name)) for name in ("t", "*", "tt")] == [True, True, False]


def test_a_filter_of_one_acl_alone() -> None:
    one = acl(Op.READ)
    asked = AclFilter(one.resource_type, one.pattern_type, "t", ALICE, "*", one.operation, one.permission)
    assert asked.only == one
    for field, value in ANYTHING._asdict().items():
        assert asked._replace(**{field: value}).only is None


@pytest.mark.parametrize("code", [0, 99, -1])
def test_unknown_codes_are_refused(code: int) -> None:
    assert ANYTHING.knows_its_pattern
    assert ANYTHING.knows_its_entry
    assert not ANYTHING._replace(resource_type=code).knows_its_pattern
    assert not ANYTHING._replace(pattern_type=code).knows_its_pattern
    assert not ANYTHING._replace(operation=code).knows_its_entry
    assert not ANYTHING._replace(permission=code).knows_its_entry
