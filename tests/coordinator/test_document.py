"""Values as JSON documents and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType
from uuid import UUID

import pytest

from gateway.coordinator.document import VOLATILE, dump, load

Name = NewType("Name", str)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    data: bytes
    colour: Colour | None = None


@dataclass(frozen=True)
class Outer:
    name: Name
    inners: tuple[Inner, ...]
    pairs: tuple[tuple[str, bytes], ...]
    by_topic: Mapping[UUID, frozenset[int]]
    by_number: Mapping[int, bool]
    fixed: tuple[int, str]
    nothing: Inner | None = None
    added: int = 7
    seen: int = field(default=1, metadata=VOLATILE)


WHOLE = Outer(
    Name("\0 ü"),
    (Inner(b"\0\xff", Colour.RED), Inner(b"")),
    (("range", b"1"), ("range", b"2")),
    {UUID(int=5): frozenset({3, 1, 2})},
    {-1: True},
    (1, "x"),
    seen=99,
)


def test_document_restores_all_but_volatile_fields() -> None:
    again = load(Outer, json.loads(json.dumps(dump(WHOLE))), seen=99)
    assert again == WHOLE
    assert "seen" not in dump(WHOLE)
    assert load(Outer, dump(WHOLE)).seen == 1


def test_fields_may_come_and_go_while_two_releases_share_a_database() -> None:
    document = dump(WHOLE)
    del document["added"]
    document["of a newer release"] = {"x": 1}
    assert load(Outer, document, seen=99) == WHOLE


def test_equal_values_have_equal_documents() -> None:
    other = dump(Outer(**{**WHOLE.__dict__, "by_topic": {UUID(int=5): frozenset({2, 3, 1})}}))
    assert json.dumps(other) == json.dumps(dump(WHOLE))


def test_type_that_json_cannot_hold_is_refused_at_once() -> None:
    @dataclass
    class Strange:
        value: complex

    with pytest.raises(TypeError, match="complex"):
        dump(Strange(1j))
