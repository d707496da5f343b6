"""DescribeClientQuotas and AlterClientQuotas, on a real Postgres."""

from __future__ import annotations

import math
import random
import string
from dataclasses import replace
from typing import Any

import pytest

from gateway.quotas.limits import Limit, QuotaKey
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.alter_client_quotas import AlterClientQuotasRequest, EntityData, EntryData, OpData
from protocol.messages.describe_client_quotas import ComponentData, DescribeClientQuotasRequest
from tests.gateway.admin import AdminNode, admin_node

OK, INVALID = ErrorCode.NONE, ErrorCode.INVALID_REQUEST
EXACT, DEFAULT, ANY = 0, 1, 2
Names = dict[str, str | None]


def entry(names: Names, **values: float | None) -> EntryData:
    """Return a quota's entry; the value None deletes the quota."""
    return EntryData(
        entity=tuple(EntityData(entity_type=kind, entity_name=name) for kind, name in names.items()),
        ops=tuple(
            OpData(key=key, value=0.0 if value is None else value, remove=value is None)
            for key, value in values.items()
        ),
    )


async def alter(node: AdminNode, *entries: EntryData, version: int = 1, **given: Any) -> list[tuple[int, str | None]]:
    asked = AlterClientQuotasRequest(entries=entries, **given)
    answer = await node.ask(ApiKey.ALTER_CLIENT_QUOTAS, asked, version)
    assert [each.entity for each in answer.entries] == [each.entity for each in entries]
    return [(each.error_code, each.error_message) for each in answer.entries]


async def described(
    node: AdminNode, *components: ComponentData, strict: bool = False, version: int = 1
) -> list[tuple[Names, dict[str, float]]]:
    asked = DescribeClientQuotasRequest(components=components, strict=strict)
    answer = await node.ask(ApiKey.DESCRIBE_CLIENT_QUOTAS, asked, version)
    assert (answer.error_code, answer.error_message) == (OK, None)
    return [
        (
            {part.entity_type: part.entity_name for part in each.entity},
            {value.key: value.value for value in each.values},
        )
        for each in answer.entries
    ]


def component(kind: str, how: int, match: str | None = None) -> ComponentData:
    return ComponentData(entity_type=kind, match_type=how, match=match)


@pytest.mark.parametrize("version", range(2))
async def test_quotas_are_set_changed_and_deleted_on_every_node(database_url: str, version: int) -> None:
    names: Names = {"user": "u", "client-id": None}
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        asked = entry(names, producer_byte_rate=1000.0, request_percentage=12.5)
        assert await alter(node, asked, version=version) == [(OK, None)]
        for each in (node, other):
            await each.catalog.refresh_if_changed()
            limit = each.catalog.quotas.limit("u", "any", QuotaKey.PRODUCER_BYTE_RATE)
            assert limit == Limit(1000.0, ("u", "any"))
            found = await described(each, version=version)
            assert found == [(names, {"producer_byte_rate": 1000.0, "request_percentage": 12.5})]
        assert await alter(node, entry(names, producer_byte_rate=None, request_percentage=1.0)) == [(OK, None)]
        assert await described(node) == [(names, {"request_percentage": 1.0})]
        assert await alter(node, entry(names, request_percentage=None, consumer_byte_rate=None)) == [(OK, None)]
        assert await described(node) == []


async def test_quotas_survive_a_restart(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await alter(node, entry({"client-id": "=*"}, consumer_byte_rate=5.0))
    async with admin_node(database_url) as node:
        await node.catalog.refresh_if_changed()
        assert await described(node) == [({"client-id": "=*"}, {"consumer_byte_rate": 5.0})]


async def test_quota_filter_selects_entities(database_url: str) -> None:
    everybody: list[Names] = [
        {"user": "u"},
        {"user": None},
        {"user": "u", "client-id": "c"},
        {"user": "u", "client-id": None},
        {"client-id": "c"},
        {"client-id": None},
    ]
    async with admin_node(database_url) as node:
        assert await alter(node, *(entry(names, request_percentage=1.0) for names in everybody)) == [(OK, None)] * 6

        async def found(*components: ComponentData, strict: bool = False) -> list[int]:
            return sorted(everybody.index(names) for names, _ in await described(node, *components, strict=strict))

        assert await found() == [0, 1, 2, 3, 4, 5]
        assert await found(strict=True) == []
        assert await found(component("user", EXACT, "u")) == [0, 2, 3]
        assert await found(component("user", EXACT, "u"), strict=True) == [0]
        assert await found(component("user", DEFAULT)) == [1]
        assert await found(component("user", ANY)) == [0, 1, 2, 3]
        assert await found(component("client-id", ANY), strict=True) == [4, 5]
        assert await found(component("user", EXACT, "u"), component("client-id", DEFAULT)) == [3]
        assert await found(component("user", EXACT, "nobody")) == []
        assert await found(component("client-id", EXACT, "c"), component("user", ANY), strict=True) == [2]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (entry({}, request_percentage=1.0), "Invalid empty client quota entity"),
        (entry({"planet": "earth"}, request_percentage=1.0), "Unhandled client quota entity type: planet"),
        (entry({"user": ""}, request_percentage=1.0), "Empty user not supported"),
        (entry({"user": "u"}, speed=1.0), "Invalid configuration key speed"),
        (entry({"user": "u"}, speed=None), "Invalid configuration key speed"),
        (entry({"user": "u"}, producer_byte_rate=1.5), "producer_byte_rate cannot be a fractional value."),
        (entry({"user": "u"}, producer_byte_rate=0.0), "Quota producer_byte_rate must be greater than 0"),
        (
            entry({"user": "u"}, consumer_byte_rate=1e30),
            "Proposed value for consumer_byte_rate is too large for a LONG.",
        ),
        (entry({"user": "u"}, connection_creation_rate=1.0), "Invalid configuration key connection_creation_rate"),
        (entry({"ip": "10.0.0.1"}, request_percentage=1.0), "Invalid configuration key request_percentage"),
        (entry({"ip": "10.0.0"}, connection_creation_rate=1.0), "10.0.0 is not a valid IP or resolvable host."),
        (
            entry({"ip": "::1"}, connection_creation_rate=2.0**31),
            "Proposed value for connection_creation_rate is too large for an INT.",
        ),
        (
            entry({"ip": "::1", "user": "u"}, connection_creation_rate=1.0),
            "Invalid quota entity combination, an ip stands for itself alone.",
        ),
        (entry({"user": "u"}, request_percentage=float("nan")), "Configuration request_percentage is no number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_invalid_quota_is_refused_beside_a_valid_one(database_url: str, asked: EntryData, message: str) -> None:
    good = entry({"client-id": "c"}, request_percentage=1.0)
    async with admin_node(database_url) as node:
        assert await alter(node, asked, good) == [(INVALID, message), (OK, None)]
        assert await described(node) == [({"client-id": "c"}, {"request_percentage": 1.0})]


async def test_validate_only_request_changes_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        assert await alter(node, entry({"user": "u"}, request_percentage=1.0), validate_only=True) == [(OK, None)]
        assert await described(node) == []


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ((component("planet", ANY),), ErrorCode.UNSUPPORTED_VERSION),
        ((component("", ANY),), INVALID),
        ((component("user", ANY), component("user", DEFAULT)), INVALID),
        ((component("user", 3),), INVALID),
        ((component("user", EXACT),), INVALID),
        ((component("user", DEFAULT, "u"),), INVALID),
        ((component("user", ANY, "u"),), INVALID),
        ((component("ip", ANY), component("user", ANY)), INVALID),
        ((component("client-id", EXACT, "c"), component("ip", DEFAULT)), INVALID),
    ],
)
async def test_quota_filter_that_kafka_refuses_is_refused(
    database_url: str, components: tuple[ComponentData, ...], code: ErrorCode
) -> None:
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError) as refused:
            await described(node, *components)
        assert refused.value.code is code
        assert refused.value.message


