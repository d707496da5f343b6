"""Combine an Avro schema with the schemas to which it refers by name.

The one idea: Spark's reader takes one schema, so the first use of a name becomes its definition, and later uses stay
names, as Avro demands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

NAMED = ("record", "error", "enum", "fixed")


def is_union(schema: Any) -> TypeGuard[list[Any]]:
    """Return whether a schema is a union of others."""
    return isinstance(schema, list)


def is_declared(schema: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a schema is a JSON object and not a name."""
    return isinstance(schema, dict)


def whole(text: str, others: Sequence[str]) -> str:
    """Return the schema `text` completed with definitions from `others` for the types that it refers to. Raise
    ValueError if a schema is not JSON.
    """
    definitions: dict[str, dict[str, Any]] = {}
    for each in others:
        _collect(json.loads(each), "", definitions)
    return json.dumps(_filled(json.loads(text), "", definitions, set()))


def _collect(schema: Any, space: str, found: dict[str, dict[str, Any]]) -> None:
    """Add the named types in `schema` to `found`, by full name."""
    if is_union(schema):
        for each in schema:
            _collect(each, space, found)
    elif is_declared(schema):
        if schema.get("type") in NAMED:
            full = _full_name(schema, space)
            space = full.rpartition(".")[0]
            found.setdefault(full, {**schema, "name": full.rpartition(".")[2], "namespace": space})
        for inner in _inner(schema):
            _collect(inner, space, found)


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas within a schema."""
    kind = schema.get("type")
    found = [schema[name] for name in ("items", "values") if name in schema]
    found += [field["type"] for field in schema.get("fields", [])]
    return found if kind in NAMED else [kind, *found]


def _filled(schema: Any, space: str, definitions: Mapping[str, dict[str, Any]], done: set[str]) -> Any:
    if is_union(schema):
        return [_filled(each, space, definitions, done) for each in schema]
    if isinstance(schema, str):
        full = schema if "." in schema or not space else f"{space}.{schema}"
        full = full if full in definitions else schema
        if full not in definitions:
            return schema
        return full if full in done else _filled(definitions[full], "", definitions, done)
    if not is_declared(schema):
        return schema
    found = dict(schema)
    if schema.get("type") in NAMED:
        full = _full_name(schema, space)
        space = full.rpartition(".")[0]
        if full in done and full in definitions:
            return full
        done.add(full)
    elif "type" in schema:
        found["type"] = _filled(schema["type"], space, definitions, done)
    for name in ("items", "values"):
        if name in schema:
            found[name] = _filled(schema[name], space, definitions, done)
    if "fields" in schema:
        found["fields"] = [
            {**each, "type": _filled(each["type"], space, definitions, done)} for each in schema["fields"]
        ]
    return found


def _full_name(schema: Mapping[str, Any], space: str) -> str:
    name = str(schema["name"])
    space = str(schema.get("namespace", space) or "")
    return name if "." in name or not space else f"{space}.{name}"
