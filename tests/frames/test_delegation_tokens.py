"""Delegation tokens: who may create, describe, renew and expire one, and authentication with one."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest

from gateway.security.kinds import AclOperation as Op
from gateway.security.kinds import PatternType, Permission, ResourceType
from protocol.errors import ErrorCode
from protocol.messages.create_acls import AclCreation, CreateAclsRequest
from protocol.messages.create_delegation_token import CreatableRenewers, CreateDelegationTokenRequest
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.describe_delegation_token import DescribeDelegationTokenOwner, DescribeDelegationTokenRequest
from protocol.messages.expire_delegation_token import ExpireDelegationTokenRequest
from protocol.messages.metadata import MetadataRequest
from protocol.messages.renew_delegation_token import RenewDelegationTokenRequest
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from storage.pool import SESSION_SETTINGS
from tests.conftest import gateways
from tests.gateway_process import GatewayFactory
from tests.postgres import Databases
from tests.secured import AUTHORIZER, ScramClient, Secured, authenticate, plain_token, start_secured
from tests.steps.waiting import until
from tests.wire import WireClient

KEY = "secret-of-this-cluster"
USERS = ("root", "alice", "bob", "carol", "dave")
DAY_MS, WEEK_MS = 86_400_000, 604_800_000
JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required " + " ".join(
    f'user_{user}="{user}-secret"' for user in USERS
)
SETTINGS = {
    "listener.name.asking.plain.sasl.jaas.config": f"{JAAS};",
    "delegation.token.secret.key": KEY,
}
HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
BY_TOKEN = ",tokenauth=true"
NOT_ALLOWED = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
NOT_FOUND = ErrorCode.DELEGATION_TOKEN_NOT_FOUND
MISMATCH = ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
EXPIRED = ErrorCode.DELEGATION_TOKEN_EXPIRED
UNAUTHORIZED = ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED
GENERIC = "Authentication failed during authentication due to invalid credentials with SASL mechanism "


@pytest.fixture(scope="module")
def secured(postgres: Databases) -> Iterator[Secured]:
    with gateways(postgres) as factory:
        yield start_secured(factory, {**SETTINGS, **AUTHORIZER, "super.users": "User:root"})


@contextlib.asynccontextmanager
async def known(secured: Secured, user: str) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(secured.sasl) as client:
        assert (await authenticate(client, plain_token(user, f"{user}-secret"))).error_code == 0
        yield client


async def create(
    client: WireClient, *renewers: str, owner: str | None = None, lifetime_ms: int = -1, version: int = 3
) -> Any:
    owner_type, owner_name = (None, None) if owner is None else owner.split(":")
    pairs = [renewer.split(":") for renewer in renewers]
    asked = CreateDelegationTokenRequest(
        owner_principal_type=owner_type,
        owner_principal_name=owner_name,
        renewers=tuple(CreatableRenewers(principal_type=kind, principal_name=name) for kind, name in pairs),
        max_lifetime_ms=lifetime_ms,
    )
    return await client.send(asked, version)


async def describe(client: WireClient, *owners: str, version: int = 3) -> dict[str, Any]:
    """Return the tokens by id. If no owner is named, return the tokens of all owners."""
    asked = tuple(
        DescribeDelegationTokenOwner(principal_type=kind, principal_name=name)
        for kind, name in (owner.split(":") for owner in owners)
    )
    answer = await client.send(DescribeDelegationTokenRequest(owners=asked or None), version)
    assert answer.error_code == 0
    return {token.token_id: token for token in answer.tokens}


async def renew(client: WireClient, hmac: bytes, period_ms: int = -1) -> Any:
    return await client.send(RenewDelegationTokenRequest(hmac=hmac, renew_period_ms=period_ms), 2)


async def expire(client: WireClient, hmac: bytes, period_ms: int = -1) -> Any:
    return await client.send(ExpireDelegationTokenRequest(hmac=hmac, expiry_time_period_ms=period_ms), 2)


async def log_in(
    client: WireClient, token: Any, mechanism: str = "SCRAM-SHA-256", extensions: str = BY_TOKEN
) -> tuple[int, str | None, int]:
    """Authenticate. Return the error code, the message and the session's lifetime in milliseconds."""
    password = base64.b64encode(token.hmac).decode()
    exchange = ScramClient(HASHES[mechanism], token.token_id, password, extensions=extensions)
    answer = await authenticate(client, exchange.first, mechanism=mechanism)
    if not answer.error_code:
        answer = await client.send(SaslAuthenticateRequest(auth_bytes=exchange.final(answer.auth_bytes)), 2)
    if not answer.error_code:
        assert answer.auth_bytes == exchange.expected
    return answer.error_code, answer.error_message, answer.session_lifetime_ms


