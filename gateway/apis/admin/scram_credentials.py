"""DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554).

The one idea: a client sends its password salted, and only proofs of it are stored. Each user is changed or refused
alone. As upstream, a request may contain one change per user, of any mechanism.

Mirrors upstream's ScramControlManager and ScramImage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from gateway.apis.services import HasUsers
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.scram import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism, credential
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    ScramCredentialUpsertion,
)
from protocol.messages.describe_user_scram_credentials import (
    CredentialInfo,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from storage.types import ScramCredential, ScramKey

logger = structlog.get_logger(__name__)

MAX_USERS = 100_000
"""Maximal number of users with a credential."""
MAX_NAME_BYTES = MAX_SALT_BYTES = 1_024
MAX_SALTED_PASSWORD_BYTES = 1_024
"""Maximal size in bytes of a salted password. SHA-512 makes 64 bytes."""
MECHANISMS = frozenset(int(mechanism) for mechanism in ScramMechanism)


# --- AlterUserScramCredentials ----------------------------------------------------------------------------------------


class ScramServices(HasUsers, Protocol): ...


async def alter_user_scram_credentials(
    request: AlterUserScramCredentialsRequest, context: RequestContext[ScramServices]
) -> AlterUserScramCredentialsResponse:
    """Change credentials. They apply on every node once this is answered, because each node reads them at each
    authentication."""
    users = context.services.users
    refused: dict[str, KafkaError] = {}
    deleted: dict[str, int] = {}
    upserted: dict[str, ScramCredentialUpsertion] = {}
    named = {deletion.name for deletion in request.deletions}
    known = {(info.user, info.mechanism) for info in (await users.described(named) if named else ())}

    async for deletion in in_pieces(request.deletions):
        name = deletion.name
        if name in refused:
            continue
        if deleted.pop(name, None) is not None:
            refused[name] = _twice()
        elif error := _wrong(name, deletion.mechanism):
            refused[name] = error
        elif (name, deletion.mechanism) not in known:
            refused[name] = KafkaError(
                ErrorCode.RESOURCE_NOT_FOUND, "Attempt to delete a user credential that does not exist"
            )
        else:
            deleted[name] = deletion.mechanism
    async for upsertion in in_pieces(request.upsertions):
        name = upsertion.name
        if name in refused:
            continue
        if deleted.pop(name, None) is not None or upserted.pop(name, None) is not None:
            refused[name] = _twice()
        elif error := _wrong(name, upsertion.mechanism) or _unacceptable(upsertion):
            refused[name] = error
        else:
            upserted[name] = upsertion
    there = {info.user for info in (await users.described(upserted.keys()) if upserted else ())}
    if upserted.keys() - there and await users.count() + len(upserted.keys() - there) > MAX_USERS:
        for name in upserted:
            refused[name] = KafkaError(ErrorCode.POLICY_VIOLATION, f"No more than {MAX_USERS} users may be stored.")
        upserted.clear()
    rows = [_stored(upsertion) async for upsertion in in_pieces(upserted.values())]
    if rows or deleted:
        await users.change(rows, [ScramKey(name, mechanism) for name, mechanism in deleted.items()])
        logger.info(
            "credentials changed", upserted=len(rows), deleted=len(deleted), by=str(context.connection.principal)
        )
    return AlterUserScramCredentialsResponse(
        results=(
            *(AlterUserScramCredentialsResult(user=name, error_message=None) for name in (*deleted, *upserted)),
            *_refusals(refused),
        )
    )


def _refusals(refused: Mapping[str, KafkaError]) -> list[AlterUserScramCredentialsResult]:
    return [
        AlterUserScramCredentialsResult(user=name, error_code=error.code, error_message=error.message)
        for name, error in refused.items()
    ]


def refuse_alter_user_scram_credentials(
    request: AlterUserScramCredentialsRequest, _version: int, code: ErrorCode, message: str | None
) -> AlterUserScramCredentialsResponse:
    names = dict.fromkeys([each.name for each in request.deletions] + [each.name for each in request.upsertions])
    return AlterUserScramCredentialsResponse(
        results=tuple(
            AlterUserScramCredentialsResult(user=name, error_code=code, error_message=message) for name in names
        )
    )


def _twice() -> KafkaError:
    return KafkaError(ErrorCode.DUPLICATE_RESOURCE, "A user credential cannot be altered twice in the same request")


def _wrong(name: str, mechanism: int) -> KafkaError | None:
    if not name:
        return KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty")
    if mechanism not in MECHANISMS:
        return KafkaError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
    return None


def _unacceptable(upsertion: ScramCredentialUpsertion) -> KafkaError | None:
    """Return the refusal of an upsertion, if any. The last three checks are ours; upstream has no such bounds."""
    reason = None
    if upsertion.iterations < MIN_ITERATIONS:
        reason = "Too few iterations"
    elif upsertion.iterations > MAX_ITERATIONS:
        reason = "Too many iterations"
    elif len(upsertion.name.encode()) > MAX_NAME_BYTES:
        reason = f"A username has at most {MAX_NAME_BYTES} bytes"
    elif len(upsertion.salt) > MAX_SALT_BYTES:
        reason = f"A salt has at most {MAX_SALT_BYTES} bytes"
    elif not 0 < len(upsertion.salted_password) <= MAX_SALTED_PASSWORD_BYTES:
        reason = f"A salted password has 1 to {MAX_SALTED_PASSWORD_BYTES} bytes"
    return None if reason is None else KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, reason)


def _stored(upsertion: ScramCredentialUpsertion) -> ScramCredential:
    mechanism = ScramMechanism(upsertion.mechanism)
    return credential(upsertion.name, mechanism, upsertion.salted_password, upsertion.salt, upsertion.iterations)


# --- DescribeUserScramCredentials -------------------------------------------------------------------------------------


async def describe_user_scram_credentials(
    request: DescribeUserScramCredentialsRequest, context: RequestContext[ScramServices]
) -> DescribeUserScramCredentialsResponse:
    """Describe the named users, or all users if the request names none."""
    asked: dict[str, bool] = {}
    """Maps a user to true if the request names the user once, and to false if it names the user more often."""
    async for user in in_pieces(request.users or ()):
        asked[user.name] = user.name not in asked
    infos: dict[str, list[CredentialInfo]] = {}
    async for info in in_pieces(await context.services.users.described(asked or None)):
        infos.setdefault(info.user, []).append(CredentialInfo(mechanism=info.mechanism, iterations=info.iterations))
    results = [
        _described(name, infos.get(name), once=once)
        async for name, once in in_pieces((asked or dict.fromkeys(infos, True)).items())
    ]
    return DescribeUserScramCredentialsResponse(error_message=None, results=tuple(results))


def _described(name: str, infos: list[CredentialInfo] | None, *, once: bool) -> DescribeUserScramCredentialsResult:
    if not once:
        return DescribeUserScramCredentialsResult(
            user=name,
            error_code=ErrorCode.DUPLICATE_RESOURCE,
            error_message="Cannot describe SCRAM credentials for the same user twice in a single request: " + name,
        )
    if infos is None:
        return DescribeUserScramCredentialsResult(
            user=name,
            error_code=ErrorCode.RESOURCE_NOT_FOUND,
            error_message="Attempt to describe a user credential that does not exist: " + name,
        )
    return DescribeUserScramCredentialsResult(user=name, error_message=None, credential_infos=tuple(infos))
