"""Which tombstones an erasure names, so that the archive never takes them. The topic is a fake."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, cast

from pipeline.erase.proof import sha256_of
from pipeline.erase.topic import Held, TopicOfKey
from pipeline.progress import Progress, Stop

KEY = b"anna"


class Topic(TopicOfKey):
    """Partition 0 holds a value of the key until a tombstone is written. Partition 1 holds only a tombstone, because
    the key has moved to partition 0."""

    def find(self, partitions: Sequence[int] | None = None) -> list[Held]:
        held = [Held(0, 9, tombstone=True), Held(1, 5, tombstone=True)]
        return [each for each in held if partitions is None or each.partition in partitions]

    def _write(self, key: bytes, partitions: Sequence[int]) -> None:
        assert (key, partitions) == (KEY, [0])


class Impatient(Stop):
    def wait(self, seconds: float) -> bool:
        return False


def test_an_erasure_names_the_tombstones_of_partitions_that_hold_no_value() -> None:
    topic = Topic(cast(Any, None), cast(Any, None), "customers", "id", sha256_of(KEY))
    found = [Held(0, 3, tombstone=False), Held(1, 5, tombstone=True)]
    lines = Progress("erase", stream=io.StringIO())
    assert topic.compact(KEY, found, 60, lines, Impatient()) == [Held(0, 9, tombstone=True), Held(1, 5, tombstone=True)]