async def connected(secured: Secured) -> WireClient:
    return await WireClient.connect(secured.sasl)


async def run_sql(secured: Secured, sql: str, *values: Any) -> list[Any]:
    connection = await asyncpg.connect(secured.gateway.database_url, server_settings=dict(SESSION_SETTINGS))
    try:
        return await connection.fetch(sql, *values)
    finally:
        await connection.close()


# --- creating, describing, renewing, expiring -------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_token_is_created_and_shown_to_its_owner(secured: Secured, version: int) -> None:
    async with known(secured, "alice") as alice:
        made = await create(alice, "User:bob", "User:bob", version=version)
        assert made.error_code == 0
        assert (made.principal_type, made.principal_name) == ("User", "alice")
        assert made.expiry_timestamp_ms == made.issue_timestamp_ms + DAY_MS
        assert made.max_timestamp_ms == made.issue_timestamp_ms + WEEK_MS
        assert len(made.token_id) == 22
        assert len(made.hmac) == 64
        (told,) = (await describe(alice, "User:alice", version=version)).values()
        assert (told.token_id, told.hmac) == (made.token_id, made.hmac)
        assert (told.principal_type, told.principal_name) == ("User", "alice")
        assert [(each.principal_type, each.principal_name) for each in told.renewers] == [("User", "bob")]
        assert (told.issue_timestamp, told.expiry_timestamp, told.max_timestamp) == (
            made.issue_timestamp_ms,
            made.expiry_timestamp_ms,
            made.max_timestamp_ms,
        )
        requester = ("User", "alice") if version == 3 else ("", "")
        for answer in (made, told):
            told_of = (answer.token_requester_principal_type, answer.token_requester_principal_name)
            assert told_of == requester
        ended = await expire(alice, made.hmac)
        assert ended.error_code == 0
        assert made.issue_timestamp_ms <= ended.expiry_timestamp_ms < made.expiry_timestamp_ms
        assert await describe(alice) == {}


async def test_a_renewer_renews_and_others_do_not(secured: Secured) -> None:
    async with known(secured, "alice") as alice, known(secured, "bob") as bob, known(secured, "carol") as carol:
        made = await create(alice, "User:bob", lifetime_ms=10_000_000)
        assert made.expiry_timestamp_ms == made.max_timestamp_ms == made.issue_timestamp_ms + 10_000_000
        assert set(await describe(bob)) == {made.token_id}
        assert await describe(carol) == {}
        for ask in (renew, expire):
            assert (await ask(carol, made.hmac)).error_code == MISMATCH
            assert (await ask(bob, made.hmac[:-1])).error_code == NOT_FOUND
            assert (await ask(bob, b"")).error_code == NOT_FOUND
        shortened = await expire(bob, made.hmac, 60_000)
        assert 0 <= shortened.expiry_timestamp_ms - made.issue_timestamp_ms - 60_000 < 30_000
        (told,) = (await describe(bob)).values()
        assert told.expiry_timestamp == shortened.expiry_timestamp_ms
        renewed = await renew(bob, made.hmac, 120_000)
        assert 0 <= renewed.expiry_timestamp_ms - made.issue_timestamp_ms - 120_000 < 30_000
        for period_ms in (-1, 2**63 - 1):
            renewed = await renew(alice, made.hmac, period_ms)
            assert renewed.expiry_timestamp_ms == made.max_timestamp_ms, "never longer than it can be"
        assert (await expire(alice, made.hmac, 2**63 - 1)).expiry_timestamp_ms == made.max_timestamp_ms
        assert (await expire(bob, made.hmac)).error_code == 0
        for ask in (renew, expire):
            assert (await ask(alice, made.hmac)).error_code == NOT_FOUND


async def test_an_expired_token_can_be_removed_and_nothing_else(secured: Secured) -> None:
    async with known(secured, "alice") as alice:
        made = await create(alice)
        await run_sql(secured, "update delegation_token set expires_ms = 1 where token_id = $1", made.token_id)
        assert (await renew(alice, made.hmac)).error_code == EXPIRED
        assert (await expire(alice, made.hmac, 0)).error_code == EXPIRED
        async with await connected(secured) as client:
            assert (await log_in(client, made))[:2] == (
                ErrorCode.SASL_AUTHENTICATION_FAILED,
                GENERIC + "SCRAM-SHA-256",
            )
        assert (await expire(alice, made.hmac)).error_code == 0
        assert await describe(alice) == {}


