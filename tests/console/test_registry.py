"""Records that the console decodes with the schemas of a registry. The registry is an HTTP server with the paths of
Confluent's.
"""

from __future__ import annotations

import base64
import json
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.console.decode import DecodeError
from gateway.console.descriptors import read_descriptor
from gateway.console.registry import AWAY_S, Registry
from protocol.varints import write_uvarint
from tests.conftest import gateways
from tests.console.consoles import Consoled, start_consoled
from tests.console.orders import DATUM, EXPECTED, ORDER
from tests.gateway_process import free_ports
from tests.postgres import Databases

ITEM = {"type": "record", "name": "Item", "namespace": "shop", "fields": [{"name": "sku", "type": "string"}]}
CART = {
    "type": "record",
    "name": "Cart",
    "fields": [{"name": "items", "type": {"type": "array", "items": "shop.Item"}}],
}
LOGIN = "viewer:s3cret"


def tagged(number: int, kind: int, value: bytes | int) -> bytes:
    head = write_uvarint(number << 3 | kind)
    if isinstance(value, int):
        return head + write_uvarint(value)
    return head + (write_uvarint(len(value)) if kind == 2 else b"") + value


def text(number: int, value: str) -> bytes:
    return tagged(number, 2, value.encode())


def declared(name: str, number: int, kind: int, *, repeated: bool = False, type_name: str = "") -> bytes:
    label = tagged(4, 0, 3 if repeated else 1)
    return tagged(2, 2, text(1, name) + tagged(3, 0, number) + label + tagged(5, 0, kind) + text(6, type_name))


ENTRY = text(1, "LabelsEntry") + declared("key", 1, 9) + declared("value", 2, 5) + tagged(7, 2, tagged(7, 0, 1))
ADDRESS = text(1, "Address") + declared("city", 1, 9)
PERSON = (
    text(1, "Person")
    + declared("name", 1, 9)
    + declared("age", 2, 5)
    + declared("home", 3, 11, type_name=".shop.Person.Address")
    + declared("scores", 4, 17, repeated=True)
    + declared("labels", 5, 11, repeated=True, type_name=".shop.Person.LabelsEntry")
    + declared("level", 6, 14, type_name=".shop.Level")
    + declared("height", 7, 1)
    + tagged(3, 2, ADDRESS)
    + tagged(3, 2, ENTRY)
)
LEVEL = (
    text(1, "Level") + tagged(2, 2, text(1, "LOW") + tagged(2, 0, 0)) + tagged(2, 2, text(1, "HIGH") + tagged(2, 0, 5))
)
FILE = (
    text(1, "person.proto")
    + text(2, "shop")
    + tagged(4, 2, text(1, "Other"))
    + tagged(4, 2, PERSON)
    + tagged(5, 2, LEVEL)
)
ANA = (
    text(1, "Ana")
    + tagged(2, 0, 41)
    + tagged(3, 2, text(1, "Porto"))
    + tagged(4, 2, b"\x03\x04")
    + tagged(5, 2, text(1, "a") + tagged(2, 0, 7))
    + tagged(6, 0, 5)
    + tagged(7, 1, struct.pack("<d", 1.5))
)
ANA_SHOWN = {
    "name": "Ana",
    "age": 41,
    "home": {"city": "Porto"},
    "scores": [-2, 2],
    "labels": {"a": 7},
    "level": "HIGH",
    "height": 1.5,
}
SECOND_MESSAGE = b"\x02\x02"
"""Message indexes of Protobuf: one index, for the second message of the file."""

SCHEMAS: dict[str, Any] = {
    "/schemas/ids/7": {"schema": json.dumps(ORDER)},
    "/schemas/ids/8": {
        "schema": json.dumps(CART),
        "references": [{"name": "shop.Item", "subject": "item/1", "version": 3}],
    },
    "/subjects/item%2F1/versions/3": {"schema": json.dumps(ITEM), "id": 5},
    "/schemas/ids/9": {"schema": "{}", "schemaType": "JSON"},
    "/schemas/ids/10": {"schema": "message Person {}", "schemaType": "PROTOBUF"},
    "/schemas/ids/10?format=serialized": {"schema": base64.b64encode(FILE).decode(), "schemaType": "PROTOBUF"},
}


@dataclass
class Served:
    """A registry, and the paths that were requested from it."""

    port: int
    asked: list[str] = field(default_factory=list[str])


