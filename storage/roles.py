"""Addresses and roles of nodes, apart from the other values because every command that reads settings loads them."""

from __future__ import annotations

from dataclasses import dataclass

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a node (upstream: `process.roles`), and the listeners on which it answers as a controller."""

    is_broker: bool = True
    """True if the node leads partitions, coordinates groups and serves clients."""
    is_controller: bool = True
    """True if the node does background work that one node does for all."""
    controller_listeners: tuple[str, ...] = ()
    """Listener names."""


BOTH = Roles()
