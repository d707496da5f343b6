"""Keys and values of records in the forms in which the console shows them."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from gateway.console.decode import MAX_ITEMS, MAX_WHOLE_BYTES, DecodeError, at_path, avro, parse_path, protobuf, shown
from gateway.console.topics import SEARCHED_BYTES, Search
from protocol.records import Record
from protocol.varints import write_uvarint
from tests.console.orders import DATUM, EXPECTED, ORDER


def test_avro_datum_is_decoded_by_its_schema():
    assert avro(DATUM, ORDER) == EXPECTED


def test_avro_value_of_a_registry_is_decoded_behind_its_head():
    told = shown(b"\0\0\0\0\x07" + DATUM, "avro", ORDER, MAX_WHOLE_BYTES)
    assert json.loads(told["text"] or "") == EXPECTED
    assert told.get("schemaId") == 7


def test_avro_name_without_namespace_is_that_of_the_enclosing_namespace():
    """Avro 1.12, "Names". Two types of different namespaces may have one short name."""
    here = {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}
    there = {"type": "enum", "name": "State", "namespace": "billing", "symbols": ["OPEN", "CLOSED"]}
    kinds = (("a", here), ("b", there), ("c", "State"), ("d", "orders.State"), ("e", "billing.State"))
    fields = [{"name": name, "type": kind} for name, kind in kinds]
    schema = {"type": "record", "name": "Order", "namespace": "orders", "fields": fields}
    told = avro(bytes([2] * 5), schema)
    assert told == {"a": "PAID", "b": "CLOSED", "c": "PAID", "d": "PAID", "e": "CLOSED"}


@pytest.mark.parametrize("cut", range(len(DATUM)))
def test_truncated_avro_is_an_error(cut: int):
    with pytest.raises(DecodeError):
        avro(DATUM[:cut], ORDER)


def test_avro_schema_that_refers_to_itself_without_end_is_shown_in_hex():
    endless = {"type": "record", "name": "A", "fields": [{"name": "a", "type": "A"}]}
    assert shown(b"x", "avro", endless)["form"] == "hex"


def test_avro_array_with_a_huge_count_is_bounded():
    with pytest.raises(DecodeError, match="more than"):
        avro(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", {"type": "array", "items": "null"})


def test_protobuf_is_shown_by_field_numbers():
    inner = b"\x0a\x03Ana\x10\x05"
    assert protobuf(b"\x08\x96\x01" + b"\x12" + bytes([len(inner)]) + inner + b"\x1a\x01x\x1a\x01y") == {
        "1": 150,
        "2": {"1": "Ana", "2": 5},
        "3": ["x", "y"],
    }


def test_items_of_nested_protobuf_messages_are_bounded_together():
    inner = b"\x08\x01" * (MAX_ITEMS // 2)
    nested = b"\x12" + write_uvarint(len(inner)) + inner
    assert protobuf(nested)["2"] == {"1": [1] * (MAX_ITEMS // 2)}
    with pytest.raises(DecodeError, match="more than"):
        protobuf(nested * 3)


@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_binary_value_that_is_too_long_to_decode_is_shown_in_hex(form: str):
    told = shown(b"\x0a\x01a" * MAX_WHOLE_BYTES, form, "null", MAX_WHOLE_BYTES)
    assert (told["form"], told.get("why")) == ("hex", f"not {form}: a value of more than 256 KiB is not decoded")


def test_json_is_recognised_and_written_with_indents_when_shown_alone():
    told = shown(b'{"a":[1]}', "auto", None, MAX_WHOLE_BYTES)
    assert told["form"] == "json"
    assert told["text"] == '{\n  "a": [\n    1\n  ]\n}'


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"\x01\x02", bytes(range(1, 256))])
def test_binary_value_is_shown_in_hex(raw: bytes):
    assert shown(raw, "auto")["form"] == "hex"


@pytest.mark.parametrize("raw", [b'{"price": 12.50}', b"[0.1234567890123456789]", b"[1e400]", b'{"a": 1, "a": 2}'])
def test_json_that_python_would_change_is_shown_as_it_is(raw: bytes):
    told = shown(raw, "auto")
    assert (told["form"], told["text"]) == ("json", raw.decode())


def test_long_value_is_cut_and_says_its_size():
    told = shown(b"x" * 1_000_000, "auto")
    assert told["size"] == 1_000_000
    assert told.get("cut")
    assert len(told["text"] or "") <= 4096


def test_deep_json_is_shown_as_text():
    assert shown(b"[" * 3_000 + b"]" * 3_000, "json", None, MAX_WHOLE_BYTES)["form"] in ("hex", "text")


def test_value_that_is_not_json_says_why():
    told = shown(b"{oops", "json", None, MAX_WHOLE_BYTES)
    assert told["form"] == "hex"
    assert "not json" in told.get("why", "")


def test_null_differs_from_empty():
    assert shown(None, "auto")["text"] is None
    assert shown(b"", "auto")["text"] == ""


@pytest.mark.parametrize("path", ["$.user.ids[1]", "user.ids.1"])
def test_json_path_finds_a_value(path: str):
    assert at_path(b'{"user":{"ids":[1,2]}}', parse_path(path)) == 2


def test_json_path_into_nothing_is_none():
    assert at_path(b'{"user":1}', ("user", "name")) is None
    assert at_path(b"not json", ("user",)) is None
    assert at_path(None, ("user",)) is None
    assert at_path(b"[1]", ("\N{SUPERSCRIPT TWO}",)) is None
    assert at_path(b"[1]", ("9" * 5_000,)) is None


@pytest.mark.parametrize("before", [0, SEARCHED_BYTES - 5, SEARCHED_BYTES - 1, 3 * SEARCHED_BYTES])
@pytest.mark.parametrize("text", ["Zürich", "𝔘𝔫𝔦"])
def test_text_is_found_anywhere_in_a_value(before: int, text: str):
    value = b"\xff" * before + text.encode() + b"\xff"
    assert Search("t", (), text=text.upper()).finds(Record(0, 0, None, value))
    assert not Search("t", (), text=f"{text}x").finds(Record(0, 0, None, value))


def test_text_is_searched_in_pieces_of_a_large_value():
    """A value that is decoded in one go keeps the interpreter from the event loop of the node."""
    record = Record(0, 0, None, b"\xff" * 20_000_000)
    tracemalloc.start()
    try:
        assert not Search("t", (), text="x").finds(record)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000
