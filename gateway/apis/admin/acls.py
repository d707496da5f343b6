"""DescribeAcls, CreateAcls and DeleteAcls.

The one idea: an ACL is a change of the catalog, as a quota is; each node decides by its copy of all ACLs. A client that
creates an ACL finds it obeyed on this node once it is answered, and on the other nodes when they have followed the
catalog.

Mirrors upstream's AclApis and AclControlManager.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

import structlog

from gateway.apis.services import ChangesCatalog, FindsTopics, HasCatalog
from gateway.net.coding import MAX_ANSWER_BYTES
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.acls import AclFilter, network_of
from gateway.security.authorizer import HasAuthorizer
from gateway.security.kinds import CLUSTER_NAME, AclOperation, PatternType, Permission, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_acls import AclCreation, AclCreationResult, CreateAclsRequest, CreateAclsResponse
from protocol.messages.delete_acls import (
    DeleteAclsFilter,
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from protocol.messages.describe_acls import (
    AclDescription,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from protocol.sizes import encoded_bytes
from storage.types import Acl

logger = structlog.get_logger(__name__)

MAX_CHANGES = 10_000
"""Changes of one request. Upstream's QuorumController.MAX_RECORDS_PER_USER_OP."""
MAX_ACLS = 20_000
"""Maximal number of ACLs. After each change every node reads all ACLs and frees the old ones, which takes 15 ms of its
event loop.
"""

MAX_MATCHED_BYTES = MAX_ANSWER_BYTES - 1024 * 1024
"""Bytes of the ACLs that one request may delete, as its answer names them. The rest of the answer is smaller than a
megabyte."""

E = TypeVar("E", bound=IntEnum)


class AclServices(ChangesCatalog, HasAuthorizer, Protocol): ...


def _require_authorizer(context: RequestContext[HasAuthorizer], text: str) -> None:
    if context.services.authorizer is None:
        raise KafkaError(ErrorCode.SECURITY_DISABLED, text)


def _named(kind: type[E], code: int) -> E:
    """Return the member of the enum; an unknown code is UNKNOWN."""
    return kind(code if code in frozenset(kind) else 0)


# --- CreateAcls ---------------------------------------------------------------------------------------------------


async def create_acls(request: CreateAclsRequest, context: RequestContext[AclServices]) -> CreateAclsResponse:
    """Create each ACL by itself, in the order of the request. An ACL that already exists counts as created."""
    _require_authorizer(context, "No Authorizer is configured.")
    services = context.services
    await services.catalog.refresh_if_changed()
    present = services.catalog.acls
    wanted: dict[Acl, None] = {}
    results: list[AclCreationResult] = []
    async for creation in in_pieces(request.creations):
        try:
            acl = _checked(creation)
            if acl not in present and acl not in wanted:
                if len(present) + len(wanted) >= MAX_ACLS:
                    raise KafkaError(
                        ErrorCode.POLICY_VIOLATION, f"A cluster has at most {MAX_ACLS} ACLs. Delete some first."
                    )
                wanted[acl] = None
            results.append(AclCreationResult())
        except KafkaError as error:
            results.append(AclCreationResult(error_code=error.code, error_message=error.message))
    if wanted:
        await services.topics.create_acls(list(wanted))
        logger.info("ACLs created", count=len(wanted), principal=str(context.connection.principal))
        await services.catalog.refresh_if_changed()
    return CreateAclsResponse(results=tuple(results))


def _checked(creation: AclCreation) -> Acl:
    """Check an ACL to create, in the same order and with the same error texts as upstream. Raise KafkaError."""
    resource_type = _named(ResourceType, creation.resource_type)
    name, principal = creation.resource_name, creation.principal
    if resource_type is ResourceType.CLUSTER and name != CLUSTER_NAME:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}")
    if not name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Invalid empty resource name")
    pattern_type = _named(PatternType, creation.resource_pattern_type)
    operation = _named(AclOperation, creation.operation)
    permission = _named(Permission, creation.permission_type)
    for what, given, allowed in (
        ("resourceType", resource_type, resource_type > ResourceType.ANY),
        ("patternType", pattern_type, pattern_type in (PatternType.LITERAL, PatternType.PREFIXED)),
        ("operation", operation, operation > AclOperation.ANY),
        ("permissionType", permission, permission > Permission.ANY),
    ):
        if not allowed:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Invalid {what} {given.name}")
    if ":" not in principal:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Could not parse principal from `{principal}` "
            "(no colon is present separating the principal type from the principal name)",
        )
    if not creation.host:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Host pattern cannot be null or empty")
    # Python reads a mask, too, and 0.0.0.0 behind the slash as every address.
    length = creation.host.partition("/")[2]
    if "/" in creation.host and (network_of(creation.host) is None or not length.isdigit()):
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Invalid CIDR notation '{creation.host}': it must be an address, a slash and the length of a prefix",
        )
    return Acl(resource_type, pattern_type, name, principal, creation.host, operation, permission)


