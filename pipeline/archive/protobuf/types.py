"""Types of Protobuf, read from the text of `.proto` files.

The one idea: values need only messages, their fields and enums, so the parser skips options, services and extensions.
The parser does not look for imported files: the caller passes the texts to which a schema refers, and `WELL_KNOWN`
holds the types that every Protobuf compiler includes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

MAX_CHARACTERS = 4 * 1024 * 1024
MAX_NESTED = 32
"""Maximal depth of messages within messages."""
SCALARS = frozenset(
    ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
     "sfixed64", "bool", "string", "bytes")
)  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>\.?[A-Za-z_][\w.]*|-?\.?\d[\w.]*)
    |(?P<mark>[{}()\[\]<>=;,:/+-])""",
    re.DOTALL | re.VERBOSE,
)
WELL_KNOWN = """
syntax = "proto3";
package google.protobuf;
message Any { string type_url = 1; bytes value = 2; }
message Duration { int64 seconds = 1; int32 nanos = 2; }
message Timestamp { int64 seconds = 1; int32 nanos = 2; }
message Empty {}
message FieldMask { repeated string paths = 1; }
message DoubleValue { double value = 1; }
message FloatValue { float value = 1; }
message Int64Value { int64 value = 1; }
message UInt64Value { uint64 value = 1; }
message Int32Value { int32 value = 1; }
message UInt32Value { uint32 value = 1; }
message BoolValue { bool value = 1; }
message StringValue { string value = 1; }
message BytesValue { bytes value = 1; }
enum NullValue { NULL_VALUE = 0; }
message Value {
  oneof kind {
    NullValue null_value = 1;
    double number_value = 2;
    string string_value = 3;
    bool bool_value = 4;
    Struct struct_value = 5;
    ListValue list_value = 6;
  }
}
message Struct { map<string, Value> fields = 1; }
message ListValue { repeated Value values = 1; }
"""


class SchemaError(Exception):
    """The text is not a schema that this module reads. The message says why, and in which line."""


@dataclass(frozen=True, slots=True)
class Field:
    number: int
    name: str
    kind: str
    """One of SCALARS, or message, enum or map."""
    type_name: str = ""
    """Full name of the message or enum; for a map, of the message of its entries."""
    repeated: bool = False
    presence: Literal["implicit", "explicit", "required"] = "explicit"
    """How an absent field is treated. A field with implicit presence then has its type's default."""
    oneof: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    fields: tuple[Field, ...]
    nested: tuple[str, ...]
    """Full names of the messages that are declared in this one, in order."""


@dataclass(frozen=True, slots=True)
class Types:
    """Messages and enums by full name. `top` has the messages of the schema itself, in order."""

    top: tuple[str, ...]
    messages: Mapping[str, Message]
    enums: Mapping[str, Mapping[int, str]]

    def at(self, path: Sequence[int]) -> str | None:
        """Return the full name of the message at a path of indexes, None if there is no such message."""
        names, found = self.top, None
        for index in path:
            if not 0 <= index < len(names):
                return None
            found = names[index]
            names = self.messages[found].nested
        return found


def parse(text: str, others: Sequence[str] = (), characters: int = MAX_CHARACTERS) -> Types:
    """Return the types of a schema. `others` are the texts to which the schema refers. `characters` limits the length
    of all texts together.

    Raise SchemaError.
    """
    if len(text) + sum(map(len, others)) > characters:
        raise SchemaError(f"it is longer than {characters:,} characters")
    found = _Found()
    top = _Parser(text, found).file()
    for each in others:
        _Parser(each, found).file()
    known = _Found()
    _Parser(WELL_KNOWN, known).file()
    # A registry may also have these types. The readers of their values rely on the fields that are declared here.
    messages, enums = found.messages | known.messages, found.enums | known.enums
    if not top:
        raise SchemaError("it declares no message")
    return Types(tuple(top), {name: _resolved(name, each, messages, enums) for name, each in messages.items()}, enums)


@dataclass(slots=True)
class _Found:
    messages: dict[str, Message] = field(default_factory=dict[str, Message])
    enums: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])


def _resolved(name: str, message: Message, messages: Mapping[str, Message], enums: Mapping[str, object]) -> Message:
    """Return `message` with its fields' types replaced by their full names."""
    return replace(message, fields=tuple(_with_type(name, each, messages, enums) for each in message.fields))


def _with_type(scope: str, each: Field, messages: Mapping[str, Message], enums: Mapping[str, object]) -> Field:
    if each.kind in SCALARS or each.kind == "map":
        return each
    written = each.type_name
    inner = "" if written.startswith(".") else scope
    while True:
        found = f"{inner}.{written}" if inner else written.removeprefix(".")
        if found in messages:
            return replace(each, kind="message", type_name=found)
        if found in enums:
            return replace(each, kind="enum", type_name=found)
        if not inner:
            raise SchemaError(f"the type {written} of {scope}.{each.name} is declared nowhere")
        inner = inner.rpartition(".")[0]


