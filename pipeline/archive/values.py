"""The options that say how values are encoded, and the typing that they choose."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Protocol

from pipeline import table
from pipeline.archive.framed import RegistryTyping
from pipeline.archive.registry import Registry
from pipeline.archive.typed import AvroTyping, JsonTyping, Typing
from pipeline.errors import PipelineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("typed")
    add_value_arguments(group)
    group.add_argument(
        "--evolve", choices=("add", "none"), default="add",
        help="add columns for new fields of JSON, and widen columns for larger numbers, or do neither "
        "(default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dead-letters", metavar="TABLE", help="the table of records that cannot be typed (default: OUT_dead_letters)"
    )


class Arguments(Protocol):
    """A parser of arguments, or a group of it."""

    def add_argument(self, *names: str, **described: Any) -> object: ...


def add_value_arguments(group: Arguments) -> None:
    """Add the arguments that say how values are encoded."""
    group.add_argument(
        "--value", choices=("raw", "json", "avro", "registry"), default="raw",
        help="registry: each value begins with the id of its schema in --registry (default %(default)s)",
    )  # fmt: skip
    group.add_argument("--registry", metavar="URL", help="a schema registry, such as https://user:password@host:8081")
    group.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="the schema of Avro values, or the initial columns of JSON values as Spark DDL",
    )
    group.add_argument(
        "--framing",
        choices=("none", "confluent"),
        default="none",
        help="of Avro values: confluent skips the five bytes before each (default %(default)s)",
    )


def dead_letter_table(arguments: argparse.Namespace) -> str:
    """Return the location of the table of bad records."""
    return table.location(arguments.dead_letters or f"{arguments.out.rstrip('/')}_dead_letters", arguments.format)


def typing_of(arguments: argparse.Namespace, *, evolve: bool) -> Typing | None:
    """Return the typing that the arguments choose, None for raw values. Without `evolve` the table's columns do not
    change.
    """
    if arguments.value == "raw":
        return None
    text = None
    if arguments.schema is not None:
        try:
            text = arguments.schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PipelineError(f"The schema cannot be read: {error}.", "Check --schema.") from error
    decimals = arguments.format != "iceberg"
    if arguments.value == "registry":
        if not arguments.registry:
            raise PipelineError("--value registry needs a schema registry.", "Name its URL with --registry.")
        return RegistryTyping(Registry(arguments.registry), evolve=evolve, decimals=decimals)
    if arguments.value == "json":
        return JsonTyping(text, evolve=evolve, decimals=decimals)
    if text is None:
        raise PipelineError("Avro needs its schema.", "Name its file with --schema.")
    try:
        json.loads(text)
    except ValueError as error:
        raise PipelineError(
            f"{arguments.schema} is not JSON, so it is no Avro schema ({error}).", "Check --schema."
        ) from error
    return AvroTyping(text, framed=arguments.framing == "confluent", decimals=decimals)
