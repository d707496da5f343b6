"""Map offsets of a source to the offsets of the same records in the target.

The one idea: the log of the target has no gaps, so the copy is a list of runs. In a run, both offsets rise together.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

MAX_RUNS = 60
"""Runs that are kept: their text fits into the 4,096 bytes that Kafka allows for the metadata of a commit."""


@dataclass(slots=True)
class Run:
    """A run of records: from `source` on in the source, and from `target` on in the target."""

    source: int
    target: int
    count: int


class OffsetRuns:
    """The runs of one partition, and the next offset of both logs."""

    def __init__(self, next_source: int, next_target: int, runs: list[Run]) -> None:
        self.next_source = next_source
        self.next_target = next_target
        self.runs = runs

    @classmethod
    def begin(cls, source: int, target: int) -> OffsetRuns:
        """Return the runs of a partition of which nothing has been copied yet."""
        return cls(source, target, [Run(source, target, 0)])

    def copied(self, first_source: int, count: int, next_source: int) -> None:
        """Note `count` records from `first_source` on, appended at the target's end. The source continues at
        `next_source`."""
        self.next_source = next_source
        if not count:
            return
        last = self.runs[-1]
        if first_source - last.source != last.count or self.next_target - last.target != last.count:
            last = Run(first_source, self.next_target, 0)
            self.runs.append(last)
            if len(self.runs) > MAX_RUNS:
                # Offsets in the removed run count as the end of the first run, so a group may read some records again.
                del self.runs[1]
        last.count += count
        self.next_target += count

    @property
    def are_equal(self) -> bool:
        """True if each record has the same offset in both logs."""
        return all(run.source == run.target for run in self.runs)

    def translate(self, offset: int) -> int | None:
        """Return the target's offset of the first copied record at or behind `offset`, or a lower one if that is not
        known any more. None for an offset before the first run."""
        if offset >= self.next_source:
            return self.next_target
        at = bisect_right(self.runs, offset, key=_source) - 1
        if at < 0:
            return None
        run = self.runs[at]
        return run.target + min(offset - run.source, run.count)

    def text(self) -> str:
        """Return the runs as the metadata of a commit."""
        return " ".join([str(self.next_source), *(f"{run.source}:{run.target}:{run.count}" for run in self.runs)])

    @classmethod
    def parse(cls, text: str, next_target: int) -> OffsetRuns:
        """Return the runs of `text`. Raise ValueError if they cannot be read."""
        first, *others = text.split()
        runs: list[Run] = []
        for other in others:
            source, target, count = map(int, other.split(":"))
            runs.append(Run(source, target, count))
        if not runs:
            raise ValueError("no runs")
        return cls(int(first), next_target, runs)


def _source(run: Run) -> int:
    return run.source
