"""Types of byte strings: those that readers accept and those that writers return."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
