"""Protobuf without a compiler: `.proto` texts are parsed into types, and values become JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from pipeline.archive.protobuf import values
from pipeline.archive.protobuf.types import SchemaError, parse
from pipeline.archive.protobuf.values import Decoder, UnreadableError, read_indexes

SCHEMA = """
// A comment; /* not a block */
syntax = "proto3";
package shop.v1;
import "common.proto";
import "google/protobuf/timestamp.proto";
option java_package = "x;y";
message Order {
  option (shop.rules) = { text: "a;}" more { deep: 1 } };
  reserved 20 to max, 30; reserved "old";
  enum State { option allow_alias = true; NEW = 0; PAID = 1; DONE = 1 [deprecated = true]; LOST = -1; }
  message Line { string sku = 1; uint32 count = 2 [json_name = "n", (shop.max) = { v: [1, 2] }]; }
  message Empty {}
  int64 id = 1; /* a block
  over lines */ State state = 2;
  repeated Line lines = 3;
  repeated sint32 deltas = 4;
  map<string, Line> by_name = 5;
  oneof payment { string card = 6; common.Money cash = 7; }
  optional bool gift = 8;
  google.protobuf.Timestamp at = 9;
  .shop.v1.Order parent = 10;
  double weight = 11; float height = 12; bytes raw = 13; uint64 large = 14; bool sent = 15; sfixed32 shift = 16;
  fixed64 fixed = 17; map<int32, State> states = 18; repeated string names = 19;
}
service Orders { rpc Get (Order) returns (Order) { option (http) = { get: "/v1" }; } }
message Other { int32 id = 1; }
"""
COMMON = 'syntax = "proto3"; package common; message Money { sint64 cents = 1; string currency = 2; }'
WELL = """
syntax = "proto3";
import "google/protobuf/struct.proto";
message W {
  google.protobuf.Timestamp at = 1; google.protobuf.Duration took = 2; google.protobuf.Int64Value count = 3;
  google.protobuf.Struct any = 4; google.protobuf.Value value = 5; google.protobuf.Any packed = 6;
  google.protobuf.FieldMask mask = 7; google.protobuf.Empty nothing = 8; google.protobuf.BytesValue raw = 9;
  google.protobuf.ListValue list = 10;
}
"""
DEFAULTS = {
    "id": 0, "state": "NEW", "weight": 0.0, "height": 0.0, "raw": "", "large": 0, "sent": False, "shift": 0,
    "fixed": 0,
}  # fmt: skip


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def piece(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def fixed(field: int, form: str, value: float) -> bytes:
    return varint(field << 3 | (1 if struct.calcsize(form) == 8 else 5)) + struct.pack(form, value)


def decoded(schema: str, message: bytes, *others: str, indexes: bytes = b"\0") -> Any:
    return json.loads(Decoder(parse(schema, others)).json(indexes + message))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (b"", {}),
        (number(1, -5) + number(2, 1), {"id": -5, "state": "PAID"}),
        (number(2, -1), {"state": "LOST"}),
        (number(2, 9), {"state": 9}),
        (piece(3, b"") + piece(3, piece(1, b"a") + number(2, 2**32 + 1)),
         {"lines": [{"sku": "", "count": 0}, {"sku": "a", "count": 1}]}),
        (number(4, 3) + piece(4, varint(0) + varint(1) + varint(2**32 - 1)), {"deltas": [-2, 0, -1, -2147483648]}),
        (piece(5, piece(1, b"k") + piece(2, piece(1, b"s"))) + piece(5, b"") + piece(5, piece(1, b"k")),
         {"by_name": {"k": {"sku": "", "count": 0}, "": {"sku": "", "count": 0}}}),
        (piece(6, b"x") + piece(7, number(1, 1)), {"cash": {"cents": -1, "currency": ""}}),
        (piece(7, number(1, 2)) + piece(7, piece(2, b"EUR")), {"cash": {"cents": 1, "currency": "EUR"}}),
        (number(8, 0), {"gift": False}),
        (piece(10, number(1, 7)), {"parent": {**DEFAULTS, "id": 7}}),
        (fixed(11, "<d", 0.1) + fixed(12, "<f", 0.1), {"weight": 0.1, "height": 0.1}),
        (fixed(11, "<d", float("nan")) + fixed(12, "<f", float("-inf")), {"weight": "NaN", "height": "-Infinity"}),
        (fixed(12, "<f", 3.4e38), {"height": struct.unpack("<f", struct.pack("<f", 3.4e38))[0]}),
        (fixed(12, "<f", 1_000_000.0), {"height": 1_000_000.0}),
        (piece(13, b"\xff\0") + number(14, 2**64 - 1) + number(15, 2),
         {"raw": "/wA=", "large": 2**64 - 1, "sent": True}),
        (fixed(16, "<i", -3) + fixed(17, "<Q", 2**63), {"shift": -3, "fixed": 2**63}),
        (piece(18, number(1, -1) + number(2, 1)), {"states": {"-1": "PAID"}}),
        (piece(19, "ä\n\"".encode()) + piece(19, b""), {"names": ["ä\n\"", ""]}),
        (piece(9, number(1, -1) + number(2, 500_000_000)), {"at": "1969-12-31T23:59:59.5Z"}),
    ],
)  # fmt: skip
def test_a_message_becomes_json_under_the_names_of_its_fields(message: bytes, shown: dict[str, Any]) -> None:
    assert decoded(SCHEMA, message, COMMON) == {**DEFAULTS, **shown}


def test_message_indexes_choose_the_message() -> None:
    def zigzags(*indexes: int) -> bytes:
        return b"".join(varint(2 * each) for each in (len(indexes), *indexes))

    assert decoded(SCHEMA, number(1, 3), COMMON, indexes=zigzags(1)) == {"id": 3}
    assert decoded(SCHEMA, piece(1, b"s"), COMMON, indexes=zigzags(0, 0)) == {"sku": "s", "count": 0}
    assert decoded(SCHEMA, b"", COMMON, indexes=zigzags(0, 1)) == {}
    assert read_indexes(zigzags(200, 3) + b"x") == ([200, 3], 4)
    for path in ((2,), (0, 2), (0, 0, 0)):
        with pytest.raises(UnreadableError, match="no message at the indexes"):
            decoded(SCHEMA, b"", COMMON, indexes=zigzags(*path))
    with pytest.raises(UnreadableError, match="names a message by 33 indexes"):
        read_indexes(zigzags(*range(33)))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (piece(1, number(1, 253_402_300_800)), {"at": {"seconds": 253_402_300_800, "nanos": 0}}),
        (piece(1, number(1, -62_135_596_800)), {"at": "0001-01-01T00:00:00Z"}),
        (piece(2, number(1, -1) + number(2, -5)), {"took": "-1.000000005s"}),
        (piece(3, b""), {"count": 0}),
        (piece(4, piece(1, piece(1, b"a") + piece(2, fixed(2, "<d", 1.5)))
               + piece(1, piece(1, b"b") + piece(2, piece(6, piece(1, number(1, 0)) + piece(1, b""))))),
         {"any": {"a": 1.5, "b": [None, None]}}),
        (piece(5, piece(5, b"")), {"value": {}}),
        (piece(6, piece(1, b"t/T") + piece(2, b"\1")), {"packed": {"type_url": "t/T", "value": "AQ=="}}),
        (piece(7, piece(1, b"a.b")), {"mask": {"paths": ["a.b"]}}),
        (piece(8, b"") + piece(9, piece(1, b"\1")) + piece(10, piece(1, number(4, 1))),
         {"nothing": {}, "raw": "AQ==", "list": [True]}),
    ],
)  # fmt: skip
def test_well_known_types_have_a_form_of_their_own(message: bytes, shown: dict[str, Any]) -> None:
    assert decoded(WELL, message) == shown


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x08", "ends within a number"),
        (b"\x08" + b"\xff" * 11, "a number of more than ten bytes"),
        (piece(6, b"long")[:-1], "ends within a field"),
        (varint(6 << 3 | 2) + varint(2**62), "ends within a field"),
        (number(6, 1), "its field card has the wire type 0"),
        (number(99, 1), "has a field 99, which shop.v1.Order lacks"),
        (b"\x0b", "has the wire type 3"),
        (piece(6, b"\xff"), "a text that is not UTF-8"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_reason(message: bytes, why: str) -> None:
    with pytest.raises(UnreadableError, match=why):
        decoded(SCHEMA, message, COMMON)


def test_a_value_that_would_become_too_much_json_is_refused() -> None:
    nested = b""
    for _ in range(values.MAX_DEPTH + 1):
        nested = piece(10, nested)
    with pytest.raises(UnreadableError, match="messages lie within each other"):
        decoded(SCHEMA, nested, COMMON)
    few = Decoder(parse(SCHEMA, [COMMON]), parts=100)
    for message in (piece(4, bytes(100)), piece(3, b"") * 50):
        with pytest.raises(UnreadableError, match="more than 100 fields and elements"):
            few.json(b"\0" + message)
    short = Decoder(parse(SCHEMA, [COMMON]), characters=300)
    with pytest.raises(UnreadableError, match="longer than 300 characters"):
        short.json(b"\0" + piece(6, b"x" * 300))


def test_proto2_has_no_defaults_and_required_fields() -> None:
    schema = """
    message M {
      required int32 id = 1; optional int32 more = 2 [default = 7]; repeated int32 list = 3 [packed = true];
      extensions 100 to 199;
      extend M { optional int32 beside = 100; }
    }
    """
    assert decoded(schema, number(1, 1)) == {"id": 1}
    with pytest.raises(UnreadableError, match="lacks the required field id"):
        decoded(schema, number(2, 1))
    assert decoded('edition = "2023"; message M { int32 id = 1; }', b"") == {}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ('syntax = "proto3";', "it declares no message"),
        ("message M {", "line 1: it ends too early"),
        ("message M {\n  foo.Bar x = 1;\n}", "the type foo.Bar of M.x is declared nowhere"),
        ("message M {\n  int32 x = y;\n}", "line 2: 'y' is no number"),
        ("message M { int32 x = 1; int32 y = 1; }", "M has two fields of one number or name"),
        ("message M {} enum M { A = 0; }", "M is declared twice"),
        ("message M { optional group G = 1 { } }", "groups are not supported"),
        ("message M { map<double, int32> m = 1; }", "a map has no keys of the type double"),
        ("message M { } §", "line 1: '§' is unexpected"),
        ("/* open", r"line 1: '\*' is unexpected"),
        ("message M { string s = 1 [default = \"open ]; }", "is unexpected"),
        ("message M {" * 40, "more than 32 messages lie within each other"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_schema_is_refused_with_the_reason(schema: str, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        parse(schema)


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(SchemaError, match="longer than 10 characters"):
        parse("message M", ["  "], characters=10)
