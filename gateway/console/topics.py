"""Topics as the console shows them, and their records.

The one idea: records come through Fetch in the viewer's name, in rounds of bounded size, and a search says how far it
has looked, so that the viewer decides whether it goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from gateway.console.cluster import TOPIC_RESOURCE, ClusterViews
from gateway.console.decode import MAX_SHOWN_BYTES, MAX_WHOLE_BYTES, Json, Schemas, at_path, hexed, shown
from gateway.console.groups import GroupViews
from gateway.console.guard import BadRequestError
from gateway.console.kafka import Kafka, Viewer, refuse
from gateway.console.registry import Registry
from gateway.security.kinds import AclOperation, ResourceType
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse, MetadataResponseTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from protocol.records import Record, build_batch, control_type_of, iter_records, read_head, split_batches
from storage.console import ConsoleStore, Loaded

MAX_TOPICS = 500
MAX_PARTITIONS = 2_000
MAX_RECORDS = 500
"""Maximal number of records in one answer."""
MAX_SCANNED = 20_000
"""Maximal number of records that one search reads."""
SCAN_S = 3.0
FETCH_BYTES = 1024 * 1024
TAIL_WAIT_MS = 1_000
MAX_HEADERS_SHOWN = 50
SEARCHED_BYTES = 64 * 1024
"""Bytes that a search for a text decodes in one go."""
MAX_CHARACTER_BYTES = 4
MAX_PRODUCED_BYTES = 1024 * 1024
PRODUCE_TIMEOUT_MS = 10_000
MAX_DECODERS = 2
"""Number of threads that decode records. A batch of a few kilobytes may hold a record of a hundred megabytes, and a
search makes some copies of it. These threads also wait for the schema registry, so no other work uses them."""
_BY_NAME = 12
"""Last version of Fetch, and of Produce, that names topics instead of using ids."""
EARLIEST, LATEST = -2, -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Search:
    """The records that a viewer wants to see."""

    topic: str
    partitions: tuple[int, ...]
    """Partitions to search. Empty means all partitions."""
    limit: int = 50
    key: bytes | None = None
    text: str = ""
    """Text that the key, the value or a header must contain. Upper and lower case are equal."""
    path: tuple[str, ...] = ()
    """Path in a JSON value."""
    equals: str = ""
    """Required value at the path. Empty means any value."""
    form: str = "auto"
    schema: Json = None
    with_control: bool = False
    """True if control records and aborted records are shown too, each with its state."""

    def finds(self, record: Record) -> bool:
        if self.key is not None and record.key != self.key:
            return False
        if self.path:
            value = at_path(record.value, self.path)
            if value is None or (self.equals and _plain(value) != self.equals):
                return False
        if self.text:
            wanted = self.text.lower()
            parts = [record.key or b"", record.value or b""]
            parts += [part for name, value in record.headers for part in (name.encode(), value or b"")]
            return any(_contains(part, wanted) for part in parts)
        return True


def _contains(part: bytes, wanted: str) -> bool:
    """Return whether the text of these bytes, in lower case, contains `wanted`. A record may have a hundred megabytes.
    Decoding them at once would keep the interpreter from the event loop for a second."""
    overlap = MAX_CHARACTER_BYTES * len(wanted)
    return any(
        wanted in part[start : start + SEARCHED_BYTES + overlap].decode("utf-8", "replace").lower()
        for start in range(0, len(part), SEARCHED_BYTES)
    )


def _plain(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(slots=True)
class _Found:
    records: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    positions: dict[int, int] = field(default_factory=dict[int, int])
    scanned: int = 0


class TopicViews:
    def __init__(
        self,
        kafka: Kafka,
        store: ConsoleStore,
        groups: GroupViews,
        cluster: ClusterViews,
        registry: Registry | None = None,
    ) -> None:
        self._kafka, self._store, self._groups, self._cluster = kafka, store, groups, cluster
        self._registry = registry
        self._decoders = ThreadPoolExecutor(MAX_DECODERS, thread_name_prefix="console")

    def close(self) -> None:
        """Start no new work. Searches in progress end by themselves."""
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def _decode(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)

    def _schemas(self) -> Schemas | None:
        return None if self._registry is None else self._registry.schemas()

    # --- topics -------------------------------------------------------------------------------------------------------

    async def list(self, who: Viewer, search: str) -> dict[str, object]:
        rows = await self._store.topics(search, MAX_TOPICS)
        return {
            "topics": [
                {
                    "name": row["name"],
                    "internal": row["internal"],
                    "partitions": row["partitions"],
                    "records": row["records"],
                    "written": row["written"],
                    "bytes": row["size_bytes"],
                    "newest": row["newest_ms"],
                }
                for row in rows
                if self._groups.may_describe_topic(who, row["name"])
            ],
            "cut": len(rows) == MAX_TOPICS,
        }

    async def describe(self, who: Viewer, name: str) -> dict[str, object]:
        """Return partitions, settings and consumers. Raise KafkaError if the viewer may not describe the topic."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.TOPIC, name)
        topic = await self._known(who, name)
        rows = {row["partition"]: row for row in await self._store.partitions(name, MAX_PARTITIONS)}
        partitions = [
            {
                "partition": each.partition_index,
                "leader": each.leader_id,
                "replicas": list(each.replica_nodes),
                "inSync": list(each.isr_nodes),
                **_bounds(rows.get(each.partition_index)),
            }
            for each in topic.partitions[:MAX_PARTITIONS]
        ]
        consumers = [
            {"id": row["group_id"], "lag": row["lag"], "partitions": row["partitions"]}
            for row in await self._store.consumers(name, MAX_TOPICS)
            if self._groups.may_describe(who, row["group_id"])
        ]
        try:
            settings = await self._cluster.settings(who, TOPIC_RESOURCE, name)
        except KafkaError as error:
            settings, denied = [], error.message or error.code.name
        else:
            denied = None
        return {
            "name": name,
            "id": str(topic.topic_id),
            "internal": topic.is_internal,
            "partitions": partitions,
            "partitionCount": len(topic.partitions),
            "consumers": consumers,
            "settings": settings,
            "settingsDenied": denied,
            "mayRead": self._kafka.may(who, AclOperation.READ, ResourceType.TOPIC, name),
        }

    async def _known(self, who: Viewer, name: str) -> MetadataResponseTopic:
        request = MetadataRequest(
            topics=(MetadataRequestTopic(name=name),),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        response = await self._kafka.ask(MetadataResponse, request, who, at_most=_BY_NAME)
        (topic,) = response.topics
        if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            rows = await self._store.topics("", MAX_TOPICS)
            known = [str(row["name"]) for row in rows if self._groups.may_describe_topic(who, row["name"])]
            hint = await self._groups.suggestion(who, name, known)
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic {name}{hint}")
        refuse(topic.error_code)
        return topic

    # --- records ------------------------------------------------------------------------------------------------------

    async def bounds(self, who: Viewer, topic: str, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
        """Return an offset of each partition: EARLIEST, LATEST, or that of the first record at or after a time.
        Without partitions that have none."""
        asked = tuple(ListOffsetsPartition(partition_index=index, timestamp=at_ms) for index in partitions)
        request = ListOffsetsRequest(
            replica_id=-1, isolation_level=0, topics=(ListOffsetsTopic(name=topic, partitions=asked),)
        )
        response = await self._kafka.ask(ListOffsetsResponse, request, who)
        found: dict[int, int] = {}
        for each in response.topics:
            for partition in each.partitions:
                refuse(partition.error_code)
                if partition.offset >= 0:
                    found[partition.partition_index] = partition.offset
        return found

    async def positions(
        self, who: Viewer, search: Search, begin: str, value: int | None
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return where a search begins and where the logs end, by partition. `begin`: earliest, latest (the last
        records), end, offset or time."""
        topic = await self._known(who, search.topic)
        present = [each.partition_index for each in topic.partitions][:MAX_PARTITIONS]
        chosen = [index for index in present if not search.partitions or index in search.partitions]
        if not chosen:
            raise BadRequestError(f"topic {search.topic} has no such partition")
        starts = await self.bounds(who, search.topic, chosen, EARLIEST)
        ends = await self.bounds(who, search.topic, chosen, LATEST)
        match begin:
            case "earliest":
                return starts, ends
            case "end":
                return ends, ends
            case "offset" if value is not None:
                wanted = dict.fromkeys(chosen, value)
            case "time" if value is not None:
                at = await self.bounds(who, search.topic, chosen, value)
                wanted = {index: at.get(index, ends.get(index, 0)) for index in chosen}
            case "latest":
                filled = sum(ends.get(index, 0) > starts.get(index, 0) for index in chosen)
                each = max(search.limit // max(filled, 1), 1)
                wanted = {index: ends.get(index, 0) - each for index in chosen}
            case _:
                raise BadRequestError(f"enter the {begin} to begin at")
        return {index: min(max(at, starts.get(index, 0)), ends.get(index, 0)) for index, at in wanted.items()}, ends

    async def records(
        self, who: Viewer, search: Search, begin: str, value: int | None, at: Mapping[int, int] | None = None
    ) -> dict[str, object]:
        """Return the records that the search finds, and where it stopped. `at` continues an earlier search."""
        positions, ends = await self.positions(who, search, begin, value)
        positions = {index: at.get(index, offset) for index, offset in positions.items()} if at else positions
        found = _Found(positions=dict(positions))
        until_s = time.monotonic() + SCAN_S
        for index in sorted(positions):
            while (
                found.positions[index] < ends.get(index, 0)
                and len(found.records) < search.limit
                and found.scanned < MAX_SCANNED
                and time.monotonic() < until_s
            ):
                if not await self._read(who, search, index, found):
                    break
        found.records.sort(key=lambda each: (each["timestamp"], each["partition"], each["offset"]), reverse=True)
        return {
            "records": found.records,
            "scanned": found.scanned,
            "next": {str(index): at for index, at in found.positions.items()},
            "ends": {str(index): at for index, at in ends.items()},
            "done": all(found.positions[index] >= ends.get(index, 0) for index in found.positions),
        }

    async def tail(self, who: Viewer, search: Search) -> AsyncIterator[dict[str, object]]:
        """Yield new records as they arrive. Each round waits in Fetch, so a silent topic costs no query."""
        positions, _ = await self.positions(who, search, "end", None)
        found = _Found(positions=positions)
        while True:
            found.records, found.scanned = [], 0
            await self._read_all(who, search, found)
            yield {"records": found.records, "scanned": found.scanned}

    async def _read_all(self, who: Viewer, search: Search, found: _Found) -> None:
        answers = await self._fetch(who, search, found.positions, TAIL_WAIT_MS, READ_COMMITTED)
        for answer in answers:
            await self._take(who, search, answer, found)

    async def _read(self, who: Viewer, search: Search, index: int, found: _Found) -> bool:
        """Read one round of a partition. Return whether the position moved."""
        before = found.positions[index]
        (answer,) = await self._fetch(who, search, {index: before}, 0, READ_COMMITTED)
        if search.with_control and not answer.error_code and not answer.records:
            # Only readers of uncommitted records get those behind the last stable offset.
            (answer,) = await self._fetch(who, search, {index: before}, 0, READ_UNCOMMITTED)
        await self._take(who, search, answer, found)
        return found.positions[index] > before

    async def _fetch(
        self, who: Viewer, search: Search, positions: Mapping[int, int], wait_ms: int, isolation: int
    ) -> list[PartitionData]:
        request = FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=isolation,
            topics=(
                FetchTopic(
                    topic=search.topic,
                    partitions=tuple(
                        FetchPartition(partition=index, fetch_offset=at, partition_max_bytes=FETCH_BYTES)
                        for index, at in positions.items()
                    ),
                ),
            ),
        )
        response = await self._kafka.ask(FetchResponse, request, who, at_most=_BY_NAME)
        return [partition for topic in response.responses for partition in topic.partitions]

    async def _take(self, who: Viewer, search: Search, answer: PartitionData, found: _Found) -> None:
        index = answer.partition_index
        if answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            # Retention has removed the records at this position: continue at the log start. Or the topic was deleted
            # and made again, or its log has lost records: continue at the end.
            starts = await self.bounds(who, search.topic, (index,), EARLIEST)
            ends = await self.bounds(who, search.topic, (index,), LATEST)
            found.positions[index] = min(max(starts.get(index, 0), found.positions[index]), ends.get(index, 0))
            return
        refuse(answer.error_code)
        await self._decode(partial(_collect, search, answer, found, self._schemas()))

    async def record(self, who: Viewer, search: Search, index: int, offset: int) -> dict[str, object]:
        """Return one record with larger parts of its key and value, and both in hex."""
        positions = {index: offset}
        (answer,) = await self._fetch(who, search, positions, 0, READ_UNCOMMITTED)
        refuse(answer.error_code)

        schemas = self._schemas()

        def find() -> dict[str, object] | None:
            for batch in split_batches(cast("Buffer", answer.records or b""), fetched=True):
                for record in iter_records(batch):
                    if record.offset == offset:
                        told = _told(record, index, search, MAX_WHOLE_BYTES, schemas)
                        told["keyHex"] = hexed(record.key or b"", MAX_SHOWN_BYTES)
                        told["valueHex"] = hexed(record.value or b"", MAX_SHOWN_BYTES)
                        return told
            return None

        told = await self._decode(find)
        if told is None:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{search.topic}[{index}] has no record at {offset}.")
        return told

    async def produce(self, who: Viewer, topic: str, index: int, record: Record) -> dict[str, object]:
        """Append a record. Raise KafkaError if that is refused."""
        batch = build_batch([record])
        if len(batch) > MAX_PRODUCED_BYTES:
            raise BadRequestError(f"the record takes {len(batch)} bytes, and the console sends {MAX_PRODUCED_BYTES}")
        data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=index, records=batch),))
        request = ProduceRequest(acks=-1, timeout_ms=PRODUCE_TIMEOUT_MS, topic_data=(data,))
        response = await self._kafka.ask(ProduceResponse, request, who, at_most=_BY_NAME)
        answer = response.responses[0].partition_responses[0]
        refuse(answer.error_code, answer.error_message)
        return {"partition": index, "offset": answer.base_offset}


def _bounds(row: Loaded | None) -> dict[str, object]:
    if row is None:
        return {"start": None, "end": None, "bytes": None, "newest": None, "stable": None}
    undecided = row["undecided_offset"]
    return {
        "start": row["log_start_offset"],
        "end": row["log_end_offset"],
        "bytes": row["size_bytes"],
        "newest": row["newest_ms"],
        "stable": row["log_end_offset"] if undecided is None else max(undecided, row["log_start_offset"]),
    }


def _collect(
    search: Search,
    answer: PartitionData,
    found: _Found,
    schemas: Schemas | None,
) -> None:
    """Add those records of the answer that match the search, and move the search's position. An answer for a reader
    of uncommitted records lies behind the last stable offset, so its transactions are open."""
    index = answer.partition_index
    aborted = sorted(
        ((each.first_offset, each.producer_id) for each in answer.aborted_transactions or ()), reverse=True
    )
    running: set[int] = set()
    for batch in split_batches(cast("Buffer", answer.records or b""), fetched=True):
        head = read_head(batch)
        while aborted and aborted[-1][0] <= head.last_offset:
            running.add(aborted.pop()[1])
        is_aborted = head.is_transactional and head.producer_id in running
        if head.is_control:
            running.discard(head.producer_id)
        if not search.with_control and (is_aborted or head.is_control):
            found.positions[index] = head.last_offset + 1
            continue
        try:
            for record in iter_records(batch):
                if record.offset < found.positions[index]:
                    continue
                if len(found.records) >= search.limit:
                    return
                found.scanned += 1
                found.positions[index] = record.offset + 1
                if head.is_control:
                    kind = control_type_of(batch)
                    told = _told(record, index, search, MAX_SHOWN_BYTES, None)
                    told["state"] = "control" if kind is None else f"{kind.name.lower()} marker"
                    found.records.append(told)
                elif search.finds(record):
                    told = _told(record, index, search, MAX_SHOWN_BYTES, schemas)
                    if search.with_control and head.is_transactional:
                        is_open = answer.aborted_transactions is None
                        told["state"] = "open" if is_open else "aborted" if is_aborted else "committed"
                        told["producer"] = head.producer_id
                    found.records.append(told)
        except ProtocolError as error:
            found.records.append(
                {
                    "partition": index,
                    "offset": head.base_offset,
                    "timestamp": head.max_timestamp,
                    "broken": f"the batch at {head.base_offset} cannot be read: {error}",
                }
            )
        found.positions[index] = max(found.positions[index], head.last_offset + 1)


def _told(record: Record, index: int, search: Search, most: int, schemas: Schemas | None) -> dict[str, object]:
    return {
        "partition": index,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": shown(record.key, "auto", None, most, schemas),
        "value": shown(record.value, search.form, search.schema, most, schemas),
        "headers": [
            {"name": name[:MAX_SHOWN_BYTES], "value": shown(value, "auto", None, most)}
            for name, value in record.headers[:MAX_HEADERS_SHOWN]
        ],
        "headerCount": len(record.headers),
    }