async def test_renewals_are_bounded_by_the_settings(gateway_factory: GatewayFactory) -> None:
    bounds = {"delegation.token.max.lifetime.ms": "5000000", "delegation.token.expiry.time.ms": "1000000"}
    secured = start_secured(gateway_factory, {**SETTINGS, **bounds})
    async with known(secured, "alice") as alice:
        made = await create(alice, lifetime_ms=2**63 - 1)
        issued_ms = made.issue_timestamp_ms
        assert (made.expiry_timestamp_ms, made.max_timestamp_ms) == (issued_ms + 1_000_000, issued_ms + 5_000_000)
        renewed = await renew(alice, made.hmac, 3_000_000)
        assert 0 <= renewed.expiry_timestamp_ms - made.expiry_timestamp_ms < 60_000
        configs = await alice.send(
            DescribeConfigsRequest(resources=(DescribeConfigsResource(resource_type=4, resource_name="1"),)), 4
        )
        (shown,) = (each for each in configs.results[0].configs if each.name == "delegation.token.secret.key")
        assert (shown.value, shown.is_sensitive) == (None, True)


# --- clients that may use the APIs ------------------------------------------------------------------------------------


async def codes(client: WireClient) -> list[int]:
    """Send one request of each of the four token APIs, and return the error codes."""
    described = await client.send(DescribeDelegationTokenRequest(owners=None), 3)
    answers = [await create(client), await renew(client, b""), await expire(client, b""), described]
    return [answer.error_code for answer in answers]


async def test_anonymous_and_token_authenticated_clients_are_refused(secured: Secured) -> None:
    async with await WireClient.connect(secured.open) as client:
        assert await codes(client) == [NOT_ALLOWED] * 4
    async with known(secured, "alice") as alice:
        made = await create(alice)
        async with await connected(secured) as client:
            assert (await log_in(client, made))[0] == 0
            assert await codes(client) == [NOT_ALLOWED] * 4
        await expire(alice, made.hmac)


async def test_tokens_are_disabled_without_a_secret_key(gateway_factory: GatewayFactory) -> None:
    for key in ({}, {"delegation.token.secret.key": ""}):
        secured = start_secured(gateway_factory, {**SETTINGS, "delegation.token.secret.key": "", **key})
        async with known(secured, "alice") as alice:
            assert await codes(alice) == [ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED] * 4


async def test_types_of_principals_and_lengths(secured: Secured) -> None:
    async with known(secured, "root") as root, known(secured, "alice") as alice:
        assert (await create(alice, "Group:bob")).error_code == ErrorCode.INVALID_PRINCIPAL_TYPE
        assert (await create(root, owner="Group:alice")).error_code == ErrorCode.INVALID_PRINCIPAL_TYPE
        too_much = ErrorCode.POLICY_VIOLATION
        assert (await create(alice, *(f"User:{number}" for number in range(51)))).error_code == too_much
        assert (await create(alice, f"User:{'x' * 1_025}")).error_code == too_much
        assert (await create(alice, *(f"User:{number}{'x' * 1_000}" for number in range(5)))).error_code == too_much
        assert (await create(root, owner=f"User:{'x' * 1_025}")).error_code == too_much
        assert await describe(root) == {}
        assert (await alice.send(DescribeDelegationTokenRequest(owners=()), 3)).tokens == ()


def on(operation: Op, kind: ResourceType, name: str) -> AclCreation:
    return AclCreation(
        resource_type=kind,
        resource_name=name,
        resource_pattern_type=PatternType.LITERAL,
        principal="User:carol",
        host="*",
        operation=operation,
        permission_type=Permission.ALLOW,
    )


