"""Refuse ids that are longer than any client's, before the node looks anything up by them.

The one idea: an id becomes a key (of a hash, a lease, an index in Postgres), so its length is checked once, for every
API, between decoding and the first lookup. Which fields of a request are ids follows from their names in the
declarations. A request with one id that is too long is refused whole, in the shape of its API.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from protocol.errors import ErrorCode, KafkaError
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.schema import struct_schema

MAX_ID_BYTES = 1_024
"""Measured in UTF-8. Kafka accepts 32,767, but Postgres refuses index entries above 2.7 KB, and clients repeat such
an error for ever."""

MAX_SHARE_KEY_BYTES = MAX_ID_BYTES + len(":") + 22 + len(":") + 11
"""Maximal size of FindCoordinator's key for a share partition: GROUP:TOPIC ID:PARTITION."""

_CODES = {
    **dict.fromkeys(("group_id", "group_ids", "groups", "groups_names"), ErrorCode.INVALID_GROUP_ID),
    **dict.fromkeys(
        (
            *("transactional_id", "transactional_ids", "v3_and_below_transactional_id"),
            *("member_id", "instance_id", "group_instance_id", "rack_id", "process_id"),
            "coordinator_keys",
        ),
        ErrorCode.INVALID_REQUEST,
    ),
}
"""Maps the name of a string field, or of an array of strings, to the error code for an id that is too long."""

ID_NAMES = frozenset(_CODES)

_GROUP, _SHARE = 0, 2
"""Key types of FindCoordinator whose keys are a group id or begin with a group id."""


@dataclass(frozen=True, slots=True)
class IdField:
    """A field that holds an id, an array of ids, or structs that contain ids."""

    name: str
    is_array: bool
    code: ErrorCode | None
    """Error code with which a too long id is refused. None if the ids are in nested structs."""


@cache
def id_fields(struct_type: type[object]) -> tuple[IdField, ...]:
    """Return the fields of a request, or of a nested struct, that contain or lead to ids."""
    found: list[IdField] = []
    for field in struct_schema(struct_type).fields:
        if isinstance(field.kind, type):
            if id_fields(field.kind):
                found.append(IdField(field.name, field.is_array, None))
        elif field.kind.name == "string":
            code = _CODES.get(field.name)
            if struct_type is FindCoordinatorRequest and field.name == "key":
                code = ErrorCode.INVALID_REQUEST
            if code is not None:
                found.append(IdField(field.name, field.is_array, code))
    return tuple(found)


def check_ids(request: object, client_id: str | None = None) -> None:
    """Raise KafkaError if an id of the request, or of its client, is too long: INVALID_GROUP_ID for a group's,
    INVALID_REQUEST for any other."""
    if client_id is not None and _exceeds(client_id, MAX_ID_BYTES):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"A client id has at most {MAX_ID_BYTES} bytes.")
    limit, code = MAX_ID_BYTES, None
    if isinstance(request, FindCoordinatorRequest):
        if request.key_type == _GROUP:
            code = ErrorCode.INVALID_GROUP_ID
        elif request.key_type == _SHARE:
            limit = MAX_SHARE_KEY_BYTES
    for text, field_code in _ids(request):
        if _exceeds(text, limit):
            raise KafkaError(code or field_code, f"An id has at most {limit} bytes.")


def _exceeds(text: str, limit: int) -> bool:
    return len(text) > limit or (len(text) > limit // 4 and len(text.encode()) > limit)


def _ids(struct: object) -> Iterator[tuple[str, ErrorCode]]:
    for field in id_fields(struct.__class__):
        value = getattr(struct, field.name)
        if value is None:
            continue
        for each in value if field.is_array else (value,):
            if field.code is None:
                yield from _ids(each)
            elif each is not None:
                yield each, field.code