@contextmanager
def registry(port: int) -> Iterator[Served]:
    served = Served(port)
    expected = "Basic " + base64.b64encode(LOGIN.encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            known = SCHEMAS.get(self.path)
            status = 401 if self.headers.get("Authorization") != expected else 404 if known is None else 200
            body = json.dumps(known).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class WithRegistry:
    console: Consoled
    port: int
    """Port of the registry. The registry is unreachable until the fixture `registry` starts it."""


@pytest.fixture(scope="module")
def site(postgres: Databases) -> Iterator[WithRegistry]:
    (port,) = free_ports(1)
    settings = {
        "console.schema.registry.url": f"http://127.0.0.1:{port}",
        "console.schema.registry.login": LOGIN,
    }
    with gateways(postgres) as factory:
        consoled = start_consoled(factory, settings)
        try:
            yield WithRegistry(consoled, port)
        finally:
            consoled.close()


def framed(schema_id: int, body: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + body


def browsed(site: WithRegistry, values: list[bytes], **query: Any) -> list[dict[str, Any]]:
    """Write the values, and return them in order as the console shows them."""
    topic = f"framed-{uuid.uuid4().hex[:8]}"
    site.console.topic(topic, 1)
    site.console.produce(topic, [(None, value, []) for value in values])
    records = site.console.person.get("topic/records", topic=topic, begin="earliest", **query)["records"]
    return [each["value"] for each in sorted(records, key=lambda each: each["offset"])]


def test_records_are_decoded_by_the_schema_of_their_id(site: WithRegistry):
    with registry(site.port) as served:
        cart = framed(8, b"\x04\x04s1\x04s2\x00")
        person = framed(10, SECOND_MESSAGE + ANA)
        shown = browsed(site, [framed(7, DATUM), cart, framed(9, b'{"a":1}'), person, framed(7, DATUM)])
        assert [json.loads(each["text"]) for each in shown] == [
            EXPECTED,
            {"items": [{"sku": "s1"}, {"sku": "s2"}]},
            {"a": 1},
            ANA_SHOWN,
            EXPECTED,
        ]
        assert [(each["form"], each["schemaId"]) for each in shown] == [
            ("avro", 7),
            ("avro", 8),
            ("json", 9),
            ("protobuf", 10),
            ("avro", 7),
        ]
        before = len(served.asked)
        assert served.asked.count("/schemas/ids/7") == 1
        browsed(site, [framed(7, DATUM)])
        assert len(served.asked) == before


def test_unknown_id_and_body_that_does_not_fit_are_shown_in_hex_with_the_reason(site: WithRegistry):
    with registry(site.port):
        unknown, torn = browsed(site, [framed(404, b"x"), framed(7, DATUM[:4])])
    assert (unknown["form"], unknown["schemaId"]) == ("hex", 404)
    assert "the registry has no schema 404" in unknown["why"]
    assert (torn["form"], torn["schemaId"]) == ("hex", 7)
    assert "the value ends at byte 4" in torn["why"]


def test_many_new_ids_in_one_answer_are_bounded(site: WithRegistry):
    with registry(site.port) as served:
        shown = browsed(site, [framed(number, b"x") for number in range(1000, 1100)], limit=100)
        assert len(served.asked) == 50
    assert "more than 50 new schemas" in shown[-1]["why"]


def test_registry_that_is_away_is_said_and_asked_again_later(site: WithRegistry):
    shown = browsed(site, [framed(number, b"x") for number in range(20, 40)])
    assert {each["form"] for each in shown} == {"hex"}
    assert all("console.schema.registry.url" in each["why"] for each in shown)


@pytest.mark.parametrize("cut", range(len(ANA)))
def test_truncated_protobuf_is_an_error_or_a_shorter_message(cut: int):
    types = read_descriptor(FILE)
    try:
        shown = types.decode(SECOND_MESSAGE + ANA[:cut])
    except DecodeError:
        return
    assert isinstance(shown, dict)
    assert shown.items() <= ANA_SHOWN.items()


def test_protobuf_field_that_the_schema_lacks_is_named_by_its_number():
    assert read_descriptor(FILE).decode(SECOND_MESSAGE + text(1, "Ana") + text(99, "new")) == {
        "name": "Ana",
        "99": "(not in the schema)",
    }


@pytest.mark.parametrize("indexes", [b"\x02\x04", b"\x04\x02\x08", b"\x02\x01"])
def test_message_index_that_the_schema_lacks_is_an_error(indexes: bytes):
    with pytest.raises(DecodeError, match="no message"):
        read_descriptor(FILE).decode(indexes + ANA)


async def test_a_schema_that_was_absent_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch):
    """A registry that has not read all of its schemas since its start answers 404."""
    (port,) = free_ports(1)
    now_s = 0.0
    with registry(port) as served:
        known = Registry(f"http://127.0.0.1:{port}", LOGIN, clock=lambda: now_s)
        assert await known.find(77) == "the registry has no schema 77"
        monkeypatch.setitem(SCHEMAS, "/schemas/ids/77", {"schema": "{}", "schemaType": "JSON"})
        assert await known.find(77) == "the registry has no schema 77"
        assert served.asked == ["/schemas/ids/77"], "one request in this time"
        now_s = AWAY_S + 1
        assert not isinstance(await known.find(77), str)
        await known.close()
