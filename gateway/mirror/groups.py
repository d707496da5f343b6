"""Copy committed offsets of groups, by Kafka's protocol.

The one idea: a copied offset only moves forward, and never beyond the copied records. So a group whose consumers have
moved to the target keeps its own progress, and a consumer that starts there finds its offset within the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError, PassingError
from gateway.commands.group_views import listed_groups
from gateway.commands.groups import Commit, commit_offsets, committed
from gateway.commands.log import TopicPartition
from gateway.commands.render import Row
from gateway.mirror.batches import MAX_OFFSET
from gateway.mirror.source import matches
from gateway.mirror.topics import Warn

GROUP_PREFIX = "sluice-mirror-"
"""Names of groups in which mirrors keep their positions (`produce_target.py`). They are not copied."""
COMPLETE = frozenset({"moved", "current"})
"""Results of groups of which nothing is left to copy."""

Translate = Callable[[TopicPartition, int], int | None]
"""Returns the target's offset for a source's offset. None: the partition is not copied, or not up to that offset."""


def copy_groups(source: Cluster, target: Cluster, globs: Sequence[str], translate: Translate, warn: Warn) -> list[Row]:
    """Commit the offsets of the groups that match one of the patterns, and return a row per group.

    A group that has members in the target is left alone, and so is one whose commit the target refuses for another
    reason that does not pass by itself. An offset that an open transaction is about to replace is not copied. Share
    groups keep their positions elsewhere and are skipped.
    """
    rows: list[Row] = []
    # A group that moves while the brokers are asked one after the other may be in none of their answers.
    listed = {str(row["group"]): row for _ in range(2) for row in listed_groups(source)}
    for group_id, group in sorted(listed.items()):
        if group["type"] == "share" or group_id.startswith(GROUP_PREFIX) or not matches(group_id, globs):
            continue
        present = committed(target, group_id)
        moves: dict[TopicPartition, Commit] = {}
        copied = 0
        unstable: set[TopicPartition] = set()
        for key, commit in committed(source, group_id, unstable=unstable).items():
            offset = translate(key, commit.offset)
            if offset is None:
                continue
            copied += 1
            if key not in present or present[key].offset < offset:
                moves[key] = Commit(offset, commit.metadata)
        result = "current"
        if moves:
            try:
                commit_offsets(target, group_id, moves)
                result = "moved"
            except PassingError:
                raise
            except CommandError as error:
                warn(f"in the target, {error}")
                result = "skipped"
        waits = any(translate(key, MAX_OFFSET) is not None for key in unstable)
        if waits and result != "skipped":
            result = "waits"
        if copied or waits:
            rows.append({"group": group_id, "partitions": copied, "moved": len(moves), "result": result})
    return rows
