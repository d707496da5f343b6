"""AlterUserScramCredentials: set and delete the salted passwords by which users authenticate (KIP-554)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, binary, int8, int16, int32, message, string, struct


@struct
class ScramCredentialDeletion:
    name: str = string()
    mechanism: int = int8()


@struct
class ScramCredentialUpsertion:
    name: str = string()
    mechanism: int = int8()
    iterations: int = int32()
    salt: bytes = binary()
    salted_password: bytes = binary()


@message(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, versions="0", flexible="0+")
class AlterUserScramCredentialsRequest:
    deletions: tuple[ScramCredentialDeletion, ...] = array(ScramCredentialDeletion)
    upsertions: tuple[ScramCredentialUpsertion, ...] = array(ScramCredentialUpsertion)


@struct
class AlterUserScramCredentialsResult:
    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")


@message(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, versions="0", flexible="0+")
class AlterUserScramCredentialsResponse:
    throttle_time_ms: int = int32()
    results: tuple[AlterUserScramCredentialsResult, ...] = array(AlterUserScramCredentialsResult)