async def test_token_for_another_principal_needs_permission(secured: Secured) -> None:
    """KIP-373: creating a token for another principal needs a permission. KIP-48: so does describing one token."""
    async with (
        known(secured, "root") as root,
        known(secured, "carol") as carol,
        known(secured, "dave") as dave,
    ):
        assert (await create(carol, owner="User:dave")).error_code == UNAUTHORIZED

        async def allow(*acls: AclCreation) -> None:
            answer = await root.send(CreateAclsRequest(creations=acls), 3)
            assert [each.error_code for each in answer.results] == [0] * len(acls)

        await allow(on(Op.CREATE_TOKENS, ResourceType.USER, "User:dave"))
        made = await create(carol, owner="User:dave")
        assert (made.error_code, made.principal_name, made.token_requester_principal_name) == (0, "dave", "carol")
        (told,) = (await describe(carol)).values()
        assert (told.principal_name, told.token_requester_principal_name) == ("dave", "carol")
        assert (await renew(carol, made.hmac)).error_code == MISMATCH, "it is dave's"
        own = await create(dave)
        assert set(await describe(dave)) == {made.token_id, own.token_id}
        assert set(await describe(carol)) == {made.token_id}
        await allow(on(Op.DESCRIBE, ResourceType.DELEGATION_TOKEN, own.token_id))
        assert set(await describe(carol, "User:dave")) == {made.token_id, own.token_id}
        third = await create(dave)
        assert set(await describe(carol, "User:dave")) == {made.token_id, own.token_id}
        await allow(on(Op.DESCRIBE_TOKENS, ResourceType.USER, "User:dave"))
        assert set(await describe(carol)) == {made.token_id, own.token_id, third.token_id}
        assert set(await describe(carol, "User:carol")) == {made.token_id}
        assert await describe(carol, "Group:dave") == {}
        async with await connected(secured) as client:
            assert (await log_in(client, made))[0] == 0
        for token in (made, own, third):
            assert (await expire(dave, token.hmac)).error_code == 0


# --- authentication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", sorted(HASHES))
async def test_client_authenticated_by_token_acts_as_its_owner(secured: Secured, mechanism: str) -> None:
    refused = (ErrorCode.SASL_AUTHENTICATION_FAILED, GENERIC + mechanism)
    async with known(secured, "root") as root, known(secured, "alice") as alice:
        topic = f"of-root-{mechanism.lower()}"
        for owner, sees in ((root, True), (alice, False)):
            made = await create(owner)
            async with await connected(secured) as client:
                code, _, lifetime_ms = await log_in(client, made, mechanism, ",other=1,tokenauth=TRUE")
                assert code == 0
                assert DAY_MS - 60_000 < lifetime_ms <= DAY_MS
                asked = MetadataRequest(topics=None, include_topic_authorized_operations=True)
                assert (await client.send(asked, 12)).brokers
                answer = await client.send(DescribeConfigsRequest(resources=(cluster_configs(),)), 4)
                assert (answer.results[0].error_code == 0) is sees, topic
            for extensions in ("", ",tokenauth=false", ",tokenauth=yes"):
                async with await connected(secured) as client:
                    assert (await log_in(client, made, mechanism, extensions))[:2] == refused, "a user of that name"
            for wrong in (bytes(64), made.hmac[::-1], b""):
                async with await connected(secured) as client:
                    other = type(made)(**{**fields_of(made), "hmac": wrong})
                    assert (await log_in(client, other, mechanism))[:2] == refused
            async with await connected(secured) as client:
                nobody = type(made)(**{**fields_of(made), "token_id": "nobody"})
                assert (await log_in(client, nobody, mechanism))[:2] == refused
            await expire(owner, made.hmac)
            async with await connected(secured) as client:
                assert (await log_in(client, made, mechanism))[:2] == refused


def cluster_configs() -> DescribeConfigsResource:
    return DescribeConfigsResource(resource_type=4, resource_name="1", configuration_keys=("num.partitions",))


def fields_of(made: Any) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


async def test_unknown_token_is_answered_like_an_existing_one(secured: Secured) -> None:
    """A client may not learn from the first answer which tokens exist."""
    async with known(secured, "alice") as alice:
        made = await create(alice)
        shapes: dict[str, set[Any]] = {}
        for token_id in (made.token_id, "nobody"):
            for _ in range(2):
                async with await connected(secured) as client:
                    exchange = ScramClient("sha256", token_id, "x", extensions=BY_TOKEN)
                    answer = await authenticate(client, exchange.first, mechanism="SCRAM-SHA-256")
                    said = dict(part.split("=", 1) for part in answer.auth_bytes.decode().split(","))
                    shapes.setdefault(token_id, set()).add((said["s"], said["i"]))
        assert [len(shape) for shape in shapes.values()] == [1, 1], "the same salt each time"
        (here,), (nowhere,) = shapes.values()
        assert (len(here[0]), here[1]) == (len(nowhere[0]), nowhere[1])
        await expire(alice, made.hmac)


