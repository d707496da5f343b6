"""CreateDelegationToken, RenewDelegationToken, ExpireDelegationToken and DescribeDelegationToken (KIP-48, KIP-373).

The one idea: only clients that logged in by their own secret may use these APIs. A token must not create tokens, and a
secret must not be shown on a listener without authentication. An owner and the renewers that it has named may use a
token freely; everything else needs ACLs.

Mirrors upstream's KafkaApis, ControllerApis and DelegationTokenControlManager. A token's secret appears in answers
only: nothing here logs one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import structlog

from gateway.apis.services import HasDelegation, HasSettings
from gateway.net.context import ANONYMOUS, Principal, RequestContext
from gateway.net.pieces import in_pieces
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorizer import HasAuthorizer, may
from gateway.security.delegation import DelegationTokens, concerns, may_renew
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_delegation_token import CreateDelegationTokenRequest, CreateDelegationTokenResponse
from protocol.messages.describe_delegation_token import (
    DescribedDelegationToken,
    DescribedDelegationTokenRenewer,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
)
from protocol.messages.expire_delegation_token import ExpireDelegationTokenRequest, ExpireDelegationTokenResponse
from protocol.messages.renew_delegation_token import RenewDelegationTokenRequest, RenewDelegationTokenResponse
from storage.types import DelegationToken

logger = structlog.get_logger(__name__)

USER = "User"
"""The only type of principals."""
NO_TIME_MS = -1
"""Value of time fields in a refusal."""
MAX_RENEWERS = 50
MAX_NAME_BYTES = 1_024
"""Maximal size in bytes of the name of an owner or a renewer."""
MAX_RENEWERS_BYTES = 4_096
"""Bytes of all renewers of a token, because every description lists all of them."""


class TokenServices(HasAuthorizer, HasDelegation, HasSettings, Protocol): ...


def _refuse_strangers(context: RequestContext[HasSettings]) -> None:
    """Raise KafkaError if the listener has no authentication, or if the client logged in by a token."""
    connection = context.connection
    protocol = next(
        each.security_protocol for each in context.services.settings.listeners if each.name == connection.listener
    )
    unknown = protocol == "PLAINTEXT" or (protocol == "SSL" and connection.principal == ANONYMOUS)
    if unknown or connection.principal.by_token:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED)


def _tokens_for(context: RequestContext[TokenServices]) -> DelegationTokens:
    """Return the node's tokens if the client may use these APIs. Raise KafkaError otherwise."""
    _refuse_strangers(context)
    if context.services.delegation is None:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED)
    return context.services.delegation


async def _find(tokens: DelegationTokens, token_hmac: bytes) -> tuple[DelegationToken, bool]:
    """Call `DelegationTokens.find`. Raise KafkaError."""
    found = await tokens.find(token_hmac)
    if found is None:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND)
    return found


# --- CreateDelegationToken --------------------------------------------------------------------------------------------


async def create_delegation_token(
    request: CreateDelegationTokenRequest, context: RequestContext[TokenServices]
) -> CreateDelegationTokenResponse:
    requester = context.connection.principal
    owner = requester
    if request.owner_principal_name:
        owner = Principal(request.owner_principal_name, request.owner_principal_type or "")
    try:
        return await _created(request, context, owner)
    except KafkaError as error:
        return _not_created(error.code, owner, requester)


async def _created(
    request: CreateDelegationTokenRequest, context: RequestContext[TokenServices], owner: Principal
) -> CreateDelegationTokenResponse:
    requester, tokens = context.connection.principal, context.services.delegation
    _refuse_strangers(context)
    if owner != requester and not may(context, AclOperation.CREATE_TOKENS, ResourceType.USER, str(owner)):
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED)
    # Upstream accepts an owner of any type, but a client that logs in by the token is a user of that name.
    if owner.type != USER or any(renewer.principal_type != USER for renewer in request.renewers):
        raise KafkaError(ErrorCode.INVALID_PRINCIPAL_TYPE)
    if tokens is None:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED)
    renewers = list(dict.fromkeys(renewer.principal_name for renewer in request.renewers))
    lengths = [len(name.encode()) for name in renewers]
    if len(renewers) > MAX_RENEWERS or sum(lengths) > MAX_RENEWERS_BYTES:
        raise KafkaError(ErrorCode.POLICY_VIOLATION)
    if max(*lengths, len(owner.name.encode()), len(requester.name.encode())) > MAX_NAME_BYTES:
        raise KafkaError(ErrorCode.POLICY_VIOLATION)
    made = await tokens.create(owner.name, requester.name, renewers, request.max_lifetime_ms)
    if made is None:
        logger.warning("delegation token refused: too many exist already", requester=str(requester))
        raise KafkaError(ErrorCode.POLICY_VIOLATION)
    logger.info("delegation token created", token_id=made.token_id, owner=str(owner), requester=str(requester))
    return CreateDelegationTokenResponse(
        principal_type=owner.type,
        principal_name=owner.name,
        token_requester_principal_type=requester.type,
        token_requester_principal_name=requester.name,
        issue_timestamp_ms=made.issued_ms,
        expiry_timestamp_ms=made.expires_ms,
        max_timestamp_ms=made.max_ms,
        token_id=made.token_id,
        hmac=tokens.hmac(made.token_id),
    )


