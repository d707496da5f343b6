"""CreateAcls: create ACLs."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, message, string, struct


@struct
class AclCreation:
    resource_type: int = int8()
    resource_name: str = string()
    resource_pattern_type: int = int8(versions="1+", default=3)
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


@message(ApiKey.CREATE_ACLS, versions="1-3", flexible="2+")
class CreateAclsRequest:
    creations: tuple[AclCreation, ...] = array(AclCreation)


@struct
class AclCreationResult:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")


@message(ApiKey.CREATE_ACLS, versions="1-3", flexible="2+")
class CreateAclsResponse:
    throttle_time_ms: int = int32()
    results: tuple[AclCreationResult, ...] = array(AclCreationResult)