class _Parser:
    """The parser of one file. It adds the types to `found`."""

    def __init__(self, text: str, found: _Found) -> None:
        self._text, self._found = text, found
        self._tokens: list[tuple[str, int]] = []
        self._next = 0
        self._is_proto3 = False
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                self._fail(f"{text[at]!r} is unexpected", at)
            if token.lastgroup != "space":
                self._tokens.append((token.group(), at))
            at = token.end()

    def file(self) -> list[str]:
        """Read all declarations. Return the full names of the messages that are not nested in another message, in
        order.
        """
        scope, top = "", list[str]()
        while self._next < len(self._tokens):
            match self._take():
                case ";":
                    continue
                case "syntax":
                    self._expect("=")
                    self._is_proto3 = self._take()[1:-1] == "proto3"
                    self._expect(";")
                case "package":
                    scope = self._take()
                    self._expect(";")
                case "message":
                    top.append(self._message(scope, 0))
                case "enum":
                    self._enum(scope)
                case "edition" | "import" | "option":
                    self._skip_statement()
                case "service" | "extend":
                    self._skip_block()
                case word:
                    self._fail(f"{word!r} is unexpected")
        return top

    def _message(self, scope: str, depth: int) -> str:
        name = self._declared(scope)
        if depth == MAX_NESTED:
            self._fail(f"more than {MAX_NESTED} messages lie within each other")
        fields, nested = list[Field](), list[str]()
        self._expect("{")
        while (word := self._take()) != "}":
            match word:
                case ";":
                    continue
                case "message":
                    nested.append(self._message(name, depth + 1))
                case "enum":
                    self._enum(name)
                case "oneof":
                    fields += self._oneof(name)
                case "option" | "reserved" | "extensions":
                    self._skip_statement()
                case "extend":
                    self._skip_block()
                case _:
                    fields.append(self._field(name, word))
        if len({each.number for each in fields}) < len(fields) or len({each.name for each in fields}) < len(fields):
            self._fail(f"{name} has two fields of one number or name")
        self._found.messages[name] = Message(tuple(fields), tuple(nested))
        return name

    def _oneof(self, scope: str) -> list[Field]:
        name, fields = self._take(), list[Field]()
        self._expect("{")
        while (word := self._take()) != "}":
            if word == "option":
                self._skip_statement()
            elif word != ";":
                fields.append(replace(self._field(scope, word), presence="explicit", oneof=name))
        return fields

    def _field(self, scope: str, word: str) -> Field:
        label = ""
        if word in ("optional", "required", "repeated"):
            label, word = word, self._take()
        if word == "group":
            self._fail("groups are not supported")
        if word == "map" and self._peek() == "<":
            return self._map(scope)
        name, number = self._numbered()
        presence = "required" if label == "required" else "explicit"
        if self._is_proto3 and not label:
            presence = "implicit"
        kind = word if word in SCALARS else ""
        return Field(number, name, kind, "" if kind else word, label == "repeated", presence)

    def _map(self, scope: str) -> Field:
        self._expect("<")
        key = self._take()
        if key not in SCALARS - {"double", "float", "bytes"}:
            self._fail(f"a map has no keys of the type {key}")
        self._expect(",")
        value = self._take()
        self._expect(">")
        name, number = self._numbered()
        kind = value if value in SCALARS else ""
        # No message can be declared under this name.
        entry = f"{scope}.{name}>"
        fields = (
            Field(1, "key", key, presence="implicit"),
            Field(2, "value", kind, "" if kind else value, presence="implicit"),
        )
        self._found.messages[entry] = Message(fields, ())
        return Field(number, name, "map", entry)

    def _enum(self, scope: str) -> None:
        name, values = self._declared(scope), dict[int, str]()
        self._expect("{")
        while (word := self._take()) != "}":
            if word in ("option", "reserved"):
                self._skip_statement()
            elif word != ";":
                self._next -= 1
                symbol, number = self._numbered()
                # If two names have the same number, the first name is used.
                values.setdefault(number, symbol)
        self._found.enums[name] = values

    def _numbered(self) -> tuple[str, int]:
        """Return name and number of `NAME = NUMBER [OPTIONS];`."""
        name = self._take()
        if not name.isidentifier():
            self._fail(f"{name!r} is no name")
        self._expect("=")
        word = self._take()
        try:
            number = int(word, 0)
        except ValueError:
            self._fail(f"{word!r} is no number")
        if self._peek() == "[":
            self._skip_statement()
        else:
            self._expect(";")
        return name, number

    def _declared(self, scope: str) -> str:
        """Return the full name of a new message or enum."""
        name = self._take()
        if not name.isidentifier():
            self._fail(f"{name!r} is no name")
        full = f"{scope}.{name}" if scope else name
        if full in self._found.messages or full in self._found.enums:
            self._fail(f"{full} is declared twice")
        return full

    def _skip_statement(self) -> None:
        """Skip the rest of a statement. A semicolon within brackets does not end it."""
        depth = 0
        while (word := self._take()) != ";" or depth:
            depth += (word in "{[") - (word in "}]")

    def _skip_block(self) -> None:
        while self._take() != "{":
            pass
        depth = 1
        while depth:
            word = self._take()
            depth += (word == "{") - (word == "}")

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        if self._next == len(self._tokens):
            self._fail("it ends too early")
        self._next += 1
        return self._tokens[self._next - 1][0]

    def _expect(self, word: str) -> None:
        found = self._take()
        if found != word:
            self._fail(f"{found!r} is not {word!r}")

    def _fail(self, why: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self._tokens[self._next - 1][1] if self._next else 0
        raise SchemaError(f"line {self._text.count(chr(10), 0, at) + 1}: {why}")
