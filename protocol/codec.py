"""Messages to bytes and back, at any declared version.

The one idea: callers see `decode` and `encode`; both use one function per message and version, which is generated from
the grammar when it is first needed. Any bytes that are not the message end in ProtocolError. The cost of decoding a
message is limited by its size in bytes, and the number of a request's elements is limited too.

Other modules handle headers and frames.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, TypeVar

from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.grammar import Array, Record, grammar
from protocol.messages import find_message
from protocol.schema import Direction, message_schema, struct_schema
from protocol.specialise import Decoder, Encoder, has_records, specialise_decoder, specialise_encoder

M = TypeVar("M")

MAX_REQUEST_ELEMENTS = 100_000
"""Maximal number of array elements, tagged fields and `ELEMENT_BYTES` of long strings in one request, as many as a
large cluster has partitions. The number bounds a handler's work. A bound on the bytes would not, because an element may
take only two bytes: such a frame could block the event loop for many seconds."""

_request_types: dict[tuple[int, int], type[Any]] = {}
_decoders: dict[tuple[type[Any], int, int], tuple[Decoder, bool]] = {}
_encoders: dict[tuple[type[Any], int], Encoder] = {}
_element_encoders: dict[tuple[type[Any], str, int], Encoder] = {}


def request_class(api_key: int) -> type[Any]:
    """Return the class of an API's request; raise KeyError if no request is declared."""
    return _message_class(api_key, Direction.REQUEST)


def response_class(api_key: int) -> type[Any]:
    """Return the class of an API's response; raise KeyError if no response is declared."""
    return _message_class(api_key, Direction.RESPONSE)


def _message_class(api_key: int, direction: Direction) -> type[Any]:
    found = find_message(api_key, direction)
    if found is None:
        raise KeyError(f"no {direction.value} is declared for API key {api_key}")
    return found.struct_type


def decode(
    message_type: type[M],
    version: int,
    buffer: Buffer,
    position: int = 0,
    *,
    max_elements: int = MAX_REQUEST_ELEMENTS,
) -> tuple[M, int]:
    """Return the message that begins at `position`, and the position at which it ends.

    `records` fields are slices of `buffer`; all other fields own their memory. Raise ProtocolError for bytes that are
    no such message (TooManyElementsError for a request with more than `max_elements`), and ValueError if the message
    does not have this version. Use only few values of `max_elements`: functions are generated for each of them.
    """
    found = _decoders.get((message_type, version, max_elements))
    if found is None:
        record = grammar(message_type, version)
        is_request = message_schema(message_type).direction is Direction.REQUEST
        decoder = specialise_decoder(record, version, max_elements if is_request else None)
        found = _decoders[message_type, version, max_elements] = (decoder, has_records(record))
    decoder, sliced = found
    if not sliced and buffer.__class__ is not bytes:
        buffer = bytes(buffer)
    try:
        return decoder(buffer, position, len(buffer))
    except (IndexError, ValueError, struct.error) as error:
        raise ProtocolError(f"{message_type.__name__} v{version}: {error}") from error


def encode(message: Any, version: int) -> list[Buffer]:
    """Return a message's bytes as chunks, to be sent in order. Large `records` are chunks of their own and are not
    copied.

    Fields that the version lacks are left out. Raise ValueError for a value that the wire format cannot hold: None if
    the version has no null, a number or length too large for its field.
    """
    message_type: type[Any] = message.__class__
    encoder = _encoders.get((message_type, version))
    if encoder is None:
        record = grammar(message_type, version)
        encoder = _encoders[message_type, version] = specialise_encoder(record, version)
    try:
        return encoder(message)
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"{message_type.__name__} v{version}: {error}") from error


def encode_element(message_type: type[Any], field: str, element: Any, version: int) -> bytes:
    """Encode one element of a message's array of structs, for `EncodedElements`. Raise ValueError as `encode` does, and
    KeyError if the message has no such array."""
    encoder = _element_encoders.get((message_type, field, version))
    if encoder is None:
        arrays = {subcon.name: subcon.subcon for subcon in grammar(message_type, version).subcons}
        array = arrays[field]
        if not isinstance(array, Array) or not isinstance(array.element, Record):
            raise KeyError(field)
        encoder = _element_encoders[message_type, field, version] = specialise_encoder(array.element, version)
    try:
        return b"".join(encoder(element))
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"{message_type.__name__}.{field} v{version}: {error}") from error


def decode_request(
    api_key: int, version: int, buffer: Buffer, position: int = 0, *, max_elements: int = MAX_REQUEST_ELEMENTS
) -> Any:
    """Decode the request in `buffer` from `position` on; raise ProtocolError if the bytes are not one.

    Bytes after its last field are ignored, as upstream's broker does: librdkafka 2.16 leaves three of them behind a
    Metadata v13 request for all topics.
    """
    request_type = _request_types.get((api_key, version))
    if request_type is None:
        schema = find_message(api_key, Direction.REQUEST)
        if schema is None or version not in schema.versions:
            raise ProtocolError(f"no request of API key {api_key} at version {version}")
        request_type = _request_types[api_key, version] = schema.struct_type
    return decode(request_type, version, buffer, position, max_elements=max_elements)[0]


def has_more_elements(message: Any, limit: int) -> bool:
    """Return whether a message's arrays, at any depth, have more than `limit` elements together. It stops counting
    there."""
    return _count_elements(message, limit) > limit


def _count_elements(value: Any, limit: int) -> int:
    count = 0
    for name, is_array, nested in _counted_fields(value.__class__):
        held = getattr(value, name)
        if held is None:
            continue
        if not is_array:
            count += _count_elements(held, limit - count)
            continue
        if held.__class__ is not tuple:
            continue
        count += len(held)
        if not nested:
            continue
        for element in held:
            if count > limit:
                return count
            count += _count_elements(element, limit - count)
    return count


@cache
def _counted_fields(struct_type: type[Any]) -> tuple[tuple[str, bool, bool], ...]:
    """Return the fields of the struct that are arrays or contain arrays. Each has its name, whether it is an array
    itself, and whether its structs contain arrays."""
    fields = (
        (field.name, field.is_array, isinstance(field.kind, type) and bool(_counted_fields(field.kind)))
        for field in struct_schema(struct_type).fields
    )
    return tuple(field for field in fields if any(field[1:]))


def encode_response(message: Any, version: int) -> list[Buffer]:
    """Encode a response. The same as `encode`, under a name that says what servers send."""
    return encode(message, version)
