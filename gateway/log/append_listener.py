"""The part that must know of each durable append: on a running node, the announcements to the other nodes.

The one idea: the appender and the transactions report to one listener, which they receive when they are made.
"""

from __future__ import annotations

from typing import Protocol

from storage.types import PartitionKey


class AppendListener(Protocol):
    """Receives every append of this node. Its methods must not raise an error."""

    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        """Note that a commit has become durable, with the partition's new end."""
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
"""The listener of a node that has no other nodes to inform."""