def _not_created(code: ErrorCode, owner: Principal, requester: Principal) -> CreateDelegationTokenResponse:
    return CreateDelegationTokenResponse(
        error_code=code,
        principal_type=owner.type,
        principal_name=owner.name,
        token_requester_principal_type=requester.type,
        token_requester_principal_name=requester.name,
        issue_timestamp_ms=NO_TIME_MS,
        expiry_timestamp_ms=NO_TIME_MS,
        max_timestamp_ms=NO_TIME_MS,
    )


def refuse_create_delegation_token(
    _request: CreateDelegationTokenRequest, _version: int, code: ErrorCode, _message: str | None
) -> CreateDelegationTokenResponse:
    return _not_created(code, ANONYMOUS, ANONYMOUS)


# --- RenewDelegationToken, ExpireDelegationToken ----------------------------------------------------------------------


async def renew_delegation_token(
    request: RenewDelegationTokenRequest, context: RequestContext[TokenServices]
) -> RenewDelegationTokenResponse:
    tokens = _tokens_for(context)
    token, expired = await _find(tokens, request.hmac)
    if expired:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_EXPIRED)
    if not may_renew(token, context.connection.principal.name):
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH)
    expires_ms = await tokens.renew(token, request.renew_period_ms)
    if expires_ms is None:  # The token was removed after it had been found.
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_EXPIRED)
    return RenewDelegationTokenResponse(expiry_timestamp_ms=expires_ms)


refuse_renew_delegation_token = DerivedRefusal(
    ApiKey.RENEW_DELEGATION_TOKEN, values={"expiry_timestamp_ms": NO_TIME_MS}
)


async def expire_delegation_token(
    request: ExpireDelegationTokenRequest, context: RequestContext[TokenServices]
) -> ExpireDelegationTokenResponse:
    """Expire a token. A session that began by the token continues until the expiry that the token had at the session's
    beginning."""
    tokens, user = _tokens_for(context), context.connection.principal
    token, expired = await _find(tokens, request.hmac)
    if not may_renew(token, user.name):
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH)
    at_once = request.expiry_time_period_ms < 0
    if expired and not at_once:
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_EXPIRED)
    expires_ms = await tokens.end(token, request.expiry_time_period_ms)
    if expires_ms is None:  # The token was removed after it had been found.
        raise KafkaError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND if at_once else ErrorCode.DELEGATION_TOKEN_EXPIRED)
    logger.info(
        "expiry of a delegation token changed",
        token_id=token.token_id,
        owner=token.owner,
        by=str(user),
        at_once=at_once,
    )
    return ExpireDelegationTokenResponse(expiry_timestamp_ms=expires_ms)


refuse_expire_delegation_token = DerivedRefusal(
    ApiKey.EXPIRE_DELEGATION_TOKEN, values={"expiry_timestamp_ms": NO_TIME_MS}
)


# --- DescribeDelegationToken ------------------------------------------------------------------------------------------


async def describe_delegation_token(
    request: DescribeDelegationTokenRequest, context: RequestContext[TokenServices]
) -> DescribeDelegationTokenResponse:
    """Describe the tokens of the named owners, or of all owners. Expired tokens are listed until they are removed."""
    tokens = _tokens_for(context)
    asked: set[str] | None = None
    if request.owners is not None:
        asked = {owner.principal_name for owner in request.owners if owner.principal_type == USER}
        if not asked:
            return DescribeDelegationTokenResponse()
    async with tokens.describing:
        shown = [
            _described(token, tokens.hmac(token.token_id))
            async for token in in_pieces(await tokens.described(asked))
            if tokens.is_ours(token.token_id, token.hmac_digest) and _may_see(token, context)
        ]
    return DescribeDelegationTokenResponse(tokens=tuple(shown))


def _may_see(token: DelegationToken, context: RequestContext[HasAuthorizer]) -> bool:
    return (
        concerns(token, context.connection.principal.name)
        or may(context, AclOperation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id, told=False)
        or may(context, AclOperation.DESCRIBE_TOKENS, ResourceType.USER, f"{USER}:{token.owner}", told=False)
    )


def _described(token: DelegationToken, token_hmac: bytes) -> DescribedDelegationToken:
    return DescribedDelegationToken(
        principal_type=USER,
        principal_name=token.owner,
        token_requester_principal_type=USER,
        token_requester_principal_name=token.requester,
        issue_timestamp=token.issued_ms,
        expiry_timestamp=token.expires_ms,
        max_timestamp=token.max_ms,
        token_id=token.token_id,
        hmac=token_hmac,
        renewers=tuple(_renewers(token.renewers)),
    )


def _renewers(names: Iterable[str]) -> Iterable[DescribedDelegationTokenRenewer]:
    return (DescribedDelegationTokenRenewer(principal_type=USER, principal_name=name) for name in names)
