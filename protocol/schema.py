"""How a message is declared: field kinds with their versions, and the `@struct` and `@message` decorators.

The one idea: a message is written once, as a frozen dataclass whose fields say their wire kind, versions, nullability
and tag (KIP-482) in upstream's words; grammar, codec, headers and tests are derived from what is kept here. A nested
struct's fields exist at most in the versions of the field that holds it. Nothing here reads or writes bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, dataclass_transform, overload
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.versions import Versions

T = TypeVar("T")
S = TypeVar("S")

ZERO_UUID = UUID(int=0)
"""Upstream's value for "no id"."""


class Direction(Enum):
    REQUEST = "request"
    RESPONSE = "response"


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A wire type of one value. Calling it declares a field of that type."""

    name: str
    """Upstream's name of the type."""
    zero: T
    """Default of a field that declares none."""

    @overload
    def __call__(self, *, versions: str = "0+", tag: int | None = None, default: T = ...) -> T: ...
    @overload
    def __call__(
        self, *, versions: str = "0+", nullable: str, tag: int | None = None, default: T | None = ...
    ) -> T | None: ...
    def __call__(
        self, *, versions: str = "0+", nullable: str = "none", tag: int | None = None, default: Any = ...
    ) -> Any:
        return _declare(self, False, versions, nullable, tag, self.zero if default is ... else default)


int8 = Kind("int8", 0)
int16 = Kind("int16", 0)
int32 = Kind("int32", 0)
int64 = Kind("int64", 0)
uint16 = Kind("uint16", 0)
float64 = Kind("float64", 0.0)
boolean = Kind("bool", False)
uuid = Kind("uuid", ZERO_UUID)
string = Kind("string", "")
binary = Kind("bytes", b"")
records: Kind[Any] = Kind("records", None)
"""Record batches as they are. When decoded, the value is a slice of the frame; when encoded, it may also be a tuple of
chunks.
"""


@overload
def array(
    element: Kind[T] | type[T], *, versions: str = "0+", tag: int | None = None, default: tuple[T, ...] = ()
) -> tuple[T, ...]: ...
@overload
def array(
    element: Kind[T] | type[T],
    *,
    versions: str = "0+",
    nullable: str,
    tag: int | None = None,
    default: tuple[T, ...] | None = (),
) -> tuple[T, ...] | None: ...
def array(
    element: Kind[Any] | type[Any],
    *,
    versions: str = "0+",
    nullable: str = "none",
    tag: int | None = None,
    default: Any = (),
) -> Any:
    """Declare an array of a wire type or of a struct."""
    return _declare(element, True, versions, nullable, tag, default)


@overload
def nested(struct_type: type[S], *, versions: str = "0+", tag: int | None = None) -> S: ...
@overload
def nested(
    struct_type: type[S], *, versions: str = "0+", nullable: str, tag: int | None = None, default: S | None = ...
) -> S | None: ...
def nested(
    struct_type: type[Any],
    *,
    versions: str = "0+",
    nullable: str = "none",
    tag: int | None = None,
    default: Any = ...,
) -> Any:
    """Declare a single struct; by default one made of its fields' defaults."""
    return _declare(struct_type, False, versions, nullable, tag, struct_type() if default is ... else default)


@dataclass(frozen=True, slots=True)
class _Declaration:
    """The right side of the `=` in a class body, until the class's decorator has run."""

    kind: Kind[Any] | type[Any]
    is_array: bool
    versions: Versions
    nullable: Versions
    tag: int | None
    default: object


def _declare(
    kind: Kind[Any] | type[Any], is_array: bool, versions: str, nullable: str, tag: int | None, default: object
) -> _Declaration:
    present = Versions.parse(versions)
    return _Declaration(kind, is_array, present, Versions.parse(nullable) & present, tag, default)


@dataclass(frozen=True, slots=True)
class Field:
    """One field, as it was declared."""

    name: str
    kind: Kind[Any] | type[Any]
    """The element's wire type if `is_array`. For structs, a class decorated with `@struct`."""
    is_array: bool
    versions: Versions
    nullable: Versions
    tag: int | None
    default: object


@dataclass(frozen=True, slots=True)
class StructSchema:
    """Fields of a struct or message in wire order."""

    struct_type: type[Any]
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class MessageSchema(StructSchema):
    api_key: ApiKey
    direction: Direction
    versions: Versions
    flexible: Versions


_structs: dict[type[Any], StructSchema] = {}
_messages: dict[tuple[int, Direction], MessageSchema] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(declared: type[S]) -> type[S]:
    """Make the class a frozen dataclass (slots, keywords only) and keep its schema."""
    struct_type, fields = _define(declared)
    _structs[struct_type] = StructSchema(struct_type, fields)
    return struct_type


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(api_key: ApiKey, *, versions: str, flexible: str) -> Callable[[type[S]], type[S]]:
    """Like `struct`, for the body of a request or response; which of the two follows from the class name's end."""

    def decorate(declared: type[S]) -> type[S]:
        direction = Direction.REQUEST if declared.__name__.endswith("Request") else Direction.RESPONSE
        if not declared.__name__.endswith(direction.value.capitalize()):
            raise TypeError(f"{declared.__name__} is named neither ...Request nor ...Response")
        if (api_key, direction) in _messages:
            raise TypeError(f"{api_key.name} already has a {direction.value}")
        message_type, fields = _define(declared)
        valid = Versions.parse(versions)
        schema = MessageSchema(message_type, fields, api_key, direction, valid, Versions.parse(flexible) & valid)
        _structs[message_type] = schema
        _messages[api_key, direction] = schema
        return message_type

    return decorate


def _define(declared: type[S]) -> tuple[type[S], tuple[Field, ...]]:
    fields: list[Field] = []
    for name in declared.__annotations__:
        declaration = getattr(declared, name, None)
        if not isinstance(declaration, _Declaration):
            raise TypeError(f"{declared.__name__}.{name} has no wire kind")
        if isinstance(declaration.kind, type) and declaration.kind not in _structs:
            raise TypeError(f"{declared.__name__}.{name}: {declaration.kind.__name__} is not a @struct")
        if declaration.default is None and not declaration.nullable:
            raise TypeError(f"{declared.__name__}.{name} defaults to None but is never nullable")
        setattr(declared, name, declaration.default)
        fields.append(
            Field(
                name,
                declaration.kind,
                declaration.is_array,
                declaration.versions,
                declaration.nullable,
                declaration.tag,
                declaration.default,
            )
        )
    return dataclass(frozen=True, slots=True, kw_only=True)(declared), tuple(fields)


def struct_schema(struct_type: type[Any]) -> StructSchema:
    """Return the schema of a struct or message class. Raise KeyError if the class was not declared."""
    return _structs[struct_type]


def message_schema(message_type: type[Any]) -> MessageSchema:
    """Return the schema of a message class. Raise TypeError if the class is not a message."""
    schema = _structs.get(message_type)
    if not isinstance(schema, MessageSchema):
        raise TypeError(f"{message_type.__name__} is not a message")
    return schema


def loaded_message(api_key: int, direction: Direction) -> MessageSchema | None:
    """Return the schema of an API's request or response. Return None if its module is not loaded or declares none."""
    return _messages.get((api_key, direction))


def loaded_messages() -> tuple[MessageSchema, ...]:
    """Return the messages of the loaded modules, by API key, request first."""
    return tuple(_messages[key] for key in sorted(_messages, key=lambda key: (key[0], key[1].value)))
