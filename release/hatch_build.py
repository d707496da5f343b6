"""The wheel's layout: the rooms (top-level packages of the program) are in `sluice/_rooms`.

The one idea: this mapping exists in a built wheel only. An editable install points at the checkout, where the rooms
are top-level directories.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("gateway", "pipeline", "protocol", "storage")


class Layout(BuildHookInterface[Any]):
    """Adds the rooms to a wheel, unless the wheel is editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update({room: f"sluice/_rooms/{room}" for room in ROOMS})
