"""An entry of an internal topic, exchanged between the sources of state and the writer.

The one idea: an entry is a key and a value. This module knows nothing of record kinds and fields.
"""

from __future__ import annotations

from typing import Final


class Unsettled:
    """Marks a value whose record in the log must not change now."""


UNSETTLED: Final = Unsettled()

Entry = tuple[bytes, bytes | Unsettled]
"""A key and its value."""