async def test_a_session_ends_with_its_token(secured: Secured) -> None:
    async with known(secured, "alice") as alice:
        made = await create(alice, lifetime_ms=1_500)
        async with await connected(secured) as client:
            code, _, lifetime_ms = await log_in(client, made)
            assert code == 0
            assert 0 < lifetime_ms <= 1_500
            assert (await client.send(MetadataRequest(topics=()), 12)).brokers
            with pytest.raises(TimeoutError):
                await client.closed_by_peer(seconds=1.6)
            client.send_only(MetadataRequest(topics=()), 12)
            await client.closed_by_peer()
        await expire(alice, made.hmac)


async def test_the_shorter_limit_of_a_session_counts(gateway_factory: GatewayFactory) -> None:
    secured = start_secured(gateway_factory, {**SETTINGS, "connections.max.reauth.ms": "60000"})
    async with known(secured, "alice") as alice:
        made, short = await create(alice), await create(alice, lifetime_ms=30_000)
        for token, limit_ms in ((made, 60_000), (short, 30_000)):
            async with await connected(secured) as client:
                code, _, lifetime_ms = await log_in(client, token)
                assert code == 0
                assert limit_ms - 20_000 < lifetime_ms <= limit_ms


async def test_reauthentication_by_token_must_keep_the_principal(secured: Secured) -> None:
    async with known(secured, "alice") as alice, known(secured, "bob") as bob:
        first, again, other = await create(alice), await create(alice), await create(bob)
        async with await connected(secured) as client:
            assert (await log_in(client, first))[0] == 0
            assert (await log_in(client, again))[0] == 0
        async with await connected(secured) as client:
            assert (await log_in(client, first))[0] == 0
            code, message, _ = await log_in(client, other)
            assert code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert message == "Cannot change principals during re-authentication from User.alice: User.bob"
        for owner, token in ((alice, first), (alice, again), (bob, other)):
            await expire(owner, token.hmac)


# --- nodes ------------------------------------------------------------------------------------------------------------


async def test_token_is_valid_for_one_cluster_and_one_key(gateway_factory: GatewayFactory) -> None:
    one = start_secured(gateway_factory, SETTINGS)
    url = one.gateway.database_url
    same = start_secured(gateway_factory, SETTINGS, database_url=url)
    changed = start_secured(gateway_factory, {**SETTINGS, "delegation.token.secret.key": "another"}, database_url=url)
    async with known(one, "alice") as alice, known(same, "alice") as there, known(changed, "alice") as elsewhere:
        made = await create(alice)
        assert set(await describe(there)) == {made.token_id}
        assert (await renew(there, made.hmac)).error_code == 0
        async with await connected(same) as client:
            assert (await log_in(client, made))[0] == 0
        assert await describe(elsewhere) == {}
        assert (await renew(elsewhere, made.hmac)).error_code == NOT_FOUND
        async with await connected(changed) as client:
            assert (await log_in(client, made))[0] == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert (await expire(there, made.hmac)).error_code == 0
        async with await connected(one) as client:
            assert (await log_in(client, made))[0] == ErrorCode.SASL_AUTHENTICATION_FAILED


async def test_token_secret_is_neither_stored_nor_logged(gateway_factory: GatewayFactory) -> None:
    secured = start_secured(gateway_factory, SETTINGS)
    async with known(secured, "alice") as alice:
        made = await create(alice, "User:bob")
        async with await connected(secured) as client:
            await log_in(client, made)
        await renew(alice, made.hmac)
        (row,) = await run_sql(secured, "select d::text from delegation_token d")
        await expire(alice, made.hmac, 60_000)
    password = base64.b64encode(made.hmac).decode()
    for text in (row[0], secured.gateway.log_tail()):
        for secret in (KEY, made.hmac.hex(), password):
            assert secret not in text
    assert hashlib.sha256(made.hmac).hexdigest() in row[0]


async def test_expired_tokens_are_removed(gateway_factory: GatewayFactory) -> None:
    secured = start_secured(gateway_factory, {**SETTINGS, "delegation.token.expiry.check.interval.ms": "50"})
    async with known(secured, "alice") as alice:
        stays = await create(alice)
        gone = await create(alice, lifetime_ms=1)
        await until(lambda: describe(alice), "one token stays", holds=lambda found: set(found) == {stays.token_id})
        assert (await expire(alice, gone.hmac)).error_code == NOT_FOUND
