"""Changes of SCRAM credentials that are accepted or refused, by upstream's rules and in upstream's words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.security.scram import ScramMechanism, salted_password
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from protocol.messages.describe_user_scram_credentials import DescribeUserScramCredentialsRequest, UserName
from tests.gateway.admin import AdminNode, admin_node

TWICE = "A user credential cannot be altered twice in the same request"
ABSENT = "Attempt to delete a user credential that does not exist"


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[AdminNode]:
    async with admin_node(database_url) as made:
        yield made


def upsertion(name: str, mechanism: int = 1, iterations: int = 4096, **more: Any) -> ScramCredentialUpsertion:
    given = {"salt": b"salt", "salted_password": b"salted", **more}
    return ScramCredentialUpsertion(name=name, mechanism=mechanism, iterations=iterations, **given)


def deletion(name: str, mechanism: int = 1) -> ScramCredentialDeletion:
    return ScramCredentialDeletion(name=name, mechanism=mechanism)


async def alter(node: AdminNode, *changes: Any) -> dict[str, tuple[ErrorCode, str | None]]:
    """Alter credentials; return the results by user, each of which occurs once in the answer."""
    request = AlterUserScramCredentialsRequest(
        deletions=tuple(change for change in changes if isinstance(change, ScramCredentialDeletion)),
        upsertions=tuple(change for change in changes if isinstance(change, ScramCredentialUpsertion)),
    )
    results = (await node.ask(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, request, 0)).results
    told = {result.user: (ErrorCode(result.error_code), result.error_message) for result in results}
    assert len(told) == len(results)
    return told


async def describe(node: AdminNode, *names: str) -> dict[str, Any]:
    request = DescribeUserScramCredentialsRequest(users=tuple(UserName(name=name) for name in names) or None)
    answer = await node.ask(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, request, 0)
    assert (answer.error_code, answer.error_message) == (0, None)
    return {
        result.user: [(info.mechanism, info.iterations) for info in result.credential_infos]
        if not result.error_code
        else (ErrorCode(result.error_code), result.error_message)
        for result in answer.results
    }


async def test_credentials_are_stored_described_and_deleted(node: AdminNode) -> None:
    assert await describe(node) == {}
    fine = (ErrorCode.NONE, None)
    assert await alter(node, upsertion("ann"), upsertion("ben", 2, 16_384)) == {"ann": fine, "ben": fine}
    assert await alter(node, upsertion("ann", 2, 8_000)) == {"ann": fine}
    assert await describe(node) == {"ann": [(1, 4096), (2, 8_000)], "ben": [(2, 16_384)]}
    assert await alter(node, deletion("ann", 2), upsertion("ben", 2, 5_000)) == {"ann": fine, "ben": fine}
    assert await describe(node, "ben", "ann", "eve") == {
        "ann": [(1, 4096)],
        "ben": [(2, 5_000)],
        "eve": (
            ErrorCode.RESOURCE_NOT_FOUND,
            "Attempt to describe a user credential that does not exist: eve",
        ),
    }
    assert await describe(node, "ann", "ann") == {
        "ann": (
            ErrorCode.DUPLICATE_RESOURCE,
            "Cannot describe SCRAM credentials for the same user twice in a single request: ann",
        )
    }


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (upsertion(""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (deletion(""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (upsertion("x", 0), ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (upsertion("x", 3), ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (deletion("x", 3), ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (upsertion("x", 1, 4095), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        (upsertion("x", 1, 16_385), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations"),
        (deletion("x"), ErrorCode.RESOURCE_NOT_FOUND, ABSENT),
        (upsertion("x" * 1025), ErrorCode.UNACCEPTABLE_CREDENTIAL, "A username has at most 1024 bytes"),
        (upsertion("x", salt=bytes(1025)), ErrorCode.UNACCEPTABLE_CREDENTIAL, "A salt has at most 1024 bytes"),
        (
            upsertion("x", salted_password=b""),
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            "A salted password has 1 to 1024 bytes",
        ),
    ],
)
async def test_invalid_change_is_refused_and_the_others_apply(
    node: AdminNode, change: Any, code: ErrorCode, message: str
) -> None:
    told = await alter(node, change, upsertion("fine"))
    assert told == {change.name: (code, message), "fine": (ErrorCode.NONE, None)}
    assert await describe(node) == {"fine": [(1, 4096)]}


@pytest.mark.parametrize(
    "changes",
    [
        (upsertion("ann", 1, 5_000), upsertion("ann", 2, 5_000)),
        (deletion("ann"), upsertion("ann", 1, 5_000)),
        (deletion("ann"), deletion("ann")),
        (deletion("ann"), deletion("ann"), upsertion("ann", 1, 5_000)),
    ],
)
async def test_user_named_twice_is_not_changed(node: AdminNode, changes: tuple[Any, ...]) -> None:
    await alter(node, upsertion("ann"))
    assert await alter(node, *changes) == {"ann": (ErrorCode.DUPLICATE_RESOURCE, TWICE)}
    assert await describe(node) == {"ann": [(1, 4096)]}


async def test_no_password_is_stored(node: AdminNode) -> None:
    salted = salted_password(ScramMechanism.SHA_256, "pencil", b"salt", 4096)
    await alter(node, upsertion("ann", salted_password=salted))
    (row,) = await node.database.cold.fetch("select * from sluice.scram_credential")
    assert salted not in row.values()
    found = await node.services.users.credential("ann", 1)
    assert found is not None
    assert repr(found.stored_key) not in repr(found)


async def test_number_of_users_is_bounded(node: AdminNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.apis.admin.scram_credentials.MAX_USERS", 2)
    assert (await alter(node, upsertion("ann"), upsertion("ben")))["ben"][0] == ErrorCode.NONE
    assert (await alter(node, upsertion("eve")))["eve"][0] == ErrorCode.POLICY_VIOLATION
    assert set(await describe(node)) == {"ann", "ben"}
    assert (await alter(node, upsertion("ann", iterations=8192)))["ann"][0] == ErrorCode.NONE, "nobody is added"
