"""One group commit as parameters for Postgres: which batches form a chunk, and which entries Postgres decides about.

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
    """Batches that Postgres accepts or refuses together: their indexes in the group, in the order of their offsets."""

    candidate: int
    indexes: list[int]
    record_count: int
    max_timestamp_ms: int
    size_bytes: int
    producer_position: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool


RING = 5
"""Number of a producer's batches that Postgres remembers in a partition (`producer_state`)."""
SEQUENCES = 2**31
"""Sequence numbers wrap after this number."""

_PADDING: list[None] = [None] * RING


class _Run:
    """Batches of one producer in one partition whose sequences follow each other. `place` is the partition's position,
    from 1. The lists hold, per batch, its first and last sequence and the records before it in its chunk."""

    __slots__ = (
        "first_sequences",
        "is_transactional",
        "last_sequences",
        "next_sequence",
        "place",
        "preceding_records",
        "producer_epoch",
        "producer_id",
    )

    def __init__(self, place: int, batch: NewBatch) -> None:
        self.place = place
        self.producer_id = batch.producer_id
        self.producer_epoch = batch.producer_epoch
        self.is_transactional = batch.is_transactional
        self.next_sequence = batch.base_sequence
        self.first_sequences: list[int] = []
        self.last_sequences: list[int] = []
        self.preceding_records: list[int] = []

    def add(self, batch: NewBatch, preceding_records: int) -> bool:
        """Add the producer's next batch. Return False if it does not continue the run."""
        if (
            batch.base_sequence != self.next_sequence
            or batch.producer_epoch != self.producer_epoch
            or batch.is_transactional != self.is_transactional
            or len(self.first_sequences) == RING
        ):
            return False
        self.first_sequences.append(batch.base_sequence)
        self.last_sequences.append((batch.base_sequence + batch.record_count - 1) % SEQUENCES)
        self.preceding_records.append(preceding_records)
        self.next_sequence = (batch.base_sequence + batch.record_count) % SEQUENCES
        return True

    def row(self) -> list[int | None]:
        """Return the run's row in `p_runs` of `append_plain`."""
        padding = _PADDING[len(self.first_sequences) :]
        return [
            self.place,
            self.producer_id,
            self.producer_epoch,
            int(self.is_transactional),
            len(self.first_sequences),
            self.next_sequence,
            *self.first_sequences,
            *padding,
            *self.last_sequences,
            *padding,
            *self.preceding_records,
            *padding,
        ]


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
        self._entries: list[_Entry] = []
        for position, key in enumerate(self._keys, 1):
            self._lay_out(position, by_partition[key])
        self.size_bytes = sum(self.candidate_bytes)

    def _lay_out(self, position: int, indexes: list[int]) -> None:
        room_bytes = -1
        for index in indexes:
            size_bytes = len(self.batches[index].records)
            if size_bytes > room_bytes:
                self.candidates.append([])
                self.candidate_bytes.append(0)
                self._partition_positions.append(position)
                room_bytes = CHUNK_BYTES
            self.candidates[-1].append(index)
            self.candidate_bytes[-1] += size_bytes
            room_bytes -= size_bytes

    def buffers(self, candidate: int) -> list[bytearray | memoryview]:
        """Return the bytes of one candidate, which becomes a chunk if it is accepted. Candidates
        are numbered from 0.
        """
        return [self.batches[index].records for index in self.candidates[candidate]]

    def partition_key(self, candidate: int) -> int:
        """Return the partition of a candidate, which becomes a chunk if it is accepted."""
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
        producers: dict[tuple[int, int], int] = {}
        entries = self._entries = self._list_entries(producers)
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
            [partition_key for partition_key, _ in producers],
            [producer_id for _, producer_id in producers],
            [entry.producer_position for entry in entries],
            [entry.producer_epoch for entry in entries],
            [entry.base_sequence for entry in entries],
            [entry.is_transactional for entry in entries],
        )

    def _list_entries(self, producers: dict[tuple[int, int], int]) -> list[_Entry]:
        """Return the entries, and number the pairs of partition and producer in `producers`."""
        entries: list[_Entry] = []
        for candidate, indexes in enumerate(self.candidates, 1):
            key = self._keys[self._partition_positions[candidate - 1] - 1]
            entry: _Entry | None = None
            for index in indexes:
                batch = self.batches[index]
                size_bytes = len(batch.records)
                producer_position = 0
                if batch.producer_id >= 0:
                    producer_position = producers.setdefault((key, batch.producer_id), len(producers) + 1)
                elif entry is not None:
                    entry.indexes.append(index)
                    entry.record_count += batch.record_count
                    entry.max_timestamp_ms = max(entry.max_timestamp_ms, batch.max_timestamp_ms)
                    entry.size_bytes += size_bytes
                    continue
                made = _Entry(
                    candidate,
                    [index],
                    batch.record_count,
                    batch.max_timestamp_ms,
                    size_bytes,
                    producer_position,
                    batch.producer_epoch,
                    batch.base_sequence,
                    batch.is_transactional,
                )
                entries.append(made)
                entry = None if producer_position else made
        return entries

    def one_arguments(self, records: Sequence[bytes | bytearray | memoryview]) -> tuple[object, ...] | None:
        """Return the parameters of `append_one`. Return None if the group is not one chunk without producers, or with
        one batch that is not transactional."""
        if len(self.candidates) != 1:
            return None
        batches = self.batches
        first = batches[0]
        if len(batches) == 1:
            if first.is_transactional:
                return None
            record_count, max_timestamp_ms = first.record_count, first.max_timestamp_ms
        elif any(batch.producer_id >= 0 for batch in batches):
            return None
        else:
            record_count = sum(batch.record_count for batch in batches)
            max_timestamp_ms = max(batch.max_timestamp_ms for batch in batches)
        return (
            self._keys[0],
            len(batches),
            record_count,
            max_timestamp_ms,
            records[0],
            first.producer_id,
            first.producer_epoch,
            first.base_sequence,
        )

    def settle_one(self, decided: Row) -> list[Appended | Refusal]:
        """Return one outcome per batch from the row that `append_one` returned, and write the heads of the batches."""
        return self._appended(
            self.candidates[0],
            decided["base_offset"],
            decided["log_start_offset"],
            decided["leader_epoch"],
            decided["last_stable_offset"],
        )

    def _appended(
        self, indexes: Sequence[int], offset: int, log_start_offset: int, leader_epoch: int, open_since: int | None
    ) -> list[Appended | Refusal]:
        outcomes: list[Appended | Refusal] = []
        for index in indexes:
            batch = self.batches[index]
            write_head(batch.records, offset, leader_epoch)
            outcomes.append(Appended(offset, log_start_offset, leader_epoch, False, open_since))
            offset += batch.record_count
        return outcomes

    def plain_arguments(
        self,
        *,
        object_id: int | None = None,
        position: int | None = None,
        records: Sequence[bytes | bytearray | memoryview] | None = None,
    ) -> tuple[object, ...] | None:
        """Return the parameters of `append_plain`. Return None if the group needs more decisions than that function
        makes: a partition receives several chunks, or the batches of a producer do not follow each other."""
        if len(self.candidates) != len(self._keys):
            return None
        runs: dict[tuple[int, int], _Run] = {}
        # Rows are lists, because the driver takes a tuple in an array for a composite value.
        chunks: list[list[int]] = []
        for place, indexes in enumerate(self.candidates, 1):
            record_count = 0
            max_timestamp_ms = self.batches[indexes[0]].max_timestamp_ms
            for index in indexes:
                batch = self.batches[index]
                if batch.producer_id >= 0:
                    run = runs.get((place, batch.producer_id))
                    if run is None:
                        run = runs[place, batch.producer_id] = _Run(place, batch)
                    if not run.add(batch, record_count):
                        return None
                record_count += batch.record_count
                if batch.max_timestamp_ms > max_timestamp_ms:
                    max_timestamp_ms = batch.max_timestamp_ms
            chunks.append([len(indexes), record_count, self.candidate_bytes[place - 1], max_timestamp_ms])
        return (
            self._keys,
            object_id,
            position,
            records,
            chunks,
            [run.row() for run in runs.values()],
        )

    def settle_plain(self, decided: Row) -> list[Appended | Refusal]:
        """Return one outcome per batch from the row that `append_plain` returned, and write the heads of appended
        batches."""
        outcomes: list[Appended | Refusal | None] = [None] * len(self.batches)
        decisions = zip(
            cast(list[Any], decided["base_offsets"]),
            cast(list[Any], decided["log_start_offsets"]),
            cast(list[Any], decided["leader_epochs"]),
            cast(list[Any], decided["last_stable_offsets"]),
            strict=True,
        )
        for place, (base_offset, log_start_offset, leader_epoch, open_since) in enumerate(decisions):
            if base_offset is None:
                refused = Refusal(decided["refusals"][place])
                for index in self.candidates[place]:
                    outcomes[index] = refused
                continue
            indexes = self.candidates[place]
            appended = self._appended(indexes, base_offset, log_start_offset, leader_epoch, open_since)
            for index, outcome in zip(indexes, appended, strict=True):
                outcomes[index] = outcome
        return cast(list[Appended | Refusal], outcomes)

    def settle(self, decided: Row) -> list[Appended | Refusal]:
        """Return one outcome per batch from the row that `append_chunks` returned for `arguments`, and write the heads
        of appended batches."""
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
