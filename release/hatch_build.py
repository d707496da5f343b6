"""The wheel's layout: the rooms of the checkout lie in `sluice/_rooms`.

The one idea: this mapping exists in a built wheel only. An editable install points at the checkout, where the rooms
are top-level directories.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("gateway", "pipeline", "protocol", "storage")


class Layout(BuildHookInterface[Any]):
    """Add the rooms to a wheel that is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update({room: f"sluice/_rooms/{room}" for room in ROOMS})
