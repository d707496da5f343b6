"""Parse requests about records: what to search for, and what to produce.

The one idea: every limit on a page's requests is checked here, before anything is read or written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from gateway.console.decode import MAX_SCHEMA_CHARS, Json, parse_path
from gateway.console.guard import BadRequestError
from gateway.console.topics import MAX_PRODUCED_BYTES, MAX_RECORDS, Search
from protocol.records import Record

MAX_HEADERS = 100
MAX_PARTITION = 2**31 - 1
MAX_PARTITIONS = 2_000
MAX_FILTER_CHARS = 1_024
FORMS = ("auto", "text", "json", "hex", "avro", "protobuf")
BEGINS = ("earliest", "latest", "end", "offset", "time")


_NUMBER = re.compile(r"-?[0-9]{1,18}")


def parse_search(query: Mapping[str, str]) -> tuple[Search, str, int | None, dict[int, int] | None]:
    """Return the search, where it begins, the offset or time of that, and positions that it continues from."""
    topic = query.get("topic", "")
    if not topic or len(topic) > 249:
        raise BadRequestError("topic is missing")
    text, path = query.get("text", ""), query.get("path", "")
    if len(text) > MAX_FILTER_CHARS or len(path) > MAX_FILTER_CHARS:
        raise BadRequestError("the filter is too long")
    steps, _, equals = path.partition("=")
    form, begin = query.get("form", "auto"), query.get("begin", "latest")
    if form not in FORMS or begin not in BEGINS:
        raise BadRequestError("the form or the beginning is unknown")
    schema = query.get("schema") or None
    if schema is not None and len(schema) > MAX_SCHEMA_CHARS:
        raise BadRequestError("the schema is too long")
    key = query.get("key")
    search = Search(
        topic=topic,
        partitions=_numbers(query.get("partitions", "")),
        limit=min(max(_number(query.get("limit", "50")), 1), MAX_RECORDS),
        key=key.encode() if key else None,
        text=text,
        path=parse_path(steps.strip()),
        equals=equals.strip(),
        form=form,
        schema=None if schema is None else _json(schema),
        with_control=query.get("control") == "1",
    )
    value = query.get("value")
    return search, begin, None if value in (None, "") else _number(value or ""), _positions(query.get("next"))


def _json(text: str) -> Json:
    try:
        found: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the schema is not JSON: {error}") from error
    return found


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise BadRequestError(f"{text[:40]} is not a number")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > MAX_PARTITIONS:
        raise BadRequestError("too many partitions")
    return tuple(_number(part.strip()) for part in parts)


def _positions(text: str | None) -> dict[int, int] | None:
    if not text:
        return None
    found: dict[int, int] = {}
    for part in text.split(",")[:MAX_PARTITIONS]:
        index, _, offset = part.partition(":")
        found[_number(index)] = _number(offset)
    return found


def parse_record(given: Mapping[str, Json], now_ms: int) -> tuple[str, int, Record]:
    """Return topic, partition and record of a request to produce."""
    topic, partition = given.get("topic"), given.get("partition")
    if not isinstance(topic, str) or not topic or not isinstance(partition, int) or not 0 <= partition <= MAX_PARTITION:
        raise BadRequestError("topic or partition is missing")
    headers = given.get("headers", [])
    if not isinstance(headers, list) or len(headers) > MAX_HEADERS:
        raise BadRequestError(f"at most {MAX_HEADERS} headers")
    pairs: list[tuple[str, bytes | None]] = []
    for each in headers:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(name, str):
            raise BadRequestError("a header has a name and a value")
        pairs.append((name, _bytes(each.get("value"))))
    return topic, partition, Record(0, now_ms, _bytes(given.get("key")), _bytes(given.get("value")), tuple(pairs))


def _bytes(value: Json) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_PRODUCED_BYTES:
        raise BadRequestError("a key or value is a text of at most 1 MiB, or null")
    return value.encode()
