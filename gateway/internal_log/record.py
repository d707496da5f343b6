"""What stands in an internal topic, between who says what is so and who writes it.

The one idea: a key and what it is to say. Nothing is known here of kinds and fields.
"""

from __future__ import annotations

from typing import Final


class Unsettled:
    """In the place of a value: what stands in the log is to stand."""


UNSETTLED: Final = Unsettled()

Entry = tuple[bytes, bytes | Unsettled]
"""Key and value."""
