"""A proof of an erasure: what was removed, and from where.

The one idea: the proof names the key by its SHA-256 and the records by their offsets, because the key itself is often
what must be forgotten. `root` is the SHA-256 of everything else in the file, so a signature of the root signs it all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from pipeline.errors import PipelineError

VERSION = 1

Spans = Mapping[str, list[list[int]]]
"""First and last offset of each run of offsets, by partition. The partition is a text, because
names in JSON are texts.
"""


@dataclass(frozen=True, slots=True)
class Proof:
    topic: str
    topic_id: str
    key_sha256: str
    began: str
    ended: str
    in_topic: Spans
    """Offsets of the key's records that compaction removed from the topic."""
    tombstones: Spans
    """Offsets of the key's tombstones that the topic had at the end. They contain the key until `delete.retention.ms`
    has passed.
    """
    topic_is_gone: bool
    archive: str
    in_archive: Spans
    tables: Mapping[str, int]
    """Rows that were removed from the additional tables, by the tables' names."""
    rest_records: int
    rest_before: str
    """Merkle root over all other records of the topic in the archive, before the erasure."""
    rest_after: str
    files: int
    """Files that were removed because an older version of a table had the key in them."""
    manifest_before: str | None = None
    manifest_after: str | None = None
    signature: str | None = field(default=None, compare=False)

    @property
    def root(self) -> str:
        told = {name: value for name, value in asdict(self).items() if name != "signature"}
        return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def records(self) -> int:
        return sum(last - first + 1 for spans in self.in_archive.values() for first, last in spans)

    def to_json(self) -> str:
        told = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"sluice_erasure": VERSION, **told, "root": self.root}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, name: str) -> Proof:
        """Return the proof in a text. Raise PipelineError if the text is not a proof of this
        version, or was changed.
        """
        try:
            told: dict[str, Any] = json.loads(text)
            version, root = told.pop("sluice_erasure"), told.pop("root")
            if version != VERSION:
                raise PipelineError(f"{name} is a proof of another version.", "Use the release of Sluice that made it.")
            found = Proof(**told)
            whole = found.root == root
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PipelineError(f"{name} is no proof ({error}).", "Name the file that `erase` wrote.") from error
        if not whole:
            raise PipelineError(f"{name} has been changed: its root does not fit it.", "Use an unchanged copy.")
        return found


def sha256_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def spans(places: Iterable[tuple[int, int]]) -> dict[str, list[list[int]]]:
    """Return runs of consecutive offsets by partition, from a list of partitions and offsets."""
    found: dict[str, list[list[int]]] = {}
    for partition, group in groupby(sorted(set(places)), key=lambda place: place[0]):
        runs = found.setdefault(str(partition), [])
        for _, offset in group:
            if runs and runs[-1][1] == offset - 1:
                runs[-1][1] = offset
            else:
                runs.append([offset, offset])
    return found


def places(found: Spans) -> set[tuple[int, int]]:
    """Return the partitions and offsets in `spans`."""
    return {
        (int(partition), offset)
        for partition, runs in found.items()
        for first, last in runs
        for offset in range(first, last + 1)
    }


@dataclass(slots=True)
class Begun:
    """State of an erasure that has begun. It is kept in a file until the proof is written, and a later start reads it
    again.
    """

    topic: str
    key_sha256: str
    began: str
    in_topic: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    in_archive: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    tables: dict[str, int] = field(default_factory=dict[str, int])
    settings: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """The topic's own settings from before the job requested compaction. None for a setting that the topic did not
    have.
    """
    files: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Files in which the key was found, by table. A file may outlive the key's rows, so a later start must know it."""
    compared: str | None = None
    """Root of the topic's part of the manifest that the archive fitted."""
    rewrites: bool = False
    """True if the tables may already be without the key, so that the archive no longer fits its manifest."""

    def to_json(self) -> str:
        return json.dumps({"sluice_erasure_begun": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, name: str) -> Begun:
        try:
            told: dict[str, Any] = json.loads(text)
            if told.pop("sluice_erasure_begun") != VERSION:
                raise PipelineError(
                    f"{name} is of another version.", "Use the release of Sluice that began the erasure."
                )
            # A file of an earlier release does not say whether tables were rewritten.
            told.setdefault("rewrites", True)
            return Begun(**told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PipelineError(
                f"{name} does not say how far an erasure is ({error}).", "Remove it, or name another --proof."
            ) from error
