"""Examine the whole log: whether every chunk has its bytes, whether they are right, and whether every file is known.

The one idea: the check reads as a reader would, with or without a serving node, and reports in words what is wrong. It
repairs nothing. The only thing it may remove is a file that the index has never known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.byte_store import ByteStore, FoundObject
from storage.chunk_reader import ChunkReader
from storage.chunks import Chunk, DamagedChunkError, chunk_of
from storage.errors import StorageError
from storage.pool import Database
from storage.queries import statement
from storage.roller import REMOVED_AT_ONCE
from storage.store import unusable, why_nothing_may_go
from storage.text import loaded_or_none

CHUNKS_PER_STATEMENT = 1_000
BYTES_PER_STATEMENT = 16 * 1024 * 1024

_MISTAKES = {
    "not_under_way": "partition {partition_key}: producer {producer_id} is in a transaction that is not under way",
    "begun_past_end": "partition {partition_key}: producer {producer_id} is in a transaction since offset {at_offset}, "
    "past the log's end",
    "marked_past_end": "partition {partition_key}: producer {producer_id} has aborted a transaction by a marker at "
    "offset {at_offset}, past the log's end",
    "marked_before_begun": "partition {partition_key}: producer {producer_id} has aborted a transaction by a marker at "
    "offset {at_offset}, where it had not begun",
    "group_not_under_way": "group {group_id!r}: producer {producer_id} is in a transaction that is not under way",
    "offsets_not_under_way": "group {group_id!r}: offsets of producer {producer_id} are pending in no transaction",
}
"""Sentences about rows of transactions that should not exist in their state."""


@dataclass(slots=True)
class CheckReport:
    """Counts of examined things; `wrong` has one sentence per problem."""

    chunks: int = 0
    batches: int = 0
    size_bytes: int = 0
    wrong: list[str] = field(default_factory=list[str])
    removed_files: int = 0


async def check(
    database: Database,
    store: ByteStore | None,
    *,
    repair: bool = False,
) -> CheckReport:
    """Walk the index in bounded statements. With `repair`, delete files and objects that are not registered.

    Raise StorageError if the store cannot list its contents.
    """
    report = CheckReport()
    reader = ChunkReader(store, cache_bytes=0)
    # List the files before reading the index. An object is registered before it is created, so a file that exists now
    # and is not registered afterwards never was, or has been removed in the meantime.
    found = [] if store is None else await _listed(store)
    try:
        await _check_chunks(database, reader, report)
    finally:
        reader.close()
    for row in await database.cold.fetch(statement("partitions_to_check")):
        report.wrong.append(
            f"partition {row['partition_key']}: it counts {row['size_bytes']} bytes up to offset {row['next_offset']}, "
            f"its chunks have {row['chunk_bytes']} up to {row['chunk_end']}"
        )
    for row in await database.cold.fetch(statement("transactions_to_check")):
        where = {**row, "group_id": loaded_or_none(row["group_id"])}
        report.wrong.append(_MISTAKES[row["mistake"]].format_map(where))
    if store is not None:
        rows = await database.cold.fetch(statement("known_objects"), [each.object_id for each in found])
        known = {row["object_id"] for row in rows}
        unknown = [each.object_id for each in found if each.object_id not in known]
        if unknown:
            # A node removes a file before its row, so a file that still exists had no row.
            remaining = {each.object_id for each in await _listed(store)}
            unknown = [object_id for object_id in unknown if object_id in remaining]
        if repair and unknown:
            await _require_owner(database, store)
            await _remove(store, unknown)
            report.removed_files = len(unknown)
        else:
            report.wrong += [f"{store.name(object_id)}: the index does not know this file" for object_id in unknown]
    return report


async def _listed(store: ByteStore) -> list[FoundObject]:
    try:
        return await store.listed()
    except OSError as error:
        raise unusable(store.location, error) from error


async def _check_chunks(database: Database, reader: ChunkReader, report: CheckReport) -> None:
    key, offset = 0, -1
    while rows := await database.cold.fetch(
        statement("chunks_to_check"), key, offset, CHUNKS_PER_STATEMENT, BYTES_PER_STATEMENT
    ):
        report.wrong += [
            f"partition {row['partition_key']}: chunks overlap at offset {row['base_offset']}"
            for row in rows
            if row["overlaps"]
        ]
        chunks = [chunk_of(row) for row in rows]
        await _check_bytes(database, reader, chunks, report)
        key, offset = chunks[-1].partition_key, chunks[-1].base_offset


async def _require_owner(database: Database, store: ByteStore) -> None:
    try:
        problem = await why_nothing_may_go(store, await database.cold.fetch_row(statement("log_store")))
    except OSError as error:
        raise unusable(store.location, error) from error
    if problem is not None:
        raise StorageError(f"no file is removed from {store.location}: {problem}")


async def _remove(store: ByteStore, object_ids: Sequence[int]) -> None:
    try:
        for first in range(0, len(object_ids), REMOVED_AT_ONCE):
            await store.remove(object_ids[first : first + REMOVED_AT_ONCE])
    except OSError as error:
        raise unusable(store.location, error) from error


async def _check_bytes(database: Database, reader: ChunkReader, chunks: Sequence[Chunk], report: CheckReport) -> None:
    for chunk, result in zip(chunks, await reader.batches_uncached(chunks), strict=True):
        if isinstance(result, DamagedChunkError):
            # The chunk may have been moved or removed since its row was read.
            rows = await database.cold.fetch(
                statement("chunks_between"), chunk.partition_key, chunk.base_offset, chunk.last_offset
            )
            present = [chunk_of(row) for row in rows]
            if all((each.object_id, each.position) != (chunk.object_id, chunk.position) for each in present):
                await _check_bytes(database, reader, present, report)
                continue
            place = "inline" if chunk.object_id is None else f"object {chunk.object_id:016x} at {chunk.position}"
            offsets = f"offsets {chunk.base_offset} to {chunk.last_offset}"
            report.wrong.append(f"partition {chunk.partition_key}, {offsets}, {place}: {result}")
        else:
            report.chunks += 1
            report.batches += len(result)
            report.size_bytes += chunk.size_bytes
