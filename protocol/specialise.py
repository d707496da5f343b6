"""Writes one decode and one encode function per message and version by walking its grammar.

The one idea: a grammar decides again for every byte which field it is, how long it is, and whether it may be null. A
generated function decides all of this once: it is straight-line Python with the loops inlined, compiled at first use.
Neighbouring fields of fixed size, and the first byte of the length behind them, are read by one `struct` call. Reads
past the end yield short slices or IndexError, so one check at the end of the message suffices; only counts are checked
at once, because they decide how much memory is allocated. It knows the constructs of `grammar` and nothing of
particular messages.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import count
from struct import Struct, pack, unpack_from
from typing import Any, TypeAlias
from uuid import UUID

from construct import Construct, FormatField

from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.grammar import (
    MAX_ARRAY_ELEMENTS,
    MAX_STRING_BYTES,
    UUID_BYTES,
    Array,
    Flag,
    Length,
    Octets,
    Optional,
    Record,
    Records,
    TaggedSection,
    Text,
    Uuid,
    has_grown_long,
    min_bytes,
)
from protocol.schema import struct_schema
from protocol.varints import MAX_TAGGED_FIELDS, read_uvarint, skip_tagged_fields, write_uvarint

Decoder: TypeAlias = Callable[[Buffer, int, int], tuple[Any, int]]
"""Takes (buffer, position, end) and returns (message, its end). Raises ProtocolError, IndexError, ValueError or
struct.error.
"""
Encoder: TypeAlias = Callable[[Any], list[Buffer]]
"""Raises ValueError, TypeError, AttributeError or struct.error for values that the wire format cannot hold."""

COPIED_RECORDS_BYTES = 4096
"""Records up to this size are copied between the other fields. To send two more chunks costs as much as to copy this
many bytes. A response about a hundred thousand partitions would have two hundred thousand chunks, and handing them to
the transport would block the event loop.
"""


ELEMENT_BYTES = 256
"""Bytes of a long string that count as one element, because decoding or encoding them costs about as much."""


class EncodedElements(tuple[Any, ...]):
    """Encoded structs of an array, one piece each. It may take the place of an array that is a field of the message
    itself. So a long response that hardly changes is assembled from pieces and not encoded again."""

    __slots__ = ()


UVARINTS = tuple(write_uvarint(value) for value in range(1 << 12))
"""Encoded forms of usual lengths, counts and tags, computed once."""


def specialise_decoder(record: Record, version: int, max_elements: int | None = None) -> Decoder:
    """Return a function that decodes as the grammar's parse does. It needs a `bytes` buffer unless
    `has_records(record)`.

    `max_elements` bounds array elements, tagged fields and long strings (`ELEMENT_BYTES`) of the whole message; with
    None only the number of bytes bounds them.
    """
    return _DecoderSource(record, version, max_elements).compile()


def specialise_encoder(record: Record, version: int) -> Encoder:
    """Return a function that encodes as the grammar's build does, but into chunks. `records` that are not small become
    chunks of their own, without a copy.
    """
    return _EncoderSource(record, version).compile()


@cache
def has_records(piece: Construct) -> bool:
    """Return whether the construct contains record batches, which are decoded as slices of the buffer."""
    match piece:
        case Records():
            return True
        case Array():
            return has_records(piece.element)
        case Optional():
            return has_records(piece.present)
        case Record():
            return any(has_records(subcon.subcon) for subcon in piece.subcons)
        case _:
            return False


@cache
def unsealed(struct_type: type[Any]) -> type[Any]:
    """Return a class with the slots of a frozen dataclass and nothing else.

    Filling its slots and then setting `__class__` makes an instance of the frozen class several times faster than that
    class's own constructor, which must bypass its own `__setattr__` for every field.
    """
    names = tuple(field.name for field in struct_schema(struct_type).fields)
    return type(f"Unsealed{struct_type.__name__}", (), {"__slots__": names})


@lru_cache(maxsize=4096)
def uuid_of(octets: bytes) -> UUID:
    """Return the UUID of sixteen bytes. Topic ids repeat from request to request, and making one costs more than the
    rest of a partition."""
    return UUID(bytes=octets)


def _text_of(octets: Buffer) -> str:
    """Decode UTF-8. Other bytes become U+FFFD, as in any broker: a client may name itself in Latin-1."""
    return str(octets, "utf-8", "replace")


def _uvarint_tail(buffer: Buffer, position: int, end: int) -> tuple[int, int]:
    return read_uvarint(buffer, position - 1, end)


def _refuse(what: str) -> None:
    raise ProtocolError(what)


def _crowded(max_elements: int) -> None:
    raise TooManyElementsError(f"more than {max_elements} elements")


class TooManyElementsError(ProtocolError):
    """Error: the message may be well-formed, but it has more elements than its decoder was made for."""


class _Source:
    """The source lines of one generated function, and the objects to which its names refer."""

    def __init__(self, record: Record, version: int, purpose: str) -> None:
        self.record = record
        self.version = version
        self.purpose = purpose
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[str, Any] = {}
        self._numbers = count()
        self._by_identity: dict[tuple[str, int], str] = {}

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        self.line(head)
        self.depth += 1
        yield
        self.depth -= 1

    def fresh(self, stem: str) -> str:
        return f"{stem}{next(self._numbers)}"

    def bind(self, stem: str, value: Any) -> str:
        """Return an expression for an object: its literal, or a name. The same object always gets the same name."""
        if value is None or value == () or isinstance(value, int | str | bytes):
            return repr(value)
        key = (stem, id(value))
        if key not in self._by_identity:
            self._by_identity[key] = self.fresh(stem)
            self.names[self._by_identity[key]] = value
        return self._by_identity[key]

    def bind_struct_method(self, method: str, codes: str) -> str:
        name = f"{method}_{codes.replace('?', 'flag')}"
        self.names[name] = getattr(Struct(">" + codes), method)
        return name

    def define(self, signature: str) -> Callable[..., Any]:
        # Register the source in linecache, so that a traceback through generated code shows its line.
        filename = f"<{self.purpose} {self.record.struct_type.__name__} v{self.version}>"
        source = "\n".join([f"def {self.purpose}({signature}):", *self.lines, ""])
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), self.names)
        return self.names[self.purpose]


class _DecoderSource(_Source):
    """Reads from buffer `b` at `p`, up to `end`. A target is what a value is assigned to: `o3.member_id`."""

    def __init__(self, record: Record, version: int, max_elements: int | None) -> None:
        super().__init__(record, version, "decode")
        self.max_elements = max_elements
        self.pending: list[tuple[str, str]] = []
        self.sliced = has_records(record)
        self.names |= {
            "refuse": _refuse,
            "crowded": _crowded,
            "read_uvarint": read_uvarint,
            "skip_tagged_fields": skip_tagged_fields,
            "uvarint_tail": _uvarint_tail,
            "unpack_from": unpack_from,
            "text_of": _text_of,
            "has_grown_long": has_grown_long,
            "uuid_of": uuid_of,
        }

    def compile(self) -> Decoder:
        if self.sliced:
            self.line("view = memoryview(b)")
        if self.max_elements is not None:
            self.line(f"room = {self.max_elements}")
        root = self.fresh("o")
        self.read_record(self.record, root)
        with self.block("if p > end:"):
            self.line("refuse('torn message')")
        self.line(f"return {root}, p")
        return self.define("b, p, end")

    def read(self, piece: Construct, target: str) -> None:
        match piece:
            case FormatField():
                self.pending.append((piece.fmtstr[1:], target))
            case Flag():
                self.pending.append(("?", target))
            case Uuid():
                self.pending.append((f"{UUID_BYTES}s", target))
                self.flush()
                self.line(f"{target} = uuid_of({target})")
            case Octets():
                self.read_octets(piece, target)
            case Array():
                self.read_array(piece, target)
            case Optional():
                self.read_optional(piece, target)
            case Record():
                made = self.fresh("o")
                self.read_record(piece, made)
                self.line(f"{target} = {made}")
            case _:
                raise TypeError(f"no way to read {piece!r}")

    def flush(self) -> None:
        """Read the pending fixed fields in one call."""
        if not self.pending:
            return
        codes = "".join(code for code, _ in self.pending)
        targets = ", ".join(target for _, target in self.pending)
        if codes == "B":
            self.line(f"{targets} = b[p]")
            self.line("p += 1")
        else:
            comma = "," if len(self.pending) == 1 else ""
            self.line(f"{targets}{comma} = {self.bind_struct_method('unpack_from', codes)}(b, p)")
            self.line(f"p += {Struct('>' + codes).size}")
        self.pending.clear()

    def read_length(self, length: Length, what: str) -> str:
        """Return the name of a local that holds the length. If the field is nullable, the caller handles -1;
        otherwise the generated code here refuses it.
        """
        name = self.fresh("n")
        if length.compact:
            self.pending.append(("B", name))
            self.flush()
            with self.block(f"if {name} > 127:"):
                self.line(f"{name}, p = uvarint_tail(b, p, end)")
            self.line(f"{name} -= 1")
        else:
            self.pending.append((length.plain.fmtstr[1:], name))
            self.flush()
        # A compact length cannot be below -1.
        if not (length.compact and length.nullable):
            with self.block(f"if {name} < {-1 if length.nullable else 0}:"):
                self.line(f"refuse('negative length of {what}')")
        return name

    @contextmanager
    def unless_null(self, length: Length, name: str, target: str) -> Generator[None]:
        if not length.nullable:
            yield
            return
        with self.block(f"if {name} < 0:"):
            self.line(f"{target} = None")
        with self.block("else:"):
            yield

    def read_octets(self, piece: Octets, target: str) -> None:
        name = self.read_length(piece.length, target.partition(".")[2] or "element")
        with self.unless_null(piece.length, name, target):
            # A plain length has sixteen bits, so it cannot be larger.
            if isinstance(piece, Text) and piece.length.compact:
                with self.block(f"if {name} > {MAX_STRING_BYTES}:"):
                    self.line("refuse('a string is too long')")
            if isinstance(piece, Text):
                with self.block(f"if {name} >= {ELEMENT_BYTES}:"):
                    self.take_room(f"{name} // {ELEMENT_BYTES}")
                    with self.block(f"if has_grown_long(b[p:p + {name}]):"):
                        self.line("refuse('a string is too long')")
            self.line(f"{name} += p")
            match piece:
                case Text():
                    read = f"text_of(b[p:{name}])" if self.sliced else f"b[p:{name}].decode('utf-8', 'replace')"
                case Records():
                    read = f"view[p:{name}]"
                case _:
                    read = f"bytes(b[p:{name}])" if self.sliced else f"b[p:{name}]"
            self.line(f"{target} = {read}")
            self.line(f"p = {name}")

    def take_room(self, count: str) -> None:
        if self.max_elements is not None:
            self.line(f"room -= {count}")
            with self.block("if room < 0:"):
                self.line(f"crowded({self.max_elements})")

    def read_array(self, piece: Array, target: str) -> None:
        name = self.read_length(piece.count, target.partition(".")[2])
        element = piece.element
        with self.unless_null(piece.count, name, target):
            with self.block(f"if {name} > {MAX_ARRAY_ELEMENTS} or {name} * {min_bytes(element)} > end - p:"):
                self.line("refuse('more elements than bytes, or than may be')")
            self.take_room(name)
            if isinstance(element, FormatField):
                self.line(f"{target} = unpack_from(f'>{{{name}}}{element.fmtstr[1:]}', b, p)")
                self.line(f"p += {name} * {element.length}")
                return
            items, add, item = self.fresh("items"), self.fresh("add"), self.fresh("o")
            self.line(f"{items} = []")
            self.line(f"{add} = {items}.append")
            with self.block(f"for _ in range({name}):"):
                if isinstance(element, Record):
                    self.read_record(element, item)
                else:
                    self.read(element, item)
                    self.flush()
                self.line(f"{add}({item})")
            self.line(f"{target} = tuple({items})")

    def read_optional(self, piece: Optional, target: str) -> None:
        present = self.fresh("n")
        self.pending.append(("b", present))
        self.flush()
        with self.block(f"if {present} < 0:"):
            self.line(f"{target} = None")
        with self.block("else:"):
            self.read(piece.present, target)

    def read_record(self, record: Record, made: str) -> None:
        """Generate code that reads the fields in order. Fixed fields that are pending before the record are read
        together with its first ones."""
        self.line(f"{made} = {self.bind('unsealed', unsealed(record.struct_type))}()")
        for name, default in record.absent.items():
            self.line(f"{made}.{name} = {self.bind('default', default)}")
        for subcon in record.subcons:
            self.read(subcon.subcon, f"{made}.{subcon.name}")
        if record.tagged is not None:
            self.read_tagged(record.tagged, made)
        self.flush()
        self.line(f"{made}.__class__ = {self.bind('sealed', record.struct_type)}")

    def read_tagged(self, section: TaggedSection, made: str) -> None:
        tags = self.fresh("n")
        self.pending.append(("B", tags))
        self.flush()
        for field in section.fields.values():
            self.line(f"{made}.{field.subcon.name} = {self.bind('default', field.default)}")
        with self.block(f"if {tags}:"):
            self.take_room(tags)
            if not section.fields:
                self.line("p = skip_tagged_fields(b, p - 1, end)")
                return
            tag, stop = self.fresh("tag"), self.fresh("stop")
            self.line(f"{tags}, p = uvarint_tail(b, p, end)")
            with self.block(f"if {tags} > {MAX_TAGGED_FIELDS} or {tags} * 2 > end - p:"):
                self.line("refuse('too many tagged fields')")
            with self.block(f"for _ in range({tags}):"):
                self.line(f"{tag}, p = read_uvarint(b, p, end)")
                self.line(f"{stop}, p = read_uvarint(b, p, end)")
                self.line(f"{stop} += p")
                with self.block(f"if {stop} > end:"):
                    self.line("refuse('torn tagged field')")
                for known, field in section.fields.items():
                    with self.block(f"if {tag} == {known}:"):
                        self.read(field.subcon.subcon, f"{made}.{field.subcon.name}")
                        self.flush()
                        with self.block(f"if p != {stop}:"):
                            self.line(f"refuse('tag {known} is not as long as it says')")
                self.line(f"p = {stop}")


class _EncoderSource(_Source):
    """Appends to bytearray `out`. A value is a Python expression: `o3.member_id`."""

    def __init__(self, record: Record, version: int) -> None:
        super().__init__(record, version, "encode")
        self.pending: list[tuple[str, str]] = []
        self.names |= {"U": UVARINTS, "uvarint": write_uvarint, "pack": pack, "EncodedElements": EncodedElements}
        self.own_arrays = {id(subcon.subcon) for subcon in record.subcons}

    def compile(self) -> Encoder:
        root = self.fresh("o")
        self.line("out = bytearray()")
        if has_records(self.record):
            self.line("chunks = []")
        self.write(self.record, root)
        self.flush()
        if has_records(self.record):
            self.line("chunks.append(out)")
            self.line("return chunks")
        else:
            self.line("return [out]")
        return self.define(root)

    def write(self, piece: Construct, value: str) -> None:
        match piece:
            case FormatField():
                self.pending.append((piece.fmtstr[1:], value))
            case Flag():
                self.pending.append(("B", value))
            case Uuid():
                self.pending.append((f"{UUID_BYTES}s", f"{value}.bytes"))
            case Records():
                self.write_records(piece, value)
            case Octets():
                self.write_octets(piece, value)
            case Array():
                self.write_array(piece, value)
            case Optional():
                self.write_optional(piece, value)
            case Record():
                for subcon in piece.subcons:
                    self.write(subcon.subcon, f"{value}.{subcon.name}")
                if piece.tagged is not None:
                    self.write_tagged(piece.tagged, value)
            case _:
                raise TypeError(f"no way to write {piece!r}")

    def flush(self) -> None:
        """Write the pending fixed fields in one call."""
        if not self.pending:
            return
        codes = "".join(code for code, _ in self.pending)
        values = ", ".join(value for _, value in self.pending)
        self.line(f"out += {self.bind_struct_method('pack', codes)}({values})")
        self.pending.clear()

    def write_uvarint(self, value: str) -> None:
        self.flush()
        name = self.fresh("n")
        self.line(f"{name} = {value}")
        self.line(f"out += U[{name}] if {name} < {len(UVARINTS)} else uvarint({name})")

    def write_length(self, length: Length, value: str) -> None:
        if length.compact:
            self.write_uvarint(f"{value} + 1")
        else:
            self.pending.append((length.plain.fmtstr[1:], value))

    @contextmanager
    def unless_null(self, length: Length, value: str) -> Generator[str]:
        """Yield the name of a local that holds the value and is not None within the block. Write a null before it."""
        name = self.fresh("x")
        self.line(f"{name} = {value}")
        if not length.nullable:
            yield name
            return
        self.flush()
        null = b"\0" if length.compact else b"\xff" * length.plain.length
        with self.block(f"if {name} is None:"):
            self.line(f"out += {null!r}")
        with self.block("else:"):
            yield name
            self.flush()

    def write_octets(self, piece: Octets, value: str) -> None:
        with self.unless_null(piece.length, value) as name:
            if isinstance(piece, Text):
                self.line(f"{name} = {name}.encode()")
            self.write_length(piece.length, f"len({name})")
            self.flush()
            self.line(f"out += {name}")

    def write_records(self, piece: Records, value: str) -> None:
        with self.unless_null(piece.length, value) as name:
            with self.block(f"if {name}.__class__ is not tuple:"):
                self.line(f"{name} = ({name},)")
            size = self.fresh("s")
            self.line(f"{size} = sum(map(len, {name}))")
            self.write_length(piece.length, size)
            self.flush()
            with self.block(f"if {size} <= {COPIED_RECORDS_BYTES}:"):
                self.line(f'out += b"".join({name})')
            with self.block("else:"):
                self.line("chunks.append(out)")
                self.line(f"chunks += {name}")
                self.line("out = bytearray()")

    def write_array(self, piece: Array, value: str) -> None:
        element = piece.element
        with self.unless_null(piece.count, value) as name:
            self.write_length(piece.count, f"len({name})")
            self.flush()
            if isinstance(element, FormatField):
                with self.block(f"if {name}:"):
                    self.line(f"out += pack(f'>{{len({name})}}{element.fmtstr[1:]}', *{name})")
                return
            if id(piece) in self.own_arrays and isinstance(element, Record) and not has_records(element):
                with self.block(f"if {name}.__class__ is EncodedElements:"):
                    self.line(f"out += b''.join({name})")
                    self.line(f"{name} = ()")
            item = self.fresh("o")
            with self.block(f"for {item} in {name}:"):
                self.write(element, item)
                self.flush()

    def write_optional(self, piece: Optional, value: str) -> None:
        self.flush()
        name = self.fresh("x")
        self.line(f"{name} = {value}")
        with self.block(f"if {name} is None:"):
            self.line("out += b'\\xff'")
        with self.block("else:"):
            self.pending.append(("b", "1"))
            self.write(piece.present, name)
            self.flush()

    def write_tagged(self, section: TaggedSection, value: str) -> None:
        if not section.fields:
            self.pending.append(("B", "0"))
            return
        self.flush()
        written: list[str] = []
        for field in section.fields.values():
            name, default = self.fresh("x"), self.bind("default", field.default)
            self.line(f"{name} = {value}.{field.subcon.name}")
            if isinstance(field.default, tuple):
                differs = f"tuple({name}) != {default}"
            elif default == repr(field.default):
                differs = f"{name} != {default}"
            else:
                # The value is nearly always the default object itself, and comparing structs is slow.
                differs = f"{name} is not {default} and {name} != {default}"
            self.line(f"has_{name} = {differs}")
            written.append(name)
        self.write_uvarint(" + ".join(f"has_{name}" for name in written))
        for name, (tag, field) in zip(written, section.fields.items(), strict=True):
            outer = self.fresh("outer")
            with self.block(f"if has_{name}:"):
                self.line(f"{outer} = out")
                self.line("out = bytearray()")
                self.write(field.subcon.subcon, name)
                self.flush()
                self.line(f"{outer} += uvarint({tag}) + uvarint(len(out)) + out")
                self.line(f"out = {outer}")
