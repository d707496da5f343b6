"""DescribeUserScramCredentials: the mechanisms for which users have a password (KIP-554)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, message, string, struct


@struct
class UserName:
    name: str = string()


@message(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, versions="0", flexible="0+")
class DescribeUserScramCredentialsRequest:
    users: tuple[UserName, ...] | None = array(UserName, nullable="0+")


@struct
class CredentialInfo:
    mechanism: int = int8()
    iterations: int = int32()


@struct
class DescribeUserScramCredentialsResult:
    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    credential_infos: tuple[CredentialInfo, ...] = array(CredentialInfo)


@message(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, versions="0", flexible="0+")
class DescribeUserScramCredentialsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    results: tuple[DescribeUserScramCredentialsResult, ...] = array(DescribeUserScramCredentialsResult)
