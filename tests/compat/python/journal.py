"""A delivery log that many processes append to, with waits for its contents.

The one idea: the file is the state. Members, in this process or another, append events, and waiting code reads the file
as it grows. So the log of a killed member contains exactly what it had done.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.01
WAIT_SECONDS = 45.0

Partition = tuple[str, int]


class Journal:
    """Appends events, safely from threads and processes. Each event is one write to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def close(self) -> None:
        os.close(self._file)

    def scenario(
        self, topic: str, partitions: int, *, cooperative: bool = False, redelivery_allowed: bool = False
    ) -> None:
        self._write(
            {
                "event": "scenario",
                "mode": "cooperative" if cooperative else "eager",
                "topic": topic,
                "partitions": partitions,
                "redelivery_allowed": redelivery_allowed,
            }
        )

    def produced(self, topic: str, partition: int, offset: int) -> None:
        self._write({"event": "produced", "topic": topic, "partition": partition, "offset": offset})

    def assigned(self, member: str, partitions: Iterable[Partition]) -> None:
        self._ownership("assigned", member, partitions)

    def revoked(self, member: str, partitions: Iterable[Partition]) -> None:
        self._ownership("revoked", member, partitions)

    def lost(self, member: str, partitions: Iterable[Partition]) -> None:
        self._ownership("lost", member, partitions)

    def delivered(self, member: str, topic: str, partition: int, offset: int) -> None:
        self._write({"event": "delivered", "member": member, "topic": topic, "partition": partition, "offset": offset})

    def closed(self, member: str) -> None:
        self._write({"event": "closed", "member": member, "partition": -1})

    def killed(self, member: str) -> None:
        self._write({"event": "killed", "member": member, "partition": -1})

    def _ownership(self, event: str, member: str, partitions: Iterable[Partition]) -> None:
        entries = [
            {"event": event, "member": member, "topic": topic, "partition": partition}
            for topic, partition in sorted(partitions)
        ]
        if entries:
            self._write(*entries)

    def _write(self, *entries: dict[str, Any]) -> None:
        t = time.time() * 1000
        os.write(self._file, "".join(json.dumps({"t": t, **entry}) + "\n" for entry in entries).encode())


class View:
    """The state that a growing log describes: the owners of partitions, and the produced and delivered records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self.owned: dict[str, set[Partition]] = {}
        self.delivered: Counter[tuple[str, int, int]] = Counter()
        self.delivered_by: Counter[str] = Counter()
        self.produced: set[tuple[str, int, int]] = set()
        self.rounds: Counter[str] = Counter()
        self.failures: list[str] = []

    def refresh(self) -> None:
        """Read the complete lines that were added."""
        with self.path.open("rb") as log:
            log.seek(self._position)
            added = log.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            self._apply(json.loads(line))

    def _apply(self, entry: dict[str, Any]) -> None:
        event, member = entry["event"], entry.get("member", "")
        partition = (entry.get("topic", ""), entry.get("partition", -1))
        if event == "assigned":
            self.owned.setdefault(member, set()).add(partition)
            self.rounds[member] += 1
        elif event in ("revoked", "lost"):
            self.owned.get(member, set()).discard(partition)
        elif event in ("closed", "killed"):
            self.owned.pop(member, None)
        elif event == "delivered":
            self.delivered[(*partition, entry["offset"])] += 1
            self.delivered_by[member] += 1
        elif event == "produced":
            self.produced.add((*partition, entry["offset"]))

    def wait_for(self, predicate: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the log makes `predicate` true. If that takes too long, raise AssertionError
        with the ownership.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.refresh()
            if self.failures:
                raise AssertionError("; ".join(self.failures))
            if predicate():
                return
            if time.monotonic() > deadline:
                owned = {member: sorted(partitions) for member, partitions in sorted(self.owned.items())}
                raise AssertionError(
                    f"{what}: not within {seconds:.0f} s; owned: {owned}; "
                    f"{len(self.delivered)} of {len(self.produced)} records"
                )
            time.sleep(POLL_SECONDS)

    def wait_settled(
        self, members: Iterable[str], partitions: Iterable[Partition], seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until every partition has exactly one owner, all `members` own a balanced share, and no other member
        owns a partition.
        """
        names, wanted = set(members), set(partitions)
        low, high = len(wanted) // len(names), -(-len(wanted) // len(names))

        def settled() -> bool:
            held = {member: owned for member, owned in self.owned.items() if owned or member in names}
            counts = Counter(partition for owned in held.values() for partition in owned)
            return (
                set(held) == names
                and set(counts) == wanted
                and set(counts.values()) == {1}
                and all(low <= len(owned) <= high for owned in held.values())
            )

        self.wait_for(settled, f"{len(wanted)} partitions settled over {sorted(names)}", seconds)

    def wait_caught_up(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until every record produced so far was delivered."""
        self.refresh()
        wanted = set(self.produced)
        self.wait_for(lambda: wanted <= set(self.delivered), f"{len(wanted)} records delivered", seconds)

    def wait_more(self, count: int, seconds: float = WAIT_SECONDS) -> None:
        """Wait for `count` more records."""
        self.refresh()
        wanted = self.delivered.total() + count
        self.wait_for(lambda: self.delivered.total() >= wanted, f"{count} more records delivered", seconds)
