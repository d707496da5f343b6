"""A manifest: hashes of an archive's records, which outlive the topics.

The one idea: `root` is the root of a Merkle tree. Its first leaf is the claim, the offsets that the manifest covers;
each further leaf is a day of a partition, with the root of the tree over the hashes of the day's blocks. So a signature
of the root signs everything, and a difference is found down to a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from pipeline.errors import PipelineError
from pipeline.kafka import Partition
from pipeline.manifest import merkle
from pipeline.verify.sums import BLOCK

VERSION = 1


class Block(NamedTuple):
    """The records of one block of offsets that are of one day."""

    number: int
    records: int
    hash: str


@dataclass(frozen=True, slots=True)
class Day:
    topic: str
    partition: int
    day: str
    first: int
    last: int
    blocks: tuple[Block, ...]

    @property
    def records(self) -> int:
        return sum(block.records for block in self.blocks)

    @property
    def root(self) -> str:
        return merkle.root(_bytes(list(block)) for block in self.blocks)

    def told(self) -> dict[str, Any]:
        """Return the part of the day that the manifest's root covers."""
        return {
            "topic": self.topic, "partition": self.partition, "day": self.day, "first": self.first,
            "last": self.last, "records": self.records, "root": self.root,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    claim: Mapping[Partition, tuple[int, int]]
    """The claimed range by partition: the first offset, and the offset after the last."""
    topic_ids: Mapping[str, str]
    days: tuple[Day, ...]
    signature: str | None = field(default=None, compare=False)

    @property
    def records(self) -> int:
        return sum(day.records for day in self.days)

    @property
    def root(self) -> str:
        return merkle.root([_bytes(self._claim()), *(_bytes(day.told()) for day in self.days)])

    def _claim(self) -> dict[str, Any]:
        topics: dict[str, Any] = {
            name: {"id": topic_id, "partitions": {}} for name, topic_id in sorted(self.topic_ids.items())
        }
        for (topic, partition), span in sorted(self.claim.items()):
            topics[topic]["partitions"][str(partition)] = list(span)
        return {"sluice_manifest": VERSION, "block_offsets": BLOCK, "topics": topics}

    def to_json(self) -> str:
        days = [{**day.told(), "blocks": [list(block) for block in day.blocks]} for day in self.days]
        told = {**self._claim(), "days": days, "root": self.root}
        if self.signature is not None:
            told["signature"] = self.signature
        return json.dumps(told, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, name: str) -> Manifest:
        """Return the manifest in a text. Raise PipelineError if the text is not a manifest of this version, or if its
        hashes do not fit each other.
        """
        try:
            told = json.loads(text)
            if (told["sluice_manifest"], told["block_offsets"]) != (VERSION, BLOCK):
                raise PipelineError(
                    f"{name} is a manifest of another version.", "Use the release of Sluice that made it."
                )
            claim = {
                (topic, int(partition)): (span[0], span[1])
                for topic, of_topic in told["topics"].items()
                for partition, span in of_topic["partitions"].items()
            }
            days = tuple(
                Day(each["topic"], each["partition"], each["day"], each["first"], each["last"],
                    tuple(Block(*block) for block in each["blocks"]))
                for each in told["days"]
            )  # fmt: skip
            ids = {topic: of_topic["id"] for topic, of_topic in told["topics"].items()}
            found = Manifest(claim, ids, days, told.get("signature"))
            whole = found.root == told["root"] and [day.told() for day in days] == [
                {key: value for key, value in each.items() if key != "blocks"} for each in told["days"]
            ]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise PipelineError(f"{name} is no manifest ({error}).", "Name the file that `manifest` wrote.") from error
        if not whole:
            raise PipelineError(f"{name} has been changed: its hashes do not fit each other.", "Use an unchanged copy.")
        return found

    def only(self, topics: Sequence[str]) -> Manifest:
        """Return the part of some topics. Raise PipelineError if the manifest lacks one of them."""
        unknown = sorted(set(topics) - self.topic_ids.keys())
        if unknown:
            raise PipelineError(f"The manifest does not name the topic {unknown[0]}.", "Check --topics.")
        return Manifest(
            {key: span for key, span in self.claim.items() if key[0] in topics},
            {topic: topic_id for topic, topic_id in self.topic_ids.items() if topic in topics},
            tuple(day for day in self.days if day.topic in topics),
        )


def days_of(rows: Iterable[Any]) -> tuple[Day, ...]:
    """Return the days of rows of `BLOCK_HASHES` that are sorted by topic, partition, date and block."""
    found: list[Day] = []
    for (topic, partition, day), group in groupby(rows, key=lambda row: (row.topic, row.partition, str(row.date))):
        blocks = list(group)
        found.append(
            Day(topic, partition, day, min(row.first for row in blocks), max(row["last"] for row in blocks),
                tuple(Block(row.block, row.records, row.hash) for row in blocks))
        )  # fmt: skip
    return tuple(found)


def differences(manifest: Manifest, days: Iterable[Day]) -> Iterator[str]:
    """Name the blocks in which the days of an archive differ from those of the manifest."""
    named = {(day.topic, day.partition, day.day): day for day in manifest.days}
    held = {(day.topic, day.partition, day.day): day for day in days}
    for key in sorted(named.keys() | held.keys()):
        topic, partition, date = key
        before = {block.number: block for block in named[key].blocks} if key in named else {}
        now = {block.number: block for block in held[key].blocks} if key in held else {}
        for number in sorted(before.keys() | now.keys()):
            if before.get(number) == now.get(number):
                continue
            then = before[number].records if number in before else 0
            here = now[number].records if number in now else 0
            happened = "other records" if then == here else f"{here:,} records instead of {then:,}"
            yield (
                f"{topic}-{partition} of {date}, within offsets {number * BLOCK:,} to {(number + 1) * BLOCK - 1:,}: "
                f"the archive holds {happened}"
            )


def _bytes(told: Any) -> bytes:
    return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