async def test_addresses_have_quotas_of_their_own(database_url: str) -> None:
    own, default = (
        entry({"ip": "10.0.0.1"}, connection_creation_rate=7.0),
        entry({"ip": None}, connection_creation_rate=9.0),
    )
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        assert await alter(node, own, default, entry({"user": "u"}, request_percentage=1.0)) == [(OK, None)] * 3
        await other.catalog.refresh_if_changed()
        assert [other.catalog.quotas.connections_from(each) for each in ("10.0.0.1", "10.0.0.2")] == [7.0, 9.0]
        key = "connection_creation_rate"
        assert await described(other, component("ip", EXACT, "10.0.0.1")) == [({"ip": "10.0.0.1"}, {key: 7.0})]
        assert await described(other, component("ip", DEFAULT)) == [({"ip": None}, {key: 9.0})]
        assert len(await described(other, component("ip", ANY), strict=True)) == 2
        assert await alter(node, entry({"ip": "10.0.0.1"}, **{key: None})) == [(OK, None)]
        await other.catalog.refresh_if_changed()
        assert other.catalog.quotas.connections_from("10.0.0.1") == 9.0


async def test_number_of_quotas_is_bounded(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.apis.admin.client_quotas.MAX_ENTITIES", 3)
    first, *others = (entry({"client-id": name}, request_percentage=1.0) for name in "abcd")
    refused = (ErrorCode.POLICY_VIOLATION, "At most 3 entities may have quotas. Delete some first.")
    async with admin_node(database_url) as node:
        assert await alter(node, first, others[0]) == [(OK, None)] * 2
        assert await alter(node, *others[1:]) == [(OK, None), refused]
        assert await alter(node, first) == [(OK, None)], "who has some may have others"
        assert await alter(node, entry({"client-id": "a"}, request_percentage=None)) == [(OK, None)]
        assert await alter(node, others[2]) == [(OK, None)]


async def test_infinite_quota_limits_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        assert await alter(node, entry({"user": "u"}, request_percentage=math.inf)) == [(OK, None)]
        assert node.catalog.quotas.limit("u", "c", QuotaKey.REQUEST_PERCENTAGE) == Limit(math.inf, ("u", None))
        assert await described(node) == [({"user": "u"}, {"request_percentage": math.inf})]


async def test_entity_named_twice_is_refused_beside_another(database_url: str) -> None:
    first, second = (entry({"user": "u", "client-id": None}, request_percentage=value) for value in (1.0, 2.0))
    second = replace(second, entity=second.entity[::-1])
    other = entry({"user": "u"}, request_percentage=3.0)
    twice = (INVALID, "Each entity must appear at most once.")
    async with admin_node(database_url) as node:
        assert await alter(node, first, second, other) == [twice, twice, (OK, None)]
        assert await described(node) == [({"user": "u"}, {"request_percentage": 3.0})]


async def test_name_that_no_client_has_is_refused(database_url: str) -> None:
    long = "".join(random.Random(1).choices(string.ascii_letters, k=30_000))
    other = entry({"user": "u"}, request_percentage=1.0)
    refused = (INVALID, "A name has at most 1024 bytes.")
    async with admin_node(database_url) as node:
        assert await alter(node, entry({"user": long}, request_percentage=1.0), other) == [refused, (OK, None)]
        assert await alter(node, entry({"user": long}, request_percentage=None)) == [(OK, None)]