# --- DeleteAcls ---------------------------------------------------------------------------------------------------


async def delete_acls(request: DeleteAclsRequest, context: RequestContext[AclServices]) -> DeleteAclsResponse:
    """Delete all ACLs that the filters match, or none. An ACL that several filters match is listed for each of them."""
    _require_authorizer(context, "No Authorizer is configured.")
    services = context.services
    await services.catalog.refresh_if_changed()
    found: list[list[Acl] | KafkaError] = []
    doomed: dict[Acl, None] = {}
    count = size_bytes = 0
    async for asked in in_pieces(request.filters):
        try:
            wanted = _filter(asked)
        except KafkaError as error:
            found.append(error)
            continue
        matched = await _matching(wanted, context)
        count += len(matched)
        if count > MAX_CHANGES:
            raise KafkaError(
                ErrorCode.POLICY_VIOLATION,
                f"Cannot remove more than {MAX_CHANGES} acls in a single delete operation.",
            )
        # The answer names each deleted ACL. Dispatch would refuse a larger answer only after the deletion.
        size_bytes += sum([encoded_bytes(_deleted(acl)) async for acl in in_pieces(matched)])
        if size_bytes > MAX_MATCHED_BYTES:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, "The ACLs have long names. Delete fewer of them at a time.")
        doomed.update(dict.fromkeys(matched))
        found.append(matched)
    gone: set[Acl] = set()
    if doomed:
        gone = set(await services.topics.delete_acls(list(doomed)))
        logger.info("ACLs deleted", count=len(gone), principal=str(context.connection.principal))
        await services.catalog.refresh_if_changed()
    results: list[DeleteAclsFilterResult] = []
    async for each in in_pieces(found):
        if isinstance(each, KafkaError):
            results.append(DeleteAclsFilterResult(error_code=each.code, error_message=each.message))
            continue
        matching = [_deleted(acl) async for acl in in_pieces(each) if acl in gone]
        results.append(DeleteAclsFilterResult(error_message=None, matching_acls=tuple(matching)))
    return DeleteAclsResponse(filter_results=tuple(results))


def _deleted(acl: Acl) -> DeleteAclsMatchingAcl:
    return DeleteAclsMatchingAcl(
        error_message=None,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )


def _filter(asked: DeleteAclsFilter | DescribeAclsRequest) -> AclFilter:
    """Build the filter. Raise KafkaError if it contains an unknown code."""
    given = AclFilter(
        asked.resource_type_filter,
        asked.pattern_type_filter,
        asked.resource_name_filter,
        asked.principal_filter,
        asked.host_filter,
        asked.operation,
        asked.permission_type,
    )
    if not given.knows_its_pattern:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Unknown patternFilter.")
    if not given.knows_its_entry:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Unknown entryFilter.")
    return given


async def _matching(wanted: AclFilter, context: RequestContext[HasCatalog]) -> list[Acl]:
    acls = context.services.catalog.acls
    only = wanted.only
    candidates: Iterable[Acl] = acls if only is None else (only,) if only in acls else ()
    return [acl async for acl in in_pieces(candidates) if wanted.matches(acl)]


# --- DescribeAcls -------------------------------------------------------------------------------------------------


async def describe_acls(request: DescribeAclsRequest, context: RequestContext[FindsTopics]) -> DescribeAclsResponse:
    """Describe the ACLs that match the filter, grouped by resource pattern."""
    _require_authorizer(context, "No Authorizer is configured on the broker")
    await context.services.catalog.refresh_if_changed()
    by_pattern: dict[tuple[int, str, int], list[AclDescription]] = {}
    async for acl in in_pieces(await _matching(_filter(request), context)):
        by_pattern.setdefault((acl.resource_type, acl.resource_name, acl.pattern_type), []).append(
            AclDescription(
                principal=acl.principal, host=acl.host, operation=acl.operation, permission_type=acl.permission
            )
        )
    resources = [
        DescribeAclsResource(resource_type=kind, resource_name=name, pattern_type=pattern, acls=tuple(entries))
        async for (kind, name, pattern), entries in in_pieces(by_pattern.items())
    ]
    return DescribeAclsResponse(resources=tuple(resources))
