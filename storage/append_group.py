"""One group commit as a question to Postgres: which batches lie together, and what is decided per entry.

The one idea: batches of one partition are laid back to back, so everything the commit appends to a partition is one row
of the index. Consecutive batches without a producer form one entry, because Postgres accepts or refuses them together.

This module handles values only. It sends nothing, and writes nothing but the heads of appended batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from storage.chunks import CHUNK_BYTES, write_head
from storage.pool import Row
from storage.types import Appended, NewBatch, Refusal


@dataclass(slots=True)
class _Entry:
    """Batches that are accepted or refused together: indexes into the group, in the order of their offsets."""

    candidate: int
    indexes: list[int]
    record_count: int
    max_timestamp_ms: int
    size_bytes: int
    producer_position: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool


class AppendGroup:
    """The layout of `batches`. `candidates` holds, for each future chunk, the indexes of its batches in the order in
    which their bytes are written."""

    def __init__(self, batches: Sequence[NewBatch]) -> None:
        self.batches = batches
        self.candidates: list[list[int]] = []
        self.candidate_bytes: list[int] = []
        by_partition: dict[int, list[int]] = {}
        for index, batch in enumerate(batches):
            by_partition.setdefault(batch.partition_key, []).append(index)
        self._keys = sorted(by_partition)
        self._partition_positions: list[int] = []
        self._producers: dict[tuple[int, int], int] = {}
        self._entries: list[_Entry] = []
        for position, key in enumerate(self._keys, 1):
            self._lay_out(key, position, by_partition[key])
        self.size_bytes = sum(self.candidate_bytes)

    def _lay_out(self, key: int, position: int, indexes: list[int]) -> None:
        batches, candidates, candidate_bytes = self.batches, self.candidates, self.candidate_bytes
        room_bytes = -1
        entry: _Entry | None = None
        for index in indexes:
            batch = batches[index]
            size_bytes = len(batch.records)
            if size_bytes > room_bytes:
                candidates.append([])
                candidate_bytes.append(0)
                self._partition_positions.append(position)
                room_bytes = CHUNK_BYTES
                entry = None
            candidates[-1].append(index)
            candidate_bytes[-1] += size_bytes
            room_bytes -= size_bytes
            if batch.producer_id < 0:
                if entry is not None:
                    entry.indexes.append(index)
                    entry.record_count += batch.record_count
                    entry.max_timestamp_ms = max(entry.max_timestamp_ms, batch.max_timestamp_ms)
                    entry.size_bytes += size_bytes
                    continue
                producer_position = 0
            else:
                pair = (key, batch.producer_id)
                producer_position = self._producers.setdefault(pair, len(self._producers) + 1)
            made = _Entry(
                len(candidates),
                [index],
                batch.record_count,
                batch.max_timestamp_ms,
                size_bytes,
                producer_position,
                batch.producer_epoch,
                batch.base_sequence,
                batch.is_transactional,
            )
            self._entries.append(made)
            entry = None if producer_position else made

    def buffers(self, candidate: int) -> list[bytearray | memoryview]:
        """Return the bytes of one future chunk. Candidates are numbered from 0."""
        return [self.batches[index].records for index in self.candidates[candidate]]

    def partition_key(self, candidate: int) -> int:
        """Return the partition of a future chunk."""
        return self._keys[self._partition_positions[candidate] - 1]

    def arguments(
        self,
        *,
        wait: bool,
        object_id: int | None = None,
        position: int | None = None,
        records: Sequence[bytes | bytearray | memoryview] | None = None,
    ) -> tuple[object, ...]:
        """Return the parameters of `append_chunks`. `position` is where the first candidate begins in the object."""
        entries = self._entries
        positions: list[int | None] = []
        for size_bytes in self.candidate_bytes:
            positions.append(position)
            if position is not None:
                position += size_bytes
        return (
            self._keys,
            wait,
            object_id,
            self._partition_positions,
            positions,
            records,
            [entry.candidate for entry in entries],
            [len(entry.indexes) for entry in entries],
            [entry.record_count for entry in entries],
            [entry.max_timestamp_ms for entry in entries],
            [entry.size_bytes for entry in entries],
            [partition_key for partition_key, _ in self._producers],
            [producer_id for _, producer_id in self._producers],
            [entry.producer_position for entry in entries],
            [entry.producer_epoch for entry in entries],
            [entry.base_sequence for entry in entries],
            [entry.is_transactional for entry in entries],
        )

    @property
    def is_plain(self) -> bool:
        """True if `append_inline` takes the group: one entry per partition, and no batch is transactional."""
        return len(self._entries) == len(self._keys) and not any(entry.is_transactional for entry in self._entries)

    def plain_arguments(self, records: Sequence[bytes | bytearray | memoryview]) -> tuple[object, ...]:
        """Return the parameters of `append_inline` for a plain group."""
        entries = self._entries
        return (
            self._keys,
            [len(entry.indexes) for entry in entries],
            [entry.record_count for entry in entries],
            [entry.max_timestamp_ms for entry in entries],
            self.candidate_bytes,
            records,
            [self.batches[entry.indexes[0]].producer_id for entry in entries],
            [entry.producer_epoch for entry in entries],
            [entry.base_sequence for entry in entries],
        )

    def settle(self, decided: Row) -> list[Appended | Refusal]:
        """Return one outcome per batch from the row that either function returned, and write the heads of appended
        batches."""
        outcomes: list[Appended | Refusal | None] = [None] * len(self.batches)
        decisions = zip(
            cast(list[Any], decided["refusals"]),
            cast(list[Any], decided["duplicates"]),
            cast(list[Any], decided["base_offsets"]),
            cast(list[Any], decided["log_start_offsets"]),
            cast(list[Any], decided["leader_epochs"]),
            cast(list[Any], decided["last_stable_offsets"]),
            strict=True,
        )
        for entry, (refusal, duplicate, base_offset, log_start_offset, leader_epoch, open_since) in zip(
            self._entries, decisions, strict=True
        ):
            if refusal is not None:
                refused = Refusal(refusal)
                for index in entry.indexes:
                    outcomes[index] = refused
                continue
            offset: int = base_offset
            for index in entry.indexes:
                batch = self.batches[index]
                if not duplicate:
                    write_head(batch.records, offset, leader_epoch)
                outcomes[index] = Appended(offset, log_start_offset, leader_epoch, duplicate, open_since)
                offset += batch.record_count
        return cast(list[Appended | Refusal], outcomes)
