"""The part that must know of each durable append: on a running node, the announcements to the other nodes.

The one idea: the appender and the transactions report to one listener, which they receive when they are made.
"""

from __future__ import annotations

from typing import Protocol

from storage.types import PartitionKey


class AppendListener(Protocol):
    """Receives every append of this node. Its methods must not raise."""

    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        """Note the partition's new end: a commit has become durable."""
        ...

    def in_doubt(self) -> None:
        """Note that a commit ended without an outcome, so it may become durable later."""
        ...


class _NoListener:
    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        pass

    def in_doubt(self) -> None:
        pass


NO_LISTENER: AppendListener = _NoListener()
"""For a node without other nodes."""
