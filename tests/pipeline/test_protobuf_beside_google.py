"""Our Protobuf reader compared with Google's own library, on random schemas and messages.

Each schema exists twice: as text for our parser, and as a descriptor for Google's library. Google's library writes a
message, we turn its bytes into JSON, and Google's library reads the JSON. The result must equal the original message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pipeline.archive.protobuf.types import parse
from pipeline.archive.protobuf.values import Decoder, UnreadableError

KINDS = descriptor_pb2.FieldDescriptorProto
SCALARS = [
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
]  # fmt: skip
KEYS = [each for each in SCALARS if each not in ("double", "float", "bytes")]
STATES = {"NEW": 0, "PAID": 1, "LOST": -3, "FAR": 2**31 - 1}
MESSAGES = 4
SEEDS = range(40)


class RandomSchema:
    """Random messages that contain each other, and one enum: as text and as a class of Google's library."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._file = descriptor_pb2.FileDescriptorProto(name="made.proto", package="made", syntax="proto3")
        self._texts = ["enum State { " + " ".join(f"{name} = {number};" for name, number in STATES.items()) + " }"]
        enum = self._file.enum_type.add(name="State")
        for name, number in STATES.items():
            enum.value.add(name=name, number=number)
        for index in range(MESSAGES):
            self._message(index)
        self.text = "\n".join(['syntax = "proto3";', "package made;", *self._texts])
        pool = descriptor_pool.DescriptorPool()
        pool.Add(self._file)
        self.classes = [
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"made.M{index}")) for index in range(MESSAGES)
        ]

    def _message(self, index: int) -> None:
        made = self._file.message_type.add(name=f"M{index}")
        numbers = self._chance.sample([*range(1, 40), 2_000, 70_000, 2**29 - 1], k=self._chance.randint(1, 12))
        lines = [self._field(made, f"f{number}", number) for number in numbers]
        if self._chance.random() < 0.5:
            made.oneof_decl.add(name="choice")
            members = [
                self._of_oneof(made, f"o{number}", number) for number in range(50, 50 + self._chance.randint(1, 4))
            ]
            lines.append("oneof choice { " + " ".join(members) + " }")
        # A proto3 optional is a oneof of its own. Protobuf requires such oneofs after all other oneofs.
        if self._chance.random() < 0.7:
            made.oneof_decl.add(name="_maybe")
            field = made.field.add(name="maybe", number=60, label=KINDS.LABEL_OPTIONAL, proto3_optional=True)
            field.oneof_index = len(made.oneof_decl) - 1
            lines.append(f"optional {self._typed(field)} maybe = 60;")
        self._texts.append(f"message M{index} {{\n" + "\n".join(lines) + "\n}")

    def _field(self, made: descriptor_pb2.DescriptorProto, name: str, number: int) -> str:
        if self._chance.random() < 0.15:
            return self._map(made, name, number)
        repeated = self._chance.random() < 0.3
        label = KINDS.LABEL_REPEATED if repeated else KINDS.LABEL_OPTIONAL
        field = made.field.add(name=name, number=number, label=label)
        written = self._typed(field)
        packable = repeated and field.type not in (KINDS.TYPE_MESSAGE, KINDS.TYPE_STRING, KINDS.TYPE_BYTES)
        if packable and self._chance.random() < 0.5:
            field.options.packed = False
        return f"{'repeated ' if repeated else ''}{written} {name} = {number};"

    def _of_oneof(self, made: descriptor_pb2.DescriptorProto, name: str, number: int) -> str:
        field = made.field.add(name=name, number=number, label=KINDS.LABEL_OPTIONAL, oneof_index=0)
        return f"{self._typed(field)} {name} = {number};"

    def _map(self, made: descriptor_pb2.DescriptorProto, name: str, number: int) -> str:
        entry = made.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        key = self._chance.choice(KEYS)
        entry.field.add(name="key", number=1, label=KINDS.LABEL_OPTIONAL, type=KINDS.Type.Value(f"TYPE_{key.upper()}"))
        value = self._typed(entry.field.add(name="value", number=2, label=KINDS.LABEL_OPTIONAL))
        field = made.field.add(name=name, number=number, label=KINDS.LABEL_REPEATED, type=KINDS.TYPE_MESSAGE)
        field.type_name = f".made.{made.name}.{entry.name}"
        return f"map<{key}, {value}> {name} = {number};"

    def _typed(self, field: descriptor_pb2.FieldDescriptorProto) -> str:
        """Give a field a type, and return the type as a `.proto` file writes it."""
        drawn = self._chance.random()
        if drawn < 0.2:
            name = f"M{self._chance.randrange(MESSAGES)}"
            field.type, field.type_name = KINDS.TYPE_MESSAGE, f".made.{name}"
            return self._chance.choice([name, f"made.{name}", f".made.{name}"])
        if drawn < 0.3:
            field.type, field.type_name = KINDS.TYPE_ENUM, ".made.State"
            return "State"
        name = self._chance.choice(SCALARS)
        field.type = KINDS.Type.Value(f"TYPE_{name.upper()}")
        return name


