"""`sluice consume`: print the records of a topic, by Kafka's protocol, with any broker.

The one idea: a format with kcat's letters decides what each record prints. A pipe gets the bytes of keys and values
unchanged. A terminal gets escape sequences in place of control characters, because a record could move its cursor.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from gateway.commands import log
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.reader import Reader
from gateway.commands.tail import print_json
from protocol.records import Record
from protocol.shown import shown

DEFAULT_FORMAT = "%s\\n"

_WAIT_MS = 500
_ESCAPES = {"\\n": b"\n", "\\t": b"\t", "\\r": b"\r", "\\\\": b"\\"}
_PIECE = re.compile(r"%.?|\\.?|[^%\\]+", re.DOTALL)

Piece = Callable[[int, Record], bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument(
        "--from",
        dest="start",
        default="beginning",
        metavar="WHERE",
        help="beginning, end, an offset, or a time such as 2026-11-26T07:00:00Z (beginning)",
    )
    parser.add_argument("-n", "--records", type=int, metavar="N", help="stop after N records")
    parser.add_argument("-e", "--exit-at-end", action="store_true", help="stop at the present end of the partitions")
    parser.add_argument("-p", "--partition", type=int, action="append", metavar="P", help="may be repeated")
    parser.add_argument(
        "-f",
        "--format",
        default=DEFAULT_FORMAT,
        metavar="FORMAT",
        help="%%t topic, %%p partition, %%o offset, %%k key, %%s value, %%h headers, %%T time in ms, \\n, \\t",
    )
    parser.add_argument("-g", "--group", metavar="GROUP", help="join this group and commit what was printed")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --group: print assignments to stderr")
    parser.set_defaults(command=consume)


def consume(cluster: Cluster, given: argparse.Namespace) -> int:
    if given.records is not None and given.records < 0:
        raise CommandError("-n wants a number from 0 on")
    escaped = sys.stdout.isatty()
    pieces = parse_format(given.format, given.topic, escaped=escaped)
    (topic,) = cluster.topics((given.topic,))

    def show(partition: int, record: Record) -> None:
        if given.json:
            print_json(given.topic, partition, record)
        else:
            sys.stdout.buffer.write(b"".join(piece(partition, record) for piece in pieces))

    if given.group is not None:
        from gateway.commands import membership

        return membership.consume(cluster.bootstrap, cluster.security, given, show)
    present = sorted(partition.partition_index for partition in topic.partitions)
    wanted: list[int] = sorted(set(given.partition or present))
    if set(wanted) - set(present):
        raise CommandError(f"topic {given.topic} has partitions {present[0]} to {present[-1]}")
    keys = [(given.topic, partition) for partition in wanted]
    bounds = log.bounds(cluster, keys)
    if missing := [partition for partition in wanted if (given.topic, partition) not in bounds]:
        raise CommandError(f"{given.topic}{missing} cannot be read: `sluice topics describe` shows the leaders")
    ends = {partition: found.end for (_, partition), found in bounds.items()}
    positions = _positions(cluster, given.start, bounds)
    reader = Reader(cluster, given.topic, positions)
    with suppress(KeyboardInterrupt):
        for partition, record in islice(_records(reader, wanted, ends if given.exit_at_end else None), given.records):
            show(partition, record)
        sys.stdout.flush()
    return 0


def _records(reader: Reader, wanted: Sequence[int], ends: Mapping[int, int] | None) -> Iterator[tuple[int, Record]]:
    """Yield the partitions' records, up to `ends` if they are given. Flush the output before each wait for records."""
    while asked := [each for each in wanted if ends is None or reader.positions[each] < ends[each]]:
        for partition, record in reader.read(asked, max_wait_ms=_WAIT_MS):
            if ends is None or record.offset < ends[partition]:
                yield partition, record
        sys.stdout.flush()


def _positions(cluster: Cluster, start: str, bounds: dict[log.TopicPartition, log.Bounds]) -> dict[int, int]:
    if start == "beginning":
        return {partition: found.start for (_, partition), found in bounds.items()}
    if start == "end":
        return {partition: found.end for (_, partition), found in bounds.items()}
    if start.isascii() and start.isdigit():
        offset = int(start)
        return {partition: min(max(offset, found.start), found.end) for (_, partition), found in bounds.items()}
    try:
        timestamp_ms = log.time_ms(start)
    except ValueError as error:
        raise CommandError(f"--from {start}: give beginning, end, an offset, or a time in ISO 8601") from error
    found_at = log.offsets_at(cluster, list(bounds), timestamp_ms)
    return {key[1]: found_at.get(key, found.end) for key, found in bounds.items()}


def parse_format(text: str, topic: str, *, escaped: bool) -> list[Piece]:
    """Return the functions that print a record. Raise CommandError if a letter is unknown."""

    def raw(value: bytes | None) -> bytes:
        if value is None:
            return b"NULL"
        return shown(value.decode(errors="backslashreplace"), None).encode() if escaped else value

    def headers(record: Record) -> bytes:
        return b",".join(
            raw(name.encode(errors="surrogateescape")) + b"=" + raw(value) for name, value in record.headers
        )

    letters: dict[str, Piece] = {
        "%t": lambda _, __: topic.encode(),
        "%p": lambda partition, _: b"%d" % partition,
        "%o": lambda _, record: b"%d" % record.offset,
        "%k": lambda _, record: raw(record.key),
        "%s": lambda _, record: raw(record.value),
        "%h": lambda _, record: headers(record),
        "%T": lambda _, record: b"%d" % record.timestamp,
        "%%": lambda _, __: b"%",
    }
    pieces: list[Piece] = []
    for found in _PIECE.findall(text):
        piece = str(found)
        if piece.startswith("%"):
            if piece not in letters:
                raise CommandError(f"--format has no {piece}: it knows {' '.join(letters)}")
            pieces.append(letters[piece])
        else:
            pieces.append(_constant(_ESCAPES.get(piece, piece.encode(errors="surrogateescape"))))
    return pieces


def _constant(text: bytes) -> Piece:
    return lambda _, __: text
