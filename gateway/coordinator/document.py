"""Convert values to JSON documents and back, by what their dataclasses declare.

The one idea: a field is declared once, in the value that holds it, and is stored from then on; a field that must not be
stored is marked `volatile`. If a document lacks a field (an older release wrote it), the field gets its default. If it
has an extra field (a newer release wrote it), that field is dropped. So fields can be added and removed while two
releases share a database.

Storable are None, bool, int, str, bytes (as base64), UUID, enums (by value), and tuples, frozensets, mappings and
dataclasses of these. Keys of mappings must be storable as a string.
"""

from __future__ import annotations

import base64
import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

T = TypeVar("T")

VOLATILE: Mapping[str, bool] = {"volatile": True}
"""Metadata of a field that does not survive a restart: `x: int = field(default=0, metadata=VOLATILE)`."""

Convert = Callable[[Any], Any]
_Field = tuple[str, Convert, Convert]


def dump(value: object) -> dict[str, object]:
    """Return the document of a dataclass: its fields that are not volatile, by name."""
    return {name: to_json(getattr(value, name)) for name, to_json, _ in _fields(value.__class__)}


def load(cls: type[T], document: Mapping[str, object], **volatile: object) -> T:
    """Return the value of a document. Volatile fields have their defaults unless they are given."""
    return cls(
        **{name: from_json(document[name]) for name, _, from_json in _fields(cls) if name in document}, **volatile
    )


@lru_cache(maxsize=256)
def _fields(cls: type) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    return tuple(
        (each.name, *_converters(hints[each.name]))
        for each in dataclasses.fields(cls)
        if not each.metadata.get("volatile")
    )


def _same(value: T) -> T:
    return value


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _converters(hint: object) -> tuple[Convert, Convert]:
    """Return the functions to JSON and back for one declared type."""
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    if hint in (int, str, bool, type(None)):
        return _same, _same
    if hint is bytes:
        return _to_base64, base64.b64decode
    if hint is UUID:
        return str, UUID
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_value, hint
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return dump, lambda document: load(hint, document)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _optional(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return _fixed_tuple(args)
    if origin in (tuple, frozenset):
        return _sequence(cast(type, origin), args[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*args)
    raise TypeError(f"{hint} cannot be stored")


def _enum_value(value: Enum) -> object:
    return value.value


def _optional(args: tuple[object, ...]) -> tuple[Convert, Convert]:
    (inner,) = [arg for arg in args if arg is not type(None)]
    to_json, from_json = _converters(inner)
    return (
        lambda value: None if value is None else to_json(value),
        lambda given: None if given is None else from_json(given),
    )


def _fixed_tuple(args: tuple[object, ...]) -> tuple[Convert, Convert]:
    each = [_converters(arg) for arg in args]
    is_plain = all(to_json is _same for to_json, _ in each)
    return (
        # A member of a streams group may have thousands of tasks.
        list if is_plain else lambda value: [to_json(item) for (to_json, _), item in zip(each, value, strict=True)],
        lambda given: tuple(from_json(item) for (_, from_json), item in zip(each, given, strict=True)),
    )


def _sequence(kind: Convert, arg: object) -> tuple[Convert, Convert]:
    """Convert a sequence. Sets are sorted, so that equal values have equal documents."""
    to_json, from_json = _converters(arg)
    ordered: Convert = sorted if kind is frozenset else _same
    return (
        lambda value: [to_json(item) for item in ordered(value)],
        lambda given: kind(from_json(item) for item in given),
    )


def _mapping(key: object, item: object) -> tuple[Convert, Convert]:
    key_to_json, key_from_json = _converters(key)
    to_json, from_json = _converters(item)
    key_type = key
    while isinstance(key_type, NewType):
        key_type = key_type.__supertype__
    # In JSON only strings can be keys.
    restore_key: Convert = int if key_type is int else key_from_json
    return (
        lambda value: {str(key_to_json(name)): to_json(each) for name, each in value.items()},
        lambda given: {restore_key(name): from_json(each) for name, each in given.items()},
    )
