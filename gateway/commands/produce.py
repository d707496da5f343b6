"""`sluice produce`: append the lines of stdin to a topic, by Kafka's protocol, with any broker.

The one idea: the command appends at once what a read of stdin yields, so a slow pipe is not delayed and a file is
appended in batches. Lines with a key go to the partition that Kafka's Java client would choose.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from io import BufferedReader
from typing import cast

from gateway.commands import log
from gateway.commands.client import PASSING_CODES, Cluster
from gateway.commands.errors import CommandError, PassingError, remark
from gateway.commands.refusals import reason
from protocol.errors import ErrorCode
from protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from protocol.murmur import murmur2

MAX_LINE_BYTES = 16 * 1024 * 1024
ACKS = {"1": 1, "all": -1}

_READ_BYTES = 256 * 1024
_BATCH_BYTES = 64 * 1024
"""Bound of a batch of several records. A topic may accept much less than the default of 1 MiB."""
_RECORD_BYTES = 21
"""Greatest size of a record's fields beside its key, value and headers."""
_PRODUCE_BY_NAME = 12
_APPEND_WAIT_MS = 30_000
_PASSING_CODES = PASSING_CODES | {
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.KAFKA_STORAGE_ERROR,
}
"""Errors of Produce that pass when the brokers are well again. After most of them the batch may be in the log."""

Pair = tuple[bytes | None, bytes]
"""Key and value from one line."""
Headers = tuple[tuple[str, bytes], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("-p", "--partition", type=int, metavar="P", help="default: by the key, else in turn")
    parser.add_argument("-k", "--key-separator", metavar="TEXT", help="a line is KEY, this text and VALUE")
    parser.add_argument(
        "-H", "--header", action="append", default=[], metavar="KEY=VALUE", help="for each record; may be repeated"
    )
    parser.add_argument("--acks", choices=tuple(ACKS), default="all", help="replicas that acknowledge (all)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print PARTITION@OFFSET of each record")
    parser.set_defaults(command=produce)


def produce(cluster: Cluster, given: argparse.Namespace) -> int:
    headers = tuple(_header(text) for text in given.header)
    separator: bytes | None = None
    if given.key_separator is not None:
        # A shell passes on the two characters of \t, which name a tab here, as in kcat.
        separator = given.key_separator.replace("\\t", "\t").encode(errors="surrogateescape")
        if not separator:
            raise CommandError("--key-separator wants a text, e.g. --key-separator :")
    (topic,) = cluster.topics((given.topic,))
    from protocol.records import Record, build_batch  # imported after the first request, because it loads the codecs

    present = sorted(partition.partition_index for partition in topic.partitions)
    if given.partition is not None and given.partition not in present:
        raise CommandError(f"topic {given.topic} has partitions {present[0]} to {present[-1]}")
    turns = itertools.cycle(present)
    appended = 0
    try:
        for lines in _lines():
            keyless = next(turns)
            by_partition: defaultdict[int, list[Pair]] = defaultdict(list)
            for number, line in enumerate(lines, appended + 1):
                key, value = _split(line, separator, number)
                partition = keyless if key is None else present[murmur2(key) % len(present)]
                by_partition[partition if given.partition is None else given.partition].append((key, value))
            for partition, pairs in sorted(by_partition.items()):
                for some in _batches(pairs, headers):
                    now_ms = time.time_ns() // 1_000_000
                    batch = build_batch(
                        [Record(offset, now_ms, key, value, headers) for offset, (key, value) in enumerate(some)]
                    )
                    first = append(cluster, given.topic, partition, batch, acks=ACKS[given.acks])
                    appended += len(some)
                    _report(given, partition, first, len(some))
    except CommandError as error:
        raise CommandError(f"{error}; {appended} records were appended before") from error
    except KeyboardInterrupt:
        remark(f"interrupted; {appended} records were appended before")
        raise
    return 0


def _batches(pairs: list[Pair], headers: Headers) -> Iterator[list[Pair]]:
    """Yield the pairs in runs that fit a batch of `_BATCH_BYTES`. A larger pair is a run of its own."""
    rest_bytes = _RECORD_BYTES + sum(_RECORD_BYTES + len(name) + len(value) for name, value in headers)
    some: list[Pair] = []
    size_bytes = 0
    for key, value in pairs:
        more_bytes = rest_bytes + len(key or b"") + len(value)
        if some and size_bytes + more_bytes > _BATCH_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append((key, value))
        size_bytes += more_bytes
    yield some


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"--header {text}: write KEY=VALUE, e.g. source=import")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CommandError(f"--header {text}: the key must be UTF-8") from None
    return name, value.encode(errors="surrogateescape")


def _split(line: bytes, separator: bytes | None, number: int) -> Pair:
    if separator is None:
        return None, line
    key, found, value = line.partition(separator)
    if not found:
        raise CommandError(f"line {number} has no key separator between a key and a value")
    return key, value


def _lines() -> Iterator[list[bytes]]:
    """Yield the lines that each read of stdin completes, without their line ends."""
    stream = cast("BufferedReader", sys.stdin.buffer)
    rest = b""
    while part := stream.read1(_READ_BYTES):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise CommandError(f"a line of stdin is longer than {MAX_LINE_BYTES} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


def append(cluster: Cluster, topic: str, partition: int, batch: bytes, *, acks: int, repeats: bool = True) -> int:
    """Append one batch and return the offset of its first record. `acks` is Kafka's number.

    Raise PassingError if the batch may or may not be in the log. If `repeats` is true, the batch is sent again after
    some of these errors, such as NOT_LEADER_OR_FOLLOWER, and may then be in the log twice.
    """
    where = f"{topic}[{partition}]"
    request = ProduceRequest(
        acks=acks,
        timeout_ms=_APPEND_WAIT_MS,
        topic_data=(
            TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=partition, records=batch),)),
        ),
    )

    def attempt() -> ProduceResponse | None:
        leaders = log.by_leader(cluster, [(topic, partition)])
        if not leaders:
            return None
        return cluster.ask(ProduceResponse, request, node_id=next(iter(leaders)), at_most=_PRODUCE_BY_NAME)

    def code(response: ProduceResponse | None) -> int:
        if response is None:
            return ErrorCode.LEADER_NOT_AVAILABLE
        return response.responses[0].partition_responses[0].error_code if repeats else ErrorCode.NONE

    response = cluster.until_settled(attempt, code)
    if response is None:
        raise PassingError(f"{where} has no leader: repeat the command when a broker leads the partition")
    result = response.responses[0].partition_responses[0]
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs=f"--operation write --topic {topic}")
        raise (PassingError if result.error_code in _PASSING_CODES else CommandError)(f"{where}: {why}")
    return result.base_offset


def _report(given: argparse.Namespace, partition: int, first: int, count: int) -> None:
    for offset in range(first, first + count) if given.json or given.verbose else ():
        if given.json:
            print(json.dumps({"topic": given.topic, "partition": partition, "offset": offset}))
        else:
            print(f"{partition}@{offset}")
    sys.stdout.flush()
