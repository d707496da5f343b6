"""An Avro datum with its schema, and the values in it."""

from __future__ import annotations

import struct

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "price", "type": "double"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
    ],
}
DATUM = b"\x54" + b"\x02\x04hi" + b"\x04\x02a\x02b\x00" + struct.pack("<d", 2.5) + b"\x02"
EXPECTED = {"id": 42, "note": "hi", "tags": ["a", "b"], "price": 2.5, "kind": "OLD"}
