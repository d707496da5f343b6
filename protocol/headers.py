"""Request and response headers: what stands between a frame's size and its body.

The one idea: the declared message decides the header version (request header v2 and response header v1 once the message
is flexible; ApiVersions is always answered with header v0, because its client does not know the served versions yet).
No tagged field of a header is defined upstream, so they are skipped. Bodies are the codec's.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import NamedTuple

from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.messages import find_message
from protocol.schema import Direction
from protocol.varints import read_uvarint, skip_tagged_fields

_ids = Struct(">hhi")
_length = Struct(">h")
_correlation_id = Struct(">i")
_NO_TAGGED_FIELDS = b"\0"


class RequestHeader(NamedTuple):
    api_key: int
    """Number of an API. The API may be unknown."""
    api_version: int
    """Version of the API. The version may be unknown."""
    correlation_id: int
    client_id: str | None


class _Flexible(dict[tuple[int, int], bool | None]):
    """Map of API key and version to whether that message is flexible; None if no such message is declared.

    Only declared versions are kept, so that a client's numbers do not fill it.
    """

    def __init__(self, direction: Direction) -> None:
        super().__init__()
        self._direction = direction

    def __missing__(self, key: tuple[int, int]) -> bool | None:
        api_key, version = key
        schema = find_message(api_key, self._direction)
        if schema is None or version not in schema.versions:
            return None
        is_answer_to_api_versions = self._direction is Direction.RESPONSE and api_key == ApiKey.API_VERSIONS
        self[key] = version in schema.flexible and not is_answer_to_api_versions
        return self[key]


_flexible_requests = _Flexible(Direction.REQUEST)
_flexible_responses = _Flexible(Direction.RESPONSE)


def decode_request_header(buffer: Buffer) -> tuple[RequestHeader, int]:
    """Return a frame's header, and the position at which its body begins. Raise ProtocolError if the header is torn.

    If the API or version is not declared, key, version and correlation id suffice, so that the request can still be
    answered with UNSUPPORTED_VERSION. The client id is then None if it cannot be read, and the position is the end of
    header v1.
    """
    if len(buffer) < _ids.size:
        raise ProtocolError(f"a request header of {len(buffer)} bytes")
    api_key, api_version, correlation_id = _ids.unpack_from(buffer)
    flexible = _flexible_requests[api_key, api_version]
    try:
        client_id, position = _read_client_id(buffer)
    except ProtocolError:
        if flexible is not None:
            raise
        client_id, position = None, len(buffer)
    if flexible:
        # No client sends tagged fields here, so the section is nearly always this one byte.
        if buffer[position : position + 1] == _NO_TAGGED_FIELDS:
            position += 1
        else:
            position = skip_tagged_fields(buffer, position, len(buffer))
    return RequestHeader(api_key, api_version, correlation_id, client_id), position


def _read_client_id(buffer: Buffer) -> tuple[str | None, int]:
    start = _ids.size + _length.size
    try:
        (length,) = _length.unpack_from(buffer, _ids.size)
        if length < 0:
            if length != -1:
                raise ProtocolError(f"a client id of {length} bytes")
            return None, start
        if start + length > len(buffer):
            raise ProtocolError("torn client id")
        return str(buffer[start : start + length], "utf-8", "replace"), start + length
    except struct.error as error:
        raise ProtocolError(f"client id: {error}") from error


def leading_strings(frame: Buffer, count: int) -> list[str | None]:
    """Return the first `count` fields of a request's body, all of which must be strings in this version. Raise
    ProtocolError if the request is torn, or if its API or version is not declared."""
    header, position = decode_request_header(frame)
    flexible = _flexible_requests[header.api_key, header.api_version]
    if flexible is None:
        raise ProtocolError(f"API key {header.api_key} version {header.api_version}")
    strings: list[str | None] = []
    try:
        for _ in range(count):
            if flexible:
                length, position = read_uvarint(frame, position, len(frame))
                length -= 1
            else:
                (length,) = _length.unpack_from(frame, position)
                position += _length.size
            end = position + max(length, 0)
            if end > len(frame):
                raise ProtocolError("torn string")
            # As in the codec, other bytes become U+FFFD.
            strings.append(None if length < 0 else str(frame[position:end], "utf-8", "replace"))
            position = end
    except struct.error as error:
        raise ProtocolError(f"a string of {len(frame)} bytes: {error}") from error
    return strings


def encode_request_header(header: RequestHeader) -> bytes:
    """Encode a request's header, as clients do. An API or version that is not declared gets header v1."""
    client_id = None if header.client_id is None else header.client_id.encode()
    encoded = _ids.pack(header.api_key, header.api_version, header.correlation_id)
    encoded += _length.pack(-1) if client_id is None else _length.pack(len(client_id)) + client_id
    return encoded + _NO_TAGGED_FIELDS if _flexible_requests[header.api_key, header.api_version] else encoded


def encode_response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """Encode the header of the response to a request of this key and version."""
    encoded = _correlation_id.pack(correlation_id)
    return encoded + _NO_TAGGED_FIELDS if _flexible_responses[api_key, version] else encoded


def decode_response_header(api_key: int, version: int, buffer: Buffer) -> tuple[int, int]:
    """Decode a response's header, as clients do. Return the correlation id, and the position at which the body begins.
    Raise ProtocolError if the header is torn."""
    if len(buffer) < _correlation_id.size:
        raise ProtocolError(f"a response header of {len(buffer)} bytes")
    (correlation_id,) = _correlation_id.unpack_from(buffer)
    position = _correlation_id.size
    if _flexible_responses[api_key, version]:
        position = skip_tagged_fields(buffer, position, len(buffer))
    return correlation_id, position