def _integer(low: int, high: int) -> Callable[[random.Random], int]:
    def draw(chance: random.Random) -> int:
        return chance.choice([low, high, 0, 1, max(low, -1), chance.randint(low, high), chance.randint(0, 300)])

    return draw


def _double(chance: random.Random) -> float:
    edges = [0.0, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), 0.1, 1e22, -123456.789]
    return chance.choice([*edges, chance.uniform(-1e9, 1e9)])


def _float(chance: random.Random) -> float:
    edges = [0.0, -0.0, 1e-45, 3.4028234663852886e38, float("inf"), 0.1, 1_000_000.0, 16_777_217.0, 1e-3, 1e7]
    return chance.choice([*edges, chance.uniform(-1e9, 1e9), chance.uniform(-1, 1)])


def _text(chance: random.Random) -> str:
    return "".join(chance.choice('aÄ"\\\n\t\0\x7f漢🙂/{},:') for _ in range(chance.randint(0, 6)))


INT32, INT64 = _integer(-(2**31), 2**31 - 1), _integer(-(2**63), 2**63 - 1)
UINT32, UINT64 = _integer(0, 2**32 - 1), _integer(0, 2**64 - 1)
DRAWN: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.TYPE_DOUBLE: _double,
    FieldDescriptor.TYPE_FLOAT: _float,
    **dict.fromkeys((FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32), INT32),
    **dict.fromkeys((FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED64), INT64),
    **dict.fromkeys((FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32), UINT32),
    **dict.fromkeys((FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64), UINT64),
    FieldDescriptor.TYPE_BOOL: lambda chance: chance.random() < 0.5,
    FieldDescriptor.TYPE_STRING: _text,
    FieldDescriptor.TYPE_BYTES: lambda chance: chance.randbytes(chance.randint(0, 5)),
    # The number of an enum value may be unknown, because proto3's enums are open.
    FieldDescriptor.TYPE_ENUM: lambda chance: chance.choice([*STATES.values(), 7, -(2**31)]),
}


def fill(message: Any, chance: random.Random, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.4 or depth > 3:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, inner = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            for _ in range(chance.randint(0, 3)):
                drawn = DRAWN[key.type](chance)
                if inner.message_type is None:
                    value[drawn] = DRAWN[inner.type](chance)
                else:
                    fill(value[drawn], chance, depth + 1)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(chance.randint(0, 3)):
                fill(value.add(), chance, depth + 1)
        elif field.message_type is not None:
            value.SetInParent()
            fill(value, chance, depth + 1)
        elif field.is_repeated:
            value.extend(DRAWN[field.type](chance) for _ in range(chance.randint(0, 4)))
        else:
            setattr(message, field.name, DRAWN[field.type](chance))


def read_back(text: str, made: type[Message]) -> Message:
    return json_format.Parse(text, made(), max_recursion_depth=200)


@pytest.mark.parametrize("seed", SEEDS)
def test_google_reads_our_json_of_a_message_as_the_message_that_it_wrote(seed: int) -> None:
    chance = random.Random(seed)
    schema = RandomSchema(chance)
    decoder = Decoder(parse(schema.text))
    for index, made in enumerate(schema.classes):
        indexes = bytes([2, 2 * index])
        for _ in range(10):
            message: Any = made()
            fill(message, chance)
            raw = message.SerializeToString()
            if chance.random() < 0.3:
                # Two encoded messages in sequence count as one merged message.
                second: Any = made()
                fill(second, chance)
                raw += second.SerializeToString()
                message.MergeFrom(second)
            text = decoder.json(indexes + raw)
            assert read_back(text, made) == message, (schema.text, text)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_bytes_are_refused_or_read_as_google_reads_them(seed: int) -> None:
    """We refuse more messages than Google's library: those with fields that the schema lacks, and with fields of
    another wire type.
    """
    chance = random.Random(seed)
    schema = RandomSchema(chance)
    decoder = Decoder(parse(schema.text))
    for index, made in enumerate(schema.classes):
        for _ in range(30):
            message: Any = made()
            fill(message, chance)
            raw = bytearray(message.SerializeToString())
            for _ in range(chance.randint(1, 3)):
                if raw and chance.random() < 0.7:
                    raw[chance.randrange(len(raw))] = chance.randrange(256)
                else:
                    raw = raw[: chance.randint(0, len(raw))]
            try:
                text = decoder.json(bytes([2, 2 * index]) + bytes(raw))
            except UnreadableError:
                continue
            try:
                theirs = made.FromString(bytes(raw))
            except DecodeError:
                pytest.fail(f"Google's library refuses {bytes(raw).hex()} of {schema.text}, we read {text}")
            if '"NaN"' not in text:
                assert read_back(text, made) == theirs, (schema.text, bytes(raw).hex(), text)
